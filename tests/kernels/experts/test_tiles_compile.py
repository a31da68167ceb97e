"""The products inside exchanges compile for Hopper with the Triton that is installed, and their waits and signals stand
where they have to: the interpreter runs programs one after the other and reads what is there."""

from __future__ import annotations

import re

from tests.support.compiled import output_of_compiler

WAITS_BEFORE_IT_READS = re.compile(r"sys acquire, sync, (sys acquire, sync, )*cp\.async\.cg.*wgmma")
SIGNALS_BEHIND_ITS_WRITES = re.compile(r"sync, sys release")
COUNTS_BEHIND_ITS_WRITES = re.compile(r"sync, gpu release")
WAITS_FOR_TILES = re.compile(r"gpu acquire, sync, .*sys release")


def test_what_waits_reads_behind_its_wait_and_what_signals_has_written():
    lines = dict(line.split(": ", 1) for line in output_of_compiler("compile_tiles").splitlines() if ": " in line)
    assert len(lines) == 9
    for name, events in lines.items():
        sends, multiplies = "SENDS" in name, "MULTIPLIES" in name
        arrives = name.startswith("arriving")
        assert ("wgmma" in events) == multiplies, name
        assert bool(SIGNALS_BEHIND_ITS_WRITES.search(events)) == sends, name
        assert bool(WAITS_BEFORE_IT_READS.search(events)) == (multiplies and arrives), name
        assert bool(COUNTS_BEHIND_ITS_WRITES.search(events)) == (multiplies and not arrives), name
        assert bool(WAITS_FOR_TILES.search(events)) == (sends and not arrives), name

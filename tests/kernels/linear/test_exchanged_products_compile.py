"""The dense products inside exchanges compile for Hopper with the Triton that is installed, and their waits and signals
stand where they have to: the interpreter runs programs one after the other and reads what is there."""

from __future__ import annotations

import re

from tests.support.compiled import output_of_compiler

WAIT = r"sys acquire, sync, (sys acquire, sync, )*"
READS_ROWS_BEHIND_ITS_WAIT = re.compile(WAIT + r"cp\.async\.cg.*wgmma")
ORDERS_COPIES_BEHIND_ITS_WAIT = re.compile(WAIT + r"fence\.proxy\.async, sync, cp\.async\.bulk\.tensor.*wgmma")
SIGNALS_BEHIND_ITS_WRITES = re.compile(r"sync, sys release")
MULTIPLIES_BEFORE_IT_WAITS = re.compile(r"wgmma.*sys acquire.*sys release")
WAITS_BEHIND_ALL_IT_SENDS = re.compile(r"wgmma.*sys release.*sys acquire")
COPIES_BEHIND_ITS_WAIT = re.compile(r"^[^l]*acquire, barrier, load")
READERS = ("gathered_product_kernel", "from_heads_kernel")  # of what arrives


def test_what_waits_reads_behind_its_wait_and_what_signals_has_written():
    lines = dict(line.split(": ", 1) for line in output_of_compiler("compile_projections").splitlines() if ": " in line)
    copies = {name: events for name, events in lines.items() if name.startswith("copies of")}
    kernels = {name: events for name, events in lines.items() if name not in copies}
    assert (len(kernels), len(copies)) == (30, 4)
    for name, events in kernels.items():
        kernel, *parts = name.split()
        reads = kernel in READERS
        sends, multiplies, described = (part in parts for part in ("SENDS", "MULTIPLIES", "DESCRIBED"))
        assert ("wgmma" in events) == multiplies, name
        assert ("bulk" in events) == (multiplies and described), name
        assert bool(SIGNALS_BEHIND_ITS_WRITES.search(events)) == sends, name
        assert bool(READS_ROWS_BEHIND_ITS_WAIT.search(events)) == (reads and multiplies and not described), name
        assert bool(ORDERS_COPIES_BEHIND_ITS_WAIT.search(events)) == (reads and multiplies and described), name
        sums = kernel.startswith("scattered") and sends and multiplies
        assert bool(MULTIPLIES_BEFORE_IT_WAITS.search(events)) == sums, name
        assert WAITS_BEHIND_ALL_IT_SENDS.search(events) or "KEEPS" not in parts, name
    for name, events in copies.items():
        assert COPIES_BEHIND_ITS_WAIT.search(events), name

"""Updates of AdamW and Muon compile for Hopper, without a GPU; that with 8-bit moments to wide accesses and few
instructions."""

from __future__ import annotations

import re

from tests.support.compiled import output_of_compiler


def test_the_update_with_8_bit_moments_has_wide_accesses_and_few_instructions():
    """At 85 % of an H200's copy bandwidth, 10 bytes an element leave time for about 80 instructions each."""
    printed = output_of_compiler("compile_adamw")
    assert len(re.findall("lines of PTX", printed)) == 14
    # two loads of weights and two of gradients, one of each moment
    assert "16 elements a thread: 6 loads and 4 stores of 16 bytes" in printed
    found = re.search(r"([\d.]+) instructions", printed)
    assert found
    assert float(found[1]) < 75

"""Kernels of quantisation compile for Hopper with the Triton that is installed, and round as the reference does."""

from __future__ import annotations

import re

from tests.support.compiled import output_of_compiler

LINE = re.compile(
    r"(.+): (\d+) casts, (\d+) stored and split, (\d+) stores of 16 bytes, (\d+) operations without IEEE rounding"
)


# Products of powers of two: a sum that takes them in rounds once all the same.
EXACT_BEFORE_SUMS = {"micro NVFP4, 16 lines, random None"}


def test_every_kernel_compiles_with_the_cast_of_the_gpu_whole_stores_and_ieee_rounding():
    lines = output_of_compiler("compile_quantise").splitlines()
    assert len(lines) == 81
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line
        name, casts, torn, stores, rough = found.groups()
        division = 3 if name.startswith("weight blocks, Gluon") else 0  # two of its correction, and NaN (fp8_hopper.py)
        if name.startswith("quantise delayed, Gluon"):  # reciprocals, of four operations with their correction
            assert int(rough) % 4 == 0, line
        elif name not in EXACT_BEFORE_SUMS:
            assert int(rough) == division, line
        assert int(torn) == 0, line  # tests/support/compile_quantise.py says what becomes of these
        if name.startswith(("push rows", "pop rows", "base ")):
            assert int(stores) >= 2, line
        if name.startswith(("quantise", "weight")) and "maxima" not in name:
            assert int(casts) >= 16, line
            assert int(stores) >= 2, line

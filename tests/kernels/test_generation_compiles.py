"""Kernels of generation and of largest logits compile for Hopper with the Triton that is installed, and products
read ahead."""

from __future__ import annotations

import re

from tests.support.compiled import output_of_compiler

LINE = re.compile(r"(.+): (\d+) copies to shared memory, (\d+) products")


def test_every_kernel_compiles_and_what_is_multiplied_is_copied_ahead():
    lines = output_of_compiler("compile_generation").splitlines()
    assert len(lines) == 15
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line
        name, copies, products = found.groups()
        if ("rows" in name and "block" not in name) or "heads," in name or name == "latents" or "bf16" in name:
            assert int(products) > 0, line
        if int(products):
            least = 36 if name.startswith("largest logits") else 40
            assert int(copies) >= least, line

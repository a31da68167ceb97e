"""Kernels of generation and of largest logits compile for Hopper with the Triton that is installed, and products
read ahead."""

from __future__ import annotations

import re

import pytest

from tests.support.compiled import output_of_compiler

LINE = re.compile(r"(.+): (\d+) copies to shared memory, (\d+) products")


SUMS = re.compile(r"sums over \d+ experts: (.+) of few tokens, (.+) of many")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return output_of_compiler("compile_generation").splitlines()


def test_the_router_sums_in_the_same_order_for_few_tokens_and_for_many(lines: list[str]):
    """Thus with the same bits."""
    sums = [found.groups() for line in lines if (found := SUMS.fullmatch(line))]
    assert len(sums) == 6
    for few, many in sums:
        assert few == many != "[]"


def test_every_kernel_compiles_and_what_is_multiplied_is_copied_ahead(lines: list[str]):
    kernels = [line for line in lines if not SUMS.fullmatch(line)]
    assert len(kernels) == 16
    for line in kernels:
        found = LINE.fullmatch(line)
        assert found, line
        name, copies, products = found.groups()
        if ("rows" in name and "block" not in name) or "heads," in name or name == "latents" or "bf16" in name:
            assert int(products) > 0, line
        if int(products):
            least = 36 if name.startswith("largest logits") else 40
            if name == "16 rows":
                least = 32  # of one loop, which all layers share
            assert int(copies) >= least, line

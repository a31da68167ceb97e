"""Gluon kernels compile for Hopper with the Triton that is installed, and their products are on tensor cores."""

from __future__ import annotations

from tests.support.compiled import output_of_compiler


def test_every_gluon_kernel_compiles_to_products_on_tensor_cores():
    lines = output_of_compiler("compile_gluon").splitlines()
    assert len(lines) == 55
    for line in lines:
        if line.startswith("SwiGLU"):  # no product
            continue
        products = int(line.rsplit(": ")[1].split()[0])
        assert products >= 8, line

"""moefold.ops: single operations, bound for the tensors at hand."""

from __future__ import annotations

import pytest
import torch

import moefold
from moefold.config.errors import UserError
from moefold.kernels.catalog import CATALOG
from moefold.kernels.registry import import_every_op


def test_every_op_of_the_catalog_is_there_and_others_are_refused_with_the_nearest():
    assert dir(moefold.ops) == sorted(CATALOG)
    with pytest.raises(UserError, match="swiglu"):
        moefold.ops.swigl(torch.ones(2))


@pytest.mark.parametrize("name", ["swiglu", "rmsnorm", "attention", "grouped_gemm", "expert_mlp"])
def test_a_call_gives_what_the_reference_gives(name: str):
    op = import_every_op()[name]
    for case in op.cases("cpu", torch.float32):
        mine = getattr(moefold.ops, name)(*case.inputs)
        expected = op.reference(*case.inputs)
        torch.testing.assert_close(case.defined(mine), case.defined(expected), rtol=1e-4, atol=1e-5)

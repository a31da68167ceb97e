"""Calls of a tape in two parts: the bits of the whole call, whichever part runs first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moefold.kernels.experts.grouped_gemm import multiply_into
from moefold.kernels.optimizer.adamw import adamw_fused
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.memory.call_halves import call_in_halves, range_of, touched_by
from moefold.memory.tape import PlannedCall, run_calls

aten = torch.ops.aten


def seeded(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


def silu() -> tuple[PlannedCall, list[Tensor]]:
    out = torch.zeros(2048, 192)
    pairs = seeded(2048, 2, 192)
    return PlannedCall(aten.silu.out, (pairs[:, 0],), {"out": out}), [out]


def causal_attention() -> tuple[PlannedCall, list[Tensor]]:
    q, k, v = (seeded(4, 128, heads, 32).transpose(1, 2) for heads in (4, 2, 2))
    function = aten._scaled_dot_product_flash_attention_for_cpu.default
    outputs = [torch.zeros_like(x) for x in function(q, k, v, 0.0, True)]
    return PlannedCall(function, (q, k, v, 0.0, True), {}, outputs), outputs


def product(sums_rows: bool) -> tuple[PlannedCall, list[Tensor]]:
    ends = torch.tensor([100, 100, 700, 990])
    rows = seeded(1000, 32)
    if sums_rows:
        out = torch.zeros(4, 24, 32)
        return PlannedCall(multiply_into, (out, seeded(1000, 24).t(), rows, ends), {}), [out]
    out = torch.ones(1000, 48)
    return PlannedCall(multiply_into, (out, rows, seeded(4, 32, 48), ends), {}), [out]


def update() -> tuple[PlannedCall, list[Tensor]]:
    n = 100_003
    options = AdamWOptions(0.9, 0.95, 1e-8, 0.1)
    main, mean = seeded(n), seeded(n) / 10
    square = mean**2
    scalars = torch.tensor(adamw_scalars(3, 1e-3, options, 0), dtype=torch.float64)
    states = (main, seeded(n), mean, square, None)
    return PlannedCall(adamw_fused, (*states, torch.tensor(0.5), scalars, options, 0), {}), [main, mean, square]


CALLS = {
    "an activation": silu,
    "attention": causal_attention,
    "a product": lambda: product(False),
    "a product over rows": lambda: product(True),
    "an update": update,
}


@pytest.mark.parametrize("name", CALLS)
def test_two_parts_in_any_order_give_the_bits_of_the_whole(name: str):
    whole, expected = CALLS[name]()
    run_calls([whole.prepared()])
    for order in (1, -1):
        call, found = CALLS[name]()
        halves = call_in_halves(call)
        assert len(halves) == 2
        run_calls([half.prepared() for half in halves[::order]])
        assert all(map(torch.equal, found, expected))


def test_small_calls_and_those_of_which_parts_depend_on_each_other_stay_whole():
    small = torch.zeros(16, 8)
    for call in (
        PlannedCall(aten.silu.out, (small,), {"out": small}),
        PlannedCall(aten.cumsum.out, (seeded(2048, 192), 0), {"out": torch.zeros(2048, 192)}),
    ):
        assert call_in_halves(call) == [call]


def test_attention_with_one_mask_for_as_many_sequences_as_queries_stays_whole():
    q, k, v = (seeded(64, 2, 64, 32) for _ in range(3))
    mask = torch.zeros(64, 64)
    function = aten._scaled_dot_product_flash_attention_for_cpu.default
    outputs = [torch.zeros_like(x) for x in function(q, k, v, 0.0, False, attn_mask=mask)]
    for form, count in ((mask, 1), (mask.expand(64, 1, 64, 64), 2)):
        call = PlannedCall(function, (q, k, v, 0.0, False), {"attn_mask": form}, outputs)
        assert len(call_in_halves(call)) == count


def test_a_call_reads_its_inputs_and_writes_its_outputs():
    call, (out,) = silu()
    touched = touched_by(call)
    (x,) = call.args
    assert touched.reads == [range_of(x)]
    assert touched.writes == [range_of(out)]
    assert range_of(x)[1] - range_of(x)[0] == (2047 * 384 + 192) * 4


def test_a_product_writes_its_result_alone():
    call, (out,) = product(False)
    touched = touched_by(call)
    assert touched.writes == [range_of(out)]
    assert len(touched.reads) == 3

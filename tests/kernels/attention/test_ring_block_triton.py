"""Blocks of ring attention in Triton against their references, by Triton's interpreter; on a GPU test_every_op.py does
it, in bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.attention import masked_triton
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward, share_of_sum
from moefold.kernels.attention.ring_block_triton import merge_block
from moefold.kernels.registry import KernelCase, KernelOp, map_tensors, seeded_randn

GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(GPU, reason="products of fp32 are rounded on a GPU")


BOTH = [attention_block, attention_block_backward]


def small_cases(op: KernelOp) -> list[KernelCase]:
    return [case for case in op.cases("cpu", torch.float32) if not case.name.startswith(("1x2", "2x200", "1x192"))]


def changed(op: KernelOp, implementation: str, case: KernelCase) -> list[Any]:
    inputs = map_tensors(case.inputs, torch.clone)
    assert op.implementations[implementation](*inputs) is None
    return inputs


@pytest.fixture(params=[(16, 16), (16, 64)], ids=str)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    options = masked_triton.TileOptions(*request.param, 4, 2)
    monkeypatch.setattr(masked_triton, "NARROW", [options] * 3)


@interpreted
@pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in BOTH for case in small_cases(op)],
)
def test_sums_equal_those_of_the_reference_and_inputs_are_left_alone(op: KernelOp, case: KernelCase, tiles: None):
    torch.testing.assert_close(changed(op, "triton", case), changed(op, "reference", case), rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_query_heads_of_a_program_change_nothing_but_the_order_of_sums(heads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masked_triton, "TURN_HEADS", heads)
    grouped = [case for case in small_cases(attention_block_backward) if "4/1" in case.name]
    assert grouped
    for case in grouped:
        found, wanted = (changed(attention_block_backward, name, case) for name in ("triton", "reference"))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("op", BOTH, ids=lambda op: op.name)
def test_two_runs_of_an_odd_block_give_the_same_bits(op: KernelOp):
    odd = [case for case in small_cases(op) if "x33" in case.name or "x17" in case.name or "x19" in case.name]
    assert len(odd) == 8, "on the diagonal, fresh too, wholly visible, at the end of a window; each with documents too"
    for case in odd:
        first, again = (changed(op, "triton", case) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if isinstance(a, torch.Tensor)), (
            case.name
        )


@interpreted
@pytest.mark.parametrize("fresh", [False, True])
def test_a_block_within_longer_tensors_changes_its_own_part_alone(fresh: bool):
    b, s, h, g, d, v = 2, 9, 4, 2, 8, 6
    q, k, y = ((2 * s, *x) for x in ((h, d), (g, d), (h, v)))
    draw = partial(seeded_randn, "cpu", torch.float32, b)
    heads = [draw(*x, seed=i) for i, x in enumerate((y, q, k, (2 * s, g, v), y))]
    dy, query, key, value, result = (x[:, s:] for x in heads)
    begins = torch.tensor([[-3] * 4 + [4] * 5, [0] * 9], dtype=torch.int32)
    mask = (d**-0.5, 0, 0, begins, fresh)

    def sums(implementation: str) -> list[torch.Tensor]:
        out, lse = draw(*y, seed=5), draw(h, 2 * s, seed=6)
        part = lse[..., s:]
        attention_block.implementations[implementation](out[:, s:], part, query, key, value, *mask)
        dq, joined, delta = draw(*q, seed=7), draw(2 * s, g, d + v, seed=8), draw(h, 2 * s, seed=9)
        dk, dv = joined[:, s:].split([d, v], dim=-1)
        into = (dq[:, s:], dk, dv, delta[..., s:])
        add = attention_block_backward.implementations[implementation]
        add(*into, dy, query, key, value, result, part, *mask)
        return [out, lse.mT, dq, joined, delta.mT]

    found, wanted = sums("triton"), sums("reference")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    before = [draw(*y, seed=5), draw(h, 2 * s, seed=6), draw(*q, seed=7)]
    assert torch.equal(found[0][:, :s], before[0][:, :s])
    assert torch.equal(found[1].mT[..., :s], before[1][..., :s])
    assert torch.equal(found[2][:, :s], before[2][:, :s])


@interpreted
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("b", "s", "h", "width"), [(1, 1, 1, 8), (2, 33, 4, 24), (1, 130, 6, 128)])
def test_a_merge_is_the_softmax_over_both_sets_of_keys_and_reads_no_result_before_it_is_there(
    b: int, s: int, h: int, width: int, fresh: bool
):
    draw = partial(seeded_randn, "cpu", torch.float32, b)
    part, out = draw(s, h, width), draw(2 * s, h, width, seed=1)[:, s:]
    lse, part_lse = (draw(h, 2 * s, seed=seed, scale=4.0)[..., s:] for seed in (2, 3))
    for x in (lse, part_lse):  # of queries that have seen no key
        x.masked_fill_(x < -1, -torch.inf)
    joint = torch.logaddexp(lse, part_lse)
    if fresh:
        out.zero_()
    expected = out * share_of_sum(lse, joint) + part * share_of_sum(part_lse, joint)
    if fresh:
        out.fill_(torch.nan)
    merge_block(out, lse, part, part_lse, fresh)
    torch.testing.assert_close((out, lse), (expected, joint), rtol=1e-5, atol=1e-6)

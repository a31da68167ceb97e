"""However a batch is split over ranks and microbatches, the gradient is that of the whole batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moefold.anatomy.model_totals import total_parameters
from moefold.comm import byte_counters
from moefold.comm.collectives import all_gather_no_grad
from moefold.comm.grad_reduce import reduce_scatter_bf16, reduce_scatter_fp32
from moefold.config.run import AttentionConfig, BalanceConfig, ModelConfig, MoeConfig, OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import Facts
from moefold.kernels.registry import DTYPES
from moefold.layout.axes import World, single_rank_world
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.optim.optimizer import build_optimizer
from moefold.shard.buckets import ALIGNMENT, fill_buckets
from moefold.shard.gradients import Gradients
from moefold.shard.storage import storage_maker
from moefold.train.assemble import default_dtype
from tests.support.models import transformer
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=40,
    dense_ffn=24,
    init_std=0.2,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, shared_ffn=8, dense_layers=1, balance=BalanceConfig(aux_loss=0.1)),
)
WIDE = replace(
    MODEL,
    hidden=64,
    attention=replace(MODEL.attention, kv_heads=2),
    moe=replace(MODEL.moe, ffn=64, shared_ffn=64),
)
LENGTH, SEQUENCES, MAX_NORM = 6, 7, 0.05
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}


def make(dtype: str, model: ModelConfig = MODEL, world: World | None = None) -> Transformer:
    with default_dtype(DTYPES[dtype]):
        made = transformer(model, LENGTH, BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16)), world)
    initialise_parameters(made, seed=1)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(MODEL.vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = rows[:, 1:].clone()
    labels[2, 3:] = -100  # ranks hold different numbers of counted tokens
    return rows[:, :-1], labels


def own_sequences(world: World) -> slice:
    """This rank's sequences of seven: an uneven share."""
    dp = world.axis("dp")
    return slice(SEQUENCES * dp.index // dp.size, SEQUENCES * (dp.index + 1) // dp.size)


def one_step(world: World, dtype: str, micro: tuple[int, ...]) -> dict[str, Any]:
    """Gradients before and after clipping, by name, and the norm; rank r takes microbatches of micro[r]."""
    model = make(dtype, world=world)
    buckets = fill_buckets(model, world)
    gradients = Gradients(buckets, world)
    gradients.begin()
    tokens, labels = (x[own_sequences(world)] for x in batch())
    size = micro[world.rank % len(micro)]
    parts = list(zip(tokens.split(size), labels.split(size), strict=True))
    for number, (t, y) in enumerate(parts, start=1):
        losses = model(t, y)
        if number == len(parts):
            gradients.expect_last_gradients(set(gradients.number_of))
        (losses.cross_entropy + losses.balance).backward()
    gradients.finish((batch()[1] >= 0).sum())

    def named() -> dict[str, np.ndarray]:
        flats = [all_gather_no_grad(x, b.replicas) for x, b in zip(gradients.gradient_shares(), buckets, strict=True)]
        return {
            p.name: view.clone().numpy()
            for b, flat in zip(buckets, flats, strict=True)
            for p, view in b.parameter_views(flat)
        }

    before = named()
    norm = gradients.clip(MAX_NORM).item()
    return {"gradients": before, "norm": norm, "clipped": named()}


def whole(dtype: str) -> dict[str, Any]:
    """The same by plain autograd on the whole batch, without buckets."""
    model = make(dtype)
    tokens, labels = batch()
    losses = model(tokens, labels)
    (losses.cross_entropy + losses.balance).backward()
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / (labels >= 0).sum()
    before = {name: p.grad.clone().numpy() for name, p in parameters.items() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM).item()
    after = {name: p.grad.numpy() for name, p in parameters.items() if p.grad is not None}
    return {"gradients": before, "norm": norm, "clipped": after}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["norm"] == pytest.approx(expected["norm"], rel=tolerance)
    for kind in ("gradients", "clipped"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            off = np.linalg.norm(found[kind][name] - value) / np.linalg.norm(value)
            assert off <= tolerance, f"{kind} of {name}: off by {off:.1e}"


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("micro", [(7,), (1,), (3,)])
def test_microbatches_add_up_to_the_whole_batch(dtype: str, micro: tuple[int, ...]):
    assert_same(one_step(single_rank_world(), dtype, micro), whole(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(("size", "micro"), [(2, (2, 1)), (4, (1, 2, 2, 1))])
def test_any_number_of_ranks_gives_the_gradient_the_norm_and_the_clipping_of_one(dtype, size, micro):
    expected = whole(dtype)
    assert expected["norm"] > MAX_NORM, "clipping takes part"
    results = run_ranks(one_step, size, dtype, micro)
    for result in results:
        assert_same(result, expected, TOLERANCE[dtype])
        assert result["norm"] == results[0]["norm"], "every rank has the same norm to the bit"
        for name, value in result["clipped"].items():
            assert np.array_equal(value, results[0]["clipped"][name]), name


def ready(model: Transformer) -> Gradients:
    return Gradients(fill_buckets(model, single_rank_world()), single_rank_world())


def test_the_norm_counts_dense_and_expert_parameters_each_element_once():
    gradients = ready(make("fp32"))
    for bucket in gradients.buckets:
        for _, view in bucket.parameter_views(bucket.gradients):
            view.fill_(2.0)
    elements = {b.placement.grid: 0 for b in gradients.buckets}
    for bucket in gradients.buckets:
        elements[bucket.placement.grid] += sum(p.tensor.numel() for p in bucket.parameters)
    assert elements["expert"] > 0
    assert gradients.norm().item() == pytest.approx(2 * sum(elements.values()) ** 0.5, rel=1e-6)


def filled_norm(world: World) -> float:
    gradients = Gradients(fill_buckets(make("fp64", WIDE, world), world), world)
    for bucket in gradients.buckets:
        for _, view in bucket.parameter_views(bucket.gradients):
            view.fill_(1.0)
    return gradients.norm().item()


def test_the_norm_does_not_grow_with_the_number_of_replicas():
    (expected,) = run_ranks(filled_norm, 1)
    for parallel in ({}, {"tp": 2, "ep": 2, "etp": 2}):
        found = run_ranks(filled_norm, 4, **parallel)
        assert found == [found[0]] * 4, "every rank has the same norm to the bit"
        assert found[0] == pytest.approx(expected, rel=1e-13)


def test_a_short_gradient_is_not_scaled_and_a_long_one_ends_at_the_limit():
    gradients = ready(make("fp64"))
    for bucket in gradients.buckets:
        bucket.gradients.fill_(1e-3)
    before = list(gradients.gradient_shares())
    norm = gradients.norm().item()
    assert gradients.clip(norm * 2).item() == norm
    assert all(torch.equal(a, b) for a, b in zip(before, gradients.gradient_shares(), strict=True))
    assert gradients.clip(norm / 4).item() == norm
    assert gradients.norm().item() == pytest.approx(norm / 4, rel=1e-4)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_leaves_no_scale_to_apply_it_with(value: float):
    gradients = ready(make("fp32"))
    gradients.buckets[0].gradients[5] = value
    assert not gradients.clip(1.0).isfinite()
    assert gradients.scales[""].isnan()


def test_finished_gradients_live_in_the_buckets_only_and_begin_empties_them():
    model = make("fp32")
    gradients = ready(model)
    losses = model(*batch())
    (losses.cross_entropy + losses.balance).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(b.gradients.abs().sum() > 0 for b in gradients.buckets)
    gradients.begin()
    assert all((b.gradients == 0).all() for b in gradients.buckets)


def test_microbatches_of_a_bf16_model_add_up_in_fp32():
    model = make("bf16", replace(MODEL, moe=replace(MODEL.moe, balance=replace(MODEL.moe.balance, aux_loss=0.0))))
    gradients = ready(model)
    (bucket, *_) = [b for b in gradients.buckets if any(p.name == "head.norm.weight" for p in b.parameters)]
    parameter = dict(model.named_parameters())["head.norm.weight"]
    for _ in range(300):  # 256 + 1 is 256 in bf16
        parameter.sum().backward()
    view = next(v for p, v in bucket.parameter_views(bucket.gradients) if p.name == "head.norm.weight")
    assert (view == 300).all()


def optimizer_bytes(world: World, moments: str, main: str) -> tuple[int, int, int, int]:
    """On this rank: bytes of optimizer state, elements of its shares, of these parameters, and the alignment's most."""
    model = make("bf16", WIDE, world)
    buckets = fill_buckets(model, world, storage=storage_maker(main))
    kernels = BoundKernels(Facts("cpu", "bf16", hidden=64, ffn=64))
    optimizer = build_optimizer(buckets, OptimConfig(moments=moments, main=main), kernels)  # pyright: ignore[reportArgumentType]
    state = [values for share in optimizer.shares for values in share.state.values()]
    state += [share.storage.fused_operands().main for share in optimizer.shares]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state}
    assert sum(held.values()) == sum(optimizer.bytes().values())
    elements = sum(b.share.stop - b.share.start for b in buckets)
    own = sum(last - first for b in buckets for _, first, last, _ in b.pieces())
    return sum(held.values()), elements, own, ALIGNMENT * sum(len(b.parameters) + 1 for b in buckets)


@pytest.mark.parametrize(("moments", "main", "each"), [("fp32", "fp32", 12), ("bf16", "fp32", 8), ("bf16", "split", 6)])
@pytest.mark.parametrize("parallel", [{}, {"ep": 2}, {"tp": 2, "etp": 2}, {"cp": 4, "ep": 4}], ids=str)
def test_a_rank_holds_its_share_of_the_optimizer_state_and_no_more(
    parallel: dict[str, int], moments: str, main: str, each: int
):
    """Main weights and two moments: 12 bytes a parameter, 8 with moments in bf16, 6 with halves, over the 4 ranks."""
    whole = total_parameters(WIDE)
    found = run_ranks(optimizer_bytes, 4, moments, main, **parallel)
    assert sum(own for _, _, own, _ in found) == whole, "every element is held once"
    for held, elements, _, padding in found:
        assert held == each * elements
        assert each * whole / 4 <= held <= each * (whole / 4 + padding)
        assert padding < 0.2 * whole / 4, "so the bound means something"


RANKS = 8


def travelled(world: World) -> dict[str, Any]:
    """Eight ranks' gradients summed both ways, with the bytes that left."""
    xs = [torch.randn(RANKS * 512, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    found = {}
    for name, reduce in (("fp32", reduce_scatter_fp32), ("bf16", reduce_scatter_bf16)):
        with byte_counters.counted_bytes_sent() as sent:
            x = xs[world.rank].clone()
            share = reduce(x, world.everyone).arrived()
        found[name] = (share, dict(sent))
    return found


def ring_sum(xs: list[torch.Tensor]) -> torch.Tensor:
    """What a ring in bf16 gives: each part is added to on its way round, and rounded at every hop."""
    parts = []
    for number in range(len(xs)):
        travelling = [x.chunk(len(xs))[number].bfloat16() for x in xs]
        travelling = travelling[number + 1 :] + travelling[: number + 1]  # it ends at its owner
        total = travelling[0]
        for x in travelling[1:]:
            total = total + x
        parts.append(total)
    return torch.cat(parts)


def test_gradients_as_bf16_take_half_the_bytes_and_lose_less_than_a_bf16_ring():
    xs = [torch.randn(RANKS * 512, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    exact = torch.stack(xs).double().sum(0)
    results = run_ranks(travelled, RANKS)
    for result in results:
        assert result["bf16"][0].dtype == torch.float32
        (wide,), (narrow,) = result["fp32"][1].values(), result["bf16"][1].values()
        assert narrow * 2 == wide == RANKS * 512 * 4 * (RANKS - 1) // RANKS
    fp32, bf16 = (torch.cat([r[name][0] for r in results]).double() for name in ("fp32", "bf16"))
    ring = ring_sum(xs).double()
    off = {
        name: ((x - exact).norm() / exact.norm()).item() for name, x in (("fp32", fp32), ("bf16", bf16), ("ring", ring))
    }
    assert off["fp32"] < 1e-6
    assert off["bf16"] < 0.6 * off["ring"]
    assert off["bf16"] < 2**-9, "a single rounding of each summand"


def leaving(world: World, most: int, microbatches: int) -> tuple[list[tuple[str, int]], int, list[int]]:
    """How many buckets were under way whenever a gradient of the last backward was finished; how many there are; how
    many were under way before it."""
    model = make("fp32", world=world)
    gradients = Gradients(fill_buckets(model, world, most), world)
    fired: list[tuple[str, int]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: fired.append((n, len(gradients.reductions))))
    tokens, labels = (x[own_sequences(world)] for x in batch())
    gradients.begin()
    before = []
    for number in range(microbatches):
        fired.clear()
        losses = model(tokens, labels)
        if number == microbatches - 1:
            gradients.expect_last_gradients(set(gradients.number_of))
        before.append(len(gradients.reductions))
        (losses.cross_entropy + losses.balance).backward()
    done = list(fired)
    gradients.finish((batch()[1] >= 0).sum())
    return done, len(gradients.buckets), before


def test_buckets_leave_while_backward_goes_on_in_the_last_microbatch_only():
    for fired, buckets, before in run_ranks(leaving, 2, 200, 2):
        assert buckets > 10
        assert before == [0, 0], "the first microbatch sends nothing"
        first_layer = [under_way for name, under_way in fired if name.startswith("blocks.0.")]
        assert first_layer[0] > 0, "what the second layer and the head finished is on its way"
        assert first_layer[-1] > first_layer[0]
        assert [n for _, n in fired] == sorted(n for _, n in fired)


def travelled_bf16(world: World) -> tuple[torch.Tensor, dict[tuple[str, ...], int]]:
    x = torch.randn(RANKS * 64, generator=torch.Generator().manual_seed(world.rank)).bfloat16()
    with byte_counters.counted_bytes_sent() as sent:
        share = reduce_scatter_bf16(x, world.everyone).arrived()
    return share, dict(sent)


def test_gradients_kept_as_bf16_are_summed_over_ranks_in_fp32():
    xs = [torch.randn(RANKS * 64, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(RANKS)]
    results = run_ranks(travelled_bf16, RANKS)
    found = torch.cat([share for share, _ in results])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(xs).float().sum(0), rtol=1e-6, atol=1e-6)
    assert all(list(sent.values()) == [RANKS * 64 * 2 * (RANKS - 1) // RANKS] for _, sent in results)

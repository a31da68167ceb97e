"""Main weights in fewer bits: how far 500 steps drift, what replicas and checkpoints make of them, and their bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from moefold.checkpoint.live.logical_tensors import as_tensor_part, collect_tensors
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.kernels.optimizer.state_blocks import CODE_DTYPES, STATE_BLOCK, decode_blocks, encode_blocks
from moefold.layout.axes import World, single_rank_world
from moefold.model.initialise import initialise_parameters
from moefold.optim.optimizer import Optimizer, build_optimizer
from moefold.plan.memory.resident import MAIN_WEIGHT_BYTES
from moefold.shard.block_values import values_in_blocks
from moefold.shard.buckets import Bucket, fill_buckets
from moefold.shard.publish import Publisher
from moefold.shard.storage import storage_maker
from moefold.train.assemble import default_dtype
from tests.optim.test_adamw import OPTIM, copied, make, make_both, named, put_gradients, torch_optimizer
from tests.shard.test_publish import LENGTH, MODEL
from tests.support.models import transformer
from tests.support.ranks import run_ranks

OPTIONS = AdamWOptions(0.9, 0.95, 1e-8, 0.0)
STEPS = 500
LEARNING_RATES = (1e-3, 1e-4, 1e-5)
Kind = tuple[str, bool]  # type, and whether it is rounded stochastically


def first_weights(n: int) -> torch.Tensor:
    return 0.02 * torch.randn(n, generator=torch.Generator().manual_seed(0))


class Trial:
    """Weights as an update keeps them: fp32, bf16 or in blocks, with fp32 moments."""

    def __init__(self, kind: str, stochastic: bool, n: int):
        self.options = OPTIONS._replace(stochastic_main=stochastic)
        self.main, self.scales = first_weights(n), None
        if kind == "bf16":
            self.main = round_to_nearest(self.main, torch.bfloat16)
        elif kind != "fp32":
            self.main, self.scales = encode_blocks(self.main, CODE_DTYPES[kind][0], is_second=False)
        self.moments = (torch.zeros(n), torch.zeros(n))

    def update(self, g: torch.Tensor, scalars: torch.Tensor) -> None:
        one = torch.ones((), dtype=torch.float64)
        state = (self.main, g, *self.moments, None)
        adamw(*state, one, scalars, self.options, 0, None, None, self.scales)

    def values(self) -> torch.Tensor:
        if self.scales is None:
            return self.main.float()
        return decode_blocks(self.main, self.scales, is_second=False)


def drift_after_500_steps(kinds: list[Kind], lr: float) -> dict[Kind, float]:
    """How far weights end from fp32 ones, as a share of the way that these went."""
    n = 16 * STATE_BLOCK
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(torch.randn(n, generator=generator)) * 1e-4
    trend = 0.3 * torch.randn(n, generator=generator)
    exact, trials = Trial("fp32", False, n), {kind: Trial(*kind, n) for kind in kinds}
    for step in range(1, STEPS + 1):
        g = spread * (trend + torch.randn(n, generator=generator))
        scalars = torch.tensor(adamw_scalars(step, lr, OPTIONS, seed=step), dtype=torch.float64)
        for trial in (exact, *trials.values()):
            trial.update(g, scalars)
    way = (exact.values() - first_weights(n)).norm()
    return {kind: ((trial.values() - exact.values()).norm() / way).item() for kind, trial in trials.items()}


BOUNDS: dict[Kind, tuple[float, float, float]] = {  # at each learning rate
    ("bf16", True): (0.05, 0.1, 0.35),
    ("fp16", True): (0.006, 0.015, 0.12),
    ("int8", True): (0.15, 0.3, 1.0),
    ("fp8", True): (0.25, 0.45, 1.5),
}
NEAREST: list[Kind] = [("bf16", False), ("fp16", False), ("int8", False), ("fp8", False)]


@lru_cache(maxsize=1)
def drifts() -> list[dict[Kind, float]]:
    kinds = [*BOUNDS, *NEAREST]
    found = [drift_after_500_steps(kinds, lr) for lr in LEARNING_RATES]
    for kind in kinds:
        print(kind, *(f"{each[kind]:.4f}" for each in found))
    return found


@pytest.mark.parametrize("kind", BOUNDS)
def test_the_error_of_500_steps_against_fp32_main_weights_is_bounded(kind: Kind):
    for bound, found in zip(BOUNDS[kind], drifts(), strict=True):
        assert found[kind] < bound


@pytest.mark.parametrize("kind", NEAREST)
def test_main_weights_rounded_to_nearest_lose_small_steps(kind: Kind):
    """Why stochastic rounding is the default: most steps of 1e-5, and for types coarser than fp16 of 1e-4, are smaller
    than half of what the type tells apart."""
    name, _ = kind
    at_small_steps = drifts()[2 if name == "fp16" else 1]
    assert at_small_steps[kind] > 0.5
    assert at_small_steps[kind] > 2 * at_small_steps[name, True]


@pytest.mark.parametrize("name", CODE_DTYPES)
def test_stochastic_rounding_to_codes_is_right_in_the_mean(name: str):
    """Each value often, with other random bits; values far below the largest of their block have coarse codes."""
    draws = 4096
    values = torch.linspace(0.02, 1, STATE_BLOCK) * torch.tensor([1.0, -1.0]).repeat(STATE_BLOCK // 2)
    x = values.repeat(draws)
    bits = torch.randint(0, 1 << 16, (len(x),), generator=torch.Generator().manual_seed(1))
    codes, scales = encode_blocks(x, CODE_DTYPES[name][0], False, bits)
    found = decode_blocks(codes, scales, False).view(draws, STATE_BLOCK).double()
    step = found.amax(0) - found.amin(0)
    error = (found.mean(0) - values).abs()
    assert (error <= 4 * step / math.sqrt(draws) + 1e-6).all()
    assert (step[:-1] > 0).float().mean() > 0.9
    assert ((found - values).abs() <= step + 1e-6).all(), "a code beside the value"


@pytest.mark.parametrize("name", CODE_DTYPES)
def test_values_of_codes_stay_when_they_are_rounded_stochastically(name: str):
    coded = values_in_blocks(name, first_weights(64 * STATE_BLOCK))
    bits = torch.randint(0, 1 << 16, (len(coded),), generator=torch.Generator().manual_seed(1))
    values = coded.get(0, len(coded))
    again = decode_blocks(*encode_blocks(values, coded.codes.dtype, False, bits), False)
    assert (again != values).float().mean() < 2e-4  # fp16 and fp8: where a product is off in the last bit


# Against torch: the largest distance of weights over their way, after five steps of 1e-2
OFF_FROM_TORCH = [("split", 0.009), ("fp16", 0.009), ("bf16", 0.03), ("int8", 0.13), ("fp8", 0.23)]


@pytest.mark.parametrize(("main", "bound"), OFF_FROM_TORCH)
@pytest.mark.parametrize("force", [(), ("adamw=reference",)], ids=["chosen", "reference"])
def test_five_steps_are_those_of_torch_on_fp32_within_the_types_resolution(main, bound, force):
    model, buckets, optimizer = make_both("bf16", force, replace(OPTIM, main=main))
    theirs = make("bf16").float()
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    expected = torch_optimizer(theirs)
    for step in range(1, 6):
        gradients = put_gradients(buckets, step)
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name].float()
        expected.step()
        optimizer.step(step, OPTIM.lr)
    mine = dict(model.named_parameters())
    off = math.sqrt(sum((mine[n].detach() - p.detach()).square().sum().item() for n, p in theirs.named_parameters()))
    way = math.sqrt(sum((before[n] - p.detach()).square().sum().item() for n, p in theirs.named_parameters()))
    print(f"{main}: {off / way:.4f}")
    assert off / way < bound


@pytest.mark.parametrize("main", ["split", "bf16", "none", "fp16", "fp8", "int8"])
def test_bytes_are_those_that_the_planner_counts(main: str):
    _, buckets, optimizer = make_both("bf16", optim=replace(OPTIM, main=main))  # pyright: ignore[reportArgumentType]
    elements = sum(len(bucket.weights) for bucket in buckets)
    assert optimizer.bytes()["main"] == MAIN_WEIGHT_BYTES[main] * elements


@pytest.mark.parametrize("main", CODE_DTYPES)
def test_the_models_weights_are_the_nearest_to_main_weights_in_blocks(main: str):
    model, buckets, optimizer = make_both("bf16", optim=replace(OPTIM, main=main))  # pyright: ignore[reportArgumentType]
    put_gradients(buckets, 1)
    optimizer.step(1, 1e-2)
    kept = named(optimizer)
    for name, parameter in model.named_parameters():
        held = copied(kept[f"{name}.main"])
        assert torch.equal(parameter.flatten(), round_to_nearest(held, torch.bfloat16)), name


@pytest.mark.parametrize("main", ["bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_no_number_leaves_everything_as_it_is(scale: float, main: str):
    model, buckets, optimizer = make_both("bf16", optim=replace(OPTIM, main=main))  # pyright: ignore[reportArgumentType]
    put_gradients(buckets, 1)
    optimizer.step(1, 1e-2)
    before = {n: copied(t) for n, t in [*named(optimizer).items(), *model.named_parameters()]}
    optimizer.step(2, 1e-2, {"": torch.tensor(scale)})
    for name, value in [*named(optimizer).items(), *model.named_parameters()]:
        assert torch.equal(copied(value), before[name]), name


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_bf16_main_weights_rounded_to_nearest_stay_where_steps_are_small(rule: str):
    """Stochastically twice as many move, with equal gradients: those near zero move either way."""
    moved: list[float] = []
    for rounding in ("nearest", "stochastic"):
        optim = replace(OPTIM, rule=rule, main="bf16", main_rounding=rounding, weight_decay=0.0)  # pyright: ignore[reportArgumentType]
        model, buckets, optimizer = make_both("bf16", optim=optim)
        before = [p.detach().clone() for n, p in model.named_parameters() if n.endswith("weight")]
        put_gradients(buckets, 1)
        optimizer.step(1, 1e-6)
        after = [p.detach() for n, p in model.named_parameters() if n.endswith("weight")]
        moved.append(sum((a != b).float().mean().item() for a, b in zip(after, before, strict=True)))
    nearest, stochastic = moved
    assert 0 < nearest < 0.6 * stochastic


# ---- replicas and checkpoints


def kernels_of(main: str, gradients: str = "fp32", force: tuple[str, ...] = ()) -> BoundKernels:
    return BoundKernels(Facts("cpu", "bf16", hidden=16, ffn=16, main=main, gradients=gradients), force)


def make_on(world: World, main: str) -> tuple[list[Bucket], Optimizer, Publisher]:
    kernels = kernels_of(main)
    with default_dtype(torch.bfloat16):
        model = transformer(MODEL, LENGTH, kernels, world)
    initialise_parameters(model, seed=1)
    buckets = fill_buckets(model, world, storage=storage_maker(main))
    optim = OptimConfig(main=main)  # pyright: ignore[reportArgumentType]
    return buckets, build_optimizer(buckets, optim, kernels), Publisher(model, buckets)


def weights_after_steps(world: World, main: str) -> dict[str, torch.Tensor]:
    buckets, optimizer, publisher = make_on(world, main)
    for step in range(1, 4):
        for bucket in buckets:
            for parameter, view in bucket.parameter_views(bucket.gradients):
                generator = torch.Generator().manual_seed(step + sum(map(ord, parameter.name)))
                view.copy_(torch.randn(view.shape, generator=generator))
        optimizer.step(step, 0.01)
        publisher.publish()
        publisher.await_all_buckets()
    return {p.name: p.tensor.detach().clone() for bucket in buckets for p in bucket.parameters}


@pytest.mark.parametrize("main", ["bf16", "fp16", "fp8", "int8"])
def test_any_number_of_replicas_has_the_weights_of_one_to_the_bit(main: str):
    right = weights_after_steps(single_rank_world(), main)
    for weights in run_ranks(weights_after_steps, 2, main):
        assert weights.keys() == right.keys()
        for name, value in right.items():
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("main", CODE_DTYPES)
def test_a_checkpoint_has_fp32_values_of_which_blocks_make_the_same_codes(main: str):
    """Values of any other type are loaded as the nearest."""
    model, buckets, optimizer = make_both("bf16", optim=replace(OPTIM, main=main))  # pyright: ignore[reportArgumentType]
    put_gradients(buckets, 1)
    optimizer.step(1, 1e-2)
    tensors = collect_tensors(model, optimizer)
    for name, _ in model.named_parameters():
        part = as_tensor_part(tensors[f"optimizer.{name}.main"])
        assert part.dtype == torch.float32
        (held,) = part.held
        saved = held.read().clone()
        held.write(torch.zeros_like(saved))
        held.write(saved)
        assert torch.equal(held.read(), saved), name
        other = torch.randn(part.shape, generator=torch.Generator().manual_seed(1))
        held.write(other)
        expected = values_in_blocks(main, other.flatten())
        assert torch.equal(held.read().flatten(), expected.get(0, len(expected))), name

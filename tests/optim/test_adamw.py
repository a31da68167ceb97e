"""AdamW over buckets against torch's own, and what fp32 main weights are for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig, OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts, moments_in_words
from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.layout.axes import single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.optim.optimizer import Optimizer, build_optimizer
from moefold.shard.buckets import Bucket, fill_buckets
from moefold.shard.storage import storage_maker
from moefold.train.assemble import default_dtype
from tests.support.models import transformer

MODEL = ModelConfig(
    layers=2,
    hidden=16,
    vocab=40,
    dense_ffn=24,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8, qkv_bias=True),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, dense_layers=1),
)
OPTIM = OptimConfig(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def make(dtype: str) -> Transformer:
    with default_dtype(DTYPES[dtype]):
        made = transformer(MODEL, 8, BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16)))
    initialise_parameters(made, seed=1)
    return made


def make_both(
    dtype: str, force: tuple[str, ...] = (), optim: OptimConfig = OPTIM
) -> tuple[Transformer, list[Bucket], Optimizer]:
    model = make(dtype)
    buckets = fill_buckets(model, single_rank_world(), storage=storage_maker(optim.main))
    facts = Facts("cpu", dtype, hidden=16, ffn=16, moments=moments_in_words(optim), main=optim.main)
    return model, buckets, build_optimizer(buckets, optim, BoundKernels(facts, force))


def put_gradients(buckets: list[Bucket], step: int) -> dict[str, torch.Tensor]:
    """Random gradients in the buckets; returns them by name."""
    found = {}
    generator = torch.Generator().manual_seed(step)
    for bucket in buckets:
        for parameter, view in bucket.parameter_views(bucket.gradients):
            view.copy_(torch.randn(view.shape, generator=generator))
            found[parameter.name] = view.clone()
    return found


def copied(values: Any) -> torch.Tensor:
    """State as a tensor of its own, whatever form it is kept in."""
    return values.clone() if isinstance(values, torch.Tensor) else values.get(0, len(values))


def named(optimizer: Optimizer) -> dict[str, Any]:
    """The state of one rank, which has all of every parameter, by name."""
    found = {f"{p.name}.{kind}": (p, first, values) for p, kind, first, values in optimizer.state()}
    assert all(first == 0 and len(values) == p.tensor.numel() for p, first, values in found.values())
    return {name: values for name, (_, _, values) in found.items()}


def torch_optimizer(model: Transformer) -> torch.optim.AdamW:
    plain = [p for n, p in model.named_parameters() if n.endswith(("norm.weight", "bias"))]
    decaying = [p for n, p in model.named_parameters() if not n.endswith(("norm.weight", "bias"))]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(0.9, 0.95), eps=1e-8, foreach=False)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("fp64", 1e-13)])
@pytest.mark.parametrize("force", [(), ("adamw=reference",)])
def test_five_steps_equal_those_of_torch(dtype: str, tolerance: float, force: tuple[str, ...]):
    mine, buckets, optimizer = make_both(dtype, force)
    theirs = make(dtype)
    expected = torch_optimizer(theirs)
    for step, lr in enumerate((1e-2, 2e-2, 1e-2, 5e-3, 1e-3), start=1):
        gradients = put_gradients(buckets, step)
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name].to(parameter.dtype)
        for group in expected.param_groups:
            group["lr"] = lr
        expected.step()
        optimizer.step(step, lr)
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    state = named(optimizer)
    for name, parameter in theirs.named_parameters():
        for kind, key in (("mean", "exp_avg"), ("mean_square", "exp_avg_sq")):
            found = state[f"{name}.{kind}"].view_as(parameter)
            torch.testing.assert_close(found, expected.state[parameter][key], rtol=tolerance, atol=tolerance)


def test_without_gradients_matrices_decay_and_norms_and_biases_stay():
    model, buckets, optimizer = make_both("fp32")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all((b.gradients == 0).all() for b in buckets)
    optimizer.step(1, 0.1)
    for name, parameter in model.named_parameters():
        expected = before[name] if name.endswith(("norm.weight", "bias")) else before[name] * (1 - 0.1 * 0.1)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_an_fp32_model_has_no_second_copy_of_its_weights():
    _, buckets, optimizer = make_both("fp32")
    for share, bucket in zip(optimizer.shares, buckets, strict=True):
        main = share.storage.main_values()
        assert main.data_ptr() == bucket.weights.data_ptr()
        assert len(main) == len(bucket.weights)
    assert optimizer.bytes()["main"] == 0
    assert not any(name.endswith(".main") for name in named(optimizer))


def test_a_bf16_model_has_fp32_main_weights_and_gets_their_rounding():
    model, buckets, optimizer = make_both("bf16")
    put_gradients(buckets, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step(1, 1e-2)
    main = {name.removesuffix(".main"): t for name, t in named(optimizer).items() if name.endswith(".main")}
    assert main.keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert main[name].dtype == torch.float32
        assert torch.equal(parameter.flatten(), round_to_nearest(main[name], torch.bfloat16)), name
        assert not torch.equal(parameter, before[name]), name
    assert any(not torch.equal(main[n], p.flatten().float()) for n, p in model.named_parameters()), (
        "main knows more than the model"
    )


def test_updates_below_the_resolution_of_bf16_are_not_lost():
    """A norm's weight starts at one, where bf16 has steps of 1/128 upwards and 1/256 downwards; each update here is
    1e-4. Rounded every time it would stay at one for ever."""
    model, buckets, optimizer = make_both("bf16")
    weight = dict(model.named_parameters())["head.norm.weight"]
    for bucket in buckets:
        bucket.gradients.fill_(1.0)
    optimizer.step(1, 1e-4)
    assert (weight == 1).all()
    for step in range(2, 101):
        optimizer.step(step, 1e-4)
    main = named(optimizer)["head.norm.weight.main"]
    torch.testing.assert_close(main, torch.full_like(main, 1 - 100 * 1e-4), rtol=1e-5, atol=0)
    assert torch.equal(weight, main.to(torch.bfloat16))
    assert (weight < 1).all()


def test_the_state_names_every_tensor_once_and_gives_views_that_can_be_loaded_into():
    model, _, optimizer = make_both("bf16")
    names = [f"{p.name}.{kind}" for p, kind, _, _ in optimizer.state()]
    kinds = ("mean", "mean_square", "main")
    assert sorted(names) == sorted(f"{n}.{kind}" for n, _ in model.named_parameters() for kind in kinds)
    for name, view in named(optimizer).items():
        view.fill_(7.0)
        assert (named(optimizer)[name] == 7).all()
    optimizer.step(1, 0.0)
    assert all((p == 7).all() for p in model.parameters())


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("force", [(), ("adamw=reference",)], ids=["chosen", "reference"])
def test_split_main_weights_are_those_of_a_copy_to_the_bit(moments: str, force: tuple[str, ...]):
    ways = {}
    for main in ("fp32", "split"):
        optim = replace(OPTIM, main=main, moments=moments)  # pyright: ignore[reportArgumentType]
        model, buckets, optimizer = make_both("bf16", force, optim)
        for step in range(1, 6):
            put_gradients(buckets, step)
            optimizer.step(step, 1e-2)
        ways[main] = {n: copied(t) for n, t in named(optimizer).items()} | dict(model.named_parameters())
    assert ways["fp32"].keys() == ways["split"].keys()
    for name, value in ways["fp32"].items():
        assert torch.equal(value, ways["split"][name]), name


def test_split_main_weights_can_be_loaded_into_and_give_the_model_its_weights():
    model, _, optimizer = make_both("bf16", optim=replace(OPTIM, main="split"))
    wanted = {n: torch.randn(len(t)) for n, t in named(optimizer).items() if n.endswith(".main")}
    for name, value in wanted.items():
        named(optimizer)[name].put(0, len(value), value)
    for name, value in wanted.items():
        assert torch.equal(copied(named(optimizer)[name]), value)
        weight = dict(model.named_parameters())[name.removesuffix(".main")]
        assert torch.equal(weight.flatten(), round_to_nearest(value, torch.bfloat16))


def moments_after(rounding: str, steps: int) -> torch.Tensor:
    """Of a gradient that is one at every step, with moments that move by a five-hundredth of what is missing."""
    optim = replace(OPTIM, beta1=0.998, beta2=0.998, moments="bf16", rounding=rounding)  # pyright: ignore[reportArgumentType]
    _, buckets, optimizer = make_both("bf16", optim=optim)
    for step in range(1, steps + 1):
        for bucket in buckets:
            bucket.gradients.fill_(1.0)
        optimizer.step(step, 1e-4)
    return torch.cat([share.state["mean_square"].float()[:640] for share in optimizer.shares])


@pytest.mark.extended
def test_stochastic_rounding_keeps_moments_moving_where_nearest_stops_them():
    """At 0.4 a five-hundredth of what is missing is 0.0012; bf16 has steps of 0.002 there."""
    exact = 1 - 0.998**600
    nearest_one, by_chance = moments_after("nearest", 600), moments_after("stochastic", 600)
    assert (nearest_one < 0.8 * exact).all()
    assert by_chance.mean().item() == pytest.approx(exact, rel=0.01)
    assert torch.equal(by_chance, moments_after("stochastic", 600)), "the same chances in every run"


@pytest.mark.parametrize("main", ["fp32", "split"])
@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_no_number_leaves_everything_as_it_is(scale: float, main: str):
    model, buckets, optimizer = make_both("bf16", optim=replace(OPTIM, main=main))  # pyright: ignore[reportArgumentType]
    put_gradients(buckets, 1)
    optimizer.step(1, 1e-2)
    before = {n: copied(t) for n, t in [*named(optimizer).items(), *model.named_parameters()]}
    optimizer.step(2, 1e-2, {"": torch.tensor(scale)})
    for name, value in [*named(optimizer).items(), *model.named_parameters()]:
        assert torch.equal(copied(value), before[name]), name


def test_the_scale_acts_on_the_gradient():
    states = []
    for factor in (1.0, 0.25):
        _, buckets, optimizer = make_both("fp32")
        put_gradients(buckets, 1)
        for bucket in buckets:
            bucket.gradients.mul_(1 / factor)
        optimizer.step(1, 1e-2, {"": torch.tensor(factor, dtype=torch.float64)})
        states.append(named(optimizer))
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-6, atol=0)

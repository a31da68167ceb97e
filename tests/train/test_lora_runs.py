"""Runs with adapters: gradients of a whole model are those of explicit weights W + s B A, on one rank and on layouts of
four; the base stays, every expert that got tokens moves, and a run goes on from its checkpoint."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moefold.anatomy.adapters import adapter_specs
from moefold.anatomy.products import adaptable_weights, product_place
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.run import Config, LoraConfig, MemoryConfig, ParallelConfig, PipelineConfig, ShardConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.precision.low_rank import LowRankPair
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.parity import (
    Trace,
    first_mismatch,
    random_corpus,
    shrink_config,
    single_rank_config,
    skew_routing_biases,
    trace_run,
)
from moefold.train.step import take_next_step
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, corpus

LORA = LoraConfig(rank=4, alpha=6.0)
DROPS = replace(LORA, dropout=0.25)
ROUTED = ("*.attention.*", "*.experts.*", "*.router")
SHARDED = ShardConfig("zero3")
ROUTED_DROPS = replace(DROPS, targets=ROUTED)
Changes = dict[str, Any]


def config_of(preset: str, world: int = 1, lora: LoraConfig = LORA, **changes: Any) -> Config:
    config = PRESETS[preset]()
    moe = replace(config.model.moe, balance=replace(config.model.moe.balance, bias_rate=0.0, aux_loss=0.01))
    model = replace(config.model, moe=moe)
    train = replace(config.train, precision="fp64")
    small = shrink_config(replace(config, model=model, train=train, lora=lora, **changes), world)
    if small.parallel.pp == 1:
        return small
    return replace(small, pipeline=replace(small.pipeline, layout="Et|tL"))


def random_adapters(run: Run) -> dict[str, LowRankPair]:
    """B is no longer zero, so that every gradient counts."""
    generator = torch.Generator().manual_seed(3)
    pairs: dict[str, LowRankPair] = {}
    for name, module in run.model.named_modules():
        if isinstance(module, LowRankPair):
            pairs[name] = module
            values = torch.randn(module.b.shape, generator=generator, dtype=torch.float64)
            module.b.data.copy_(values * 0.1)
    return pairs


def gradients_by_name(run: Run) -> dict[str, torch.Tensor]:
    take_next_step(run)
    found: dict[str, torch.Tensor] = {}
    for bucket, share in zip(run.gradients.buckets, run.gradients.gradient_shares(), strict=True):
        for parameter, view in bucket.parameter_views(share):
            found[parameter.name] = view.clone()
    return found


def as_matrices(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """B with one dim of outputs, behind that of experts if A has it."""
    return b.flatten(a.ndim - 2, -2)


@pytest.mark.parametrize("routing", ["learned", "skewed", "empty experts"])
@pytest.mark.parametrize("preset", ["tiny", "deepseek-v3"])
def test_gradients_are_those_of_explicit_weights(preset: str, routing: str):
    """Of W' = W + s B A in a model without adapters: dA = s B^T dW', dB = s dW' A^T."""
    config = config_of(preset, lora=replace(LORA, targets=ROUTED if preset == "tiny" else ()))
    adapted = assemble_run(config, single_rank_world(), Path("."), corpus=random_corpus(config))
    pairs = random_adapters(adapted)
    before = {name: p.detach().clone() for name, p in adapted.model.named_parameters()}
    plain = replace(config, lora=LoraConfig())
    explicit = assemble_run(plain, single_rank_world(), Path("."), corpus=random_corpus(plain))
    weight_of = {prefix + product_place(w.name): prefix + w.name for prefix, w in adaptable_weights(config.model)}
    weights = dict(explicit.model.named_parameters())
    for name, weight in weights.items():
        weight.data.copy_(before[name])
    for name, pair in pairs.items():
        weight = weights[weight_of[name.removesuffix(".lora")]]
        change = pair.scale * as_matrices(pair.b.detach(), pair.a) @ pair.a.detach()
        weight.data.add_(change.view_as(weight))
    for run in (adapted, explicit):
        skew_routing_biases(run, routing)
    actual = gradients_by_name(adapted)
    expected = gradients_by_name(explicit)
    assert actual.keys() == {f"{name}.{part}" for name in pairs for part in "ab"}
    for name, pair in pairs.items():
        a, b = before[f"{name}.a"], before[f"{name}.b"]
        flat_b = as_matrices(b, a)
        dw = expected[weight_of[name.removesuffix(".lora")]].reshape(*flat_b.shape[:-1], a.shape[-1])
        close(actual[f"{name}.a"], pair.scale * flat_b.mT @ dw)
        close(actual[f"{name}.b"], (pair.scale * dw @ a.mT).view_as(b))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * max(scale, 1.0))


def test_the_base_stays_and_every_expert_that_got_tokens_moves():
    config = config_of("tiny")
    config = replace(config, optim=replace(config.optim, weight_decay=0.0))  # which would move frozen adapters too
    run = assemble_run(config, single_rank_world(), Path("."), corpus=random_corpus(config))
    skew_routing_biases(run, "empty experts")
    random_adapters(run)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    report = take_next_step(run)
    moved = 0
    for name, parameter in run.model.named_parameters():
        if ".lora." not in name:
            assert torch.equal(parameter, before[name]), f"{name} moved"
            assert parameter.grad is None
        elif ".experts." in name:
            layer = int(name.split(".")[1])
            counts_E = report.loads.counts_LE[report.loads.layers.index(layer)]
            differs = (parameter.detach() != before[name]).flatten(1).any(1)
            got_tokens = counts_E > 0
            assert 0 < int(got_tokens.sum()) < len(got_tokens)
            assert torch.equal(differs, got_tokens), f"an expert of {name} is frozen, or moved without tokens"
            moved += int(differs.sum())
        else:
            assert not torch.equal(parameter, before[name]), f"{name} is frozen"
    assert moved
    states = sum(share.bucket.weights.numel() for share in run.optimizer.shares)
    adapters = sum(spec.parameters for spec in adapter_specs(config))
    assert states < adapters + 128 * len(list(run.model.parameters()))  # gaps between parameters aside


LAYOUTS: dict[str, tuple[str, LoraConfig, Changes]] = {
    "tp and ep, magnitudes": ("deepseek-v3", replace(LORA, dora=True), {"parallel": ParallelConfig(tp=2, ep=2)}),
    "tp, cp, etp": (
        "qwen3-30b-a3b",
        replace(DROPS, targets=ROUTED),
        {"parallel": ParallelConfig(tp=2, cp=2, context="ring", etp=2, ep=2)},
    ),
    "stages": ("tiny", DROPS, {"parallel": ParallelConfig(pp=2, ep=2)}),
    "full sharding": (
        "deepseek-v3",
        replace(DROPS, targets=ROUTED),
        {"parallel": ParallelConfig(tp=2, ep=2), "shard": SHARDED, "memory": MemoryConfig(recompute=("layer",))},
    ),
    "full sharding, magnitudes": (
        "tiny",
        replace(LORA, dora=True),
        {"parallel": ParallelConfig(tp=2), "shard": SHARDED},
    ),
    "full sharding, stages": ("tiny", LORA, {"parallel": ParallelConfig(pp=2), "shard": SHARDED}),
}


def traced(world: World, config: Config) -> Trace:
    here = world
    if world.size > 1:
        here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
    return trace_run(config, here, 2, "skewed")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_four_ranks_are_equal_to_one(name: str):
    preset, lora, changes = LAYOUTS[name]
    config = config_of(preset, 4, lora=lora, **changes)
    expected = traced(single_rank_world(), single_rank_config(config))
    ranks = run_ranks(traced, 4, config)
    assert first_mismatch(expected, ranks, 1e-9) is None
    assert any(".lora.a" in entry.what and bool(entry.values.any()) for entry in expected)


WAYS: dict[str, Changes] = {
    "recompute": {"memory": MemoryConfig(recompute=("norm", "activation", "core"), offload=("moe",), offload_least=1)},
    "deferred": {"pipeline": PipelineConfig(pair=True, defer=True)},
    "layers at a time": {"optim": {"when": "backward", "clip_by": "previous"}},
}


def losses_of(config: Config) -> list[float]:
    run = assemble_run(config, single_rank_world(), Path("."), corpus=random_corpus(config))
    return [take_next_step(run).loss for _ in range(3)]


@pytest.mark.extended
def test_memory_and_times_of_updates_change_no_bit():
    config = config_of("deepseek-v3", lora=DROPS)
    expected = losses_of(config)
    assert losses_of(config_of("deepseek-v3"))[-1] != expected[-1]
    for name, changes in WAYS.items():
        optim = replace(config.optim, **changes.get("optim", {}))
        changed = replace(config, **{**changes, "optim": optim})
        assert losses_of(changed) == expected, name


def test_a_stage_without_adapters_is_refused():
    targets = LoraConfig(rank=4, targets=("blocks.0.*",))
    config = config_of("tiny", 2, lora=targets, parallel=ParallelConfig(pp=2))
    with pytest.raises(AssertionError, match="has no adapter that is trained"):
        run_ranks(traced, 2, config)


def test_a_target_that_matches_nothing_is_refused_at_assembly():
    config = config_of("tiny", lora=LoraConfig(rank=4, targets=("*.shared.*",)))
    with pytest.raises(UserError, match=r'no product of the model matches "\*\.shared\.\*"'):
        assemble_run(config, single_rank_world(), Path("."), corpus=random_corpus(config))


def test_a_run_goes_on_from_its_checkpoint_to_the_bit(tmp_path: Path):
    """Base, adapters and their moments are in the checkpoint; the base is not written as trained."""
    lora = ["--lora.rank", "2", "--lora.targets", "*.experts.*,*.attention.out", "--model.moe.balance.bias_rate", "0"]
    words = ["train", "tiny", *SMALL, *corpus(tmp_path), *lora, "--train.steps", "4", "--checkpoint.every", "2"]
    out = tmp_path / "run"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run_command_line([*words, "--out", str(out)]) == 0
    assert "trained in adapters" in said.getvalue()
    last = out / "checkpoints" / "step-00000004"
    expected = {name: tensor for file in last.glob("*.safetensors") for name, tensor in load_file(file).items()}
    shutil.rmtree(last)
    with contextlib.redirect_stdout(said):
        assert run_command_line([*words, "--out", str(out), "--resume", "auto"]) == 0
    actual = {name: tensor for file in last.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    moments = [name for name in expected if "exp_avg" in name or "moment" in name or name.startswith("optim")]
    assert moments
    assert all(".lora." in name for name in moments)
    refused = io.StringIO()
    with contextlib.redirect_stderr(refused):
        assert run_command_line([*words, "--lora.rank", "3", "--out", str(out), "--resume", "auto"]) == 2
    assert "lora.rank = 3, but the checkpoint has 2; set it back" in refused.getvalue()

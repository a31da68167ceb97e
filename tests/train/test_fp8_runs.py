"""Whole runs with FP8 recipes on a CPU: they learn as plain ones do, repeat to the bit, and are saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.cli.main import run_command_line
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.layout.axes import single_rank_world
from moefold.model.moe.experts import Experts
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.recipes import named_products
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.from_hf import WeightFiller, from_hf, starting_weights
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run
from moefold.train.step import take_next_step

FP8 = [name for name, spec in RECIPE_SPECS.items() if spec.format == "fp8"]
SMALL = [
    *("--model.layers", "2", "--model.hidden", "64", "--model.moe.ffn", "64", "--model.moe.experts", "4"),
    *("--model.attention.heads", "2", "--model.attention.kv_heads", "1", "--model.attention.head_dim", "32"),
    *("--data.seq_len", "64", "--train.global_batch", "4", "--train.micro_batch", "2", "--optim.warmup", "2"),
    *("--train.device", "cpu", "--train.precision", "fp32", "--observe.tensorboard", "false", "--optim.lr", "5e-3"),
]
STEPS = 16
NEAR = 0.03  # of the plain loss, after as many steps


def make_run(folder: Path, recipe: str, *more: str, weights: WeightFiller | None = None) -> Run:
    config: Config = resolve_recipe("tiny", [*SMALL, "--precision.recipe", recipe, *more], 1)
    return assemble_run(config, single_rank_world("cpu"), folder, counting_corpus(), weights)


def counting_corpus() -> Corpus:
    """Documents that count in steps of one to four: a model learns them in a few steps."""
    random = np.random.default_rng(3)
    documents = [(random.integers(0, 60) + np.arange(40) * step) % 61 for step in random.integers(1, 5, size=400)]
    tokens = np.concatenate(documents).astype(np.uint8)
    starts = np.arange(0, len(tokens), 40)
    return Corpus(tokens, tokens, starts, starts)


def losses_of(run: Run, steps: int) -> list[float]:
    return [take_next_step(run).loss for _ in range(steps)]


EXPERTS = {  # as a composition of products, and as one function, which needs an inner width of whole blocks
    "composed": ["--model.moe.ffn", "64"],
    "one function": ["--model.moe.ffn", "128"],
}


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("plain")
    return {name: losses_of(make_run(folder, "plain", *words), STEPS) for name, words in EXPERTS.items()}


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("recipe", FP8)
def test_a_model_learns_with_every_recipe_as_it_does_without(
    recipe: str, experts: str, plain_losses: dict[str, list[float]], tmp_path: Path
):
    run = make_run(tmp_path, recipe, *EXPERTS[experts])
    fused = [module.fused for module in run.model.modules() if isinstance(module, Experts)]
    assert fused == [experts == "one function"] * 2
    losses = losses_of(run, STEPS)
    plain = plain_losses[experts]
    assert losses[-1] < 0.8 * losses[0]
    assert losses[0] != plain[0]
    for mine, right in zip(losses, plain, strict=True):
        assert abs(mine - right) < NEAR * right


MECHANISMS: dict[str, list[str]] = {
    "documents": ["--data.attend", "document"],
    "capacity": ["--model.moe.capacity.factor", "1.0", "--model.moe.capacity.pad", "true"],
    "padded rows": ["--model.moe.capacity.pad_rows", "16"],
    "tokens ahead": ["--model.mtp", "1", "--model.mtp_loss", "0.3"],
    "latent attention": [
        *("--model.attention.kind", "mla", "--model.attention.kv_heads", "2", "--model.attention.rope_dim", "16"),
        *("--model.attention.q_rank", "32", "--model.attention.kv_rank", "32", "--model.attention.qk_norm", "none"),
    ],
    "shared experts and a dense layer": [
        *("--model.moe.shared_ffn", "64", "--model.moe.shared_gate", "true", "--model.moe.dense_layers", "1"),
    ],
    "biases": ["--model.moe.biases", "true", "--model.moe.activation", "clamped_swiglu", "--model.moe.gate", "output"],
    "latent experts": ["--model.moe.latent", "32"],
    "bf16": ["--train.precision", "bf16"],
    "adapters": ["--lora.rank", "4", "--model.moe.balance.bias_rate", "0"],
    "adapters with magnitudes": [
        *("--lora.rank", "4", "--lora.dora", "true", "--lora.dropout", "0.1", "--model.moe.balance.bias_rate", "0"),
    ],
}
OPTIONS = [
    ["--precision.power_of_two_scales", "true"],
    ["--precision.exclude_first", "1", "--precision.gradient_format", "e5m2"],
    [],
]


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_trains_in_fp8_near_plain_and_repeats_to_the_bit(name: str, tmp_path: Path):
    """Recipes and options take turns along the mechanisms."""
    number = list(MECHANISMS).index(name)
    recipe = FP8[number % len(FP8)]
    options = OPTIONS[number % len(OPTIONS)]
    words = MECHANISMS[name]
    mine = losses_of(make_run(tmp_path, recipe, *words, *options), 4)
    again = losses_of(make_run(tmp_path, recipe, *words, *options), 4)
    plain = losses_of(make_run(tmp_path, "plain", *words), 4)
    assert mine == again
    assert mine != plain
    for value, right in zip(mine, plain, strict=True):
        assert abs(value - right) < NEAR * right


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor"])
def test_a_checkpoint_holds_main_weights_and_a_resumed_run_has_the_same_losses(recipe: str, tmp_path: Path):
    run = make_run(tmp_path, recipe)
    with make_background_saver(run, print) as saver:
        losses_of(run, 2)
        begin_checkpoint(run, saver)
    names = collect_tensors(run.model, run.optimizer, run.further_state)
    plain = make_run(tmp_path, "plain")
    assert names.keys() == collect_tensors(plain.model, plain.optimizer, plain.further_state).keys()
    unbroken = losses_of(run, 3)
    # A new run, and one that has trained and holds copies of other weights.
    fresh, used = make_run(tmp_path, recipe), make_run(tmp_path, recipe, "--train.seed", "1")
    losses_of(used, 3)
    for resumed in (fresh, used):
        assert resume_run(resumed, str(tmp_path / "checkpoints"), print)
        assert losses_of(resumed, 3) == unbroken


def test_a_run_may_go_on_with_another_recipe(tmp_path: Path):
    run = make_run(tmp_path, "plain")
    with make_background_saver(run, print) as saver:
        losses_of(run, 2)
        begin_checkpoint(run, saver)
    plain = losses_of(run, 2)
    said: list[str] = []
    resumed = make_run(tmp_path / "other", "fp8_row")
    assert resume_run(resumed, str(tmp_path / "checkpoints"), said.append)
    for value, right in zip(losses_of(resumed, 2), plain, strict=True):
        assert 0 < abs(value - right) < NEAR * right
    assert any("precision.recipe" in line for line in said), "what has changed is printed"


def test_a_model_exported_to_hugging_face_has_the_run_s_own_weights(tmp_path: Path):
    """The folder is read again by a plain model, whose loss is near; its weights are those of the FP8 run exactly."""
    words = ["--model.attention.qk_norm", "head", "--model.moe.balance.bias_rate", "0"]
    run = make_run(tmp_path, "fp8_block", *words)
    with make_background_saver(run, print) as saver:
        losses_of(run, 2)
        begin_checkpoint(run, saver)
    assert run_command_line(["convert", str(tmp_path), "--to", "hf", str(tmp_path / "hf")]) == 0
    again = from_hf(tmp_path / "hf", seq_len=64)
    weights = dict(run.model.named_parameters())
    for name, weight in again.named_parameters():
        assert torch.equal(weight, weights[name]), name
    described = describe_model(open_model_folder(tmp_path / "hf"))
    fill = starting_weights(tmp_path / "hf", replace(run.config, model=described.model), run.world, print)
    from_folder = make_run(tmp_path, "fp8_block", *words, weights=fill)
    from_folder.loader.consumed = run.loader.consumed
    assert take_next_step(from_folder).loss == take_next_step(run).loss


def test_a_model_exported_in_fp8_blocks_has_the_bytes_of_the_run_s_own_products(tmp_path: Path):
    words = ["--model.attention.qk_norm", "head", "--model.moe.balance.bias_rate", "0", "--model.moe.ffn", "128"]
    run = make_run(tmp_path, "fp8_block", *words)
    with make_background_saver(run, print) as saver:
        losses_of(run, 1)
        begin_checkpoint(run, saver)
    assert run_command_line(["convert", str(tmp_path), str(tmp_path / "hf"), "--dtype", "fp8_block"]) == 0
    written = load_file(tmp_path / "hf" / "model.safetensors")
    recipe = named_products(run.model)["blocks.1.moe.experts.up_product"].recipe
    assert isinstance(recipe, Fp8Recipe)
    weights = dict(run.model.named_parameters())
    out = recipe.weight(weights["blocks.1.attention.out.weight"]).forward
    gate_up = recipe.weight(weights["blocks.1.moe.experts.gate_up"].flatten(1, 2)).forward
    expected = {
        "self_attn.o_proj": (out.values[0], out.scales[0]),
        "mlp.experts.3.gate_proj": (gate_up.values[3, :128], gate_up.scales[3, :1]),
        "mlp.experts.3.up_proj": (gate_up.values[3, 128:], gate_up.scales[3, 1:]),
    }
    for name, (values, scales) in expected.items():
        weight = f"model.layers.1.{name}.weight"
        assert torch.equal(written[weight].view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(written[f"{weight}_scale_inv"], scales), name


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor"])
def test_weights_are_quantised_once_a_step_and_in_blocks_by_the_update(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    count = 0
    quantise = Fp8Recipe.quantise_matrices

    def counted(self: Fp8Recipe, w: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        return quantise(self, w)

    monkeypatch.setattr(Fp8Recipe, "quantise_matrices", counted)
    run = make_run(tmp_path, recipe)
    products = sum(product.recipe.name == recipe for product in named_products(run.model).values())
    losses_of(run, 3)  # of two microbatches each
    assert count == (products if recipe == "fp8_block" else 3 * products)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_that_the_update_writes_are_those_that_a_read_would_make(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = ["--train.precision", precision, "--optim.main", "split" if precision == "bf16" else "fp32"]
    written = losses_of(make_run(tmp_path, "fp8_block", *words), 3)
    monkeypatch.setattr("moefold.optim.block_copies.has_block_scales", lambda format: False)
    assert losses_of(make_run(tmp_path, "fp8_block", *words), 3) == written

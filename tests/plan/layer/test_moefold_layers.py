"""The table of what moefold's layers keep, against what autograd keeps of the real model: hooks on every saved tensor,
each memory counted once, by the step that kept it first, if it is still there when forward has ended."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from moefold.anatomy.products import product_recipes
from moefold.config.precision_recipes import RECIPE_SPECS
from moefold.config.run import Config, ModelConfig, MoeConfig, ParallelConfig
from moefold.kernels.attention.workspace import MOST_BYTES
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import facts_from_config
from moefold.kernels.vocabulary import cross_entropy
from moefold.layout.axes import World, create_world
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.layout.weight_copies import WeightCopies
from moefold.model.attention.attention_base import rope_angles
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.attention.mla import LatentAttention
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.plan.layer import moefold_layers
from moefold.plan.layer.layer_costs import count_piece, first_alike_layers
from moefold.plan.layer.rank_shapes import RankPortion, RankShapes, make_rank_portion
from moefold.plan.memory.peak_memory import stage_counts
from moefold.plan.memory.rank_stages import stages_by_rank
from moefold.plan.memory.resident import resident_state
from moefold.plan.memory.run_setting import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.precision.recipes import attach_recipes
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from tests.support.models import transformer
from tests.support.ranks import run_ranks

TINY = [name for name in PRESETS if name.endswith("tiny")]
SMALL = 256  # bytes: offsets of experts and single numbers, which the table leaves out

ENDS = {"look_ahead": "predict"}  # they keep one stream together: counted as one

VARIANTS = {
    "gate behind the experts": "--model.moe.gate=output",
    "no balance loss": "--model.moe.balance.aux_loss=0",
    "balance over the microbatch": "--model.moe.balance.aux_loss=0.01 --model.moe.balance.aux_over=microbatch",
    "sigmoid scores as they are": "--model.moe.router.score=sigmoid --model.moe.router.normalize=none",
    "z loss": "--model.moe.balance.z_loss=0.001",
    "z loss, not normalised": "--model.moe.balance.z_loss=0.001 --model.moe.router.normalize=none",
    "all losses": "--model.moe.balance.z_loss=0.1 --model.moe.balance.aux_loss=0.1 --model.moe.router.score=sigmoid "
    "--model.moe.router.normalize=all",
    "sigmoids chosen, no losses": "--model.moe.router.score=sigmoid",
    "a dense layer": "--model.moe.dense_layers=1",
    "shared experts with a gate": "--model.moe.shared_ffn=64 --model.moe.shared_gate=true",
    "latent experts": "--model.moe.latent=48",
    "biases": "--model.moe.biases=true",
    "geglu, biases, gate behind": "--model.moe.activation=geglu --model.moe.biases=true --model.moe.gate=output",
    "no gate in any MLP": "--model.moe.activation=relu2 --model.moe.shared_ffn=64 --model.moe.dense_layers=1 "
    "--model.dense_activation=gelu",
    "no gate, biases, latent experts": "--model.moe.activation=silu --model.moe.biases=true --model.moe.latent=48",
    "clamped experts, plain shared experts": "--model.moe.activation=clamped_swiglu --model.moe.shared_ffn=64",
    "partial rotary": "--model.attention.rope_dim=8",
    "qk norm over all heads": "--model.attention.qk_norm=full",
    "no qk norm": "--model.attention.qk_norm=none",
    "latent attention without a query latent": "--model.attention.kind=mla --model.attention.kv_heads=4 "
    "--model.attention.rope_dim=16 --model.attention.qk_norm=none",
    "one token further": "--model.mtp=1",
    "two tokens further": "--model.mtp=2",
    "tied head": "--model.tied_head=true",
}


class Held:
    """A saved tensor for as long as autograd holds it. Detached: an output would hold its own node, for ever."""

    def __init__(self, tensor: torch.Tensor, step: str):
        self.tensor, self.step = tensor.detach(), step


def tables(model: Transformer) -> Iterator[torch.Tensor]:
    """The angles of positions, which belong to the model."""
    for module in model.modules():
        if isinstance(module, GroupedQueryAttention | LatentAttention):
            rotary = module.rotary
            device = next(model.parameters()).device
            yield from rope_angles(rotary.seq_len, rotary.dims, rotary.config, rotary.dtype, device)


def kept_by_steps(model: Transformer, config: Config, device: str = "cpu", floats: bool = False) -> Counter[str]:
    """Bytes by name of the step, of all layers together. `floats`: of floating-point tensors alone."""
    shape = (2, config.train.micro_batch, config.data.seq_len)
    tokens, labels = (x.clone() for x in torch.randint(256, shape, generator=torch.Generator().manual_seed(1)))
    held: list[weakref.ref[Held]] = []
    step_name = ""

    def pack(tensor: torch.Tensor) -> Held:
        kept = Held(tensor, step_name)
        held.append(weakref.ref(kept))
        return kept

    carry = model.begin(tokens.to(device), labels.to(device))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        for step in model.steps(model.stages[0]):
            step_name = step.spec.name
            carry = step.run(carry)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), *tables(model))}
    found: Counter[str] = Counter()
    for kept in filter(None, (ref() for ref in held)):
        storage = kept.tensor.untyped_storage()
        is_counted = kept.tensor.is_floating_point() or not floats
        if is_counted and storage.data_ptr() not in own and storage.nbytes() >= SMALL:
            own.add(storage.data_ptr())
            found[ENDS.get(kept.step, kept.step)] += storage.nbytes()
    assert carry["losses_1M"].requires_grad
    return found


def planned(config: Config, choices: PlanChoices, dispatcher: str = "local") -> Counter[str]:
    model, portion = config.model, make_rank_portion(config, dispatcher, defers_wgrad=False)
    layers = [("t", layer) for layer in range(model.layers)]
    ahead = [("m", model.layers + depth) for depth in range(model.mtp)]
    found: Counter[str] = Counter()
    alike = first_alike_layers(model, config.precision)
    for piece, layer in [("E", 0), *layers, *ahead, ("L", 0)]:
        for step in count_piece(model, piece, alike[layer], portion, choices).steps:
            found[ENDS.get(step.name, step.name)] += sum(t.bytes for t in step.saved if t.bytes >= SMALL)  # pyright: ignore
    return found


def real(config: Config, dtype: str, device: str) -> Transformer:
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    kernels = BoundKernels(facts_from_config(config, device, dtype, capability), config.kernels.force)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if dtype == "bf16" else torch.float32)
    try:
        with torch.device(device):
            model = transformer(config.model, config.data.seq_len, kernels)
    finally:
        torch.set_default_dtype(before)
    recipes = {chosen.product.name: chosen.recipe for chosen in product_recipes(config)}
    attach_recipes(model, recipes, kernels, config.precision)
    initialise_parameters(model, seed=1)
    return model


CONFIGS = {**{name: (name, "") for name in TINY}, **{name: ("tiny", words) for name, words in VARIANTS.items()}}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_keeps_what_the_table_says_step_by_step(name: str):
    config = resolve_recipe(CONFIGS[name][0], CONFIGS[name][1].split())
    found = kept_by_steps(real(config, "fp32", "cpu"), config)
    said = planned(config, PlanChoices(precision="fp32", device="cpu"))
    assert dict(found) == {step: size for step, size in said.items() if size}


RECIPES = [name for name, spec in RECIPE_SPECS.items() if spec.format == "fp8"]
WIDE = "--model.hidden=64 --model.moe.ffn=128 --model.moe.dense_layers=1 --model.moe.shared_ffn=64 --data.seq_len=64"
IN_FP8 = {
    "experts as one function": WIDE,
    "experts as a composition": f"{WIDE} --model.moe.gate=output",
    "narrow experts, no gate": f"{WIDE} --model.moe.ffn=48 --model.moe.activation=relu2 --model.dense_activation=gelu",
    "latent experts": f"{WIDE} --model.moe.shared_ffn=0 --model.moe.latent=48 --model.mtp=1",
    "latents in FP8": f"{WIDE} --model.moe.latent=48 --model.mtp=1 --precision.recipes=*.narrow:fp8_row,"
    "*.widen:fp8_row,*.join:fp8_block",
    "latent attention": f"{WIDE} --model.attention.kind=mla --model.attention.kv_heads=4 --model.attention.rope_dim=16 "
    "--model.attention.head_dim=32 --model.attention.q_rank=32 --model.attention.kv_rank=48 "
    "--model.attention.qk_norm=none",
    "a plain layer": f"{WIDE} --precision.exclude_first=1",
    "products that differ": f"{WIDE} --precision.recipes=*.key:plain,*.value:fp8_hybrid,*.up_product:fp8_hybrid,"
    "*.dense.down:plain",
    "many tiles": f"{WIDE} --data.seq_len=1024",
}


def in_fp8(name: str, recipe: str) -> Config:
    return resolve_recipe("tiny", [*IN_FP8[name].split(), f"--precision.recipe={recipe}"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", IN_FP8)
def test_products_in_fp8_keep_what_the_table_says_step_by_step(name: str, recipe: str):
    config = in_fp8(name, recipe)
    found = kept_by_steps(real(config, "fp32", "cpu"), config)
    said = planned(config, PlanChoices(precision="fp32", device="cpu"))
    assert dict(found) == {step: size for step, size in said.items() if size}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", IN_FP8)
def test_copies_of_weights_are_as_large_as_planned(name: str, recipe: str):
    config = in_fp8(name, recipe)
    model = real(config, "fp32", "cpu")
    kept_by_steps(model, config)
    found = 0
    for parameter in model.parameters():
        copies: WeightCopies | None = getattr(parameter, "copies", None)
        for _, copy in copies.made.values() if copies else ():
            found += sum(tensor.nbytes for tensor in tensors_held_by(copy))
    choices = PlanChoices(precision="fp32", device="cpu")
    (rank,) = stages_by_rank(config)
    setting = build_run_setting(config, 1, choices)
    state = resident_state(setting, rank, stage_counts(setting, rank))
    assert state.copies == found > 0
    assert state.weights == 4 * state.parameters + state.copies


def tensors_held_by(work: Any) -> Iterator[torch.Tensor]:
    """The tensors in the closures and arguments of deferred work."""
    if isinstance(work, torch.Tensor):
        yield work
    elif isinstance(work, partial):
        yield from tensors_held_by((*work.args, *work.keywords.values()))
    elif isinstance(work, FunctionType):
        yield from tensors_held_by(tuple(cell.cell_contents for cell in work.__closure__ or ()))
    elif isinstance(work, tuple):
        for each in work:
            yield from tensors_held_by(each)


def held_by_deferred_work(model: Transformer, config: Config, device: str = "cpu") -> int:
    """Bytes that the weight gradients of a microbatch hold when its data gradients are done."""
    shape = (2, config.train.micro_batch, config.data.seq_len)
    tokens, labels = torch.randint(256, shape, generator=torch.Generator().manual_seed(1)).to(device)
    losses = model(tokens.clone(), labels.clone())
    queue: list[DeferredWork] = []
    with deferring_weight_grads(queue):
        (losses.cross_entropy + losses.ahead_M.sum() + losses.balance).backward()
    own = {x.untyped_storage().data_ptr() for x in model.parameters()}
    held = 0
    for storage in (x.untyped_storage() for x in tensors_held_by(tuple(queue))):
        if storage.data_ptr() not in own and storage.nbytes() >= SMALL:
            own.add(storage.data_ptr())
            held += storage.nbytes()
    return held


def planned_to_wait(config: Config, choices: PlanChoices) -> float:
    model, portion = config.model, make_rank_portion(config, "local", defers_wgrad=True)
    layers = [("t", layer) for layer in range(model.layers)]
    ahead = [("m", model.layers + depth) for depth in range(model.mtp)]
    pieces = [("E", 0), *layers, *ahead, ("L", 0)]
    alike = first_alike_layers(model, config.precision)
    counts = [count_piece(model, piece, alike[layer], portion, choices) for piece, layer in pieces]
    return sum(step.waiting for count in counts for step in count.steps)


@pytest.mark.parametrize("name", CONFIGS)
def test_deferred_weight_gradients_hold_what_the_table_says(name: str):
    config = resolve_recipe(CONFIGS[name][0], CONFIGS[name][1].split())
    held = held_by_deferred_work(real(config, "fp32", "cpu"), config)
    assert planned_to_wait(config, PlanChoices(precision="fp32", device="cpu")) == pytest.approx(held, rel=0.002)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", IN_FP8)
def test_deferred_weight_gradients_in_fp8_hold_what_the_table_says(name: str, recipe: str):
    config = in_fp8(name, recipe)
    held = held_by_deferred_work(real(config, "fp32", "cpu"), config)
    assert planned_to_wait(config, PlanChoices(precision="fp32", device="cpu")) == pytest.approx(held, rel=0.002)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "glm-4.5-air"])
def test_deferred_weight_gradients_hold_what_the_table_says_on_a_gpu(name: str):
    """In bf16, where one kernel runs the experts on Hopper, two layers of the real sizes."""
    words = "--model.layers=2 --model.moe.dense_layers=1 --model.vocab=4096 --data.seq_len=512 --train.precision=bf16"
    config = resolve_recipe(name, words.split())
    held = held_by_deferred_work(real(config, "bf16", "cuda"), config, "cuda")
    major, minor = torch.cuda.get_device_capability()
    assert planned_to_wait(config, PlanChoices(capability=10 * major + minor)) == pytest.approx(held, rel=0.005)


EVEN = "--model.moe.router.force_balance=true --model.moe.shared_ffn=64 --model.moe.dense_layers=1"
PARTS = {
    "all-to-all": ParallelConfig(ep=2, dispatcher="all_to_all"),
    "once to each rank": ParallelConfig(ep=2, dispatcher="dedup"),
    "tokens gathered": ParallelConfig(ep=2, dispatcher="all_gather"),
    "tensor parallel": ParallelConfig(tp=2),
    "ring": ParallelConfig(cp=2, context="ring"),
    "keys gathered": ParallelConfig(cp=2, context="all_gather"),
    "heads swapped": ParallelConfig(cp=2, context="all_to_all"),
    "heads swapped in projections": ParallelConfig(cp=2, context="all_to_all", tiles=("heads",)),
    "one key head, copied": ParallelConfig(cp=2, context="all_to_all"),
    "one key head, shared": ParallelConfig(tp=2),
}


def kept_on_a_rank(world: World, config: Config) -> int:
    world = create_world(world.rank, world.size, world.device, config.parallel)
    kernels = BoundKernels(facts_from_config(config, "cpu", "fp32"))
    model = transformer(config.model, config.data.seq_len, kernels, world, config.parallel)
    initialise_parameters(model, seed=1)
    return sum(kept_by_steps(model, config).values())


@pytest.mark.parametrize("name", PARTS)
def test_each_of_two_ranks_keeps_what_the_table_says(name: str):
    """Within half a percent: which rows went where, and masks of chunks, are not counted to the byte."""
    words = EVEN.split()
    if name.startswith("one key head"):
        words.append("--model.attention.kv_heads=1")
    config = replace(resolve_recipe("tiny", words), parallel=PARTS[name])
    said = planned(config, PlanChoices(precision="fp32", device="cpu"), PARTS[name].dispatcher)
    for kept in run_ranks(kept_on_a_rank, 2, config):
        assert kept == pytest.approx(sum(said.values()), rel=0.005)


def test_what_arrives_inside_the_projection_back_stays_where_attention_runs_again():
    """It is a copy that the projection makes; all else that attention gives is made again."""
    portion = RankPortion(512, cp=2, context="all_to_all")
    rebuilt = PlanChoices(recompute=("core",))
    fates: list[dict[str, str]] = []
    for inside in (False, True):
        steps = count_piece(ModelConfig(), "t", 0, replace(portion, head_tiles=inside), rebuilt).steps
        fates.append({t.name: t.fate for step in steps for t in step.saved if "attended" in t.name and t.bytes})
    assert fates[0] == {"attended": "recomputed", "attended, before reordering": "recomputed"}
    assert fates[1] == fates[0] | {"attended": "kept"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v2-lite", "glm-4.5-air"])
def test_the_model_keeps_what_the_table_says_on_a_gpu(name: str):
    """In bf16 with the kernels of that GPU, two layers of the real sizes."""
    words = "--model.layers=2 --model.moe.dense_layers=1 --model.vocab=4096 --data.seq_len=512 --train.precision=bf16"
    config = resolve_recipe(name, words.split())
    found = kept_by_steps(real(config, "bf16", "cuda"), config, "cuda")
    major, minor = torch.cuda.get_device_capability()
    said = planned(config, PlanChoices(capability=10 * major + minor))
    assert set(found) == {step for step, size in said.items() if size}
    for step, size in found.items():
        assert size == pytest.approx(said[step], rel=0.002), f"{step}: plans of tiles and offsets are not counted"


def test_one_layer_keeps_what_was_measured_on_an_h200():
    """Measured: the layer's input, its router and its experts, without a norm and balance losses."""
    record = Path(__file__).parents[3] / "docs/benchmarks/layer-h200-2026-11-15.json"
    for row in json.loads(record.read_text())["results"]:
        moe = MoeConfig(experts=row["experts"], top_k=row["top_k"], ffn=row["ffn"])
        model = ModelConfig(layers=1, hidden=row["hidden"], moe=moe)
        steps = count_piece(model, "t", 0, RankPortion(row["tokens"]), PlanChoices()).steps
        kept = [t for step in steps if step.name in ("route", "plan", "dispatch", "experts") for t in step.saved]
        total = sum(t.bytes for t in kept if "stream" not in t.name)
        assert total / 2**30 == pytest.approx(row["ours"]["saved_gib"], rel=0.001), row["layer"]


def test_the_head_holds_as_many_logits_as_the_plan_says():
    for limit in ("CHUNK_LOGITS", "LOGITS_IN_PLACE"):
        assert getattr(moefold_layers, limit) == getattr(cross_entropy, limit)
    for words in (7, 256, 50_304, 151_936, 1 << 27):
        tokens = [module.tokens_of_chunk(1 << 26, words) for module in (moefold_layers, cross_entropy)]
        assert tokens[0] == tokens[1]
        assert tokens[0] * words <= 1 << 26 < 2 * tokens[0] * words or tokens[0] == 1


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_on_hopper_grouped_and_latent_attention_store_gradients_of_scores_within_their_limit(name: str):
    config = PRESETS[name]()
    shapes = build_run_setting(config, 64, PlanChoices(device="cuda", capability=90)).layer_shapes(0)
    assert moefold_layers.writes_score_gradients(shapes)
    assert 0 < moefold_layers.score_gradient_workspace(shapes) <= MOST_BYTES
    older = build_run_setting(config, 64, PlanChoices(device="cuda", capability=80)).layer_shapes(0)
    assert not moefold_layers.writes_score_gradients(older)


@pytest.mark.parametrize("words", ["", VARIANTS["latent experts"], VARIANTS["no gate in any MLP"]])
def test_clones_keep_the_weights_of_as_many_experts_as_there_are_slots(words: str):
    model = resolve_recipe("tiny", words.split()).model
    layer = transformer(model, 32, BoundKernels(facts_from_config(Config(model=model), "cpu", "fp32"))).blocks[1]
    experts = [weight for name, weight in layer.named_parameters() if ".experts." in name]
    of_one = sum(weight[0].numel() for weight in experts)
    shapes = RankShapes(model, RankPortion(32, ep=2, clone_slots=3), PlanChoices())
    [entry] = [entry for entry in moefold_layers.dispatch_tensors() if entry.condition(shapes)]
    assert entry.total_bytes(shapes) == 3 * of_one * PlanChoices().recipe.wide

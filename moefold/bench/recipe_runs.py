"""Runs of `moefold bench recipes`: a model, a variant of a precision recipe and a seed give losses, and a file.

A run has a file of its own, so that processes side by side may write to one folder, each with its part of the runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from moefold.anatomy.products import product_place, product_recipes
from moefold.anatomy.step_specs import prefixed_steps
from moefold.bench.curves import byte_model, smoke_test_config
from moefold.bench.formats import VARIANTS
from moefold.bench.options import RecipesOptions
from moefold.config.run import (
    AttentionConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    ObserveConfig,
    OptimConfig,
    TrainConfig,
)
from moefold.data.corpus import Corpus
from moefold.layout.axes import single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import assemble_run
from moefold.train.evaluate import validation_loss
from moefold.train.step import take_next_step

PLAIN = "bf16"  # the variant that all are compared with; the model's own dtype, fp32 on a CPU
LAST_STEPS = 100  # whose losses are averaged
NVFP4_PLAIN_AT_THE_END = 1  # layer; of 8 the recipe's own choice would be 2, a quarter of all


@dataclass(frozen=True)
class RecipeRun:
    """What one run gave. `setting`: a digest of its whole configuration. `losses`: of every step. `held_out`: after the
    last step, on text that was not trained on. `plain_share`: of the parameters of linear layers, head and router
    included, those that no recipe quantises."""

    variant: str
    seed: int
    setting: str
    losses: list[float]
    held_out: float
    plain_share: float
    milliseconds: float

    @property
    def last(self) -> float:
        return mean(self.losses[-LAST_STEPS:])


def compared_model(options: RecipesOptions, device: str) -> Config:
    """On a GPU 8 layers of 32 experts, 16,384 bytes of text a step, as one graph; on a CPU a preset's tiny form, as a
    smoke test."""
    config = smoke_test_config(device, options.steps)
    if device == "cuda":
        config = model_for_gpu(options)
    return resolve_recipe("tiny", options.overrides, 1, change=lambda _: config)


def model_for_gpu(options: RecipesOptions) -> Config:
    attention = AttentionConfig(heads=8, kv_heads=2, head_dim=64, qk_norm="head")
    moe = MoeConfig(experts=32, top_k=4, ffn=512)
    shape = ModelConfig(layers=8, hidden=512)
    model = byte_model(shape, attention, moe)
    data = DataConfig(seq_len=512)
    if options.files:
        data = replace(data, source="files", files=options.files, skip_bad=True)
    batch = TrainConfig(global_batch=32, micro_batch=32, validate_sequences=512)
    train = replace(batch, steps=options.steps, device="cuda")
    optim = OptimConfig(lr=1e-3, warmup=50, final_lr=0.0)  # without noise of the last steps
    memory = MemoryConfig(graphs="whole")
    observe = ObserveConfig(fp8_every=options.steps + 1)  # steps that record are no replays
    return Config("recipes", model, data=data, train=train, optim=optim, memory=memory, observe=observe)


def variant_config(config: Config, name: str, seed: int) -> Config:
    variant = VARIANTS[name]
    precision = replace(config.precision, recipe=variant.recipe, **variant.options)
    if variant.recipe == "nvfp4" and precision.exclude_last < 0:
        precision = replace(precision, exclude_last=NVFP4_PLAIN_AT_THE_END)
    train = replace(config.train, seed=seed)
    return replace(config, precision=precision, train=train)


def recipe_run(config: Config, variant: str, seed: int, corpus: Corpus) -> RecipeRun:
    chosen = variant_config(config, variant, seed)
    train = chosen.train
    world = single_rank_world(train.device)
    run = assemble_run(chosen, world, Path("."), corpus)
    reports = [take_next_step(run) for _ in range(train.steps)]
    losses = [report.loss for report in reports]
    seconds = [report.seconds for report in reports]
    held_out = validation_loss(run)
    run.gradients.remove_hooks()
    share = plain_share(chosen)
    milliseconds = 1e3 * median(seconds)
    setting = setting_of(chosen)
    return RecipeRun(variant, seed, setting, losses, held_out, share, milliseconds)


def setting_of(config: Config) -> str:
    """A digest of all keys."""
    keys = repr(config)
    return hashlib.sha256(keys.encode()).hexdigest()


def plain_share(config: Config) -> float:
    """Of the parameters of linear layers, those that no recipe quantises."""
    recipe_of = {chosen.product.name: chosen.recipe for chosen in product_recipes(config)}
    plain = every = 0
    for prefix, step in prefixed_steps(config.model):
        for weight in step.weights:
            if not weight.is_matrix or weight.name == "embedding.weight":
                continue
            every += weight.size
            place = product_place(weight.name)
            recipe = recipe_of.get(prefix + place, "plain")
            if recipe == "plain":
                plain += weight.size
    return plain / every


def file_of_run(out: Path, variant: str, seed: int) -> Path:
    words = variant.replace(",", "").lower().split()
    name = "-".join(words)
    return out / "runs" / f"{name}-{seed}.json"


def save_run(out: Path, run: RecipeRun) -> None:
    path = file_of_run(out, run.variant, run.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(run))
    replace_file(path, text)


def replace_file(path: Path, text: str) -> None:
    """Whole at any time: other processes read the folder."""
    begun = path.with_suffix(".begun")
    begun.write_text(text)
    begun.replace(path)


def saved_runs(out: Path, config: Config) -> Iterator[RecipeRun]:
    """Runs of this model that are in the folder, whoever made them."""
    folder = out / "runs"
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        setting = found.get("setting")
        expected = variant_config(config, found["variant"], found["seed"])
        if setting == setting_of(expected):
            yield RecipeRun(**found)

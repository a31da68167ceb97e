"""Runs whose weights are stored in FP8 alone: the losses, checkpoints and exports of runs that keep bf16 copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.cli.main import run_command_line
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.weight_copies import copies_of
from moefold.precision.fp8 import Fp8Recipe
from moefold.precision.recipes import named_products, weight_formats
from moefold.presets.recipe import resolve_recipe
from moefold.shard.fp8_weights import Fp8Weights
from moefold.shard.storage import WeightStorage
from moefold.train.assemble import Run, assemble_run
from moefold.train.resume import begin_checkpoint, make_background_saver, resume_run
from moefold.train.step_profile import resident_bytes
from tests.support.ranks import run_ranks
from tests.test_fp8_layouts_agree import BASE, differing, everything, on_eight, on_one
from tests.train.test_fp8_runs import SMALL, counting_corpus, losses_of, make_run

STORED = ("--precision.storage", "fp8")
PRECISIONS = {
    "fp32": [],
    "bf16": ["--train.precision", "bf16", "--model.moe.ffn", "128"],
    "bf16, split main weights": ["--train.precision", "bf16", "--optim.main", "split"],
    "bf16, delayed scales": ["--train.precision", "bf16", "--precision.scaling", "delayed"],
    "some products plain, others of another recipe": [
        *("--precision.recipes", "*.attention.*: plain, *.down_product: fp8_hybrid"),
    ],
}


def copies_by_name(run: Run) -> dict[str, list[Tensor]]:
    """Bytes and scales of every weight in FP8, both layouts, by the name of the parameter; of ranks, their own part."""
    run.parameters.await_all_buckets()
    recipe = next(p.recipe for p in named_products(run.model).values() if isinstance(p.recipe, Fp8Recipe))
    formats = weight_formats(run.model)
    copies: dict[str, list[Tensor]] = {}
    for parameter in declared_parameters(run.model):
        if parameter.name in formats:
            first = 1 if parameter.declaration.stacked else 0
            both = recipe.weight(parameter.tensor.flatten(first, -2))
            copies[parameter.name] = [
                x.view(torch.uint8) if x.element_size() == 1 else x for layout in both for x in layout
            ]
    return copies


def same_copies(mine: dict[str, list[Tensor]], right: dict[str, list[Tensor]]) -> bool:
    pairs = [(a, b) for name in right for a, b in zip(mine[name], right[name], strict=True)]
    return mine.keys() == right.keys() and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor", "fp8_hybrid"])
def test_a_run_without_copies_has_the_losses_of_one_that_keeps_them_to_the_bit(recipe: str, name: str, tmp_path: Path):
    words = PRECISIONS[name]
    if "delayed" in words and recipe != "fp8_tensor":
        pytest.skip("scales of blocks are never delayed")
    stored, kept = make_run(tmp_path, recipe, *words, *STORED), make_run(tmp_path, recipe, *words)
    assert losses_of(stored, 4) == losses_of(kept, 4)
    if "precision.recipes" not in " ".join(words):
        assert same_copies(copies_by_name(stored), copies_by_name(kept))


def test_weights_in_fp8_have_no_other_memory_and_the_rest_of_the_model_has(tmp_path: Path):
    run, kept = (make_run(tmp_path, "fp8_block", *PRECISIONS["bf16"], *more) for more in (STORED, ()))
    formats = weight_formats(run.model)
    assert any(".experts." in name for name in formats)
    assert any(".attention." in name for name in formats)
    count = 0
    for parameter in declared_parameters(run.model):
        if parameter.name in formats:
            assert parameter.tensor.untyped_storage().nbytes() == 2
            assert parameter.tensor.isnan().all()
            assert copies_of(parameter.tensor).stored is not None
            count += parameter.tensor.numel()
        else:
            assert parameter.tensor.isfinite().all()
    scales = 2 * sum(x.nbytes for copies in copies_by_name(run).values() for x in copies[1::2]) // 2
    assert resident_bytes(run)["weights"] == resident_bytes(kept)["weights"] - 2 * count + 2 * count + scales
    assert resident_bytes(run)["main weights"] == resident_bytes(kept)["main weights"]


# Bytes of a main weight beside one that is stored in FP8, and of one beside bf16
MAIN_TYPES = {"bf16": (2, 0), "fp16": (2 + 4 / 128, 2 + 4 / 128), "fp8": (1 + 4 / 128, 1 + 4 / 128)}


@pytest.mark.parametrize("main", MAIN_TYPES)
def test_weights_in_fp8_are_made_of_main_weights_of_any_type(main: str, tmp_path: Path):
    """Losses stay near those with fp32 main weights; a share has the padding of its bucket."""
    words = (*PRECISIONS["bf16"], *STORED)
    exact = losses_of(make_run(tmp_path, "fp8_block", *words), 6)
    run = make_run(tmp_path, "fp8_block", *words, "--optim.main", main)
    of_stored, beside_bf16 = MAIN_TYPES[main]
    expected = 0.0
    for bucket in run.gradients.buckets:
        size = of_stored if isinstance(bucket.storage, Fp8Weights) else beside_bf16
        expected += size * len(bucket.weights)
    assert resident_bytes(run)["main weights"] == expected
    found = losses_of(run, 6)
    assert found == pytest.approx(exact, rel=0.02)
    assert found[-1] < found[0]


def small_config(*words: str) -> Config:
    return resolve_recipe("tiny", [*SMALL, *words], 1)


def step_on_rank(world: World, config: Config) -> tuple[dict[str, list[Tensor]], bool]:
    """The copies after a step, and whether this rank's shares begin within a block."""
    run = assemble_run(config, world, Path("."), counting_corpus())
    losses_of(run, 1)
    cuts = [begins_within_block(b.share.start, b.storage) for b in run.gradients.buckets]
    return copies_by_name(run), any(cuts)


def begins_within_block(begin: int, storage: WeightStorage) -> bool:
    if not isinstance(storage, Fp8Weights):
        return False
    for place in storage.places:
        _, n, d = place.shape
        row, column = divmod(begin - place.start, d)
        if place.start < begin < place.stop and (row % n % 128 or column % 128):
            return True
    return False


@pytest.mark.parametrize(("ranks", "recipe"), [(2, "fp8_block"), (4, "fp8_tensor"), (8, "fp8_block")])
def test_weights_sharded_over_replicas_have_the_bytes_of_unsharded_ones(ranks: int, recipe: str):
    """Widths of 144 and 80: blocks at the edges are not whole."""
    words = ["--precision.recipe", recipe, "--model.hidden", "144", "--model.moe.ffn", "80", "--model.layers", "1"]
    words += ["--train.micro_batch", "1", "--train.global_batch", "8", "--data.seq_len", "32"]
    right, _ = step_on_rank(single_rank_world(), small_config(*words))
    for rank, (copies, within_block) in enumerate(run_ranks(step_on_rank, ranks, small_config(*words, *STORED))):
        assert same_copies(copies, right), f"rank {rank}"
        assert within_block == (rank > 0)


def storing(config: Config) -> Config:
    return replace(config, precision=replace(config.precision, storage="fp8"))


LAYOUTS = {
    "dp": BASE,
    "pp": replace(BASE, parallel=ParallelConfig(pp=2), pipeline=PipelineConfig(schedule="zb_h1")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_data_and_pipeline_parallel_ranks_equal_one_rank_with_copies_to_the_bit(name: str):
    config = LAYOUTS[name]
    assert differing(on_one(config, 2), on_eight(storing(config), 2), everything) == []


@pytest.mark.extended
def test_expert_parallel_ranks_equal_one_rank_with_copies_to_the_bit():
    """Two replicas of every expert."""
    config = replace(BASE, parallel=ParallelConfig(ep=4, dispatcher="all_to_all"))
    ranks = on_eight(storing(config), 1)

    def is_dense(what: str) -> bool:
        return ".experts." not in what and not what.endswith("gradient norm")

    def is_of_experts(what: str) -> bool:
        return ".experts." in what

    assert differing(on_one(config, 1), ranks, is_dense) == []
    assert differing(on_one(config, 1, micro_batch=4), ranks, is_of_experts) == []


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tp=2), ParallelConfig(etp=2, ep=2), ParallelConfig(cp=2, context="ring")]
)
def test_every_layout_has_the_losses_of_the_same_layout_with_copies(parallel: ParallelConfig):
    config = replace(BASE, parallel=parallel, train=replace(BASE.train, global_batch=4))
    kept, stored = on_ranks(config), on_ranks(storing(config))
    assert stored == kept


def on_ranks(config: Config) -> list[list[float]]:
    return run_ranks(losses_on_rank, 4, config)


def losses_on_rank(world: World, config: Config) -> list[float]:
    folded = create_world(world.rank, world.size, world.device, config.parallel, node_size=4)
    return losses_of(assemble_run(config, folded, Path("."), counting_corpus()), 2)


def saved(folder: Path, *words: str) -> tuple[Run, list[float]]:
    """A run that was saved after two steps, and the losses of two further ones."""
    run = make_run(folder, "fp8_block", *words)
    with make_background_saver(run, print) as saver:
        losses_of(run, 2)
        begin_checkpoint(run, saver)
    return run, losses_of(run, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("before", [(), STORED], ids=["from copies", "from FP8"])
@pytest.mark.parametrize("after", [(), STORED], ids=["to copies", "to FP8"])
def test_a_resumed_run_has_the_same_losses_whatever_both_store(
    before: tuple[str, ...], after: tuple[str, ...], precision: str, tmp_path: Path
):
    words = PRECISIONS[precision]
    run, unbroken = saved(tmp_path, *words, *before)
    resumed = make_run(tmp_path / "other", "fp8_block", *words, *after, "--train.seed", "1")
    losses_of(resumed, 1)  # so that the run has copies of other weights
    assert resume_run(resumed, str(tmp_path / "checkpoints"), print)
    assert losses_of(resumed, 2) == unbroken
    names = collect_tensors(run.model, run.optimizer, run.further_state)
    assert names.keys() == collect_tensors(resumed.model, resumed.optimizer, resumed.further_state).keys()


def resumed_on_rank(world: World, config: Config, folder: Path) -> list[float]:
    run = assemble_run(config, world, folder / "on ranks", counting_corpus())
    assert resume_run(run, str(folder / "checkpoints"), print)
    return losses_of(run, 2)


@pytest.mark.extended
def test_a_checkpoint_of_one_rank_is_resumed_on_two_and_the_reverse(tmp_path: Path):
    words = ["--train.micro_batch", "1"]
    _, unbroken = saved(tmp_path / "one", *words, *STORED)
    config = small_config("--precision.recipe", "fp8_block", *words, *STORED)
    assert run_ranks(resumed_on_rank, 2, config, tmp_path / "one") == [unbroken] * 2
    assert run_ranks(saved_on_rank, 2, config, tmp_path / "two") == [unbroken] * 2
    alone = make_run(tmp_path / "alone", "fp8_block", *words, *STORED)
    assert resume_run(alone, str(tmp_path / "two" / "checkpoints"), print)
    assert losses_of(alone, 2) == unbroken


def saved_on_rank(world: World, config: Config, folder: Path) -> list[float]:
    run = assemble_run(config, world, folder, counting_corpus())
    with make_background_saver(run, print) as saver:
        losses_of(run, 2)
        begin_checkpoint(run, saver)
    return losses_of(run, 2)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_block"])
def test_an_exported_model_is_that_of_a_run_with_copies(dtype: str, tmp_path: Path):
    words = [*PRECISIONS["bf16"], "--model.attention.qk_norm", "head", "--model.moe.balance.bias_rate", "0"]
    exported: list[dict[str, Tensor]] = []
    for name, more in {"copies": (), "fp8": STORED}.items():
        folder = tmp_path / name
        saved(folder, *words, *more)
        assert run_command_line(["convert", str(folder), str(folder / "hf"), "--dtype", dtype]) == 0
        exported.append(dict(tensors_as_bytes(folder / "hf" / "model.safetensors")))
    kept, stored = exported
    assert kept.keys() == stored.keys()
    assert all(torch.equal(kept[name], stored[name]) for name in kept)


def tensors_as_bytes(path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in load_file(path).items():
        yield name, tensor.flatten().view(torch.uint8)


@pytest.mark.parametrize("words", [["--precision.recipe", "fp8_row"], []], ids=["rows", "plain"])
def test_recipes_that_cannot_be_stored_in_fp8_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["explain", "tiny", *words, *STORED]) == 2
    assert "precision.storage = fp8" in capsys.readouterr().err

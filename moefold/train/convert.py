"""Weights from one form to another, tensor by tensor: a checkpoint or a Hugging Face folder in, a folder out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.hf.config_json import FAMILIES, config_json_for, describe_model, family_for_model
from moefold.checkpoint.hf.export import ALWAYS_FP32, iterate_hf_tensors
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.name_table import NameTable
from moefold.checkpoint.hf.piece_values import FetchBox
from moefold.checkpoint.hf.read_weights import FolderWeights, check_aliases, check_names_and_shapes, our_box_fetcher
from moefold.checkpoint.hf.upcycle import UpcycledWeights, parse_upcycle_plan, upcycled_model
from moefold.checkpoint.hf.write_weights import DTYPE_CODES, PlannedTensor, check_output_folder, write_model_folder
from moefold.checkpoint.live.load import find_checkpoint
from moefold.checkpoint.live.saved_model import SavedModel
from moefold.config.errors import RunFailure, UserError
from moefold.config.read import with_values
from moefold.config.run import Config, ModelConfig
from moefold.layout.axes import single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.train.layerwise_logits import logits_by_layer

LOGITS_TOLERANCE = (
    1e-5  # how far logits of an upcycled model may lie from the dense one's, relative to the largest, in fp32
)
COMPARED_TOKENS = 64  # that are compared


@dataclass(frozen=True)
class ConvertRequest:
    family: str | None
    dtype: str
    upcycle: str | None
    seed: int
    overwrite: bool


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from: the model, boxes of its tensors by name, and what each of these is saved as."""

    model: ModelConfig
    fetch_box: FetchBox
    dtype: Callable[[str], torch.dtype]
    tokenizer: Path | None  # the folder of its files
    longest: int  # sequence that it was made for
    biases: tuple[str, ...] = ()  # selection biases that are not zero


def convert_weights(source: Path, out: Path, wishes: ConvertRequest, say: Callable[[str], None]) -> None:
    check_output_folder(out, wishes.overwrite)
    is_folder = (source / "config.json").exists()
    if wishes.upcycle and not is_folder:
        raise UserError(f"--upcycle starts from a folder with config.json and safetensors; {source} has no config.json")
    found = source_from_folder(source) if is_folder else source_from_checkpoint(source, say)
    if wishes.upcycle:
        found = upcycled_source(found, wishes)
    family = family_for_model(found.model, wishes.family)
    options = config_json_for(family, found.model)
    table = family.name_table(found.model)
    refuse_unplaced_biases(found.biases, table)
    plan = plan_written_tensors(table, found, wishes)
    kinds = [str(each.dtype).removeprefix("torch.") for each in plan]
    options |= {"max_position_embeddings": longest_sequence(found), "dtype": max(set(kinds), key=kinds.count)}
    tensors = iterate_hf_tensors(table, found.fetch_box)
    as_planned = ((name, tensor.to(each.dtype)) for (name, tensor), each in zip(tensors, plan, strict=True))
    write_model_folder(out, options, plan, as_planned, found.tokenizer, wishes.overwrite)
    size = sum(each.bytes for each in plan) / 1e9
    say(f"wrote {out}: {family.kind}, {len(plan)} tensors, {size:.3g} GB as {', '.join(sorted(set(kinds)))}")
    if wishes.upcycle:
        say(compare_with_dense(source, out))


def longest_sequence(source: WeightSource) -> int:
    rope = source.model.attention.rope
    stretched = int(rope.factor * rope.original_length) if rope.scaling in ("yarn", "llama3") else 0
    return max(stretched, source.longest)


def plan_written_tensors(table: NameTable, source: WeightSource, wishes: ConvertRequest) -> list[PlannedTensor]:
    """What each tensor will be written as: as it is saved, or as wished, but for what is fp32 then in any case."""
    sources = {twin.theirs: twin.of for twin in table.aliases}

    def written_dtype(name: str) -> torch.dtype:
        if wishes.dtype != "as_saved":
            return torch.float32 if name.endswith(ALWAYS_FP32) else DTYPES[wishes.dtype]
        pieces = table.pieces_by_theirs.get(sources.get(name, name))
        return source.dtype(pieces[0].ours if pieces else "embedding.weight")

    return [PlannedTensor(name, shape, written_dtype(name)) for name, shape in table.written.items()]


def refuse_unplaced_biases(biases: Iterable[str], table: NameTable) -> None:
    """Selection biases are part of a model; a family that has no place for them would route otherwise."""
    if lost := [name for name in biases if name not in table.pieces_by_ours]:
        raise UserError(
            f"{lost[0]} is not zero ({len(lost)} such), and this family has no place for selection biases; "
            "choose one that has with --family, or train with --model.moe.balance.bias_rate 0"
        )


def source_from_folder(path: Path) -> WeightSource:
    folder = open_model_folder(path)
    described = describe_model(folder)
    weights, table = FolderWeights(folder), described.family.name_table(described.model)
    check_names_and_shapes(weights, table)
    check_aliases(weights, table)
    saved_as = {code: dtype for dtype, code in DTYPE_CODES.items()}

    def saved_dtype(name: str) -> torch.dtype:
        stored = folder.tensors.get(table.pieces_by_ours[name][0].theirs)
        return saved_as.get(stored.dtype, torch.bfloat16) if stored else torch.bfloat16  # quantised

    length = folder.options.get("max_position_embeddings", 4096)
    return WeightSource(described.model, our_box_fetcher(weights, table), saved_dtype, path, length)


def source_from_checkpoint(place: Path, say: Callable[[str], None]) -> WeightSource:
    found = find_checkpoint(place, single_rank_world(), say)
    if found is None:
        raise UserError(f"{place} is neither a run, nor a checkpoint, nor a folder with config.json and safetensors")
    problems: dict[str, str] = {}
    config = with_values(Config(), found.state["config"], problems)
    if problems:
        raise UserError(f"{found.path} was written with other settings than this version has:", *problems.values())
    saved, everyone = SavedModel(found.opened), ((0, config.model.moe.experts),)
    say(f"reading {found.path}, step {found.state['step']}")
    biases = [n for n in saved.names if n.endswith("load.bias_E") and saved.fetch_box(n, everyone).count_nonzero()]
    named = Path(config.data.tokenizer).expanduser()
    tokenizer = named.parent if config.data.tokenizer != "byte" and named.is_file() else None
    return WeightSource(config.model, saved.fetch_box, saved.dtype, tokenizer, config.data.seq_len, tuple(biases))


def upcycled_source(dense: WeightSource, wishes: ConvertRequest) -> WeightSource:
    if dense.model.moe.dense_layers < dense.model.layers:
        kinds = ", ".join(name for name, family in FAMILIES.items() if family.dense)
        raise UserError(f"--upcycle starts from a dense model, and this one has experts; expected one of {kinds}")
    plan = parse_upcycle_plan(wishes.upcycle or "", dense.model)
    made = UpcycledWeights(plan, dense.model, dense.fetch_box, wishes.seed)
    return replace(
        dense,
        model=upcycled_model(dense.model, plan),
        fetch_box=made.fetch_box,
        dtype=lambda name: dense.dtype(made.dense_source_name(name)),
    )


def compare_with_dense(dense: Path, made: Path) -> str:
    """The step-0 check: both folders as they lie on the disk, one layer at a time, on random tokens."""
    folders: list[Any] = [open_model_folder(dense), open_model_folder(made)]
    vocab = describe_model(folders[0]).model.vocab
    ids_BS = torch.randint(0, vocab, (1, COMPARED_TOKENS), generator=torch.Generator().manual_seed(0))
    expected, found = (logits_by_layer(folder, ids_BS) for folder in folders)
    most, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not most <= LOGITS_TOLERANCE * max(1.0, largest):
        raise RunFailure(
            f"{made} does not compute what {dense} does: logits differ by up to {most:.2g}; "
            "where down x G is not exact (G no power of two), write it with --dtype fp32"
        )
    return f"the same as the dense model: logits of {COMPARED_TOKENS} random tokens differ by at most {most:.2g}"

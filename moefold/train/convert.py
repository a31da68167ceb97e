"""Weights from one form to another, tensor by tensor: a checkpoint or a Hugging Face folder in, a folder out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moefold.checkpoint.hf.config import FAMILIES, describe, family_for, options_for
from moefold.checkpoint.hf.export import KEPT, hf_tensors
from moefold.checkpoint.hf.folder import open_folder
from moefold.checkpoint.hf.move import Fetch
from moefold.checkpoint.hf.piece import Table
from moefold.checkpoint.hf.read import Weights, check, check_twins, our_boxes
from moefold.checkpoint.hf.write import CODES, Planned, claim, write_folder
from moefold.checkpoint.load import find
from moefold.checkpoint.upcycle import Upcycling, read_plan, upcycled_model
from moefold.checkpoint.whole import Saved
from moefold.config.read import with_values
from moefold.config.refused import Failed, Refused
from moefold.config.run import Config, ModelConfig
from moefold.kernels.registry import DTYPES
from moefold.layout.axes import alone
from moefold.train.by_layer import logits_by_layer

SAME = 1e-5  # how far logits of an upcycled model may lie from the dense one's, relative to the largest, in fp32
TOKENS = 64  # that are compared


@dataclass(frozen=True)
class Wishes:
    family: str | None
    dtype: str
    upcycle: str | None
    seed: int
    overwrite: bool


@dataclass(frozen=True)
class Source:
    """Where weights come from: the model, boxes of its tensors by name, and what each of these is saved as."""

    model: ModelConfig
    fetch: Fetch
    dtype: Callable[[str], torch.dtype]
    tokenizer: Path | None  # the folder of its files
    longest: int  # sequence that it was made for
    biases: tuple[str, ...] = ()  # selection biases that are not zero


def convert(source: Path, out: Path, wishes: Wishes, say: Callable[[str], None]) -> None:
    claim(out, wishes.overwrite)
    is_folder = (source / "config.json").exists()
    if wishes.upcycle and not is_folder:
        raise Refused(f"--upcycle starts from a folder with config.json and safetensors; {source} has no config.json")
    found = of_folder(source) if is_folder else of_checkpoint(source, say)
    if wishes.upcycle:
        found = upcycled(found, wishes)
    family = family_for(found.model, wishes.family)
    options = options_for(family, found.model)
    table = family.table(found.model)
    refuse_lost(found.biases, table)
    plan = planned(table, found, wishes)
    kinds = [str(each.dtype).removeprefix("torch.") for each in plan]
    options |= {"max_position_embeddings": longest(found), "dtype": max(set(kinds), key=kinds.count)}
    tensors = hf_tensors(table, found.fetch)
    as_planned = ((name, tensor.to(each.dtype)) for (name, tensor), each in zip(tensors, plan, strict=True))
    write_folder(out, options, plan, as_planned, found.tokenizer, wishes.overwrite)
    size = sum(each.bytes for each in plan) / 1e9
    say(f"wrote {out}: {family.kind}, {len(plan)} tensors, {size:.3g} GB as {', '.join(sorted(set(kinds)))}")
    if wishes.upcycle:
        say(compare(source, out))


def longest(source: Source) -> int:
    rope = source.model.attention.rope
    stretched = int(rope.factor * rope.original_length) if rope.scaling in ("yarn", "llama3") else 0
    return max(stretched, source.longest)


def planned(table: Table, source: Source, wishes: Wishes) -> list[Planned]:
    """What each tensor will be written as: as it is saved, or as wished, but for what is fp32 then in any case."""
    sources = {twin.theirs: twin.of for twin in table.twins}

    def dtype_of(name: str) -> torch.dtype:
        if wishes.dtype != "as_saved":
            return torch.float32 if name.endswith(KEPT) else DTYPES[wishes.dtype]
        pieces = table.by_theirs.get(sources.get(name, name))
        return source.dtype(pieces[0].ours if pieces else "embedding.weight")

    return [Planned(name, shape, dtype_of(name)) for name, shape in table.written.items()]


def refuse_lost(biases: Iterable[str], table: Table) -> None:
    """Selection biases are part of a model; a family that has no place for them would route otherwise."""
    if lost := [name for name in biases if name not in table.by_ours]:
        raise Refused(
            f"{lost[0]} is not zero ({len(lost)} such), and this family has no place for selection biases; "
            "choose one that has with --family, or train with --model.moe.bias_rate 0"
        )


def of_folder(path: Path) -> Source:
    folder = open_folder(path)
    described = describe(folder)
    weights, table = Weights(folder), described.family.table(described.model)
    check(weights, table)
    check_twins(weights, table)
    saved_as = {code: dtype for dtype, code in CODES.items()}

    def dtype(name: str) -> torch.dtype:
        stored = folder.tensors.get(table.by_ours[name][0].theirs)
        return saved_as.get(stored.dtype, torch.bfloat16) if stored else torch.bfloat16  # quantised

    length = folder.options.get("max_position_embeddings", 4096)
    return Source(described.model, our_boxes(weights, table), dtype, path, length)


def of_checkpoint(place: Path, say: Callable[[str], None]) -> Source:
    found = find(place, alone(), say)
    if found is None:
        raise Refused(f"{place} is neither a run, nor a checkpoint, nor a folder with config.json and safetensors")
    problems: dict[str, str] = {}
    config = with_values(Config(), found.state["config"], problems)
    if problems:
        raise Refused(f"{found.path} was written with other settings than this version has:", *problems.values())
    saved, everyone = Saved(found.opened), ((0, config.model.moe.experts),)
    say(f"reading {found.path}, step {found.state['step']}")
    biases = [n for n in saved.names if n.endswith("load.bias_E") and saved.fetch(n, everyone).count_nonzero()]
    named = Path(config.data.tokenizer).expanduser()
    tokenizer = named.parent if config.data.tokenizer != "byte" and named.is_file() else None
    return Source(config.model, saved.fetch, saved.dtype, tokenizer, config.data.seq_len, tuple(biases))


def upcycled(dense: Source, wishes: Wishes) -> Source:
    if dense.model.moe.dense_layers < dense.model.layers:
        kinds = ", ".join(name for name, family in FAMILIES.items() if family.dense)
        raise Refused(f"--upcycle starts from a dense model, and this one has experts; expected one of {kinds}")
    plan = read_plan(wishes.upcycle or "", dense.model)
    made = Upcycling(plan, dense.model, dense.fetch, wishes.seed)
    return replace(
        dense,
        model=upcycled_model(dense.model, plan),
        fetch=made.fetch,
        dtype=lambda name: dense.dtype(made.source_of(name)),
    )


def compare(dense: Path, made: Path) -> str:
    """The step-0 check: both folders as they lie on the disk, one layer at a time, on random tokens."""
    folders: list[Any] = [open_folder(dense), open_folder(made)]
    vocab = describe(folders[0]).model.vocab
    ids_BS = torch.randint(0, vocab, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    expected, found = (logits_by_layer(folder, ids_BS) for folder in folders)
    most, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not most <= SAME * max(1.0, largest):
        raise Failed(
            f"{made} does not compute what {dense} does: logits differ by up to {most:.2g}; "
            "where down x G is not exact (G no power of two), write it with --dtype fp32"
        )
    return f"the same as the dense model: logits of {TOKENS} random tokens differ by at most {most:.2g}"

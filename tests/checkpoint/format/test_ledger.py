"""A ledger depends on the values alone, and says by name what changed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.format.boxes import Box, whole_box
from moefold.checkpoint.format.ledger import (
    HASH_PIECE_BYTES,
    LedgerEntry,
    TensorSpec,
    compare_ledgers,
    encode_ledger,
    hash_pieces,
    parse_ledger,
)
from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.live.logical_tensors import TensorPart, hold_box
from moefold.checkpoint.live.save import save_checkpoint
from moefold.layout.axes import World, single_rank_world
from tests.support.ranks import run_ranks

ROW = 1 << 10
TENSORS = {  # more than a piece, ends in the middle of one, and rows that are no power of two
    "matrix": (2500, ROW + 3),
    "experts": (3, 1500, ROW),
    "vector": (HASH_PIECE_BYTES // 2 + 77,),
}


def values(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(-(2**31), 2**31, TENSORS[name], generator=generator, dtype=torch.int64).to(torch.int32)


def by_hand(name: str) -> tuple[str, list[str]]:
    """The definition of the documentation, on a whole tensor in memory."""
    found = values(name)
    units = found.flatten(1).unbind() if name == "experts" else [found.flatten()]
    digests = []
    for unit in units:
        raw = unit.numpy().tobytes()
        pieces = [
            hashlib.sha256(raw[at : at + HASH_PIECE_BYTES]).digest() for at in range(0, len(raw), HASH_PIECE_BYTES)
        ]
        digests.append(hashlib.sha256(b"".join(pieces)).digest())
    experts = [each.hex() for each in digests] if name == "experts" else []
    return hashlib.sha256(b"".join(digests)).hexdigest() if experts else digests[0].hex(), experts


def cut_rows(shape: tuple[int, ...], rank: int, size: int) -> Box:
    step = -(-shape[0] // size)
    return ((rank * step, max(0, min(step, shape[0] - rank * step))), *whole_box(shape[1:]))


def cut_columns(shape: tuple[int, ...], rank: int, size: int) -> Box:
    step = -(-shape[-1] // size)
    return (*whole_box(shape[:-1]), (rank * step, min(step, shape[-1] - rank * step)))


def copies(shape: tuple[int, ...], rank: int, size: int) -> Box:
    return whole_box(shape)


CUTS = {"rows": cut_rows, "columns": cut_columns, "copies": copies}


def write(world: World, folder: str, cut: str) -> None:
    parts = {}
    for name, shape in TENSORS.items():
        box = CUTS[cut](shape, world.rank, world.size)
        mine = values(name)[tuple(slice(start, start + size) for start, size in box)].clone()
        parts[name] = TensorPart(shape, mine.dtype, [hold_box(box, mine)], name == "experts")
    save_checkpoint(Path(folder), 1, parts, {"step": 1}, RetentionPolicy(1), world)


@pytest.mark.parametrize("cut", CUTS)
def test_the_ledger_is_what_its_definition_says_however_ranks_hold_the_tensors(cut: str, tmp_path: Path):
    run_ranks(write, 3, str(tmp_path), cut)
    ledger = verify_checkpoint(tmp_path / "step-00000001").ledger
    for name in TENSORS:
        sha256, experts = by_hand(name)
        assert ledger[name].sha256 == sha256
        assert list(ledger[name].experts or []) == experts
    write(single_rank_world(), str(tmp_path / "one"), cut)
    alike = [folder / "step-00000001" / "ledger.json" for folder in (tmp_path, tmp_path / "one")]
    assert alike[0].read_bytes() == alike[1].read_bytes()


@pytest.mark.parametrize("what", [TensorSpec("int32", s, n == "experts") for n, s in TENSORS.items()], ids=str)
def test_pieces_cover_a_tensor_once_and_never_cross_an_expert(what: TensorSpec):
    pieces = list(hash_pieces(what))
    assert [piece.first for piece in pieces] == [0, *(piece.last for piece in pieces[:-1])]
    assert pieces[-1].last == prod(what.shape)
    each = prod(what.shape) // (what.shape[0] if what.stacked else 1)
    assert all(piece.first // each == (piece.last - 1) // each == piece.unit for piece in pieces)


def entry(*experts: str | None) -> LedgerEntry:
    return LedgerEntry("float32", (len(experts), 4), "joined" + "".join(map(str, experts)), experts)


BEFORE = entry(*"abcdef")
FATES = {
    "dropped in the middle": (entry(*"abdef"), [": expert 2 is missing"]),
    "dropped at the end": (entry(*"abcde"), [": expert 5 is missing"]),
    "added": (entry(*"abcdefx"), [": expert 6 is new"]),
    "swapped": (entry(*"aecdbf"), [": experts 1 and 4 are swapped"]),
    "turned round": (
        entry(*"bcadef"),
        [f": expert {a} lies where expert {b} was" for a, b in ((0, 2), (1, 0), (2, 1))],
    ),
    "changed": (entry(*"abcxef"), [": expert 3 has other values"]),
    "without values": (entry("a", "b", None, *"def"), [": expert 2 is missing"]),
    "all changed": (entry(*"uvwxyz"), [" has other values in all 6 experts"]),
}


@pytest.mark.parametrize("fate", FATES)
def test_what_became_of_each_expert_is_told(fate: str):
    after, told = FATES[fate]
    found = [each.text for each in compare_ledgers({"w": BEFORE}, {"w": after}) if each.kind != "shape"]
    assert found == [f'"w"{text}' for text in told]


def test_names_shapes_and_dtypes_that_differ_are_told_with_near_names():
    plain = LedgerEntry("float32", (2, 3), "s1")
    old = {"same": plain, "layer.weight": replace(plain, sha256="s2"), "old": replace(plain, sha256="s3"), "d": plain}
    new = {"same": plain, "layer.weigth": replace(plain, sha256="s4"), "moved": replace(plain, sha256="s3"),
           "d": replace(plain, dtype="bfloat16", shape=(3, 2))}  # fmt: skip
    assert [(each.kind, each.text) for each in compare_ledgers(old, new)] == [
        ("renamed", '"old" is now called "moved"'),
        ("missing", '"layer.weight" is missing (did you mean "layer.weigth"?)'),
        ("extra", '"layer.weigth" is new (did you mean "layer.weight"?)'),
        ("dtype", '"d" is bfloat16; expected float32'),
        ("shape", '"d" has shape [3, 2]; expected [2, 3]'),
    ]
    assert compare_ledgers(old, old) == []


def test_tensors_that_are_alike_are_not_taken_for_one_another():
    """Two that vanish and two that appear, all of the same values: nobody can say which became which."""
    same = LedgerEntry("float32", (2,), "s")
    kinds = [each.kind for each in compare_ledgers({"a": same, "b": same}, {"c": same, "d": same})]
    assert kinds == ["missing", "missing", "extra", "extra"]


def test_a_written_ledger_reads_back_and_has_one_form():
    ledger = {"b": BEFORE, "a": LedgerEntry("bool", (), "s")}
    assert parse_ledger(encode_ledger(ledger)) == ledger
    assert encode_ledger(dict(sorted(ledger.items()))) == encode_ledger(ledger)

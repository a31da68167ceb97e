"""The ledger of a checkpoint: shape, dtype and digest of every logical tensor and of every expert. Torch-free.

A digest depends on the values alone, not on the layout that wrote them:

    tensor    sha256 of the digests of its pieces; where dim 0 counts experts, of the digests of the experts
    expert    sha256 of the digests of its pieces
    piece     sha256 of 4 MiB of the flattened tensor (or expert), the last one shorter

A rank hashes the pieces that it holds whole. Only pieces that are split over ranks are hashed from the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from moefold.checkpoint.format.manifest import LEDGER_FILE, DamagedCheckpoint
from moefold.config.errors import did_you_mean, printable_text

HASH_PIECE_BYTES = 4 << 20  # bytes
SAFETENSORS_DTYPES = {  # torch's name: the name in safetensors, and the bytes of an element
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
LARGEST_DIM = 1 << 40
MOST_ELEMENTS = 1 << 62


class TensorSpec(NamedTuple):
    """Dtype and shape of a logical tensor. `stacked`: dim 0 counts experts."""

    dtype: str
    shape: tuple[int, ...]
    stacked: bool

    @property
    def itemsize(self) -> int:
        return SAFETENSORS_DTYPES[self.dtype][1]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def units(self) -> int:
        """Parts of the tensor that have a digest each: its experts, or the tensor itself."""
        return self.shape[0] if self.stacked else 1

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class HashPiece(NamedTuple):
    """Elements first..last of a flattened tensor. `unit` is the expert that they belong to, or 0."""

    unit: int
    first: int
    last: int


@dataclass(frozen=True)
class LedgerEntry:
    """A logical tensor and the digest of its values. An expert with missing values has the digest None."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    experts: tuple[str | None, ...] | None = None

    @property
    def spec(self) -> TensorSpec:
        stacked = self.experts is not None
        return TensorSpec(self.dtype, self.shape, stacked)


Ledger = dict[str, LedgerEntry]
TensorSpecs = Mapping[str, TensorSpec]  # by name of the tensor
ExpertDigests = Sequence[str | None]
Digest = bytes | None  # None: values are missing
PieceDigests = dict[tuple[str, int], Digest]  # by tensor and first element of the piece
EntryChange = tuple[str, str]  # kind, text


def hash_pieces(spec: TensorSpec) -> Iterator[HashPiece]:
    units = spec.units
    unit_elements = prod(spec.shape) // max(1, units)
    piece_elements = HASH_PIECE_BYTES // spec.itemsize
    for unit in range(units):
        begin = unit * unit_elements
        end = begin + unit_elements
        for first in range(begin, end, piece_elements):
            last = min(first + piece_elements, end)
            yield HashPiece(unit, first, last)


def sha256_digest(data: Any) -> bytes:
    return hashlib.sha256(data).digest()


def joined_digest(digests: Sequence[Digest]) -> Digest:
    """The digest of several digests; None if one of them is missing."""
    known = [digest for digest in digests if digest is not None]
    if len(known) < len(digests):
        return None
    return sha256_digest(b"".join(known))


def ledger_entry(spec: TensorSpec, digests: Mapping[int, Digest]) -> LedgerEntry:
    """The entry of a tensor, from the digests of its pieces by the flat index of their first element."""
    units = range(spec.units)
    piece_digests: list[list[Digest]] = [[] for _ in units]
    for piece in hash_pieces(spec):
        digest = digests.get(piece.first)
        piece_digests[piece.unit].append(digest)
    unit_digests = list(map(joined_digest, piece_digests))
    if not spec.stacked:
        sha256 = hex_or_empty(unit_digests[0])
        return LedgerEntry(spec.dtype, spec.shape, sha256)
    whole = joined_digest(unit_digests)
    sha256 = hex_or_empty(whole)
    experts = [digest.hex() if digest else None for digest in unit_digests]
    return LedgerEntry(spec.dtype, spec.shape, sha256, tuple(experts))


def hex_or_empty(digest: Digest) -> str:
    return digest.hex() if digest else ""


def encode_ledger(ledger: Ledger) -> bytes:
    """JSON with one line per tensor: the same bytes for the same tensors."""
    lines: list[str] = []
    for name in sorted(ledger):
        content = entry_as_json(ledger[name])
        entry = json.dumps(content)
        lines.append(f"{json.dumps(name)}: {entry}")
    tensors = ",\n".join(lines)
    return f'{{"piece": {HASH_PIECE_BYTES}, "tensors": {{\n{tensors}\n}}}}\n'.encode()


def entry_as_json(entry: LedgerEntry) -> dict[str, Any]:
    content: dict[str, Any] = {
        "dtype": entry.dtype,
        "shape": entry.shape,
        "sha256": entry.sha256,
    }
    if entry.experts is not None:
        content["experts"] = entry.experts
    return content


def parse_ledger(raw: bytes) -> Ledger:
    ledger: Ledger = {}
    try:
        content = json.loads(raw)
        for name, entry in content["tensors"].items():
            ledger[name] = parse_ledger_entry(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{LEDGER_FILE} is not readable: {printable_text(str(error))}") from None
    piece = content.get("piece")
    if piece != HASH_PIECE_BYTES:
        raise DamagedCheckpoint(
            f"{LEDGER_FILE} hashes pieces of {piece} bytes; this version reads those of {HASH_PIECE_BYTES}"
        )
    return ledger


def parse_ledger_entry(content: Mapping[str, Any]) -> LedgerEntry:
    dtype = str(content["dtype"])
    shape = tuple(content["shape"])
    sha256 = str(content["sha256"])
    experts = None
    if "experts" in content:
        experts = tuple(map(str, content["experts"]))
    if dtype not in SAFETENSORS_DTYPES:
        raise ValueError(f"no dtype {dtype}")
    if not is_legal_shape(shape):
        raise ValueError(f"no shape {shape}")
    if experts is not None:
        count = len(experts)
        if shape[:1] != (count,):
            raise ValueError(f"{count} experts in a tensor of shape {shape}")
    return LedgerEntry(dtype, shape, sha256, experts)


def is_legal_shape(shape: tuple[Any, ...]) -> bool:
    for size in shape:
        is_number = type(size) is int
        if not is_number or not 0 <= size < LARGEST_DIM:
            return False
    return prod(shape) < MOST_ELEMENTS


class LedgerDifference(NamedTuple):
    """One difference between a tensor of one ledger and of another."""

    kind: str  # missing, extra, renamed, dtype, shape, experts, values
    name: str
    text: str


def compare_ledgers(expected: Ledger, actual: Ledger) -> list[LedgerDifference]:
    """All differences, by name. A tensor with another name and the same values is reported as renamed."""
    # Names that only one of the two has: renamed, missing or extra.
    gone = sorted(expected.keys() - actual.keys())
    new = sorted(actual.keys() - expected.keys())
    renamed = renamed_tensors(expected, actual, gone, new)
    differences: list[LedgerDifference] = []

    def report(kind: str, name: str, text: str) -> None:
        difference = LedgerDifference(kind, name, text)
        differences.append(difference)

    for old, name in renamed.items():
        report("renamed", old, f'"{old}" is now called "{name}"')
    for name in gone:
        if name not in renamed:
            report("missing", name, f'"{name}" is missing{did_you_mean(name, new)}')
    new_names = set(renamed.values())
    for name in new:
        if name not in new_names:
            report("extra", name, f'"{name}" is new{did_you_mean(name, gone)}')
    # Names that both have: other dtype, shape or values.
    common = expected.keys() & actual.keys()
    for name in sorted(common):
        changes = entry_changes(expected[name], actual[name])
        for kind, text in changes:
            report(kind, name, f'"{name}"{text}')
    return differences


def renamed_tensors(expected: Ledger, actual: Ledger, gone: list[str], new: list[str]) -> dict[str, str]:
    """The new name of each tensor of `gone` whose values are under exactly one name of `new`."""
    renamed: dict[str, str] = {}
    for old in gone:
        values = expected[old]
        matches = [name for name in new if actual[name] == values]
        if len(matches) == 1:
            renamed[old] = matches[0]
    return renamed


def entry_changes(old: LedgerEntry, new: LedgerEntry) -> Iterator[EntryChange]:
    """(kind, text) of every difference between two entries of one name."""
    same_dtype = old.dtype == new.dtype
    same_shape = old.shape == new.shape
    if not same_dtype:
        yield "dtype", f" is {new.dtype}; expected {old.dtype}"
    if not same_shape:
        yield "shape", f" has shape {list(new.shape)}; expected {list(old.shape)}"
    inner_shape = old.shape[1:]
    same_experts = inner_shape == new.shape[1:]
    if old.experts is not None and new.experts is not None and same_experts:
        yield from stacked_changes(old.experts, new.experts)
    elif same_dtype and same_shape and old.sha256 != new.sha256:
        yield "values", " has other values" if new.sha256 else ": values are missing"


def stacked_changes(old: ExpertDigests, new: ExpertDigests) -> Iterator[EntryChange]:
    all_differ = set(old).isdisjoint(new)
    same_number = len(old) == len(new)
    if all_differ and same_number and None not in new:
        yield "values", f" has other values in all {len(new)} experts"
        return
    for text in expert_changes(old, new):
        yield "experts", text


def expert_changes(old: ExpertDigests, new: ExpertDigests) -> Iterator[str]:
    """The change of each expert: dropped, added, swapped, moved or changed."""
    if len(old) != len(new):
        yield from resized_stack_changes(old, new)
        return
    position: dict[str | None, int] = {}  # where the values of a digest are now
    for expert, digest in enumerate(new):
        if digest != old[expert]:
            position[digest] = expert
    for expert in range(len(old)):
        if new[expert] == old[expert]:
            continue
        moved_to = position.get(old[expert])
        if new[expert] is None:
            yield f": expert {expert} is missing"
        elif moved_to is None:
            yield f": expert {expert} has other values"
        elif new[expert] != old[moved_to]:
            yield f": expert {expert} lies where expert {moved_to} was"
        elif expert < moved_to:
            yield f": experts {expert} and {moved_to} are swapped"


def resized_stack_changes(old: ExpertDigests, new: ExpertDigests) -> Iterator[str]:
    for expert, sha256 in enumerate(old):
        if sha256 not in new:
            yield f": expert {expert} is missing"
    for expert, sha256 in enumerate(new):
        if sha256 not in old:
            yield f": expert {expert} is new"

"""The ledger of a checkpoint: every logical tensor with its shape, dtype and digest, and every expert's. Torch-free.

A digest depends on the values alone, not on who held which part of them:

    tensor    sha256 of the digests of its pieces; where dim 0 counts experts, of the digests of these
    expert    sha256 of the digests of its pieces
    piece     sha256 of 4 MiB of the flattened tensor (or expert), the last one shorter

So ranks that hold whole pieces hash them at once; only pieces that lie on several ranks need bytes of others.
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
SAFETENSORS_DTYPES = {  # by torch's name: what safetensors calls it, and its bytes
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


class TensorSpec(NamedTuple):
    """What a logical tensor is, whatever its values. `stacked`: dim 0 counts experts."""

    dtype: str
    shape: tuple[int, ...]
    stacked: bool

    @property
    def itemsize(self) -> int:
        return SAFETENSORS_DTYPES[self.dtype][1]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class HashPiece(NamedTuple):
    """Elements first..last of a flattened tensor; `unit` is the expert they belong to, 0 where there are none."""

    unit: int
    first: int
    last: int


@dataclass(frozen=True)
class LedgerEntry:
    """A logical tensor and the digest of its values. An expert of which values are missing has none."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    experts: tuple[str | None, ...] | None = None

    @property
    def what(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape, self.experts is not None)


Ledger = dict[str, LedgerEntry]


def hash_pieces(what: TensorSpec) -> Iterator[HashPiece]:
    units = what.shape[0] if what.stacked else 1
    each, step = prod(what.shape) // max(1, units), HASH_PIECE_BYTES // what.itemsize
    for unit in range(units):
        for first in range(unit * each, (unit + 1) * each, step):
            yield HashPiece(unit, first, min(first + step, (unit + 1) * each))


def sha256_digest(data: Any) -> bytes:
    return hashlib.sha256(data).digest()


def ledger_entry(what: TensorSpec, digests: Mapping[int, bytes | None]) -> LedgerEntry:
    """The entry of a tensor from the digest of every piece, by the number of its first element."""
    units: list[list[bytes | None]] = [[] for _ in range(what.shape[0] if what.stacked else 1)]
    for piece in hash_pieces(what):
        units[piece.unit].append(digests.get(piece.first))
    joined = [None if None in found else sha256_digest(b"".join(filter(None, found))) for found in units]
    if not what.stacked:
        return LedgerEntry(what.dtype, what.shape, joined[0].hex() if joined[0] else "")
    experts = tuple(each.hex() if each else None for each in joined)
    sha256 = "" if None in joined else sha256_digest(b"".join(filter(None, joined))).hex()
    return LedgerEntry(what.dtype, what.shape, sha256, experts)


def encode_ledger(ledger: Ledger) -> bytes:
    """As JSON with a line for each tensor, the same bytes for the same tensors."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry_as_json(ledger[name]))}" for name in sorted(ledger))
    return f'{{"piece": {HASH_PIECE_BYTES}, "tensors": {{\n{lines}\n}}}}\n'.encode()


def entry_as_json(entry: LedgerEntry) -> dict[str, Any]:
    experts = {} if entry.experts is None else {"experts": entry.experts}
    return {"dtype": entry.dtype, "shape": entry.shape, "sha256": entry.sha256, **experts}


def parse_ledger(raw: bytes) -> Ledger:
    try:
        content = json.loads(raw)
        found = {name: parse_ledger_entry(entry) for name, entry in content["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{LEDGER_FILE} is not readable: {printable_text(str(error))}") from None
    if content.get("piece") != HASH_PIECE_BYTES:
        raise DamagedCheckpoint(
            f"{LEDGER_FILE} hashes pieces of {content.get('piece')} bytes; this version reads those of {HASH_PIECE_BYTES}"
        )
    return found


def parse_ledger_entry(entry: Mapping[str, Any]) -> LedgerEntry:
    experts = tuple(map(str, entry["experts"])) if "experts" in entry else None
    made = LedgerEntry(str(entry["dtype"]), tuple(entry["shape"]), str(entry["sha256"]), experts)
    if made.dtype not in SAFETENSORS_DTYPES:
        raise ValueError(f"no dtype {made.dtype}")
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in made.shape) or prod(made.shape) >= 1 << 62:
        raise ValueError(f"no shape {made.shape}")
    if experts is not None and made.shape[:1] != (len(experts),):
        raise ValueError(f"{len(experts)} experts in a tensor of shape {made.shape}")
    return made


class LedgerDifference(NamedTuple):
    """In what a tensor of one ledger differs from another."""

    kind: str  # missing, extra, renamed, dtype, shape, experts, values
    name: str
    text: str


def compare_ledgers(expected: Ledger, found: Ledger) -> list[LedgerDifference]:
    """All differences, by name. What has another name, but the same values, is told as renamed."""
    gone, new = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    renamed = {old: name for old in gone if (name := find_same_values(expected[old], new, found))}
    told = [LedgerDifference("renamed", old, f'"{old}" is now called "{name}"') for old, name in renamed.items()]
    lost = [name for name in gone if name not in renamed]
    told += [LedgerDifference("missing", n, f'"{n}" is missing{did_you_mean(n, new)}') for n in lost]
    left = [name for name in new if name not in renamed.values()]
    told += [LedgerDifference("extra", n, f'"{n}" is new{did_you_mean(n, gone)}') for n in left]
    for name in sorted(expected.keys() & found.keys()):
        told += [
            LedgerDifference(kind, name, f'"{name}"{text}') for kind, text in entry_changes(expected[name], found[name])
        ]
    return told


def find_same_values(entry: LedgerEntry, names: Sequence[str], found: Ledger) -> str | None:
    """The one of these names under which the same tensor lies, if there is just one."""
    matches = [name for name in names if found[name] == entry]
    return matches[0] if len(matches) == 1 else None


def entry_changes(old: LedgerEntry, new: LedgerEntry) -> Iterator[tuple[str, str]]:
    if old.dtype != new.dtype:
        yield "dtype", f" is {new.dtype}; expected {old.dtype}"
    if old.shape != new.shape:
        yield "shape", f" has shape {list(new.shape)}; expected {list(old.shape)}"
    if old.experts is not None and new.experts is not None and old.shape[1:] == new.shape[1:]:
        if len(old.experts) == len(new.experts) and not set(old.experts) & set(new.experts) and None not in new.experts:
            yield "values", f" has other values in all {len(new.experts)} experts"
            return
        for text in expert_changes(old.experts, new.experts):
            yield "experts", text
    elif (old.dtype, old.shape) == (new.dtype, new.shape) and old.sha256 != new.sha256:
        yield "values", " has other values" if new.sha256 else ": values are missing"


def expert_changes(old: Sequence[str | None], new: Sequence[str | None]) -> Iterator[str]:
    """What became of each expert: dropped, added, swapped, moved or changed."""
    if len(old) != len(new):
        yield from (f": expert {e} is missing" for e, sha256 in enumerate(old) if sha256 not in new)
        yield from (f": expert {e} is new" for e, sha256 in enumerate(new) if sha256 not in old)
        return
    wrong = [e for e in range(len(old)) if new[e] != old[e]]
    places = {new[e]: e for e in wrong}
    for e in wrong:
        to = places.get(old[e])
        if new[e] is None:
            yield f": expert {e} is missing"
        elif to is None:
            yield f": expert {e} has other values"
        elif new[e] != old[to]:
            yield f": expert {e} lies where expert {to} was"
        elif e < to:
            yield f": experts {e} and {to} are swapped"

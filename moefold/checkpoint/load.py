"""Find the newest whole checkpoint and load it into the tensors of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moefold.checkpoint.ledger import Ledger, Shape
from moefold.checkpoint.manifest import Damaged
from moefold.checkpoint.place import Place
from moefold.checkpoint.save import agreed, together
from moefold.checkpoint.shelf import candidates
from moefold.checkpoint.state import Part, Tensors, described
from moefold.checkpoint.verify import Opened, hashed, open_checkpoint, verify
from moefold.checkpoint.whole import values_of
from moefold.comm.collectives import gather_objects
from moefold.config.refused import Refused, did_you_mean
from moefold.layout.axes import World

MOST = 3  # problems of one checkpoint that are told when it is passed over; `moefold ckpt verify` tells all


@dataclass(frozen=True)
class Found:
    """A checkpoint that passed verification."""

    opened: Opened

    @property
    def path(self) -> Place:
        return self.opened.path

    @property
    def state(self) -> dict[str, Any]:
        return self.opened.state


def find(place: Place, world: World, say: Callable[[str], None]) -> Found | None:
    """The newest whole checkpoint at `place`: a checkpoint itself, a folder of them, or a run. Damaged ones are
    passed over with a message. None if there is no trace of any; a refusal if all are damaged."""
    damaged: list[str] = []
    for path in agreed(lambda: candidates(place), world, place):
        try:
            return Found(verify_together(path, world))
        except Damaged as damage:
            told, more = damage.problems[:MOST], len(damage.problems) - MOST
            damaged.append(f"{path} is damaged: {'; '.join(told)}{f'; and {more} more' if more > 0 else ''}")
            if world.rank == 0:
                say(f"{damaged[-1]}; trying the one before")
    if damaged:
        raise Refused(*damaged, f"no whole checkpoint is left in {place}; restore one, or start anew without --resume")
    return None


def verify_together(path: Place, world: World) -> Opened:
    """As `verify`, each rank hashing its share of the values."""
    opened = agreed(lambda: open_checkpoint(path), world, path)
    shares = together(lambda: hashed(opened, opened.work()[world.rank :: world.size]), world, path)
    opened.judge({piece: found for share in shares for piece, found in share.items()})
    return opened


def require(place: Place, world: World, say: Callable[[str], None]) -> Found:
    """As `find`, where the user named the place: nothing there is a refusal."""
    found = find(place, world, say)
    if found is None:
        raise Refused(agreed(lambda: why_not(place), world, place))
    return found


def why_not(place: Place) -> str:
    if not place.exists():
        return f"--resume {place}: no such folder; expected a run, its checkpoints folder, or one checkpoint"
    try:
        verify(place)
    except Damaged as problem:
        return (
            f"--resume {place} is no moefold checkpoint: {problem}; expected a run or a checkpoint that moefold wrote"
        )
    return f"--resume {place}: no checkpoint there"


def load(found: Found, tensors: Tensors, optional: set[str], world: World) -> None:
    """Fill the tensors in place. All that is missing, left over, or of another shape or dtype is refused together.
    `optional` names may be absent from the checkpoint (then the tensor stays as it is)."""
    ledger = found.opened.ledger
    wanted = {name: described(t) for name, t in tensors.items() if name in ledger or name not in optional}
    held = set[str]().union(*gather_objects(set(wanted), world.everyone))  # by some rank: a pipeline's hold others
    problems = next(
        filter(None, gather_objects(mismatches(ledger, shapes(wanted), held), world.everyone)),
        None,
    )
    if problems:  # on any rank: then none may wait for it in the load
        raise Refused(f"{found.path} does not fit this configuration:", *problems)
    try:
        together(lambda: fill(found.opened, wanted), world, found.path)
    except Damaged as problem:
        raise Refused(f"{found.path} cannot be read: {problem}") from None


def fill(opened: Opened, wanted: Mapping[str, Part]) -> None:
    """Read this rank's boxes and no more."""
    reader = opened.reader()
    for name, part in wanted.items():
        for held in part.held:
            held.write(values_of(reader, name, held.box))


def shapes(parts: Mapping[str, Part]) -> dict[str, Shape]:
    return {name: part.what for name, part in parts.items()}


def mismatches(ledger: Ledger, wanted: Mapping[str, Shape], held: set[str], most: int = 20) -> list[str]:
    """Every difference in names, shapes and dtypes, the first few in full. `held` are the names that any rank has."""
    found = [f'"{n}" is not in the checkpoint{did_you_mean(n, ledger)}' for n in sorted(wanted.keys() - ledger.keys())]
    extra = sorted(n for n in ledger.keys() - held if not n.startswith("random."))
    found += [f'"{n}" is in the checkpoint, but the model has no such tensor' for n in extra]
    for name in sorted(wanted.keys() & ledger.keys()):
        here, there = wanted[name], ledger[name].what
        if here[:2] != there[:2]:
            found.append(f'"{name}" is {there} in the checkpoint; the model expects {here}')
    return found if len(found) <= most else [*found[:most], f"and {len(found) - most} more"]

"""Loading: the newest intact checkpoint is found, verified, and read into the tensors of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from moefold.checkpoint.format.ledger import Ledger, PieceDigests, TensorSpec, TensorSpecs
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.retention import checkpoints_at
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.format.verify import OpenedCheckpoint, hash_stored_pieces, open_checkpoint, verify_checkpoint
from moefold.checkpoint.live.logical_tensors import LogicalTensors, TensorPart, as_tensor_part
from moefold.checkpoint.live.save import run_on_every_rank, run_on_rank_zero
from moefold.checkpoint.live.saved_model import MODEL_PREFIX, read_tensor_box
from moefold.comm.consensus import raise_first_problem
from moefold.comm.host_objects import union_of_sets
from moefold.config.errors import UserError, did_you_mean
from moefold.layout.axes import World
from moefold.observe.printer import Printer

TensorParts = Mapping[str, TensorPart]
SHOWN_PROBLEMS = 3  # of a damaged checkpoint that is skipped; `moefold ckpt verify` shows all
OPTIONAL_PREFIXES = (
    "random.",
    "precision.",
    "clipping.",
    "spikes.",
)  # of state that a run may lack, or have where the checkpoint lacks it
STATE_PREFIX = "optimizer."
MAIN_SUFFIX = ".main"
MOST_MISMATCHES = 20  # shown in full when a checkpoint does not fit


FoundCheckpoint = OpenedCheckpoint  # one that passed verification


def find_checkpoint(path: StoragePath, world: World, say: Printer) -> FoundCheckpoint | None:
    """The newest intact checkpoint at `path`: a checkpoint itself, a folder of them, or a run. Damaged ones are
    skipped with a message. None if there is no checkpoint; a refusal if all are damaged."""
    damaged: list[str] = []
    checkpoints = run_on_rank_zero(partial(checkpoints_at, path), world, path)
    for checkpoint in checkpoints:
        try:
            return verify_on_all_ranks(checkpoint, world)
        except DamagedCheckpoint as damage:
            damaged.append(f"{checkpoint} is damaged: {damage_summary(damage)}")
            if world.rank == 0:
                say(f"{damaged[-1]}; trying the one before")
    if not damaged:
        return None
    raise UserError(*damaged, f"no whole checkpoint is left in {path}; restore one, or start anew without --resume")


def damage_summary(damage: DamagedCheckpoint) -> str:
    shown = "; ".join(damage.problems[:SHOWN_PROBLEMS])
    more = len(damage.problems) - SHOWN_PROBLEMS
    if more > 0:
        shown += f"; and {more} more"
    return shown


def verify_on_all_ranks(path: StoragePath, world: World) -> OpenedCheckpoint:
    """Open and verify a checkpoint, each rank hashing a share of the values."""
    open_here = partial(open_checkpoint, path)
    opened = run_on_rank_zero(open_here, world, path)
    pieces = opened.pieces_to_hash()
    mine = pieces[world.rank :: world.size]
    hash_mine = partial(hash_stored_pieces, opened, mine)
    digests_by_rank = run_on_every_rank(hash_mine, world, path) or []
    digests: PieceDigests = {}
    for rank_digests in digests_by_rank:
        digests |= rank_digests
    compare = partial(opened.raise_if_damaged, digests)
    run_on_rank_zero(compare, world, path)
    return opened


def require_checkpoint(path: StoragePath, world: World, say: Printer, option: str = "--resume") -> FoundCheckpoint:
    """As `find_checkpoint`, for a path that the user named in `option`: no checkpoint there is a refusal."""
    found = find_checkpoint(path, world, say)
    if found is None:
        explain = partial(explain_no_checkpoint, path, option)
        raise UserError(run_on_rank_zero(explain, world, path))
    return found


def explain_no_checkpoint(path: StoragePath, option: str) -> str:
    if not path.exists():
        return f"{option} {path}: no such folder; expected a run, its checkpoints folder, or one checkpoint"
    try:
        verify_checkpoint(path)
    except DamagedCheckpoint as problem:
        return f"{option} {path} is no moefold checkpoint: {problem}; expected a run or a checkpoint that moefold wrote"
    return f"{option} {path}: no checkpoint there"


def load_checkpoint(
    found: FoundCheckpoint, tensors: LogicalTensors, optional: set[str], world: World, left: Collection[str] = ()
) -> None:
    """Fill the tensors in place. Tensors that are missing, left over, or of another shape are refused, all at once, and
    so are weights of another dtype; optimizer state is converted. Main weights that the checkpoint lacks are its
    weights. Tensors of `optional` names that the checkpoint lacks, or has in another shape, stay as they are; those of
    the names `left` may be left over."""
    wanted: dict[str, TensorPart] = {}
    from_weights: dict[str, TensorPart] = {}  # main weights, by the names of the weights
    for name, tensor in tensors.items():
        part = as_tensor_part(tensor)
        weight = weight_of_main(name)
        if weight is not None and name not in found.ledger:
            from_weights[weight] = part
        elif name not in optional or fits_saved(found.ledger, name, part):
            wanted[name] = part
    specs = {name: part.spec for name, part in wanted.items()}
    ledger = {name: entry for name, entry in found.ledger.items() if name not in left}
    refuse_mismatches(found, ledger, specs, world)
    fill_on_every_rank(found, wanted, world)
    fill_on_every_rank(found, from_weights, world)


def weight_of_main(name: str) -> str | None:
    """The name of the weight that an optimizer's main weight belongs to; None for other tensors."""
    if name.startswith(STATE_PREFIX) and name.endswith(MAIN_SUFFIX):
        parameter = name.removeprefix(STATE_PREFIX).removesuffix(MAIN_SUFFIX)
        return MODEL_PREFIX + parameter
    return None


def fits_saved(ledger: Ledger, name: str, part: TensorPart) -> bool:
    if name not in ledger:
        return False
    return ledger[name].spec.shape == part.shape


def load_weights(found: FoundCheckpoint, model: LogicalTensors, world: World) -> None:
    """Fill a model's tensors in place from a checkpoint of any optimizer and any precision. Names and shapes must be
    those of the model; values are converted to its dtypes, from main weights where the checkpoint has them."""
    ledger: Ledger = {}
    for name, entry in found.ledger.items():
        if name.startswith(MODEL_PREFIX):
            ledger[name] = entry
    specs: dict[str, TensorSpec] = {}
    sources: dict[str, TensorPart] = {}
    for name, tensor in model.items():
        part = as_tensor_part(tensor)
        specs[name] = part.spec
        if name in ledger:
            specs[name] = part.spec._replace(dtype=ledger[name].dtype)
        sources[main_weight_or_itself(found.ledger, name)] = part
    refuse_mismatches(found, ledger, specs, world)
    fill_on_every_rank(found, sources, world)


def main_weight_or_itself(ledger: Ledger, name: str) -> str:
    """The name of the fp32 main weight that a model's weight was rounded from, if it was saved; else the name."""
    main = STATE_PREFIX + name.removeprefix(MODEL_PREFIX) + MAIN_SUFFIX
    return main if main in ledger else name


def fill_on_every_rank(found: FoundCheckpoint, wanted: TensorParts, world: World) -> None:
    try:
        fill = partial(fill_held_boxes, found, wanted)
        run_on_every_rank(fill, world, found.path)
    except DamagedCheckpoint as problem:
        raise UserError(f"{found.path} cannot be read: {problem}") from None


def refuse_mismatches(found: FoundCheckpoint, ledger: Ledger, specs: TensorSpecs, world: World) -> None:
    """Raise the mismatches of the first rank that has any, on all ranks: none may be left waiting in the load."""
    held = union_of_sets(set(specs), world.pp)  # pipeline ranks hold different tensors
    mine = spec_mismatches(ledger, specs, held)
    refused = UserError(f"{found.path} does not fit this configuration:", *mine) if mine else None
    raise_first_problem(refused, world)


def fill_held_boxes(opened: OpenedCheckpoint, wanted: TensorParts) -> None:
    """Read the boxes that this rank holds, and no more."""
    reader = opened.box_reader()
    for name, part in wanted.items():
        for held in part.held:
            held.write(read_tensor_box(reader, name, held.box))


def spec_mismatches(ledger: Ledger, wanted: TensorSpecs, held: set[str]) -> list[str]:
    """Every difference in names, shapes and dtypes, the first few in full. `held` are the names that any rank has."""
    problems: list[str] = []
    missing = wanted.keys() - ledger.keys()
    for name in sorted(missing):
        problems.append(f'"{name}" is not in the checkpoint{did_you_mean(name, ledger)}')
    for name in sorted(ledger.keys() - held):
        if not name.startswith(OPTIONAL_PREFIXES) and weight_of_main(name) not in held:
            problems.append(f'"{name}" is in the checkpoint, but the model has no such tensor')
    common = wanted.keys() & ledger.keys()
    for name in sorted(common):
        expected = wanted[name]
        saved = ledger[name].spec
        if name.startswith(STATE_PREFIX):
            saved = saved._replace(dtype=expected.dtype)  # any type is converted to any other
        if expected[:2] != saved[:2]:  # dtype and shape
            problems.append(f'"{name}" is {saved} in the checkpoint; the model expects {expected}')
    more = len(problems) - MOST_MISMATCHES
    if more > 0:
        return [*problems[:MOST_MISMATCHES], f"and {more} more"]
    return problems

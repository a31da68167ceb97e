"""Sound checkpoints: intact, and without values that are no numbers. A checkpoint is verified and searched before it is
said to be sound. Torch-free."""

from __future__ import annotations

from moefold.checkpoint.format.finite import tensors_without_numbers
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.retention import checkpoints_at
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.config.errors import printable_text


def describe_last_sound(folder: StoragePath) -> str:
    """Which checkpoint in a folder is the newest sound one, and why newer ones are not."""
    problems: list[str] = []
    for checkpoint in checkpoints_at(folder):
        problem = checkpoint_problem(checkpoint)
        if problem is None:
            # `auto` finds the newest checkpoint; an older one has to be named.
            source = str(checkpoint) if problems else "auto"
            found = f"{checkpoint} was verified and is sound: continue with --resume {source}"
            return "; ".join([*problems, found])
        problems.append(problem)
    if problems:
        return f"{'; '.join(problems)}; no checkpoint in {folder} is sound: start anew"
    return f"there is no checkpoint in {folder}: start anew"


def newest_sound(folder: StoragePath) -> StoragePath | None:
    """The newest checkpoint in a folder that is intact and holds numbers alone."""
    for checkpoint in checkpoints_at(folder):
        if checkpoint_problem(checkpoint) is None:
            return checkpoint
    return None


def checkpoint_problem(checkpoint: StoragePath) -> str | None:
    try:
        opened = verify_checkpoint(checkpoint)
    except DamagedCheckpoint as damage:
        return f"{checkpoint} is damaged ({printable_text(str(damage))})"
    name = next(tensors_without_numbers(opened), None)
    if name is None:
        return None
    return f'{checkpoint} holds NaN or infinities in "{printable_text(name)}"'

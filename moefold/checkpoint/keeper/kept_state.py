"""The state of a run at the keeper of its launcher, looked at by the launcher itself. Torch-free."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

from moefold.checkpoint.format.retention import newest_step, step_of_folder
from moefold.checkpoint.format.sound import newest_sound
from moefold.checkpoint.format.storage import RemotePath, StoragePath
from moefold.checkpoint.keeper.files import KeeperAddress, KeptFiles, empty_keeper, keeper_name
from moefold.config.errors import UserError


def keeps_sound_state(out: Path, own: StoragePath) -> bool:
    """Whether the newest checkpoint of the run at the keeper of this launcher is intact and finite, and not older than
    those of the disk. Otherwise the keeper is emptied, so that nothing is resumed from it."""
    keeper = KeeperAddress(keeper_name(os.getpid()))
    kept = RemotePath(KeptFiles((keeper,)), PurePosixPath(out.absolute()))
    with suppress(OSError, UserError):
        newest = newest_step(kept)
        sound = newest_sound(kept)
        if sound is not None and step_of_folder(sound) == newest >= newest_step(own):
            return True
    empty_keeper(os.getpid())
    return False

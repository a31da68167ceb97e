"""The last sound checkpoint of a run, for the message of a run that fails."""

from __future__ import annotations

from functools import partial

from moefold.checkpoint.format.sound import describe_last_sound
from moefold.checkpoint.format.storage import checkpoint_folder
from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.train.assemble import Run
from moefold.watch.position import slow_phase


def last_sound_of(run: Run) -> str:
    """What `describe_last_sound` says of a run's folder. Every rank calls this; rank 0 reads."""
    folder = checkpoint_folder(run.config, run.out)
    with slow_phase("checkpoint"):
        return run_on_rank_zero(partial(describe_last_sound, folder), run.world, folder)

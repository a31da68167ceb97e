"""Weights & Biases as a tracker of runs: the one file that touches `wandb`."""

from __future__ import annotations

from moefold.observe.metrics import Record, curve_values
from moefold.observe.trackers import TrackedRun


class WandbTracker:
    """`WANDB_MODE`, `WANDB_ENTITY` and the other variables of wandb hold; a resumed run goes on under its id."""

    def __init__(self, tracked: TrackedRun):
        import wandb  # pyright: ignore[reportMissingImports]

        path = tracked.folder / "wandb_run_id"
        known = path.read_text() if path.is_file() else None
        # Output of the run stays in its terminal: wandb neither captures it nor prints between its lines.
        settings = wandb.Settings(console="off", silent=True)
        self.run = wandb.init(
            project=tracked.group,
            name=tracked.folder.name,
            dir=str(tracked.folder),
            id=known,
            resume="allow",
            config=tracked.settings,
            settings=settings,
        )
        path.write_text(self.run.id)

    def write(self, record: Record) -> None:
        self.run.log(curve_values(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()

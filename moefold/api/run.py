"""A training run from Python: the trainer's own step in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.data.loader import Batch
from moefold.layout.axes import World
from moefold.layout.process_groups import joined_world
from moefold.model.transformer import Transformer
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import sample_text, validation_loss
from moefold.train.step import StepReport, train_step


class TrainingRun:
    """An assembled run. Iterating gives the batches of the steps that are left; `step(batch)` trains on one."""

    def __init__(self, run: Run):
        self.run = run

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def model(self) -> Transformer:
        return self.run.model

    @property
    def world(self) -> World:
        return self.run.world

    def __iter__(self) -> Iterator[Batch]:
        while self.run.step < self.config.train.steps:
            yield self.run.loader.next_batch()

    def step(self, batch: Batch) -> StepReport:
        """Forward, backward and update. The report is read when it is asked for; reading its loss waits for the
        device."""
        return train_step(self.run, batch)

    def validate(self) -> float:
        """The mean loss over held-out text."""
        return validation_loss(self.run)

    def sample(self, prompt: str) -> str:
        return sample_text(self.run, prompt)


@contextmanager
def run(config: Config, out: str | Path = ".", corpus: Corpus | None = None) -> Iterator[TrainingRun]:
    """The run of a configuration, on the ranks that torchrun or Slurm started, or on one. `corpus` replaces the text
    that the configuration names. Nothing is written to `out`: saving and logging are the command line's."""
    with joined_world(config.parallel, config.train.device, config.shard) as world:
        assembled = assemble_run(config, world, Path(out), corpus)
        yield TrainingRun(assembled)

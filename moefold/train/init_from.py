"""Weights of a checkpoint as the start of a new run: optimizer, step and data position are new."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from moefold.checkpoint.format.storage import parse_storage_path
from moefold.checkpoint.live.load import FoundCheckpoint, load_weights, require_checkpoint
from moefold.checkpoint.live.logical_tensors import collect_model_tensors
from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.layout.axes import World
from moefold.model.transformer import Transformer
from moefold.observe.printer import Printer
from moefold.train.changed_settings import (
    ChangedSetting,
    accept_changes,
    changed_settings,
    record_changes,
    require_run_state,
)
from moefold.train.from_hf import WeightFiller

OPTION = "--init-from"


def checkpoint_weights(source: str, config: Config, world: World, out: Path, say: Printer) -> WeightFiller:
    """A function that fills a rank's part of the configured model with the weights of a checkpoint of any layout.
    Settings of the model that differ from the checkpoint's are recorded in `out`."""

    def fill_from_checkpoint(model: Transformer) -> None:
        path = parse_storage_path(source)
        refuse_hugging_face_folder(source)
        found = require_checkpoint(path, world, say, OPTION)
        require_run_state(found)
        changes = changed_model_settings(config, found)
        accept_changes(changes, found, say)
        load_weights(found, collect_model_tensors(model), world)
        record = partial(record_changes, out, 0, found.path, changes)
        run_on_rank_zero(record, world, out)
        step = found.state["step"]
        say(f"starting from the weights of {found.path}, trained for {step} steps; optimizer and data start anew")

    return fill_from_checkpoint


def refuse_hugging_face_folder(source: str) -> None:
    if (Path(source) / "config.json").is_file():
        raise UserError(f"{OPTION} {source} is a Hugging Face folder; expected a moefold run; use --from-hf {source}")


def changed_model_settings(config: Config, found: FoundCheckpoint) -> list[ChangedSetting]:
    changes = changed_settings(config, found)
    return [change for change in changes if change.key.startswith("model.")]

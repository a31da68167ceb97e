"""Changed settings of a run that starts from a checkpoint: refused where they shape tensors, else printed and recorded.

`changes.jsonl` in the run's folder has one line for each start with changes: the step from which they are in effect,
the checkpoint, and each setting's value before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.verify import OpenedCheckpoint, require_run_position
from moefold.config.errors import UserError, printable_text
from moefold.config.keys import format_value, iterate_keys
from moefold.config.renamed_keys import with_new_names
from moefold.config.run import Config
from moefold.observe.metrics import JsonLines
from moefold.observe.printer import Printer

CHANGES_FILE = "changes.jsonl"
# Keys that decide the names, shapes or dtypes of weights, or how a weight's rows divide into heads. A test changes
# every other key of the model and compares the tensors.
SHAPE_SETTINGS = (
    "model.layers",
    "model.hidden",
    "model.vocab",
    "model.dense_ffn",
    "model.dense_activation",
    "model.tied_head",
    "model.mtp",
    "model.attention.heads",
    "model.attention.kv_heads",
    "model.attention.head_dim",
    "model.attention.rope_dim",
    "model.attention.kind",
    "model.attention.q_rank",
    "model.attention.kv_rank",
    "model.attention.value_dim",
    "model.attention.sinks",
    "model.attention.qk_norm",
    "model.attention.qkv_bias",
    "model.attention.out_bias",
    "model.moe.experts",
    "model.moe.ffn",
    "model.moe.shared_ffn",
    "model.moe.shared_gate",
    "model.moe.latent",
    "model.moe.activation",
    "model.moe.biases",
    "model.moe.dense_layers",
    "model.moe.every",
    "lora.rank",
    "lora.targets",
    "lora.dora",
    "train.precision",
)
RULE_SETTINGS = ("optim.rule", "optim.groups")  # decide which states the optimizer has
NOTED_SETTINGS = (  # a changed value is printed
    "model.",
    "data.",
    "optim.",
    "lora.",
    "precision.",
    "train.objective",
    "train.dpo_beta",
    "train.seed",
    "train.global_batch",
)


@dataclass(frozen=True)
class ChangedSetting:
    """A setting that differs from the checkpoint's."""

    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        saved = printable_text(show_setting(self.saved))
        return f"{self.key} = {show_setting(self.now)}, but the checkpoint has {saved}"


def show_setting(value: Any) -> str:
    if isinstance(value, list):  # JSON has no tuples
        value = tuple(value)
    return format_value(value)


def require_run_state(found: OpenedCheckpoint) -> None:
    """Refuse a checkpoint whose state.json is not that of a run; its digest may be right all the same."""
    try:
        require_run_position(found.state)
    except DamagedCheckpoint as problem:
        raise UserError(f"{found.path} cannot be continued: {problem}; choose another checkpoint") from None


def flat_settings(config: Config) -> dict[str, Any]:
    keys = iterate_keys(config)
    return {key.path: key.default for key in keys}


def changed_settings(config: Config, found: OpenedCheckpoint) -> Iterator[ChangedSetting]:
    saved, _ = with_new_names(found.state["config"])
    for key, value in flat_settings(config).items():
        if key in saved and show_setting(value) != show_setting(saved[key]):
            yield ChangedSetting(key, saved[key], value)


def has_other_rules(config: Config, found: OpenedCheckpoint) -> bool:
    """Whether the rules of parameters are not those of the checkpoint, which may be older than the choice of rules."""
    saved, _ = with_new_names(found.state["config"])
    now = flat_settings(config)
    defaults = flat_settings(Config())
    return any(show_setting(saved.get(key, defaults[key])) != show_setting(now[key]) for key in RULE_SETTINGS)


def accept_changes(changes: Iterable[ChangedSetting], found: OpenedCheckpoint, say: Printer) -> None:
    """Refuse changes of settings that shape tensors, and print the other changes that affect the result."""
    changes = list(changes)
    refused = [f"{change}; set it back" for change in changes if change.key in SHAPE_SETTINGS]
    if refused:
        raise UserError(f"{found.path} belongs to another configuration:", *refused)
    for change in changes:
        if change.key.startswith(NOTED_SETTINGS):
            say(f"note: {change}")


def record_changes(out: Path, step: int, checkpoint: object, changes: Iterable[ChangedSetting]) -> None:
    """Write the changes of a run that starts at `step`. A line of the same step or of a later one is replaced: these
    steps are done again."""
    path = out / CHANGES_FILE
    changed: dict[str, dict[str, object]] = {}
    for change in changes:
        changed[change.key] = {"from": change.saved, "to": change.now}
    if not changed and not path.exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    lines = JsonLines(path, keep_through=step - 1)
    if changed:
        source = str(checkpoint)
        lines.write({"step": step, "checkpoint": source, "changed": changed})
    lines.close()

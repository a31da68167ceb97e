"""The model in a checkpoint, read by boxes, whatever layout wrote it."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.checkpoint.format.boxes import Box, box_sizes
from moefold.checkpoint.format.ledger import LedgerEntry
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.reader import BoxReader
from moefold.checkpoint.format.verify import OpenedCheckpoint
from moefold.config.errors import UserError

MODEL_PREFIX = "model."


def read_tensor_box(reader: BoxReader, name: str, box: Box) -> Tensor:
    """A box of a tensor, copied from its file."""
    dtype = getattr(torch, reader.specs[name].dtype)
    values = torch.empty(box_sizes(box), dtype=dtype)
    raw = values.view(-1).view(torch.uint8)
    stored = reader.fetch_box(name, box)
    raw.numpy()[:] = stored.reshape(-1)
    return values


class SavedModel:
    """The model in a checkpoint, under the names of the model's parameters."""

    def __init__(self, opened: OpenedCheckpoint):
        self.opened = opened
        self.box_reader = opened.box_reader()

    def __contains__(self, name: str) -> bool:
        return MODEL_PREFIX + name in self.opened.ledger

    @property
    def names(self) -> list[str]:
        ledger = self.opened.ledger
        saved = [name for name in ledger if name.startswith(MODEL_PREFIX)]
        return [name.removeprefix(MODEL_PREFIX) for name in saved]

    def saved_dtype(self, name: str) -> torch.dtype:
        entry = self.ledger_entry(name)
        return getattr(torch, entry.dtype)

    def ledger_entry(self, name: str) -> LedgerEntry:
        if name not in self:
            raise UserError(
                f'{self.opened.path} has no tensor "{name}"; it belongs to another model than its configuration says'
            )
        return self.opened.ledger[MODEL_PREFIX + name]

    def fetch_box(self, name: str, box: Box) -> Tensor:
        self.ledger_entry(name)  # refuses a name that is not there
        try:
            return read_tensor_box(self.box_reader, MODEL_PREFIX + name, box)
        except (DamagedCheckpoint, OSError) as error:
            raise UserError(f"{self.opened.path} cannot be read: {error}") from None

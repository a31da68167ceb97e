"""The model in a checkpoint, by boxes, whatever layout wrote it."""

from __future__ import annotations

import torch

from moefold.checkpoint.format.boxes import Box
from moefold.checkpoint.format.ledger import LedgerEntry
from moefold.checkpoint.format.manifest import DamagedCheckpoint
from moefold.checkpoint.format.reader import BoxReader
from moefold.checkpoint.format.verify import OpenedCheckpoint
from moefold.config.errors import UserError


def read_tensor_box(reader: BoxReader, name: str, box: Box) -> torch.Tensor:
    """A box of a tensor, copied from its file."""
    made = torch.empty([size for _, size in box], dtype=getattr(torch, reader.shapes[name].dtype))
    made.view(-1).view(torch.uint8).numpy()[:] = reader.fetch_box(name, box).reshape(-1)
    return made


class SavedModel:
    """The model in a checkpoint. Names are those of the model's own parameters."""

    def __init__(self, opened: OpenedCheckpoint):
        self.opened, self.box_reader = opened, opened.box_reader()

    def __contains__(self, name: str) -> bool:
        return f"model.{name}" in self.opened.ledger

    @property
    def names(self) -> list[str]:
        return [name.removeprefix("model.") for name in self.opened.ledger if name.startswith("model.")]

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.entry(name).dtype)

    def entry(self, name: str) -> LedgerEntry:
        if name not in self:
            raise UserError(
                f'{self.opened.path} has no tensor "{name}"; it belongs to another model than its configuration says'
            )
        return self.opened.ledger[f"model.{name}"]

    def fetch_box(self, name: str, box: Box) -> torch.Tensor:
        self.entry(name)
        try:
            return read_tensor_box(self.box_reader, f"model.{name}", box)
        except (DamagedCheckpoint, OSError) as error:
            raise UserError(f"{self.opened.path} cannot be read: {error}") from None

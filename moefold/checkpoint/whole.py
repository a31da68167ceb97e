"""The model in a checkpoint, by boxes, whatever layout wrote it."""

from __future__ import annotations

import torch

from moefold.checkpoint.boxes import Box
from moefold.checkpoint.ledger import Entry
from moefold.checkpoint.manifest import Damaged
from moefold.checkpoint.reader import Reader
from moefold.checkpoint.verify import Opened
from moefold.config.refused import Refused


def values_of(reader: Reader, name: str, box: Box) -> torch.Tensor:
    """A box of a tensor, copied from its file."""
    made = torch.empty([size for _, size in box], dtype=getattr(torch, reader.shapes[name].dtype))
    made.view(-1).view(torch.uint8).numpy()[:] = reader.fetch(name, box).reshape(-1)
    return made


class Saved:
    """The model in a checkpoint. Names are those of the model's own parameters."""

    def __init__(self, opened: Opened):
        self.opened, self.reader = opened, opened.reader()

    def __contains__(self, name: str) -> bool:
        return f"model.{name}" in self.opened.ledger

    @property
    def names(self) -> list[str]:
        return [name.removeprefix("model.") for name in self.opened.ledger if name.startswith("model.")]

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.entry(name).dtype)

    def entry(self, name: str) -> Entry:
        if name not in self:
            raise Refused(
                f'{self.opened.path} has no tensor "{name}"; it belongs to another model than its configuration says'
            )
        return self.opened.ledger[f"model.{name}"]

    def fetch(self, name: str, box: Box) -> torch.Tensor:
        self.entry(name)
        try:
            return values_of(self.reader, f"model.{name}", box)
        except (Damaged, OSError) as error:
            raise Refused(f"{self.opened.path} cannot be read: {error}") from None

"""Boxes of the tensors in a checkpoint, whatever layout wrote it: no more is read than is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moefold.checkpoint.hf.move import slices
from moefold.checkpoint.hf.piece import Range, overlap
from moefold.checkpoint.storage import read_table
from moefold.config.refused import Refused


class Saved:
    """The model in a checkpoint. Names are those of the model's own parameters."""

    def __init__(self, path: Path):
        self.path, self.table = path, read_table(path)
        self.opened: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return f"model.{name}" in self.table

    @property
    def names(self) -> list[str]:
        return [name.removeprefix("model.") for name in self.table if name.startswith("model.")]

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.entry(name)["dtype"])

    def entry(self, name: str) -> dict[str, Any]:
        if name not in self:
            raise Refused(
                f'{self.path} has no tensor "{name}"; it belongs to another model than its configuration says'
            )
        return self.table[f"model.{name}"]

    def fetch(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        found = torch.empty([size for _, size in box], dtype=self.dtype(name))
        filled = 0
        for chunk in self.entry(name)["chunks"]:
            place = tuple(zip(chunk["offsets"], chunk["sizes"], strict=True))
            if shared := overlap(place, box):
                here = tuple((start - corner, size) for (start, size), (corner, _) in zip(shared, box, strict=True))
                there = tuple((start - corner, size) for (start, size), (corner, _) in zip(shared, place, strict=True))
                values = self.chunk(chunk["file"], chunk["chunk"], there)
                found[slices(here)].copy_(values)
                filled += values.numel()
        if filled != found.numel():
            raise Refused(f'{self.path} holds {filled} of {found.numel()} values of "{name}"; it is damaged')
        return found

    def chunk(self, file: str, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        try:
            if file not in self.opened:
                self.opened[file] = safe_open(self.path / file, framework="pt")
            return self.opened[file].get_slice(name)[slices(box)]
        except (SafetensorError, OSError) as error:
            raise Refused(f"{self.path / file} cannot be read: {error}") from None

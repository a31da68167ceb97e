"""Storage of a bucket's weights: what a Parameter is, what the optimizer updates, what ranks gather, what is saved.

    part       a Parameter of the model, as a view
    main       fp32 weights of this rank's share: read by `main_values`, stored and rounded by `refresh`
    wire       tensors that publish gathers; `arrived` is called when they are complete
    logical    main weights as a checkpoint reads and loads them, always fp32

Main weights exist on the rank that updates them (ZeRO-1), so `open_main` makes them for one share of the bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest, upper_bfloat16


class LogicalValues(Protocol):
    """Flat values that lie in memory otherwise than a checkpoint has them. A slice reads and writes the same memory."""

    dtype: torch.dtype

    def __len__(self) -> int: ...
    def __getitem__(self, window: slice) -> LogicalValues: ...
    def get(self, first: int, last: int) -> torch.Tensor: ...
    def put(self, first: int, last: int, values: torch.Tensor) -> None: ...


class FusedOperands(NamedTuple):
    """Tensors that a fused kernel updates in one pass. `weights` None: `main` are the model's own weights. `main` as
    int16: the lower bits that bf16 `weights` lack of fp32."""

    main: torch.Tensor
    weights: torch.Tensor | None


class Wire(NamedTuple):
    """One tensor to gather: this rank's contribution, and where those of all replicas go."""

    gathered: torch.Tensor
    mine: torch.Tensor


class WeightStorage(Protocol):
    weights: torch.Tensor  # flat, in the precision of the model: the parameters are views of it

    def part(self, start: int, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of a Parameter that begins at that element."""
        ...

    def open_main(self, share: slice) -> None:
        """Make main weights for this share, from the weights as they are."""
        ...

    def main_values(self) -> torch.Tensor:
        """Main weights of the share in fp32 or better: the live tensor where one exists, else a copy."""
        ...

    def refresh(self, values: torch.Tensor) -> None:
        """Store new main weights, and round them into the weights of the share."""
        ...

    def fused_operands(self) -> FusedOperands | None:
        """What a fused kernel may update instead of `main_values` and `refresh`; None where it must not."""
        ...

    def wire(self, share: slice) -> list[Wire]: ...

    def arrived(self) -> None:
        """Called when everything on the wire has been gathered."""
        ...

    def logical(self) -> torch.Tensor | LogicalValues | None:
        """Main weights to save and load; None where the parameters are the main weights."""
        ...

    def main_bytes(self) -> int:
        """Memory of the main weights beyond that of the weights."""
        ...


StorageMaker = Callable[[int, torch.Tensor], WeightStorage]  # (elements, a tensor of the dtype and device wanted)


class PlainWeights:
    """Weights in the precision of the model. Main weights are the weights themselves, or an fp32 copy of bf16 weights."""

    def __init__(self, size: int, like: torch.Tensor):
        self.weights = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.share_of_weights = self.weights[:0]
        self.main = self.share_of_weights

    @property
    def has_copy(self) -> bool:
        return self.main is not self.share_of_weights

    def part(self, start: int, shape: Sequence[int]) -> torch.Tensor:
        return flat_part(self.weights, start, shape)

    def open_main(self, share: slice) -> None:
        self.share_of_weights = self.weights[share]
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        self.main = self.share_of_weights.to(wide)  # the same tensor, where the weights are wide already

    def main_values(self) -> torch.Tensor:
        return self.main

    def refresh(self, values: torch.Tensor) -> None:
        if values is not self.main:
            self.main.copy_(values)
        if self.has_copy:
            self.share_of_weights.copy_(round_to_nearest(self.main, self.weights.dtype))

    def fused_operands(self) -> FusedOperands:
        return FusedOperands(self.main, self.share_of_weights if self.has_copy else None)

    def wire(self, share: slice) -> list[Wire]:
        return [wire_of_share(self.weights, share)]

    def arrived(self) -> None: ...

    def logical(self) -> torch.Tensor | None:
        return self.main if self.has_copy else None

    def main_bytes(self) -> int:
        return self.main.nbytes if self.has_copy else 0


class SplitFp32Weights:
    """bf16 weights, and of this rank's share the 16 bits they lack of fp32 (kernels/optimizer/split_fp32.py)."""

    def __init__(self, size: int, like: torch.Tensor):
        self.weights = torch.zeros(size, dtype=like.dtype, device=like.device)
        self.values = SplitValues(self.weights[:0], self.weights[:0].to(torch.int16))

    def part(self, start: int, shape: Sequence[int]) -> torch.Tensor:
        return flat_part(self.weights, start, shape)

    def open_main(self, share: slice) -> None:
        upper = self.weights[share]
        self.values = SplitValues(upper, torch.zeros_like(upper, dtype=torch.int16))

    def main_values(self) -> torch.Tensor:
        return self.values.get(0, len(self.values))

    def refresh(self, values: torch.Tensor) -> None:
        self.values.put(0, len(self.values), values)

    def fused_operands(self) -> FusedOperands:
        return FusedOperands(self.values.lower, self.values.upper)

    def wire(self, share: slice) -> list[Wire]:
        return [wire_of_share(self.weights, share)]

    def arrived(self) -> None: ...

    def logical(self) -> LogicalValues:
        return self.values

    def main_bytes(self) -> int:
        return self.values.lower.nbytes


@dataclass
class SplitValues:
    """fp32 values kept as bf16 and 16 further bits. They are joined and split window by window."""

    upper: torch.Tensor
    lower: torch.Tensor
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.upper)

    def __getitem__(self, window: slice) -> SplitValues:
        return SplitValues(self.upper[window], self.lower[window])

    def get(self, first: int, last: int) -> torch.Tensor:
        return joined_fp32(self.upper[first:last], self.lower[first:last])

    def put(self, first: int, last: int, values: torch.Tensor) -> None:
        values = values.to(self.upper.device, torch.float32).contiguous()
        self.upper[first:last] = upper_bfloat16(values)
        self.lower[first:last] = lower_16_bits(values)


def storage_maker(main: str) -> StorageMaker:
    """The storage of bf16 weights for a setting of `optim.main`. Weights that are wider are stored plainly."""

    def make_storage(size: int, like: torch.Tensor) -> WeightStorage:
        if main == "split" and like.dtype == torch.bfloat16:
            return SplitFp32Weights(size, like)
        return PlainWeights(size, like)

    return make_storage


def flat_part(flat: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    stop = start + prod(shape)
    return flat[start:stop].view(tuple(shape))


def wire_of_share(weights: torch.Tensor, share: slice) -> Wire:
    mine = weights[share].clone()  # a gather must not read and write the same memory
    return Wire(weights, mine)

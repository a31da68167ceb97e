"""Gradient memory of a bucket: one flat tensor in which the gradients of all microbatches add up.

Fleeting memory is allocated when the first gradient of a step arrives, without clearing: the first gradient of a
parameter is written, the next ones are added, and parameters without a gradient are zeroed at the end. So gradients
take the place of activations that backward has freed, and a gradient that a kernel wrote in place costs no copy.

Fleeting memory may be asked to stay: for graphs of single steps, which read it where it was captured, while the host
goes on deciding whether a gradient is the first.

Standing memory is allocated once and has the same addresses in every step, as a captured graph needs. Whether a
gradient is the first of the step is then no decision of the host: a flag per parameter on the device says so.

Sums in blocks have codes and scales (block_values.py): each gradient is added to what they hold, and kernels neither
write nor add in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moefold.kernels.optimizer.add_in_blocks import add_in_blocks
from moefold.shard.block_values import BlockValues, FlatValues, codes_and_scales, zeros_in_blocks

AddInBlocks = Callable[[Tensor, Tensor, Tensor, bool], None]  # the op
GradientMemory = Literal["fleeting", "standing"]
Span = tuple[int, int]  # first element and end
Spans = Sequence[Span]
ReductionKey = tuple[int, torch.dtype]  # size and dtype


class GradientSums:
    """Fleeting gradient memory."""

    def __init__(self, spans: Spans, size: int, device: torch.device, dtype: torch.dtype):
        self.spans = list(spans)
        self.size = size
        self.device = device
        self.dtype = dtype
        self.gaps = gaps_between(self.spans, size)
        self.flat: Tensor | None = None
        self.fixed: Tensor | None = None  # the flat tensor, if it stays
        self.open_standing_memory()
        self.release()

    def open_standing_memory(self) -> None:
        """Allocate what stays from step to step: nothing."""

    def stay_in_place(self) -> None:
        """From now on, have the same memory in every step."""
        self.fixed = self.allocate()
        self.release()

    @property
    def nbytes(self) -> int:
        """Memory of the flat tensor, whether it is allocated or not."""
        return self.size * self.dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Memory at this moment."""
        return 0 if self.flat is None else self.flat.nbytes

    def release(self) -> None:
        """Forget all gradients, and free the memory unless it stays."""
        self.reduced: FlatValues | None = None  # this rank's share of the sum over ranks, once it has arrived
        self.flat = self.fixed
        if self.flat is not None:
            self.clear_gaps(self.flat)  # which a reduction may have used
        self.filled: set[int] = set()
        self.lent: set[int] = set()
        self.adding: set[int] = set()  # parameters whose product has added to the sum by itself

    def allocate(self) -> Tensor:
        """The flat tensor without values, but for zeros between parameters."""
        flat = torch.empty(self.size, dtype=self.dtype, device=self.device)
        self.clear_gaps(flat)
        return flat

    def clear_gaps(self, flat: Tensor) -> None:
        for gap in self.gaps:
            between = flat[gap]
            between.zero_()

    def memory_for_reduction(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the sum over ranks, or for what arrives of it."""
        return torch.empty(size, dtype=dtype, device=device)

    def place(self, number: int) -> Tensor:
        """The memory of a parameter's gradient, whatever it holds."""
        if self.flat is None:
            self.flat = self.allocate()
        start, end = self.spans[number]
        return self.flat[start:end]

    def lend_gradient_memory(self, number: int, dtype: torch.dtype) -> Tensor | None:
        """A parameter's memory for a kernel to write its gradient to: once a step, while the sum is empty, and if the
        kernel writes the dtype of the sum."""
        if dtype != self.dtype:
            return None
        if number in self.filled or number in self.lent:
            return None
        self.lent.add(number)
        return self.place(number)

    def running_sum(self, number: int) -> Tensor | None:
        """The sum of a parameter's gradients so far, for a product to add to; autograd then gets no gradient."""
        if number not in self.filled:
            return None
        self.adding.add(number)
        return self.place(number)

    def note_added(self, number: int) -> None:
        """Count a gradient that a replay has added."""
        self.filled.add(number)
        self.adding.add(number)

    def was_added_in_place(self, number: int) -> bool:
        """Whether a product or a replay has added to this sum since the last call."""
        added = number in self.adding
        self.adding.discard(number)
        return added

    def add(self, number: int, gradient: Tensor) -> None:
        memory = self.place(number)
        place = memory.view(gradient.shape)
        if number in self.filled:
            place.add_(gradient)
        else:
            was_written_here = gradient.data_ptr() == place.data_ptr()  # by a kernel
            if not was_written_here:
                place.copy_(gradient)
        self.filled.add(number)

    def whole(self) -> Tensor:
        """The flat tensor, with zeros for parameters without a gradient."""
        parameters = len(self.spans)
        every_number = set(range(parameters))
        for number in every_number - self.filled:
            place = self.place(number)
            place.zero_()
        self.filled = every_number
        assert self.flat is not None
        return self.flat

    def values(self) -> FlatValues:
        """The sums as they are kept, as `whole` has them."""
        return self.whole()

    def keep(self, number: int, total: Tensor) -> None:
        """Keep a sum that was read from its place, and may have been changed there."""

    @property
    def is_awaited(self) -> bool:
        """Whether a kernel has written a gradient in place that autograd has not delivered yet: it may wait for that of
        another use of the parameter in the same pass."""
        return not self.lent <= self.filled

    def take(self) -> Tensor:
        """The flat tensor, as `whole` has it; the next gradient begins a new sum."""
        flat = self.whole()
        self.flat = None
        self.filled = set()
        self.lent = set()
        return flat


class ParameterSum(NamedTuple):
    """The sum of one parameter's gradients (layout/gradient_sink.py, `FixedSum`)."""

    sums: GradientSums
    number: int

    def holds_sum(self) -> bool:
        return self.number in self.sums.filled

    def add(self, gradient: Tensor) -> None:
        self.sums.add(self.number, gradient)

    def note_added(self) -> None:
        self.sums.note_added(self.number)


class StandingSums(GradientSums):
    """Standing gradient memory. Kernels neither write nor add in place: they would have to know on the host whether
    the sum is empty."""

    def open_standing_memory(self) -> None:
        self.standing = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        parameters = len(self.spans)
        self.has_gradient = torch.zeros(parameters, dtype=torch.bool, device=self.device)
        self.of_reductions: dict[ReductionKey, Tensor] = {}

    def release(self) -> None:
        """Forget all gradients; the memory stays."""
        self.reduced = None
        self.flat = self.standing
        self.has_gradient.zero_()

    def memory_for_reduction(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same memory in every step."""
        key = (size, dtype)
        if key not in self.of_reductions:
            self.of_reductions[key] = torch.empty(size, dtype=dtype, device=device)
        return self.of_reductions[key]

    def lend_gradient_memory(self, number: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def running_sum(self, number: int) -> Tensor | None:
        return None

    def was_added_in_place(self, number: int) -> bool:
        return False

    def add(self, number: int, gradient: Tensor) -> None:
        memory = self.place(number)
        place = memory.view(gradient.shape)
        is_further = self.has_gradient[number]
        # A select, not a product with zero: the memory may hold non-finite values of an earlier step.
        added = place + gradient
        total = torch.where(is_further, added, gradient)
        place.copy_(total)
        is_further.fill_(True)

    def whole(self) -> Tensor:
        for number, has_gradient in enumerate(self.has_gradient):
            place = self.place(number)
            gradient = place.where(has_gradient, 0)
            place.copy_(gradient)
        for gap in self.gaps:
            memory = self.standing[gap]
            memory.zero_()  # which a reduction may have used
        self.has_gradient.fill_(True)
        return self.standing


class BlockSums(GradientSums):
    """Fleeting gradient memory in blocks."""

    kept: BlockValues | None = None

    def __init__(
        self, spans: Spans, size: int, device: torch.device, type: str, add: AddInBlocks = add_in_blocks
    ):  # fmt: skip
        self.type = type
        self.add_in_blocks = add
        super().__init__(spans, size, device, torch.float32)

    @property
    def nbytes(self) -> int:
        without_memory = torch.device("meta")
        return zeros_in_blocks(self.type, self.size, without_memory).nbytes

    @property
    def held_bytes(self) -> int:
        return 0 if self.kept is None else self.kept.nbytes

    def release(self) -> None:
        super().release()
        self.kept = None

    def codes(self) -> BlockValues:
        if self.kept is None:
            self.kept = zeros_in_blocks(self.type, self.size, self.device)
        return self.kept

    def place(self, number: int) -> Tensor:
        """A copy of a parameter's sum."""
        start, end = self.spans[number]
        return self.codes().get(start, end)

    def lend_gradient_memory(self, number: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def running_sum(self, number: int) -> Tensor | None:
        return None

    def add(self, number: int, gradient: Tensor) -> None:
        self.write(number, gradient, number in self.filled)
        self.filled.add(number)

    def keep(self, number: int, total: Tensor) -> None:
        self.write(number, total, adds=False)

    def write(self, number: int, values: Tensor, adds: bool) -> None:
        codes, scales = codes_and_scales(self.codes(), slice(*self.spans[number]))
        assert scales is not None
        self.add_in_blocks(codes, scales, values.flatten(), adds)

    def values(self) -> BlockValues:
        return self.codes()

    def whole(self) -> Tensor:
        """A copy of the sums, for others to change."""
        codes = self.codes()
        return codes.get(0, len(codes))


SumsMaker = type[GradientSums]
GRADIENT_SUMS: dict[GradientMemory, SumsMaker] = {"fleeting": GradientSums, "standing": StandingSums}


def gaps_between(spans: Spans, size: int) -> list[slice]:
    """The elements of a flat tensor that belong to no parameter."""
    gaps: list[slice] = []
    covered = 0
    behind_the_last = (size, size)
    for start, end in [*spans, behind_the_last]:
        if covered < start:
            gap = slice(covered, start)
            gaps.append(gap)
        covered = end
    return gaps

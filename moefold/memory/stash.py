"""Stash: what experts save for backward lies in one pool, as many rows of it as there are.

    forward    experts compute in tensors of R rows, a bound; the rows before the last end, whose number the device
               knows, are copied to pages of the pool, and the tensors are freed for the next layer
    backward   rows come back to a tensor of R rows when they are first asked for, and their pages are free

So a rank needs memory for one layer's R rows and for the rows of all layers, not for R rows of each layer. Rows that
find no room raise a flag on the device: the step changes nothing, and is run again without the stash
(`train_step`). Stack: pages are taken and freed at one end, as in forward and backward of one microbatch after the
other. Pages: freed in any order, through a ring of free ones (kernels/experts/row_stash.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.config.stash_pages import LEAST_ROW_BYTES, PAGE_BYTES
from moefold.dispatch.base import Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.page_grid import HEAD, OVERFLOWED, PageGrid
from moefold.kernels.experts.row_stash import pop_rows, push_rows
from moefold.memory.offload import OffloadingSteps, bytes_of
from moefold.memory.recompute import SavedTensor, SaveHooks, ViewForm, memory_of
from moefold.model.moe.experts import Experts
from moefold.model.steps import Carry, Step, StepRewrite
from moefold.model.transformer import Transformer

RowCopy = Callable[..., None]


class StashPool:
    """The pages of a pool on the device, who uses them, and in which order they are freed (`returns`: in any order,
    through the ring)."""

    def __init__(self, pages: int, returns: bool, device: torch.device):
        self.returns = returns
        self.memory = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=device)
        self.every_page = torch.arange(pages, device=device)
        self.ring = self.every_page.clone()
        first_state = [0, pages, 0, 0]
        self.first_state = torch.tensor(first_state, device=device)
        self.state = self.first_state.clone()
        self.stack: list[StashedRows] = []
        self.generation = 0

    def empty(self) -> None:
        """Free all pages, and forget that rows found no room."""
        self.generation += 1
        self.ring.copy_(self.every_page)
        self.state.copy_(self.first_state)
        self.stack = []

    def free(self, rows: StashedRows) -> None:
        """Free the pages of rows that have come back. In a stack they wait for those above them."""
        rows.is_freed = True
        while self.stack and self.stack[-1].is_freed:
            top = self.stack.pop()
            self.state[HEAD] -= top.taken_2[1]


class StashedRows:
    """The rows of one storage. `users`: saved tensors that are views of it."""

    def __init__(self, stash: RowStash, pool: StashPool, storage: torch.UntypedStorage, rows: StashedCall):
        self.stash = stash
        self.pool = pool
        self.generation = pool.generation
        self.ends_e = rows.ends_e
        self.users = 0
        self.is_freed = False
        self.memory: Tensor | None = None
        self.nbytes = storage.nbytes()
        self.rows = rows.count
        memory = bytes_of(storage)
        x_RW = self.as_rows(memory)
        pages = self.pages_like(x_RW)
        grid = PageGrid.of(x_RW, pages)
        integers = x_RW.new_empty(2 + grid.pages, dtype=torch.int64)
        self.taken_2 = integers[:2]
        self.pages_M = integers[2:]
        stash.push(x_RW, self.ends_e, pages, pool.ring, pool.state, self.taken_2, self.pages_M)
        if not pool.returns:
            pool.stack.append(self)

    def as_rows(self, memory: Tensor) -> Tensor:
        rows_RB = memory.view(self.rows, -1)
        row_bytes = rows_RB.shape[1]
        has_whole_words = row_bytes % 4 == 0
        return rows_RB.view(torch.int32) if has_whole_words else rows_RB

    def pages_like(self, x_RW: Tensor) -> Tensor:
        return self.pool.memory.view(x_RW.dtype)

    def on_device(self) -> Tensor:
        """All bytes, of which rows behind the defined ones may be anything; for each user once."""
        if self.memory is None:
            self.memory = self.come_back()
        memory = self.memory
        self.users -= 1
        if self.users == 0:
            self.memory = None  # the user holds it
        return memory

    def come_back(self) -> Tensor:
        pool = self.pool
        if self.is_freed or self.generation != pool.generation:
            raise RuntimeError("a second backward through stashed rows; run the forward pass again")
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=pool.memory.device)
        x_RW = self.as_rows(memory)
        pages = self.pages_like(x_RW)
        places = (self.taken_2, self.pages_M)
        self.stash.pop(x_RW, self.ends_e, pages, pool.ring, pool.state, *places, pool.returns)
        pool.free(self)
        return memory


class StashedView(NamedTuple):
    """A saved tensor as a view of stashed rows."""

    rows: StashedRows
    dtype: torch.dtype
    form: ViewForm

    def tensor(self) -> Tensor:
        size, stride, offset = self.form
        with self.rows.stash.lock, torch.no_grad():
            memory = self.rows.on_device()
            storage = memory.untyped_storage()
            view = torch.empty(0, dtype=self.dtype, device=memory.device)
            return view.set_(storage, offset, size, stride)  # pyright: ignore


class KnownRows(NamedTuple):
    """A storage in memory, and its rows in the stash."""

    memory: StorageWeakRef  # holds the address, so that no other memory has it
    version: int
    rows: weakref.ref[StashedRows]


class StashedCall:
    """One call of a layer's experts: the bound of its rows, the end of the last, and what it is given, which others
    keep. Where rows are as many as source rows or experts, a saved tensor's first dim does not tell which it has: then
    all rows count as defined."""

    def __init__(self, rows: Rows):
        order = rows.order
        self.count = len(order.index_R)
        sources = len(rows.source_ND)
        experts = len(order.ends_e)
        is_clear = self.count not in (sources, experts)
        every_row = order.ends_e.new_full((1,), self.count)
        self.ends_e = order.ends_e[-1:] if is_clear else every_row
        given = (rows.source_ND, order.index_R, order.slots_NK, order.weight_R, order.ends_e)
        self.given = set(map(memory_of, given))
        self.known: dict[int, KnownRows] = {}

    def has_rows(self, x: Tensor) -> bool:
        """Whether a saved tensor has the rows of this call, each in one piece of its storage."""
        count = self.count
        if count == 0 or not x.is_floating_point():
            return False
        if x.ndim < 2 or len(x) != count:
            return False
        if isinstance(x, torch.nn.Parameter) or memory_of(x) in self.given:
            return False
        nbytes = x.untyped_storage().nbytes()
        row_bytes, rest = divmod(nbytes, count)
        from_row_to_row = x.stride(0) * x.element_size()
        is_even = rest == 0 and from_row_to_row == row_bytes
        return is_even and row_bytes >= LEAST_ROW_BYTES

    def find(self, x: Tensor) -> StashedRows | None:
        """The rows of an earlier tensor with the same storage, unless it was written since."""
        known = self.known.get(memory_of(x))
        if known is None or known.version != x._version:  # pyright: ignore[reportPrivateUsage]
            return None
        rows = known.rows()
        if rows is None or rows.is_freed:
            return None
        return rows

    def remember(self, x: Tensor, rows: StashedRows) -> None:
        storage = x.untyped_storage()
        version = x._version  # pyright: ignore[reportPrivateUsage]
        place = memory_of(x)
        self.known[place] = KnownRows(
            memory=StorageWeakRef(storage),
            version=version,
            rows=weakref.ref(rows),
        )


class RowStash:
    """The stash of one model. `is_open`: whether rows are stashed at all; a step that is run again keeps them."""

    def __init__(self, nbytes: int, returns: bool, device: torch.device, push: RowCopy, pop: RowCopy):
        self.pages = nbytes // PAGE_BYTES
        self.returns = returns
        self.device = device
        self.push = push
        self.pop = pop
        self.lock = threading.RLock()  # segments may run on two threads
        self.is_open = True
        self.pool: StashPool | None = None
        self.stashed_tensors = 0  # since the start

    def begin_step(self) -> None:
        if self.pool is None:
            self.pool = StashPool(self.pages, self.returns, self.device)
        self.pool.empty()

    def overflowed(self) -> Tensor:
        """Whether rows of this rank have found no room since the step began, on the device."""
        assert self.pool is not None, "a step has begun"
        return self.pool.state[OVERFLOWED] > 0

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Rows are kept in tensors of their own."""
        self.is_open = False
        try:
            yield
        finally:
            self.is_open = True

    def around_step(self, step: Step) -> Step:
        def run_and_stash(carry: Carry) -> Carry:
            if not torch.is_grad_enabled() or not self.is_open:
                return step.run(carry)
            call = StashedCall(carry["rows"])
            pack = partial(self.pack, SaveHooks.current(), call)
            with saved_tensors_hooks(pack, unpack_view):
                return step.run(carry)

        return replace(step, run=run_and_stash)

    def pack(self, outer: SaveHooks, call: StashedCall, x: Tensor) -> StashedView | SavedTensor:
        if not call.has_rows(x):
            return outer.save(x)
        with self.lock, torch.no_grad():
            rows = call.find(x) or self.stash_storage(call, x)
            rows.users += 1
        form = ViewForm.of(x)
        return StashedView(rows, x.dtype, form)

    def stash_storage(self, call: StashedCall, x: Tensor) -> StashedRows:
        if self.pool is None:
            self.begin_step()
        assert self.pool is not None
        storage = x.untyped_storage()
        rows = StashedRows(self, self.pool, storage, call)
        call.remember(x, rows)
        self.stashed_tensors += 1
        return rows


def unpack_view(saved: StashedView | SavedTensor) -> Tensor:
    return saved.tensor()


@dataclass(frozen=True, eq=False)
class StashingSteps:
    """The rewrite of a step list under which the rows that experts save are stashed. Experts inside a region that is
    recomputed save nothing, and a step of several has another name."""

    stash: RowStash
    rewrite: StepRewrite

    def __call__(self, steps: list[Step]) -> list[Step]:
        rewritten = self.rewrite(steps)
        return list(map(self.around_experts, rewritten))

    def around_experts(self, step: Step) -> Step:
        if step.spec.name != "experts":
            return step
        return self.stash.around_step(step)


def attach_row_stash(model: Transformer, nbytes: int, returns: bool, device: torch.device) -> RowStash:
    kernels = kernels_of_experts(model)
    push = push_rows if kernels is None else kernels[push_rows]
    pop = pop_rows if kernels is None else kernels[pop_rows]
    room = 0 if kernels is None else nbytes
    stash = RowStash(room, returns, device, push, pop)
    model.rewrite_steps = StashingSteps(stash, model.rewrite_steps)
    return stash


def kernels_of_experts(model: Transformer) -> BoundKernels | None:
    """None in a stage without MoE layers."""
    for module in model.modules():
        if isinstance(module, Experts):
            return module.kernels
    return None


def stash_of(model: Transformer) -> RowStash | None:
    rewrite = model.rewrite_steps
    if isinstance(rewrite, OffloadingSteps):
        rewrite = rewrite.rewrite
    if isinstance(rewrite, StashingSteps):
        return rewrite.stash
    return None

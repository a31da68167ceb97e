"""Parameters, gradients and optimizer state in a few flat tensors, each cut over the ranks that would hold copies.

    weights    | query | pad | key | pad | ...        the model's parameters are views of it, in its precision
    gradients  | d query | .. | d key | ..  | ...     microbatches add up here (gradient_sums.py)
    share        this rank's part of both: its optimizer state is for the share alone (ZeRO-1)

A bucket holds parameters of one placement, one optimizer group, one unit and one format. Frozen ones in blocks are in
buckets of rows of one width, and shares end between rows (block_weights.py). The ranks along its
`gradient_sum_axes` hold the same parameters and see other tokens: gradients are summed over them, each rank keeping its
share, and updated shares are gathered by all. Buckets are filled from the end of the model to its beginning, as
backward finishes them.
A unit is a part of the model that is updated at once: everything by default, or a block (`block_of_parameter`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm, prod
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moefold.kernels.optimizer.add_in_blocks import add_in_blocks
from moefold.kernels.optimizer.state_blocks import CODE_DTYPES
from moefold.kernels.quantise.quantise_weight import WeightFormat
from moefold.layout.axes import Axis, World
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.held_blocks import elements_of, held_blocks_of
from moefold.layout.held_share import HeldShare, attach_held_share
from moefold.layout.host_copies import is_share_on_host
from moefold.layout.pinned_memory import pinned_copy
from moefold.layout.placement import BUCKET_ELEMENTS, Placement
from moefold.layout.weight_copies import keeps_values
from moefold.shard.block_values import FlatValues
from moefold.shard.block_weights import BlockWeights, PlacedBlocks, ShardedBlockWeights
from moefold.shard.fp8_weights import Fp8Storage, StoredMatrices
from moefold.shard.gradient_sums import GRADIENT_SUMS, AddInBlocks, BlockSums, GradientMemory, GradientSums
from moefold.shard.storage import PlainWeights, ShardedWeights, StorageMaker, WeightStorage, flat_part

ALIGNMENT = 128  # elements: kernels want views that begin at multiples of 16 bytes, and wide loads like more
MATRICES_PER_SHARE = 4  # at least, of the largest size: shares of whole matrices are padded to equal size

Parameters = list[DeclaredParameter]
Holders = tuple[int, ...]  # pipeline ranks


class BucketGroup(NamedTuple):
    """An optimizer group, as buckets see it. `cut` says where a share may end: at any element, or between matrices."""

    name: str = ""
    cut: Literal["elements", "matrices"] = "elements"


DEFAULT_GROUP = BucketGroup()


class BucketKey(NamedTuple):
    """What the parameters of a bucket have in common. `alone` names a parameter that shares its bucket with none.
    `format`: of weights that are stored in FP8. `slot`: the elements of one matrix, for stacks whose shares end between
    matrices, or of one row, for weights `in_blocks`; 0 for all else. `on_host`: a rank's share of frozen weights lies
    there."""

    placement: Placement
    decays: bool
    group: BucketGroup
    unit: str
    alone: str = ""
    format: WeightFormat | None = None
    slot: int = 0
    in_blocks: bool = False
    on_host: bool = False


class BucketPiece(NamedTuple):
    """The elements first..last of a flattened parameter, which lie in this rank's share from `offset` on."""

    parameter: DeclaredParameter
    first: int
    last: int
    offset: int

    @property
    def window(self) -> slice:
        """The piece in a flat tensor of the share."""
        length = self.last - self.first
        end = self.offset + length
        return slice(self.offset, end)

    def of_rows(self, values: Tensor) -> Tensor:
        """For each element of the piece the value of its row, of one value for each row of the parameter's part."""
        rows = values.flatten()
        columns = self.parameter.tensor.numel() // len(rows)
        elements = rows.repeat_interleave(columns)
        return elements[self.first : self.last]


class Awaitable(Protocol):
    def wait(self) -> None:
        """Let the present stream wait."""
        ...


class PendingUpdate(NamedTuple):
    """An update under way: its end, the tensors that it reads, and the stream to which their memory goes back."""

    ended: Awaitable
    read: Sequence[FlatValues]
    stream: torch.Stream | None


@dataclass
class Bucket:
    """Parameters with the same key; `replicas` are the ranks that hold the same ones."""

    key: BucketKey
    parameters: Parameters
    starts: list[int]
    storage: WeightStorage
    sums: GradientSums
    replicas: Axis
    holders: Holders = ()  # pipeline ranks that hold a copy too: the gradient is the sum over them
    matrix_parts: Axis | None = None  # the ranks that hold parts of the same matrices; None: matrices are whole
    copies: Axis = field(default_factory=lambda: Axis("copies"))  # the ranks that hold the same share
    update: PendingUpdate | None = None  # on another stream

    def note_update(self, ended: Awaitable, read: Sequence[FlatValues]) -> None:
        """An update of the weights has begun on another stream. `read`: what is not to be freed before its end."""
        self.await_update()
        self.update = PendingUpdate(ended, read, self.present_stream())

    def await_update(self) -> None:
        """Let the present stream wait for the weights. What the update reads is freed when the stream of its memory has
        waited: another one, such as that of a communication lane, may come first."""
        update = self.update
        if update is None:
            return
        update.ended.wait()
        if update.stream == self.present_stream():
            self.update = None

    def present_stream(self) -> torch.Stream | None:
        device = self.sums.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def placement(self) -> Placement:
        return self.key.placement

    @property
    def decays(self) -> bool:
        return self.key.decays

    @property
    def group(self) -> str:
        return self.key.group.name

    @property
    def unit(self) -> str:
        return self.key.unit

    @property
    def weights(self) -> Tensor:
        return self.storage.weights

    @property
    def gradients(self) -> Tensor:
        """The sum of this rank's gradients since the step began."""
        return self.sums.whole()

    @property
    def reduced_gradient_share(self) -> FlatValues:
        """This rank's share of the sum over ranks; of its own sum, before the reduction has arrived."""
        if self.sums.reduced is None:
            return self.sums.values()[self.share]
        return self.sums.reduced

    @property
    def share(self) -> slice:
        replicas = self.replicas
        size = len(self.weights) // replicas.size
        first = replicas.index * size
        return slice(first, first + size)

    def placed_parameters(self) -> Iterator[tuple[DeclaredParameter, int]]:
        """Each parameter, and the first of its elements in a flat tensor of this bucket."""
        return zip(self.parameters, self.starts, strict=True)

    def parameter_views(self, flat: Tensor) -> Iterator[tuple[DeclaredParameter, Tensor]]:
        """Each parameter's part of a flat tensor of this bucket, in the parameter's shape."""
        for parameter, start in self.placed_parameters():
            shape = parameter.tensor.shape
            view = flat_part(flat, start, shape)
            yield parameter, view

    def pieces(self) -> Iterator[BucketPiece]:
        """The piece of every parameter in this rank's share; an empty piece where the share holds nothing of it."""
        share = self.share
        for parameter, start in self.placed_parameters():
            end = start + parameter.tensor.numel()
            first = max(share.start, start)
            last = min(share.stop, end)
            if first >= last:
                yield BucketPiece(parameter, 0, 0, 0)
                continue
            offset = first - share.start
            first -= start
            last -= start
            yield BucketPiece(parameter, first, last, offset)

    def matrix_views(self, flat: Tensor) -> Iterator[tuple[BucketPiece, Tensor]]:
        """Each parameter's matrices in a flat tensor of the share: (matrices, rows, columns). Only for buckets whose
        shares end between matrices."""
        for piece in self.pieces():
            matrix = piece.parameter.matrix
            is_empty = piece.first == piece.last
            if matrix is None or is_empty:
                continue
            elements = flat[piece.window]
            yield piece, elements.view(-1, *matrix)


def units_of_buckets(buckets: list[Bucket]) -> list[str]:
    """The units of a model, in the order of their buckets."""
    units = [bucket.unit for bucket in buckets]
    distinct = dict.fromkeys(units)
    return list(distinct)


GroupOf = Callable[[DeclaredParameter], BucketGroup]
UnitOf = Callable[[str], str]
CostOf = Callable[[DeclaredParameter], float]
FillParameters = Callable[[Parameters], None]


def one_group(_: DeclaredParameter) -> BucketGroup:
    return DEFAULT_GROUP


def block_of_parameter(name: str) -> str:
    """The unit of a parameter if every block is one: `blocks.3` of `blocks.3.moe.experts.down`, else its module."""
    words = name.split(".")
    depth = 2 if words[1].isdigit() else 1
    return ".".join(words[:depth])


def fill_buckets(
    model: nn.Module,
    world: World,
    most: int = BUCKET_ELEMENTS,
    held: Mapping[str, Holders] | None = None,
    gradients: str = "fp32",
    *,
    memory: GradientMemory = "fleeting",
    group: GroupOf = one_group,
    unit: UnitOf | None = None,
    storage: StorageMaker = PlainWeights,
    fp8: Fp8Storage | None = None,
    cost: CostOf | None = None,
    sharded: StorageMaker | None = None,
    fill: FillParameters | None = None,
    frozen: bool = False,
    add_in_blocks: AddInBlocks = add_in_blocks,
) -> list[Bucket]:
    """Group the parameters and move them into flat tensors; the model goes on using views of these. Frozen parameters
    (without `requires_grad`) stay where they are; with `frozen` they alone are moved.

    `held`: parameters of which several pipeline ranks hold copies, each in a bucket of its own, so that it has the same
    place on all of them. `gradients`: the type in which the gradients of a bf16 model are kept; of one with blocks by
    `add_in_blocks`. `memory`: whether gradient memory is allocated every step or once. With `unit`, buckets follow
    units instead of `most` elements. `cost`: of updating a parameter whose matrices stay whole, to be balanced over
    shares; by default its elements. `fp8`: the weights that are stored in FP8 instead of in `storage`. `sharded`: the
    storage of weights that have replicas, of which each rank keeps its share alone. `fill` gives parameters that had no
    memory their first values, one bucket at a time.
    """
    holders = held or {}
    cost_of = cost or number_of_elements
    maker = BucketMaker(world, gradients, memory, storage, fp8, cost_of, sharded, fill, add_in_blocks)
    formats = {} if fp8 is None else fp8.formats
    grouping = Grouping(world, most, holders, group, unit, formats, frozen)
    buckets: list[Bucket] = []
    for key, parameters in grouping.group_parameters(model):
        copies = holders.get(key.alone, ())
        bucket = maker.make_bucket(key, parameters, copies)
        buckets.append(bucket)
    return buckets


KeyedParameters = tuple[BucketKey, Parameters]


@dataclass(frozen=True)
class Grouping:
    """How parameters are divided into buckets; see `fill_buckets`."""

    world: World
    most: int
    held: Mapping[str, Holders]
    group_of: GroupOf
    unit_of: UnitOf | None
    formats: Mapping[str, WeightFormat]
    frozen: bool

    def group_parameters(self, model: nn.Module) -> list[KeyedParameters]:
        """Parameters by bucket: full buckets in the order in which they fill up, then the rest, then held ones."""
        full: list[KeyedParameters] = []
        held: list[KeyedParameters] = []
        filling = defaultdict[BucketKey, Parameters](list)
        # From the end of the model to its beginning: backward completes the first bucket first.
        in_order = list(declared_parameters(model))
        for parameter in reversed(in_order):
            is_frozen = not parameter.tensor.requires_grad
            if is_frozen != self.frozen:
                continue
            key = self.key_of(parameter)
            if parameter.name in self.held:
                held.append((key, [parameter]))
                continue
            together = filling[key]
            together.append(parameter)
            if self.is_full(key, together):
                full.append((key, together))
                del filling[key]
        held.reverse()
        return [*full, *filling.items(), *held]

    def key_of(self, parameter: DeclaredParameter) -> BucketKey:
        declaration = parameter.declaration
        name = parameter.name
        group = self.group_of(parameter)
        unit = self.unit_of(name) if self.unit_of else ""
        alone = name if name in self.held else ""
        format = self.formats.get(name)
        slot = 0
        blocks = held_blocks_of(parameter.tensor)
        in_blocks = blocks is not None
        if in_blocks:
            slot = blocks.width
        elif group.cut == "matrices" and declaration.stacked:
            slot = elements_of_matrix(parameter)
        placement = declaration.placement
        decays = declaration.decays
        on_host = is_share_on_host(parameter.tensor)
        return BucketKey(placement, decays, group, unit, alone, format, slot, in_blocks, on_host)

    def is_full(self, key: BucketKey, parameters: Parameters) -> bool:
        if self.unit_of:
            return False
        sizes = [*map(number_of_elements, parameters)]
        least = self.most
        if key.group.cut == "matrices":
            replicas = self.world.gradients_of(key.placement)
            largest = key.slot or max(sizes)
            matrices = MATRICES_PER_SHARE * replicas.size
            least = max(least, matrices * largest)
        return sum(sizes) >= least


@dataclass(frozen=True)
class BucketMaker:
    """What all buckets of a model are made with; see `fill_buckets`."""

    world: World
    gradients: str
    memory: GradientMemory
    storage: StorageMaker
    fp8: Fp8Storage | None
    cost_of: CostOf
    sharded: StorageMaker | None = None
    fill: FillParameters | None = None
    add_in_blocks: AddInBlocks = add_in_blocks
    loads: dict[str, list[float]] = field(default_factory=dict)  # of each share so far, by the replicas' name

    def make_bucket(self, key: BucketKey, parameters: Parameters, holders: Holders) -> Bucket:
        """Move these parameters into a flat tensor."""
        replicas = self.world.gradients_of(key.placement)
        places = self.place_parameters(key, parameters, replicas)
        like = parameters[0].tensor
        storage = self.make_storage(key, places, like, replicas)
        sums = self.make_sums(places, like)
        parameters, starts, _ = places
        cut = parameters[0].declaration.matrix_cut
        matrix_parts = None
        if cut is not None:
            matrix_parts = self.world.axis(cut.axis)
        copies = self.world.copies_of(key.placement)
        bucket = Bucket(key, parameters, starts, storage, sums, replicas, holders, matrix_parts, copies)
        # The Parameter objects stay, since optimizers of torch and hooks may hold them; their memory moves.
        without_values: Parameters = []
        for parameter, start in bucket.placed_parameters():
            tensor = parameter.tensor
            view = storage.parameter_view(start, tensor.shape)
            if keeps_values(tensor):
                view.copy_(tensor.detach())
            else:
                without_values.append(parameter)
            tensor.data = view
        if self.fill is not None:
            self.fill(without_values)
        if isinstance(storage, ShardedWeights):
            keep_share_alone(bucket, storage)
        return bucket

    def make_sums(self, places: Places, like: Tensor) -> GradientSums:
        where = (places.spans, places.size, like.device)
        if self.gradients in CODE_DTYPES and like.dtype == torch.bfloat16:
            return BlockSums(*where, self.gradients, self.add_in_blocks)
        dtype = gradient_sum_dtype(like, self.gradients)
        make = GRADIENT_SUMS[self.memory]
        return make(*where, dtype)

    def place_parameters(self, key: BucketKey, parameters: Parameters, replicas: Axis) -> Places:
        """Places in a flat tensor that divides into equal shares."""
        shares = replicas.size
        if key.slot:
            return place_slots(parameters, key.slot, shares)
        if key.group.cut == "elements":
            return place_one_after_another(parameters, shares)
        no_loads = [0.0] * shares
        loads = self.loads.setdefault(replicas.name, no_loads)
        return place_matrices(parameters, self.cost_of, loads)

    def make_storage(self, key: BucketKey, places: Places, like: Tensor, replicas: Axis) -> WeightStorage:
        size = places.size
        sharded = self.sharded if key.on_host or not replicas.is_alone else None
        if key.in_blocks:
            make = BlockWeights if sharded is None else ShardedBlockWeights
            tensors = [parameter.tensor for parameter in places.parameters]
            placed = map(PlacedBlocks, tensors, places.starts)
            return make(size, placed)
        if key.format is None:
            make = sharded or self.storage
            return make(size, like)
        assert self.fp8 is not None, "a format, and no storage for it"
        matrices: list[StoredMatrices] = []
        for parameter, start in zip(places.parameters, places.starts, strict=True):
            matrices.append(stored_matrices(parameter, start))
        return self.fp8.make(size, like, matrices, key.format, sharded is not None)


def keep_share_alone(bucket: Bucket, storage: ShardedWeights) -> None:
    """Keep this rank's share of the weights, and free the rest. Parameters without memory know their share."""
    copy = pinned_copy if bucket.key.on_host else torch.clone
    own = storage.keep_share(bucket.share, copy)
    storage.free_weights()
    for piece in bucket.pieces():
        values = elements_of(own, piece.window)
        share = HeldShare(piece.first, values)
        attach_held_share(piece.parameter.tensor, share)


def stored_matrices(parameter: DeclaredParameter, start: int) -> StoredMatrices:
    """The matrices that products read: those of each expert, or one."""
    tensor = parameter.tensor
    experts = len(tensor) if parameter.declaration.stacked else 1
    columns = tensor.shape[-1]
    rows = tensor.numel() // (experts * columns)
    return StoredMatrices(tensor, start, (experts, rows, columns))


def gradient_sum_dtype(parameter: Tensor, gradients: str = "fp32") -> torch.dtype:
    """The dtype in which gradients add up: fp32 for lower precision, unless bf16 is asked for. For fp32 on a CPU it is
    fp64, so that sums do not depend on their order and a run gives the same losses on any number of ranks; a GPU's
    memory is too dear for that."""
    if gradients == "bf16" and parameter.dtype == torch.bfloat16:
        return torch.bfloat16
    on_cpu = parameter.device.type == "cpu"
    if on_cpu and parameter.dtype == torch.float32:
        return torch.float64
    return torch.promote_types(parameter.dtype, torch.float32)


class Places(NamedTuple):
    """Parameters in the order of their places in a flat tensor of `size` elements."""

    parameters: Parameters
    starts: list[int]
    size: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        sizes = map(number_of_elements, self.parameters)
        ends = map(operator.add, self.starts, sizes)
        return list(zip(self.starts, ends, strict=True))


def place_one_after_another(parameters: Parameters, shares: int) -> Places:
    """Shares may end anywhere in a parameter."""
    starts: list[int] = []
    end = 0
    for parameter in parameters:
        starts.append(end)
        end += aligned_elements(parameter)
    size = round_up(end, ALIGNMENT * shares)
    return Places(parameters, starts, size)


def place_slots(parameters: Parameters, slot: int, shares: int) -> Places:
    """Parameters one after another, in slots of one matrix or one row each, of which every share has equally many."""
    starts: list[int] = []
    end = 0
    step = lcm(slot, ALIGNMENT)
    for parameter in parameters:
        start = round_up(end, step)
        starts.append(start)
        end = start + parameter.tensor.numel()
    size = round_up(end, slot * shares)
    return Places(parameters, starts, size)


def place_matrices(parameters: Parameters, cost_of: CostOf, loads: list[float]) -> Places:
    """Each parameter in one share: the dearest first, into the share of least cost that has room. `loads` are the costs
    of the shares in earlier buckets; those of this one are added."""
    shares = len(loads)
    room = smallest_share(parameters, shares)
    ends = [0] * shares
    placed: list[tuple[DeclaredParameter, int, int]] = []  # with share, and offset in it
    for parameter in sorted(parameters, key=cost_of, reverse=True):
        elements = aligned_elements(parameter)
        open_shares = [share for share in range(shares) if ends[share] + elements <= room]
        if open_shares:
            share = min(open_shares, key=loads.__getitem__)
        else:
            share = emptiest_share(ends)
        placed.append((parameter, share, ends[share]))
        ends[share] += elements
        loads[share] += cost_of(parameter)
    size = max(ends)
    placed.sort(key=operator.itemgetter(1, 2))
    ordered: Parameters = []
    starts: list[int] = []
    for parameter, share, offset in placed:
        ordered.append(parameter)
        starts.append(share * size + offset)
    return Places(ordered, starts, size * shares)


def smallest_share(parameters: Parameters, shares: int) -> int:
    """The size of the fullest share if each parameter, the largest first, goes to the share that is emptiest."""
    ends = [0] * shares
    sizes = [*map(aligned_elements, parameters)]
    sizes.sort(reverse=True)
    for elements in sizes:
        share = emptiest_share(ends)
        ends[share] += elements
    return max(ends)


def emptiest_share(ends: list[int]) -> int:
    least = min(ends)
    return ends.index(least)


def aligned_elements(parameter: DeclaredParameter) -> int:
    return round_up(parameter.tensor.numel(), ALIGNMENT)


def elements_of_matrix(parameter: DeclaredParameter) -> int:
    matrix = parameter.matrix
    assert matrix is not None, f"{parameter.name} is no matrix"
    return prod(matrix)


def number_of_elements(parameter: DeclaredParameter) -> int:
    return parameter.tensor.numel()


def round_up(size: int, multiple: int) -> int:
    missing = -size % multiple
    return size + missing

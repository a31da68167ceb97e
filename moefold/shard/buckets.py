"""Parameters, gradients and optimizer state in a few flat tensors, each cut over the ranks that would hold copies.

    weights    | query | pad | key | pad | ...        the model's parameters are views of it, in its precision
    gradients  | d query | .. | d key | ..  | ...     microbatches add up here (gradient_sums.py)
    share        this rank's part of both: its optimizer state is for the share alone (ZeRO-1)

A bucket holds parameters of one placement, one optimizer group, one unit and one format. The ranks along its
`gradient_sum_axes` hold the same parameters and see other tokens: gradients are summed over them, each rank keeping its
share, and updated shares are gathered by all. Buckets are filled from the end of the model to its beginning, as
backward finishes them.
A unit is a part of the model that is updated at once: everything by default, or a block (`block_of_parameter`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from moefold.kernels.quantise.quantise_weight import WeightFormat
from moefold.layout.axes import Axis, World
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.placement import Placement
from moefold.shard.fp8_weights import Fp8Storage, StoredMatrices
from moefold.shard.gradient_sums import GRADIENT_SUMS, GradientMemory, GradientSums
from moefold.shard.storage import PlainWeights, StorageMaker, WeightStorage, flat_part

ALIGNMENT = 128  # elements: kernels want views that begin at multiples of 16 bytes, and wide loads like more
BUCKET_ELEMENTS = 1 << 25  # elements: long enough to use the network well, short enough to start before backward ends


class BucketGroup(NamedTuple):
    """An optimizer group, as buckets see it. `cut` says where a share may end: at any element, or between matrices."""

    name: str = ""
    cut: Literal["elements", "matrices"] = "elements"


DEFAULT_GROUP = BucketGroup()


class BucketKey(NamedTuple):
    """What the parameters of a bucket have in common. `alone` names a parameter that shares its bucket with none.
    `format`: of weights that are stored in FP8."""

    placement: Placement
    decays: bool
    group: BucketGroup
    unit: str
    alone: str = ""
    format: WeightFormat | None = None


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
        return slice(self.offset, self.offset + length)


@dataclass
class Bucket:
    """Parameters with the same key; `replicas` are the ranks that hold the same ones."""

    key: BucketKey
    parameters: list[DeclaredParameter]
    starts: list[int]
    storage: WeightStorage
    sums: GradientSums
    replicas: Axis
    holders: tuple[int, ...] = ()  # pipeline ranks that hold a copy too: the gradient is the sum over them

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
    def reduced_gradient_share(self) -> Tensor:
        """This rank's share of the sum over ranks; of its own sum, before the reduction has arrived."""
        if self.sums.reduced is None:
            return self.gradients[self.share]
        return self.sums.reduced

    @property
    def share(self) -> slice:
        size = len(self.weights) // self.replicas.size
        first = self.replicas.index * size
        return slice(first, first + size)

    def placed_parameters(self) -> Iterator[tuple[DeclaredParameter, int]]:
        """Each parameter, and the first of its elements in a flat tensor of this bucket."""
        return zip(self.parameters, self.starts, strict=True)

    def parameter_views(self, flat: Tensor) -> Iterator[tuple[DeclaredParameter, Tensor]]:
        """Each parameter's part of a flat tensor of this bucket, in the parameter's shape."""
        for parameter, start in self.placed_parameters():
            yield parameter, flat_part(flat, start, parameter.tensor.shape)

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
            yield BucketPiece(parameter, first - start, last - start, offset)

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
    return list(dict.fromkeys(units))


GroupOf = Callable[[DeclaredParameter], BucketGroup]
UnitOf = Callable[[str], str]


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
    held: Mapping[str, tuple[int, ...]] | None = None,
    gradients: str = "fp32",
    *,
    memory: GradientMemory = "fleeting",
    group: GroupOf = one_group,
    unit: UnitOf | None = None,
    storage: StorageMaker = PlainWeights,
    fp8: Fp8Storage | None = None,
) -> list[Bucket]:
    """Group the parameters and move them into flat tensors; the model goes on using views of these.

    `held`: parameters of which several pipeline ranks hold copies, each in a bucket of its own, so that it has the same
    place on all of them. `gradients`: the dtype in which the gradients of a bf16 model are kept. `memory`: whether
    gradient memory is allocated every step or once. With `unit`, buckets follow units instead of `most` elements.
    `fp8`: the weights that are stored in FP8 instead of in `storage`.
    """
    holders = held or {}
    maker = BucketMaker(world, gradients, memory, storage, fp8)
    formats = {} if fp8 is None else fp8.formats
    grouping = Grouping(most, holders, group, unit, formats)
    buckets: list[Bucket] = []
    for key, parameters in grouping.group_parameters(model):
        copies = holders.get(key.alone, ())
        buckets.append(maker.make_bucket(key, parameters, copies))
    return buckets


KeyedParameters = tuple[BucketKey, list[DeclaredParameter]]


@dataclass(frozen=True)
class Grouping:
    """How parameters are divided into buckets; see `fill_buckets`."""

    most: int
    held: Mapping[str, tuple[int, ...]]
    group_of: GroupOf
    unit_of: UnitOf | None
    formats: Mapping[str, WeightFormat]

    def group_parameters(self, model: nn.Module) -> list[KeyedParameters]:
        """Parameters by bucket: full buckets in the order in which they fill up, then the rest, then held ones."""
        full: list[KeyedParameters] = []
        held: list[KeyedParameters] = []
        filling: dict[BucketKey, list[DeclaredParameter]] = {}
        # From the end of the model to its beginning: backward completes the first bucket first.
        for parameter in reversed(list(declared_parameters(model))):
            key = self.key_of(parameter)
            if parameter.name in self.held:
                held.append((key, [parameter]))
                continue
            filling.setdefault(key, []).append(parameter)
            if key.alone or self.is_full(filling[key]):
                full.append((key, filling.pop(key)))
        held.reverse()
        return [*full, *filling.items(), *held]

    def key_of(self, parameter: DeclaredParameter) -> BucketKey:
        declaration = parameter.declaration
        name = parameter.name
        group = self.group_of(parameter)
        unit = self.unit_of(name) if self.unit_of else ""
        # Shares of a stack hold some of its matrices each, so their size is a multiple of one matrix.
        cut_stack = group.cut == "matrices" and declaration.stacked
        alone = name if cut_stack or name in self.held else ""
        format = self.formats.get(name)
        return BucketKey(declaration.placement, declaration.decays, group, unit, alone, format)

    def is_full(self, parameters: list[DeclaredParameter]) -> bool:
        if self.unit_of:
            return False
        elements = sum(map(number_of_elements, parameters))
        return elements >= self.most


@dataclass(frozen=True)
class BucketMaker:
    """What all buckets of a model are made with; see `fill_buckets`."""

    world: World
    gradients: str
    memory: GradientMemory
    storage: StorageMaker
    fp8: Fp8Storage | None

    def make_bucket(self, key: BucketKey, parameters: list[DeclaredParameter], holders: tuple[int, ...]) -> Bucket:
        """Move these parameters into a flat tensor."""
        replicas = self.world.gradients_of(key.placement)
        places = placement_of_parameters(key, parameters, replicas.size)
        like = parameters[0].tensor
        storage = self.make_storage(key, places, like)
        dtype = gradient_sum_dtype(like, self.gradients)
        make_sums = GRADIENT_SUMS[self.memory]
        sums = make_sums(places.spans, places.size, like.device, dtype)
        parameters, starts, _ = places
        bucket = Bucket(key, parameters, starts, storage, sums, replicas, holders)
        # The Parameter objects stay, since optimizers of torch and hooks may hold them; their memory moves.
        for parameter, start in bucket.placed_parameters():
            tensor = parameter.tensor
            view = storage.parameter_view(start, tensor.shape)
            view.copy_(tensor.detach())
            tensor.data = view
        return bucket

    def make_storage(self, key: BucketKey, places: Places, like: Tensor) -> WeightStorage:
        if key.format is None:
            return self.storage(places.size, like)
        assert self.fp8 is not None, "a format, and no storage for it"
        pairs = zip(places.parameters, places.starts, strict=True)
        matrices = [stored_matrices(parameter, start) for parameter, start in pairs]
        return self.fp8.make(places.size, like, matrices, key.format)


def stored_matrices(parameter: DeclaredParameter, start: int) -> StoredMatrices:
    """The matrices that products read: those of each expert, or one."""
    shape = parameter.tensor.shape
    experts = shape[0] if parameter.declaration.stacked else 1
    rows = parameter.tensor.numel() // (experts * shape[-1])
    return StoredMatrices(parameter.tensor, start, (experts, rows, shape[-1]))


def gradient_sum_dtype(parameter: Tensor, gradients: str = "fp32") -> torch.dtype:
    """The dtype in which gradients add up: fp32 for lower precision, unless bf16 is asked for. For fp32 on a CPU it is
    fp64, so that sums do not depend on their order and a run gives the same losses on any number of ranks; a GPU's
    memory is too dear for that."""
    if gradients == "bf16" and parameter.dtype == torch.bfloat16:
        return torch.bfloat16
    if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
        return torch.float64
    return torch.promote_types(parameter.dtype, torch.float32)


class Places(NamedTuple):
    """Parameters in the order of their places in a flat tensor of `size` elements."""

    parameters: list[DeclaredParameter]
    starts: list[int]
    size: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        sizes = map(number_of_elements, self.parameters)
        ends = map(operator.add, self.starts, sizes)
        return list(zip(self.starts, ends, strict=True))


def placement_of_parameters(key: BucketKey, parameters: list[DeclaredParameter], shares: int) -> Places:
    """Places in a flat tensor that divides into equal shares."""
    if key.group.cut == "elements":
        return place_one_after_another(parameters, shares)
    if parameters[0].declaration.stacked:
        return place_stack(parameters[0], shares)
    return place_matrices(parameters, shares)


def place_one_after_another(parameters: list[DeclaredParameter], shares: int) -> Places:
    """Shares may end anywhere in a parameter."""
    starts: list[int] = []
    end = 0
    for parameter in parameters:
        starts.append(end)
        end += round_up(parameter.tensor.numel(), ALIGNMENT)
    return Places(parameters, starts, round_up(end, ALIGNMENT * shares))


def place_stack(parameter: DeclaredParameter, shares: int) -> Places:
    """A stack of matrices, of which every share holds equally many."""
    matrices = len(parameter.tensor)
    elements = parameter.tensor.numel() // matrices
    per_share = round_up(matrices, shares) // shares
    return Places([parameter], [0], elements * per_share * shares)


def place_matrices(parameters: list[DeclaredParameter], shares: int) -> Places:
    """Each matrix in one share: the largest first, into the share that is emptiest."""
    ends = [0] * shares
    placed: list[tuple[DeclaredParameter, int, int]] = []  # with share, and offset in it
    by_size = sorted(parameters, key=number_of_elements, reverse=True)
    for parameter in by_size:
        share = ends.index(min(ends))
        placed.append((parameter, share, ends[share]))
        ends[share] += round_up(parameter.tensor.numel(), ALIGNMENT)
    size = max(ends)
    placed.sort(key=operator.itemgetter(1, 2))
    ordered = [parameter for parameter, _, _ in placed]
    starts = [share * size + offset for _, share, offset in placed]
    return Places(ordered, starts, size * shares)


def number_of_elements(parameter: DeclaredParameter) -> int:
    return parameter.tensor.numel()


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

"""Parameters, gradients and optimizer state in a few flat tensors, each cut over the ranks that would hold copies.

    weights    | query | pad | key | pad | ...        the model's parameters are views of it, in its precision
    gradients  | d query | .. | d key | ..  | ...     microbatches add up here (gradient_sums.py)
    share        this rank's part of both: its optimizer state is for the share alone (ZeRO-1)

A bucket holds parameters of one placement, one optimizer group and one unit. The ranks along its `gradient_sum_axes`
hold the same parameters and see other tokens: gradients are summed over them, each rank keeping its share, and updated
shares are gathered by all. Buckets are filled from the end of the model to its beginning, as backward finishes them.
A unit is a part of the model that is updated at once: everything by default, or a block (`block_of_parameter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from moefold.layout.axes import Axis, World
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.placement import Placement
from moefold.shard.gradient_sums import GradientMemory, GradientSums, make_gradient_sums
from moefold.shard.storage import PlainWeights, StorageMaker, WeightStorage

ALIGNMENT = 128  # elements: kernels want views that begin at multiples of 16 bytes, and wide loads like more
BUCKET_ELEMENTS = 1 << 25  # elements: long enough to use the network well, short enough to start before backward ends


class BucketGroup(NamedTuple):
    """An optimizer group, as buckets see it. `cut` says where a share may end: at any element, or between matrices."""

    name: str = ""
    cut: Literal["elements", "matrices"] = "elements"


DEFAULT_GROUP = BucketGroup()


class BucketKey(NamedTuple):
    """What the parameters of a bucket have in common. `alone` names a parameter that shares its bucket with none."""

    placement: Placement
    decays: bool
    group: BucketGroup
    unit: str
    alone: str = ""


class BucketPiece(NamedTuple):
    """The elements first..last of a flattened parameter, which lie in this rank's share from `offset` on."""

    parameter: DeclaredParameter
    first: int
    last: int
    offset: int

    @property
    def window(self) -> slice:
        """The piece in a flat tensor of the share."""
        return slice(self.offset, self.offset + self.last - self.first)


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
    def weights(self) -> torch.Tensor:
        return self.storage.weights

    @property
    def gradients(self) -> torch.Tensor:
        """The sum of this rank's gradients since the step began."""
        return self.sums.whole()

    @property
    def reduced_gradient_share(self) -> torch.Tensor:
        """This rank's share of the sum over ranks; of its own sum, before the reduction has arrived."""
        if self.sums.reduced is None:
            return self.gradients[self.share]
        return self.sums.reduced

    @property
    def share(self) -> slice:
        size = len(self.weights) // self.replicas.size
        first = self.replicas.index * size
        return slice(first, first + size)

    def parameter_views(self, flat: torch.Tensor) -> Iterator[tuple[DeclaredParameter, torch.Tensor]]:
        """Each parameter's part of a flat tensor of this bucket, in the parameter's shape."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            tensor = parameter.tensor
            yield parameter, flat[start : start + tensor.numel()].view(tensor.shape)

    def pieces(self) -> Iterator[BucketPiece]:
        """The piece of every parameter in this rank's share; an empty piece where the share holds nothing of it."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            first = max(self.share.start, start)
            last = min(self.share.stop, start + parameter.tensor.numel())
            if first < last:
                yield BucketPiece(parameter, first - start, last - start, first - self.share.start)
            else:
                yield BucketPiece(parameter, 0, 0, 0)

    def matrix_views(self, flat: torch.Tensor) -> Iterator[tuple[BucketPiece, torch.Tensor]]:
        """Each parameter's matrices in a flat tensor of the share: (matrices, rows, columns). Only for buckets whose
        shares end between matrices."""
        for piece in self.pieces():
            matrix = piece.parameter.matrix
            if matrix is not None and piece.last > piece.first:
                yield piece, flat[piece.window].view(-1, *matrix)


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
) -> list[Bucket]:
    """Group the parameters and move them into flat tensors; the model goes on using views of these.

    `held`: parameters of which several pipeline ranks hold copies, each in a bucket of its own, so that it has the same
    place on all of them. `gradients`: the dtype in which the gradients of a bf16 model are kept. `memory`: whether
    gradient memory is allocated every step or once. With `unit`, buckets follow units instead of `most` elements.
    """
    holders = held or {}
    maker = BucketMaker(world, gradients, memory, storage)
    grouping = Grouping(most, holders, group, unit)
    groups = grouping.group_parameters(model)
    return [maker.make_bucket(key, parameters, holders.get(key.alone, ())) for key, parameters in groups]


KeyedParameters = tuple[BucketKey, list[DeclaredParameter]]


@dataclass(frozen=True)
class Grouping:
    """How parameters are divided into buckets; see `fill_buckets`."""

    most: int
    held: Mapping[str, tuple[int, ...]]
    group_of: GroupOf
    unit_of: UnitOf | None

    def group_parameters(self, model: nn.Module) -> list[KeyedParameters]:
        """Parameters by bucket: full buckets in the order in which they fill up, then the rest, then held ones."""
        full: list[KeyedParameters] = []
        held: list[KeyedParameters] = []
        filling: dict[BucketKey, list[DeclaredParameter]] = {}
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
        declaration, name = parameter.declaration, parameter.name
        group = self.group_of(parameter)
        unit = self.unit_of(name) if self.unit_of else ""
        # Of a stack, each share holds some matrices: its size must be a multiple of the matrix.
        cut_stack = group.cut == "matrices" and declaration.stacked
        alone = name if cut_stack or name in self.held else ""
        return BucketKey(declaration.placement, declaration.decays, group, unit, alone)

    def is_full(self, parameters: list[DeclaredParameter]) -> bool:
        if self.unit_of:
            return False
        return sum(p.tensor.numel() for p in parameters) >= self.most


@dataclass(frozen=True)
class BucketMaker:
    """What all buckets of a model are made with; see `fill_buckets`."""

    world: World
    gradients: str
    memory: GradientMemory
    storage: StorageMaker

    def make_bucket(self, key: BucketKey, parameters: list[DeclaredParameter], holders: tuple[int, ...]) -> Bucket:
        """Move these parameters into a flat tensor."""
        replicas = self.world.axis("gradients of", *key.placement.gradient_sum_axes)
        places = placement_of_parameters(key, parameters, replicas.size)
        like = parameters[0].tensor
        storage = self.storage(places.size, like)
        dtype = gradient_sum_dtype(like, self.gradients)
        sums = make_gradient_sums(self.memory, places.spans, places.size, storage.weights.device, dtype)
        bucket = Bucket(key, places.parameters, places.starts, storage, sums, replicas, holders)
        for parameter, start in zip(bucket.parameters, bucket.starts, strict=True):
            view = storage.part(start, parameter.tensor.shape)
            view.copy_(parameter.tensor.detach())
            parameter.tensor.data = view
        return bucket


def gradient_sum_dtype(parameter: torch.Tensor, gradients: str = "fp32") -> torch.dtype:
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
        pairs = zip(self.parameters, self.starts, strict=True)
        return [(start, start + parameter.tensor.numel()) for parameter, start in pairs]


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
    share_and_offset: list[tuple[int, int, DeclaredParameter]] = []
    by_size = sorted(parameters, key=number_of_elements, reverse=True)
    for parameter in by_size:
        share = ends.index(min(ends))
        share_and_offset.append((share, ends[share], parameter))
        ends[share] += round_up(parameter.tensor.numel(), ALIGNMENT)
    size = max(ends)
    placed = sorted(share_and_offset, key=share_then_offset)
    ordered = [parameter for _, _, parameter in placed]
    starts = [share * size + offset for share, offset, _ in placed]
    return Places(ordered, starts, size * shares)


def number_of_elements(parameter: DeclaredParameter) -> int:
    return parameter.tensor.numel()


def share_then_offset(place: tuple[int, int, DeclaredParameter]) -> tuple[int, int]:
    return place[:2]


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

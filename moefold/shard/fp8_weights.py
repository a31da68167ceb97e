"""Weights stored in FP8: bytes in both layouts on every replica, main weights on the rank that updates them, and no
copy in the model's dtype (`precision.storage fp8`).

    before_gather    largest magnitudes of this rank's share; over replicas; scales; bytes of the share (on one replica
                     the optimizer's kernel may have written all of it)
    wire_tensors     the bytes, one for each weight
    after_gather     the second layout, from the bytes of all replicas

A parameter has its shape and dtype, for gradients, and no memory: its elements are one NaN, which a loss would show.
Products read the stored copy (layout/weight_copies.py). Bytes are those that a run with weights in the model's dtype
has: main weights are rounded to that dtype first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.decode_moment import decode_moment
from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.kernels.optimizer.state_blocks import CODE_DTYPES
from moefold.kernels.quantise.fp8 import Quantised, scale_from_amax
from moefold.kernels.quantise.matrix_places import MatrixPlace, Places
from moefold.kernels.quantise.quantise_weight import QuantisedWeight, WeightFormat
from moefold.kernels.quantise.quantise_weight_share import cast_share, share_maxima, transpose_values
from moefold.layout.held_share import detach_held_share
from moefold.layout.weight_copies import release_stored, store_copy, stored_copy, take_rewritten
from moefold.shard.block_values import BlockValues, FlatValues, values_in_blocks, whole_values
from moefold.shard.storage import (
    FlatWeights,
    FusedOperands,
    LargestOfReplicas,
    LogicalValues,
    MoveTensor,
    ShardedWeights,
    Wire,
    flat_part,
    store_values,
)


class StoredMatrices(NamedTuple):
    """A parameter of a bucket, from element `start` on: matrices (E, N, D)."""

    parameter: nn.Parameter
    start: int
    shape: tuple[int, int, int]


ManyMatrices = Sequence[StoredMatrices]


@dataclass(frozen=True)
class Fp8Storage:
    """The weights of a model that are stored in FP8, by name with their format, and the kernels that quantise them."""

    formats: Mapping[str, WeightFormat]
    kernels: BoundKernels
    main: str = "fp32"

    def make(
        self, size: int, like: Tensor, matrices: ManyMatrices, format: WeightFormat, sharded: bool = False
    ) -> Fp8Weights:  # fmt: skip
        storage = ShardedFp8Weights if sharded else Fp8Weights
        return storage(size, like, matrices, format, self.kernels, self.main)


class Fp8Weights(FlatWeights):
    """Until main weights are opened, weights are flat and in the model's dtype, to be filled; then they are FP8."""

    def __init__(
        self,
        size: int,
        like: Tensor,
        matrices: ManyMatrices,
        format: WeightFormat,
        kernels: BoundKernels,
        main: str = "fp32",
    ):
        super().__init__(size, like)
        self.main_type = main
        self.dtype = like.dtype
        self.matrices = matrices
        self.format = format
        self.kernels = kernels
        self.places = number_blocks(matrices)

    def new_main_weights(self, weights: Tensor) -> FlatValues:
        """Main weights of these values, in their own memory."""
        if self.main_type in CODE_DTYPES:
            return values_in_blocks(self.main_type, weights, self.kernels[decode_moment])
        dtype = self.dtype
        if self.main_type != "bf16":
            dtype = torch.promote_types(dtype, torch.float32)
        return weights.to(dtype, copy=True)

    def open_main_weights(self, share: slice) -> None:
        self.share = share
        self.main = self.new_main_weights(self.weights[share])
        self.values = self.quantise(self.weights, 0, own_maxima)
        self.release_weights()
        self.store_copies()

    def release_weights(self) -> None:
        """Free the weights in the model's dtype; parameters keep shape and dtype."""
        size = len(self.weights)
        nothing = self.weights.new_full((1,), torch.nan)
        self.weights = nothing.expand(size)
        for parameter, start, _ in self.matrices:
            view = flat_part(self.weights, start, parameter.shape)
            parameter.data = view

    def quantise(self, share: Tensor, begin: int, agree: LargestOfReplicas) -> Tensor:
        """Bytes of a share of the bucket, from element `begin` on, and scales of all of it."""
        places = self.places
        find_maxima = self.kernels[share_maxima]
        maxima_here_B = find_maxima(share, begin, places, self.dtype)
        maxima_B = agree(maxima_here_B)
        self.scales = [self.scales_of(place, maxima_B) for place in places]
        spread: list[Tensor] = []
        for scales, place in zip(self.scales, places, strict=True):
            spread.append(spread_scales(scales, place))
        scales_B = torch.cat(spread)
        cast = self.kernels[cast_share]
        return cast(share, begin, places, scales_B, self.format.rule, self.dtype)

    def scales_of(self, place: MatrixPlace, maxima_B: Tensor) -> Tensor:
        """Scales of matrices, (E, I, J) or (E, 1, 1)."""
        first = place.first_block
        last = first + place.blocks
        maxima_here_B = maxima_B[first:last]
        maxima_EIJ = maxima_here_B.view(place.block_shape)
        if self.format.scales == "expert":
            maxima_EIJ = maxima_EIJ.amax((1, 2), keepdim=True)
        bits_EIJ = maxima_EIJ.contiguous()
        amax_EIJ = bits_EIJ.view(torch.float32)
        return scale_from_amax(amax_EIJ, self.format.rule)

    def store_copies(self) -> None:
        """Give products both layouts of the bytes as they are now."""
        transpose = self.kernels[transpose_values]
        for matrices, scales_EIJ in zip(self.matrices, self.scales, strict=True):
            parameter, start, shape = matrices
            release_stored(parameter)
            values_END = flat_part(self.values, start, shape)
            forward = Quantised(values_END, scales_EIJ)
            values_EDN = transpose(values_END)
            scales_EJI = scales_EIJ.mT.contiguous()
            transposed = Quantised(values_EDN, scales_EJI)
            copy = QuantisedWeight(forward, transposed)
            store_copy(parameter, self.format, copy)

    def main_values(self) -> Tensor:
        return whole_values(self.main)

    def refresh_weights(self, values: Tensor) -> None:
        if isinstance(self.main, BlockValues):
            self.main.put(0, len(values), values)
        else:
            store_values(round_to_nearest(values, self.main.dtype), self.main)

    def fused_operands(self) -> FusedOperands:
        return FusedOperands(self.main, None)

    def before_gather(self, agree: LargestOfReplicas) -> None:
        if self.has_replicas:
            begin = self.share.start
            self.mine = self.quantise(self.main_values(), begin, agree)
            return
        rewritten = [take_rewritten(parameter) for parameter, _, _ in self.matrices]
        if all(rewritten):  # by the kernel that updated the main weights
            return
        self.release_copies()
        self.values = self.quantise(self.main_values(), 0, agree)
        self.store_copies()

    @property
    def has_replicas(self) -> bool:
        return len(self.main) < len(self.weights)

    def release_copies(self) -> None:
        """Free the bytes, before new ones are made."""
        del self.values
        self.release_layouts()

    def release_layouts(self) -> None:
        for parameter, _, _ in self.matrices:
            release_stored(parameter)

    def wire_tensors(self, share: slice) -> list[Wire]:
        gathered = self.values.view(torch.uint8)
        mine = self.mine.view(torch.uint8)
        del self.mine
        return [Wire(gathered, mine)]

    def after_gather(self) -> None:
        self.store_copies()

    @property
    def main_is_model(self) -> bool:
        """Whether main weights are in the model's dtype."""
        return self.main.dtype == self.dtype

    def logical_values(self) -> FlatValues | None:
        if self.main_is_model:
            return None
        return self.main

    def unheld_values(self) -> FlatValues | LogicalValues:
        if self.main_is_model:
            return self.main
        return RoundedValues(self.main, self.dtype)

    def main_weight_bytes(self) -> int:
        return self.main.nbytes

    def move_main_weights(self, move: MoveTensor) -> None:
        raise AssertionError("weights in FP8 are made of main weights on the device")

    def weight_bytes(self) -> int:
        """Both layouts with their scales."""
        scales = sum(scale.nbytes for scale in self.scales)
        one_layout = self.values.nbytes + scales
        return 2 * one_layout


class ShardedFp8Weights(ShardedWeights, Fp8Weights):
    """Weights in FP8 of which a rank keeps the bytes of its share and all scales (ZeRO-3). The bytes of all replicas
    are there while the unit is, in both layouts once they are gathered."""

    is_open = False

    def open_main_weights(self, share: slice) -> None:
        self.share = share
        self.main = self.new_main_weights(self.weights_of_share(share))
        self.own = None
        self.release_weights()
        for parameter, _, _ in self.matrices:
            detach_held_share(parameter)  # main weights are what is saved
        size = len(self.weights)
        dtype = self.format.rule.format.dtype
        self.values = torch.empty(size, dtype=dtype, device=self.main.device)
        self.values.untyped_storage().resize_(0)
        self.is_open = True

    def held_weights(self, share: slice) -> Tensor | None:
        return None if self.is_open else super().held_weights(share)

    def before_gather(self, agree: LargestOfReplicas) -> None:
        self.mine = self.quantise(self.main_values(), self.share.start, agree)

    def gathered_memory(self) -> list[Tensor]:
        return [self.values if self.is_open else self.weights]

    def forget_gathered(self) -> None:
        if self.is_open:
            self.release_layouts()

    def wire_tensors(self, share: slice) -> list[Wire]:
        gathered = self.values.view(torch.uint8)
        mine = self.mine.view(torch.uint8)
        return [Wire(gathered, mine)]

    def gathered_tensors(self) -> list[Tensor]:
        tensors = [self.values]
        for parameter, _, _ in self.matrices:
            _, transposed = stored_copy(parameter)
            tensors.append(transposed.values)
        return tensors

    def weight_bytes(self) -> int:
        scales = sum(scale.nbytes for scale in self.scales)
        return self.mine.nbytes + scales


@dataclass
class RoundedValues:
    """Main weights as the model would have them, rounded when they are read. Values that are put are main weights."""

    main: FlatValues
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.main)

    def __getitem__(self, window: slice) -> RoundedValues:
        part = self.main[window]
        return RoundedValues(part, self.dtype)

    def get(self, first: int, last: int) -> Tensor:
        values = whole_values(self.main[first:last])
        return round_to_nearest(values, self.dtype)

    def put(self, first: int, last: int, values: Tensor) -> None:
        part = self.main[first:last]
        if isinstance(part, BlockValues):
            part.put(0, len(values), values)
        else:
            part.copy_(values)


def own_maxima(maxima_B: Tensor) -> Tensor:
    """The maxima of all replicas, where this rank has seen all values."""
    return maxima_B


def number_blocks(matrices: ManyMatrices) -> Places:
    """The places of matrices in the bucket, their blocks numbered one after another."""
    places: list[MatrixPlace] = []
    first_block = 0
    for _, start, shape in matrices:
        place = MatrixPlace(start, shape, first_block)
        places.append(place)
        first_block += place.blocks
    return tuple(places)


def spread_scales(scales: Tensor, place: MatrixPlace) -> Tensor:
    """A scale for every block."""
    of_blocks = scales.expand(place.block_shape)
    return of_blocks.flatten()

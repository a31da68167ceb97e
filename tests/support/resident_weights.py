"""The bytes of weights that a rank holds, counted by the memory that parameters and shares lie in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from moefold.checkpoint.hf import export, read_weights
from moefold.checkpoint.hf.export import NamedTensors
from moefold.checkpoint.hf.read_weights import FolderWeights
from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.layout.axes import World
from moefold.layout.held_blocks import held_blocks_of
from moefold.layout.held_share import held_share_of
from moefold.model.steps import PassKey, PassKind, Step
from moefold.model.transformer import Transformer
from moefold.model.unit_memory import UnitBuffers, aligned, can_give_memory
from moefold.shard import buckets as buckets_module
from moefold.shard.buckets import Bucket
from moefold.shard.gathered_units import GatheredUnits
from moefold.shard.storage import ShardedWeights
from moefold.train import assemble
from moefold.train.assemble import Run, assemble_run
from moefold.train.share_out import WeightFiller


@dataclass
class ResidentWeights:
    """An observer of steps. Bytes: `at_start` the most while the run is assembled, `in_fill` and `in_export` the most
    while weights of a folder are read and written, with every tensor that is made for it, `in_steps` the most around a
    step, `shares` what is held for good, `units` those of each unit whole. `addresses`: where gathers wrote each
    bucket. `counts`: how often fill and export were counted."""

    model: Transformer | None = None
    window: GatheredUnits | None = None
    at_start: int = 0
    in_fill: int = 0
    in_export: int = 0
    in_steps: int = 0
    counts: int = 0
    shares: int = 0
    units: dict[str, int] = field(default_factory=dict)
    addresses: dict[int, set[int]] = field(default_factory=dict)

    def count(self) -> int:
        """Another thread may free one unit and gather the next in the midst of a count, which then has both: a count
        is one that two in a row agree on."""
        found = self.count_once()
        while True:
            again = self.count_once()
            if again == found:
                return found
            found = again

    def count_once(self, others: Iterable[Tensor] = ()) -> int:
        assert self.model is not None
        held = [tensor for parameter in self.model.parameters() for tensor in tensors_of_weight(parameter)]
        memory: dict[int, int] = {}
        for tensor in (*held, *others):
            storage = tensor.untyped_storage()
            memory[storage._cdata] = 0 if self.is_lent(tensor) else storage.nbytes()
        return sum(memory.values()) + sum(buffer.nbytes for buffer in self.buffers())

    def buffers(self) -> list[Tensor]:
        """What units lie in while they are here."""
        if self.window is None or not isinstance(self.window.memory, UnitBuffers):
            return []
        return [end.buffer for end in self.window.memory.ends if end.is_first]

    def is_lent(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(0 <= address - buffer.data_ptr() < buffer.nbytes for buffer in self.buffers())

    def count_at_start(self) -> None:
        self.at_start = max(self.at_start, self.count())

    def count_in_fill(self) -> None:
        self.in_fill = max(self.in_fill, self.count_once(tensors_made_since()))
        self.counts += 1

    def count_in_export(self) -> None:
        self.in_export = max(self.in_export, self.count_once(tensors_made_since()))
        self.counts += 1

    @contextmanager
    def counted_fill(self) -> Iterator[None]:
        """Count behind every box that is read from a folder, and behind every piece of a weight."""
        forget_tensors_so_far()
        read_box = counting_after(FolderWeights.read_raw_box, self.count_in_fill)
        read_piece = counting_after(read_weights.read_piece_values, self.count_in_fill)
        with (
            mock.patch.object(FolderWeights, "read_raw_box", read_box),
            mock.patch.object(read_weights, "read_piece_values", read_piece),
        ):
            yield

    def counted_export(self, exported: NamedTensors) -> NamedTensors:
        """The exported tensors, counted when a piece has been gathered and joined, and when each of them is whole."""
        forget_tensors_so_far()
        write_piece = counting_after(export.write_piece_values, self.count_in_export)
        with mock.patch.object(export, "write_piece_values", write_piece):
            for name, tensor in exported:
                self.count_in_export()
                yield name, tensor

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        self.in_steps = max(self.in_steps, self.count())
        if self.window is None:
            return
        for number, bucket in enumerate(self.window.buckets):
            if not isinstance(bucket.storage, ShardedWeights):
                continue
            address = bucket.storage.gathered_memory()[0].data_ptr()
            if address:
                self.addresses.setdefault(number, set()).add(address)

    after = before

    def note_units(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            storage = bucket.storage
            if isinstance(storage, ShardedWeights):
                sizes = [aligned(tensor.nbytes) for tensor in storage.gathered_memory()]
                self.units[bucket.unit] = self.units.get(bucket.unit, 0) + sum(sizes)
            self.shares += storage.weight_bytes()

    def forget_model(self) -> None:
        """So that the figures can be sent to another process."""
        self.model = None
        self.window = None

    def excess(self, config: Config) -> str:
        """What is held beyond the shares and the two largest units, with paired slots twice; or that gathers write to
        more places than units have at a time."""
        if config.shard.mode == "zero1":
            return ""
        passes = 2 if config.pipeline.pair else 1
        largest = sorted(self.units.values())[-2:]
        allowed = self.shares + passes * sum(largest)
        found = {"start": self.at_start, "fill": self.in_fill, "export": self.in_export, "steps": self.in_steps}
        if max(found.values()) > allowed:
            return f"bytes in {found}; {allowed} are allowed"
        places = max(map(len, self.addresses.values()), default=0)
        if can_give_memory() and places > 2 * passes:
            return f"gathers write a bucket to {places} places"
        return ""


def counting_after(function: Callable[..., Any], count: Callable[[], None]) -> Callable[..., Any]:
    def call_and_count(*args: Any) -> Any:
        result = function(*args)  # is counted too, as are the arguments
        count()
        return result

    return call_and_count


def forget_tensors_so_far() -> None:
    gc.collect()
    gc.freeze()


def tensors_made_since() -> list[Tensor]:
    """Every tensor that lives and was made since the others were forgotten."""
    return [each for each in gc.get_objects() if isinstance(each, Tensor) and each.device.type != "meta"]


def tensors_of_weight(parameter: Tensor) -> Iterator[Tensor]:
    """What a weight lies in, in blocks or not: where it is whole, and this rank's share."""
    share = held_share_of(parameter)
    blocks = held_blocks_of(parameter)
    held = [blocks or parameter] if share is None else [blocks or parameter, share.values]
    for each in held:
        yield from (each,) if isinstance(each, Tensor) else each.tensors()


def assemble_watched_run(
    config: Config, world: World, corpus: Corpus, fill: WeightFiller | None = None
) -> tuple[Run, ResidentWeights]:
    """A run, and the weights that it held while it was assembled: counted before each bucket frees its weights,
    while `fill` fills them, and behind it."""
    weights = ResidentWeights()
    keep_share_alone = buckets_module.keep_share_alone
    build_model = assemble.build_model

    def build_and_watch(*args: object) -> Transformer:
        weights.model = build_model(*args)  # pyright: ignore[reportArgumentType]
        return weights.model

    def count_and_keep(bucket: Bucket, storage: ShardedWeights) -> None:
        weights.count_at_start()
        keep_share_alone(bucket, storage)
        weights.count_at_start()

    def fill_and_count(model: Transformer) -> None:
        assert fill is not None
        weights.model = model  # which without shares is filled while it is built
        with weights.counted_fill():
            fill(model)

    with (
        mock.patch.object(assemble, "build_model", build_and_watch),
        mock.patch.object(buckets_module, "keep_share_alone", count_and_keep),
    ):
        run = assemble_run(config, world, Path("."), corpus, fill and fill_and_count)
    weights.count_at_start()
    weights.note_units(run.parameters.buckets)
    if isinstance(run.parameters, GatheredUnits):
        weights.window = run.parameters
    return run, weights

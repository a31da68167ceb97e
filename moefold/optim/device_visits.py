"""Visits of a share to the device: its states, which are in host memory, come window by window for the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from moefold.layout.pinned_memory import pinned_copy
from moefold.optim.host_states import Chunk, HostStream, values_on_host
from moefold.optim.rule import BucketShare
from moefold.shard.block_values import BlockValues, CodesAndScales, FlatValues, codes_and_scales
from moefold.shard.storage import FusedOperands

Windows = Sequence[slice]
UpdateWindow = Callable[..., None]  # of the window's number, its main weights, and each of its states
Read = tuple[Tensor, ...]


def move_to_host(share: BucketShare) -> None:
    """Move state and main weights of a share to host memory."""
    for kind, moment in share.state.items():
        share.state[kind] = values_on_host(moment)
    share.storage.move_main_weights(pinned_copy)


def open_visits(
    share: BucketShare,
    windows: Windows,
    stream: HostStream | None,
    window_gib: float,
) -> HostStream:
    """The way on which the windows of a share visit the device: the given one, or a new one."""
    if stream is None:
        device = share.weights.device
        stream = HostStream(device, window_gib)
    chunks = visiting_chunks(share, windows)
    stream.expect(chunks)
    return stream


def visit_device(
    share: BucketShare,
    windows: Windows,
    stream: HostStream,
    update: UpdateWindow,
    read: Read,
) -> None:
    """Update a share window by window on the stream of visits; states are copied to the device and back. `read`: what
    the update reads beside the gradient."""
    main, _ = operands_in_parts(share)
    main_visits = visits_device(main, share)

    def update_chunk(number: int, tensors: list[Tensor]) -> None:
        rest = iter(tensors)
        window = windows[number]
        part = next_values(main, rest) if main_visits else codes_and_scales(main, window)
        states: list[CodesAndScales] = []
        for values in share.state.values():
            visitor = next_values(values, rest)
            states.append(visitor)
        update(number, part, *states)

    chunks = visiting_chunks(share, windows)
    ended = stream.visit(share.number, chunks, update_chunk)
    gradient = share.kept_gradient
    share.bucket.note_update(ended, (gradient, *read))
    if gradient.device.type == "cpu":  # the update is done
        share.bucket.await_update()


def operands_in_parts(share: BucketShare) -> FusedOperands:
    """Main weights, and the model's weights where these are others, of a share that is updated in parts."""
    fused = share.storage.fused_operands()
    assert fused is not None, "weights that cannot be updated in parts"
    return fused


def visits_device(main: FlatValues, share: BucketShare) -> bool:
    """Whether main weights are copied to the device for the update."""
    device = share.weights.device
    return main.device != device or device.type == "cpu"


def visiting_chunks(share: BucketShare, windows: Windows) -> list[Chunk]:
    """The host tensors of each window of a share."""
    main, _ = operands_in_parts(share)
    on_host = list(share.state.values())
    if visits_device(main, share):
        on_host.insert(0, main)
    return [tensors_of_window(on_host, window) for window in windows]


def tensors_of_window(on_host: Sequence[FlatValues], window: slice) -> list[Tensor]:
    """The tensors of a window of what lies in host memory: values, or codes and scales."""
    tensors: list[Tensor] = []
    for values in on_host:
        codes, scales = codes_and_scales(values, window)
        tensors.append(codes)
        if scales is not None:
            tensors.append(scales)
    return tensors


def next_values(values: FlatValues, tensors: Iterator[Tensor]) -> CodesAndScales:
    """The next tensors of these values, in the order of `tensors_of_window`."""
    codes = next(tensors)
    scales = None
    if isinstance(values, BlockValues):
        scales = next(tensors)
    return CodesAndScales(codes, scales)

"""Process groups: the rendezvous of all ranks, and the device of this one."""

from __future__ import annotations

import datetime
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moefold.config.errors import RunFailure, UserError
from moefold.config.run import ParallelConfig, ShardConfig
from moefold.layout.agreement import Terms, agree_through_store
from moefold.layout.axes import World, create_world
from moefold.layout.environment import Rendezvous, read_environment
from moefold.layout.gloo import share_device
from moefold.layout.meeting import attempt_of_all

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)

# Words by which a RuntimeError of torch.distributed is known: another rank is gone.
LOST_CONTACT_WORDS = ("gloo", "Gloo", "NCCL", "Connection closed", "Connection reset")


def choose_device(wanted: str, place: Rendezvous) -> torch.device:
    """The device of this rank. More ranks than GPUs share them, which needs gloo."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        raise UserError("train.device = cuda, but torch sees no CUDA device here; set train.device to cpu or auto")
    number = place.local_rank % torch.cuda.device_count()
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


@contextmanager
def joined_world(
    parallel: ParallelConfig,
    wanted_device: str,
    shard: ShardConfig | None = None,
    terms: Terms | None = None,
    timeout: datetime.timedelta = COLLECTIVE_TIMEOUT,
    node_size: int | None = None,
) -> Iterator[World]:
    """The world, for as long as the run lasts. A single rank starts no process group; every axis has size one.
    `terms`: what ranks compare before they form groups. `timeout`: of a collective. `node_size`: how
    many ranks count as one node; those of this machine, if not said."""
    place = read_environment(os.environ)
    device = choose_device(wanted_device, place)
    if place.size == 1:
        yield create_world(0, 1, device, parallel)
        return
    own_gpu = device.type == "cuda" and place.local_size <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
    device_id = device if own_gpu else None
    store = rendezvous_store(place)
    if terms is not None:
        agree_through_store(terms, store, place.rank, place.size)
    share_device()
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout, device_id=device_id
    )
    try:
        yield create_world(place.rank, place.size, device, parallel, node_size or place.local_size, store, shard)
    except RuntimeError as error:
        message = str(error)
        if not any(word in message for word in LOST_CONTACT_WORDS):
            raise
        reason = first_error_line(error)
        raise RunFailure(f"rank {place.rank} lost contact with another rank: {reason}") from None
    finally:
        dist.destroy_process_group()


def first_error_line(error: Exception) -> str:
    """The first sentence of torch's message, without the file and line in torch's sources."""
    text = str(error).strip()
    line, *_ = text.split("\n")
    text = re.sub(r"^\[\S+:\d+\] ", "", line)
    sentence, *_ = text.split(". ")
    return sentence[:200]


def rendezvous_store(place: Rendezvous) -> dist.Store:
    """A key-value store that all ranks reach, served by the launcher or by rank 0."""
    serves = place.rank == 0 and not place.agent
    return open_store(place, serves=serves, wait_for_workers=True)


def connect_store(place: Rendezvous) -> dist.Store:
    """A further connection to the store of the ranks: calls on one connection wait for each other."""
    return open_store(place, serves=False, wait_for_workers=False)


def open_store(place: Rendezvous, serves: bool, wait_for_workers: bool) -> dist.Store:
    """The store, prefixed by the attempt: after a restart, ranks would otherwise read the addresses of the ranks before
    it."""
    store = open_common_store(place, serves, wait_for_workers)
    attempt = attempt_of_all(place, open_common_store)
    return dist.PrefixStore(f"attempt{attempt}", store)


def open_common_store(place: Rendezvous, serves: bool = False, wait_for_workers: bool = False) -> dist.TCPStore:
    """The store of all attempts; a refusal where it cannot be reached."""
    try:
        return dist.TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=serves,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=wait_for_workers,
        )
    except (dist.DistError, RuntimeError) as error:
        reason = str(error)
        if "EADDRINUSE" in reason or "address already in use" in reason.lower():
            raise UserError(
                f"port {place.port} on {place.host} is in use; expected it free for the ranks to meet; "
                f"stop what uses it, or set another with --port or MASTER_PORT, such as {place.port + 1}"
            ) from None
        raise UserError(
            f"rank {place.rank} cannot reach {place.host}:{place.port}, where {place.size} ranks were to meet "
            f"({first_error_line(error)}); check MASTER_ADDR and MASTER_PORT"
        ) from None


def serve_store(listener: socket.socket) -> dist.Store:
    """The store of local ranks, served from their launcher, so that it outlives each of them."""
    host, port = listener.getsockname()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def abort_communicators() -> None:
    """Abort NCCL's communicators, so that kernels which wait for another rank end. Never run on several GPUs."""
    if not dist.is_initialized() or not torch.cuda.is_available():
        return
    with suppress(RuntimeError):
        distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]

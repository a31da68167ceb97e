"""Comparison of replicas: ranks that hold the same weights must hold the same bits.

Every `observe.compare_every` steps, and before a checkpoint, ranks compare the checksums of their weights in all steps
since the last comparison (shard/weight_checksums.py). Of three replicas or more the odd one is named; of two, both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from moefold.comm.host_objects import choose_object
from moefold.shard.weight_checksums import Checksums, HeldPart
from moefold.train.assemble import Run
from moefold.train.fault_log import RecordedFault
from moefold.train.last_sound import last_sound_of


class ReplicasDiffer(RecordedFault):
    """Ranks that should hold the same weights do not. Its record has the `ranks` that are odd."""


def compare_replicas(run: Run) -> None:
    """Stop a run whose replicas differ. Every rank calls this."""
    checksums = run.checksums
    if checksums is None:
        return
    since = checksums.since + 1
    checksums.since = run.step
    odd = choose_object(checksums.take(), find_odd_ranks, run.world.everyone)
    if not odd:
        return
    last_sound = last_sound_of(run)
    named = ", ".join(map(str, odd))
    others = sorted(set[int]().union(*odd.values()))
    against = f"those of its replicas on ranks {', '.join(map(str, others))}" if others else "each other"
    raise ReplicasDiffer(
        f"weights of rank {named} differ from {against}, in a step from {since} to {run.step}: a bit has flipped in "
        f"memory, or that rank computes otherwise. Checkpoints were compared before they were written. {last_sound}, "
        f"without the machine of rank {named}",
        run.step,
        "replicas differ",
        what=f"rank {named}",
        ranks=list(odd),
    )


def find_odd_ranks(by_rank: Sequence[Checksums]) -> Mapping[int, list[int]]:
    """Ranks whose checksum of some weights is not that of most replicas, each with the ranks that agree; where no
    checksum has most, all of them."""
    holders = defaultdict[HeldPart, dict[int, list[int]]](dict)
    for rank, checksums in enumerate(by_rank):
        for part, checksum in checksums.items():
            holders[part].setdefault(checksum, []).append(rank)
    odd: dict[int, list[int]] = {}
    for ranks_of in holders.values():
        groups = sorted(ranks_of.values(), key=len, reverse=True)
        if len(groups) == 1:
            continue
        most, *fewer = groups
        if len(most) == len(fewer[0]):
            most, fewer = [], groups
        for group in fewer:
            odd |= dict.fromkeys(group, most)
    return dict(sorted(odd.items()))

"""Comparison of replicas: ranks that hold the same weights must hold the same bits.

Every `observe.compare_every` steps, and before a checkpoint, ranks compare the checksums of their weights in all steps
since the last comparison (shard/weight_checksums.py). Of three replicas or more the odd one is named. Of two, the rank
that updates the weights in question knows what it has computed: either it holds something else, or the other is odd.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from moefold.comm.host_objects import choose_object
from moefold.shard.weight_checksums import Checksum, Checksums, HeldPart
from moefold.train.assemble import Run
from moefold.train.fault_log import RecordedFault
from moefold.train.last_sound import last_sound_of

Holders = dict[int, Checksum]  # of some weights, by rank


class ReplicasDiffer(RecordedFault):
    """Ranks that should hold the same weights do not, or a rank does not hold what it has computed. Its record has the
    `ranks` that are odd."""


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
    against = f"those of its replicas on ranks {', '.join(map(str, others))}" if others else "what it has computed"
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
    """Ranks whose checksum of some weights is wrong, each with the ranks that have the right one."""
    holders = defaultdict[HeldPart, Holders](dict)
    for rank, checksums in enumerate(by_rank):
        for part, checksum in checksums.items():
            holders[part][rank] = checksum
    odd: dict[int, list[int]] = {}
    for held in holders.values():
        right = right_sum(held)
        wrong = [rank for rank, checksum in held.items() if checksum.held != right or checksum.has_changed]
        agreeing = [rank for rank in held if rank not in wrong]
        odd |= dict.fromkeys(wrong, agreeing)
    return dict(sorted(odd.items()))


def right_sum(held: Holders) -> int | None:
    """The sum that most replicas have; where none has most, that of a rank which updates these weights and holds what
    it has computed, or else of a rank that does not update them. None: no rank has a right one."""
    counts = Counter(checksum.held for checksum in held.values())
    (most, count), *fewer = counts.most_common()
    if len(held) > 2 and (not fewer or count > fewer[0][1]):
        return most
    candidates = [checksum for checksum in held.values() if not checksum.has_changed]
    in_order = sorted(candidates, key=lambda checksum: not checksum.is_sound)
    return in_order[0].held if in_order else None

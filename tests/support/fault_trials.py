"""Trials of faults on real ranks, many of each kind; the suite has one or two of them.

    python -m tests.support.fault_trials hangs --trials 20      SIGSTOP of a random rank of 4 at a random moment
    python -m tests.support.fault_trials orphans --trials 10    launcher killed (KILL, HUP), standard output closed
    python -m tests.support.fault_trials options --trials 20    a rank that was started with another option
    python -m tests.support.fault_trials nans --trials 20       a NaN in a random tensor of a random rank
    python -m tests.support.fault_trials flips --trials 20      a bit of a replica's weight flipped in memory
    python -m tests.support.fault_trials pairs --trials 20      likewise, of two replicas alone
    python -m tests.support.fault_trials kills --trials 20      a random rank killed, with checkpoints in memory
    python -m tests.support.fault_trials lost --trials 4        likewise, and the copy in memory lost or damaged
    python -m tests.support.fault_trials saves --trials 30      one or all ranks killed in the middle of a save

Each prints a line a trial and a summary; the exit code is the number of trials that failed. Ranks are forked warm
(launched.py). `--seed` gives the same choices again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.damaged_runs import (
    LAYOUTS,
    Held,
    draw_fault,
    draw_flip,
    found_flips,
    held_tensors,
    is_named,
    is_traced,
    traced_faults,
)
from tests.support.kill_trials import HARMS, KilledRun, kill_at_random, kill_while_saving, kill_with_harm
from tests.support.launched import Launcher, has_steps, is_alive, launched, small_ranks, wait_until
from tests.support.ranks import CONTEXT, run_ranks

RANKS = 4
STEP_TIMEOUT = 10
SLOW_TIMEOUT = 30  # a start on a busy machine takes its time
ENDLESS = ["--train.steps", "100000"]
SAVES = ["--checkpoint.every", "2", "--train.validate_every", "3", "--train.validate_sequences", "64"]
LIMITS = ["--train.step_timeout", str(STEP_TIMEOUT), "--train.slow_timeout", str(SLOW_TIMEOUT)]
MOMENTS = ("meeting", "saving", "any", "evaluating")


@dataclass(frozen=True)
class Outcome:
    passed: bool
    text: str
    amount: float | None = None
    unit: str = "s"


def hang_trial(folder: Path, chance: random.Random, number: int) -> Outcome:
    moment = MOMENTS[number % len(MOMENTS)]
    rank = chance.randrange(RANKS)
    out = folder / "a"
    argv = small_ranks(folder, "a", RANKS, *ENDLESS, *SAVES, *LIMITS)
    with launched(argv, folder / "log") as launcher:
        wait_until(lambda: len(launcher.ranks()) == RANKS)
        ranks = launcher.ranks()
        await_moment(moment, out, chance)
        if len(launcher.ranks()) < RANKS:
            return Outcome(False, f"ended before it was stopped: {launcher.output()[-300:]}")
        begun = time.monotonic()
        os.kill(ranks[rank], signal.SIGSTOP)
        wait_until(lambda: "doctor hang" in launcher.output(), SLOW_TIMEOUT + 90)
        seconds = time.monotonic() - begun
        launcher.wait(60)
        left = [pid for pid in ranks if is_alive(pid)]
    return judge_hang(out, (folder / "log").read_text(), moment, rank, seconds, left)


def await_moment(moment: str, out: Path, chance: random.Random) -> None:
    """Wait for a random moment of this kind."""
    if moment == "meeting":
        time.sleep(chance.random() * 1.5)
        return
    wait_until(lambda: has_steps(out, 1), 120)
    if moment == "saving":
        wait_until(lambda: any((out / "checkpoints").glob("*.tmp")), 60)
    elif moment == "evaluating":
        steps = (out / "metrics.jsonl").read_text().count("\n")
        wait_until(lambda: has_steps(out, 3 * (steps // 3 + 1) - 1), 60)
    time.sleep(chance.random() * 0.3)


def judge_hang(out: Path, said: str, moment: str, rank: int, seconds: float, left: list[int]) -> Outcome:
    reports = list((out / "hangs").glob("*.json"))
    if not reports:
        return Outcome(False, f"rank {rank}, {moment}: no report; {said[-300:]}")
    report: dict[str, Any] = json.loads(reports[0].read_text())
    found = re.search(r"within (\S+) s", report["why"])
    late = seconds - float(found[1]) if found else seconds
    since = "limit" if found else "stop"
    stacks = [state["rank"] for state in report["ranks"] if state["stacks"]]
    others = [number for number in range(RANKS) if number != rank]
    in_time = late <= 2 or (not found and late <= STEP_TIMEOUT)
    passed = report["named"] == [rank] and stacks == others and not left and in_time
    stood = report["ranks"][rank]["place"] or "not heard of"
    text = f"rank {rank} stopped in {stood} ({moment}): named {report['named']} {late:.2f} s after the {since}, "
    return Outcome(passed, f"{text}stacks of {stacks}, {len(left)} processes left", late)


def orphan_trial(folder: Path, chance: random.Random, number: int) -> Outcome:
    way = ("KILL", "HUP", "closed output")[number % 3]
    reader, writer = CONTEXT.Pipe(duplex=False)
    output = writer if way == "closed output" else None
    argv = small_ranks(folder, "a", RANKS, *ENDLESS, "--checkpoint.every", "100000")
    with launched(argv, folder / "log", output=output) as launcher:
        writer.close()
        wait_until(lambda: len(launcher.ranks()) == RANKS)
        ranks = launcher.ranks()
        time.sleep(chance.random() * 8)
        begun = time.monotonic()
        end_launcher(way, launcher, reader)
        ended = wait_until(lambda: not any(map(is_alive, [launcher.pid, *ranks])), 60)
        seconds = time.monotonic() - begun
    return Outcome(ended, f"{way}: {'all ended' if ended else 'ranks are left'} after {seconds:.2f} s", seconds)


def end_launcher(way: str, launcher: Launcher, reader: Any) -> None:
    if way == "closed output":
        reader.close()
    else:
        os.kill(launcher.pid, signal.Signals[f"SIG{way}"])


def option_trial(folder: Path, chance: random.Random, number: int) -> Outcome:
    from tests.train.test_agreement import ODD_OPTIONS, RANKS, start_ranks

    (folder / "other.txt").write_text("another text\n" * 20_000)
    what = list(ODD_OPTIONS)[number % len(ODD_OPTIONS)]
    rank = chance.randrange(1, RANKS)
    odd, _ = ODD_OPTIONS[what]
    begun = time.monotonic()
    found = start_ranks(folder, [word.format(folder=folder) for word in odd], rank)
    codes = [code for code, _ in found]
    began = (folder / "a" / "metrics.jsonl").exists()
    passed = codes == [2] * RANKS and f"on rank {rank}" in found[0][1] and not began
    return Outcome(passed, f"{what} on rank {rank}: codes {codes}", time.monotonic() - begun)


KINDS = ("weight", "mean", "mean_square", "gradient", "output")
INTERVAL = 3


@cache
def held_by_ranks(layout: tuple[tuple[str, int], ...], ranks: int = RANKS) -> list[list[Held]]:
    return run_ranks(held_tensors, ranks, dict(layout), **dict(layout))


def nan_trial(folder: Path, chance: random.Random, number: int) -> Outcome:
    layout = LAYOUTS[number % len(LAYOUTS)]
    held = held_by_ranks(tuple(layout.items()))
    fault = draw_fault(chance, KINDS[number % len(KINDS)], layout, held)
    places = run_ranks(traced_faults, RANKS, layout, [fault], **layout)
    passed = all(is_traced(fault, place) for (place,) in places)
    found = {key: value for key, value in (places[0][0] or {}).items() if value not in (None, "")}
    return Outcome(passed, f"{fault} on {layout or 'dp 4'}: {found}")


def flip_trial(folder: Path, chance: random.Random, number: int, ranks: int = RANKS) -> Outcome:
    fault = draw_flip(chance, held_by_ranks((), ranks), INTERVAL)
    records = run_ranks(found_flips, ranks, [fault], INTERVAL)
    passed = all(is_named(fault, INTERVAL, record) for (record,) in records)
    found = records[0][0] or {}
    return Outcome(passed, f"{fault}: ranks {found.get('ranks')} named at step {found.get('step')}")


def kill_trial(folder: Path, chance: random.Random, number: int) -> Outcome:
    """The cost is the number of steps that are done again."""
    run = kill_at_random(folder, chance, RANKS)
    passed = run.same_losses and run.source == "memory"
    return Outcome(passed, describe_kill(run), run.lost_steps, "steps lost")


def lost_copy_trial(folder: Path, chance: random.Random, number: int) -> Outcome:
    what, harm = list(HARMS.items())[number % len(HARMS)]
    run = kill_with_harm(folder, RANKS, harm)
    passed = run.same_losses and run.source == "disk" and run.resumed == run.disk_step
    return Outcome(passed, f"{what}: {describe_kill(run)}", run.lost_steps, "steps lost")


def save_trial(folder: Path, chance: random.Random, number: int) -> Outcome:
    run = kill_while_saving(folder, chance, RANKS)
    passed = run.same_losses and run.source == "disk"
    return Outcome(passed, describe_kill(run), run.lost_steps, "steps lost")


def describe_kill(run: KilledRun) -> str:
    losses = "same losses" if run.same_losses else "OTHER LOSSES"
    return f"killed behind step {run.killed_at}, went on behind step {run.resumed} from {run.source}: {losses}"


TRIALS: dict[str, Callable[[Path, random.Random, int], Outcome]] = {
    "hangs": hang_trial,
    "orphans": orphan_trial,
    "options": option_trial,
    "nans": nan_trial,
    "flips": flip_trial,
    "pairs": partial(flip_trial, ranks=2),
    "kills": kill_trial,
    "lost": lost_copy_trial,
    "saves": save_trial,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=TRIALS)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    chance = random.Random(options.seed)
    outcomes: list[Outcome] = []
    for number in range(options.trials):
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(TRIALS[options.kind](Path(folder), chance, number))
        print(f"{'ok ' if outcomes[-1].passed else 'BAD'} {outcomes[-1].text}", flush=True)
    passed = sum(outcome.passed for outcome in outcomes)
    amounts = [outcome.amount for outcome in outcomes if outcome.amount is not None]
    unit = outcomes[0].unit
    spread = f"{median(amounts):.2f} {unit} in the middle, {max(amounts):.2f} {unit} at most" if amounts else "no time"
    print(f"{options.kind}: {passed} of {len(outcomes)}; {spread}; seed {options.seed}")
    return len(outcomes) - passed


if __name__ == "__main__":
    sys.exit(main())

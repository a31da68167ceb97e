"""A run from start to end: validate, step, record, save, and stop when asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moefold.anatomy.counts import active_parameters, total_parameters, train_flops_per_token
from moefold.checkpoint.save import agreed, bytes_of, require_space
from moefold.checkpoint.saver import Saver
from moefold.checkpoint.state import tensors_of
from moefold.comm.collectives import gather_objects
from moefold.comm.host import Fetched
from moefold.config.read import write_yaml
from moefold.config.refused import Refused
from moefold.config.run import Config
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters
from moefold.model.moe.balance import joined_loads
from moefold.observe.metrics import JsonLines, Sink, TensorBoard
from moefold.observe.progress import Quiet, compact, make_progress
from moefold.observe.router_stats import DeadExperts, RouterCounts, RouterLog, summarise
from moefold.train.assemble import Run, assemble
from moefold.train.evaluate import sample, validation_loss
from moefold.train.from_hf import starting_weights
from moefold.train.host import anyone, garbage_by_hand, stop_requests
from moefold.train.profile import profile_text, watch_step, write_profile
from moefold.train.resume import resume_run, save_run, saver_of, shelf_of
from moefold.train.step import StepReport, refuse_nonsense, train_step

PROMPT = "def "
FIRST_STEPS = 3  # after which every parameter should have had a gradient
PROFILED = 10  # the step that is watched, or the last of a shorter run: by then everything is warm


def train(config: Config, world: World, out: Path, resume: str | None, from_hf: Path | None = None) -> None:
    """Train as configured, from random weights or those of a folder. Every rank calls this."""
    agreed(lambda: claim(out, resume), world, out)
    speaker = make_speaker(world)
    weights = starting_weights(from_hf, config, world, speaker) if from_hf else None
    run = assemble(config, world, out, weights=weights)
    needed = bytes_of(tensors_of(run.model, run.optimizer), world)
    agreed(lambda: require_space(shelf_of(run), needed), world, out)
    continues = resume is not None and resume_run(run, resume, speaker)
    agreed(lambda: (out / "config.yaml").write_text(write_yaml(run.config)), world, out)
    for line in introduction(run):
        speaker(line)
    with (
        recording(run, continues) as record,
        stop_requests() as requests,
        saver_of(run, record.progress.say) as saver,
    ):
        finish(run, record, requests, saver) if run.step < run.config.train.steps else speaker("nothing left to do")


def never_moved(run: Run) -> list[str]:
    """A warning for each parameter that has had no gradient so far: something is not connected."""
    moved = set().union(*gather_objects(run.gradients.moved, run.world.everyone))
    every = set().union(*gather_objects({p.name for p in declared_parameters(run.model)}, run.world.everyone))
    return [
        f"warning: {name} has had no gradient in {run.step} steps; is it connected?" for name in sorted(every - moved)
    ]


def make_speaker(world: World):
    return print_line if world.rank == 0 else ignore


def print_line(text: str) -> None:
    print(text, flush=True)


def ignore(_: str) -> None: ...


def claim(out: Path, resume: str | None) -> None:
    """Make the run's folder; one that already holds a run is only continued when asked."""
    out.mkdir(parents=True, exist_ok=True)
    if resume is None and (out / "metrics.jsonl").exists():
        raise Refused(f"{out} already holds a run; continue it with --resume auto, or choose another --out")


def introduction(run: Run) -> list[str]:
    c, model = run.config, run.config.model
    sizes = f"{compact(total_parameters(model))} parameters, {compact(active_parameters(model))} active per token"
    text = (
        f"{compact(len(run.loader.tokens))} tokens of {c.data.source}, {compact(len(run.validation.tokens))} held out"
    )
    met = f" over {dist.get_backend()}" if run.world.size > 1 else ""
    ranks = f"{run.world.size} {'rank' if run.world.size == 1 else 'ranks'}"
    where = f"{ranks} on {c.train.device} in {c.train.precision}{met}"
    return [f"{c.name}: {sizes} | {where} | {text}", f"writing to {run.out}"]


@dataclass(frozen=True)
class Begun:
    """A step that the device may still be at: what it gives, and whether any rank was asked to stop when it began."""

    report: StepReport
    wishes: Fetched


class Recorder:
    """Sends what is measured to the progress display and, on rank 0, to the files."""

    def __init__(self, run: Run, progress: Quiet, sinks: list[Sink], router_log: RouterLog | None):
        self.run, self.progress, self.sinks, self.router_log = run, progress, sinks, router_log
        self.dead_experts = DeadExperts()
        self.flops = train_flops_per_token(run.config.model, run.config.data.seq_len)

    def validation(self) -> dict[str, Any]:
        return {"val_loss": validation_loss(self.run)}

    def step(self, report: StepReport) -> dict[str, Any]:
        """What there is to write of a step, once it is done; refused if it is nonsense."""
        refuse_nonsense(self.run, report)
        speed = report.tokens / report.seconds
        loads = joined_loads(gather_objects(report.loads, self.run.world.axis("pp")))
        counts = RouterCounts(loads.layers, *(x.tolist() for x in loads[1:]))
        if self.router_log:
            self.router_log.write(report.number, counts)
        if warning := self.dead_experts.look(counts):
            self.progress.say(warning)
        return {
            "loss": report.loss,
            **({"mtp_loss": report.mtp_loss} if self.run.config.model.mtp else {}),
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "tokens_per_s": round(speed, 1),
            "tflops": round(speed * self.flops / 1e12, 6),
            **summarise(counts),
        }

    def hear(self, begun: Begun, validates: bool = False) -> bool:
        """Wait for a step and write down what it gave. Returns whether somebody asks to stop."""
        values = self.step(begun.report)
        if validates:
            values |= self.validation()
        self.write(begun.report.number, values)
        return begun.wishes.read().item() > 0

    def write(self, step: int, values: dict[str, Any]) -> None:
        record = {"step": step, **values}
        self.progress.show(record)
        for sink in self.sinks:
            sink.write(record)


@contextmanager
def recording(run: Run, continues: bool) -> Iterator[Recorder]:
    first = run.world.rank == 0
    progress = make_progress(first, run.step, run.config.train.steps, run.config.observe.log_every)
    sinks: list[Sink] = []
    router_log: RouterLog | None = None
    if first:
        kept = run.step if continues else -1
        sinks.append(JsonLines(run.out / "metrics.jsonl", kept))
        router_log = RouterLog(run.out / "router.jsonl", run.config.observe.router_every, kept)
        if run.config.observe.tensorboard:
            sinks.append(TensorBoard(run.out / "tensorboard", run.step))
    try:
        yield Recorder(run, progress, sinks, router_log)
    finally:
        progress.close()
        for sink in sinks:
            sink.close()
        if router_log:
            router_log.close()


def finish(run: Run, record: Recorder, requests: list[str], saver: Saver) -> None:
    """Steps until the last one, or until somebody asks to stop. What a step gave is read when the next is under way,
    or before anything that needs the step to be sound: validation, a checkpoint, the end."""
    c, before = run.config, None
    if run.step == 0:
        record.write(0, record.validation())
    with garbage_by_hand() as collect:
        while run.step < c.train.steps:
            wishes = requests[:1] or saver.failed()
            begun = Begun(one_step(run, record), anyone(wishes, run.world))
            stop = before is not None and record.hear(before)
            last = run.step == c.train.steps
            validates = last or run.step % c.train.validate_every == 0
            before = begun
            if validates or stop or run.step % c.checkpoint.every == 0:
                stop, before = record.hear(begun, validates) or stop, None
            collect()
            if run.step <= FIRST_STEPS:
                run.gradients.note_moved()
            if run.step == FIRST_STEPS:
                for line in never_moved(run):
                    record.progress.say(line)
            told = gather_objects(requests[:1] or saver.failed(), run.world.everyone) if stop else []
            asked = next(filter(None, told), None)
            if last or asked or run.step % c.checkpoint.every == 0:
                save_run(run, saver)
            if asked and not last:
                saver.wait()
                text = f"{asked[0]}: saved at step {run.step}; continue with --out {run.out} --resume auto"
                record.progress.say(text)
                return
    record.progress.close()
    if c.train.sample_tokens:
        record.progress.say(f"a sample:\n{sample(run, PROMPT)}")
    saver.wait()
    record.progress.say(f"done: {run.out} holds metrics.jsonl, router.jsonl, config.yaml and the checkpoints")


def one_step(run: Run, record: Recorder) -> StepReport:
    """Begin the next step; the one that is to be profiled is watched to its end."""
    take = lambda: train_step(run, run.loader.next())  # noqa: E731
    if not run.config.observe.profile or run.step + 1 != min(PROFILED, run.config.train.steps):
        return take()
    report, watched = watch_step(run, take)
    write_profile(run, watched)
    record.progress.say(profile_text(run, watched))
    return report

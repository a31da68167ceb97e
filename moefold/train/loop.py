"""A run from start to end: validate, step, record, save, and stop when asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moefold.anatomy.model_totals import active_parameters, total_parameters, train_flops_per_token
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.checkpoint.live.save import checkpoint_bytes, require_free_space, run_on_rank_zero
from moefold.comm.collectives import all_gather_objects
from moefold.comm.host_copies import ToHost
from moefold.config.errors import UserError
from moefold.config.read import config_as_yaml
from moefold.config.run import Config
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters
from moefold.model.moe.balance import join_pipeline_loads
from moefold.observe.metrics import JsonLines, MetricsSink, TensorBoard
from moefold.observe.progress import SilentProgress, compact_number, make_progress
from moefold.observe.router_stats import DeadExpertWatch, RouterCounts, RouterLog, balance_summary
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import sample_text, validation_loss
from moefold.train.from_hf import starting_weights
from moefold.train.host_duties import any_rank_asks, collect_garbage_manually, stop_requests
from moefold.train.resume import begin_checkpoint, checkpoint_folder, make_background_saver, resume_run
from moefold.train.step import StepReport, refuse_non_finite, train_step
from moefold.train.step_profile import profile_step, profile_text, write_profile_trace

SAMPLE_PROMPT = "def "
FIRST_STEPS = 3  # after which every parameter should have had a gradient
PROFILED_STEP = 10  # the step that is watched, or the last of a shorter run: by then everything is warm


def run_training(config: Config, world: World, out: Path, resume: str | None, from_hf: Path | None = None) -> None:
    """Train as configured, from random weights or those of a folder. Every rank calls this."""
    run_on_rank_zero(lambda: claim_run_folder(out, resume), world, out)
    speaker = rank_zero_printer(world)
    weights = starting_weights(from_hf, config, world, speaker) if from_hf else None
    run = assemble_run(config, world, out, weights=weights)
    needed = checkpoint_bytes(collect_tensors(run.model, run.optimizer, run.further_state), world)
    run_on_rank_zero(lambda: require_free_space(checkpoint_folder(run), needed), world, out)
    continues = resume is not None and resume_run(run, resume, speaker)
    run_on_rank_zero(lambda: (out / "config.yaml").write_text(config_as_yaml(run.config)), world, out)
    for line in introduction_lines(run):
        speaker(line)
    with (
        open_recorder(run, continues) as record,
        stop_requests() as requests,
        make_background_saver(run, record.progress.print_message) as saver,
    ):
        train_to_end(run, record, requests, saver) if run.step < run.config.train.steps else speaker(
            "nothing left to do"
        )


def no_gradient_warnings(run: Run) -> list[str]:
    """A warning for each parameter that has had no gradient so far: something is not connected."""
    moved = set().union(*all_gather_objects(run.gradients.moved, run.world.everyone))
    every = set().union(*all_gather_objects({p.name for p in declared_parameters(run.model)}, run.world.everyone))
    return [
        f"warning: {name} has had no gradient in {run.step} steps; is it connected?" for name in sorted(every - moved)
    ]


def rank_zero_printer(world: World):
    return print_line if world.rank == 0 else print_nothing


def print_line(text: str) -> None:
    print(text, flush=True)


def print_nothing(_: str) -> None: ...


def claim_run_folder(out: Path, resume: str | None) -> None:
    """Make the run's folder; one that already holds a run is only continued when asked."""
    out.mkdir(parents=True, exist_ok=True)
    if resume is None and (out / "metrics.jsonl").exists():
        raise UserError(f"{out} already holds a run; continue it with --resume auto, or choose another --out")


def introduction_lines(run: Run) -> list[str]:
    c, model = run.config, run.config.model
    sizes = f"{compact_number(total_parameters(model))} parameters, {compact_number(active_parameters(model))} active per token"
    text = f"{compact_number(len(run.loader.tokens))} tokens of {c.data.source}, {compact_number(len(run.validation.tokens))} held out"
    met = f" over {dist.get_backend()}" if run.world.size > 1 else ""
    ranks = f"{run.world.size} {'rank' if run.world.size == 1 else 'ranks'}"
    where = f"{ranks} on {c.train.device} in {c.train.precision}{met}"
    return [f"{c.name}: {sizes} | {where} | {text}", f"writing to {run.out}"]


@dataclass(frozen=True)
class StepInFlight:
    """A step that the device may still be at: what it gives, and whether any rank was asked to stop when it began."""

    report: StepReport
    stop_requested: ToHost


class RunRecorder:
    """Sends what is measured to the progress display and, on rank 0, to the files."""

    def __init__(self, run: Run, progress: SilentProgress, sinks: list[MetricsSink], router_log: RouterLog | None):
        self.run, self.progress, self.sinks, self.router_log = run, progress, sinks, router_log
        self.dead_experts = DeadExpertWatch()
        self.flops = train_flops_per_token(run.config.model, run.config.data.seq_len)

    def validation(self) -> dict[str, Any]:
        return {"val_loss": validation_loss(self.run)}

    def step(self, report: StepReport) -> dict[str, Any]:
        """What there is to write of a step, once it is done; refused if it is nonsense."""
        refuse_non_finite(self.run, report)
        speed = report.tokens / report.seconds
        loads = join_pipeline_loads(all_gather_objects(report.loads, self.run.world.axis("pp")))
        counts = RouterCounts(loads.layers, *(x.tolist() for x in loads[1:]))
        if self.router_log:
            self.router_log.write(report.number, counts)
        if warning := self.dead_experts.look(counts):
            self.progress.print_message(warning)
        return {
            "loss": report.loss,
            **({"mtp_loss": report.mtp_loss} if self.run.config.model.mtp else {}),
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "tokens_per_s": round(speed, 1),
            "tflops": round(speed * self.flops / 1e12, 6),
            **balance_summary(counts),
        }

    def finish_and_record(self, begun: StepInFlight, validates: bool = False) -> bool:
        """Wait for a step and write down what it gave. Returns whether somebody asks to stop."""
        values = self.step(begun.report)
        if validates:
            values |= self.validation()
        self.write(begun.report.number, values)
        return begun.stop_requested.read().item() > 0

    def write(self, step: int, values: dict[str, Any]) -> None:
        record = {"step": step, **values}
        self.progress.show_record(record)
        for sink in self.sinks:
            sink.write(record)


@contextmanager
def open_recorder(run: Run, continues: bool) -> Iterator[RunRecorder]:
    first = run.world.rank == 0
    progress = make_progress(first, run.step, run.config.train.steps, run.config.observe.log_every)
    sinks: list[MetricsSink] = []
    router_log: RouterLog | None = None
    if first:
        kept = run.step if continues else -1
        sinks.append(JsonLines(run.out / "metrics.jsonl", kept))
        router_log = RouterLog(run.out / "router.jsonl", run.config.observe.router_every, kept)
        if run.config.observe.tensorboard:
            sinks.append(TensorBoard(run.out / "tensorboard", run.step))
    try:
        yield RunRecorder(run, progress, sinks, router_log)
    finally:
        progress.close()
        for sink in sinks:
            sink.close()
        if router_log:
            router_log.close()


def train_to_end(run: Run, record: RunRecorder, requests: list[str], saver: BackgroundSaver) -> None:
    """Steps until the last one, or until somebody asks to stop. What a step gave is read when the next is under way,
    or before anything that needs the step to be sound: validation, a checkpoint, the end."""
    c, before = run.config, None
    if run.step == 0:
        record.write(0, record.validation())
    with collect_garbage_manually() as collect:
        while run.step < c.train.steps:
            wishes = requests[:1] or saver.save_failures()
            begun = StepInFlight(begin_next_step(run, record), any_rank_asks(wishes, run.world))
            stop = before is not None and record.finish_and_record(before)
            last = run.step == c.train.steps
            validates = last or run.step % c.train.validate_every == 0
            before = begun
            if validates or stop or run.step % c.checkpoint.every == 0:
                stop, before = record.finish_and_record(begun, validates) or stop, None
            collect()
            if run.step <= FIRST_STEPS:
                run.gradients.note_moved()
            if run.step == FIRST_STEPS:
                for line in no_gradient_warnings(run):
                    record.progress.print_message(line)
            told = all_gather_objects(requests[:1] or saver.save_failures(), run.world.everyone) if stop else []
            asked = next(filter(None, told), None)
            if last or asked or run.step % c.checkpoint.every == 0:
                begin_checkpoint(run, saver)
            if asked and not last:
                saver.wait()
                text = f"{asked[0]}: saved at step {run.step}; continue with --out {run.out} --resume auto"
                record.progress.print_message(text)
                return
    record.progress.close()
    if c.train.sample_tokens:
        record.progress.print_message(f"a sample:\n{sample_text(run, SAMPLE_PROMPT)}")
    saver.wait()
    record.progress.print_message(f"done: {run.out} holds metrics.jsonl, router.jsonl, config.yaml and the checkpoints")


def begin_next_step(run: Run, record: RunRecorder) -> StepReport:
    """Begin the next step; the one that is to be profiled is watched to its end."""
    take = lambda: train_step(run, run.loader.next())  # noqa: E731
    if not run.config.observe.profile or run.step + 1 != min(PROFILED_STEP, run.config.train.steps):
        return take()
    report, watched = profile_step(run, take)
    write_profile_trace(run, watched)
    record.progress.print_message(profile_text(run, watched))
    return report

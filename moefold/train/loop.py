"""The training loop: validate, step, record, save, and stop on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moefold.anatomy.adapters import adapter_parameters, run_flops_per_token
from moefold.anatomy.model_totals import active_parameters, total_parameters
from moefold.anatomy.tape_obstacles import tape_obstacles
from moefold.checkpoint.format.retention import checkpoints_at
from moefold.checkpoint.format.storage import StoragePath, checkpoint_folder, require_free_space
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.save import checkpoint_bytes, run_on_rank_zero
from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.comm.host_copies import ToHost
from moefold.comm.host_objects import first_object, gather_objects
from moefold.config.context_sending import keys_by_size
from moefold.config.errors import RunFailure, UserError
from moefold.config.keys import format_value
from moefold.config.read import config_as_yaml, read_yaml_mapping
from moefold.config.run import Config
from moefold.data.cut_samples import cut_text
from moefold.data.dynamic_context import context_shape
from moefold.data.run_corpus import cut_samples_of
from moefold.data.tokenizer import LARGEST_BYTE_VOCAB
from moefold.dispatch.price import clones_in_words
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters
from moefold.model.moe.balance import join_pipeline_loads
from moefold.observe.gpu_meter import GpuMeter
from moefold.observe.metrics import JsonLines, MetricsSink, TensorBoard
from moefold.observe.printer import Printer, print_line, print_nothing
from moefold.observe.process_memory import peak_memory_gib
from moefold.observe.progress import SilentProgress, compact_number, make_progress
from moefold.observe.router_stats import DeadExpertWatch, RouterCounts, RouterLog, balance_summary
from moefold.shard.gradients import FIRST_STEPS
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import bits_per_byte, bytes_per_label, sample_prompt, sample_text, validation_means
from moefold.train.fault_log import logged_faults
from moefold.train.folder_owner import FolderClaims, folder_claims
from moefold.train.from_hf import WeightFiller, starting_weights
from moefold.train.host_duties import any_rank_asks, collect_garbage_manually
from moefold.train.init_from import checkpoint_weights
from moefold.train.lora_from import starting_adapters
from moefold.train.memory_checkpoints import (
    MemoryCheckpoints,
    find_kept,
    forget_kept,
    open_kept_folder,
    require_keeper_room,
)
from moefold.train.non_finite import refuse_non_finite
from moefold.train.open_trackers import open_trackers, require_trackers
from moefold.train.operand_log import OperandRecorder, open_operand_recorder
from moefold.train.replica_check import compare_replicas
from moefold.train.resume import (
    begin_checkpoint,
    make_background_saver,
    resume_run,
    run_tensors,
    window_of_rank,
    with_common_window,
)
from moefold.train.routing_log import RoutingLog, open_routing_log
from moefold.train.routing_replay import check_replay
from moefold.train.run_vocabulary import keep_vocabulary
from moefold.train.spike_log import SpikeLog
from moefold.train.step import StepReport, sequences_of_step, take_next_step
from moefold.train.step_profile import profile_step, profile_text, write_profile_trace
from moefold.train.step_times import StepTimer, TimesRecorder, open_times_recorder, timed_steps
from moefold.watch.guard import RankGuard
from moefold.watch.position import enter_step, slow_phase, training_phase
from moefold.watch.stop_requests import StopRequest, StopRequests, signals_as_requests
from moefold.watch.surroundings import FolderCheck

MEASURED_SETTINGS: dict[str, Any] = {  # with what leaves them open
    "context": "auto",
    "dispatcher": "auto",
    "context_sending": (),
}
SHORTEST_WAIT = 1e-4  # seconds that are recorded
PROFILED_STEP = 10  # or the last step of a shorter run: by then kernels and caches are warm


@dataclass(frozen=True)
class RunStart:
    """Where a run starts: a checkpoint to resume (`auto` or a path), or weights alone: of a Hugging Face folder, or of
    a checkpoint; and adapters of a folder. All None: random weights."""

    resume: str | None = None
    from_hf: Path | None = None
    init_from: str | None = None
    lora_from: Path | None = None


def run_training(config: Config, world: World, out: Path, start: RunStart, guard: RankGuard) -> StopRequest | None:
    """Train as configured. Every rank calls this. Returns the request that ended the run before its last step."""
    require_trackers(config.observe)
    config = with_common_window(config, world)
    with folder_claims() as claims:
        own = checkpoint_folder(config, out)
        run_on_rank_zero(partial(claim_run_folder, claims, out, own, start.resume), world, out)
        return train_in_folder(config, world, out, start, guard)


def train_in_folder(config: Config, world: World, out: Path, start: RunStart, guard: RankGuard) -> StopRequest | None:
    if world.rank == 0:
        guard.checks.append(FolderCheck(out, saves=bool(config.checkpoint.path)))
    say = print_line if world.rank == 0 else print_nothing
    if start.resume is not None:
        config = keep_measured(config, world, out, say)
    kept = open_kept_folder(config.checkpoint, world, out, say)
    newest = find_kept(kept, checkpoint_folder(config, out), world, say) if start.resume else None
    # Build the run, and make sure that its checkpoints fit before any step is spent.
    weights = adapters = None
    is_own = newest is not None or resumes_own(start, config, world, out)
    if not is_own:
        weights = weights_of_start(start, config, world, out, say)
        adapters = start.lora_from and starting_adapters(start.lora_from, config, world, say)
    earlier = str(out) if newest else earlier_run(start, is_own, out)
    vocabulary = keep_vocabulary(config, world, out, earlier, say)
    run = assemble_run(config, world, out, weights=weights, adapters=adapters, vocabulary=vocabulary)
    require_space_for_checkpoint(run)
    require_keeper_room(run, kept)
    # Continue from a checkpoint, and write down the settings that are in effect.
    continues = start.resume is not None and resume_run(run, start.resume, say, newest)
    forget_kept(kept, run.step if continues else -1, world)
    check_replay(run.config, run.loader, world)
    settings = config_as_yaml(run.config)
    write_settings = partial((out / "config.yaml").write_text, settings)
    run_on_rank_zero(write_settings, world, out)
    run_on_rank_zero(partial(introduce_run, run, say), world, out)
    for line in save_lines(run):
        say(line)
    with (
        open_recorder(run, continues) as recorder,
        signals_as_requests(guard.requests) as requests,
        make_background_saver(run, recorder.progress.print_message) as saver,
        MemoryCheckpoints(run, kept, recorder.progress.print_message) as memory,
        training_phase(),
        logged_faults(out, world),
    ):
        if run.step < run.config.train.steps:
            loop = TrainingLoop(run, recorder, requests, saver, memory)
            return loop.run_to_end()
        say("nothing left to do")
    return None


def resumes_own(start: RunStart, config: Config, world: World, out: Path) -> bool:
    """Whether a checkpoint of the run is to be resumed, which would replace weights of a start."""
    own = checkpoint_folder(config, out)
    return bool(start.resume and run_on_rank_zero(partial(checkpoints_at, own), world, own))


def earlier_run(start: RunStart, is_own: bool, out: Path) -> str | None:
    """The run, or one of its checkpoints, whose weights and vocabulary are the start; None: there is none."""
    if start.resume not in (None, "auto"):
        return start.resume
    return str(out) if is_own else start.init_from


def weights_of_start(start: RunStart, config: Config, world: World, out: Path, say: Printer) -> WeightFiller | None:
    """A function that fills the model, if the run starts from weights."""
    if start.init_from:
        return checkpoint_weights(start.init_from, config, world, out, say)
    if start.from_hf:
        return starting_weights(start.from_hf, config, world, say)
    return None


def keep_measured(config: Config, world: World, out: Path, say: Printer) -> Config:
    """The configuration with what the run in this folder chose or measured on the same layout, where it is not set:
    another measurement could choose another mechanism, dispatcher or other groups, which add in another order. On
    other ranks, whose groups have other sizes, or by another mechanism what groups send is measured anew."""
    parallel = config.parallel
    saved = run_on_rank_zero(partial(saved_parallel_settings, out), world, out)
    has_other_context = parallel.context not in ("auto", saved.get("context"))
    kept: dict[str, Any] = {}
    for name, unset in MEASURED_SETTINGS.items():
        value = saved.pop(name, unset)
        if getattr(parallel, name) == unset and value != unset:
            kept[name] = value
    groups = context_shape(config, world.dp_cp.size).sizes[1:]
    has_other_groups = len(kept.get("context_sending", groups)) != len(groups)
    if has_other_groups or has_other_context:
        kept.pop("context_sending", None)
    layout = asdict(parallel)
    if any(layout.get(key) != value for key, value in saved.items()):
        return config
    for name, value in kept.items():
        say(f"{name} {format_value(value)}, as in {out / 'config.yaml'}")
    return replace(config, parallel=replace(parallel, **kept))


def saved_parallel_settings(out: Path) -> dict[str, Any]:
    """The section `parallel` of the run in this folder, with lists of texts as keys have them; empty where there is
    none to read, as in a new folder."""
    try:
        settings = read_yaml_mapping(out / "config.yaml")
    except UserError:
        return {}
    section: dict[str, Any] = settings.get("parallel") or {}
    return {name: tuple(map(str, value)) if isinstance(value, list) else value for name, value in section.items()}


def require_space_for_checkpoint(run: Run) -> None:
    if not run.config.checkpoint.every:
        return
    needed = checkpoint_bytes(run_tensors(run), run.world)
    check = partial(require_free_space, checkpoint_folder(run.config, run.out), needed)
    run_on_rank_zero(check, run.world, run.out)


def no_gradient_warnings(run: Run) -> list[str]:
    """A warning for each parameter that has had no gradient so far, on the first pipeline rank: the parameter is
    probably not connected."""
    world = run.world
    trained = [parameter for parameter in declared_parameters(run.model) if parameter.tensor.requires_grad]
    names = [parameter.name for parameter in trained]
    # Any rank of the stage may hold the share that has seen the gradient.
    moved = torch.tensor([name in run.gradients.moved for name in names], dtype=torch.int32)
    all_reduce_max_no_grad(moved, world.dp_cp_tp)
    still = {name for name, has_moved in zip(names, moved.tolist(), strict=True) if not has_moved}
    still_by_stage = gather_objects(still, world.pp) or [set()]
    named = sorted(set[str]().union(*still_by_stage))
    return [f"warning: {name} has had no gradient in {run.step} steps; is it connected?" for name in named]


def claim_run_folder(claims: FolderClaims, out: Path, checkpoints: StoragePath, resume: str | None) -> None:
    """Make the run's folder and own it, with the folder of checkpoints, which another run may name. A folder that
    already holds a run is used only to resume it."""
    out.mkdir(parents=True, exist_ok=True)
    claims.claim(out)
    if isinstance(checkpoints, Path):
        checkpoints.mkdir(parents=True, exist_ok=True)
        claims.claim(checkpoints)
    if resume is None and (out / "metrics.jsonl").exists():
        raise UserError(f"{out} already holds a run; continue it with --resume auto, or choose another --out")


def save_lines(run: Run) -> list[str]:
    """How checkpoints are written, where they pass through host memory in pieces. Every rank calls this."""
    window = window_of_rank(run)
    if not run.config.checkpoint.every or window is None:
        return []
    size = checkpoint_bytes(run_tensors(run), run.world)
    if window >= size / run.world.size:
        return []
    through = f"{run.config.checkpoint.host_gib:g} GiB of a node's host memory"
    return [f"checkpoints of {size / 1e9:.4g} GB are written in pieces, through {through}; updates wait for that"]


def introduce_run(run: Run, say: Printer) -> None:
    for line in introduction_lines(run):
        say(line)


def sending_in_words(config: Config, world: World) -> str:
    shape = context_shape(config, world.dp_cp.size)
    sent_keys = keys_by_size(config.parallel.context_sending, shape.sizes)
    by_size = ", ".join(f"{size}: {sent_keys[size]:g}" for size in shape.sizes[1:])
    return f"groups of dynamic context send what a token has in the time of attention to so many keys: {by_size}"


def introduction_lines(run: Run) -> list[str]:
    config = run.config
    world = run.world
    total = compact_number(total_parameters(config.model))
    active = compact_number(active_parameters(config.model))
    sizes = f"{total} parameters, {active} active per token"
    if config.lora.rank:
        sizes += f", {compact_number(adapter_parameters(config))} trained in adapters"
    if config.lora.base != "plain":
        sizes += f" beside a base in {config.lora.base}"
    tokens = compact_number(run.loader.sequences.tokens)
    held_out = compact_number(run.validation.sequences.tokens)
    text = f"{tokens} tokens of {config.data.source}, {held_out} held out"
    if config.data.tokenizer != "byte" and config.data.source != "zipf":
        text += f", documents end with {run.tokenizer.end}"
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    where = f"{ranks} on {config.train.device} in {config.train.precision}"
    if world.size > 1:
        where += f" over {dist.get_backend()}"
    lines = [f"{config.name}: {sizes} | {where} | {text}", f"writing to {run.out}"]
    lines += source_lines(run)
    if run.context_reason:
        lines.append(f"context: {config.parallel.context} ({run.context_reason})")
    if config.parallel.ep * config.parallel.etp > 1:
        lines.append(f"dispatcher: {config.parallel.dispatcher} ({run.dispatcher_reason})")
    if config.memory.tape:
        lines += [f"memory.tape: every step runs anew: {why}" for why in tape_obstacles(config, world.size)]
    if config.parallel.context_sending:
        lines.append(sending_in_words(config, world))
    clones = clones_in_words(config)
    if clones:
        lines.append(f"clones of hot experts: {clones}")
    if config.data.tokenizer == "byte" and config.data.source != "zipf" and config.model.vocab > LARGEST_BYTE_VOCAB:
        lines.append(
            f"warning: data.tokenizer = byte uses 256 of model.vocab = {config.model.vocab} tokens; set data.tokenizer "
            "to the model's tokenizer.json, or model.vocab to 256"
        )
    return lines


def source_lines(run: Run) -> list[str]:
    """What was left out of the text, and how often a run goes through each prepared source."""
    lines: list[str] = []
    skipped = run.skipped_text
    if skipped:
        lines.append(f"warning: data.skip_bad left out {len(skipped)} entries, the first: {skipped[0]}")
    lines += cut_lines(run)
    last = run.config.train.steps * run.config.train.global_batch
    for name, epochs in run.loader.sequences.epochs(last).items():
        lines.append(f"source {name}: {epochs:.2f} epochs by step {run.config.train.steps}")
    return lines


def cut_lines(run: Run) -> list[str]:
    """How many samples `data.seq_len` cuts, where packing leaves out their rest."""
    data = run.config.data
    cuts = cut_samples_of(run.loader.packed, data)
    return [f"warning: {cut_text(cuts, data.seq_len)}"] if cuts.cut else []


@dataclass(frozen=True)
class StepInFlight:
    """A step that the device may not have finished: its report, and what ranks have exchanged when it began: whether
    any has a stop request, and every few steps the times of all. `waited`: seconds, for a checkpoint in memory."""

    report: StepReport
    exchanged: ToHost
    waited: float = 0.0


class RunRecorder:
    """Sends the measurements of steps to the progress display and, on rank 0, to files."""

    def __init__(
        self,
        run: Run,
        progress: SilentProgress,
        sinks: list[MetricsSink],
        router_log: RouterLog | None,
        routing_log: RoutingLog | None,
        operands: OperandRecorder | None = None,
        spikes: SpikeLog | None = None,
        times: TimesRecorder | None = None,
        gpu_meter: GpuMeter | None = None,
    ):
        self.run = run
        self.progress = progress
        self.sinks = sinks
        self.router_log = router_log
        self.routing_log = routing_log
        self.operands = operands
        self.spikes = spikes
        self.times = times
        self.dead_experts = DeadExpertWatch()
        self.gpu_meter = gpu_meter
        config = run.config
        self.flops = run_flops_per_token(config)
        self.label_bytes = bytes_per_label(run) if run.world.rank == 0 else 0.0

    def validation_values(self) -> dict[str, Any]:
        with slow_phase("evaluation"):
            loss, *further = validation_means(self.run)
        values: dict[str, Any] = {"val_loss": loss}
        if self.label_bytes:
            values["val_bits_per_byte"] = round(bits_per_byte(loss, self.label_bytes), 6)
        figures = self.run.model.objective.figures(further)
        values |= {f"val_{name}": value for name, value in figures.items()}
        loader = self.run.loader
        for name, epochs in loader.sequences.epochs(loader.consumed).items():
            values[f"epochs/{name}"] = round(epochs, 4)
        return values

    def step_values(self, report: StepReport) -> dict[str, Any]:
        """The measurements of a finished step. A non-finite loss or gradient stops the run, or in fp16 has skipped the
        step."""
        try:
            report.ended.wait()
        finally:  # a lost rank is the cause of what its missing tokens lead to
            self.run.executor.require_peers()
        refuse_non_finite(self.run, report)
        balance = self.record_routing(report)
        self.record_operands(report)
        speed = report.tokens / report.seconds
        values: dict[str, Any] = {"loss": report.loss}
        values |= self.run.model.objective.figures(report.further_means)
        values["grad_norm"] = report.grad_norm
        if not report.is_finite:
            values = {"skipped": 1}
        if report.is_spike:
            values |= self.spike_values(report)
        if report.is_repeated:
            self.report_repeated(report)
            values["stash_repeated"] = 1
        if self.run.config.train.precision == "fp16":
            values["loss_scale"] = report.loss_scale
        values["lr"] = report.lr
        values["tokens_per_s"] = round(speed, 1)
        tflops = speed * self.flops / 1e12
        values["tflops"] = round(tflops, 6)
        values["seconds"] = round(report.seconds, 6)
        values["memory_gib"] = round(peak_memory_gib(self.run.world.device), 4)
        if self.gpu_meter:
            values |= self.gpu_meter.read()
        if report.waste is not None:
            values["waste"] = round(report.waste, 4)
        return values | balance

    def report_repeated(self, report: StepReport) -> None:
        config = self.run.config
        what = f"rows of experts found no room in the stash of {config.memory.stash_gib:g} GiB"
        fix = "a larger memory.stash_gib avoids it"
        if config.memory.stash == "none":
            what = f"rows of experts found no room on their rank (parallel.room = {config.parallel.room:g})"
            fix = "a larger parallel.room avoids it"
        elif config.parallel.room:
            what += f", or on their rank (parallel.room = {config.parallel.room:g})"
            fix = "a larger memory.stash_gib or parallel.room avoids it"
        self.progress.print_message(f"step {report.number}: {what}; the step was run again without it; {fix}")

    def spike_values(self, report: StepReport) -> dict[str, Any]:
        """Report a spike with the place of its batch."""
        sequences = sequences_of_step(self.run, report.number)
        what = f"loss {report.loss:.4g}, gradient norm {report.grad_norm:.4g}"
        where = f"sequences {sequences[0]} to {sequences[-1]} of the run's order"
        if self.spikes:
            where += f", {self.spikes.write(report)}"
        skipped = "; skipped" if report.is_skipped_spike else ""
        self.progress.print_message(f"step {report.number}: a spike: {what}; {where}{skipped}")
        values = {"spike": sequences[0]}
        return values | {"skipped_spike": 1} if report.is_skipped_spike else values

    def record_routing(self, report: StepReport) -> dict[str, Any]:
        """Log the expert load of all layers, and warn of dead experts. Returns the balance of all layers on the first
        pipeline rank, nothing on the others."""
        loads_by_stage = gather_objects(report.loads, self.run.world.pp)
        if loads_by_stage is None:
            return {}
        layers, *tensors = join_pipeline_loads(loads_by_stage)
        figures = [tensor.tolist() for tensor in tensors]
        counts = RouterCounts(layers, *figures)
        if self.router_log:
            self.router_log.write(report.number, counts)
        warning = self.dead_experts.look(counts)
        if warning:
            self.progress.print_message(warning)
        return balance_summary(counts)

    def record_operands(self, report: StepReport) -> None:
        """Log the figures of FP8 operands, and warn of layers whose error grows."""
        if self.operands:
            for warning in self.operands.record(report):
                self.progress.print_message(warning)

    def finish_and_record(self, begun: StepInFlight, validates: bool = False) -> bool:
        """Wait for a step and record it. Returns whether any rank has a stop request."""
        values = self.step_values(begun.report)
        requests, *times = begun.exchanged.read().tolist()
        if times and self.times:
            values |= self.times.record(begun.report.number, times)
        if begun.waited >= SHORTEST_WAIT:
            values["copy_wait_s"] = round(begun.waited, 4)
        if validates:
            values |= self.validation_values()
        self.write_record(begun.report.number, values)
        if self.routing_log:
            self.routing_log.write_through(begun.report.number)
        return requests > 0

    def write_record(self, step: int, values: dict[str, Any]) -> None:
        record = {"step": step, **values}
        self.progress.show_record(record)
        for sink in self.sinks:
            sink.write(record)


@contextmanager
def open_recorder(run: Run, continues: bool) -> Iterator[RunRecorder]:
    """The recorder of a run. Records of a resumed run are kept up to its step."""
    routing_log = open_routing_log(run)
    is_first = run.world.rank == 0
    observe = run.config.observe
    steps = run.config.train.steps
    progress = make_progress(is_first, run.step, steps, observe.log_every)
    sinks: list[MetricsSink] = []
    router_log: RouterLog | None = None
    tensorboard: TensorBoard | None = None
    spikes: SpikeLog | None = None
    gpu_meter: GpuMeter | None = None
    last_kept = run.step if continues else -1
    if is_first:
        metrics = JsonLines(run.out / "metrics.jsonl", last_kept)
        sinks.append(metrics)
        router_log = RouterLog(run.out / "router.jsonl", observe.router_every, last_kept)
        gpu_meter = GpuMeter(run.world.device)
        if run.spikes is not None:
            spikes = SpikeLog(run, last_kept)
        if observe.tensorboard:
            tensorboard = TensorBoard(run.out / "tensorboard", run.step)
            sinks.append(tensorboard)
        sinks += open_trackers(run.config, run.out, progress.print_message)
    operands = open_operand_recorder(run, last_kept, tensorboard)
    times = open_times_recorder(run, last_kept, progress.print_message)
    try:
        yield RunRecorder(run, progress, sinks, router_log, routing_log, operands, spikes, times, gpu_meter)
    finally:
        progress.close()
        if operands:
            operands.close()
        for sink in sinks:
            sink.close()
        if router_log:
            router_log.close()
        if spikes:
            spikes.close()
        if times:
            times.close()
        if routing_log:
            routing_log.close()


class TrainingLoop:
    """Steps until the last one, or until a stop request. The report of a step is read when the next one has begun, or
    before anything that needs a sound step: validation, a checkpoint, the end."""

    def __init__(
        self,
        run: Run,
        recorder: RunRecorder,
        requests: StopRequests,
        saver: BackgroundSaver,
        memory: MemoryCheckpoints,
    ):
        self.run = run
        self.recorder = recorder
        self.requests = requests
        self.saver = saver
        self.memory = memory
        self.in_flight: StepInFlight | None = None  # begun and not recorded yet
        self.timer = StepTimer(run.world, timed_steps(run.config))
        self.say: Printer = recorder.progress.print_message
        self.has_told_of_tape = False

    def run_to_end(self) -> StopRequest | None:
        """Steps until the last one. Returns the request upon which the run was stopped before."""
        run, recorder = self.run, self.recorder
        if run.step == 0:
            recorder.write_record(0, recorder.validation_values())
        with collect_garbage_manually() as collect_garbage:
            while not self.is_last_step():
                stop = self.step_and_record()
                if run.step % run.config.train.collect_every == 0:
                    collect_garbage()
                self.check_gradients()
                self.compare_if_due(stop)
                ended_by = self.save_if_due(stop)
                if ended_by is not None:
                    return ended_by
        recorder.progress.close()
        if run.config.train.sample_tokens:
            with slow_phase("sample"):
                prompt = sample_prompt(run.tokenizer)
                self.say(f"a sample:\n{sample_text(run, prompt)}")
        self.await_checkpoint()
        checkpoints = "and the checkpoints" if self.writes_checkpoints else "(no checkpoint: checkpoint.every = 0)"
        self.say(f"done: {run.out} holds metrics.jsonl, router.jsonl, config.yaml {checkpoints}")
        return None

    def is_last_step(self) -> bool:
        return self.run.step >= self.run.config.train.steps

    @property
    def writes_checkpoints(self) -> bool:
        return self.run.config.checkpoint.every > 0

    def is_checkpoint_due(self) -> bool:
        return self.writes_checkpoints and self.run.step % self.run.config.checkpoint.every == 0

    def local_requests(self) -> list[StopRequest]:
        """This rank's first reason to stop, if any: a signal, lost surroundings, or a failed save."""
        failures = [StopRequest(failure, exit_code=1) for failure in self.saver.save_failures()]
        return self.requests[:1] or failures

    def step_and_record(self) -> bool:
        """Begin a step, record the one before, and this one too where its result is needed. Returns whether any rank
        has a stop request."""
        run = self.run
        recorder = self.recorder
        enter_step(run.step + 1)
        requests = self.local_requests()
        with self.timer.timed():
            report = begin_next_step(run, recorder)
            times = self.timer.window_at(run.step)
            exchanged = any_rank_asks(requests, run.world, times)
        self.tell_of_tape()
        begun = StepInFlight(report, exchanged, self.memory.take_waited())
        # The device works on the step just begun; the one before is done, so reading it waits for nothing.
        stop = False
        if self.in_flight is not None:
            stop = recorder.finish_and_record(self.in_flight)
        validate_every = run.config.train.validate_every
        validates = self.is_last_step() or run.step % validate_every == 0
        if validates or stop or self.is_checkpoint_due() or self.memory.is_due(run.step):
            # These need a finished and finite step: wait for it.
            stop = recorder.finish_and_record(begun, validates) or stop
            self.in_flight = None
        else:
            self.in_flight = begun
        return stop

    def tell_of_tape(self) -> None:
        """Say once why steps are not replayed, if a run that asks for a tape has none, or why by one process alone."""
        graph = self.run.graph
        if graph is None or self.has_told_of_tape:
            return
        lines = [f"memory.tape: every step runs anew: {graph.obstacle}"] if graph.obstacle else []
        lines += [f"memory.tape_processes: one goes on alone: {remark}" for remark in graph.remarks]
        for line in lines:
            self.say(line)
        self.has_told_of_tape = bool(lines)

    def check_gradients(self) -> None:
        """In the first steps, warn of parameters without a gradient."""
        run = self.run
        if run.step <= FIRST_STEPS:
            run.updates.note_moved()
        if run.step == FIRST_STEPS:
            for line in no_gradient_warnings(run):
                self.say(line)

    def compare_if_due(self, stop: bool) -> None:
        """Compare replicas every few steps, and before a checkpoint, on the disk or in memory."""
        run = self.run
        every = run.config.observe.compare_every
        if not every:
            return
        saves = self.is_checkpoint_due() or self.memory.is_due(run.step)
        if stop or saves or self.is_last_step() or run.step % every == 0:
            compare_replicas(run)

    def save_if_due(self, stop: bool) -> StopRequest | None:
        """Begin a checkpoint if one is due. Returns the request upon which the loop ends before its last step."""
        run = self.run
        request = self.first_request() if stop else None
        if request is not None and not request.saves:
            raise RunFailure(f"{request.reason}: stopped at step {run.step}; nothing was saved; start the run again")
        is_wanted = self.is_last_step() or request or self.is_checkpoint_due()
        if is_wanted and self.writes_checkpoints:
            with slow_phase("checkpoint"):
                begin_checkpoint(run, self.saver)
        if request is None and self.memory.is_due(run.step) and not self.is_last_step():
            # The first save takes memory of the host, and may be slow; the others belong to their steps.
            with nullcontext() if self.memory.has_saved else slow_phase("checkpoint"):
                self.memory.begin(run)
        if request is None or self.is_last_step():
            return None
        if not self.writes_checkpoints:
            self.say(f"{request.reason}: stopped at step {run.step}; nothing was saved, since checkpoint.every = 0")
            return request
        self.await_checkpoint()
        self.say(f"{request.reason}: saved at step {run.step}; continue with --out {run.out} --resume auto")
        return request

    def await_checkpoint(self) -> None:
        with slow_phase("checkpoint"):
            self.saver.wait_until_written()

    def first_request(self) -> StopRequest | None:
        """The stop request of the first rank that has one; the same on all ranks."""
        requests = self.local_requests()
        own = requests[0] if requests else None
        return first_object(own, self.run.world.everyone)


def begin_next_step(run: Run, recorder: RunRecorder) -> StepReport:
    """Begin the next step. The profiled step is observed to its end."""
    config = run.config
    profiled = min(PROFILED_STEP, config.train.steps)
    if not config.observe.profile or run.step + 1 != profiled:
        return take_next_step(run)
    report, profile = profile_step(run, partial(take_next_step, run))
    write_profile_trace(run, profile)
    recorder.progress.print_message(profile_text(run, profile))
    return report

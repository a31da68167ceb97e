"""Options of `moefold bench`, one dataclass a subject.

Torch-free: help and refusals answer before the measuring code is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import tyro

from moefold.config.errors import UserError, one_of
from moefold.kernels.catalog import CATALOG
from moefold.presets.zoo import PRESETS

LEAST_GENERATED = 20  # tokens: the first ones are not timed
DeviceOption = Literal["auto", "cpu", "cuda"]
GraphKind = Literal["none", "whole"]


@dataclass(frozen=True)
class BenchOptions:
    """Options of every subject that prints a report."""

    json: bool = False
    """Print JSON instead of a table."""

    def check_values(self) -> None:
        """Refuse values that cannot be measured with."""


@dataclass(frozen=True)
class DeviceOptions(BenchOptions):
    device: DeviceOption = "auto"
    """Device to measure; auto: the GPU, or the CPU where torch sees no GPU."""


@dataclass(frozen=True)
class KernelsOptions(DeviceOptions):
    """Time every implementation of every operation against its reference, forward and backward."""

    op: str | None = None
    """Only this operation."""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Data type of the inputs; auto: bf16 on a GPU, fp32 on a CPU."""
    repeat: int = 20
    """Timed repetitions; the median is shown."""

    def check_values(self) -> None:
        require_positive("repeat", self.repeat)
        if self.op:
            one_of("operation", self.op, CATALOG)


@dataclass(frozen=True)
class TimedRecipeOptions(DeviceOptions):
    """Options of subjects that time number formats beside plain."""

    recipe: tuple[str, ...] = ()
    """Number formats of products, timed beside plain, such as fp8_block."""
    scaling: Literal["current", "delayed"] = "current"
    """Scales of fp8_tensor and fp8_row, as precision.scaling."""
    accumulate: Literal["promoted", "fast"] = "promoted"
    """Sums of fp8_tensor and fp8_row, as precision.accumulate."""

    def precision_keys(self) -> dict[str, str]:
        """Of the section `precision`, for every recipe."""
        return {"scaling": self.scaling, "accumulate": self.accumulate}

    def check_values(self) -> None:
        usual = type(self)().precision_keys()
        changed = [key for key, value in self.precision_keys().items() if value != usual[key]]
        if changed and not self.recipe:
            raise UserError(f"--{changed[0]} changes recipes, but there is none; add one, such as --recipe fp8_tensor")


@dataclass(frozen=True)
class LayerOptions(TimedRecipeOptions):
    """Time one MoE layer of known models, forward and backward, against transformers' where it is installed."""

    layer: tuple[str, ...] = ()
    """Only these layers."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of the layer; auto: bf16 on a GPU, fp32 on a CPU."""
    repeat: int = 20
    """Timed repetitions; the median is shown."""

    def check_values(self) -> None:
        super().check_values()
        require_positive("repeat", self.repeat)


@dataclass(frozen=True)
class StepOptions(TimedRecipeOptions):
    """Time whole training steps of known models, against transformers' where it is installed."""

    model: tuple[str, ...] = ()
    """Only these models."""
    steps: int = 10
    """Timed steps."""
    out: Path | None = None
    """Folder for the profile and trace of one step of each model, and for the figures measured so far."""
    storage: Literal["plain", "fp8"] = "plain"
    """Weights that products read in FP8, as precision.storage."""
    graphs: GraphKind = "none"
    """CUDA graphs of moefold's steps, as memory.graphs: then the host's launches bound none of them."""

    def precision_keys(self) -> dict[str, str]:
        keys = super().precision_keys()
        return {**keys, "storage": self.storage}

    def check_values(self) -> None:
        super().check_values()
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class PackingOptions(DeviceOptions):
    """Time whole training steps on packed documents, beside whole sequences and padded rows."""

    model: str = "olmoe-1b-7b"
    """A model of `moefold bench step`."""
    steps: int = 10
    """Timed steps."""

    def check_values(self) -> None:
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class ProjectionsOptions(TimedRecipeOptions):
    """Time dense products of quantised operands at sizes of attention and MLPs, beside the plain ones."""

    repeat: int = 20
    """Timed repetitions; the median is shown."""

    def check_values(self) -> None:
        super().check_values()
        require_positive("repeat", self.repeat)


@dataclass(frozen=True)
class LoraOptions(DeviceOptions):
    """Time training steps of adapters beside a frozen base, within a limit of device memory."""

    case: tuple[str, ...] = ()
    """Only these cases: bf16, microbatches, nf4, host."""
    steps: int = 10
    """Timed steps."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()  # the configuration keys of the command line

    def check_values(self) -> None:
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class TransformersOptions(DeviceOptions):
    """Time training steps of transformers' models with moefold inside, against transformers' own experts, in turns."""

    model: tuple[str, ...] = ()
    """Only these models."""
    turns: int = 5
    """Turns of each contender; the median is shown."""
    steps: int = 4
    """Timed steps of a turn."""

    def check_values(self) -> None:
        require_positive("turns", self.turns)
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class TurnsOptions(BenchOptions):
    """Time training steps of small models on a CPU, with and without a tape, and transformers', in turns."""

    model: tuple[str, ...] = ("tiny", "olmoe-1b-7b-tiny", "qwen3-30b-a3b-tiny", "mixtral-8x22b-tiny")
    """Presets."""
    threads: int = 0
    """Threads of torch; 0: as many as torch takes."""
    turns: int = 5
    """Turns of each contender; the median is shown."""
    steps: int = 4
    """Timed steps of a turn."""

    def check_values(self) -> None:
        for name in self.model:
            one_of("model", name, PRESETS)
        if self.threads < 0:
            raise UserError(f"--threads {self.threads} is not legal; expected 0 or more")
        require_positive("turns", self.turns)
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class GenerateBenchOptions(DeviceOptions):
    """Time steps of greedy generation with random weights, beside the bytes that a step must read and beside
    transformers' own generation."""

    model: tuple[str, ...] = ("olmoe-1b-7b",)
    """Presets."""
    batch: tuple[int, ...] = (1, 32)
    """Sequences that are continued together."""
    prompt: int = 512
    """Tokens before the first new one."""
    tokens: int = 130
    """New tokens of each sequence."""
    theirs: tuple[Literal["dynamic", "static"], ...] = ("dynamic", "static")
    """Caches of transformers' generation, timed beside; none where it is not installed."""

    def check_values(self) -> None:
        for sequences in self.batch:
            require_positive("batch", sequences)
        require_positive("prompt", self.prompt)
        if self.tokens < LEAST_GENERATED:
            raise UserError(f"--tokens {self.tokens} is not legal; expected at least {LEAST_GENERATED}")


@dataclass(frozen=True)
class OptimizerOptions(DeviceOptions):
    """Time Newton-Schulz beside grouped products, and updates of AdamW with 8-bit moments beside copies."""

    repeat: int = 10
    """Timed repetitions; the median is shown."""

    def check_values(self) -> None:
        require_positive("repeat", self.repeat)


@dataclass(frozen=True)
class GraphsOptions(BenchOptions):
    """Time training steps as one CUDA graph and with graphs of static steps, beside eager steps and the time in which
    the device is busy."""

    model: tuple[str, ...] = ()
    """Only these models."""
    graphs: tuple[str, ...] = ()
    """Only these graphs: whole, static."""
    tokens: tuple[int, ...] = ()
    """Only rows with microbatches of so many tokens: 512, 2048, 4096."""
    steps: int = 20
    """Timed steps."""

    def check_values(self) -> None:
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class SchedulesOptions(DeviceOptions):
    """Time steps of one model on one device under every kind of schedule: plain, deferred, zero bubble, paired."""

    model: str = "olmoe-1b-7b"
    """A model of `moefold bench step`."""
    steps: int = 6
    """Timed steps."""

    def check_values(self) -> None:
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class AttentionOptions(DeviceOptions):
    """Time every attention kernel at the shapes of known models, and check which repeat to the bit."""

    case: tuple[str, ...] = ()
    """Only these cases: models such as deepseek-v3, "qwen3-30b-a3b, 32768", ring_blocks, played_rings."""
    kernel: tuple[str, ...] = ()
    """Only these kernels of a model's shape."""


@dataclass(frozen=True)
class CurvesOptions(DeviceOptions):
    """Compare the loss curves of fast kernels and of references, or of optimizers, over the same steps."""

    of: Literal["kernels", "optimizers"] = "kernels"
    """What the compared runs differ in."""
    steps: int = 200
    """Compared steps."""
    out: Path | None = None
    """Folder for the plot, curves.svg."""

    def check_values(self) -> None:
        require_positive("steps", self.steps)


@dataclass(frozen=True)
class RecipesOptions(DeviceOptions):
    """Compare the held-out losses of precision recipes with those of bf16, with several seeds, over the same steps of
    real text."""

    variant: tuple[str, ...] = ()
    """Only these recipes, or variants of them such as "nvfp4, no Hadamard"; otherwise bf16 and every recipe."""
    steps: int = 600
    """Compared steps."""
    seed: tuple[int, ...] = (1, 2, 3)
    """Seeds of each variant: of initialisation and of the order of the text."""
    files: tuple[str, ...] = ()
    """Text to train on; otherwise Python's standard library."""
    out: Path | None = None
    """Folder for recipes.json, recipes.svg and a file for each run; runs that are there are not repeated."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()  # the configuration keys of the command line

    def check_values(self) -> None:
        require_positive("steps", self.steps)
        if not self.seed:
            raise UserError("--seed names no seed; expected some whole numbers, such as 1 2 3")


@dataclass(frozen=True)
class FormatsOptions(DeviceOptions):
    """Compare an MoE layer's output and gradients with fp64, for every precision recipe and for transformers' layer,
    with the bytes saved for backward and the time of each."""

    layer: tuple[str, ...] = ()
    """Only these layers, at real widths on a GPU and scaled down on a CPU."""

    repeat: int = 5
    """Timed repetitions."""


@dataclass(frozen=True)
class OverlapOptions(BenchOptions):
    """Measure how much of the experts' communication hides behind compute: all-to-alls of two CPU ranks with a slowed
    network, or on one GPU, which plays the ranks, tiles of products inside the exchanges of their rows."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cpu: two ranks with a slowed network; cuda: tiles on one GPU."""
    products: Literal["experts", "projections", "heads"] = "experts"
    """GPU: both products of experts; the projections before and behind attention of tensor-parallel ranks; those of
    ranks that swap positions for heads."""
    senders: tuple[int, ...] = (4, 8)
    """GPU: programs of a rank's kernel that send; the others of its share of processors multiply."""
    zipf: float = 0.0
    """GPU: exponent of Zipf's law, by which experts are liked."""
    repeat: int = 5
    """GPU: repetitions; the one of least time is shown."""
    delay_ms: float = 10.0
    """CPU: milliseconds of one all-to-all of all rows of a microbatch."""
    experts_ms: float = 0.0
    """CPU: least milliseconds of a layer's shared and routed experts together, in each pass of a microbatch."""
    microbatches: int = 16
    """CPU: microbatches of one step."""
    trace: Path | None = None
    """CPU: write a trace of both ranks, in the last variant, for Perfetto."""
    found: Path | None = None
    """Folder for the figures of each rank; set by the command for the ranks it starts."""

    def check_values(self) -> None:
        require_positive("repeat", self.repeat)
        for senders in self.senders:
            require_positive("senders", senders)
        if min(self.delay_ms, self.experts_ms) < 0 or self.microbatches < 2:
            raise UserError(
                "--delay-ms must be at least 0 and --microbatches at least 2, such as 10 and 16, and --experts-ms at "
                "least 0"
            )


@dataclass(frozen=True)
class EchoOptions(BenchOptions):
    """Draw skewed loads of experts and print how even ranks become where hot experts are cloned, by the plan alone."""

    ranks: tuple[int, ...] = (4, 8, 64)
    """Ranks that share the experts."""
    zipf: tuple[float, ...] = (1.0, 1.5)
    """Exponents of Zipf's law, by which experts are liked."""
    experts: int = 128
    """Experts of the layer."""
    slots: int = 2
    """Spare slots of a rank."""
    drift: float = 0.03
    """Change of an expert's liking from step to step: standard deviation of its logarithm."""
    steps: int = 20
    """Steps of each draw."""
    draws: int = 20
    """Orders of experts drawn."""
    tokens: int = 4096
    """Tokens of a rank."""
    top_k: int = 8
    """Choices of a token."""
    hidden: int = 2048
    """Width of the model, for bytes of clones."""
    ffn: int = 768
    """Inner width of an expert, for bytes of clones."""

    def check_values(self) -> None:
        sizes = ("experts", "slots", "steps", "draws", "tokens", "top_k", "hidden", "ffn")
        for name in sizes:
            require_positive(name, getattr(self, name))
        for ranks in self.ranks:
            require_positive("ranks", ranks)
            if self.experts % ranks:
                raise UserError(f"--experts {self.experts} is no multiple of --ranks {ranks}; such as 128 and 8")


@dataclass(frozen=True)
class DispatchOptions(DeviceOptions):
    """Time the symmetric dispatcher, all ranks played by one process with their memory side by side on one device."""

    ranks: tuple[int, ...] = (4,)
    """Ranks that share the experts."""
    hidden: tuple[int, ...] = (2048, 7168)
    """Widths of a token."""
    zipf: tuple[float, ...] = (0.0, 1.0)
    """Exponents of Zipf's law, by which experts are liked."""
    tokens: int = 4096
    """Tokens of a rank."""
    experts: int = 128
    """Experts of the layer."""
    top_k: int = 8
    """Choices of a token."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of tokens; auto: bf16 on a GPU, fp32 on a CPU."""
    repeat: int = 10
    """Repetitions; the least device time and the median host time are shown."""

    def check_values(self) -> None:
        for name in ("tokens", "experts", "top_k", "repeat"):
            require_positive(name, getattr(self, name))
        if self.top_k > self.experts:
            raise UserError(f"--top-k {self.top_k} is above --experts {self.experts}; such as 8 and 128")
        for ranks in self.ranks:
            require_positive("ranks", ranks)
            if self.experts % ranks:
                raise UserError(f"--experts {self.experts} is no multiple of --ranks {ranks}; such as 128 and 4")
            held = self.experts // ranks
            if self.top_k > held:
                raise UserError(
                    f"--top-k {self.top_k} is above the {held} experts of each of {ranks} ranks, with which one rank "
                    "of as many rows is compared; such as 8 and 32"
                )
        for hidden in self.hidden:
            require_positive("hidden", hidden)


@dataclass(frozen=True)
class ContextOptions(BenchOptions):
    """Predict a step on samples of many lengths with static and with dynamic context parallelism."""

    model: tyro.conf.Positional[str] = "qwen3-30b-a3b"
    """A preset, or a YAML file of configuration keys."""
    gpus: int = 64
    """Number of GPUs."""
    gpu: str = "h100"
    """GPU model, as `moefold plan --gpu` takes it."""
    pp: int = 1
    """Pipeline stages; the other GPUs are dp x cp."""
    ep: int = 8
    """Ranks that share the experts."""
    context: str = "ring"
    """Mechanism of context parallelism (parallel.context)."""
    limit: int = 8192
    """Tokens of a rank in a microbatch."""
    tokens: int = 4_194_304
    """Tokens of a step."""
    median: float = 2000
    """Median length of samples, which are log-normal."""
    sigma: float = 1.4
    """Standard deviation of the logarithm of a length."""
    longest: int = 131_072
    """Length that longer samples are cut to."""
    batches: int = 3
    """Batches that are drawn; means are shown."""

    def check_values(self) -> None:
        for name in ("gpus", "pp", "ep", "limit", "tokens", "longest", "batches"):
            require_positive(name, getattr(self, name))
        if self.limit < 2 or self.median <= 0 or self.sigma < 0:
            raise UserError("--limit must be at least 2, --median above 0, --sigma at least 0; such as 8192, 2000, 1.4")
        if self.gpus % self.pp:
            raise UserError(f"--pp {self.pp} does not divide --gpus {self.gpus}; such as 4 and 64")


MemoryPart = Literal["recompute", "offload", "longest"]
MEMORY_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)


@dataclass(frozen=True)
class MemoryOptions(DeviceOptions):
    """Measure what recompute and offload cost and save, and the longest sequence of one step."""

    part: tuple[MemoryPart, ...] = ()
    """Only these parts."""
    model: tuple[str, ...] = ()
    """Only these models of the parts recompute and offload."""
    steps: int = 3
    """Timed steps of each case."""
    length: tuple[int, ...] = ()
    """Lengths that the part longest tries, in tokens; by default 280,000 on a GPU."""
    out: Path | None = None
    """File for the figures measured so far, as JSON."""

    def check_values(self) -> None:
        require_positive("steps", self.steps)
        for length in self.length:
            require_positive("length", length)


@dataclass(frozen=True)
class SaveOptions(BenchOptions):
    """Time checkpoints: bytes a second against plain writing, and the delay of a step by a save in progress."""

    recipe: tyro.conf.Positional[str] = "tiny"
    """The model whose steps are timed: a preset, or a YAML file; --section.key VALUE changes it."""
    out: Path | None = None
    """A folder on the disk to measure; by default that of temporary files."""
    mib: int = 1024
    """Size of the checkpoint whose writing is timed."""
    repeat: int = 5
    """Timed repetitions; medians are shown."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()  # the configuration keys of the command line

    def check_values(self) -> None:
        if self.mib < 1 or self.repeat < 1:
            raise UserError("--mib and --repeat must be at least 1; such as 1024 and 5")


@dataclass(frozen=True)
class CalibrateOptions:
    """Measure this machine for the planner and write a file for `moefold plan --gpu FILE`."""

    out: Path = Path("machine.yaml")
    """The file to write."""
    device: DeviceOption = "auto"
    """Device to measure; auto: the GPU, or the CPU where torch sees no GPU."""
    like: str | None = None
    """The GPU whose peaks and links to copy; by default the one of this name, or h100."""
    scale: int = 1
    """Divide all sizes by this number, for a quick estimate."""
    repeat: int = 7
    """Timed repetitions; the median counts."""

    def check_values(self) -> None:
        if self.repeat < 1 or self.scale < 1:
            raise UserError("--repeat and --scale must be at least 1; such as 7 and 1")
        folder = self.out.parent
        if not folder.is_dir():
            raise UserError(f"no folder {folder} to write {self.out.name} into; make it, or choose another")


@dataclass(frozen=True)
class PlanBenchOptions(DeviceOptions):
    """Compare the planner's memory and step time with measured steps on this GPU."""

    gpu: str = "h200"
    """This GPU's name, as `moefold plan --gpu` takes it."""
    steps: int = 5
    """Timed steps of each case."""

    def check_values(self) -> None:
        require_positive("steps", self.steps)


def require_positive(name: str, number: int) -> None:
    if number < 1:
        raise UserError(f"--{name} {number} is not legal; expected a whole number at least 1, such as 20")

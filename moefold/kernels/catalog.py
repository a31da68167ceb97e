"""Which implementations an operation has, when each may run and why one would want it. Torch-free.

`explain` reads it in milliseconds, without torch; the op's own file holds the code. The first choice whose condition
holds is taken; the reference stands behind all of them and needs no line here. A name in one place and not in the
other is an error at import.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

from moefold.anatomy.step_specs import dispatched_width, fits_fused_expert_mlp
from moefold.config.errors import UserError, one_of
from moefold.config.run import Config
from moefold.kernels.attention.timings import TIMED_TOKENS, AttentionShape, known_times

BYTES_PER_ELEMENT = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Facts:
    """What is known before a run starts and does not change during it. `triton`: whether it is installed there."""

    device: str
    dtype: str
    capability: tuple[int, int] = (0, 0)
    hidden: int = 0
    ffn: int = 0
    moments: str = "fp32"
    main: str = "fp32"
    attention: AttentionShape | None = None
    sees_all: bool = True  # every query sees all positions up to its own and no sink
    repeatable: bool = True
    recipe: str = "plain"
    swiglu_experts: bool = True  # SwiGLU with the router's weight inside and without biases
    triton: bool = field(default_factory=has_triton)

    def rows_aligned_to(self, to: int) -> bool:
        """Rows of `hidden` and of `ffn` elements begin at multiples of so many bytes."""
        return all(size * BYTES_PER_ELEMENT[self.dtype] % to == 0 for size in (self.hidden, self.ffn))


@dataclass(frozen=True)
class Choice:
    """Of those that may run, the one with the lowest `cost` is taken, of equals the first."""

    name: str
    when: Callable[[Facts], bool]
    needs: str
    why: str
    cost: Callable[[Facts], float] = lambda _: 0.0
    note: Callable[[Facts], str] = lambda _: ""  # what there is to add for these very facts


def always_runs(_: Facts) -> bool:
    return True


def grouped_mm_runs(f: Facts) -> bool:
    dtypes = ("bf16",) if f.device == "cuda" else ("fp32", "bf16", "fp16")
    return f.dtype in dtypes and f.rows_aligned_to(16) and (f.device == "cpu" or f.capability >= (8, 0))


def triton_runs(f: Facts) -> bool:
    return f.device == "cuda" and f.capability >= (8, 0) and f.triton


def triton_computes(f: Facts) -> bool:
    """Kernels that compute do so in fp32; those that only move rows take any type."""
    return triton_runs(f) and f.dtype != "fp64"


def expert_gemm_runs(f: Facts) -> bool:
    """Made for Hopper's instructions. Of a tile partly beyond a width only the rest is written; the copy engine
    wants rows that begin at multiples of 16 bytes."""
    return (
        f.dtype == "bf16"
        and f.recipe == "plain"
        and f.swiglu_experts
        and f.capability[0] == 9
        and f.hidden > 0
        and f.ffn > 0
        and f.rows_aligned_to(16)
        and triton_runs(f)
    )


def fused_attention_runs(f: Facts) -> bool:
    return f.device == "cuda" and f.dtype in ("bf16", "fp16") and f.capability >= (8, 0) and f.attention is not None


def causal_attention_runs(f: Facts) -> bool:
    return fused_attention_runs(f) and f.sees_all


LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))  # cards whose blocks may have 160 KiB of shared memory


def masked_attention_runs(f: Facts) -> bool:
    shape = f.attention
    if f.sees_all or shape is None or not offsets_fit_32_bits(shape):
        return False
    return (
        fused_attention_runs(f)
        and f.triton
        and f.capability in LARGE_SHARED_MEMORY
        and max(shape.head_dim, shape.value_dim) <= 256
    )


def offsets_fit_32_bits(shape: AttentionShape) -> bool:
    """Within a sequence, of 32 bits."""
    return shape.length * shape.heads * shape.head_dim < 1 << 31


def cudnn_attention_runs(f: Facts) -> bool:
    """Its kernels for Hopper: elsewhere flash is as quick."""
    shape = f.attention
    return causal_attention_runs(f) and f.capability[0] == 9 and shape is not None and shape.head_dim % 8 == 0


def flash_attention_runs(f: Facts) -> bool:
    shape = f.attention
    return causal_attention_runs(f) and shape is not None and shape.head_dim == shape.value_dim <= 256


def deterministic_attention_runs(f: Facts) -> bool:
    shape = f.attention
    if shape is None or not offsets_fit_32_bits(shape):
        return False
    return flash_attention_runs(f) and f.triton and shape.head_dim in (16, 32, 64, 128)


def attention_cost(name: str) -> Callable[[Facts], float]:
    """Milliseconds, as measured. Those that add up in an order of their own come last in runs that shall repeat."""

    def measured_cost(f: Facts) -> float:
        times = known_times(f.capability, f.attention) if f.attention else {}
        return times.get(name, 0.0) + (1e6 if f.repeatable and name not in ("ordered", "sdpa") else 0.0)

    return measured_cost


def attention_timing_note(f: Facts) -> str:
    times = known_times(f.capability, f.attention) if f.attention else {}
    said = ", ".join(f"{name} {time:.2f}" for name, time in sorted(times.items(), key=lambda item: item[1]))
    return f"{f.attention}, ms for {TIMED_TOKENS} tokens there and back: {said}" if said else ""


ATTENTION_CHOICES = (
    Choice(
        "ordered",
        deterministic_attention_runs,
        "bf16 on cuda with Triton, heads of 16, 32, 64 or 128",
        "sums in a fixed order, so that runs repeat to the bit (kernels.repeatable)",
        attention_cost("ordered"),
        attention_timing_note,
    ),
    Choice(
        "cudnn",
        cudnn_attention_runs,
        "bf16 on Hopper",
        "never stores the scores; its backward adds up in another order each time",
        attention_cost("cudnn"),
        attention_timing_note,
    ),
    Choice(
        "flash",
        flash_attention_runs,
        "bf16 on cuda, values as wide as keys",
        "never stores the scores; its backward adds up in another order each time",
        attention_cost("flash"),
        attention_timing_note,
    ),
    Choice(
        "spans",
        masked_attention_runs,
        "bf16 on an A100, H100, B200 or their like with Triton, heads of at most 256; documents, a window or sinks",
        "reads only the keys that are seen, keeps no mask; sums in a fixed order, so that runs repeat to the bit",
    ),
    Choice(
        "sdpa", always_runs, "nothing", "never stores the scores", lambda f: 1e7 if fused_attention_runs(f) else 0.0
    ),
)

ROWS_IN_ONE_PASS = Choice(
    "triton", triton_runs, "cuda with Triton", "reads and writes each row once; its backward is the other's forward"
)


NORM_IN_ONE_PASS = Choice(
    "triton",
    triton_computes,
    "cuda with Triton, fp32 or bf16",
    "one pass each way; the weight's gradient without atomics",
)
ROPE_IN_ONE_PASS = Choice(
    "triton",
    triton_computes,
    "cuda with Triton, fp32 or bf16",
    "one pass each way, angles read once for all heads of a token",
)


CATALOG: dict[str, tuple[Choice, ...]] = {
    "embedding": (
        Choice(
            "triton", triton_runs, "cuda with Triton", "the gradient in one pass over words, in its place, no atomics"
        ),
    ),
    "rmsnorm": (
        NORM_IN_ONE_PASS,
        Choice("torch", always_runs, "nothing", "one fused pass where torch has one"),
    ),
    "add_rmsnorm": (
        NORM_IN_ONE_PASS,
        Choice("torch", always_runs, "nothing", "one fused pass for the norm where torch has one"),
    ),
    "linear": (
        Choice(
            "adding",
            lambda f: f.device == "cuda",
            "cuda",
            "products add up the gradients of one input and write those of weights in their places",
        ),
    ),
    "grouped_linear": (),
    "rope": (ROPE_IN_ONE_PASS,),
    "norm_rope": (ROPE_IN_ONE_PASS,),
    "attention": ATTENTION_CHOICES,
    "attention_block": (),
    "attention_block_backward": (),
    "swiglu": (
        Choice(
            "triton",
            triton_computes,
            "cuda with Triton, fp32 or bf16",
            "one pass each way; saves the pre-activation only",
        ),
        Choice("by_hand", always_runs, "nothing", "saves the pre-activation only, not what lies between"),
    ),
    "clamped_swiglu": (
        Choice("by_hand", always_runs, "nothing", "saves the pre-activation only, not what lies between"),
    ),
    "expert_bias": (),
    "router_logits": (
        Choice(
            "bf16_exact",
            lambda f: f.device == "cuda" and f.dtype == "bf16" and f.capability >= (8, 0),
            "bf16 on cuda",
            "fp32 sums of exact products on the tensor cores, no fp32 copies of tokens and weights",
        ),
    ),
    "router_topk": (
        Choice(
            "triton",
            triton_computes,
            "cuda with Triton, fp32 scores",
            "softmax, choice, weights and sums for balance in one pass, no sort",
        ),
    ),
    "arrange_rows": (
        Choice("triton", triton_runs, "cuda with Triton", "counts and places instead of sorting; no atomics"),
    ),
    "gather_rows": (
        ROWS_IN_ONE_PASS,
        Choice("adjoint", always_runs, "nothing", "its backward is a gather: no atomics, the same every run"),
    ),
    "sum_rows": (
        ROWS_IN_ONE_PASS,
        Choice("adjoint", always_runs, "nothing", "its backward is a gather of the tokens' gradients"),
    ),
    "expert_mlp": (
        Choice(
            "gluon",
            expert_gemm_runs,
            "bf16 on Hopper with Triton, SwiGLU experts without biases, a hidden size and an expert's that are multiples of 8",
            "activation and its gradient inside the GEMMs; keeps the tokens and the pre-activation, nothing else",
        ),
    ),
    "grouped_gemm": (
        Choice(
            "torch_grouped_mm",
            grouped_mm_runs,
            "bf16 on cuda (fp32, bf16 or fp16 on cpu) and rows that are multiples of 16 bytes",
            "one call for all experts, offsets stay on the device",
        ),
    ),
    "grouped_gemm_weight": (
        Choice(
            "torch_grouped_mm",
            grouped_mm_runs,
            "bf16 on cuda (fp32, bf16 or fp16 on cpu) and rows that are multiples of 16 bytes",
            "one call for all experts, offsets stay on the device",
        ),
    ),
    "cross_entropy": (
        Choice(
            "triton",
            lambda f: triton_runs(f) and f.dtype == "bf16",
            "bf16 on cuda with Triton",
            "logits of a chunk are read twice and written once; the head's gradient adds up in fp32",
        ),
        Choice("chunked", always_runs, "nothing", "holds the logits of one chunk of tokens at a time"),
    ),
    "adamw": (
        Choice(
            "triton",
            triton_computes,
            "cuda with Triton, fp32 or bf16",
            "one pass over gradients, moments, main weights and the model's, clipping included",
        ),
        Choice(
            "fused",
            lambda f: f.dtype != "fp64" and f.moments != "bf16" and f.main == "fp32",
            "fp32 state",
            "one pass over weights, gradients and moments",
        ),
    ),
    "add_squares": (
        Choice(
            "triton",
            triton_computes,
            "cuda with Triton, fp32 or bf16",
            "one pass, fp32 sums of a few thousand squares, those in fp64",
        ),
    ),
}


def pick_implementation(op: str, facts: Facts, forced: str | None = None) -> tuple[str, str]:
    """The implementation to use and the reason, in words."""
    wanted = [each for each in CATALOG[op] if forced in (None, each.name)]
    able = [each for each in wanted if each.when(facts)]
    if able:
        best = min(able, key=lambda each: each.cost(facts))
        note = best.note(facts)
        return best.name, "asked for" if forced else f"{best.why} ({note})" if note else best.why
    passed_over = [f"{each.name} needs {each.needs}" for each in wanted]
    if forced not in (None, "reference"):
        raise UserError(f"kernels.force: {op}={forced} cannot run here: {'; '.join(passed_over)}; leave it out")
    return "reference", "asked for" if forced else "; ".join(passed_over) or "plain torch is the only one yet"


def forced_implementations(force: Iterable[str]) -> dict[str, str]:
    """("attention=reference",) -> {"attention": "reference"}; unknown names are refused with the nearest."""
    wanted: dict[str, str] = {}
    for text in force:
        op, _, name = text.partition("=")
        one_of("kernel operation (kernels.force, as op=name)", op, CATALOG)
        wanted[op] = one_of(f"implementation of {op}", name, ["reference", *(c.name for c in CATALOG[op])])
    return wanted


def facts_from_config(config: Config, device: str, dtype: str, capability: tuple[int, int] = (0, 0)) -> Facts:
    return Facts(
        device,
        dtype,
        capability,
        dispatched_width(config.model),
        config.model.moe.ffn // config.parallel.etp,
        config.optim.moments,
        config.optim.main,
        attention_shape(config),
        attention_sees_all(config),
        config.kernels.repeatable,
        swiglu_experts=fits_fused_expert_mlp(config.model),
    )


def attention_sees_all(config: Config) -> bool:
    """Whether every query sees all positions up to its own and no sink, in every layer."""
    a = config.model.attention
    return not a.window and not a.sinks and config.data.attend == "sequence"


def attention_shape(config: Config) -> AttentionShape:
    """What a rank's attention works on."""
    a, tp = config.model.attention, config.parallel.tp
    latent = a.kind == "mla"
    heads, kv_heads = a.heads // tp, (a.heads if latent else a.kv_heads) // tp
    return AttentionShape(config.data.seq_len, heads, kv_heads, a.head_dim, (latent and a.value_dim) or a.head_dim)


def expected_facts(config: Config) -> Facts:
    """The facts a run would have on this machine, found without torch."""
    gpu = gpu_capability()
    device = config.train.device if config.train.device != "auto" else "cuda" if gpu else "cpu"
    return facts_from_config(config, device, training_precision(device, config), gpu or (0, 0))


def training_precision(device: str, config: Config) -> str:
    """The precision a run trains in: what was asked for, or bf16 on cuda and fp32 on cpu."""
    wanted = config.train.precision
    return wanted if wanted != "auto" else "bf16" if device == "cuda" else "fp32"


@cache
def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first NVIDIA GPU, asked of the driver itself; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return None
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return major.value, minor.value

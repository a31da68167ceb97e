"""Facts of a run that decide which implementation of an op may run: device, dtype, sizes, number format. Torch-free."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import NamedTuple

from moefold.anatomy.adapters import adapted_experts, unfused_adapters
from moefold.anatomy.step_specs import dispatched_width, unfused_experts_reason
from moefold.config.open_names import ROUTER_SCORE_NAMES
from moefold.config.run import Config, OptimConfig

BYTES_PER_ELEMENT = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
CAPABILITY_MAJOR = 75  # the driver's number of CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
CAPABILITY_MINOR = 76

Capability = tuple[int, int]  # compute capability of a GPU, such as (9, 0); (0, 0) on a CPU
NO_GPU: Capability = (0, 0)


class AttentionShape(NamedTuple):
    """The sizes of one attention call: positions of a sequence, query heads, key/value heads, widths of both."""

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        widths = str(self.head_dim)
        if self.value_dim != self.head_dim:
            widths += f", values of {self.value_dim}"
        return f"{self.length} positions, {self.heads}/{self.kv_heads} heads of {widths}"


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Facts:
    """Facts that are known before a run starts and do not change while it runs."""

    device: str
    dtype: str
    capability: Capability = NO_GPU
    _: KW_ONLY
    hidden: int = 0  # width of a dispatched row
    ffn: int = 0  # inner width of an expert on one rank
    moments: str = "fp32"
    main: str = "fp32"
    gradients: str = "fp32"  # type of gradients between microbatches
    recipe: str = "plain"  # number format of linear products; plain: the dtype itself
    unfused_experts: str = ""  # keys that keep the experts off the fused kernel; empty: none
    adapted_experts: str = ""  # the key that gives experts adapters, which some fused kernels take; empty: none has
    attention: AttentionShape | None = None
    sees_all: bool = True  # plain causal attention: no window, no documents, no sinks
    square: bool = True  # attention has as many queries as keys; with context parallelism by all_gather it has fewer
    repeatable: bool = True
    invariant: bool = False  # a token's bits may not depend on the rest of its batch
    built_in_score: bool = True  # the router's score is one that its kernels know
    triton: bool = field(default_factory=has_triton)  # whether Triton is installed there

    @property
    def multiplies_micro_formats(self) -> bool:
        """Whether tensor cores multiply MXFP8 and NVFP4: those of Blackwell's data centre cards."""
        return self.device == "cuda" and self.capability[0] == 10

    def rows_aligned_to(self, alignment: int) -> bool:
        """Whether rows of `hidden` and rows of `ffn` elements begin at multiples of so many bytes."""
        element = BYTES_PER_ELEMENT[self.dtype]
        return self.hidden * element % alignment == 0 and self.ffn * element % alignment == 0


def facts_from_config(config: Config, device: str, dtype: str, capability: Capability = NO_GPU) -> Facts:
    return Facts(
        device,
        dtype,
        capability,
        hidden=dispatched_width(config.model),
        ffn=config.model.moe.ffn // config.parallel.etp,
        moments=moments_in_words(config.optim),
        main=config.optim.main,
        gradients=config.optim.gradients,
        attention=attention_shape(config),
        sees_all=attention_sees_all(config),
        square=not gathers_all_keys(config),
        repeatable=config.kernels.repeatable,
        invariant=config.kernels.invariant,
        unfused_experts=unfused_adapters(config) or unfused_experts_reason(config.model),
        adapted_experts=adapted_experts(config),
        built_in_score=config.model.moe.router.score in ROUTER_SCORE_NAMES.builtin,
    )


def moments_in_words(optim: OptimConfig) -> str:
    """The type of both moments, or both types."""
    if optim.second_moment in ("as_first", optim.moments):
        return optim.moments
    return f"{optim.moments} and {optim.second_moment}"


def attention_sees_all(config: Config) -> bool:
    """Whether attention is plain causal in every layer: no window, no documents, no sinks."""
    attention = config.model.attention
    if attention.window or attention.sinks:
        return False
    return config.data.attend == "sequence"


def gathers_all_keys(config: Config) -> bool:
    """Whether a rank's queries, a part of the sequence, meet all keys before them in one call."""
    return shares_sequences(config) and config.parallel.context == "all_gather"


def shares_sequences(config: Config) -> bool:
    """Whether several cp ranks hold parts of a sequence, or may in some microbatch."""
    return config.parallel.cp > 1 or config.parallel.context_sizes == "dynamic"


def attention_shape(config: Config) -> AttentionShape:
    """The sizes of one rank's attention call. MLA has as many key/value heads as query heads."""
    attention = config.model.attention
    tp = config.parallel.tp
    kv_heads = attention.kv_heads
    value_dim = attention.head_dim
    if attention.kind == "mla":
        kv_heads = attention.heads
        value_dim = attention.value_dim or value_dim
    return AttentionShape(
        length=config.data.seq_len,
        heads=attention.heads // tp,
        kv_heads=max(1, kv_heads // tp),
        head_dim=attention.head_dim,
        value_dim=value_dim,
    )


def expected_facts(config: Config) -> Facts:
    """The facts that a run would have on this machine, read without torch."""
    gpu = gpu_capability()
    device = config.train.device
    if device == "auto":
        device = "cuda" if gpu else "cpu"
    precision = training_precision(device, config)
    return facts_from_config(config, device, precision, gpu or NO_GPU)


def training_precision(device: str, config: Config) -> str:
    """`train.precision`; "auto" means bf16 on cuda and fp32 on cpu."""
    if config.train.precision != "auto":
        return config.train.precision
    return "bf16" if device == "cuda" else "fp32"


@cache
def cuda_driver() -> tuple[ctypes.CDLL, int] | None:
    """The driver of NVIDIA GPUs and the number of GPUs that this process may use; None where there is no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed or count.value == 0:
        return None
    return driver, count.value


@cache
def gpu_capability() -> Capability | None:
    """Compute capability of the first NVIDIA GPU, read from the driver; None where there is no GPU."""
    found = cuda_driver()
    if found is None:
        return None
    driver, _ = found
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    major = ctypes.c_int()
    minor = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device)
    return major.value, minor.value

"""Implementations of attention: conditions, reasons, and costs from measured times. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from moefold.kernels.attention.timings import TIMED_TOKENS, AttentionTimes, known_times
from moefold.kernels.attention.workspace import HOPPER_WIDTHS
from moefold.kernels.choice import Choice, Choices, always_runs, invariant_choice, triton_computes
from moefold.kernels.facts import Facts

LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))  # GPUs whose blocks may have 160 KiB of shared memory
DETERMINISTIC_HEAD_DIMS = (16, 32, 64, 128)
REPEATABLE = ("deterministic", "varlen")  # on a GPU, those that add up in a fixed order
UNMEASURED_COST = 1e5  # milliseconds: chosen behind those whose times are known
NOT_REPEATABLE_COST = 1e6  # milliseconds: chosen last where runs must repeat
FALLBACK_COST = 1e7


def fused_attention_runs(facts: Facts) -> bool:
    if facts.attention is None or facts.device != "cuda":
        return False
    return facts.dtype in ("bf16", "fp16") and facts.capability >= (8, 0)


def is_plain_causal(facts: Facts) -> bool:
    """Whether every query sees all positions up to its own, and there is a query for each."""
    return facts.sees_all and facts.square


def causal_attention_runs(facts: Facts) -> bool:
    return fused_attention_runs(facts) and is_plain_causal(facts)


def cudnn_attention_runs(facts: Facts) -> bool:
    """cuDNN's kernels for Hopper; on other GPUs flash is as fast."""
    shape = facts.attention
    if shape is None or not causal_attention_runs(facts):
        return False
    return facts.capability[0] == 9 and shape.head_dim % 8 == 0


def flash_attention_runs(facts: Facts) -> bool:
    shape = facts.attention
    if shape is None or not causal_attention_runs(facts):
        return False
    return shape.head_dim == shape.value_dim <= 256


def deterministic_attention_runs(facts: Facts) -> bool:
    """Forward by cuDNN or flash; backward by kernels for some widths or, on Hopper, by the masked ones for any."""
    shape = facts.attention
    if shape is None or not facts.triton:
        return False
    if flash_attention_runs(facts) and shape.head_dim in DETERMINISTIC_HEAD_DIMS:
        return True
    return cudnn_attention_runs(facts) and masked_kernels_run(facts)


def varlen_attention_runs(facts: Facts) -> bool:
    return masked_kernels_run(facts) and not deterministic_attention_runs(facts)


def masked_kernels_run(facts: Facts) -> bool:
    """Whether the kernels that read only visible keys can run."""
    shape = facts.attention
    if shape is None or not fused_attention_runs(facts) or not facts.triton:
        return False
    widest = max(shape.head_dim, shape.value_dim)
    return facts.capability in LARGE_SHARED_MEMORY and widest <= 256


def cached_kernel_runs(facts: Facts) -> bool:
    shape = facts.attention
    return shape is not None and triton_computes(facts) and shape.head_dim <= 1024


def largest_logit_kernel_runs(facts: Facts) -> bool:
    shape = facts.attention
    return shape is not None and triton_computes(facts) and shape.head_dim <= 256


def hopper_blocks_run(facts: Facts) -> bool:
    shape = facts.attention
    if shape is None or not masked_kernels_run(facts):
        return False
    widths = (shape.head_dim, shape.value_dim)
    return facts.capability[0] == 9 and widths in HOPPER_WIDTHS


def measured_times(facts: Facts) -> AttentionTimes:
    if facts.attention is None:
        return {}
    return known_times(facts.capability, facts.attention)


def attention_cost(name: str) -> Callable[[Facts], float]:
    """Measured milliseconds. Where runs must repeat, implementations without a fixed order of sums come last."""

    def measured_cost(facts: Facts) -> float:
        times = measured_times(facts)
        unmeasured = UNMEASURED_COST if times else 0.0
        cost = times.get(name, unmeasured)
        if breaks_repeatability(name, facts):
            cost += NOT_REPEATABLE_COST
        return cost

    return measured_cost


def breaks_repeatability(name: str, facts: Facts) -> bool:
    return facts.repeatable and facts.device == "cuda" and name not in REPEATABLE


def fallback_cost(facts: Facts) -> float:
    return FALLBACK_COST if fused_attention_runs(facts) else 0.0


def attention_note(name: str) -> Callable[[Facts], str]:
    """Measured times, and whether a run would not repeat though it should."""

    def note(facts: Facts) -> str:
        remarks = [timing_note(facts)]
        if breaks_repeatability(name, facts):
            remarks.append("runs may not repeat to the bit, though kernels.repeatable asks for it")
        return "; ".join(filter(None, remarks))

    return note


def timing_note(facts: Facts) -> str:
    times = measured_times(facts)
    if not times or not is_plain_causal(facts):
        return ""
    fastest_first = sorted(times.items(), key=lambda item: item[1])
    listed = ", ".join(f"{name} {time:.2f}" for name, time in fastest_first)
    length = facts.attention.length if facts.attention else 0
    tokens = max(TIMED_TOKENS, length)
    return f"{facts.attention}, ms of forward and backward for {tokens} tokens: {listed}"


ATTENTION_CHOICES = (
    Choice(
        "deterministic",
        deterministic_attention_runs,
        "bf16 on cuda with Triton, heads of 16, 32, 64 or 128, on Hopper of any width up to 256",
        "sums in a fixed order, so that runs repeat to the bit (kernels.repeatable)",
        attention_cost("deterministic"),
        attention_note("deterministic"),
    ),
    Choice(
        "cudnn",
        cudnn_attention_runs,
        "bf16 on Hopper",
        "never stores the scores; its backward adds up in another order each time",
        attention_cost("cudnn"),
        attention_note("cudnn"),
    ),
    Choice(
        "flash",
        flash_attention_runs,
        "bf16 on cuda, values as wide as keys",
        "never stores the scores; its backward adds up in another order each time",
        attention_cost("flash"),
        attention_note("flash"),
    ),
    Choice(
        "varlen",
        varlen_attention_runs,
        "bf16 on an A100, H100, B200 or their like with Triton, heads of at most 256; documents, a window, sinks, "
        "fewer queries than keys, or widths that no other kernel with a fixed order of sums has",
        "reads only visible keys, stores no mask; sums in a fixed order, so that runs repeat to the bit",
        attention_cost("varlen"),
    ),
    Choice("sdpa", always_runs, "nothing", "never stores the scores", fallback_cost, attention_note("sdpa")),
    invariant_choice("documents one by one, in tiles: bits depend on nothing beside the document (kernels.invariant)"),
)

NEEDS_MASKED_KERNELS = "bf16 on an A100, H100, B200 or their like with Triton, heads of at most 256"
NO_SCORES = "never stores the scores; sums in a fixed order, so that runs repeat to the bit"
BLOCK_CHOICES = (
    Choice("hopper", hopper_blocks_run, "bf16 on Hopper with Triton, heads of 64, 128 or 192/128", NO_SCORES),
    Choice("triton", masked_kernels_run, NEEDS_MASKED_KERNELS, NO_SCORES),
)

CACHED_CHOICES = (
    Choice(
        "triton",
        cached_kernel_runs,
        "cuda with Triton, fp32 or bf16, heads of at most 1024",
        "many programs share the keys of a sequence; the new key is written on the way",
    ),
)

LARGEST_LOGIT_CHOICES = (
    Choice(
        "triton",
        largest_logit_kernel_runs,
        "cuda with Triton, fp32 or bf16, heads of at most 256",
        "never stores the scores, skips keys that no query sees",
    ),
)

CHOICES: Choices = {
    "largest_logit": LARGEST_LOGIT_CHOICES,
    "cached_attention": CACHED_CHOICES,
    "attention": ATTENTION_CHOICES,
    "attention_block": BLOCK_CHOICES,
    "attention_block_backward": BLOCK_CHOICES,
}

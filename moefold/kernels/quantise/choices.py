"""Implementations of quantisation. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import Choice, Choices, triton_runs
from moefold.kernels.facts import Facts


def fp8_casts_run(facts: Facts) -> bool:
    return triton_runs(facts) and facts.capability >= (8, 9)


def fp8_gluon_runs(facts: Facts) -> bool:
    return triton_runs(facts) and facts.capability[0] == 9


HOPPER_NEEDS = "Hopper with Triton"
FP8_NEEDS = "cuda with Triton, compute capability 8.9 or above"

CHOICES: Choices = {
    "row_tiles": (Choice("triton", triton_runs, "cuda with Triton", "one launch, no wait of the host"),),
    "tile_maxima": (
        Choice("gluon", fp8_gluon_runs, HOPPER_NEEDS, "a thread has 16 rows: column maxima without exchanges"),
        Choice("triton", triton_runs, "cuda with Triton", "maxima of rows and of columns in one read, with the gather"),
    ),
    "quantise_tiles": (
        Choice("gluon", fp8_gluon_runs, HOPPER_NEEDS, "a thread has 16 rows: the transposed copy without exchanges"),
        Choice("triton", fp8_casts_run, FP8_NEEDS, "gather, scales and bytes of rows and of columns in one read"),
    ),
    "wide_scales": (Choice("triton", triton_runs, "cuda with Triton", "two launches instead of twenty"),),
    "quantise_delayed": (
        Choice("gluon", fp8_gluon_runs, HOPPER_NEEDS, "as quantise_tiles, with maxima and a count from the same read"),
        Choice("triton", fp8_casts_run, FP8_NEEDS, "copies, maxima and a count from one read"),
    ),
    "note_maxima": (Choice("triton", triton_runs, "cuda with Triton", "one launch for experts and channels"),),
    "rounding_figures": (
        Choice("triton", fp8_casts_run, FP8_NEEDS, "one read of values and bytes, nothing kept in fp32"),
    ),
    "gather_tiles": (
        Choice(
            "triton", triton_runs, "cuda with Triton", "bytes and scales in one pass; moves half of what bf16 would"
        ),
    ),
    "quantise_weight": (
        Choice("gluon", fp8_gluon_runs, HOPPER_NEEDS, "both layouts from one read, without exchanges between threads"),
        Choice("triton", fp8_casts_run, FP8_NEEDS, "both layouts from one read"),
    ),
    "share_maxima": (Choice("triton", triton_runs, "cuda with Triton", "one read, whole blocks or parts of them"),),
    "cast_share": (Choice("triton", fp8_casts_run, FP8_NEEDS, "one read, whole blocks or parts of them"),),
    "line_maxima": (Choice("triton", triton_runs, "cuda with Triton", "one read, nothing kept in fp32"),),
    "hadamard_blocks": (Choice("triton", triton_runs, "cuda with Triton", "gather and transform in one read"),),
    "quantise_mx": (Choice("triton", fp8_casts_run, FP8_NEEDS, "gather, scales and bytes in one read"),),
    "dequantise_mx": (Choice("triton", fp8_casts_run, FP8_NEEDS, "one read, exact bf16 in one write"),),
    "quantise_nv": (
        Choice("triton", fp8_casts_run, FP8_NEEDS, "scales and codes in one read; random numbers are not stored"),
    ),
    "round_nv": (Choice("triton", fp8_casts_run, FP8_NEEDS, "quantised and dequantised in one pass"),),
    "scale_lines": (Choice("triton", triton_runs, "cuda with Triton", "one pass"),),
    "dequantise_nv": (Choice("triton", fp8_casts_run, FP8_NEEDS, "one read, exact bf16 in one write"),),
    "dequantise_rows": (Choice("triton", fp8_casts_run, FP8_NEEDS, "one launch: bytes read once, rows written once"),),
    "rows_to_payload": (Choice("triton", fp8_casts_run, FP8_NEEDS, "scales and bytes of a payload in one launch"),),
    "sum_payload_rows": (
        Choice("triton", fp8_casts_run, FP8_NEEDS, "payloads of all ranks read once, sums written once"),
    ),
    "channels_to_payload": (Choice("triton", fp8_casts_run, FP8_NEEDS, "scales and bytes of a payload in one read"),),
    "payloads_to_channels": (Choice("triton", fp8_casts_run, FP8_NEEDS, "bytes read once, values written once"),),
    "transpose_values": (Choice("triton", triton_runs, "cuda with Triton", "moves bytes in blocks of 128 x 128"),),
}

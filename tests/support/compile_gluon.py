"""Compile every Gluon kernel for Hopper, which needs no GPU: the kernels have no interpreter.

python -m tests.support.compile_gluon
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from moefold.kernels.attention import backward_hopper, backward_hopper_launch
from moefold.kernels.attention.workspace import HOPPER_WIDTHS
from moefold.kernels.experts import (
    delayed_swiglu_hopper,
    grouped_gemm_fp8_hopper,
    grouped_gemm_fp8_launch,
    grouped_gemm_hopper,
    grouped_gemm_launch,
    swiglu_tiles_hopper,
    swiglu_tiles_launch,
)
from moefold.kernels.optimizer import newton_schulz_hopper, symmetric_product_hopper
from moefold.kernels.quantise.fp8 import E4M3

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP8, FP32, INT32 = "*bf16", "*fp8e4nv", "*fp32", "*i32"


def tensor_descriptor(*shape: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
    return f"tensordesc<bf16{list(shape)},{layout!r}>"


def fp8_descriptor(*shape: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.float8e4nv)
    return f"tensordesc<fp8e4nv{list(shape)},{layout!r}>"


def scale_descriptor(columns: int) -> str:
    shape = [1, columns]
    return f"tensordesc<fp32{shape},{grouped_gemm_fp8_launch.SCALE_ROWS!r}>"


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> str:
    """The PTX of a kernel whose other arguments are 32-bit integers."""
    names = list(kernel.arg_names)
    here = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in here else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in here.items()}
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = GluonASTSource(kernel, signature, values, aligned)
    return compile_kernel(source, target=HOPPER, options=options).asm["ptx"]


def attention_kernels(width: int, value_width: int, causal: bool) -> Iterator[tuple[str, str]]:
    of_keys, of_queries = backward_hopper_launch.kernel_options(width, value_width, causal)
    main, rest, keys = of_keys["D"], of_keys["E"], of_queries["KEYS"]
    heads = [f"{name}_desc" for name in ("q", "k", "dk")]
    further = [f"{name}_rest_desc" for name in ("q", "k", "dk")]
    types = dict.fromkeys(heads, tensor_descriptor(1, 64, main))
    types |= dict.fromkeys(("v_desc", "dy_desc", "dv_desc"), tensor_descriptor(1, 64, value_width))
    types |= {"ds_desc": tensor_descriptor(64, 64), "statistics": FP32, "scale": "fp32"}
    query_types = {"k_desc": tensor_descriptor(1, keys, main), "ds_desc": tensor_descriptor(keys, 64)}
    query_types |= {"dq_desc": tensor_descriptor(1, 64, 64), "scale": "fp32"}
    absent = further
    if rest:
        types |= dict.fromkeys(further, tensor_descriptor(1, 64, rest))
        query_types |= {"k_rest_desc": tensor_descriptor(1, keys, rest)}
        absent = []
    sums = dict.fromkeys(("dk_sums", "dv_sums", "dq_sums"), FP32)
    ways: dict[str, tuple[list[str], dict[str, str]]] = {"": ([*absent, *sums], {})}
    if not rest:
        ways[" with carried sums"] = (absent, sums)
    about = f"{width} and {value_width}, {'causal' if causal else 'all keys'}"
    kernels: dict[str, tuple[Any, dict[str, str], dict[str, int]]] = {}
    kernels["dk and dv"] = (backward_hopper.attention_dkdv_hopper, types, of_keys)
    kernels["dq"] = (backward_hopper.attention_dq_hopper, query_types, of_queries)
    for name, (kernel, some_types, given) in kernels.items():
        names = kernel.arg_names
        constants: dict[str, Any] = {key: value for key, value in given.items() if key in names}
        options = {key: value for key, value in given.items() if key not in names}
        for carries, (missing, carried) in ways.items():
            fixed = constants | dict.fromkeys(one for one in missing if one in names)
            yield f"{name}{carries}, {about}", compile_for_hopper(kernel, some_types | carried, fixed, options)


COLUMNS = grouped_gemm_launch.TILE_COLUMNS
GEMM_TYPES = {"a_desc": tensor_descriptor(64, 64), "low_desc": tensor_descriptor(64, 64)}
GEMM_TYPES |= {"tiles_M4": INT32, "count": INT32, "ends_E": INT32, "pads_E": INT32}
GEMM_TYPES |= {"out_desc": tensor_descriptor(1, 64, 64), "side_desc": tensor_descriptor(1, 64, 64)}
GEMM_TYPES |= {"out_ptr": BF16, "side_ptr": BF16, "weight_R": FP32, "dots_nR": FP32}
SIDE = ("side_desc", "side_ptr", "weight_R", "dots_nR")
TAIL = ("low_desc", "tail_desc")
EXPERT_GEMMS = [  # kind, epilogue, tile of the right operand, arguments that are absent, type of the result
    ("nt", "swiglu", (2, COLUMNS // 2, 64), ("out_desc", "dots_nR"), BF16),
    ("nt", "plain", (COLUMNS, 64), SIDE, BF16),
    ("nn", "dswiglu", (64, COLUMNS), ("out_desc", "side_desc"), BF16),
    ("nn", "plain", (64, COLUMNS), SIDE, BF16),
    ("tn", "add", (64, COLUMNS), ("out_desc", *SIDE), FP32),
    ("tn", "plain", (64, COLUMNS), SIDE, BF16),
]


def expert_kernels() -> Iterator[tuple[str, str]]:
    for kind, epilogue, tile, absent, result in EXPERT_GEMMS:
        right = tensor_descriptor(*tile)
        types = GEMM_TYPES | {"b_desc": right, "tail_desc": right, "out_ptr": result}
        constants: dict[str, Any] = {"KIND": kind, "END": epilogue, "BN": COLUMNS, "STAGES": grouped_gemm_launch.STAGES}
        constants |= dict.fromkeys(absent)
        for about, missing in (("", TAIL), (" with a tail", ())):
            if kind == "tn" and not missing:
                continue
            some = constants | dict.fromkeys(missing)
            ptx = compile_for_hopper(grouped_gemm_hopper.expert_gemm, types, some, {"num_warps": 4})
            yield f"expert GEMM {kind} {epilogue}{about}", ptx


def fp16_descriptor(*shape: int) -> str:
    return tensor_descriptor(*shape).replace("bf16", "fp16", 1)


def fp16_products() -> Iterator[tuple[str, str]]:
    """Products of Newton-Schulz with X, in fp16, into bf16 as into fp16."""
    constants: dict[str, Any] = {"KIND": "nn", "END": "plain", "BN": COLUMNS, "STAGES": grouped_gemm_launch.STAGES}
    constants |= dict.fromkeys((*SIDE, *TAIL))
    operands = {"a_desc": fp16_descriptor(64, 64), "b_desc": fp16_descriptor(64, COLUMNS)}
    results = {BF16: tensor_descriptor(1, 64, 64), "*fp16": fp16_descriptor(1, 64, 64)}
    for pointer, descriptor in results.items():
        types = GEMM_TYPES | operands | {"out_desc": descriptor, "out_ptr": pointer}
        ptx = compile_for_hopper(grouped_gemm_hopper.expert_gemm, types, constants, {"num_warps": 4})
        yield f"expert GEMM nn plain, fp16 to {pointer}", ptx


SYMMETRIC_PRODUCTS = [  # form, whether both operands are one matrix, adds, has scales, stores all tiles; operands
    ("rows", True, False, True, False, tensor_descriptor),
    ("columns", True, False, False, False, fp16_descriptor),
    ("lower", True, True, False, False, fp16_descriptor),
    ("lower", False, False, True, True, fp16_descriptor),
]


def symmetric_products() -> Iterator[tuple[str, str]]:
    for form, squares, adds, scales, mirrors, descriptor in SYMMETRIC_PRODUCTS:
        types = dict.fromkeys(("a_by_row", "b_by_row"), descriptor(1, 128, 64))
        types |= dict.fromkeys(("a_by_column", "b_by_column"), descriptor(1, 64, 128))
        types |= dict.fromkeys(("add_desc", "out_desc"), fp16_descriptor(1, 64, 64))
        types |= {"scales_N": FP32, "alpha": "fp32", "beta": "fp32", "diagonal": "fp32"}
        constants: dict[str, Any] = {"FORM": form, "SQUARES": squares, "ADDS": adds, "SCALES": scales}
        constants |= {"MIRRORS": mirrors, "STAGES": newton_schulz_hopper.STAGES}
        absent = [name for name, there in (("add_desc", adds), ("scales_N", scales)) if not there]
        constants |= dict.fromkeys(absent)
        kernel = symmetric_product_hopper.symmetric_product
        yield f"symmetric product {form}", compile_for_hopper(kernel, types, constants, {"num_warps": 4})


FP8_GEMM_TYPES = dict.fromkeys(("tiles_M4", "count", "ends_E", "first_tile_E"), INT32)
FP8_GEMM_TYPES |= {"sa_ptr": FP32, "sb_ptr": FP32, "sa_desc": scale_descriptor(128), "sb_desc": scale_descriptor(256)}
FP8_GEMM_TYPES |= {"out_desc": tensor_descriptor(1, 64, 64), "out_ptr": BF16, "side_ptr": BF16, "side_scales": FP32}
FP8_GEMM_TYPES |= {"h_ptr": BF16, "h_scales": FP32, "weight_R": FP32, "dots_nP": FP32, "side_rows_E": FP32}
FP8_SIDE = ("side_ptr", "side_scales", "h_ptr", "h_scales", "weight_R", "dots_nP", "side_rows_E")
NO_OUT = ("out_desc", "out_ptr", "dots_nP")
CURRENT = (*NO_OUT, "side_rows_E")
FP8_GEMMS = [  # kind, epilogue, sums, a wide scale of b, arguments that are absent, types that differ
    ("rows", "plain", "block", "column", FP8_SIDE, {}),
    ("rows", "plain", "fast", "expert", FP8_SIDE, {}),
    ("rows", "plain", "promoted", "column", FP8_SIDE, {}),
    ("rows", "swiglu", "block", "column", CURRENT, {"h_ptr": FP8, "side_ptr": FP8}),
    ("rows", "swiglu", "block", "column", (*CURRENT, "h_scales"), {"side_ptr": FP8}),
    ("rows", "swiglu", "fast", "column", (*CURRENT, "side_scales"), {"h_ptr": FP8}),
    ("rows", "swiglu", "fast", "column", NO_OUT, {"h_ptr": FP8, "side_ptr": FP8}),
    ("rows", "swiglu", "promoted", "expert", NO_OUT, {"h_ptr": FP8, "side_ptr": FP8}),
    ("rows", "dswiglu", "fast", "column", ("out_desc", "side_scales", "side_rows_E"), {"h_ptr": FP8}),
    ("rows", "dswiglu", "promoted", "expert", ("out_desc", "side_scales", "h_scales", "side_rows_E"), {}),
    ("experts", "plain", "block", "expert", FP8_SIDE, {}),
    ("experts", "add", "block", "expert", ("out_desc", *FP8_SIDE), {"out_ptr": FP32}),
    ("experts", "add", "fast", "column", ("out_desc", *FP8_SIDE), {"out_ptr": FP32}),
]


def fp8_expert_kernels() -> Iterator[tuple[str, str]]:
    for kind, epilogue, sums, wide_b, absent, differing in FP8_GEMMS:
        consumer_regs, other_regs = grouped_gemm_fp8_launch.registers_of_warps(epilogue, sums)
        by_block = sums == "block"
        constants: dict[str, Any] = {"KIND": kind, "END": epilogue, "SCALES": "block" if by_block else "wide"}
        constants |= {"PROMOTE": sums != "fast", "WIDE_B": wide_b, "POWER_OF_TWO": False}
        constants |= {"STAGES": grouped_gemm_fp8_launch.STAGES}
        constants |= {"CONSUMER_REGS": consumer_regs, "OTHER_REGS": other_regs}
        constants |= dict.fromkeys(absent)
        if not by_block:
            constants |= {"sa_desc": None, "sb_desc": None}
        elif kind == "rows":
            constants |= {"sb_desc": None}
        weights = (2, 128, 128) if epilogue == "swiglu" else (256, 128)
        types = FP8_GEMM_TYPES | {"a_desc": fp8_descriptor(64, 128), "b_desc": fp8_descriptor(*weights)}
        if kind == "experts":
            types |= {"a_desc": fp8_descriptor(1, 64, 128), "b_desc": fp8_descriptor(1, 256, 128)}
        kernel = grouped_gemm_fp8_hopper.expert_gemm_fp8
        ptx = compile_for_hopper(kernel, types | differing, constants, {"num_warps": 4})
        yield f"FP8 expert GEMM {kind} {epilogue}, sums {sums}, scale of {wide_b}, {len(absent)} absent", ptx


TILE_TYPES = {"da_RF": BF16, "h_PN": BF16, "weight_R": FP32, "tiles_M4": INT32, "dh_rows_PN": FP8, "dots_BR": FP32}
TILE_TYPES |= {"dh_copy": BF16, "a_copy": BF16}
TILE_TYPES |= dict.fromkeys(("h_scales", "row_scales", "dh_copy_scales", "a_copy_scales"), FP32)
COPY_SCALES = ("dh_copy_scales", "a_copy_scales")
SWIGLU_TILES = [  # what is kept and read, arguments that are absent, types that differ
    ("FP8 kept, FP8 weight gradients", (), {"h_PN": FP8, "dh_copy": FP8, "a_copy": FP8}),
    ("bf16 kept, bf16 weight gradients", ("h_scales", *COPY_SCALES), {}),
]


DELAYED_TYPES = TILE_TYPES | dict.fromkeys(
    ("dh_rows_E", "dh_columns_EC", "a_rows_E", "a_columns_EC", "dh_scales_P"), FP32
)
DELAYED_TYPES |= {"dh_maxima": FP32, "a_maxima": FP32, "dh_saturated": "*i64", "a_saturated": "*i64"}
DELAYED_TYPES |= {"dh_copy": FP8, "a_copy": FP8}
DELAYED_SWIGLU = [
    ("delayed scales, FP8 kept", (), {"h_PN": FP8}),
    ("delayed scales, bf16 kept", ("h_scales",), {}),
]


def swiglu_tile_kernels() -> Iterator[tuple[str, str]]:
    options = {"num_warps": swiglu_tiles_launch.WARPS, "maxnreg": swiglu_tiles_launch.REGISTERS}
    for about, absent, types in SWIGLU_TILES:
        constants: dict[str, Any] = {"LARGEST": E4M3.largest, "A_LARGEST": E4M3.largest, "POWER_OF_TWO": False}
        constants |= dict.fromkeys(absent)
        kernel = swiglu_tiles_hopper.quantise_gradient_kernel
        yield f"SwiGLU's gradient, {about}", compile_for_hopper(kernel, TILE_TYPES | types, constants, options)
    for about, absent, types in DELAYED_SWIGLU:
        constants = {"SATURATES": E4M3.saturates, "A_SATURATES": E4M3.saturates} | dict.fromkeys(absent)
        kernel = delayed_swiglu_hopper.quantise_delayed_gradient_kernel
        for channels in (1024, 1):
            some = constants | {"F": 1024, "CHANNELS": 2 * channels if channels > 1 else 1, "A_CHANNELS": channels}
            name = f"SwiGLU's gradient, {about}, scales of {channels}"
            yield name, compile_for_hopper(kernel, DELAYED_TYPES | types, some, options)


def main() -> None:
    attention = [attention_kernels(*widths, causal) for widths in HOPPER_WIDTHS for causal in (True, False)]
    experts = expert_kernels(), fp8_expert_kernels(), swiglu_tile_kernels()
    for kernels in (*attention, *experts, fp16_products(), symmetric_products()):
        for name, ptx in kernels:
            products = ptx.count("wgmma.mma_async")
            print(f"{name}: {products} wgmma instructions")


if __name__ == "__main__":
    main()

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
from moefold.kernels.experts import grouped_gemm_hopper, grouped_gemm_launch

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32, INT32 = "*bf16", "*fp32", "*i32"


def tensor_descriptor(*shape: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
    return f"tensordesc<bf16{list(shape)},{layout!r}>"


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> str:
    """The PTX of a kernel whose other arguments are 32-bit integers."""
    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    pointers = [name for name, kind in signature.items() if kind.startswith("*")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = GluonASTSource(kernel, signature, values, aligned)
    return compile_kernel(source, target=HOPPER, options=options).asm["ptx"]


def attention_kernels(width: int, causal: bool) -> Iterator[tuple[str, str]]:
    head = tensor_descriptor(1, 64, width)
    types = dict.fromkeys(("q_desc", "k_desc", "v_desc", "dy_desc", "dk_desc", "dv_desc"), head)
    types |= {"ds_desc": tensor_descriptor(64, 64), "dq_desc": tensor_descriptor(1, 64, 64)}
    types |= {"statistics": FP32, "scale": "fp32"}
    constants = {"D": width, "STAGES": backward_hopper_launch.STAGES[width], "CAUSAL": causal}
    about = f"{width}, {'causal' if causal else 'all keys'}"
    dkdv, dq = backward_hopper.attention_dkdv_hopper, backward_hopper.attention_dq_hopper
    yield f"dk and dv, {about}", compile_for_hopper(dkdv, types, constants, {"num_warps": 4})
    yield f"dq, {about}", compile_for_hopper(dq, types, constants, {"num_warps": 4, "maxnreg": 128})


COLUMNS = grouped_gemm_launch.TILE_COLUMNS
GEMM_TYPES = {"a_desc": tensor_descriptor(64, 64), "tiles_M4": INT32, "count": INT32, "ends_E": INT32, "pads_E": INT32}
GEMM_TYPES |= {"out_desc": tensor_descriptor(1, 64, 64), "side_desc": tensor_descriptor(1, 64, 64)}
GEMM_TYPES |= {"out_ptr": BF16, "side_ptr": BF16, "weight_R": FP32, "dots_nR": FP32}
SIDE = ("side_desc", "side_ptr", "weight_R", "dots_nR")
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
        types = GEMM_TYPES | {"b_desc": tensor_descriptor(*tile), "out_ptr": result}
        constants: dict[str, Any] = {"KIND": kind, "END": epilogue, "BN": COLUMNS, "STAGES": grouped_gemm_launch.STAGES}
        constants |= dict.fromkeys(absent)
        ptx = compile_for_hopper(grouped_gemm_hopper.expert_gemm, types, constants, {"num_warps": 4})
        yield f"expert GEMM {kind} {epilogue}", ptx


def main() -> None:
    attention = [attention_kernels(width, causal) for width in (64, 128) for causal in (True, False)]
    for kernels in (*attention, expert_kernels()):
        for name, ptx in kernels:
            products = ptx.count("wgmma.mma_async")
            print(f"{name}: {products} wgmma instructions")


if __name__ == "__main__":
    main()

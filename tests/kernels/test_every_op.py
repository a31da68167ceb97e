"""Every op, every implementation that may run, every case: one test for all, so that registering is being tested.

The judge is the op's reference in fp64 on the same inputs, whatever the precision under test. That the references are
right is shown apart: by finite differences, and by formulas written out in plain Python.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import pairwise, product
from operator import itemgetter
from typing import Any

import pytest
import torch

from moefold.kernels.catalog import CATALOG
from moefold.kernels.norm.rmsnorm import rmsnorm
from moefold.kernels.quantise.fp8 import Quantised
from moefold.kernels.quantise.hadamard import SIGNS
from moefold.kernels.quantise.nf4 import NF4_NUMBERS
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.registry import KernelCase, KernelOp, float_tensors, import_every_op, map_tensors
from moefold.kernels.routing.router_ops import router_topk
from moefold.kernels.routing.router_spec import RouterSpec, TokenSpan
from moefold.layout.dtypes import DTYPES
from moefold.layout.labels import IGNORE_INDEX
from tests.support.fp8_numbers import bytes_of_block, nearest_byte, rounded_to_fp32, scale_of_block, value_of_byte

# Largest |a - b| / |b| against fp64. bf16 keeps 8 bits (4e-3); logits and scores made from rounded products lose a few
# times that.
OPS = import_every_op()
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
PRODUCTS_IN_BF16 = 1e-2  # of what an FP8 product's epilogue stores: bf16, or FP8 scales
FEW_BYTES = 0.01  # bytes that such an epilogue may round to a neighbour: another order of sums moves values a little
# in fp32 whatever the inputs
FP32_ACTIVATIONS = (
    "fp8_swiglu_product",
    "fp8_dswiglu_product",
    "quantise_swiglu_gradient",
    "quantise_delayed_gradient",
)
GPU = torch.cuda.is_available()


Outcome = dict[str, Any]  # what a result is, and its tensor or None
Judges = tuple[Outcome, Outcome]


@lru_cache(maxsize=4)  # tests that follow each other have the same
def cases(op: KernelOp, device: str, dtype: str) -> list[KernelCase]:
    return op.cases(device, DTYPES[dtype])


@lru_cache(maxsize=4)
def judged_case(op: KernelOp, device: str, dtype: str, number: int) -> tuple[KernelCase, Judges]:
    case = cases(op, device, dtype)[number]
    return case, judges(op, case)


def everything(device: str, *dtypes: str) -> Iterator[Any]:
    """(op, implementation, dtype, number of the case) for all that the catalog lets run; made on the CPU, cheaply."""
    capability = torch.cuda.get_device_capability() if device == "cuda" and GPU else (0, 0)
    for op in OPS.values():
        for dtype in dtypes:
            for number, case in enumerate(cases(op, "cpu", dtype)):
                facts = case.facts(device, dtype, capability)
                for name in ["reference", *(c.name for c in CATALOG[op.name] if c.when(facts) or c.on_request)]:
                    yield pytest.param(op.name, name, dtype, number, id=f"{op.name}-{name}-{dtype}-{case.name}")


def is_float(x: Any) -> bool:
    """A float tensor that means its values; FP8 bytes mean theirs times a scale."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() > 1


def flat_outputs(out: Any) -> list[torch.Tensor]:
    """The tensors of an op's result, those in tuples within it too; FP8 as bytes."""
    if out is None:
        return []
    if isinstance(out, tuple):
        return [y for part in out for y in flat_outputs(part)]
    return [out.view(torch.uint8) if out.element_size() == 1 and out.is_floating_point() else out]


def rows_in_use(op: KernelOp, case: KernelCase) -> torch.Tensor | None:
    """Which padded rows an op with an FP8 epilogue defines: those of tiles in use. SwiGLU's leaves out halves of a tile
    (64 rows) without any row; its gradient fills them with zeros, which weight gradients read."""
    if op.name not in FP32_ACTIVATIONS:
        return None
    tiles = next(x for x in case.inputs if isinstance(x, RowTiles))
    real = tiles.tiles_M4[:, 2:3]
    begins = torch.tensor([[0, 64]], device=real.device)
    halves = real > begins if op.name == "fp8_swiglu_product" else (real > 0).expand(-1, 2)
    return halves.repeat_interleave(64, 1).flatten()


def defined(op: KernelOp, case: KernelCase, y: torch.Tensor) -> torch.Tensor:
    """A result without its undefined rows."""
    used = rows_in_use(op, case)
    if used is not None and len(y) * 128 == len(used):  # copies along columns, tile by tile
        used = used[::128]
    return case.defined(y) if used is None or len(y) != len(used) else y[used]


def fresh(case: KernelCase, dtype: torch.dtype | None = None, grad: bool = True) -> list[Any]:
    """Copies of a case's inputs that can be changed and differentiated; floats in another precision if asked, and NaN
    in their undefined rows."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        if not is_float(x):
            return x.clone()
        copy = case.spoiled(x.detach()).to(dtype or x.dtype, copy=True)
        return copy.requires_grad_(grad)

    return map_tensors(case.inputs, copied)


def outcome(
    function: Callable[..., Any], case: KernelCase, op: KernelOp, dtype: torch.dtype | None = None
) -> Outcome:  # fmt: skip
    """All defined results of an implementation: its outputs and its gradients under random output gradients (NaN in
    undefined rows), or, of an op that works in place, the tensors it may have changed."""
    inputs = fresh(case, dtype, grad=op.differentiable)
    if op.mutates:
        assert function(*inputs) is None
        return {f"input {i}": case.defined(x) for i, x in enumerate(float_tensors(inputs)) if is_float(x)}
    out = function(*inputs)
    outputs = flat_outputs(out)
    if not op.differentiable:
        return {f"output {i}": defined(op, case, y) for i, y in enumerate(outputs)}
    differentiable = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in differentiable]
    directions = [case.spoiled(direction) for direction in directions]
    wanted = [(i, x) for i, value in enumerate(inputs) for x in float_tensors(value)]
    gradients = torch.autograd.grad(differentiable, [x for _, x in wanted], directions, allow_unused=True)
    results: dict[str, Any] = {f"output {i}": case.defined(y.detach()) for i, y in enumerate(outputs)}
    for number, ((i, x), gradient) in enumerate(zip(wanted, gradients, strict=True)):
        name = f"gradient of input {i}" if inputs[i] is x else f"gradient of input {i}, tensor {number}"
        results[name] = None if gradient is None else case.defined(gradient)
    return results


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, or the root mean square of a where b is zero. What is infinite in b must be so in a."""
    a, finite = a.to(b.dtype), b.isfinite()
    if not torch.equal(a[~finite], b[~finite]):
        return math.inf
    a, b = a[finite], b[finite]
    return (a - b).norm().item() / (b.norm().item() or math.sqrt(b.numel()) or 1.0)


def judges(op: KernelOp, case: KernelCase) -> Judges:
    """What the reference gives, in the case's precision and in fp64."""
    return outcome(op.reference, case, op), outcome(op.reference, case, op, torch.float64)


def check(op: KernelOp, implementation: Callable[..., Any], case: KernelCase, dtype: str) -> None:
    """The implementation agrees with the op's reference in fp64, and returns the dtypes the reference returns."""
    compare(op, outcome(implementation, case, op), case, dtype, judges(op, case))


def check_number(op: KernelOp, implementation: str, device: str, dtype: str, number: int) -> None:
    case, known = judged_case(op, device, dtype, number)
    compare(op, outcome(op.implementations[implementation], case, op), case, dtype, known)


def compare(op: KernelOp, mine: Outcome, case: KernelCase, dtype: str, known: Judges) -> None:
    plain, exact = known
    assert mine.keys() == exact.keys()
    for name, value in mine.items():
        about = f"{op.name}, {dtype}, case '{case.name}', {name}"
        if value is None or exact[name] is None:
            assert value is None, f"{about}: the reference gives none"
            assert exact[name] is None, f"{about}: none"
            continue
        assert value.shape == exact[name].shape, f"{about}: shape {value.shape}; expected {exact[name].shape}"
        assert value.dtype == plain[name].dtype, f"{about}: {value.dtype}; expected {plain[name].dtype}"
        is_count = value.dtype == torch.int64
        if not value.is_floating_point() and (is_count or op.name not in FP32_ACTIVATIONS):
            assert torch.equal(value, exact[name]), about
            continue
        if value.dtype == torch.uint8:
            check_share_of_bytes(value, exact[name], about)
            continue
        allowed = min(TOLERANCE[dtype], PRODUCTS_IN_BF16) if op.name in FP32_ACTIVATIONS else TOLERANCE[dtype]
        off = error(value, exact[name])
        assert off <= allowed, f"{about}: off by {off:.1e} of its length; allowed {allowed:g}"
    check_quantised(op, mine, exact, TOLERANCE[dtype], f"{op.name}, {dtype}, case '{case.name}'")


def check_share_of_bytes(mine: torch.Tensor, exact: torch.Tensor, about: str) -> None:
    share = (mine != exact).double().mean().item()
    assert share <= FEW_BYTES, f"{about}: {share:.1%} of the bytes differ; allowed {FEW_BYTES:.0%}"


def check_quantised(op: KernelOp, mine: Outcome, exact: Outcome, allowed: float, about: str) -> None:
    """What bytes that a product's epilogue made mean: values times scales."""
    if op.name not in FP32_ACTIVATIONS:
        return
    for number, value in enumerate(mine.values()):
        if value.dtype == torch.uint8:  # its scales follow
            names = f"output {number}", f"output {number + 1}"
            found, judge = (dequantised(*(of[name] for name in names)) for of in (mine, exact))
            off = error(found, judge)
            assert off <= allowed, f"{about}, {names[0]} times its scales: off by {off:.1e}; allowed {allowed:g}"


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Of blocks of 128, or of whole rows."""
    width = values.shape[1]
    spread = scales.double().repeat_interleave(width if scales.shape[1] == 1 else 128, 1)
    return values.view(torch.float8_e4m3fn).double() * spread[:, :width]


@pytest.mark.parametrize(("op", "implementation", "dtype", "number"), list(everything("cpu", "fp32", "fp64", "bf16")))
def test_an_implementation_agrees_with_the_reference_in_fp64_forward_and_backward(op, implementation, dtype, number):
    check_number(OPS[op], implementation, "cpu", dtype, number)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("op", "implementation", "dtype", "number"), list(everything("cuda", "fp32", "bf16")))
def test_an_implementation_agrees_with_the_reference_on_cuda(op, implementation, dtype, number):
    check_number(OPS[op], implementation, "cuda", dtype, number)


def same_twice(op: KernelOp, implementation: str, case: KernelCase) -> None:
    function = OPS[op.name].implementations[implementation]
    first, second = (outcome(function, case, op) for _ in range(2))
    for name, value in first.items():
        same = value is second[name] is None or torch.equal(value, second[name])
        assert same, f"{op.name} {implementation}, case '{case.name}': {name} differs between two runs"


@pytest.mark.parametrize("op", OPS)
def test_two_runs_give_the_same_bits(op):
    for case in cases(OPS[op], "cpu", "fp32"):
        for name in ["reference", *(c.name for c in CATALOG[op] if c.when(case.facts("cpu", "fp32", (0, 0))))]:
            same_twice(OPS[op], name, case)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("op", OPS)
def test_two_runs_of_what_a_run_would_choose_give_the_same_bits_on_cuda(op):
    for case in cases(OPS[op], "cuda", "bf16"):
        facts = case.facts("cuda", "bf16", torch.cuda.get_device_capability())
        same_twice(OPS[op], next((c.name for c in CATALOG[op] if c.when(facts)), "reference"), case)


def test_every_op_has_cases_and_every_catalog_line_an_implementation_and_the_reverse():
    assert set(OPS) == set(CATALOG)
    for name, op in OPS.items():
        assert cases(op, "cpu", "fp32"), f"{name} has no cases"
        names = [case.name for case in cases(op, "cpu", "fp32")]
        assert len(set(names)) == len(names), f"two cases of {name} share a name"
        assert set(op.implementations) == {"reference", *(c.name for c in CATALOG[name])}, name


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda x, w, eps: rmsnorm(x, w, eps) * 1.0001, "output 0"),
        (lambda x, w, eps: rmsnorm(x, w, eps) + 0 * x.sum() + (x - x.detach()) * 1e-3, "gradient of input 0"),
        (lambda x, w, eps: rmsnorm(x, w.detach(), eps), "gradient of input 1"),
        (lambda x, w, eps: rmsnorm(x, w, eps).double(), "output 0: torch.float64"),
    ],
)
def test_a_wrong_implementation_is_caught_and_the_case_is_named(wrong, what):
    case = cases(rmsnorm, "cpu", "fp32")[1]
    with pytest.raises(AssertionError) as caught:
        check(rmsnorm, wrong, case, "fp32")
    assert f"case '{case.name}', {what}" in str(caught.value)


def nudged(op: KernelOp, case: KernelCase, share: float, by: int) -> Callable[..., Any]:
    """The reference with a share of its FP8 bytes moved, and NaN in undefined rows."""
    used = rows_in_use(op, case)

    def nudge(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        if used is not None:
            y[~used] = torch.full(y[~used].shape, torch.nan).to(y.dtype)
        if y.element_size() == 1:
            as_bytes = y.view(torch.uint8)
            which = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < share
            as_bytes[which & (as_bytes & 0x7F < 0x7E)] ^= by  # the neighbour of the largest number is NaN
        return y

    def run(*inputs: Any) -> Any:
        return in_all_tensors(op.reference(*inputs), nudge)

    return run


def in_all_tensors(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The result of an op with every tensor changed, those in named tuples too."""
    if isinstance(out, torch.Tensor):
        return change(out)
    parts = [in_all_tensors(part, change) for part in out]
    return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)


EPILOGUE_CASES = ["skewed experts, one of them empty, FP8", "one expert, FP8"]


@pytest.mark.parametrize("name", EPILOGUE_CASES)
def test_bytes_of_an_epilogue_may_differ_by_few_roundings_and_undefined_rows_by_anything(name):
    op = OPS["fp8_swiglu_product"]
    case = next(case for case in cases(op, "cpu", "bf16") if case.name == name)
    check(op, nudged(op, case, 0.005, 1), case, "bf16")
    with pytest.raises(AssertionError, match=r"output 0: 2\.\d% of the bytes differ; allowed 1%"):
        check(op, nudged(op, case, 0.02, 1), case, "bf16")
    with pytest.raises(AssertionError, match="output 0 times its scales: off by"):
        check(op, nudged(op, case, 0.005, 0x80), case, "bf16")


@pytest.mark.parametrize("name", EPILOGUE_CASES)
@pytest.mark.parametrize("number", [1, 3])
def test_a_scale_of_an_epilogue_that_is_off_by_two_percent_is_caught(name, number):
    op = OPS["fp8_swiglu_product"]
    case = next(case for case in cases(op, "cpu", "bf16") if case.name == name)

    def wrong(*inputs: Any) -> Any:
        h, a = op.reference(*inputs)
        pair = [h, a]
        pair[number // 2] = Quantised(pair[number // 2].values, pair[number // 2].scales * 1.02)
        return tuple(pair)

    with pytest.raises(AssertionError, match=f"output {number}: off by 2.0e-02 of its length; allowed 0.01"):
        check(op, wrong, case, "bf16")


def test_a_row_of_an_epilogue_that_is_defined_is_compared():
    """The gradient of SwiGLU defines its padding: a NaN there would spoil weight gradients."""
    for op, row, defines in (("fp8_swiglu_product", 40, True), ("fp8_swiglu_product", 64, False)):
        case = cases(OPS[op], "cpu", "bf16")[0]
        assert bool(rows_in_use(OPS[op], case)[row]) is defines, f"{op}: row {row}"
    op = OPS["fp8_dswiglu_product"]
    case = cases(op, "cpu", "bf16")[0]

    def wrong(*inputs: Any) -> Any:
        gradients = op.reference(*inputs)
        gradients.dh_PN[64] = torch.nan
        return gradients

    with pytest.raises(AssertionError, match="output 0: off by nan"):
        check(op, wrong, case, "bf16")


@pytest.mark.parametrize("op", ["quantise_tiles", "quantise_weight"])
def test_one_other_byte_of_a_quantisation_is_caught(op):
    case = cases(OPS[op], "cpu", "bf16")[0]
    with pytest.raises(AssertionError, match="output 0"):
        check(OPS[op], nudged(OPS[op], case, 1e-4, 1), case, "bf16")


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if op.differentiable])
def test_the_gradients_of_a_reference_are_those_of_finite_differences(op):
    checked = 0
    for case in cases(OPS[op], "cpu", "fp64"):
        inputs = fresh(case)
        floats = float_tensors(inputs)
        size = sum(x.numel() for x in floats)
        if any(case.defined(x).numel() == 0 for x in floats) or size > 60_000:
            continue
        variables = [case.defined(x).detach().requires_grad_() for x in floats]
        reference = reference_of_floats(OPS[op], case, inputs)
        assert torch.autograd.gradcheck(reference, variables, fast_mode=size > 150), f"{op}: {case.name}"
        checked += 1
    assert checked >= 2


def defined_list(case: KernelCase, x: torch.Tensor) -> Any:
    return case.defined(x).tolist()


def reference_of_floats(op: KernelOp, case: KernelCase, inputs: list[Any]) -> Callable[..., Any]:
    """The reference as a function of the defined rows of its float inputs, with the defined and finite part of its
    outputs: what is infinite (a log-sum-exp over no key) does not change, and has no differences."""

    def defined_outputs(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        following = iter(args)

        def replaced(given: torch.Tensor) -> torch.Tensor:
            if not is_float(given):
                return given
            x = next(following)
            undefined = given.detach()[len(x) :] if x.ndim else x[None][1:]
            return torch.cat((x, undefined)) if len(undefined) else x

        out = op.reference(*map_tensors(inputs, replaced))
        outputs = [case.defined(y) for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad]
        finite = [y[y.isfinite()] for y in outputs]
        return tuple(y for y in finite if y.numel())

    return defined_outputs


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    return [p / math.fsum(powers) for p in powers]


def seen_keys(s: int, keys: int, ahead: int, window: int, first: int = 0) -> list[int]:
    """Those not behind query s, which stands at `ahead` + s, with a window the nearest of them, from `first` on."""
    return [t for t in range(first, keys) if t <= s + ahead and (not window or s + ahead - t < window)]


def plain_attention(q, k, v, scale=None, window=0, sink=None, begins=None):
    heads, groups, width, value_width = len(q[0][0]), len(k[0][0]), len(q[0][0][0]), len(v[0][0][0])
    scale = 1 / math.sqrt(width) if scale is None else scale
    out = []
    for b, (qs, ks, vs) in enumerate(zip(q, k, v, strict=True)):
        out.append([])
        for s, row in enumerate(qs):
            ahead = len(ks) - len(qs)  # the queries are the last positions
            seen = seen_keys(s, len(ks), ahead, window, begins[b][s] if begins else 0)
            out[-1].append([])
            for h, head in enumerate(row):
                g = h // (heads // groups)
                scores = [dot(head, ks[t][g]) * scale for t in seen]
                weights = softmax(scores if sink is None else [*scores, sink[h]])[: len(seen)]
                out[-1][-1].append([dot(weights, [vs[t][g][d] for t in seen]) for d in range(value_width)])
    return out


def exp_or_zero(x: float) -> float:
    return 0.0 if x == -math.inf else math.exp(x)


def plain_attention_block(out, lse, q, k, v, scale, ahead, window, begins, fresh):
    """What was there is one key more, with the weight exp(lse)."""
    if begins:
        begins = [[first + ahead for first in row] for row in begins]
    heads, groups, value_width = len(q[0][0]), len(k[0][0]), len(v[0][0][0])
    for b, s, h in product(range(len(q)), range(len(q[0])), range(heads)):
        g = h // (heads // groups)
        seen = seen_keys(s, len(k[b]), ahead, window, begins[b][s] if begins else 0)
        weights = [math.exp(dot(q[b][s][h], k[b][t][g]) * scale) for t in seen]
        before = exp_or_zero(lse[b][h][s])
        total = math.fsum([*weights, before])
        old = [0.0] * value_width if fresh else out[b][s][h]
        values = [dot(weights, [v[b][t][g][d] for t in seen]) + before * old[d] for d in range(value_width)]
        out[b][s][h] = [x / (total or 1.0) for x in values]
        lse[b][h][s] = math.log(total) if total else -math.inf
    return out, lse, q, k, v


def plain_attention_block_backward(dq, dk, dv, delta, dy, q, k, v, y, lse, scale, ahead, window, begins, fresh):
    if begins:
        begins = [[first + ahead for first in row] for row in begins]
    heads, groups = len(q[0][0]), len(k[0][0])
    for b, s, h in product(range(len(q)), range(len(q[0])), range(heads)):
        head, g = q[b][s][h], h // (heads // groups)
        if fresh:
            dq[b][s][h] = [0.0] * len(head)
            delta[b][h][s] = dot(dy[b][s][h], y[b][s][h])
        for t in seen_keys(s, len(k[b]), ahead, window, begins[b][s] if begins else 0):
            p = math.exp(dot(head, k[b][t][g]) * scale - lse[b][h][s])
            ds = p * (dot(dy[b][s][h], v[b][t][g]) - delta[b][h][s]) * scale
            for d in range(len(head)):
                dq[b][s][h][d] += ds * k[b][t][g][d]
                dk[b][t][g][d] += ds * head[d]
            for d in range(len(v[b][t][g])):
                dv[b][t][g][d] += p * dy[b][s][h][d]
    return dq, dk, dv, delta, dy, q, k, v, y, lse


def plain_cached_attention(out, q, k, v, keys, values, position, begin, scale, sink=None):
    """The slots as the positions they hold, from 0 on: what comes behind is ordinary attention of the last position."""
    now, slots, shared = position[0], len(keys[0]), values is None
    for b in range(len(q)):
        keys[b][now % slots] = k[b]
        if not shared:
            values[b][now % slots] = v[b]
        seen = [p % slots for p in range(max(begin[b], now - slots + 1), now + 1)]
        k_seen = [keys[b][slot] for slot in seen]
        v_seen = [[row[: len(out[b][0])] for row in keys[b][s]] if shared else values[b][s] for s in seen]
        ((out[b],),) = plain_attention([[q[b]]], [k_seen], [v_seen], scale, 0, sink)
    return [x for x in (out, q, k, v, keys, values, sink) if x is not None]


def plain_rmsnorm(x, w, eps):
    if isinstance(x[0], list):
        return [plain_rmsnorm(row, w, eps) for row in x]
    root = math.sqrt(dot(x, x) / len(x) + eps)
    return [a / root * b for a, b in zip(x, w, strict=True)]


def plain_swiglu(gate_up, scale):
    factors = [1.0] * len(gate_up) if scale is None else scale
    return [
        [g / (1 + math.exp(-g)) * u * factor for g, u in zip(*row, strict=True)]
        for row, factor in zip(gate_up, factors, strict=True)
    ]


def plain_clamped_swiglu(gate_up, scale, limit):
    def one(gate: float, up: float) -> float:
        gate, up = min(gate, limit), max(-limit, min(up, limit))
        return (up + 1) * gate / (1 + math.exp(-1.702 * gate))

    factors = [1.0] * len(gate_up) if scale is None else scale
    return [[one(*both) * f for both in zip(*row, strict=True)] for row, f in zip(gate_up, factors, strict=True)]


PLAIN_FUNCTIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def plain_mlp_activation(h, scale, kind):
    function = PLAIN_FUNCTIONS[kind.function]
    rows = [list(map(function, row[0] if kind.gated else row)) for row in h]
    if kind.gated:
        rows = [[a * up for a, up in zip(row, both[1], strict=True)] for row, both in zip(rows, h, strict=True)]
    factors = [1.0] * len(h) if scale is None else scale
    return [[x * factor for x in row] for row, factor in zip(rows, factors, strict=True)]


def plain_expert_bias(y, bias, offsets, gate=None):
    expert_of = [next(e for e, end in enumerate(offsets) if r < end) for r in range(len(y))]
    factors = [1.0] * len(y) if gate is None else gate
    return [
        [a + b * factor for a, b in zip(row, bias[e], strict=True)]
        for row, e, factor in zip(y, expert_of, factors, strict=True)
    ]


def plain_rope(x, angles):
    cos, sin = (table.expand(len(x), -1, -1).tolist() for table in angles)

    def turned(head: list[float], b: int, s: int) -> list[float]:
        half = len(head) // 2
        turn = [complex(head[i], head[i + half]) * complex(cos[b][s][i], sin[b][s][i]) for i in range(half)]
        return [z.real for z in turn] + [z.imag for z in turn]

    return [[[turned(head, b, s) for head in heads] for s, heads in enumerate(row)] for b, row in enumerate(x)]


def in_heads(flat, width):
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def plain_norm_rope(x, w, angles, eps):
    width = len(x[0][0][0])
    normed = [
        [
            plain_rmsnorm(token, w, eps)
            if len(w) == width
            else in_heads(plain_rmsnorm([a for head in token for a in head], w, eps), width)
            for token in row
        ]
        for row in x
    ]
    return plain_rope(normed, angles)


def plain_add_rmsnorm(x, added, w, eps):
    pairs = zip(x, [[0.0] * len(row) for row in x] if added is None else added, strict=True)
    total = [[a + b for a, b in zip(*rows, strict=True)] for rows in pairs]
    return total, plain_rmsnorm(total, w, eps), plain_rmsnorm(total, w, eps)


def plain_embedding(words, w, holes=False):
    return [w[word] if word >= 0 else [0.0] * len(w[0]) for word in words]


def plain_linear(x, layers, recipe=None, adapters=None):
    if isinstance(x[0][0], list):
        return list(zip(*(plain_linear(rows, layers, recipe, adapters) for rows in x), strict=True))
    biased = [(w, b or [0.0] * len(w)) for w, b in layers]
    weights = [(plain_adapted(w, adapter), b) for (w, b), adapter in zip(biased, adapters or [None] * 9, strict=False)]
    return [[[dot(row, v) + c for v, c in zip(w, b, strict=True)] for row in x] for w, b in weights]


def plain_adapted(w, adapter):
    """W + s B A."""
    if adapter is None:
        return w
    a, b, scale = adapter
    columns = transposed(a)
    return [
        [v + scale * dot(low, column) for v, column in zip(row, columns, strict=True)]
        for low, row in zip(b, w, strict=True)
    ]


def plain_grouped_linear(x, w, ends):
    return plain_grouped_gemm(x, w, ends)


def plain_router_logits(h, w):
    return [[dot(token, expert) for expert in w] for token in h]


def plain_router_topk(logits, bias, how, imposed=None, span=None):
    probs, ids, shares, squares = [], [], [], []
    for number, row in enumerate(logits):
        scores = [1 / (1 + math.exp(-x)) for x in row] if how.score == "sigmoid" else softmax(row)
        shares.append([x / math.fsum(scores) for x in scores])
        worth = [a + b for a, b in zip(row if how.score == "softmax_chosen" else scores, bias, strict=True)]
        best = best_experts(worth, how) if imposed is None else imposed[number]
        there = [e for e in best if e >= 0]
        if how.score == "softmax_chosen":
            weights = dict(zip(there, softmax([row[e] for e in there]) if there else [], strict=True))
        else:
            totals = {"chosen": math.fsum(scores[e] for e in there), "all": math.fsum(scores), "none": 1.0}
            weights = {e: scores[e] / totals[how.normalize] for e in there}
        probs.append([weights.get(e, 0.0) * how.scale for e in best])
        ids.append(best)
        squares.append(math.log(math.fsum(math.exp(x) for x in row)) ** 2)
    sequences, length, first = (span.sequences, span.length, span.first) if span else (1, len(logits), 0)
    mine = [[t for t in range(len(logits)) if (t + first) // length == b] for b in range(sequences)]
    counts = [[sum(ids[t].count(e) for t in of) for e in range(len(bias))] for of in mine]
    summed = [[math.fsum(shares[t][e] for t in of) for e in range(len(bias))] for of in mine]
    return probs, ids, counts, summed, [math.fsum(squares[t] for t in of) for of in mine]


def best_experts(worth, how):
    """The K best, the lower number first among equals, of the groups that are worth most."""
    size = len(worth) // how.groups
    groups = [range(g * size, (g + 1) * size) for g in range(how.groups)]
    count = 2 if how.group_score == "best_two" else 1
    group_worth = [math.fsum(sorted((worth[e] for e in group), reverse=True)[:count]) for group in groups]
    best_groups = sorted(range(how.groups), key=lambda g: (-group_worth[g], g))[: how.groups_chosen]
    allowed = [e for g in best_groups for e in groups[g]]
    return sorted(allowed, key=lambda e: (-worth[e], e))[: how.k]


def plain_cross_entropy(x, w, labels):
    chosen = [(row, label) for row, label in zip(x, labels, strict=True) if label != IGNORE_INDEX]
    return -math.fsum(math.log(softmax([dot(row, word) for word in w])[label]) for row, label in chosen)


def plain_token_losses(x, w, labels):
    words = [softmax([dot(row, word) for word in w]) for row in x]
    return [-math.log(p[label]) if label != IGNORE_INDEX else 0.0 for p, label in zip(words, labels, strict=True)]


def plain_grouped_gemm(x, w, offsets):
    expert_of = [next(e for e, end in enumerate(offsets) if r < end) for r in range(len(x))]
    return [[dot(row, column) for column in w[e]] for row, e in zip(x, expert_of, strict=True)]


def plain_arrange_rows(ids, gates, experts):
    choices = [(e, n, k) for n, row in enumerate(ids) for k, e in enumerate(row)]
    order = sorted(range(len(choices)), key=lambda i: choices[i][0])
    slots = [[order.index(n * len(row) + k) for k in range(len(row))] for n, row in enumerate(ids)]
    ends = [sum(c[0] <= e for c in choices) for e in range(experts)]
    return [choices[i][1] for i in order], slots, [gates[choices[i][1]][choices[i][2]] for i in order], ends


def plain_grouped_gemm_weight(dy, x, offsets):
    begins = [0, *offsets[:-1]]
    return [
        [[math.fsum(dy[r][n] * x[r][d] for r in range(a, b)) for d in range(len(x[0]))] for n in range(len(dy[0]))]
        for a, b in zip(begins, offsets, strict=True)
    ]


def plain_gather_rows(source, index, slots, holes):
    return [source[i] if i >= 0 else [0.0] * len(source[0]) for i in index]


def plain_spread_rows(source, index, slots, ends):
    return plain_gather_rows(source, index, slots, True)


def plain_announce_choices(ids, weights, place, sender, kept, positions, weight_rooms, counts):
    for room in weight_rooms:
        room[sender][: len(weights)] = weights
    return [weights, *weight_rooms]


def plain_arrange_arrivals(positions, weights, counts, shape, overflowed):
    """Tokens one by one, each with its number on every rank; then the rows of one expert after the other."""
    ranks = len(positions) // shape.etp
    tokens, rows_of_experts, sent = [0] * ranks, [[] for _ in range(shape.held)], []
    for sender, lines in enumerate(positions):
        for t, line in enumerate(lines):
            slots = [-1] * ranks
            for rank in {p // shape.held for p in line if p >= 0}:
                slots[rank] = tokens[rank] if tokens[rank] < shape.arriving else -1
                tokens[rank] += 1
            if sender == shape.sender and t < shape.tokens:
                sent.append([slots[rank] for rank in range(ranks) for _ in range(shape.etp)])
            for k, p in enumerate(line):
                if p >= 0 and p // shape.held == shape.rank:
                    rows_of_experts[p % shape.held].append((slots[shape.rank], k, weights[sender][t][k]))
    index, weight, ends = [-1] * shape.rows, [0.0] * shape.rows, []
    links = [[-1] * len(positions[0][0]) for _ in range(shape.arriving)]
    begin = 0
    for rows in rows_of_experts:
        for row, (n, k, w) in enumerate(rows, begin):
            if row < shape.rows and n >= 0:
                index[row], weight[row], links[n][k] = n, w, row
        begin += shape.each or -(-len(rows) // shape.multiple) * shape.multiple
        ends.append(min(begin, shape.rows))
    return [index, links, weight, ends, sent, [blocks[0][-1] for blocks in counts]]


def plain_push_peer_rows(x, slots, rooms, turn, chosen=None):
    for line, rows in zip(slots, x, strict=True):
        for rank, (room, slot) in enumerate(zip(rooms, line, strict=True)):
            number = chosen[rank] if chosen and chosen[rank] >= 0 else turn
            if slot >= 0:
                room[number][slot] = rows
    return [x, *rooms]


def plain_sum_rows_into(y, slots, rooms, rank):
    room = rooms[rank]
    for n, line in enumerate(slots):
        room[n] = [sum(y[slot][c] for slot in line if slot >= 0) for c in range(len(room[n]))]
    return [y, *rooms]


def plain_write_choices_into(x, slots, rooms, rank):
    for n, line in enumerate(slots):
        rooms[rank][n] = [x[slot] if slot >= 0 else 0.0 for slot in line]
    return [x, *rooms]


def plain_sum_peer_rows(rooms, slots):
    rows = [[room[slot] for room, slot in zip(rooms, line, strict=True) if slot >= 0] for line in slots]
    width = len(rooms[0][0])
    return [[sum(row[c] for row in found) for c in range(width)] for found in rows]


def plain_multiply_arrivals(x, gate_up, weight, index, ends, slots, rooms, exchange):
    """Tokens of the other ranks are there; each row then goes through its expert by itself."""
    arrived = rooms[exchange.me][exchange.turn]
    for line, row in zip(slots, x, strict=True):
        if line[exchange.me] >= 0:
            arrived[line[exchange.me]] = row
    both, activated = [], []
    for r, (n, w) in enumerate(zip(index, weight, strict=True)):
        of_expert = gate_up[sum(end <= r for end in ends)]
        gate, up = ([sum(a * b for a, b in zip(line, arrived[n], strict=True)) for line in half] for half in of_expert)
        both.append([gate, up])
        activated.append([g / (1 + math.exp(-g)) * u * w for g, u in zip(gate, up, strict=True)])
    return [both, activated]


def plain_return_products(a, down, index, slots, ends, rooms, exchange):
    """Of what is sent, this rank reads what it sends to itself; results of the other ranks are there."""
    own = rooms[exchange.me][exchange.turn]
    ends_P, shift, back = (x.tolist() for x in exchange.pieces)
    blocks = len(ends_P) // len(rooms)
    y = []
    for r, row in enumerate(a):
        lines = down[sum(end <= r for end in ends)]
        y.append([sum(p * q for p, q in zip(line, row, strict=True)) for line in lines])
    for n, line in enumerate(slots):
        sender = sum(n >= end for end in ends_P[blocks - 1 :: blocks])
        if sender == exchange.me:
            own[n + shift[sender]] = [sum(y[slot][d] for slot in line if slot >= 0) for d in range(len(down[0]))]
    return [[sum(own[row][d] for row in line if row >= 0) for d in range(len(down[0]))] for line in back]


def plain_multiply_gathered(x, weights, rooms, exchange):
    """Rows of the other ranks are there."""
    rows = [*rooms[exchange.me]]
    rows[exchange.rows_of(exchange.me)] = x
    return [[[dot(row, line) for line in weight] for row in rows] for weight in weights]


def plain_scatter_products(inputs, weights, rooms, exchange):
    """What the other ranks have made for this one is there, by rank."""
    me, ranks = exchange.me, len(exchange.shards)
    first, most = sum(exchange.shards[:me]), max(exchange.shards)
    y = []
    for t in range(exchange.shards[me]):
        own = [[dot(x[first + t], line) for line in w] for x, w in zip(inputs, weights, strict=True)]
        others = [rooms[me][rank * most + t] for rank in range(ranks) if rank != me]
        y.append([math.fsum(column) for column in zip(*own, *others, strict=True)])
    return y


def plain_project_to_heads(x, weights, rooms, exchange):
    """Heads of the other ranks' rows are there, layers side by side."""
    me, ranks = exchange.me, len(exchange.shards)
    first, results = 0, []
    for weight in weights:
        share = len(weight) // ranks
        rows = [row[first : first + share] for row in rooms[me]]
        lines = weight[me * share : me * share + share]
        rows[exchange.rows_of(me)] = [[dot(row, line) for line in lines] for row in x]
        results.append(rows)
        first += share
    return results


def plain_project_from_heads(inputs, weights, rooms, exchange):
    """Heads of the other ranks are there, for each layer those of all ranks side by side."""
    me, ranks = exchange.me, len(exchange.shards)
    begin, y = sum(exchange.shards[:me]), []
    for t in range(exchange.shards[me]):
        row, first = list(rooms[me][t]), 0
        for x in inputs:
            share = len(x[0])
            row[first + me * share : first + me * share + share] = x[begin + t]
            first += ranks * share
        y.append([dot(row, [value for w in weights for value in w[n]]) for n in range(len(weights[0]))])
    return y


def plain_sum_rows(y, index, slots, holes):
    totals = [[0.0] * len(y[0]) for _ in slots]
    for row, n in ((row, n) for row, n in zip(y, index, strict=True) if n >= 0):
        totals[n] = [a + b for a, b in zip(totals[n], row, strict=True)]
    return totals


def plain_expert_mlp(source, gate_up, down, weight, index, slots, offsets, holes):
    x = plain_gather_rows(source, index, slots, holes)
    gate, up = (plain_grouped_gemm(x, [pair[i] for pair in gate_up], offsets) for i in (0, 1))
    inner = plain_swiglu([list(pair) for pair in zip(gate, up, strict=True)], weight)
    return plain_grouped_gemm(inner, down, offsets)


def plain_adamw(w, g, m, v, weights, scale, scalars, options):
    (step, lr, *_), (beta1, beta2, eps, decay, *_) = scalars, options
    given, g = g, [scale * a for a in g]
    m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
    v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
    moves = [a / (1 - beta1**step) / (math.sqrt(b / (1 - beta2**step)) + eps) for a, b in zip(m, v, strict=True)]
    return [a - lr * decay * a - lr * move for a, move in zip(w, moves, strict=True)], given, m, v, scale, scalars


def plain_adamw_blocks(w, g, m, v, weights, scale, scalars, options, first, forward, transposed, *rest):
    """fp64, in which no weights lie beside the main ones."""
    *_, rule, _ = rest
    state = plain_adamw(w, g, m, v, weights, scale, scalars, options)
    numbers = iter(state[0])
    matrices = [[[next(numbers) for _ in row] for row in matrix] for matrix in forward]
    of_blocks = [plain_quantised_matrix(matrix, "block", rule)[1] for matrix in matrices]
    return *state, of_blocks, [[list(line) for line in zip(*rows, strict=True)] for rows in of_blocks]


def plain_push_rows(x, ends, pool, ring, state, taken, pages):
    """Row by row and element by element; 64 rows to a page."""
    cell = len(pool[0]) // 64
    cells = -(-len(x[0]) // cell)
    needed = -(-ends[-1] // 64) * cells
    if state[0] + needed <= state[1]:
        for number in range(needed):
            page = pool[ring[(state[0] + number) % len(ring)]]
            row, column = number // cells * 64, number % cells * cell
            for place in range(64 * cell):
                r, c = row + place // cell, column + place % cell
                page[place] = x[r][c] if r < ends[-1] and c < len(x[0]) else 0.0
    return x, pool


def plain_pop_rows(x, ends, pool, ring, state, taken, pages, returns):
    cell = len(pool[0]) // 64
    cells = -(-len(x[0]) // cell)
    for r in range(min(len(x), (-(-ends[-1] // 64) + 1) * 64)):
        for c in range(len(x[0])):
            page = pages[r // 64 * cells + c // cell]
            held = r < ends[-1] and page >= 0
            x[r][c] = pool[page][r % 64 * cell + c % cell] if held else 0.0
    return x, pool


def plain_muon_momentum(direction, momentum, g, scale, scalars, options):
    beta, nesterov, _ = options
    mean = [beta * a + (1 - beta) * scale * b for a, b in zip(momentum, g, strict=True)]
    ahead = [beta * a + (1 - beta) * scale * b for a, b in zip(mean, g, strict=True)]
    return ahead if nesterov else mean, mean, g, scale, scalars


def plain_muon_weights(w, weights, orthogonal, matrix_scale, scale, scalars):
    lr, keep, _ = scalars
    moved = [keep * a - lr * matrix_scale * b for a, b in zip(w, orthogonal, strict=True)]
    return moved, orthogonal, scale, scalars


def plain_add_squares(total, *flats):
    return total + math.fsum(dot(x, x) for x in flats), *flats


def plain_decode_moment(values, codes, scales, is_second):
    levels = 255 if is_second else 127
    decoded = [math.copysign((c / levels) ** 4, c) * scales[i // 128] for i, c in enumerate(codes)]
    return [x * x for x in decoded] if is_second else decoded, scales


def plain_add_in_blocks(codes, scales, x, adds):
    """Scales; codes are integers."""
    held, _ = plain_decode_moment(None, codes, scales, False)
    total = [a + b * adds for a, b in zip(x, held, strict=True)]
    return [max(map(abs, total[i : i + 128])) for i in range(0, len(total), 128)], x


def plain_largest_logit(q, k, scale, window, begins, ahead):
    scale = scale or len(q[0][0][0]) ** -0.5
    ahead = len(k[0]) - len(q[0]) if ahead is None else ahead
    heads, group = len(q[0][0]), len(q[0][0]) // len(k[0][0])
    largest = [-math.inf] * heads
    for b, h in product(range(len(q)), range(heads)):
        for s, key in product(range(len(q[b])), range(len(k[b]))):
            distance = s + ahead - key
            begin = begins[b][s] if begins is not None else 0
            if distance < 0 or (window and distance >= window) or key < begin:
                continue
            largest[h] = max(largest[h], scale * dot(q[b][s][h], k[b][key][h // group]))
    return largest


def plain_newton_schulz(matrices, coefficients):
    return [plain_orthogonalised(x, coefficients) for x in matrices]


def plain_orthogonalised(x, coefficients):
    norm = math.sqrt(math.fsum(dot(row, row) for row in x))
    x = [[value / norm for value in row] for row in x]
    for a, b, c in coefficients:
        gram = plain_product(x, transposed(x))
        once, twice = plain_product(gram, x), plain_product(gram, plain_product(gram, x))
        rows = zip(x, once, twice, strict=True)
        x = [[a * p + b * q + c * r for p, q, r in zip(*row, strict=True)] for row in rows]
    return x


def plain_product(left, right):
    return [[dot(row, column) for column in transposed(right)] for row in left]


def plain_row_tiles(ends, rows):
    tiles, first_tiles = [], []
    for e, (begin, end) in enumerate(pairwise([0, *ends])):
        first_tiles.append(len(tiles))
        tiles += [(e, row, min(128, end - row), 128 * len(tiles) + row - begin) for row in range(begin, end, 128)]
    count, last = len(tiles), len(ends) - 1
    while len(tiles) < rows // 128 + len(ends):  # tiles without rows continue the last expert
        begin = ends[-2] if last else 0
        tiles.append((last, begin + 128 * (len(tiles) - first_tiles[last]), 0, 128 * len(tiles)))
    return ends, tiles, [count], first_tiles


def plain_padded_tiles(source, tiles, index=None, padding=0.0):
    """Of each tile its 128 rows."""
    nothing = [padding] * len(source[0])
    result = []
    for _, row, real, _ in tiles.tiles_M4.tolist():
        numbers = [r if index is None else index[r] for r in range(row, row + real)]
        rows = [source[n] if n >= 0 else nothing for n in numbers]
        result.append(rows + [nothing] * (128 - real))
    return result


def transposed(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def plain_tile_maxima(source, tiles, index=None, rows=True):
    padded = plain_padded_tiles(source, tiles, index)
    row_maxima = [max(map(abs, row)) for rows in padded for row in rows]
    columns = [[max(map(abs, column)) for column in transposed(rows)] for rows in padded]
    of_columns = [[rounded_to_fp32(x) for x in line] for line in columns]
    return [[rounded_to_fp32(x) for x in row_maxima], of_columns] if rows else [of_columns]


def plain_quantised_line(line, given, rule):
    """Bytes and scales of a line in blocks of 128, or with the scale given."""
    line = [rounded_to_fp32(x) for x in line]
    blocks = [line] if given is not None else [line[i : i + 128] for i in range(0, len(line), 128)]
    name = rule.format.name
    scales = [scale_of_block(block, name, rule.power_of_two) if given is None else given for block in blocks]
    pairs = zip(blocks, scales, strict=True)
    return [byte for block, scale in pairs for byte in bytes_of_block(block, scale, name)], scales


def plain_quantise_tiles(source, tiles, rule, rows=None, columns=None, index=None):
    padded = plain_padded_tiles(source, tiles, index)
    outputs = []
    if rows is not None:
        lines = [row for of_tile in padded for row in of_tile]
        given = [None] * len(lines) if rows == "block" else rows
        outputs += transposed(plain_quantised_line(*both, rule) for both in zip(lines, given, strict=True))
    if columns is not None:
        width = range(len(source[0]))
        given = [[None] * len(width) for _ in padded] if columns == "block" else columns
        tiles_of_columns = [transposed(of_tile) for of_tile in padded]
        pairs = zip(tiles_of_columns, given, strict=True)
        done = [[plain_quantised_line(lines[d], scales[d], rule) for d in width] for lines, scales in pairs]
        outputs.append([[of_tile[d][0] for d in width] for of_tile in done])
        outputs.append([[[of_tile[d][1][0]] for d in width] for of_tile in done])
    return outputs


def plain_quantise_weight(weights, scales, rule):
    outputs = []
    for matrices in (weights, [transposed(w) for w in weights]):
        done = [plain_quantised_matrix(w, scales, rule) for w in matrices]
        outputs += [[q for q, _ in done], [s for _, s in done]]
    return outputs


def elements_of_share(share, begin, places, dtype):
    """(place in the share, number of its block, value in the model's dtype) of each element of a matrix in a share."""
    for start, (experts, n, d), first_block in places:
        down, across = -(-n // 128), -(-d // 128)
        for number, (e, row, column) in enumerate(product(range(experts), range(n), range(d))):
            if begin <= start + number < begin + len(share):
                at = start + number - begin
                block = first_block + (e * down + row // 128) * across + column // 128
                yield at, block, rounded_to_fp32(share[at]) if dtype == torch.float32 else nearest_bf16(share[at])


def nearest_bf16(x):
    """Ties away from zero."""
    bits = struct.unpack("<i", struct.pack("<f", x))[0] + 0x8000
    return struct.unpack("<f", struct.pack("<i", bits & -65536))[0]


def plain_share_maxima(share, begin, places, dtype):
    _, (experts, n, d), first_block = places[-1]
    maxima = [0.0] * (first_block + experts * -(-n // 128) * -(-d // 128))
    for _, block, value in elements_of_share(share, begin, places, dtype):
        maxima[block] = max(maxima[block], abs(value))
    return [struct.unpack("<i", struct.pack("<f", x))[0] for x in maxima]


def plain_cast_share(share, begin, places, scales, rule, dtype):
    values = [0] * len(share)
    for at, block, value in elements_of_share(share, begin, places, dtype):
        (values[at],) = bytes_of_block([value], scales[block], rule.format.name)
    return [values]


def plain_transpose_values(matrices):
    return [[transposed(w) for w in matrices]]


def plain_quantised_matrix(w, scales, rule):
    tall, wide = {"block": (128, 128), "expert": (len(w), len(w[0])), "channel": (1, len(w[0]))}[scales]
    quantised, of_blocks = [], []
    for n in range(0, len(w), tall):
        rows = [[rounded_to_fp32(x) for x in row] for row in w[n : n + tall]]
        starts = range(0, len(w[0]), wide)
        blocks = [[x for row in rows for x in row[d : d + wide]] for d in starts]
        line = [scale_of_block(block, rule.format.name, rule.power_of_two) for block in blocks]
        of_blocks.append(line)
        for row in rows:
            pairs = zip(starts, line, strict=True)
            parts = [bytes_of_block(row[d : d + wide], scale, rule.format.name) for d, scale in pairs]
            quantised.append([byte for part in parts for byte in part])
    return quantised, of_blocks


def plain_gather_tiles(values, scales, tiles, index=None):
    as_bytes = [[nearest_byte(x, "e4m3") for x in row] for row in values]
    padded = plain_padded_tiles(as_bytes, tiles, index), plain_padded_tiles(scales, tiles, index, padding=1.0)
    return [[row for rows in of_tiles for row in rows] for of_tiles in padded]


def plain_wide_scales(maxima, tiles, kind, rule):
    rows, columns = (None if x is None else x.tolist() for x in maxima)
    experts = tiles.tiles_M4[:, 0].tolist()
    scale_of = partial(scale_of_block, name=rule.format.name, power_of_two=rule.power_of_two)
    of_expert = [[line for line, of in zip(columns, experts, strict=True) if of == e] for e in experts]
    if kind == "row":
        lines = [[scale_of(column) for column in transposed(same)] for same in of_expert]
        return [lines] if rows is None else [[scale_of([x]) for x in rows], lines]
    shared = [columns for _ in experts] if kind == "tensor" else of_expert
    scales = [scale_of([x for line in same for x in line]) for same in shared]
    return [[s] * 128 for s in scales], [[s] * len(columns[0]) for s in scales]


def plain_quantise_delayed(source, tiles, rule, scales, rows, columns, index=None):
    experts = tiles.tiles_M4[:, 0].tolist()
    of_rows, of_columns = (x.tolist() for x in scales)
    row_scales = [of_rows[e][0] for e in experts for _ in range(128)] if rows else None
    column_scales = [of_columns[e] * (len(source[0]) // len(of_columns[e])) for e in experts] if columns else None
    copies = plain_quantise_tiles(source, tiles, rule, row_scales, column_scales, index)
    _, maxima = plain_tile_maxima(source, tiles, index)
    return [*copies, maxima, plain_saturated(source, tiles, rule.format, row_scales, column_scales, index)]


def plain_note_maxima(maxima, tiles, experts, channels=None):
    tiles_of = [[m for m, tile in enumerate(tiles.tiles_M4.tolist()) if tile[0] == e] for e in range(len(experts))]
    most = [[max(column) for column in transposed([maxima[m] for m in of])] for of in tiles_of]
    raised = [maxima, [max(before, *line) for before, line in zip(experts, most, strict=True)]]
    if channels is None:
        return raised
    return [*raised, [[*map(max, before, line)] for before, line in zip(channels, most, strict=True)]]


def plain_saturated(source, tiles, format, rows=None, columns=None, index=None):
    beyond = {"e4m3": 448 + 32 / 2, "e5m2": 57344 + 8192 / 2}[format.name]
    count = 0
    for m, of_tile in enumerate(plain_padded_tiles(source, tiles, index)):
        for r, row in enumerate(of_tile):
            for d, x in enumerate(row):
                scales = [rows and rows[128 * m + r], columns and columns[m][d]]
                inverse = [rounded_to_fp32(1 / s) for s in scales if s is not None]
                count += sum(abs(rounded_to_fp32(rounded_to_fp32(x) * factor)) > beyond for factor in inverse)
    return [count]


def plain_rounding_figures(source, index, copy):
    values, scales = copy.values_BRC.double().tolist(), copy.scales_BRK.double().tolist()
    seen = []  # of every value other than zero: the value, its byte, its scale
    for p, n in enumerate(index):
        matrix, row = divmod(p, len(values[0]))
        for d, x in enumerate(source[n] if n >= 0 else []):
            if x:
                of_row = scales[matrix][row]
                scale = of_row[d] if len(of_row) == len(values[matrix][row]) else of_row[d // 128]
                seen.append((x, values[matrix][row][d], scale))
    errors = [(x - byte * scale) ** 2 for x, byte, scale in seen]
    underflowed = sum(byte == 0 for _, byte, _ in seen)
    sums = len(seen), underflowed, math.fsum(errors), math.fsum(x * x for x, _, _ in seen)
    return sums, (max(abs(x) for x, _, _ in seen), max(s for _, _, s in seen), max(-s for _, _, s in seen))


def plain_fp8_sum(a, b, a_scales, b_scales, sums):
    """One number of a product: fp32 sums of blocks of 128."""
    y = 0.0
    for g, k in enumerate(range(0, len(a), 128)):
        block = rounded_to_fp32(dot(a[k : k + 128], b[k : k + 128]))
        if sums == "block":
            y = rounded_to_fp32(rounded_to_fp32(block * a_scales[g]) * b_scales[g] + y)
        else:
            y = rounded_to_fp32(y + block)
    return y if sums == "block" or not a else rounded_to_fp32(rounded_to_fp32(y * a_scales[0]) * b_scales[0])


def plain_padded_product(a, b, tiles, sums):
    """Of each padded row its products with its expert's weights. Padding is zero."""
    values, scales = a.values.double().tolist(), a.scales.tolist()
    weights, of_weights = b.values.double().tolist(), b.scales.tolist()
    outputs = range(len(weights[0]))
    height = 1 if len(of_weights[0]) == len(outputs) else 128  # outputs that share a scale
    result = []
    for e, _, real, first in tiles.tiles_M4.tolist():
        of_outputs = [of_weights[e][min(n // height, len(of_weights[e]) - 1)] for n in outputs]
        triples = list(zip(weights[e], of_outputs, strict=True))
        for p in range(first, first + real):
            result.append([plain_fp8_sum(values[p], w, scales[p], s, sums) for w, s in triples])
        result += [[0.0] * len(outputs)] * (128 - real)
    return result


def plain_rows_of_tiles(padded, tiles):
    return [line for _, _, real, first in tiles.tiles_M4.tolist() for line in padded[first : first + real]]


def plain_fp8_product(a, b, tiles, rows, sums, dtype):
    found = plain_rows_of_tiles(plain_padded_product(a, b, tiles, sums), tiles)
    assert len(found) == rows
    return found


def plain_fp8_weight_product(dy, x, tiles, sums, out, add=False):
    dy, x = ([both.values.double().tolist(), both.scales.tolist()] for both in (dy, x))
    result = []
    for e in range(len(out)):
        used = [m for m, (of, _, real, _) in enumerate(tiles.tiles_M4.tolist()) if of == e and real]
        left, right = (list(zip(*of_expert(side, used), strict=True)) for side in (dy, x))
        result.append([[plain_fp8_sum(a, b, s_a, s_b, sums) for b, s_b in right] for a, s_a in left])
    return [plain_written(result, out, add)]


def of_expert(side, used):
    """Values and scales of an expert's tiles, line by line."""
    values, scales = side
    width = range(len(values[0]))
    of_tiles = [[x for m in used for x in values[m][d]] for d in width]
    return of_tiles, [[scales[m][d][0] for m in used] for d in width]


def plain_written(gradient, out, add):
    if not add:
        return gradient
    if isinstance(gradient, list):
        return [plain_written(a, b, add) for a, b in zip(gradient, out, strict=True)]
    return gradient + out


def plain_tile_weight_product(dy, x, tiles, out, add=False):
    ends = [128 * m for m in [*tiles.first_tile_E.tolist()[1:], tiles.count.item()]]
    return dy, x, plain_written(plain_grouped_gemm_weight(dy, x, ends), out, add)


def plain_padded_weights(weight, tiles):
    return [
        weight[row + i] if i < real else 0.0 for _, row, real, _ in tiles.tiles_M4.tolist() for i in range(128)
    ]  # fmt: skip


def plain_blocks(rows, rule):
    """Bytes and scales of blocks of 128."""
    return transposed(plain_quantised_line(row, None, rule) for row in rows)


def plain_fp8_swiglu_product(x, w, weight, tiles, sums, formats, a_rows=None):
    h = plain_padded_product(x, w, tiles, sums)
    pairs = [[row[: len(row) // 2], row[len(row) // 2 :]] for row in h]
    a = plain_swiglu(pairs, plain_padded_weights(weight, tiles))
    kept = plain_blocks(h, formats.rule) if formats.fp8_kept else [h]
    if a_rows is not None:
        scales = [a_rows[e][0] for e in tiles.tiles_M4[:, 0].tolist() for _ in range(128)]
        rows = [bytes_of_block(row, scale, formats.rule.format.name) for row, scale in zip(a, scales, strict=True)]
        return [*kept, rows, [[scale] for scale in scales]]
    return [*kept, *(plain_blocks(a, formats.rule) if formats.fp8_activation else [a])]


def plain_fp8_dswiglu_product(dy, w, h, weight, tiles, sums, dtype):
    return plain_swiglu_gradients(plain_padded_product(dy, w, tiles, sums), h, weight, tiles)


def plain_quantise_swiglu_gradient(da, h, weight, tiles, rules):
    padded = [row for rows in plain_padded_tiles(da, tiles) for row in rows]
    dh, a, dots = plain_swiglu_gradients(padded, h, weight, tiles)
    by_row = plain_blocks(dh, rules.dh)
    if not rules.fp8_wgrad:
        return [*by_row, dh, a, dots]
    return [*by_row, *plain_column_blocks(dh, rules.dh), *plain_column_blocks(a, rules.a), dots]


def plain_quantise_delayed_gradient(da, h, weight, tiles, scales):
    padded = [row for rows in plain_padded_tiles(da, tiles) for row in rows]
    dh, a, dots = plain_swiglu_gradients(padded, h, weight, tiles)
    rows = tiles.tiles_M4.clone()
    rows[:, 1] = rows[:, 3]  # where they are padded
    in_place = tiles._replace(tiles_M4=rows)
    of_dh = plain_quantise_delayed(dh, in_place, scales.dh_rule, scales.dh, True, True)
    _, _, *of_columns = plain_quantise_delayed(a, in_place, scales.a_rule, scales.a, True, True)
    return [*of_dh, *of_columns, dots]


def plain_column_blocks(rows, rule):
    """Bytes and scales of the columns of each tile."""
    tiles = [rows[i : i + 128] for i in range(0, len(rows), 128)]
    return transposed(plain_blocks(transposed(tile), rule) for tile in tiles)


def plain_swiglu_gradients(da, h, weight, tiles):
    if isinstance(h, Quantised):
        h = (h.values.double() * h.scales.double().repeat_interleave(128, 1)).tolist()
    dh, a, dots = [], [], []
    for row, both, factor in zip(da, h, plain_padded_weights(weight, tiles), strict=True):
        gate, up = both[: len(row)], both[len(row) :]
        sigmoid = [1 / (1 + math.exp(-g)) for g in gate]
        slope = [s * (1 + g * (1 - s)) for g, s in zip(gate, sigmoid, strict=True)]
        silu = [g * s for g, s in zip(gate, sigmoid, strict=True)]
        dgate = [d * factor * u * s for d, u, s in zip(row, up, slope, strict=True)]
        dh.append(dgate + [d * factor * s for d, s in zip(row, silu, strict=True)])
        a.append([s * u * factor for s, u in zip(silu, up, strict=True)])
        dots.append([dot(row, [s * u for s, u in zip(silu, up, strict=True)])])
    return dh, a, plain_rows_of_tiles(dots, tiles)


def plain_line_maxima(x):
    return [max(abs(rounded_to_fp32(value)) for value in row) for row in x]


def scales_of_blocks(matrix, size, squares, scale_of):
    """By block, from the values of the block."""
    height = size if squares else 1
    return [
        [
            scale_of([rounded_to_fp32(value) for row in matrix[i : i + height] for value in row[j : j + size]])
            for j in range(0, len(matrix[0]), size)
        ]
        for i in range(0, len(matrix), height)
    ]


def spread_scales(scales, matrix, size):
    """The scale of every value."""
    height = len(matrix) // len(scales)
    return [[scales[i // height][j // size] for j in range(len(row))] for i, row in enumerate(matrix)]


def is_matrix(x):
    return not isinstance(x[0][0], list)


def exponent_byte(values, rounding):
    """E8M0 of a block."""
    amax = max(map(abs, values))
    if rounding == "down":
        return math.frexp(amax)[1] - 1 - 8 + 127
    fraction, exponent = math.frexp(rounded_to_fp32(amax * rounded_to_fp32(1 / 448)))
    return exponent + 127 - (fraction == 0.5)


def columns_of_blocks(x, source, height):
    """Columns of each block of rows; -1: a row of zeros."""
    rows = [x[place] if place >= 0 else [0.0] * len(x[0]) for place in source]
    return [transposed(rows[first : first + height]) for first in range(0, len(rows), height)]


def plain_quantise_mx(x, rounding="up", squares=False, source=None):
    if source is not None:
        return plain_quantise_mx(columns_of_blocks(x, source, 32), rounding)
    if not is_matrix(x):
        return transposed(plain_quantise_mx(matrix, rounding, squares) for matrix in x)
    scales = scales_of_blocks(x, 32, squares, partial(exponent_byte, rounding=rounding))
    lines = zip(x, spread_scales(scales, x, 32), strict=True)
    values = [
        [nearest_byte(rounded_to_fp32(v) * 2.0 ** (127 - s), "e4m3") for v, s in zip(*line, strict=True)]
        for line in lines
    ]
    return [values, scales]


def plain_dequantise_mx(values, scales, dtype, transposed=False):
    if not is_matrix(values):
        return [plain_dequantise_mx(*both, dtype) for both in zip(values, scales, strict=True)]
    lines = zip(values, spread_scales(scales, values, 32), strict=True)
    return [[value * 2.0 ** (scale - 127) for value, scale in zip(*line, strict=True)] for line in lines]


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e2m1_code(x, chance):
    """The nearest code, or the one that a number in [0, 1) chooses of the two around x."""
    size = min(abs(x), 6.0)
    below = max(code for code in range(8) if E2M1[code] <= size)
    above = min(below + 1, 7)
    if chance is None:
        code = min((below, above), key=lambda code: (abs(E2M1[code] - size), code % 2))
    else:
        part = (size - E2M1[below]) / (E2M1[above] - E2M1[below] or 1)
        code = above if part + chance >= 1 else below
    return code + 8 * (math.copysign(1, x) < 0)


def number_of_16_bits(row, column):
    """Bits of one of two words of a group of four columns."""
    row %= 2**64
    x = (row + column // 4) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15 ^ row >> 32) * 0x846CA68B % 2**32
    x = x ^ x >> 16
    if column % 4 >= 2:
        x = x * 0x9E3779B1 % 2**32
        x = x ^ x >> 15
    return x >> 16 * (column % 2) & 0xFFFF


def nvfp4_matrix(x, amax, chances, squares):
    """Packed codes and bytes of scales; `amax` of each line."""
    encode = [rounded_to_fp32(2688 / rounded_to_fp32(value)) for value in amax]
    sixth = rounded_to_fp32(1 / 6)

    def scale_byte(values, encode):
        return nearest_byte(rounded_to_fp32(max(map(abs, values)) * rounded_to_fp32(encode * sixth)), "e4m3")

    if squares:
        scales = scales_of_blocks(x, 16, True, partial(scale_byte, encode=encode[0]))
    else:
        by_line = [partial(scale_byte, encode=of_line) for of_line in encode]
        scales = [scales_of_blocks([row], 16, False, scale)[0] for row, scale in zip(x, by_line, strict=True)]
    packed = []
    for line, (row, of_values) in enumerate(zip(x, spread_scales(scales, x, 16), strict=True)):
        decode = rounded_to_fp32(1 / encode[line])
        codes = []
        for place, (value, byte) in enumerate(zip(row, of_values, strict=True)):
            factor = rounded_to_fp32(1 / rounded_to_fp32(value_of_byte(byte, "e4m3") * decode))
            scaled = rounded_to_fp32(rounded_to_fp32(value) * factor)
            codes.append(e2m1_code(scaled, None if chances is None else chances(line, place)))
        packed.append([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
    return packed, scales, encode


def plain_quantise_nv(x, amax, random=None, squares=False):
    def chance(row, column):
        number = number_of_16_bits(random.row_R[row].item(), random.column_C[column].item())
        return (number + 0.5) / 2**16

    if is_matrix(x):
        packed, scales, encode = nvfp4_matrix(x, [row[0] for row in amax], random and chance, squares)
        return [packed, scales, encode]
    found = []
    for number, (matrix, ((of_matrix,),)) in enumerate(zip(x, amax, strict=True)):
        width = len(matrix[0])
        flat = random and (lambda line, place, a=number, width=width: chance(a, line * width + place))
        packed, scales, encode = nvfp4_matrix(matrix, [of_matrix] * len(matrix), flat, squares)
        found.append([packed, scales, encode[0]])
    return transposed(found)


def plain_dequantise_nv(packed, scales, dtype, transposed=False):
    if not is_matrix(packed):
        return [plain_dequantise_nv(*both, dtype) for both in zip(packed, scales, strict=True)]
    values = [*E2M1, *(-value for value in E2M1)]
    lines = [[values[code] for byte in row for code in (byte & 15, byte >> 4)] for row in packed]
    spread = spread_scales(scales, lines, 16)
    return [[a * b for a, b in zip(*both, strict=True)] for both in zip(lines, spread, strict=True)]


def plain_round_nv(x, amax, dtype, random=None):
    packed, scales, _ = plain_quantise_nv(x, amax, random)
    numbers = [[value_of_byte(byte, "e4m3") for byte in row] for row in scales]
    return plain_dequantise_nv(packed, numbers, dtype)


def plain_scale_lines(x, factor, dtype):
    return [[value * by for value in row] for row, by in zip(x, factor, strict=True)]


def plain_dequantise_rows(values, scales, format, width, dtype):
    if not values:
        return []
    if not is_matrix(values):
        return [plain_dequantise_rows(*both, format, width, dtype) for both in zip(values, scales, strict=True)]
    found = []
    for row, of_row in zip(values, scales, strict=True):
        block = {"fp8": 128, "mxfp4": 32}.get(format, 64)
        if format == "fp8":
            numbers = row
        elif format == "mxfp4":
            numbers = [[*E2M1, *(-value for value in E2M1)][code] for byte in row for code in (byte & 15, byte >> 4)]
        else:
            numbers = [rounded_to_fp32(NF4_NUMBERS[code]) for byte in row for code in (byte >> 4, byte & 15)]
        if format in ("fp8", "mxfp4"):
            of_row = [2.0 ** (byte - 127) for byte in of_row]
        elif format == "nf4_double":
            blocks = len(numbers) // 64
            tops = struct.unpack(f"<{-(-blocks // 32)}f", bytes(of_row[blocks:]))
            products = [rounded_to_fp32(tops[i // 32] * of_row[i]) for i in range(blocks)]
            of_row = [rounded_to_fp32(value / 255) for value in products]
        found.append([rounded_to_fp32(numbers[i] * of_row[i // block]) for i in range(width)])
    return [[float(torch.tensor(x, dtype=dtype)) for x in row] for row in found]


def payload_of_blocks(blocks, rule):
    """Bytes of the values of blocks, and of their scales."""
    scales = [scale_of_block(values, rule.format.name, rule.power_of_two) for values in blocks]
    found = [bytes_of_block(values, scale, rule.format.name) for values, scale in zip(blocks, scales, strict=True)]
    return found, [list(struct.pack("<f", scale)) for scale in scales]


def plain_rows_to_payload(x, rule, block=128):
    payload = []
    for row in x:
        blocks = [list(map(rounded_to_fp32, row[i : i + block])) for i in range(0, len(row), block)]
        values, scales = payload_of_blocks(blocks, rule)
        payload.append([byte for part in values + scales for byte in part])
    return payload


def plain_sum_payload_rows(total, payloads, format, block=128):
    def value(row, d):
        (scale,) = struct.unpack("<f", bytes(row[width + d // block * 4 :][:4]))
        return rounded_to_fp32(value_of_byte(row[d], format.name) * scale)

    width = len(total[0])
    return [[[sum(value(part[n], d) for part in payloads) for d in range(width)] for n in range(len(total))]]


def plain_channels_to_payload(x, rule):
    groups = [transposed(x[i : i + 128]) for i in range(0, len(x), 128)]
    found = [payload_of_blocks([list(map(rounded_to_fp32, c)) for c in channels], rule) for channels in groups]
    values = [byte for channels, _ in found for row in transposed(channels) for byte in row]
    return values + [byte for _, scales in found for scale in scales for byte in scale]


def plain_payloads_to_channels(out, payloads, format):
    rows, width = len(out[0]), len(out[0][0])

    def value(part, n, d):
        (scale,) = struct.unpack("<f", bytes(part[rows * width + (n // 128 * width + d) * 4 :][:4]))
        return rounded_to_fp32(value_of_byte(part[n * width + d], format.name) * scale)

    return [[[[value(part, n, d) for d in range(width)] for n in range(rows)] for part in payloads]]


def plain_hadamard_blocks(x, source):
    blocks = [[plain_transform(column) for column in block] for block in columns_of_blocks(x, source, 16)]
    return blocks, [max(abs(rounded_to_fp32(value)) for column in block for value in column) for block in blocks]


def plain_transform(block):
    """Sylvester's matrix by parities, with sums in fp32 by halves."""
    y = [rounded_to_fp32(value) * sign for value, sign in zip(block, SIGNS, strict=True)]
    for half in (1, 2, 4, 8):
        pairs = [(y[i ^ half], -y[i]) if i & half else (y[i], y[i ^ half]) for i in range(16)]
        y = [rounded_to_fp32(a + b) for a, b in pairs]
    return [value / 4 for value in y]


PLAIN = {name.removeprefix("plain_"): value for name, value in list(globals().items()) if name.startswith("plain_")}


def count_of_numbers(inputs: Any) -> int:
    """Numbers in the tensors of inputs, those of named tuples too."""
    if isinstance(inputs, torch.Tensor):
        return inputs.numel()
    return sum(map(count_of_numbers, inputs)) if isinstance(inputs, list | tuple) else 0


def has_exact_rules(op: KernelOp) -> bool:
    """Whether each operation and its rounding are stated, so that every number is equal. Figures are sums in any
    order."""
    return ".quantise." in op.reference.__module__ and op.name not in (*FP32_ACTIVATIONS, "rounding_figures")


@pytest.mark.parametrize("op", OPS)
def test_a_reference_equals_its_formula_in_plain_python(op):
    checked = 0
    for case in cases(OPS[op], "cpu", "fp64"):
        inputs = fresh(case, grad=False)
        if count_of_numbers(inputs) > 40_000 or any(case.defined(x).numel() == 0 for x in float_tensors(inputs)):
            continue
        expected = PLAIN[op](*map_tensors(inputs, partial(defined_list, case)))
        out = OPS[op].reference(*inputs)
        changed = [x for x in float_tensors(inputs) if is_float(x)]
        outputs = changed if OPS[op].mutates else flat_outputs(out)
        expected = [expected] if isinstance(out, torch.Tensor) else expected
        for mine, plain in zip(outputs, expected, strict=True):
            mine = case.defined(mine)
            plain = torch.tensor(plain, dtype=torch.float64).view(mine.shape)
            if op in FP32_ACTIVATIONS and mine.dtype == torch.uint8:
                check_share_of_bytes(mine, plain, f"{op}: {case.name}")
                continue
            if has_exact_rules(OPS[op]):
                assert torch.equal(mine.double(), plain), f"{op}: {case.name}"
                continue
            allowed = 1e-6 if op in FP32_ACTIVATIONS else 1e-13
            assert error(mine, plain) < allowed, f"{op}: {case.name}"
        checked += 1
    assert checked >= 2


GROUPED = [(1, 1, "best_two"), (4, 2, "best_two"), (4, 1, "best"), (2, 1, "best_two"), (4, 4, "best")]
WAYS = [  # score and normalize; a rule says that weights of softmax_chosen are normalised over the chosen
    ("softmax_chosen", "chosen"),
    *product(("softmax", "sigmoid"), ("chosen", "all", "none")),
]
SPAN = TokenSpan(3, 3, 1)  # five tokens: two of the first sequence, three of the second, none of the third
IMPOSED = {"chosen": None, "imposed": [[0, 5], [7, 2], [3, -1], [-1, 4], [-1, -1]]}


@pytest.mark.parametrize("imposed", IMPOSED)
@pytest.mark.parametrize(("score", "normalize"), WAYS)
def test_every_way_of_choosing_equals_its_formula_and_its_gradients_those_of_finite_differences(
    score: str, normalize: str, imposed: str
):
    generator = torch.Generator().manual_seed(3)
    logits, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 8), (8,)))
    logits.requires_grad_()
    ids = torch.tensor(IMPOSED[imposed]) if IMPOSED[imposed] else None
    for groups, groups_chosen, group_score in GROUPED:
        how = RouterSpec(2, score, normalize, 2.5, groups, groups_chosen, group_score)
        found = router_topk(logits, 0.3 * bias, how, ids, SPAN)
        expected = plain_router_topk(logits.tolist(), (0.3 * bias).tolist(), how, IMPOSED[imposed], SPAN)
        assert [x.tolist() for x in found[1:3]] == list(expected[1:3]), how
        for number in (0, 3, 4):
            plain = torch.tensor(expected[number], dtype=torch.float64)
            assert error(found[number].detach(), plain) < 1e-12, how
        floats = lambda x, how=how: itemgetter(0, 3, 4)(router_topk(x, 0.3 * bias, how, ids, SPAN))  # noqa: E731
        assert torch.autograd.gradcheck(floats, logits), how


@pytest.mark.parametrize("score", ["softmax", "softmax_chosen", "sigmoid"])
def test_the_bias_changes_who_is_chosen_and_never_with_what_weight(score: str):
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
    how = RouterSpec(2, score)
    plain, moved = (
        router_topk(logits, torch.tensor(bias, dtype=torch.float64), how) for bias in ([0.0] * 4, [0.0, 0.0, 0.0, 9.0])
    )
    assert plain[1].tolist() == [[0, 1]]
    assert moved[1].tolist() == [[3, 0]]
    assert torch.equal(moved[0], router_topk(logits, torch.zeros(4, dtype=torch.float64), how, moved[1])[0])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("score", ["softmax", "softmax_chosen", "sigmoid"])
def test_of_equal_experts_and_equal_groups_the_lower_number_is_chosen(score: str, groups: int):
    how = RouterSpec(2, score, groups=groups, groups_chosen=max(1, groups // 2))
    ids = router_topk(torch.zeros(3, 8), torch.zeros(8), how)[1]
    assert ids.tolist() == [[0, 1]] * 3


def test_the_sink_takes_its_share_of_the_softmax_and_gives_nothing():
    attention = OPS["attention"]
    q, k, v = next(c for c in cases(attention, "cpu", "fp64") if c.name.startswith("2x33 ")).inputs[:3]
    for name in ("reference", "sdpa"):  # the others are for a GPU
        run = attention.implementations[name]
        far, none = run(q, k, v, None, 0, torch.full(q.shape[2:3], -1e3, dtype=q.dtype)), run(q, k, v)
        torch.testing.assert_close(far, none, rtol=1e-12, atol=1e-12)
        all_of_it = run(q, k, v, None, 0, torch.full(q.shape[2:3], 1e3, dtype=q.dtype))
        torch.testing.assert_close(all_of_it, torch.zeros_like(none), rtol=0, atol=1e-12)


def test_a_window_as_long_as_the_sequence_hides_nothing():
    attention = OPS["attention"]
    q, k, v = next(c for c in cases(attention, "cpu", "fp64") if c.name.startswith("2x33 ")).inputs[:3]
    for name in ("reference", "sdpa"):  # the others are for a GPU
        run = attention.implementations[name]
        torch.testing.assert_close(run(q, k, v, None, k.shape[1], None), run(q, k, v), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(run(q, k, v, None, k.shape[1] - 1, None), run(q, k, v))

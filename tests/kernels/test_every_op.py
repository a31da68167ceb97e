"""Every op, every implementation that may run, every case: one test for all, so that registering is being tested.

The judge is the op's reference in fp64 on the same inputs, whatever the precision under test. That the references are
right is shown apart: by finite differences, and by formulas written out in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from moefold.kernels.bind import Kernels
from moefold.kernels.catalog import CATALOG
from moefold.kernels.cross_entropy import IGNORED
from moefold.kernels.registry import DTYPES, OPS, Case, Op
from moefold.kernels.rmsnorm import rmsnorm

# Largest |a - b| / |b| against fp64. bf16 keeps 8 bits (4e-3); logits and scores made from rounded products lose a few
# times that.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}
GPU = torch.cuda.is_available()


def cases(op: Op, device: str, dtype: str) -> list[Case]:
    assert op.make_cases is not None, f"{op.name} has no cases"
    return list(op.make_cases(device, DTYPES[dtype]))


def everything(device: str, *dtypes: str) -> Iterator[Any]:
    """(op, implementation, dtype, number of the case) for all that the catalog lets run; made on the CPU, cheaply."""
    capability = torch.cuda.get_device_capability() if device == "cuda" and GPU else (0, 0)
    for op in OPS.values():
        for dtype in dtypes:
            for number, case in enumerate(cases(op, "cpu", dtype)):
                facts = case.facts(device, dtype, capability)
                for name in ["reference", *(c.name for c in CATALOG[op.name] if c.when(facts))]:
                    yield pytest.param(op.name, name, dtype, number, id=f"{op.name}-{name}-{dtype}-{case.name}")


def is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def fresh(inputs: tuple[Any, ...], dtype: torch.dtype | None = None, grad: bool = True) -> list[Any]:
    """Copies that can be changed and differentiated; floats in another precision if asked."""
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_(grad) if is_float(x) else x for x in inputs]


def outcome(function: Callable[..., Any], inputs: list[Any], mutates: bool) -> dict[str, Any]:
    """All that an implementation gives: its outputs and its gradients under random output gradients, or, of an op
    that works in place, the tensors it may have changed."""
    if mutates:
        assert function(*inputs) is None
        return {f"input {i}": x for i, x in enumerate(inputs) if is_float(x)}
    out = function(*inputs)
    outputs = out if isinstance(out, tuple) else (out,)
    differentiable = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in differentiable]
    wanted = [(i, x) for i, x in enumerate(inputs) if is_float(x)]
    gradients = torch.autograd.grad(differentiable, [x for _, x in wanted], directions, allow_unused=True)
    found: dict[str, Any] = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return found | {f"gradient of input {i}": g for (i, _), g in zip(wanted, gradients, strict=True)}


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|, or |a| where b is zero."""
    length = b.norm().item()
    return (a.to(b.dtype) - b).norm().item() / (length or 1.0)


def check(op: Op, implementation: Callable[..., Any], case: Case, dtype: str) -> None:
    """The implementation agrees with the op's reference in fp64, and returns the dtypes the reference returns."""
    mine = outcome(implementation, fresh(case.inputs, grad=not op.mutates), op.mutates)
    plain = outcome(op.reference, fresh(case.inputs, grad=not op.mutates), op.mutates)
    exact = outcome(op.reference, fresh(case.inputs, torch.float64, grad=not op.mutates), op.mutates)
    assert mine.keys() == exact.keys()
    for name, value in mine.items():
        about = f"{op.name}, {dtype}, case '{case.name}', {name}"
        if value is None or exact[name] is None:
            assert value is None, f"{about}: the reference gives none"
            assert exact[name] is None, f"{about}: none"
            continue
        assert value.shape == exact[name].shape, f"{about}: shape {value.shape}; expected {exact[name].shape}"
        assert value.dtype == plain[name].dtype, f"{about}: {value.dtype}; expected {plain[name].dtype}"
        if not value.is_floating_point():
            assert torch.equal(value, exact[name]), about
            continue
        off = error(value, exact[name])
        assert off <= TOLERANCE[dtype], f"{about}: off by {off:.1e} of its length; allowed {TOLERANCE[dtype]:g}"


@pytest.mark.parametrize(("op", "implementation", "dtype", "number"), list(everything("cpu", "fp32", "fp64", "bf16")))
def test_an_implementation_agrees_with_the_reference_in_fp64_forward_and_backward(op, implementation, dtype, number):
    check(OPS[op], OPS[op].implementations[implementation], cases(OPS[op], "cpu", dtype)[number], dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(("op", "implementation", "dtype", "number"), list(everything("cuda", "fp32", "bf16")))
def test_an_implementation_agrees_with_the_reference_on_cuda(op, implementation, dtype, number):
    check(OPS[op], OPS[op].implementations[implementation], cases(OPS[op], "cuda", dtype)[number], dtype)


def same_twice(op: Op, implementation: str, case: Case) -> None:
    function = OPS[op.name].implementations[implementation]
    first, second = (outcome(function, fresh(case.inputs, grad=not op.mutates), op.mutates) for _ in range(2))
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
    assert set(OPS) == set(CATALOG) == {field.name for field in fields(Kernels)}
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


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if not op.mutates])
def test_the_gradients_of_a_reference_are_those_of_finite_differences(op):
    checked = 0
    for case in cases(OPS[op], "cpu", "fp64"):
        inputs = fresh(case.inputs)
        size = sum(x.numel() for x in inputs if is_float(x))
        if any(x.numel() == 0 for x in inputs if is_float(x)) or size > 60_000:
            continue

        def floats(*args: Any) -> tuple[torch.Tensor, ...]:
            out = OPS[op].reference(*args)
            return tuple(y for y in (out if isinstance(out, tuple) else (out,)) if y.requires_grad)

        assert torch.autograd.gradcheck(floats, inputs, fast_mode=size > 400), f"{op}: {case.name}"
        checked += 1
    assert checked >= 2


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    return [p / math.fsum(powers) for p in powers]


def plain_attention(q, k, v):
    heads, groups, width = len(q[0][0]), len(k[0][0]), len(q[0][0][0])
    out = []
    for qs, ks, vs in zip(q, k, v, strict=True):
        out.append([])
        for s, row in enumerate(qs):
            out[-1].append([])
            for h, head in enumerate(row):
                g = h // (heads // groups)
                seen = range(len(ks) - len(qs) + s + 1)  # the queries are the last positions
                weights = softmax([dot(head, ks[t][g]) / math.sqrt(width) for t in seen])
                out[-1][-1].append([dot(weights, [vs[t][g][d] for t in seen]) for d in range(width)])
    return out


def seen_keys(s: int, queries: int, keys: int, causal: bool) -> range:
    return range(keys - queries + s + 1 if causal else keys)


def plain_attention_block(q, k, v, causal):
    heads, groups, width = len(q[0][0]), len(k[0][0]), len(q[0][0][0])
    out, lse = [], []
    for qs, ks, vs in zip(q, k, v, strict=True):
        out.append([])
        lse.append([])
        for s, row in enumerate(qs):
            seen = seen_keys(s, len(qs), len(ks), causal)
            out[-1].append([])
            lse[-1].append([])
            for h, head in enumerate(row):
                g = h // (heads // groups)
                scores = [dot(head, ks[t][g]) / math.sqrt(width) for t in seen]
                weights = softmax(scores)
                out[-1][-1].append([dot(weights, [vs[t][g][d] for t in seen]) for d in range(width)])
                lse[-1][-1].append(math.log(math.fsum(math.exp(x) for x in scores)))
    return out, lse


def plain_attention_block_backward(dy, q, k, v, lse, delta, causal):
    heads, groups, width = len(q[0][0]), len(k[0][0]), len(q[0][0][0])
    dq, dk, dv = (torch.zeros(len(x), len(x[0]), len(x[0][0]), width).tolist() for x in (q, k, v))
    for b, (qs, ks, vs) in enumerate(zip(q, k, v, strict=True)):
        for s, row in enumerate(qs):
            for h, head in enumerate(row):
                g = h // (heads // groups)
                for t in seen_keys(s, len(qs), len(ks), causal):
                    p = math.exp(dot(head, ks[t][g]) / math.sqrt(width) - lse[b][s][h])
                    ds = p * (dot(dy[b][s][h], vs[t][g]) - delta[b][s][h]) / math.sqrt(width)
                    for d in range(width):
                        dq[b][s][h][d] += ds * ks[t][g][d]
                        dk[b][t][g][d] += ds * head[d]
                        dv[b][t][g][d] += p * dy[b][s][h][d]
    return dq, dk, dv


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


def plain_rope(x, cos, sin):
    def turned(head: list[float], s: int) -> list[float]:
        half = len(head) // 2
        turn = [complex(head[i], head[i + half]) * complex(cos[s][i], sin[s][i]) for i in range(half)]
        return [z.real for z in turn] + [z.imag for z in turn]

    return [[[turned(head, s) for head in heads] for s, heads in enumerate(row)] for row in x]


def plain_router_logits(h, w):
    return [[dot(token, expert) for expert in w] for token in h]


def plain_router_topk(logits, bias, k, normalize):
    probs, ids, scores = [], [], [softmax(row) for row in logits]
    for row in scores:
        best = sorted(range(len(row)), key=lambda e: (-(row[e] + bias[e]), e))[:k]
        total = math.fsum(row[e] for e in best) if normalize else 1.0
        probs.append([row[e] / total for e in best])
        ids.append(best)
    return probs, ids, scores


def plain_cross_entropy(x, w, labels):
    chosen = [(row, label) for row, label in zip(x, labels, strict=True) if label != IGNORED]
    return -math.fsum(math.log(softmax([dot(row, word) for word in w])[label]) for row, label in chosen)


def plain_grouped_gemm(x, w, offsets):
    expert_of = [next(e for e, end in enumerate(offsets) if r < end) for r in range(len(x))]
    return [[dot(row, column) for column in w[e]] for row, e in zip(x, expert_of, strict=True)]


def plain_arrange_rows(ids, gates, experts):
    choices = [(e, n, k) for n, row in enumerate(ids) for k, e in enumerate(row)]
    order = sorted(range(len(choices)), key=lambda i: choices[i][0])
    slots = [[order.index(n * len(row) + k) for k in range(len(row))] for n, row in enumerate(ids)]
    ends = [sum(c[0] <= e for c in choices) for e in range(experts)]
    return [choices[i][1] for i in order], slots, [gates[choices[i][1]][choices[i][2]] for i in order], ends


def plain_gather_rows(source, index, slots, holes):
    return [source[i] if i >= 0 else [0.0] * len(source[0]) for i in index]


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


def plain_adamw(w, g, m, v, step, lr, beta1, beta2, eps, decay):
    m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
    v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
    moves = [a / (1 - beta1**step) / (math.sqrt(b / (1 - beta2**step)) + eps) for a, b in zip(m, v, strict=True)]
    return [a - lr * decay * a - lr * move for a, move in zip(w, moves, strict=True)], g, m, v


PLAIN = {name.removeprefix("plain_"): value for name, value in list(globals().items()) if name.startswith("plain_")}


@pytest.mark.parametrize("op", OPS)
def test_a_reference_equals_its_formula_in_plain_python(op):
    checked = 0
    for case in cases(OPS[op], "cpu", "fp64"):
        inputs = fresh(case.inputs, grad=False)
        size = sum(x.numel() for x in inputs if isinstance(x, torch.Tensor))
        if size > 30_000 or any(is_float(x) and x.numel() == 0 for x in inputs):
            continue
        expected = PLAIN[op](*(x.tolist() if isinstance(x, torch.Tensor) else x for x in inputs))
        out = OPS[op].reference(*inputs)
        outputs = [x for x in inputs if is_float(x)] if OPS[op].mutates else out
        both = zip(outputs, expected, strict=True) if isinstance(outputs, tuple | list) else [(outputs, expected)]
        for mine, plain in both:
            assert error(mine, torch.tensor(plain, dtype=torch.float64).view(mine.shape)) < 1e-13, f"{op}: {case.name}"
        checked += 1
    assert checked >= 2

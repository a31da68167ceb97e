"""The fast expert MLP on a GPU: right on any routing, the same every time, and never waiting for the host."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import moefold.kernels.experts
from moefold.bench.layer import LayerShape, moefold_layer
from moefold.kernels.catalog import pick_implementation
from moefold.kernels.experts.expert_mlp import expert_mlp, shuffled_routing
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.facts import Facts, has_triton
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from moefold.layout.gradient_sink import attach_gradient_sink, memory_for_gradient

needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and has_triton()),
    reason="needs a Hopper GPU and Triton",
)

ROUTINGS = {
    "even": [512] * 16,
    "skewed": [4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1, 0, 0],
    "empty experts": [0, 1000, 0, 0, 3000, 0, 0, 96] + [0] * 8,
    "one expert": [0] * 7 + [4096] + [0] * 8,
    "ends inside tiles": [65, 63, 127, 129, 1, 191, 193, 255] * 2,
}


def outcome(name: str, inputs: list[torch.Tensor], rest: tuple, dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().to(dy.dtype).requires_grad_() for x in inputs[:3]] + [inputs[3].detach().requires_grad_()]
    y = expert_mlp.implementations[name](*leaves, *rest)
    y.backward(dy)
    return [y.detach()] + [leaf.grad for leaf in leaves if leaf.grad is not None]


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("d", "f"), [(512, 768), (360, 704), (2880, 72), (136, 2888)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_forward_and_gradients_agree_with_fp32_and_repeat_to_the_bit(routing: str, d: int, f: int):
    """bf16 against fp32 on the same inputs: within one percent, each gradient by itself. More tiles than processors,
    and widths that leave parts of tiles, of halves of them, of chunks and of steps empty."""
    inputs, rest, dy = drawn(ROUTINGS[routing], d, f)
    first, second = (outcome("gluon", inputs, rest, dy.bfloat16()) for _ in range(2))
    exact = outcome("reference", inputs, rest, dy.bfloat16().float())
    for name, got, again, want in zip(("y", "source", "gate_up", "down", "weight"), first, second, exact, strict=True):
        assert torch.equal(got, again), f"{name} differs between two runs"
        off = ((got.float() - want).norm() / want.norm()).item()
        assert off < 1e-2, f"{name} is off by {off:.1e} of its length"


def drawn(counts: list[int], d: int, f: int) -> tuple[list[torch.Tensor], tuple, torch.Tensor]:
    """Tokens, weights, router's weights; the routing; a gradient of the output."""
    torch.manual_seed(0)
    rest = shuffled_routing(counts, 2 if sum(counts) % 2 == 0 else 1, "cuda")
    shapes = {(len(rest[1]), d): 1.0, (len(counts), 2, f, d): 0.04, (len(counts), d, f): 0.04}
    inputs = [torch.randn(*shape, device="cuda").bfloat16() * scale for shape, scale in shapes.items()]
    return [*inputs, torch.rand(sum(counts), device="cuda")], rest, torch.randn(sum(counts), d, device="cuda")


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradients_add_up_where_a_weight_says(routing: str, dtype: torch.dtype):
    """The same sums as without, but unrounded in fp32; a second backward adds the same once more."""
    inputs, rest, dy = drawn(ROUTINGS[routing], 360, 704)
    plain = outcome("gluon", inputs, rest, dy.bfloat16())[2:4]
    leaves = [x.detach().requires_grad_() for x in inputs]
    sums = [torch.zeros_like(x, dtype=dtype) for x in leaves[1:3]]
    for leaf, total in zip(leaves[1:3], sums, strict=True):
        attach_gradient_sink(leaf, lambda dtype: None, lambda total=total: total)
    expert_mlp.implementations["gluon"](*leaves, *rest).backward(dy.bfloat16())
    once = [total.clone() for total in sums]
    expert_mlp.implementations["gluon"](*leaves, *rest).backward(dy.bfloat16())
    for leaf, gradient, first, both in zip(leaves[1:3], plain, once, sums, strict=True):
        assert leaf.grad is None
        assert torch.equal(first.bfloat16(), gradient)
        assert torch.equal(both, 2 * first)


@needs_hopper
@pytest.mark.gpu
def test_backward_has_no_second_pre_activation_and_will_not_run_twice():
    """Beside the gradients it gives, backward needs a padded activation or padded rows, and sums of the router's."""
    counts, d, f = ROUTINGS["even"], 256, 2048
    inputs, rest, dy = drawn(counts, d, f)
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = expert_mlp.implementations["gluon"](*leaves, *rest)
    dy = dy.bfloat16()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(dy, retain_graph=True)
    needed = torch.cuda.max_memory_allocated() - before
    gradients = sum(x.numel() * x.element_size() for x in leaves)
    padded = (sum(counts) + 64 * len(counts)) * f * 2
    assert needed < gradients + 1.2 * padded
    with pytest.raises(RuntimeError, match="second backward through the same experts"):
        y.backward(dy)


@needs_hopper
@pytest.mark.gpu
def test_a_layer_waits_for_nothing_and_its_graph_replays_right_with_other_routing():
    layer = LayerShape(hidden=512, ffn=768, experts=16, top_k=4, tokens=2048)
    forward, module = moefold_layer(layer, "cuda", torch.bfloat16, zipf=False)
    h, d = (torch.randn(layer.tokens, layer.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    h.requires_grad_()

    def step() -> list[torch.Tensor]:
        h.grad = None
        module.zero_grad(set_to_none=True)
        out = forward(h)
        out.backward(d)
        return [out.detach(), *(p.grad for p in (h, *module.parameters()) if p.grad is not None)]

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        h.copy_(torch.randn_like(h))
    graph.replay()
    replayed = [x.clone() for x in captured]
    assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


class PlainLaunches(ModuleType):
    """The launches of the fused kernel in plain torch: its autograd function then runs anywhere. No rows of padding."""

    class RowTilePlan(NamedTuple):
        ends_E: torch.Tensor

        @classmethod
        def of(cls, ends_E: torch.Tensor, rows: int) -> PlainLaunches.RowTilePlan:
            return cls(ends_E)

    def gather_expert_rows(self, source, index, plan):
        return source[index]

    def up_projection(self, x, gate_up, weight, plan):
        h = grouped_gemm(x, gate_up.flatten(1, 2), plan.ends_E).unflatten(-1, (2, -1))
        return h, swiglu(h, weight)

    def down_projection(self, a, down, plan):
        return grouped_gemm(a, down, plan.ends_E)

    def down_projection_dgrad(self, dy, down, h, weight, plan):
        """Writes over h, as the kernel does."""
        with torch.enable_grad():
            inputs = h.clone().requires_grad_(), weight.clone().requires_grad_()
            a = swiglu(*inputs)
        da = grouped_gemm(dy, down.mT, plan.ends_E)
        dh, dweight = torch.autograd.grad(a, inputs, da)
        h.copy_(dh)
        return a.detach(), dweight

    def up_projection_dgrad(self, dh, gate_up, plan):
        return grouped_gemm(dh.flatten(1), gate_up.flatten(1, 2).mT, plan.ends_E)

    def sum_over_slots(self, dx, slots):
        return dx[slots].sum(1)

    def expert_wgrad(self, left, right, like, plan, into=None):
        gradient = grouped_gemm_weight(left, right, plan.ends_E).view(like.shape)
        if into is None:
            return memory_for_gradient(like).copy_(gradient)
        into.add_(gradient)
        return None


@pytest.mark.parametrize("wait", ["now", "later"])
@pytest.mark.parametrize("lands", ["anywhere", "in its place", "in a running sum"])
def test_weight_gradients_of_the_fused_function_come_now_or_later_and_land_where_they_shall(
    monkeypatch: pytest.MonkeyPatch, wait: str, lands: str
):
    launches = "moefold.kernels.experts.grouped_gemm_launch"
    monkeypatch.setitem(sys.modules, launches, PlainLaunches(launches))
    monkeypatch.delattr(moefold.kernels.experts, "grouped_gemm_launch", raising=False)
    case = next(case for case in expert_mlp.cases("cpu", torch.float32) if case.name == "odd, 16 by 24")
    *floats, index, slots, ends, holes = case.inputs
    routing = (index, slots, ends, holes)
    dy = torch.randn(len(index), 16)
    right = outcome("reference", floats, routing, dy)
    leaves = [x.detach().clone().requires_grad_() for x in floats]
    weights, arrived = leaves[1:3], list[torch.Tensor]()
    memory = [torch.zeros_like(weight).flatten() for weight in weights]
    for weight, place in zip(weights, memory, strict=True):
        weight.register_post_accumulate_grad_hook(arrived.append)
        if lands == "in its place":
            attach_gradient_sink(weight, lambda dtype, place=place: place, lambda: None)
        if lands == "in a running sum":
            attach_gradient_sink(weight, lambda dtype: None, lambda place=place: place)
    y = expert_mlp.implementations["gluon"](*leaves, *routing)
    queue: list[DeferredWork] = []
    if wait == "later":
        with deferring_weight_grads(queue):
            y.backward(dy)
        assert len(queue) == 2
        assert not memory[0].any()
        assert weights[0].grad is None
        for work in queue:
            work()
    else:
        y.backward(dy)
    assert {id(weight) for weight in arrived} == {id(weight) for weight in weights}, "hooks ran, gradient or not"
    found = [x.grad for x in leaves]
    if lands == "in a running sum":
        assert found[1:3] == [None, None]
    if lands != "anywhere":
        found[1:3] = [place.view(weight.shape) for place, weight in zip(memory, weights, strict=True)]
    for name, mine, judge in zip(("y", "source", "gate_up", "down", "weight"), [y, *found], right, strict=True):
        torch.testing.assert_close(mine, judge, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("facts", "runs"),
    [
        (Facts("cuda", "bf16", (9, 0), hidden=2048, ffn=768), True),
        (Facts("cuda", "bf16", (9, 0), hidden=2880, ffn=1408), True),  # parts of tiles are empty
        (Facts("cuda", "bf16", (9, 0), hidden=2048, ffn=804), False),  # rows that do not begin at multiples of 16 bytes
        (Facts("cuda", "bf16", (9, 0), hidden=2044, ffn=768), False),
        (Facts("cuda", "fp32", (9, 0), hidden=2048, ffn=768), False),
        (Facts("cuda", "bf16", (8, 0), hidden=2048, ffn=768), False),  # no wgmma
        (Facts("cuda", "bf16", (10, 0), hidden=2048, ffn=768), False),  # other instructions
        (Facts("cpu", "bf16", (0, 0), hidden=2048, ffn=768), False),
        (Facts("cuda", "bf16", (9, 0), hidden=2048, ffn=768, recipe="mxfp8"), False),  # bf16 products only
        (Facts("cuda", "bf16", (9, 0), hidden=2048, ffn=768, recipe="nf4"), True),  # of what blocks stand for
        (Facts("cuda", "bf16", (9, 0), hidden=2048, ffn=768, adapted_experts="lora.rank = 16"), True),
        (Facts("cuda", "bf16", (9, 0), hidden=2048, ffn=768, unfused_experts="moe.biases = true"), False),
    ],
)
def test_the_gluon_kernel_is_chosen_exactly_where_it_can_run(facts: Facts, runs: bool):
    assert pick_implementation("expert_mlp", facts)[0] == ("gluon" if runs and has_triton() else "reference")

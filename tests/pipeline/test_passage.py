"""A way that is cut at every step gives the gradients of one that is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.anatomy.step_specs import Lane, StepSpec
from moefold.config.run import AttentionConfig, BalanceConfig, ModelConfig, MoeConfig, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.row_chunks import in_row_chunks
from moefold.model.steps import Carry, Step, run_step_sequence
from moefold.pipeline.passage import Passage
from moefold.pipeline.segments import Segments, one_segment, segments_for_pairing, segments_of_one_microbatch
from moefold.train.assemble import default_dtype
from tests.support.models import transformer

SIZE = 6


class Pair(NamedTuple):
    left: torch.Tensor
    number: int
    right: torch.Tensor | None


def step(run: Callable[[Carry], Carry]) -> Step:
    return Step(StepSpec(run.__name__, "compute", True, ""), run)


def weights(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut_or_not(steps: Sequence[Step], cut: bool) -> Segments:
    return segments_for_pairing(steps) if cut else one_segment(steps)


def gradients(steps: Sequence[Step], carry: Carry, leaves: Sequence[torch.Tensor], cut: bool) -> list[Any]:
    """Of the leaves, after handing a gradient to `x` at the end."""
    for leaf in leaves:
        leaf.grad = None
    passage = Passage(cut_or_not(steps, cut))
    out = passage.forward(carry)
    passage.set_output_gradients([out["x"]], [weights(*out["x"].shape, seed=99)])
    passage.backward()
    assert not passage.runs
    assert not passage.carries
    inputs = [x for x in leaves if any(x is value for value in carry.values())]
    return [passage.gradient_of_input(x) if any(x is y for y in inputs) else x.grad for x in leaves]


def plain(steps: Sequence[Step], carry: Carry, leaves: Sequence[torch.Tensor]) -> list[Any]:
    for leaf in leaves:
        leaf.grad = None
    out = run_step_sequence(steps, carry)
    out["x"].backward(weights(*out["x"].shape, seed=99))
    return [leaf.grad.clone() if leaf.grad is not None else None for leaf in leaves]


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    zeros = [torch.zeros_like(y) if x is None else x for x, y in zip(a, b, strict=True)]
    return all(torch.equal(x, y) for x, y in zip(zeros, b, strict=True))


def way(kinds: Sequence[str], w: torch.Tensor) -> list[Step]:
    """Steps on a carry of x, another tensor y, a list, a NamedTuple and things that are no tensors."""

    def multiply(c: Carry) -> Carry:
        return {**c, "x": c["x"] @ w, "list": [*c["list"], c["x"]]}

    def pair(c: Carry) -> Carry:
        return {**c, "pair": Pair(c["x"].tanh(), c["pair"].number + 1, c["pair"].left)}

    def take(c: Carry) -> Carry:
        right = c["pair"].right
        return {**c, "x": c["x"] + c["pair"].left * (1 if right is None else right.sin())}

    def use_list(c: Carry) -> Carry:
        return {**c, "x": c["x"] * sum(x.mean() for x in c["list"]), "list": c["list"][-1:]}

    def twice(c: Carry) -> Carry:
        return {**c, "again": c["x"], "list": [c["x"], c["x"]]}

    def use_twice(c: Carry) -> Carry:
        return {**c, "x": c["x"].cos() + c.get("again", c["x"])}

    def drop(c: Carry) -> Carry:
        return {**{k: v for k, v in c.items() if k != "again"}, "y": None}

    every = {f.__name__: f for f in (multiply, pair, take, use_list, twice, use_twice, drop)}
    return [step(every[kind]) for kind in kinds]


KINDS = ["multiply", "pair", "take", "use_list", "twice", "use_twice", "drop"]


def begin(x: torch.Tensor) -> Carry:
    first = Pair(x.detach().sin(), 0, None)
    return {
        "x": x,
        "list": [x],
        "pair": first,
        "y": x.detach(),
        "name": "text",
        "nothing": None,
        "ids": torch.arange(3),
    }


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7))
def test_cut_and_uncut_agree_whatever_the_steps_carry(kinds: list[str]):
    """Three uses of one tensor or more may be added in another order: to 1e-12, relative to the largest number."""
    x, w = weights(3, SIZE, seed=1).requires_grad_(), weights(SIZE, SIZE, seed=2).requires_grad_()
    steps, carry = way(kinds, w), begin(x)
    right = plain(steps, carry, [x, w])
    for cut in (False, True):
        found = gradients(steps, carry, [x, w], cut)
        for mine, one in zip(found, right, strict=True):
            mine, one = (torch.zeros(1, dtype=torch.float64) if g is None else g for g in (mine, one))
            assert (mine - one).abs().max() <= 1e-12 * max(1.0, one.abs().max().item())


def test_an_uncut_way_has_the_bits_of_a_plain_backward():
    x, w = weights(3, SIZE, seed=1).requires_grad_(), weights(SIZE, SIZE, seed=2).requires_grad_()
    steps = way(KINDS, w)
    assert same(gradients(steps, begin(x), [x, w], cut=False), plain(steps, begin(x), [x, w]))


def test_a_tensor_that_is_twice_in_the_carry_gets_the_gradients_of_both_places_once():
    x = weights(3, SIZE, seed=1).requires_grad_()

    def twice(c: Carry) -> Carry:
        y = c["x"] * 2
        return {"x": y, "again": y, "list": [y]}

    def use(c: Carry) -> Carry:
        return {"x": c["x"] + c["again"] * 3 + c["list"][0] * 5}

    steps = [step(twice), step(use)]
    (found,) = gradients(steps, {"x": x}, [x], cut=True)
    assert torch.allclose(found, 18 * weights(3, SIZE, seed=99), rtol=1e-14)
    assert same([found], plain(steps, {"x": x}, [x]))


def test_the_way_may_begin_with_one_tensor_in_two_places():
    x = weights(3, SIZE, seed=1).requires_grad_()
    steps = [step(lambda c: {"x": c["x"] * c["same"]})]
    for cut in (False, True):
        (found,) = gradients(steps, {"x": x, "same": x}, [x], cut)
        assert same([found], plain(steps, {"x": x, "same": x}, [x]))


def test_what_no_step_uses_has_the_gradient_zero():
    x, other = (weights(3, SIZE, seed=i).requires_grad_() for i in (1, 2))
    passage = Passage(segments_for_pairing([step(lambda c: {**c, "x": c["x"] * 2})]))
    out = passage.forward({"x": x, "other": other})
    passage.set_output_gradients([out["x"]], [torch.ones_like(x)])
    passage.backward()
    assert torch.equal(passage.gradient_of_input(other), torch.zeros_like(other))


def test_what_was_set_aside_early_gets_the_gradient_it_is_handed_at_the_end():
    """As the streams of layers that look ahead: they pass through later steps untouched."""
    x = weights(3, SIZE, seed=1).requires_grad_()

    def aside(c: Carry) -> Carry:
        return {"x": c["x"].tanh(), "streams": [c["x"] * 3]}

    steps = [step(aside), step(lambda c: {**c, "x": c["x"] + 1}), step(lambda c: {**c, "x": c["x"] * 2})]
    passage = Passage(segments_for_pairing(steps))
    carry = passage.forward({"x": x, "streams": []})
    passage.set_output_gradients([carry["x"], *carry["streams"]], [torch.zeros_like(x), torch.full_like(x, 7.0)])
    passage.backward()
    assert torch.equal(passage.gradient_of_input(x), torch.full_like(x, 21.0))


MODEL = ModelConfig(
    layers=3,
    hidden=16,
    vocab=40,
    dense_ffn=24,
    init_std=0.2,
    mtp=1,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, shared_ffn=8, dense_layers=1, balance=BalanceConfig(aux_loss=0.1)),
)


@pytest.mark.parametrize("latent", [0, 8])
def test_a_whole_model_cut_at_every_step_has_the_bits_of_one_that_is_not(latent: int):
    config = ModelConfig(**{**vars(MODEL), "moe": MoeConfig(**{**vars(MODEL.moe), "latent": latent})})
    with default_dtype(torch.float64):
        model = transformer(config, 8, BoundKernels(Facts("cpu", "fp64", hidden=16, ffn=16)))
    initialise_parameters(model, 1)
    rows = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for cut in (one_segment, segments_of_one_microbatch, segments_for_pairing):
        model.zero_grad()
        passage = Passage(cut(model.steps(model.stages[0])))
        carry = passage.forward(model.begin(rows[:, :-1], rows[:, 1:]))
        loss = carry["losses_1M"].sum() + carry["aux"]
        passage.set_output_gradients([loss], [torch.ones_like(loss)])
        passage.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    shared = {"embedding.weight"}  # looked up in two steps: their gradients are added in another order
    for name, gradient in found[0].items():
        assert gradient is not None, name
        assert gradient.any(), name
        for other in found[1:]:
            if name in shared:
                assert torch.allclose(gradient, other[name], rtol=1e-12, atol=1e-14)
            else:
                assert torch.equal(gradient, other[name]), name


@pytest.mark.parametrize("cut", [one_segment, segments_of_one_microbatch, segments_for_pairing])
def test_row_chunks_leave_nothing_in_the_carry_behind_their_layers(cut: Callable[[Sequence[Step]], Segments]):
    model = transformer(MODEL, 8, BoundKernels(Facts("cpu", "fp32")), parallel=ParallelConfig(row_chunks=3))
    rows = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    carry = model.begin(rows[:, :-1], rows[:, 1:])
    steps = model.steps(model.stages[0])
    whole = run_step_sequence(steps, carry)
    passage = Passage(cut(in_row_chunks(steps, 3)))
    assert set(passage.forward(carry)) == set(whole)


def test_a_cut_holds_no_tensor_between_forward_and_backward():
    """What autograd does not save is freed, as in a pass that is not cut."""
    x = weights(3, SIZE, seed=1).requires_grad_()
    storages: list[StorageWeakRef] = []

    def double(c: Carry) -> Carry:
        y = c["x"] * 2
        storages.append(StorageWeakRef(y.untyped_storage()))
        return {"x": y}

    passage = Passage(segments_for_pairing([step(double) for _ in range(3)]))
    out = passage.forward({"x": x})
    assert [storage.expired() for storage in storages] == [True, True, False]
    passage.set_output_gradients([out["x"]], [torch.ones_like(x)])
    passage.backward()
    assert torch.equal(passage.gradient_of_input(x), torch.full_like(x, 8.0))


def beside(name: str, lane: Lane, needs: tuple[str, ...], run: Callable[[Carry], Carry]) -> Step:
    return Step(StepSpec(name, lane, True, "", needs=needs), run)


def test_a_branch_adds_its_own_entries_and_its_gradient_joins_in_a_fixed_order():
    """`side` reads what `first` gives while `send` runs; `last` reads both."""
    x = weights(3, SIZE, seed=1).requires_grad_()
    w = weights(SIZE, SIZE, seed=2).requires_grad_()
    steps = [
        beside("first", "compute", (), lambda c: {"x": c["x"].tanh(), "keep": c["x"].sin()}),
        beside("send", "comm", (), lambda c: {**c, "y": c["x"] * 3}),
        beside("side", "compute", ("first",), lambda c: {**c, "z": c["x"] @ w}),
        beside("work", "compute", ("send",), lambda c: {**c, "y": c["y"].cos()}),
        beside("last", "compute", ("work", "side"), lambda c: {"x": c["y"] * c["z"] + c["keep"]}),
    ]
    right = plain(steps, {"x": x}, [x, w])
    for order in ([0, 1, 2, 3, 4], [0, 2, 1, 3, 4], [0, 1, 3, 2, 4]):
        w.grad = None
        passage = Passage(segments_of_one_microbatch(steps))
        assert [segment.needs for segment in passage.segments] == [(), (0,), (0,), (1,), (3, 2)]
        passage.begin({"x": x})
        for number in order:
            passage.run_forward(number, passage.take_inputs(number))
        assert set(passage.carries) == {4}, "what all readers have read is freed"
        passage.set_output_gradients([passage.out["x"]], [weights(3, SIZE, seed=99)])
        for number in reversed(order):
            passage.run_backward(number, passage.take_gradients(number))
        assert same([passage.gradient_of_input(x), w.grad], right), order

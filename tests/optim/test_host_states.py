"""States in host memory, and updates there: the numbers of an update on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold.anatomy.visiting_states import LEAST_SLOTS
from moefold.optim import adamw
from moefold.optim.host_states import HostStream
from tests.optim.test_adamw import OPTIM, copied, make_both, named, put_gradients


def after_steps(dtype: str, scale: float = 1.0, **optim: Any) -> dict[str, torch.Tensor]:
    """Weights and states after five steps."""
    model, buckets, optimizer = make_both(dtype, optim=replace(OPTIM, **optim))
    for step in range(1, 6):
        put_gradients(buckets, step)
        optimizer.step(step, 1e-2, {"": torch.tensor(scale, dtype=torch.float64)})
    values = {name: copied(value) for name, value in named(optimizer).items()}
    return values | {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch):
    """Chunks so short that every share has several, and slots are used again."""
    monkeypatch.setattr(adamw, "CHUNK_ELEMENTS", 256)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("main", ["fp32", "split", "none", "fp16", "int8"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_states_that_visit_the_device_become_those_that_stay_there(dtype, main, moments, short_chunks):
    stay = after_steps(dtype, main=main, moments=moments)
    visit = after_steps(dtype, main=main, moments=moments, states="host")
    assert stay.keys() == visit.keys()
    for name, value in stay.items():
        # torch's fused update vectorises the ends of tensors otherwise
        if moments == "fp32" and main in ("fp32", "split"):
            torch.testing.assert_close(value, visit[name], rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, visit[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_updates_on_the_host_are_those_of_the_device(dtype: str, short_chunks):
    on_device = after_steps(dtype)
    on_host = after_steps(dtype, states="host", update="host")
    assert on_device.keys() == on_host.keys()
    for name, value in on_device.items():
        tolerance = 1e-2 if value.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(value, on_host[name], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("options", [{"states": "host"}, {"states": "host", "update": "host"}])
def test_a_scale_that_is_no_number_leaves_everything_as_it_is(options: dict[str, Any], short_chunks):
    model, _, optimizer = make_both("bf16", optim=replace(OPTIM, **options))
    before = {name: copied(x) for name, x in [*named(optimizer).items(), *model.named_parameters()]}
    for share in optimizer.shares:
        share.bucket.gradients.fill_(1.0)
    optimizer.step(1, 1e-2, {"": torch.tensor(math.nan)})
    for name, value in [*named(optimizer).items(), *model.named_parameters()]:
        assert torch.equal(copied(value), before[name]), name


def test_chunks_come_in_order_and_go_back_through_few_slots():
    stream = HostStream(torch.device("cpu"))
    numbers = torch.arange(10.0)
    flags = torch.zeros(10, dtype=torch.uint8)
    chunks = [(numbers[i : i + 1], flags[i : i + 1]) for i in range(10)]
    seen: list[int] = []

    def double(number: int, tensors: list[torch.Tensor]) -> None:
        seen.append(number)
        tensors[0].mul_(2)
        tensors[1].add_(1)

    stream.visit(0, chunks, double)
    assert seen == list(range(10))
    assert torch.equal(numbers, 2 * torch.arange(10.0))
    assert (flags == 1).all()
    assert len(stream.slots) == LEAST_SLOTS


def doubled(stream: HostStream, numbers: torch.Tensor, owner: int) -> None:
    """Double the two chunks of an owner."""
    first = 2 * owner
    chunks = [(numbers[i : i + 1],) for i in (first, first + 1)]
    end = stream.visit(owner, chunks, lambda _, tensors: tensors[0].mul_(2))
    end.wait()


ROUNDS = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0), (1, 3), (0, 1, 2, 3)]


def test_what_was_fetched_ahead_is_what_the_step_before_has_left_in_any_order():
    stream = HostStream(torch.device("cpu"))
    numbers = torch.arange(1.0, 9.0)
    expected = numbers.clone()
    for owners in ROUNDS:
        for owner in owners:
            doubled(stream, numbers, owner)
            expected[2 * owner : 2 * owner + 2] *= 2
    assert torch.equal(numbers, expected)


def test_host_memory_may_change_once_states_are_settled():
    stream = HostStream(torch.device("cpu"))
    numbers = torch.ones(8)
    for _ in range(3):
        for owner in range(4):
            doubled(stream, numbers, owner)
    assert stream.fetched
    stream.settle()
    numbers.fill_(5)
    for owner in range(4):
        doubled(stream, numbers, owner)
    assert numbers.eq(10).all()


def test_an_update_that_fails_is_told_to_whoever_waits_for_it():
    stream = HostStream(torch.device("cpu"))
    numbers = torch.ones(2)

    def fail(number: int, tensors: list[torch.Tensor]) -> None:
        raise ValueError("no update")

    end = stream.visit(0, [(numbers[:1],), (numbers[1:],)], fail)
    with pytest.raises(RuntimeError, match="states on the host"):
        end.wait()


def test_an_owner_without_chunks_is_done_at_once():
    HostStream(torch.device("cpu")).visit(0, [], lambda _, tensors: None).wait()

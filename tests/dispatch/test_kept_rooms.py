"""Kept rooms: arrived tokens lie where ranks wrote them as long as somebody has them, and are copied where no room is
free."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from moefold.comm.part_sizes import TURNS
from moefold.config.run import Config, DataConfig, ModelConfig, MoeConfig, ParallelConfig, PipelineConfig, TrainConfig
from moefold.dispatch.base import Receipt, Routing
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.room_sizes import kept_rooms
from moefold.dispatch.symmetric import SymmetricDispatcher
from moefold.layout.axes import World
from tests.dispatch.test_dispatchers import BINDINGS
from tests.support.ranks import run_ranks

TOKENS, WIDTH, ROOMS = 6, 5, 2


class Arrived(NamedTuple):
    """Arrived tokens, the number of their room (-1: copied), and whether they are those that were sent."""

    tokens: torch.Tensor
    room: int
    is_right: bool


class Sender:
    """One rank, both of whose tokens go to both ranks."""

    def __init__(self, world: World):
        model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=4, ffn=4, top_k=2))
        parallel = ParallelConfig(ep=2, dispatcher="symmetric", kept_rooms=ROOMS)
        train = TrainConfig(precision="fp32", micro_batch=1)
        config = Config(model=model, parallel=parallel, train=train, data=DataConfig(seq_len=TOKENS))
        dispatcher = build_dispatcher(config, BINDINGS["chosen"], world)
        assert isinstance(dispatcher, SymmetricDispatcher)
        self.whole = dispatcher
        self.dispatcher = dispatcher.direct
        self.rank = world.rank

    def plan(self) -> Receipt:
        ids = torch.tensor([[0, 2]]).expand(TOKENS, 2)
        return self.dispatcher.plan(Routing(torch.ones(TOKENS, 2), ids))

    def dispatch(self, receipt: Receipt, value: float) -> Arrived:
        arrived = self.dispatcher.dispatch(torch.full((TOKENS, WIDTH), value + self.rank), receipt).source_ND
        kept = self.dispatcher.kept_rooms
        begins = {kept.open_room(number).data_ptr(): number for number in range(TURNS + ROOMS)}
        return Arrived(arrived, begins.get(arrived.data_ptr(), -1), is_of(arrived, value))


def is_of(arrived: torch.Tensor, value: float) -> bool:
    expected = torch.tensor([value, value + 1]).repeat_interleave(TOKENS)
    return torch.equal(arrived, expected[:, None].expand_as(arrived))


class Seen(NamedTuple):
    rooms: list[int]
    are_right: list[bool]
    still_right: list[bool]
    after_release: int
    first_and_second: list[int]
    turns: list[int]


def fill_rooms(world: World) -> Seen:
    """Three microbatches that are held; then the first is let go. At the end one receipt is used twice."""
    sender = Sender(world)
    held = [sender.dispatch(sender.plan(), 10.0 * number) for number in range(3)]
    still_right = [is_of(arrived.tokens, 10.0 * number) for number, arrived in enumerate(held)]
    rooms, are_right = [arrived.room for arrived in held], [arrived.is_right for arrived in held]
    saved = held[1].tokens[2:].detach()  # a part of it is enough
    held.clear()
    after_release = sender.dispatch(sender.plan(), 50.0)
    still_right.append(bool((saved[0] == 10).all()))
    del saved
    receipt = sender.plan()
    twice = [sender.dispatch(receipt, 70.0), sender.dispatch(receipt, 80.0)]
    are_right += [arrived.is_right for arrived in (after_release, *twice)]
    still_right.append(is_of(twice[0].tokens, 70.0))
    turns = []
    for end in (lambda: None, sender.whole.end_turns, sender.whole.end_turns):
        end()
        turns.append(sender.dispatcher.arena.number % TURNS)
    return Seen(rooms, are_right, still_right, after_release.room, [arrived.room for arrived in twice], turns)


@cache
def on_two() -> list[Seen]:
    return run_ranks(fill_rooms, 2, ep=2)


def test_tokens_stay_in_rooms_as_long_as_there_are_any_and_further_ones_are_copied():
    for seen in on_two():
        assert seen.rooms == [TURNS, TURNS + 1, -1]
        assert all(seen.are_right)
        assert all(seen.still_right)


def test_a_room_is_used_again_once_nobody_has_its_memory():
    for seen in on_two():
        assert seen.after_release == TURNS


def test_tokens_that_are_sent_again_by_the_same_plan_are_copied():
    for seen in on_two():
        first, second = seen.first_and_second
        assert first == TURNS + 1
        assert second == -1


def test_a_step_ends_in_the_turn_in_which_it_began():
    for seen in on_two():
        assert seen.turns == [1, 0, 0]


def test_on_two_lanes_there_are_none():
    assert kept_rooms(Config(pipeline=PipelineConfig(pair=True))) == 0

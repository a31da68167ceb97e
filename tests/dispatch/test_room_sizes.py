"""Rooms of the symmetric dispatcher have the bytes that rows and choices take, those of projections the rows of a
microbatch, and the planner counts both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.config.run import Config
from moefold.dispatch.room_sizes import (
    AnnouncedSizes,
    ArenaRows,
    arena_bytes,
    flags_of_sender,
    head_room,
    projection_room,
    room_bytes,
    room_in_words,
)
from moefold.plan.memory.peak_memory import plan_memory
from moefold.presets.recipe import resolve_recipe

MIB = 2**20


def resolve(*keys: str):
    sizes = ["--parallel.ep=4", "--train.micro_batch=1", "--train.global_batch=4", "--data.seq_len=4096"]
    return resolve_recipe("qwen3-30b-a3b", [*sizes, "--parallel.dispatcher=symmetric", *keys], 4)


def test_a_room_holds_the_tokens_of_all_ranks_and_there_are_two_and_those_that_are_kept():
    each = (4 * 4096 + 1) * 2048 * 2
    for kept in (0, 3):
        config = resolve(f"--parallel.kept_rooms={kept}")
        assert arena_bytes(config, 2) == pytest.approx((2 + kept) * each, rel=1e-5)
    assert "3 layers and microbatches" in room_in_words(config, 2)
    assert "320.0 MiB of rooms" in room_in_words(config, 2)


def test_a_bound_of_rows_bounds_rooms_and_two_lanes_keep_none():
    bounded = resolve("--model.moe.top_k=1", "--parallel.room=2", "--parallel.kept_rooms=0")
    assert arena_bytes(bounded, 2) == pytest.approx(2 * 8192 * 2048 * 2, rel=1e-3)
    config = resolve()
    paired = replace(config, pipeline=replace(config.pipeline, pair=True))
    assert arena_bytes(paired, 2) == arena_bytes(resolve("--parallel.kept_rooms=0"), 2)


def test_choices_of_narrow_tokens_have_room_too():
    announced = AnnouncedSizes(senders=2, tokens=200, choices=8, experts=16, ranks=2)
    places, weights, counts = 2 * 200 * 8 * 4, 2 * 200 * 8 * 8, 2 * 2 * 19 * 4
    assert places + weights + counts <= room_bytes(ArenaRows(200, 400), announced, 4) <= places + weights + counts + 512


def counted_buffers(config: Config) -> float:
    [of_stage] = plan_memory(config, 4)
    return of_stage.buffers


def test_the_planner_counts_rooms_among_its_buffers():
    symmetric, dedup = resolve(), resolve("--parallel.dispatcher=dedup")
    assert counted_buffers(symmetric) - counted_buffers(dedup) == arena_bytes(symmetric, 2)


def test_rooms_of_projections_hold_the_rows_of_a_microbatch_and_the_planner_counts_them():
    layout = ["--parallel.tp=2", "--parallel.cp=2", "--parallel.ep=1", "--parallel.dispatcher=auto"]
    inside, outside = (resolve(*layout, f"--parallel.tiles={tiles}") for tiles in ("projections", ""))
    room = projection_room(inside, 2)
    assert room.rows == 4096 // 4
    assert room.room_bytes == 2 * 1024 * 2048 * 2
    words = 2 * (1 + flags_of_sender(1024, 2048)) * 8
    assert words + 2 * room.room_bytes <= room.arena_bytes < words + 2 * room.room_bytes + 512
    assert counted_buffers(inside) - counted_buffers(outside) == room.arena_bytes


def test_rooms_of_heads_hold_queries_keys_and_values_of_a_microbatch_and_the_planner_counts_them():
    layout = ["--parallel.cp=4", "--parallel.context=all_to_all", "--parallel.dispatcher=auto"]
    inside, outside = (resolve(*layout, f"--parallel.tiles={tiles}") for tiles in ("heads", ""))
    room = head_room(inside, 2)
    assert room.rows == 4096 // 4
    assert room.room_bytes == 4096 * (8 + 1 + 1) * 128 * 2, "all rows of a rank's heads"
    assert room.flags == flags_of_sender(1024, 8 * 128) + 2 * flags_of_sender(1024, 128)
    assert counted_buffers(inside) - counted_buffers(outside) == room.arena_bytes

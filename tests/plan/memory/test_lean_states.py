"""What a plan counts of optimizer states in few bytes, of gradients that are freed in backward, and of the host."""

from __future__ import annotations

from typing import Any

import pytest

from moefold.anatomy.adapters import adapter_parameters
from moefold.anatomy.visiting_states import CHUNK_ELEMENTS
from moefold.config.read import parse_overrides, with_values
from moefold.config.run import Config
from moefold.plan.memory.peak_memory import RankMemory, plan_memory
from moefold.plan.memory.run_setting import GIB
from moefold.presets.zoo import PRESETS

ONE_CARD = (
    "--optim.main=none --optim.moments=int8 --optim.gradients=bf16 --optim.when=backward --optim.clip_by=previous "
    "--data.seq_len=4096 --train.global_batch=4 --train.micro_batch=4 --memory.recompute=layer"
)


def planned(preset: str, words: str, world: int = 1) -> RankMemory:
    config: Config = with_values(PRESETS[preset](), parse_overrides(words.split()), {})
    return plan_memory(config, world)[0]


def test_all_of_qwen3_30b_is_planned_on_one_h200():
    rank = planned("qwen3-30b-a3b", ONE_CARD)
    assert rank.parameters == pytest.approx(30.53e9, rel=0.001)
    assert rank.main == 0
    assert (rank.weights + rank.moments) / rank.parameters <= 4.07
    assert rank.gradients < 0.05 * rank.weights
    assert rank.needed < 136 * GIB


SIZES: list[tuple[dict[str, Any], float]] = [
    ({"moments": "fp32"}, 8),
    ({"moments": "int8"}, 2 * (1 + 4 / 128)),
    ({"moments": "fp8", "second_moment": "bf16"}, 3 + 4 / 128),
    ({"moments": "bf16", "second_moment": "fp16"}, 4 + 4 / 128),
]


@pytest.mark.parametrize(("types", "size"), SIZES)
def test_each_moment_is_counted_in_its_type(types: dict[str, str], size: float):
    words = " ".join(f"--optim.{key}={value}" for key, value in types.items())
    rank = planned("olmoe-1b-7b", words)
    assert rank.moments == pytest.approx(size * rank.parameters)


def test_states_on_the_host_are_counted_there():
    here = planned("olmoe-1b-7b", "--optim.moments=bf16")
    there = planned("olmoe-1b-7b", "--optim.moments=bf16 --optim.states=host")
    assert there.main == there.moments == 0
    assert there.host == here.main + here.moments


@pytest.mark.parametrize(("window", "expected"), [(8.0, 8.0), (0.0, 1.5), (1000.0, 52.0)])
def test_states_on_the_host_pass_through_slots_on_the_device(window: float, expected: float):
    """Chunks of half a GiB, at 8 bytes a parameter: as many as fit, three at least, and all of them at most."""
    words = "--optim.moments=bf16 --train.precision=bf16 --train.device=cuda"
    here = planned("olmoe-1b-7b", words)
    there = planned("olmoe-1b-7b", f"{words} --optim.states=host --optim.states_window_gib={window}")
    passing = (there.buffers - here.buffers) / 2**30
    assert passing == pytest.approx(expected, abs=0.5)


PARTS_UPDATED = [
    ("olmoe-1b-7b", "--parallel.ep=1 --train.global_batch=32 --optim.moments=bf16", 8, 8),
    ("qwen3-30b-a3b", "--lora.rank=16", 1, 12),
]


@pytest.mark.parametrize(("preset", "words", "world", "state"), PARTS_UPDATED, ids=["a share", "adapters"])
def test_three_slots_are_of_chunks_of_what_a_rank_updates(preset: str, words: str, world: int, state: int):
    """Of `state` bytes an element. Shares among replicas, and adapters beside a base, are longer than a chunk."""
    words += " --train.precision=bf16 --train.device=cuda"
    here = planned(preset, words, world)
    there = planned(preset, f"{words} --optim.states=host --optim.states_window_gib=0", world)
    assert CHUNK_ELEMENTS < here.updated < here.parameters / 2
    assert there.buffers - here.buffers == pytest.approx(3 * CHUNK_ELEMENTS * state, rel=1e-6)


def test_gradients_of_several_microbatches_exist_all_at_once_inside_backward_too():
    words = ONE_CARD.replace("micro_batch=4", "micro_batch=2").replace("gradients=bf16", "gradients=fp32")
    rank = planned("qwen3-30b-a3b", words)
    assert rank.gradients == 4 * rank.parameters


def test_states_of_a_run_with_adapters_are_those_of_the_adapters():
    """Main weights and moments of 12 bytes; fp32 gradients of one microbatch exist at the end of backward at most."""
    words = "--lora.rank=16 --train.precision=bf16 --train.device=cuda --train.global_batch=4 --train.micro_batch=4"
    config: Config = with_values(PRESETS["qwen3-30b-a3b"](), parse_overrides(words.split()), {})
    rank = plan_memory(config, 1)[0]
    adapters = adapter_parameters(config)
    assert rank.parameters == pytest.approx(30.53e9 + adapters, rel=0.001)
    assert rank.weights == pytest.approx(2 * rank.parameters)
    assert rank.main + rank.moments == pytest.approx(12 * adapters)
    assert rank.gradients <= 4 * adapters * 1.001


def test_a_base_in_blocks_is_counted_in_its_bits():
    words = "--lora.rank=16 --train.precision=bf16 --train.device=cuda --train.global_batch=4 --train.micro_batch=4"
    plain = planned("qwen3-30b-a3b", words)
    held = planned("qwen3-30b-a3b", words + " --lora.base=nf4")
    assert held.parameters == plain.parameters
    assert held.weights == pytest.approx(plain.weights - 29.9e9 * (2 - 4.25 / 8), rel=0.001)
    assert held.moments == plain.moments

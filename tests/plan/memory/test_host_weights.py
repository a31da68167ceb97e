"""What a plan counts of experts on the host: their bytes there, two layers of them on the device, and the host link."""

from __future__ import annotations

import pytest

from moefold.config.errors import UserError
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.machine.this_machine import MachineMemory
from moefold.plan.memory.fit_proposals import propose_changes
from moefold.plan.memory.machine_fit import MachineFit, ranks_of_machine
from moefold.plan.memory.peak_memory import fullest_rank, memory_by_rank
from moefold.plan.memory.run_setting import GIB, RunSetting, build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import time_training_step
from moefold.presets.recipe import resolve_recipe

H200 = find_gpu_by_name("h200")
WORDS = ["--lora.rank=16", "--model.moe.balance.bias_rate=0", "--data.seq_len=4096", "--train.micro_batch=4"]
WORDS += ["--train.global_batch=4", "--memory.recompute=layer"]
HOST = "--memory.offload=expert_weights"
LAYER = 2 * 3 * 128 * 768 * 2048  # bytes of a layer's experts of Qwen3-30B-A3B in bf16


def setting(*words: str, world: int = 1) -> RunSetting:
    config = resolve_recipe("qwen3-30b-a3b", [*WORDS, *words], world)
    return build_run_setting(config, world, PlanChoices())


@pytest.mark.parametrize(("words", "world", "layer"), [
    ((), 1, LAYER),
    (("--lora.base=nf4",), 1, LAYER * 4.25 / 16),
    (("--parallel.ep=2", "--parallel.pp=2", "--train.micro_batch=2"), 4, LAYER / 2),
    (("--shard.mode=zero3", "--parallel.ep=2", "--train.micro_batch=1"), 4, LAYER / 4),
    (("--shard.mode=zero3", "--parallel.ep=4", "--train.micro_batch=1"), 4, LAYER / 4),
])  # fmt: skip
def test_two_layers_are_on_the_device_and_all_on_the_host(words: tuple[str, ...], world: int, layer: float):
    """Of every pipeline rank; with full sharding of its share."""
    plain = memory_by_rank(setting(*words, world=world))
    held = memory_by_rank(setting(*words, HOST, world=world))
    assert sum(rank.host for rank in held) == pytest.approx(48 * layer)
    for before, after in zip(plain, held, strict=True):
        assert before.weights - after.weights == pytest.approx(after.host - 2 * layer)
        assert after.moments == before.moments


def test_a_card_of_24_gib_holds_the_model_and_the_link_sets_the_pace():
    """Both passes fetch all experts; compute of 16,384 tokens takes less."""
    held = setting(HOST)
    assert fullest_rank(memory_by_rank(held)).needed < 24 * GIB
    fetching = 2 * 48 * LAYER / H200.host_link
    seconds = time_training_step(held, H200).seconds
    assert fetching < seconds < 1.05 * fetching
    assert time_training_step(setting(), H200).seconds < fetching


def test_trained_experts_are_refused():
    words = [HOST, "--lora.rank=0", "--optim.groups=blocks.?.moe.experts.*: frozen"]
    with pytest.raises(UserError, match=r"blocks\.10\.moe\.experts\.gate_up is trained"):
        memory_by_rank(setting(*words))


@pytest.mark.extended
def test_it_is_proposed_where_adapters_do_not_fit_a_small_card_otherwise():
    """And the regions that are proposed beside it keep it."""
    place = ranks_of_machine(Rendezvous())
    machine = MachineMemory((32 * GIB,), 256 * GIB)
    words = [*WORDS, "--train.device=cuda", "--train.precision=bf16", "--checkpoint.every=0"]
    config = resolve_recipe("qwen3-30b-a3b", words, 1)
    shown = propose_changes(MachineFit(config, place, machine))
    assert "--memory.offload expert_weights" in shown
    words = [*words, HOST, "--memory.recompute=", "--train.micro_batch=2"]
    shown = propose_changes(MachineFit(resolve_recipe("qwen3-30b-a3b", words, 1), place, machine))
    assert "--memory.offload expert_weights,layer" in shown

"""Seconds of an update: what was measured on an H200, and shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.memory.run_setting import RunSetting
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import time_training_step
from moefold.plan.time.update_seconds import PassTimes, muon_seconds, orthogonalising_flops, update_seconds
from moefold.presets.recipe import resolve_recipe

H200 = find_gpu_by_name("h200")
BATCH = ("--data.seq_len=4096", "--train.global_batch=4", "--train.micro_batch=4", "--memory.recompute=layer")
STATE = ("--optim.main=none", "--optim.gradients=bf16", "--optim.when=backward", "--optim.clip_by=previous")
LEAN = {
    "adamw": ("--optim.rule=adamw", "--optim.moments=int8"),
    "muon": ("--optim.rule=muon", "--optim.moments=bf16"),
}


def one_rank(rule: str) -> RunSetting:
    config = resolve_recipe("qwen3-30b-a3b", (*BATCH, *STATE, *LEAN[rule]), 1)
    return build_run_setting(config, 1, PlanChoices())


@pytest.mark.parametrize(("rule", "measured"), [("adamw", 15_800), ("muon", 9_620)])
def test_the_speed_of_30_billion_parameters_on_one_h200_is_forecast(rule: str, measured: int):
    seconds = time_training_step(one_rank(rule), H200).seconds
    assert 4 * 4096 / seconds == pytest.approx(measured, rel=0.07)


def test_newton_schulz_of_an_expert_s_matrices_has_the_operations_of_its_products():
    s = one_rank("muon")
    short, long = 768, 2048
    step = 2 * short * short * long * 2 + 2 * short**3  # X X^T and its polynomial times X, and G G
    assert orthogonalising_flops((short, long), s) == 5 * step / (short * long)


def test_muon_costs_what_its_shares_cost_and_adamw_has_none_of_it():
    cluster = Cluster(H200, 1)
    muon, adamw = one_rank("muon"), one_rank("adamw")
    whole = muon_seconds(muon, cluster, 1e9, 8e9)
    assert whole == pytest.approx(2 * muon_seconds(muon, cluster, 0.5e9, 4e9))
    with_muon, with_adamw = (update_seconds(s, cluster, 1e9, 8e9, PassTimes(0.0, 0.0)) for s in (muon, adamw))
    assert with_muon - with_adamw == pytest.approx(whole, rel=0.02)


def seconds_of_olmoe(*words: str) -> float:
    batch = ("--data.seq_len=4096", "--train.global_batch=4", "--train.micro_batch=4")
    states = ("--optim.main=split", "--optim.moments=bf16", "--optim.gradients=bf16")
    config = resolve_recipe("olmoe-1b-7b", (*batch, *states, *words), 1)
    return time_training_step(build_run_setting(config, 1, PlanChoices()), H200).seconds


def exchange_of_olmoe(*words: str) -> float:
    slow = replace(H200, network=H200.network / 1000)
    config = resolve_recipe("olmoe-1b-7b", ("--train.global_batch=64", "--train.micro_batch=1", *words), 64)
    return time_training_step(build_run_setting(config, 64, PlanChoices()), slow).exchange


def test_gradients_are_exchanged_as_sent_and_sums_over_copies_in_fp32():
    fp32, bf16, fp8 = (exchange_of_olmoe(f"--optim.gradient_reduce={sent}") for sent in ("fp32", "bf16", "fp8"))
    assert (bf16 - fp8) / (fp32 - bf16) == pytest.approx((2 - 1 - 4 / 128) / (4 - 2), rel=1e-3)
    copies = "--shard.replicas=64"  # a share is whole, so that nothing but its copies is exchanged
    assert exchange_of_olmoe(copies, "--optim.gradient_reduce=fp8") == exchange_of_olmoe(copies)


def test_a_step_with_states_on_the_host_is_forecast():
    """0.88 s were measured."""
    assert seconds_of_olmoe("--optim.states=host") == pytest.approx(0.88, rel=0.07)


def test_a_window_hides_copies_behind_a_step_but_no_step_is_shorter_than_its_copies():
    none, small, large = (
        seconds_of_olmoe("--optim.states=host", f"--optim.states_window_gib={gib}") for gib in (0, 4, 64)
    )
    rate = 0.91 * H200.host_link
    assert none - small == pytest.approx(4 * 2**30 / rate)
    copies = 6.92e9 * 6 / rate
    assert copies * 0.99 < large < small
    long = ("--train.global_batch=64", "--optim.gradients=fp32")
    beside = seconds_of_olmoe("--optim.states=host", "--optim.states_window_gib=64", *long)
    assert beside == pytest.approx(seconds_of_olmoe(*long))


@pytest.mark.parametrize("words", ["--optim.groups=*.moe.experts.*: frozen", "--lora.rank=16"])
def test_what_is_not_trained_is_neither_updated_nor_exchanged(words: str):
    """Of OLMoE over slow links, where little of an exchange is hidden; frozen experts are 93 % of it."""
    slow = replace(H200, network=H200.network / 1000)
    base = ("--train.global_batch=64", "--train.micro_batch=1", "--parallel.ep=8")
    times = []
    for more in ((), (words,)):
        config = resolve_recipe("olmoe-1b-7b", (*base, *more), 64)
        setting = build_run_setting(config, 64, PlanChoices())
        times.append(time_training_step(setting, slow))
    whole, part = times
    assert part.optimizer < 0.1 * whole.optimizer
    assert part.exchange < 0.1 * whole.exchange
    assert part.pipeline_time.seconds == whole.pipeline_time.seconds

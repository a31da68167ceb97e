"""Memory by rank against published tables, published measurements and the rules of how it scales."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moefold.anatomy.model_totals import total_parameters
from moefold.config.run import Config, ShardConfig
from moefold.plan.answer import answer_request
from moefold.plan.memory.peak_memory import GIB, RankMemory, fullest_rank, plan_memory
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe

EVEN = PlanChoices(stack="megatron", spread=0.0)
PUBLISHED = "--pipeline.schedule=interleaved --pipeline.layout=Et*4|(tttt|)*14tmL --parallel.dispatcher=all_to_all"
DEEPSEEK = resolve_recipe(
    "deepseek-v3",
    f"--parallel.pp=4 --pipeline.vpp=4 --parallel.ep=64 --train.global_batch=8192 {PUBLISHED}".split(),
    world=256,
)


def with_gate(config: Config, gate: str) -> Config:
    return replace(config, model=replace(config.model, moe=replace(config.model.moe, gate=gate)))


def table_rank(choices: PlanChoices = EVEN, gate: str = "output") -> RankMemory:
    """The rank that the published table shows: it holds layers with experts only."""
    return plan_memory(with_gate(DEEPSEEK, gate), 256, choices)[2]


def test_table_3_of_the_megatron_core_report():
    rank = table_rank()
    assert (rank.weights + rank.gradients) / GIB == pytest.approx(36.4, rel=0.01)
    assert (rank.main + rank.moments) / GIB == pytest.approx(32.1, rel=0.01)
    assert rank.activations / GIB == pytest.approx(131.0, rel=0.001)
    assert (rank.state + rank.activations) / GIB == pytest.approx(199.5, rel=0.01)
    assert sum(rank.live) == 15


def saved(before: PlanChoices, after: PlanChoices, gates: tuple[str, str] = ("activation", "activation")) -> float:
    return (table_rank(before, gates[0]).activations - table_rank(after, gates[1]).activations) / GIB


def test_memory_efficient_permutation_saves_what_was_published():
    assert saved(EVEN, EVEN, ("output", "activation")) == pytest.approx(26.3, rel=0.01)


def test_fp8_saves_what_was_published_and_scales_of_blocks_cost_a_little():
    fp8 = replace(EVEN, precision="fp8")
    assert saved(EVEN, fp8) == pytest.approx(16.17, rel=0.001)
    assert 0 < saved(replace(EVEN, precision="mxfp8"), fp8) < 0.05 * 16.17
    assert saved(EVEN, replace(EVEN, precision="nvfp4")) > saved(EVEN, fp8)


@pytest.mark.parametrize(
    ("region", "fp8", "bf16"), [("up", 30.47, 30.94), ("activation", 3.75, 7.50), ("norm", 8.20, 6.56)]
)
def test_table_4_what_recomputing_a_region_saves(region: str, fp8: float, bf16: float):
    """Printed as 30.4, 3.8 and 8.2, for FP8."""
    for precision, expected in (("fp8", fp8), ("bf16", bf16)):
        before = replace(EVEN, precision=precision)
        assert saved(before, replace(before, recompute=(region,))) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(("theirs", "ours"), [("mla_up_proj", "up"), ("moe_act", "activation"), ("layernorm", "norm")])
def test_names_of_megatron_mean_the_same_regions(theirs: str, ours: str):
    same = (table_rank(replace(EVEN, recompute=(name,))).total for name in (theirs, ours))
    assert len(set(same)) == 1


def test_the_largest_rank_is_the_first_not_the_one_of_the_table():
    ranks = plan_memory(with_gate(DEEPSEEK, "output"), 256, EVEN)
    assert fullest_rank(ranks) is ranks[0]
    assert (ranks[0].state + ranks[0].activations) / GIB == pytest.approx(218.7, rel=0.001)
    assert [sum(rank.live) for rank in ranks] == [19, 17, 15, 13]


def test_qwen3_on_16_gpus_is_what_was_measured():
    """62.17 GiB were measured; state, kept tensors and logits make 62.81. A plan adds what these leave out."""
    config = resolve_recipe("qwen3-30b-a3b", ["--parallel.ep=16", "--train.global_batch=1024"], world=16)
    (rank,) = plan_memory(config, 16, EVEN)
    assert (rank.state + rank.activations) / GIB == pytest.approx(62.81, rel=0.002)
    assert rank.total / GIB == pytest.approx(62.17, rel=0.06)


RUNS = json.loads((Path(__file__).parents[3] / "docs" / "benchmarks" / "plan-h200.json").read_text())["results"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["case"])
def test_runs_on_one_h200_are_what_was_measured(run: dict[str, Any]):
    """Whole steps of this trainer, as `moefold bench plan` had them on 2026-11-15."""
    words = [f"--{key}={value}" for key, value in run.items() if "." in key]
    (rank,) = plan_memory(resolve_recipe(run["model"], words), 1)
    assert rank.total / GIB == pytest.approx(run["measured"]["peak_gib"], rel=0.02)
    told = answer_request(
        {"model": run["model"], "gpus": 1, "gpu": "h200", **{k: v for k, v in run.items() if "." in k}}
    )
    assert 1e3 * told["step_s"] == pytest.approx(run["measured"]["step_ms"], rel=0.15)


def test_gradients_of_one_microbatch_come_while_activations_go():
    config = resolve_recipe("olmoe-1b-7b", ["--train.micro_batch=4", "--train.global_batch=4"])
    (one,) = plan_memory(config, 1)
    (two,) = plan_memory(replace(config, train=replace(config.train, global_batch=8)), 1)
    assert one.gradients < two.gradients == 4 * two.parameters
    assert one.total < two.total
    (standing,) = plan_memory(config, 1, PlanChoices(graphs="static"))
    assert standing.gradients == two.gradients, "captured steps add to them where they are"
    assert standing.graphs > 0


@pytest.mark.parametrize(("moments", "each"), [("fp32", 12), ("bf16", 8)])
@pytest.mark.parametrize("dp", [1, 2, 8, 64])
def test_bytes_of_a_parameter(moments: str, each: int, dp: int):
    config = resolve_recipe("mixtral-8x7b", [f"--optim.moments={moments}", "--train.global_batch=64"], world=dp)
    (rank,) = plan_memory(config, dp, EVEN)
    assert rank.state / rank.parameters == pytest.approx(6 + each / dp)
    (whole,) = plan_memory(config, dp, replace(EVEN, sharding="none"))
    assert whole.state / rank.parameters == 6 + each
    (cut,) = plan_memory(config, dp, replace(EVEN, sharding="fsdp"))
    assert cut.state / rank.parameters == pytest.approx((6 + each) / dp)


def test_fully_sharded_weights_are_shares_and_two_units():
    """Of 8 ranks each has an eighth, or with two copies a quarter; two layers of Mixtral are whole in steps."""
    words = ["--train.global_batch=64", "--shard.mode=zero3"]
    config = resolve_recipe("mixtral-8x7b", words, world=8)
    choices = replace(EVEN, stack="moefold")
    (whole,) = plan_memory(replace(config, shard=ShardConfig()), 8, choices)
    (rank,) = plan_memory(config, 8, choices)
    assert rank.weights == pytest.approx(whole.weights / 8)
    assert rank.gradients == pytest.approx(4 * rank.parameters / 8)
    layer = (rank.parameters - 2 * config.model.vocab * config.model.hidden) / config.model.layers
    assert rank.buffers - whole.buffers == pytest.approx(2 * layer * (2 + 4), rel=1e-5)
    (copied,) = plan_memory(replace(config, shard=ShardConfig("zero3", 2)), 8, choices)
    assert copied.state == pytest.approx(2 * rank.state)


def test_in_pairs_two_units_of_each_pass_are_whole_and_gradients_of_one():
    words = ["--train.global_batch=64", "--parallel.pp=2", "--shard.mode=zero3"]
    config = resolve_recipe("mixtral-8x7b", words, world=8)
    paired = replace(config, pipeline=replace(config.pipeline, pair=True))
    choices = replace(EVEN, stack="moefold")
    alone = plan_memory(config, 8, choices)
    layers = config.model.layers
    layer = (total_parameters(config.model) - 2 * config.model.vocab * config.model.hidden) / layers
    for rank, both in zip(alone, plan_memory(paired, 8, choices), strict=True):
        assert both.buffers - rank.buffers == pytest.approx(2 * layer * 2, rel=1e-5)


@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_of_a_fully_sharded_base_ranks_hold_shares_and_two_units_with_gradients_of_adapters(base: str):
    words = ["--train.global_batch=64", "--lora.rank=16", f"--lora.base={base}"]
    config = resolve_recipe("mixtral-8x7b", words, world=8)
    choices = replace(EVEN, stack="moefold")
    (whole,) = plan_memory(config, 8, choices)
    (rank,) = plan_memory(replace(config, shard=ShardConfig("zero3")), 8, choices)
    assert rank.weights == pytest.approx(whole.weights / 8)
    assert rank.gradients == pytest.approx(whole.gradients / 8)
    assert rank.moments == pytest.approx(whole.moments)
    words_of_model = 2 * config.model.vocab * config.model.hidden
    layer = (whole.weights - words_of_model * 2) / config.model.layers
    assert layer < (1.0e9 if base == "nf4" else 3.0e9)
    gradients = whole.gradients / config.model.layers  # of adapters
    assert rank.buffers - whole.buffers == pytest.approx(2 * (layer + gradients), rel=0.01)


@pytest.mark.parametrize("dp", [1, 8])
def test_muon_has_one_moment_of_a_layer_s_parameter_and_adamw_two_of_embedding_and_head(dp: int):
    words = ["--train.global_batch=64", "--optim.rule=muon"]
    config = resolve_recipe("mixtral-8x7b", words, world=dp)
    (rank,) = plan_memory(config, dp, EVEN)
    words_of_model = 2 * config.model.vocab * config.model.hidden
    assert rank.moments == pytest.approx(4 * (rank.parameters + words_of_model) / dp, rel=1e-6)
    (whole,) = plan_memory(config, dp, replace(EVEN, sharding="none"))
    assert whole.moments == pytest.approx(4 * (rank.parameters + words_of_model), rel=1e-6)


def ranks_of(words: str, world: int) -> RankMemory:
    """A rank in the middle of a pipeline: layers with experts, and nothing else."""
    base = "--pipeline.layout=Et*23|t*24|t*23|t*24L --train.global_batch=256 --parallel.pp=4 --parallel.ep=2 "
    config = resolve_recipe("qwen3-235b-a22b", [*base.split(), *words.split()], world=world)
    return plan_memory(config, world, EVEN)[1]


def test_table_12_doubling_a_degree_scales_each_class_of_memory():
    """Twice the degree on twice the GPUs, all else the same. Tensor parallelism does not cut experts, which have an
    axis of their own; norms and routers are not cut at all and are little."""
    base = ranks_of("", 16)

    tp = ranks_of("--parallel.tp=2", 32)
    assert tp.activations == pytest.approx(base.activations / 2)
    assert tp.main + tp.moments == pytest.approx((base.main + base.moments) / 2, rel=0.01)
    dense = "--model.moe.dense_layers=94 --model.dense_ffn=12288 --parallel.ep=1"
    whole, cut = ranks_of(dense, 16), ranks_of(f"{dense} --parallel.tp=2", 32)
    assert cut.weights == pytest.approx(whole.weights / 2, rel=0.001)

    ep = ranks_of("--parallel.ep=4", 32)
    assert ep.activations == base.activations
    assert ep.weights == pytest.approx(base.weights / 2, rel=0.07)
    assert ep.main + ep.moments == pytest.approx((base.main + base.moments) / 2, rel=0.001)

    cp = ranks_of("--parallel.cp=2", 32)
    assert cp.activations == pytest.approx(base.activations / 2)
    assert cp.weights == base.weights
    assert cp.main + cp.moments == pytest.approx((base.main + base.moments) / 2)

    dp = ranks_of("", 32)
    assert (dp.activations, dp.weights) == (base.activations, base.weights)
    assert dp.main + dp.moments == pytest.approx((base.main + base.moments) / 2)


def test_table_12_pipelines_cut_weights_and_state_and_not_activations():
    def first(pp: int, vpp: int) -> RankMemory:
        layout = "E" + "|".join(["t" * (64 // (pp * vpp))] * (pp * vpp)) + "L"
        words = f"--model.layers=64 --parallel.pp={pp} --pipeline.vpp={vpp} --train.global_batch=4096"
        words += f" --pipeline.layout={layout}"
        return plan_memory(resolve_recipe("qwen3-30b-a3b", words.split(), world=pp * 16), pp * 16, EVEN)[0]

    two, four, chunked = first(2, 1), first(4, 1), first(4, 4)
    assert four.activations == pytest.approx(two.activations, rel=0.001)
    assert chunked.activations > 1.1 * four.activations
    assert four.parameters - two.parameters / 2 == pytest.approx(151_936 * 2048 / 2, rel=1e-6), (
        "the embedding is on one"
    )
    assert four.moments == pytest.approx(two.moments / 2, rel=0.02)


@pytest.mark.parametrize("choice", ["recompute", "offload"])
def test_recomputing_and_offloading_trade_kept_tensors_for_work_and_host_memory(choice: str):
    plain = table_rank(gate="activation")
    changed = table_rank(replace(EVEN, **{choice: ("activation",)}), "activation")
    freed = plain.activations - changed.activations
    assert freed > 0
    assert changed.working > plain.working
    assert (changed.host == freed) == (choice == "offload")


def test_a_layer_that_is_recomputed_keeps_its_input_only():
    rank = table_rank(replace(EVEN, recompute=("layer",)))
    assert rank.activations / GIB == pytest.approx(60 * 56 / 1024)
    assert rank.working / 2**20 > 2235.5 - 56


def test_state_on_the_host_leaves_the_card():
    here, there = table_rank(), table_rank(replace(EVEN, states_on_host=True))
    assert here.total - there.total == here.main + here.moments == there.host


def test_uneven_loads_need_room_where_experts_are_spread_and_only_there():
    assert table_rank(replace(EVEN, spread=0.2)).margin > table_rank(replace(EVEN, spread=0.1)).margin > 0
    assert table_rank(replace(EVEN, spread=0.1, quantile=0.999)).margin > table_rank(replace(EVEN, spread=0.1)).margin
    (alone,) = plan_memory(resolve_recipe("olmoe-1b-7b", []), 1, replace(EVEN, spread=0.5))
    assert alone.margin == 0


def test_a_stash_trades_the_rows_of_all_layers_for_its_pool_and_the_rows_of_one():
    """Qwen3's fused experts keep gate and up of 8 rows a token: 768 columns each, in bf16; pages hold 64 such rows."""
    words = "--model.layers=12 --train.micro_batch=4 --train.global_batch=8 --data.seq_len=4096 --model.vocab=1024"
    config = resolve_recipe("qwen3-30b-a3b", words.split())
    [kept] = plan_memory(config, 1)
    [stashed] = plan_memory(replace(config, memory=replace(config.memory, stash="stack", stash_gib=6.0)), 1)
    of_layer = 4 * 4096 * 8 * 2 * 768 * 2
    assert kept.activations - stashed.activations == 12 * of_layer == stashed.stashed
    assert stashed.buffers - kept.buffers == 6 * GIB
    assert stashed.working - kept.working == of_layer
    assert kept.stashed == 0

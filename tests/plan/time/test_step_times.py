"""The price of a step follows its physics: FLOPs, bytes, launches, links."""

from dataclasses import replace
from typing import Any

import pytest

from moefold.anatomy.model_totals import train_flops_per_token
from moefold.config.run import Config
from moefold.plan.layer.quantise_passes import backward_quantise_bytes, forward_quantise_bytes
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.memory.rank_stages import stages_by_rank
from moefold.plan.options import PlanChoices
from moefold.plan.time.chunk_overlap import ChunkedPass
from moefold.plan.time.simulate_step import time_training_step
from moefold.plan.time.step_times import PassSeconds, StepClock, sum_pass_seconds
from moefold.presets.recipe import resolve_recipe

MODELS = ("deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "latent-30b-a3b", "glm-4.5-air")


def setting(model: str = "qwen3-30b-a3b", world: int = 8, choices: PlanChoices | None = None, **keys: object):
    words = [f"--{key.replace('__', '.')}={value}" for key, value in keys.items()]
    return build_run_setting(resolve_recipe(model, words, world), world, choices or PlanChoices())


def passed(
    model: str = "qwen3-30b-a3b", gpu: str = "h100", choices: PlanChoices | None = None, **keys: object
) -> PassSeconds:
    s = setting(model, choices=choices, **keys)
    pace = StepClock(s, find_gpu_by_name(gpu))
    return sum_pass_seconds([pace.time_stage(pieces) for rank in stages_by_rank(s.config) for pieces in rank.pieces])


@pytest.mark.parametrize("model", MODELS)
def test_arithmetic_is_exactly_the_published_flops(model: str):
    """Whatever the layout: all ranks' time at the peak, times the peak, is FLOPs a token times tokens."""
    for keys in ({}, {"parallel__ep": 4}, {"parallel__pp": 2, "parallel__tp": 2}):
        if "gpt" in model and keys:
            keys = {"parallel__pp": 2}
        s = setting(model, train__global_batch=16, **keys)
        gpu = find_gpu_by_name("h100")
        step = time_training_step(s, gpu)
        done = step.walls["arithmetic"] * gpu.peak["bf16"] * 8
        tokens = 16 * s.config.data.seq_len
        assert done == pytest.approx(tokens * train_flops_per_token(s.config.model, s.config.data.seq_len), rel=1e-6)


def test_more_tokens_take_longer_but_less_than_in_proportion():
    one, two = (sum(op.total for op in passed(train__micro_batch=n, train__global_batch=16)) for n in (1, 2))
    assert one < two < 2 * one


def test_graphs_take_launches_away_first_static_steps_then_all():
    waits = [
        sum(op.host for op in passed(choices=PlanChoices(graphs=graphs), parallel__ep=8))  # pyright: ignore[reportArgumentType]
        for graphs in ("none", "static", "whole")
    ]
    assert waits[0] > waits[1] > waits[2] == 0


def test_a_loop_over_experts_costs_launches():
    whole, looped = (
        sum(op.host for op in passed(choices=PlanChoices(stack=stack), parallel__ep=8))  # pyright: ignore[reportArgumentType]
        for stack in ("moefold", "megatron")
    )
    assert looped > whole


@pytest.mark.parametrize("stack", ["moefold", "megatron"])
@pytest.mark.parametrize("region", ["norm", "up", "core", "mlp", "shared", "activation", "experts", "moe", "layer"])
def test_recompute_costs_time_and_never_more_than_a_forward(region: str, stack: Any):
    plain, again = (
        passed("deepseek-v3", choices=PlanChoices(recompute=r, stack=stack), parallel__ep=8) for r in ((), (region,))
    )
    assert plain.D.memory == 0
    assert again.D.memory <= again.F.total * 1.001
    assert again.F == plain.F
    never_kept = region == "activation" and stack == "moefold"  # its kernel makes it again anyway
    assert (again.D.memory > 0) != never_kept


@pytest.mark.parametrize(("model", "share"), [("mixtral-8x7b", 1 / 2), ("kimi-k2", 3 / 5)])  # 128 / 128, 192 / 128
def test_largest_logits_take_the_products_with_keys_once_more_and_recompute_repeats_none_of_them(
    model: str, share: float
):
    for recompute in ((), ("core",), ("layer",)):
        choices = PlanChoices(recompute=recompute)
        plain, clipped = (passed(model, choices=choices, parallel__ep=8, optim__qk_clip=n) for n in (0, 100))
        assert clipped.F.attention == pytest.approx(plain.F.attention * (1 + share))
        assert clipped.F._replace(attention=0) == plain.F._replace(attention=0)
        assert clipped[1:] == plain[1:]


def test_tokens_that_are_dispatched_again_travel_once_more():
    plain, again = (passed(choices=PlanChoices(recompute=r), parallel__ep=8) for r in ((), ("dispatch",)))
    one_way = plain.F.travel / 2
    assert one_way > 0
    assert again.D.travel - plain.D.travel == pytest.approx(one_way)
    assert again.D.memory > 0


def test_row_chunks_hide_travel_behind_experts_and_cost_them_rows_and_launches():
    keys = {"model": "mixtral-8x7b", "parallel__ep": 8, "train__micro_batch": 4, "train__global_batch": 32}
    whole, halves = (passed(**keys, parallel__row_chunks=n) for n in (1, 2))
    for of_whole, of_halves in zip(whole[:2], halves[:2], strict=True):
        assert 0.45 * of_whole.travel < of_halves.travel < of_whole.travel
    assert sum(op.products for op in halves) > sum(op.products for op in whole)
    assert sum(op.host for op in halves) > sum(op.host for op in whole)
    assert sum(op.ideal for op in halves) == pytest.approx(sum(op.ideal for op in whole))


def test_row_chunks_of_paired_passes_leave_their_travel_to_the_other_pass():
    keys = {"parallel__ep": 8, "pipeline__pair": "true", "train__global_batch": 16}
    whole, halves = (passed(**keys, parallel__row_chunks=n) for n in (1, 2))
    assert halves.F.travel > whole.F.travel, "each message has a latency"


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_a_chunked_pass_ends_when_its_lanes_do(chunks: int):
    free = ChunkedPass(0.0, 3.0, 2.0, chunks)
    assert free.end == pytest.approx(5.0)
    sent = ChunkedPass(1.0, 0.0, 0.0, chunks)
    assert sent.end == 2 * chunks
    even = ChunkedPass(1.0, float(chunks), float(chunks), chunks)
    assert even.end == 2 * chunks + 1, "all but the last message is hidden"


def test_results_that_are_swapped_again_cost_a_part_of_the_exchange_over_cp():
    swaps = {"parallel__cp": 2, "parallel__context": "all_to_all"}
    plain, again = (passed(choices=PlanChoices(recompute=r), **swaps) for r in ((), ("swap",)))
    assert 0 < again.D.memory < plain.F.joined
    alone = passed(choices=PlanChoices(recompute=("swap",)))
    assert alone.D.memory == 0


def test_low_precision_is_faster_where_products_are_large():
    wide, low = (
        sum(op.device for op in passed("mixtral-8x7b", choices=PlanChoices(precision=p), train__micro_batch=8))  # pyright: ignore[reportArgumentType]
        for p in ("bf16", "fp8")
    )
    assert low < 0.85 * wide


def test_experts_travel_only_between_ranks_and_farther_beyond_a_domain():
    alone, inside = (passed(parallel__ep=ep).F.travel for ep in (1, 8))
    assert alone == 0 < inside
    s = build_run_setting(
        resolve_recipe("qwen3-30b-a3b", ["--parallel.ep=64", "--train.global_batch=64"], 64), 64, PlanChoices()
    )
    far, near = (StepClock(s, replace(find_gpu_by_name("h100"), domain=domain)).one_way_seconds for domain in (8, 64))
    assert far > 2 * near


def test_cutting_experts_among_ranks_costs_talk():
    both, spread = (passed(parallel__ep=ep, parallel__etp=8 // ep).F.travel for ep in (4, 8))
    assert both > spread


def test_fully_sharded_weights_travel_with_every_microbatch():
    plain, cut = (passed(choices=PlanChoices(sharding=s), parallel__ep=1) for s in ("zero", "fsdp"))  # pyright: ignore[reportArgumentType]
    assert cut.D.joined > plain.D.joined


def test_offloading_is_hidden_by_a_fast_link_to_the_host():
    choices = PlanChoices(offload=("experts", "core"))
    slow, fast = (passed("deepseek-v3", gpu, choices, parallel__ep=8).D.memory for gpu in ("h100", "gb200"))
    assert slow > fast


def test_a_ring_of_context_ranks_works_on_short_chunks():
    whole = passed(data__seq_len=65_536, train__global_batch=8)
    cut = passed(data__seq_len=65_536, parallel__cp=8, train__global_batch=8)
    assert cut.F.attention > whole.F.attention / 8  # the same FLOPs, at the rate of chunks


def test_a_configuration_is_not_changed_by_being_priced():
    config: Config = resolve_recipe("tiny", [], 8)
    time_training_step(build_run_setting(config, 8, PlanChoices()), find_gpu_by_name("a100"))
    assert config == resolve_recipe("tiny", [], 8)


# Recipes of the trainer in FP8.

OLMOE = {"data__seq_len": 4096, "train__micro_batch": 4, "train__global_batch": 4}


def experts_in(recipe: str, accumulate: str = "promoted"):
    """The clock, the shapes and the experts of a layer of OLMoE on one H200."""
    words = {**OLMOE, "precision__recipe": recipe, "precision__accumulate": accumulate}
    s = setting("olmoe-1b-7b", 1, **words)
    clock = StepClock(s, find_gpu_by_name("h200"))
    step = next(step for step in s.count_piece("t", 0).steps if step.name == "experts")
    return clock, s.layer_shapes(0), step


TENSOR_CORE = ("fp8_row", "fast")
EXPERT_RATES = {  # TFLOP/s of up, down; data gradients; weight gradients
    ("plain", "promoted"): (660, 660, 660, 660, 660, 660),
    ("fp8_block", "promoted"): (890, 1033, 1114, 556, 881, 928),
    ("fp8_hybrid", "promoted"): (890, 1033, 1114, 556, 660, 660),
    TENSOR_CORE: (1230, 1136, 1297, 748, 881, 928),
}


@pytest.mark.parametrize("recipe", EXPERT_RATES)
def test_products_of_a_recipe_run_at_the_measured_ratio_of_the_bf16_rate(recipe: tuple[str, str]):
    clock, shapes, step = experts_in(*recipe)
    up, down = step.gemms
    found: list[float] = []
    for pass_name in ("forward", "data", "weight"):
        for gemm in (up, down):
            rate, element = clock.rate_and_element(gemm, shapes, pass_name)
            found.append(rate / clock.gpu.achieved_rate("bf16") * 660)
            assert element == (2 if found[-1] == pytest.approx(660) else 1)
    assert found == pytest.approx(EXPERT_RATES[recipe])


QUANTISED = {  # bytes of passes over (N, W), (R, F) in forward; (R, W), (R, F), (R, 2F) in backward
    "plain": ((0, 0), (0, 0, 0)),
    "fp8_block": ((3, 0), (4 + 3, 3, 4)),
    "fp8_hybrid": ((3, 0), (3 + 4 + 4, 0, 3)),
    "fp8_tensor": ((5, 5), (6 + 5, 5, 6)),
    "fp8_row": ((5, 5), (6 + 5, 5, 6)),
}


@pytest.mark.parametrize("recipe", QUANTISED)
def test_quantisation_of_fused_experts_moves_the_bytes_of_its_passes(recipe: str):
    _, s, step = experts_in(recipe)
    (tokens, activated), (rows, inner, gates) = QUANTISED[recipe]
    assert s.fuses_experts
    forward = s.N * s.W * tokens + s.R * s.F * activated
    assert forward_quantise_bytes("experts", step.gemms, s) == forward
    backward = s.R * (s.W * rows + s.F * inner + 2 * s.F * gates)
    assert backward_quantise_bytes("experts", step.gemms, s) == backward


def test_quantisation_runs_at_its_own_bandwidth_and_products_gain_more_with_wider_experts():
    plain = time_training_step(setting("mixtral-8x22b", 1, model__layers=2, **OLMOE), find_gpu_by_name("h200"))
    words = {**OLMOE, "precision__recipe": "fp8_block"}
    s = setting("mixtral-8x22b", 1, model__layers=2, **words)
    gpu = find_gpu_by_name("h200")
    block = time_training_step(s, gpu)
    assert 1.1 < plain.seconds / block.seconds < 1.6
    clock = StepClock(s, gpu)
    assert clock.quantise_bandwidth == pytest.approx(2.2e12)
    requantised = sum(step.requantised for step in s.count_piece("t", 0).steps)
    assert block.optimizer - plain.optimizer == pytest.approx(2 * requantised / 2.2e12)

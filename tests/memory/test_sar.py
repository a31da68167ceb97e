"""`memory.recompute sar`, the selective rematerialisation of MegaScale-MoE (section 4.1): in the paper's setting a
layer keeps the bytes of its formula, by hooks and by the planner; tokens are dispatched again before the backward of
`combine`, on the comm lane; bits stay."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from moefold.comm.byte_counters import BytesSent, counted_bytes_sent
from moefold.comm.lanes import Lanes
from moefold.config.memory_regions import without_presets
from moefold.config.run import Config, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import facts_from_config
from moefold.layout.axes import World, create_world
from moefold.memory.choose import attach_configured_policies
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.pipeline.passage import Passage
from moefold.pipeline.segments import segments_for_pairing
from moefold.plan.layer.layer_costs import SavedActivation, count_piece
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe
from tests.memory.test_recompute import LAYOUTS, SIZES, differing, recomputing, trace_choices
from tests.plan.layer.test_moefold_layers import SMALL, kept_by_steps
from tests.support.models import transformer
from tests.support.ranks import run_ranks

RANKS = 2
SETTING = ParallelConfig(cp=RANKS, ep=RANKS, context="all_to_all", dispatcher="all_gather")
MIXTRAL_LIKE = (
    "--model.layers=2 --model.hidden=64 --model.attention.heads=4 --model.attention.kv_heads=2 "
    "--model.attention.head_dim=16 --model.attention.qk_norm=none --model.moe.ffn=96 --model.moe.experts=4 "
    "--model.moe.top_k=2 --data.seq_len=64 --train.micro_batch=2 --train.global_batch=2"
)
FIGURE_9 = {  # the tensors that the paper keeps, by step and name in the planner's table
    ("attend", "stream"): "hidden",
    ("attend", "queries"): "qkv_a2a",
    ("attend", "keys"): "qkv_a2a",
    ("attend", "values"): "qkv_a2a",
    ("attend", "attended, before reordering"): "attn",
    ("route", "stream"): "ln2_in",
    ("experts", "pre-activation"): "fc1_out, fc3_out",
}
REBUILT = {  # of the tensors that the paper does not keep, those that a layer keeps without the preset
    ("attend", "normed"): "ln1_out",
    ("attend", "attended"): "attn_a2a",
    ("route", "normed"): "ln2_out",
    ("experts", "rows"): "ffn_in",
    ("experts", "activated"): "fc2_in",
}
BESIDE = {  # floating-point tensors of a number or a few for each token, head or expert, which the paper does not count
    ("attend", "scale of stream"),
    ("attend", "log-sum-exp"),
    ("attend", "rotary tables"),
    ("route", "scale of stream"),
    ("route", "logits"),
    ("route", "shares"),
    ("route", "weights"),
    ("route", "load share of each expert"),
    ("experts", "weights"),
}
COMPOSED_NORM = {("attend", "stream scaled"), ("route", "stream scaled")}  # on a CPU alone
INTEGERS = {"index", "slots", "order of rows", "choice", "mask of missing choices", "token and slot of each parcel"}


def configured(recompute: str = "", words: str = MIXTRAL_LIKE) -> Config:
    config = replace(resolve_recipe("tiny", words.split()), parallel=SETTING)
    return recomputing(config, recompute)


def planned_tensors(config: Config, choices: PlanChoices) -> list[SavedActivation]:
    """The floating-point tensors that one layer keeps."""
    choices = replace(choices, recompute=config.memory.recompute)
    portion = make_rank_portion(config, "all_gather", defers_wgrad=False)
    steps = count_piece(config.model, "t", 0, portion, choices).steps
    return [x for step in steps for x in step.kept_tensors if x.name not in INTEGERS and x.bytes >= SMALL]


def planned_bytes(tensors: list[SavedActivation], names: object) -> float:
    return sum(x.bytes for x in tensors if (x.step, x.name) in names)  # pyright: ignore[reportOperatorIssue]


def token_bytes(config: Config, element: int) -> float:
    """bsh/n, and by it the sizes of the formula: k, f and m."""
    return config.train.micro_batch * config.data.seq_len * config.model.hidden / config.parallel.cp * element


def formula(config: Config, element: int) -> float:
    """(2kf + 4 + 2/m) bsh/n"""
    moe, attention = config.model.moe, config.model.attention
    f = moe.ffn / config.model.hidden
    m = attention.heads / attention.kv_heads
    return (2 * moe.top_k * f + 4 + 2 / m) * token_bytes(config, element)


def test_the_preset_is_its_regions_in_all_layers_or_in_some():
    regions = ("norm", "swap", "dispatch", "activation")
    assert without_presets(["sar"]) == regions
    assert without_presets(["up", "sar@1-2", "norm@1-2"]) == ("up", *(f"{name}@1-2" for name in regions))


def test_the_planner_keeps_the_formula_of_the_paper():
    choices = PlanChoices(precision="fp32", device="cpu")
    config = configured("sar")
    kept = planned_tensors(config, choices)
    assert {(x.step, x.name) for x in kept} <= set(FIGURE_9) | BESIDE | COMPOSED_NORM
    assert planned_bytes(kept, FIGURE_9) == formula(config, 4)
    plain = planned_tensors(configured(), choices)
    assert {(x.step, x.name) for x in plain} == {(x.step, x.name) for x in kept} | set(REBUILT)
    moe = config.model.moe
    rebuilt = (3 + moe.top_k + moe.top_k * moe.ffn / config.model.hidden) * token_bytes(config, 4)
    assert planned_bytes(plain, REBUILT) == rebuilt


def test_a_layer_of_mixtral_keeps_the_formula_and_a_few_percent():
    """Of 8 GPUs, with experts as a composition of ops, as in the paper."""
    config = resolve_recipe("mixtral-8x7b", ["--kernels.force=expert_mlp=reference", "--data.seq_len=8192"])
    config = recomputing(replace(config, parallel=replace(SETTING, cp=8, ep=8)), "sar")
    kept = planned_tensors(config, PlanChoices())
    assert planned_bytes(kept, FIGURE_9) == formula(config, 2)
    total = sum(x.bytes for x in kept)
    assert planned_bytes(kept, BESIDE) == total - formula(config, 2)
    assert total < 1.02 * formula(config, 2)


# ---- two ranks


def made(world: World, config: Config) -> Transformer:
    here = create_world(world.rank, world.size, world.device, config.parallel)
    kernels = BoundKernels(facts_from_config(config, "cpu", "fp32"))
    model = transformer(config.model, config.data.seq_len, kernels, here, config.parallel)
    initialise_parameters(model, seed=1)
    attach_configured_policies(model, config)
    return model


class SentInBackward(NamedTuple):
    """Bytes by step: where exchanges have the comm lane; where one lane runs all steps, by this lane and in all."""

    two_lanes: Counter[str]
    one_lane: Counter[str]
    in_all: int


Measured = tuple[Counter[str], SentInBackward]


def kept_and_sent(world: World, configs: list[Config]) -> list[Measured]:
    """By configuration, of all layers: bytes kept of floating-point tensors by step, and bytes sent in backward."""
    found: list[Measured] = []
    for config in configs:
        model = made(world, config)
        kept = kept_by_steps(model, config, floats=True)
        with counted_bytes_sent() as in_all:
            one_lane = sent_in_backward(model, config, None)
        forward = sum(one_lane.pop("forward").values())
        two_lanes = sent_in_backward(model, config, Lanes(world.device))
        sent = SentInBackward(sum_by_name(two_lanes), sum_by_name(one_lane), sum(in_all.values()) - forward)
        found.append((kept, sent))
    return found


def sum_by_name(sent: dict[str, BytesSent]) -> Counter[str]:
    return Counter({name: sum(by_axis.values()) for name, by_axis in sent.items() if name != "forward"})


def sent_in_backward(model: Transformer, config: Config, lanes: Lanes | None) -> dict[str, BytesSent]:
    """Bytes sent by segment, named by its last step, of the lane that it runs on."""
    shape = (config.train.micro_batch, config.data.seq_len)
    tokens = torch.randint(256, shape, generator=torch.Generator().manual_seed(1))
    segments = segments_for_pairing(model.steps(model.stages[0]))
    passage = Passage(segments)
    sent: dict[str, BytesSent] = defaultdict(Counter)

    def run(name: str, lane: str, function: Callable[..., Any], *inputs: Any) -> Any:
        def count() -> Any:
            with counted_bytes_sent(this_thread=True) as by_axis:
                result = function(*inputs)
            sent[name] += by_axis
            return result

        return lanes.send(count).result() if lanes and lane == "comm" else count()

    passage.begin(model.begin(tokens, tokens.clone()))
    for number, segment in enumerate(segments):
        run("forward", segment.lane, passage.run_forward, number, passage.take_inputs(number))
    loss = passage.out["losses_1M"].sum() + passage.out["aux"]
    passage.set_output_gradients([loss], [torch.ones_like(loss)])
    for number, segment in reversed(list(enumerate(segments))):
        gradients = passage.take_gradients(number)
        run(segment.steps[-1].spec.name, segment.lane, passage.run_backward, number, gradients)
    return sent


@cache
def on_two_ranks() -> list[list[Measured]]:
    """By rank: without the preset, and with it."""
    return run_ranks(kept_and_sent, RANKS, [configured(), configured("sar")])


@pytest.mark.parametrize("recompute", ["", "sar"])
def test_autograd_holds_what_the_planner_says(recompute: str):
    """Both ranks together: each has the rows that the router gave it."""
    config = configured(recompute)
    held: Counter[str] = Counter()
    for plain, rebuilt in on_two_ranks():
        held += rebuilt[0] if recompute else plain[0]
    said: Counter[str] = Counter()
    for x in planned_tensors(config, PlanChoices(precision="fp32", device="cpu")):
        said[x.step] += RANKS * config.model.layers * int(x.bytes)
    assert {step: held[step] for step in said} == said
    assert not set(held) - set(said) - {"embed", "predict"}


def test_the_preset_frees_what_the_paper_rebuilds():
    config = configured("sar")
    k, f = config.model.moe.top_k, config.model.moe.ffn / config.model.hidden
    freed = sum((plain[0] - rebuilt[0]).total() for plain, rebuilt in on_two_ranks())
    assert freed == RANKS * config.model.layers * (3 + k + k * f) * token_bytes(config, 4)


def test_tokens_are_dispatched_again_by_combine_or_beside_other_steps_and_attention_swaps_again():
    """Exchanges on a lane of their own send them in the backward of `combine`; otherwise another lane than that of the
    steps does, before `combine` begins."""
    config = configured("sar")
    tokens = config.model.layers * token_bytes(config, 4)
    swapped, dispatched = tokens * (RANKS - 1) / RANKS, tokens * (RANKS - 1)
    for (_, plain), (_, rebuilt) in on_two_ranks():
        assert not plain.two_lanes - rebuilt.two_lanes
        assert rebuilt.two_lanes - plain.two_lanes == {"combine": dispatched, "attend": swapped}
        assert rebuilt.one_lane - plain.one_lane == {"attend": swapped}
        assert rebuilt.in_all - plain.in_all == swapped + dispatched


# ---- bits

CUT_EXPERTS = [
    *("--parallel.cp", "2", "--parallel.context", "all_to_all"),
    *("--parallel.ep", "2", "--parallel.etp", "2", "--parallel.dispatcher", "all_gather"),
]
RUNS = {
    "heads swapped, experts cut": (4, CUT_EXPERTS),
    "no shared experts": (2, ["--parallel.ep", "2", "--model.moe.shared_ffn", "0", "--model.mtp", "1"]),
    "zero bubble": LAYOUTS["zero bubble"],
    "paired": LAYOUTS["paired"],
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_equal_to_the_bit_on_every_rank(name: str):
    """With shared experts, which run beside the second dispatch, and without, where attention does."""
    size, words = RUNS[name]
    batch = ["--train.global_batch", "4", "--model.attention.kv_heads", "2"]
    config = resolve_recipe("tiny", [*SIZES, *batch, *words], size)
    configs = [config, recomputing(config, "sar"), recomputing(config, "dispatch,experts")]
    for kept, *rebuilt in run_ranks(trace_choices, size, configs):
        assert [differing(trace, kept) for trace in rebuilt] == [[], []]

"""FP8 block products on eight ranks: equal to one rank to the bit over dp, pp and ep, within a bound over tp, etp and
cp.

Shards are multiples of 128 and a sequence fills whole tiles, so that every block holds the same values on any number
of ranks. A weight gradient depends on which rows share a tile: it is compared with one rank whose microbatch has the
same rows.

    dp, pp    every product has the tokens of one microbatch, on one rank as on eight
    ep        dense products have the tokens of one rank; an expert's rows come from all of its ep ranks

Over tp, etp and cp sums are taken in another order: last bits differ, and some values round to the next FP8 number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moefold.checkpoint.format.boxes import box_slices
from moefold.config.rules import check_config
from moefold.config.run import (
    AttentionConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RouterConfig,
    TrainConfig,
)
from moefold.layout.axes import single_rank_world
from moefold.train.parity import RankTrace, TraceEntry, first_mismatch, trace_run
from tests.support.ranks import run_ranks
from tests.test_layouts_agree import trace_all

WORLD = 8
BOUND = 0.05  # of the norm of a gradient; FP8 itself changes gradients of this model by up to 0.09
BASE = Config(
    name="fp8",
    model=ModelConfig(
        layers=2,
        hidden=128,
        vocab=256,
        dense_ffn=256,
        attention=AttentionConfig(heads=4, kv_heads=4, head_dim=64),
        moe=MoeConfig(experts=8, top_k=2, ffn=256, shared_ffn=256, dense_layers=1),
    ),
    data=DataConfig(seq_len=128, tokenizer="byte"),
    train=TrainConfig(device="cpu", precision="fp32", global_batch=8, micro_batch=1, steps=8),
    optim=OptimConfig(warmup=0, lr=1e-2, eps=1e-3, max_norm=1e9),
    precision=PrecisionConfig(recipe="fp8_block"),
)


def on_eight(config: Config, steps: int) -> list[RankTrace]:
    check_config(config, WORLD)
    return [traces[0] for traces in run_ranks(trace_all, WORLD, [(config, "learned")], steps)]


def on_one(config: Config, steps: int, micro_batch: int = 1) -> RankTrace:
    train = replace(config.train, micro_batch=micro_batch)
    alone = replace(config, parallel=ParallelConfig(), pipeline=PipelineConfig(), train=train)
    return trace_run(alone, single_rank_world(), steps)


def differing(one: RankTrace, ranks: list[RankTrace], compared: Callable[[str], bool]) -> list[str]:
    """What differs in any bit of fp32; sums of gradients are fp64 and may differ in their last bit."""
    whole = {entry.what: entry.values for entry in one}
    found: set[str] = set()
    for trace in ranks:
        for entry in filter(lambda entry: compared(entry.what), trace):
            right = whole[entry.what][box_of(entry)]
            if not torch.equal(right.float(), entry.values.float()):
                found.add(entry.what)
    return sorted(found)


def box_of(entry: TraceEntry) -> tuple[slice, ...]:
    return box_slices(tuple(zip(entry.starts, entry.values.shape, strict=True)))


def everything(what: str) -> bool:
    return True


@pytest.mark.extended
def test_data_parallel_ranks_equal_one_rank_to_the_bit():
    assert differing(on_one(BASE, 2), on_eight(BASE, 2), everything) == []


@pytest.mark.extended
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_pipeline_equals_one_rank_to_the_bit_also_with_deferred_weight_gradients(schedule: str):
    model = replace(BASE.model, layers=4)
    pipeline = PipelineConfig(schedule=schedule)  # pyright: ignore[reportArgumentType]
    config = replace(BASE, model=model, parallel=ParallelConfig(pp=4), pipeline=pipeline)
    assert differing(on_one(config, 1), on_eight(config, 1), everything) == []


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_expert_parallel_ranks_equal_one_rank_to_the_bit(dispatcher: str):
    config = replace(BASE, parallel=ParallelConfig(ep=8, dispatcher=dispatcher))
    ranks = on_eight(config, 1)

    def is_of_experts(what: str) -> bool:
        return ".experts." in what

    def is_dense(what: str) -> bool:
        return not is_of_experts(what) and not what.endswith("gradient norm")

    assert differing(on_one(config, 1), ranks, is_dense) == []
    assert differing(on_one(config, 1, micro_batch=8), ranks, is_of_experts) == []


def with_fixed_routing(config: Config) -> Config:
    """A token whose two best scores are nearly equal may go to another expert for a last bit."""
    moe = replace(config.model.moe, router=RouterConfig(force_balance=True))
    return replace(config, model=replace(config.model, moe=moe))


BOUNDED = {
    "tp": (ParallelConfig(tp=2), 128, 1),
    "etp": (ParallelConfig(etp=2, ep=4, dispatcher="all_to_all"), 128, 4),
    "cp": (ParallelConfig(cp=2, context="ring"), 512, 1),
    "rows of experts in another order": (ParallelConfig(ep=8, dispatcher="dedup"), 128, 8),
}


@pytest.mark.extended
def test_adapters_beside_fp8_products_stay_within_the_bound():
    """Of two steps: in the first one B is zero, and so the gradient of A."""
    layout = ParallelConfig(tp=2, etp=2, ep=4, dispatcher="all_to_all")
    config = with_fixed_routing(replace(BASE, lora=LoraConfig(rank=8, alpha=16.0), parallel=layout))
    one = on_one(config, 2, 4)
    assert first_mismatch(one, on_eight(config, 2), BOUND) is None
    moved = [entry for entry in one if entry.what.startswith("step 2: gradient") and entry.what.endswith("lora.a")]
    assert moved
    assert all(bool(entry.values.any()) for entry in moved)
    plain = on_one(replace(config, precision=PrecisionConfig()), 2, 4)
    assert first_mismatch(one, [plain], 1e-6) is not None, "products are not in FP8"


@pytest.mark.extended
@pytest.mark.parametrize("name", BOUNDED)
def test_sums_in_another_order_stay_within_the_bound(name: str):
    parallel, seq_len, micro_batch = BOUNDED[name]
    config = with_fixed_routing(replace(BASE, parallel=parallel, data=replace(BASE.data, seq_len=seq_len)))
    ranks = on_eight(config, 1)
    one = on_one(config, 1, micro_batch)
    assert first_mismatch(one, ranks, BOUND) is None
    losses = [entry for entry in one if entry.what.endswith("loss")]
    assert first_mismatch(losses, [[e for e in rank if e.what.endswith("loss")] for rank in ranks], 1e-5) is None

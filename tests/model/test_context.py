"""Queries meet the keys of other ranks as if all were here."""

from __future__ import annotations

from functools import cache
from math import log
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from moefold.comm.collectives import all_reduce_max_no_grad, all_reduce_no_grad
from moefold.config.run import ParallelConfig
from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.largest_logit import largest_logit
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG
from moefold.kernels.facts import Facts
from moefold.layout.axes import Axis, World, create_world, single_rank_world
from moefold.model.attention.context_parallel import (
    CONTEXT_MECHANISMS,
    ContextMechanism,
    RingSetting,
    begins_from_chunks,
    blocks_seen,
    causal_chunk_pairs,
    choose_context_mechanism,
)
from moefold.model.attention.logit_watch import LogitWatch
from moefold.model.steps import Region
from tests.support.models import share
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
FACTS = Facts("cpu", "fp64")
BINDINGS = {"chosen": BoundKernels(FACTS), "reference": BoundKernels(FACTS, [f"{op}=reference" for op in CATALOG])}
SEQUENCES, LENGTH, WIDTH = 2, 32, 6
NODE_SIZES = {2: (1, 2), 4: (1, 2, 4)}
NAMES = ("largest logits", "result", "gradient of q", "gradient of k", "gradient of v", "gradient of the sinks")


class Form(NamedTuple):
    """Query heads, key and value heads, width of a value, window, sinks, documents, and the factor on scores."""

    heads: int = 8
    kv_heads: int = 4
    value_width: int = WIDTH
    window: int = 0
    sinks: bool = False
    documents: bool = False
    scale: float = WIDTH**-0.5


# Chunks are 8 positions long on two ranks and 4 on four: windows shorter, as long, longer, and over most of the rest.
FORMS = {
    "grouped": Form(),
    "full, narrow values": Form(kv_heads=8, value_width=4, scale=0.7),
    "short window": Form(window=3),
    "window of one": Form(window=1, value_width=4),
    "window of a chunk": Form(window=4, sinks=True),
    "window of a chunk and one": Form(window=9, sinks=True, value_width=4),
    "long window": Form(window=13, kv_heads=8),
    "very long window": Form(window=27, sinks=True, value_width=8),
    "sinks": Form(sinks=True),
    "one key head": Form(kv_heads=1),
    "two key heads, documents, sinks": Form(kv_heads=2, documents=True, sinks=True, value_width=4),
    "sinks, narrow values": Form(kv_heads=8, value_width=4, sinks=True),
    "documents": Form(documents=True),
    "documents, full, narrow values": Form(documents=True, kv_heads=8, value_width=4),
    "documents, window": Form(documents=True, window=5),
    "documents, sinks": Form(documents=True, sinks=True),
    "documents, long window, sinks": Form(documents=True, window=11, sinks=True, value_width=4),
}
# Borders at the begin, the middle and the end of chunks; documents of one token, of a chunk, and over several chunks.
DOCUMENT_STARTS = [[0, 1, 4, 12, 13, 14, 30, 31], [0, 16, 17, 24]]


def document_begins(form: Form) -> torch.Tensor | None:
    if not form.documents:
        return None
    is_start = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    for sequence, starts in enumerate(DOCUMENT_STARTS):
        is_start[sequence, starts] = 1
    return (is_start * torch.arange(LENGTH)).cummax(1).values


def inputs(form: Form) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """q, k and v, the gradient of the result, and the sinks."""
    generator = torch.Generator().manual_seed(form.heads)
    sizes = [(form.heads, WIDTH), (form.kv_heads, WIDTH), (form.kv_heads, form.value_width)]
    sizes.append((form.heads, form.value_width))
    *qkv, dy = (torch.randn(SEQUENCES, LENGTH, *n, generator=generator, dtype=torch.float64) * 1.5 for n in sizes)
    sinks = torch.randn(form.heads, generator=generator, dtype=torch.float64) if form.sinks else None
    return qkv, dy, sinks


def outcome(
    context: ContextMechanism,
    qkv: list[torch.Tensor],
    dy: torch.Tensor,
    sinks: torch.Tensor | None,
    form: Form,
) -> list[torch.Tensor]:
    """The largest logit of each head as far as it is known here, result and gradients, the sinks' last."""
    leaves = [x.clone().requires_grad_() for x in (*qkv, *(() if sinks is None else (sinks,)))]
    q, k, v, *sink = leaves
    watch = LogitWatch(largest_logit)
    settings = (form.scale, form.window, sink[0] if sink else None, document_begins(form))
    if context.attend is BINDINGS["reference"][attention]:  # one rank: its attention knows no watch
        watch.note(q, k, form.scale, form.window, document_begins(form))
        y_BShV = context.attend(q, k, v, *settings)
    else:
        y_BShV = context.attend(q, k, v, *settings, watch)
    joined = context.heads_joiner(Region("swap"))(y_BShV)
    y = joined.view_as(dy)
    gradients = torch.autograd.grad(y, leaves, dy)
    return [watch.take(), y.detach(), *gradients]


def errors(world: World) -> dict[tuple[str, str, str, int], dict[str, float]]:
    """How far this rank is from its positions of whole attention, for every mechanism. The sinks' gradient is one
    summand on every rank; the largest logits are the largest of all ranks."""
    found = {}
    everything = choose_context_mechanism("ring", BINDINGS["reference"], single_rank_world())
    whole = {name: outcome(everything, *inputs(form), form) for name, form in FORMS.items()}
    for node_size in NODE_SIZES[world.size]:
        here = create_world(world.rank, world.size, world.device, ParallelConfig(cp=world.size), node_size)
        mine = share(SEQUENCES, LENGTH, here)
        for name, form in FORMS.items():
            qkv, dy, sinks = inputs(form)
            parts, d_part = [x[:, mine.local_positions] for x in qkv], dy[:, mine.local_positions]
            expected = [x[:, mine.local_positions] if x.dim() > 1 else x for x in whole[name]]
            for mechanism in CONTEXT_MECHANISMS:
                if node_size != world.size and mechanism != "hierarchical":
                    continue  # the others know of no nodes
                for binding, kernels in BINDINGS.items():
                    context = choose_context_mechanism(mechanism, kernels, here)
                    values = outcome(context, parts, d_part, sinks, form)
                    largest, *values = values
                    values = [all_reduce_no_grad(x.clone(), here.axis("cp")) if x.dim() == 1 else x for x in values]
                    values = [all_reduce_max_no_grad(largest, here.axis("cp")), *values]
                    off = [(a - b).abs().max().item() for a, b in zip(values, expected, strict=True)]
                    found[mechanism, binding, name, node_size] = dict(zip(NAMES, off, strict=False))
    return found


@cache
def on_ranks(size: int):
    return run_ranks(errors, size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mechanism", CONTEXT_MECHANISMS)
@pytest.mark.parametrize("size", NODE_SIZES)
def test_a_mechanism_equals_whole_attention_with_its_gradients_and_largest_logits(size: int, mechanism: str, form: str):
    seen = 0
    for rank, found in enumerate(on_ranks(size)):
        for case, off in found.items():
            if (case[0], case[2]) == (mechanism, form):
                seen += 1
                assert len(off) == (6 if FORMS[form].sinks else 5)
                for name, error in off.items():
                    assert error <= 1e-12, f"rank {rank}, {case}: {name} is off by {error:.1e}"
    assert seen == size * len(BINDINGS) * (len(NODE_SIZES[size]) if mechanism == "hierarchical" else 1)


@pytest.mark.parametrize("mechanism", CONTEXT_MECHANISMS)
@pytest.mark.parametrize("form", FORMS)
def test_alone_nothing_is_met_and_the_kernel_is_called(form: str, mechanism: str):
    (q, k, v), _, sinks = inputs(FORMS[form])
    settings = (FORMS[form].scale, FORMS[form].window, sinks, document_begins(FORMS[form]))
    alone = choose_context_mechanism(mechanism, BINDINGS["reference"], single_rank_world())
    assert torch.equal(alone.attend(q, k, v, *settings), attention.reference(q, k, v, *settings))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_pairs_of_chunks_are_those_a_causal_mask_leaves_and_every_rank_has_as_many(ranks: int):
    size, every, work = 4, set(), []
    chunks = [(r, 2 * ranks - 1 - r) for r in range(ranks)]
    for mine in range(ranks):
        hops = [(theirs, pair) for theirs in range(ranks) for pair in causal_chunk_pairs(mine, theirs, ranks, size, 0)]
        for theirs, (queries, keys, ahead) in hops:
            query, key = chunks[mine][queries.start // size], chunks[theirs][keys.start // size]
            assert (queries.stop - queries.start, keys.stop - keys.start) == (size, size)
            assert ahead == (query - key) * size
            every.add((query, key))
        work.append(sum(0.5 if ahead == 0 else 1.0 for _, (_, _, ahead) in hops))
        assert {len(causal_chunk_pairs(mine, theirs, ranks, size, 0)) for theirs in range(ranks) if theirs != mine} <= {
            2
        }
    assert every == {(a, b) for a in range(2 * ranks) for b in range(a + 1)}
    assert len(set(work)) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_with_a_window_two_chunks_meet_exactly_where_some_query_sees_some_key(ranks: int, size: int):
    chunks = [(r, 2 * ranks - 1 - r) for r in range(ranks)]
    for window in range(1, 2 * ranks * size + 2):
        met = {
            (chunks[mine][queries.start // size], chunks[theirs][keys.start // size])
            for mine in range(ranks)
            for theirs in range(ranks)
            for queries, keys, _ in causal_chunk_pairs(mine, theirs, ranks, size, window)
        }
        positions = range(2 * ranks * size)
        assert met == {(q // size, k // size) for q in positions for k in positions if 0 <= q - k < window}, window


def repeats(world: World) -> dict[str, bool]:
    """Whether two passes of each mechanism agree to the bit, in fp32, where the order of a sum shows."""
    here = create_world(world.rank, world.size, world.device, ParallelConfig(cp=world.size), world.size)
    mine, form = share(SEQUENCES, LENGTH, here), Form(sinks=True)
    qkv, dy, sinks = inputs(form)
    narrow = [x[:, mine.local_positions].float() for x in (*qkv, dy)]
    assert sinks is not None
    found: dict[str, bool] = {}
    for name in CONTEXT_MECHANISMS:
        context = choose_context_mechanism(name, BoundKernels(Facts("cpu", "fp32")), here)
        first, second = (outcome(context, narrow[:3], narrow[3], sinks.float(), form) for _ in range(2))
        found[name] = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return found


def test_two_passes_of_any_mechanism_agree_to_the_bit():
    assert run_ranks(repeats, 2) == [dict.fromkeys(CONTEXT_MECHANISMS, True)] * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [0, 1, 3, 8])
def test_within_documents_a_ring_computes_exactly_the_blocks_in_which_some_query_sees_some_key(ranks: int, window: int):
    size, skipped = 3, 0
    length = 2 * ranks * size
    chunks = [(r, 2 * ranks - 1 - r) for r in range(ranks)]
    for seed in range(20):
        is_start = torch.rand(SEQUENCES, length, generator=torch.Generator().manual_seed(seed)) < 0.2
        begins_BS = (is_start * torch.arange(length)).cummax(1).values
        met = set()
        for mine in range(ranks):
            cp = Axis("cp", tuple(range(ranks)), mine)
            begins_Bs = begins_from_chunks(begins_BS, cp)
            for theirs in range(ranks):
                setting = RingSetting(1.0, window, cp, BINDINGS["reference"], None)
                for queries, keys, _, begins in blocks_seen(torch.empty(1, 2 * size), begins_Bs, theirs, setting):
                    query, key = chunks[mine][queries.start // size], chunks[theirs][keys.start // size]
                    met.add((query, key))
                    expected = begins_BS[:, query * size : (query + 1) * size] - query * size
                    assert begins is not None
                    assert torch.equal(begins, expected.int())
        visible = torch.arange(length)[:, None] - torch.arange(length)
        seen = (visible >= 0) & (torch.arange(length) >= begins_BS[..., None])
        seen = seen & (visible < window) if window else seen
        assert met == {(q // size, k // size) for _, q, k in seen.nonzero().tolist()}, seed
        skipped += ranks * (2 * ranks + 1) - len(met)
    assert skipped or ranks == 1, "some blocks are skipped"


def log_normal_begins(length: int, mean: int) -> torch.Tensor:
    lengths = torch.exp(log(mean) - 0.5 + torch.randn(length, generator=torch.Generator().manual_seed(0))).ceil().long()
    starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    starts = starts[starts < length]
    return torch.zeros(1, length, dtype=torch.long).index_fill(1, starts, 1).mul(torch.arange(length)).cummax(1).values


@pytest.mark.parametrize("mean", ["700", "8,192", "32,768", "one document"])
def test_the_busiest_rank_computes_as_many_pairs_of_chunks_as_the_page_says(mean: str):
    length = 131_072
    begins_BS = None if mean == "one document" else log_normal_begins(length, int(mean.replace(",", "")))
    busiest: list[int] = []
    for ranks in (2, 4, 8, 16):
        pairs: list[int] = []
        for mine in range(ranks):
            cp = Axis("cp", tuple(range(ranks)), mine)
            setting = RingSetting(1.0, 0, cp, BINDINGS["reference"], None)
            q, begins_Bs = torch.empty(1, length // ranks), begins_from_chunks(begins_BS, cp)
            pairs.append(sum(len(list(blocks_seen(q, begins_Bs, theirs, setting))) for theirs in range(ranks)))
        busiest.append(max(pairs))
    row = " | ".join([mean, *map(str, busiest)])
    assert f"| {row} |" in (ROOT / "docs" / "long_context.md").read_text()

"""Regrouped samples: the samples of a packed batch, once each, on every rank of their group, also after a resume."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from moefold.config.context_sending import keys_by_size
from moefold.data.dynamic_context import ContextShape, group_seconds, plan_context
from moefold.data.flops_price import FIXED_TOKENS, FlopsPrice
from moefold.data.loader import Batch, RegroupedLoader
from moefold.data.packed_sequences import PackedSequences
from moefold.data.regrouped_samples import RegroupedSamples
from moefold.layout.axes import Axis
from moefold.presets.zoo import PRESETS
from tests.data.test_packed_sequences import BATCH, SEQ, in_memory

RANKS, TP = 4, 2
SHAPE = ContextShape(RANKS, SEQ // 4)
TINY = PRESETS["tiny"]().model
NOTHING_SENT = keys_by_size((), SHAPE.sizes)


def loader_of(rank: int, packed: PackedSequences) -> RegroupedLoader:
    regrouped = RegroupedSamples(packed, SHAPE, FlopsPrice(TINY, NOTHING_SENT), rank, TP)
    return RegroupedLoader(regrouped, BATCH, Axis("dp"), torch.device("cpu"))


def samples_in(part: Batch) -> list[bytes]:
    """Tokens and labels of each sample of a microbatch, without padding."""
    assert part.begins_BS is not None
    assert part.filled_B is not None
    filled = int(part.filled_B.item())
    ends = [*part.begins_BS[0, :filled].unique().tolist(), filled]
    both = torch.cat((part.tokens_BS, part.labels_BS)).numpy()
    return [both[:, begin:end].tobytes() for begin, end in pairwise(ends)]


def packed_samples(packed: PackedSequences, first: int) -> Counter[bytes]:
    found = Counter[bytes]()
    for number in range(first, first + BATCH):
        arrays = packed.arrays(number)
        assert arrays.begins is not None
        assert arrays.filled is not None
        ends = [*np.unique(arrays.begins[: arrays.filled]).tolist(), arrays.filled]
        both = np.stack((arrays.tokens, arrays.labels))
        found.update(both[:, begin:end].tobytes() for begin, end in pairwise(ends))
    return found


def test_a_batch_has_the_samples_of_its_bins_once_and_ranks_of_a_group_have_the_same_row():
    loaders = [loader_of(rank, in_memory()) for rank in range(RANKS)]
    for first in range(0, 3 * BATCH, BATCH):
        by_rank = [loader.next_batch() for loader in loaders]
        seen = Counter[bytes]()
        padding = total = 0
        for parts in zip(*(batch.parts for batch in by_rank), strict=True):
            for rank, part in enumerate(parts):
                size = part.cp_size
                assert size is not None
                assert part.filled_B is not None
                assert part.tokens_BS.numel() % (TP * size * (2 if size > 1 else 1)) == 0
                assert part.filled_B.item() <= size * SHAPE.limit
                first_of_group = parts[rank - rank % size]
                assert torch.equal(part.tokens_BS, first_of_group.tokens_BS)
                if rank % size == 0:
                    seen.update(samples_in(part))
                    total += part.tokens_BS.numel()
                    padding += part.tokens_BS.numel() - int(part.filled_B.item())
        assert seen == packed_samples(in_memory(), first)
        assert [batch.waste for batch in by_rank] == [pytest.approx(padding / total)] * RANKS


def test_tokens_keep_the_numbers_of_their_bins():
    loaders = [loader_of(rank, in_memory()) for rank in range(RANKS)]
    for first in (0, BATCH):
        in_bins = np.concatenate([in_memory().arrays(number).tokens for number in range(first, first + BATCH)])
        seen: set[int] = set()
        for loader in loaders:
            for part in loader.next_batch().parts:
                assert part.filled_B is not None
                assert part.numbers_BS is not None
                filled = int(part.filled_B.item())
                numbers = part.numbers_BS[0, :filled].numpy()
                assert (in_bins[numbers - first * SEQ] == part.tokens_BS[0, :filled].numpy()).all()
                seen.update(numbers.tolist())
        held = [in_memory().arrays(number).filled or 0 for number in range(first, first + BATCH)]
        assert len(seen) == sum(held)


def test_a_resumed_run_goes_on_with_the_same_groups():
    whole = loader_of(1, in_memory())
    batches = [whole.next_batch() for _ in range(4)]
    saved = whole.regrouped.packed.packing_state(2 * BATCH)
    packed = in_memory()
    packed.restore(2 * BATCH, [*saved])
    resumed = loader_of(1, packed)
    resumed.consumed = 2 * BATCH
    for expected in batches[2:]:
        found = resumed.next_batch()
        assert [part.cp_size for part in found.parts] == [part.cp_size for part in expected.parts]
        for one, other in zip(found.parts, expected.parts, strict=True):
            assert torch.equal(one.tokens_BS, other.tokens_BS)
            assert torch.equal(one.labels_BS, other.labels_BS)


def test_flops_are_those_of_the_model():
    """Of a token 2 for each parameter of a product; of attention 2 for each of 2 products of each head and key."""
    price = FlopsPrice(TINY, NOTHING_SENT)
    tokens, attention, sending = price.of_sample(512, 4)
    assert (price.fixed, sending) == (FIXED_TOKENS * price.each_token, 0.0)
    assert tokens == 128 * price.each_token
    heads = TINY.attention.heads * TINY.attention.head_dim
    assert attention == pytest.approx(128 * TINY.layers * 2 * 2 * heads * 256)


def test_sending_counts_as_attention_to_so_many_keys_and_is_hidden_by_more():
    price = FlopsPrice(TINY, keys_by_size(("256", "512"), SHAPE.sizes))
    for length, size in ((512, 2), (1024, 4)):  # a token sees half of its sample
        _, attention, sending = price.of_sample(length, size)
        assert sending == pytest.approx(attention)
        longer = price.of_sample(2 * length, size)
        assert group_seconds(longer, 0.0) == longer.tokens + longer.attention
        shorter = price.of_sample(length // 2, size)
        assert group_seconds(shorter, 0.0) == shorter.tokens + shorter.sending
    assert price.of_sample(512, 1).sending == 0.0


def test_a_sample_is_not_spread_over_more_ranks_than_it_needs_where_keys_go_round_a_slow_ring():
    shape = ContextShape(8, 256)
    for sending, size in ((("0",), 4), (("1e3", "3e3", "7e3"), 2)):
        plan = plan_context([512], shape, FlopsPrice(TINY, keys_by_size(sending, shape.sizes)))
        (microbatch,) = plan.microbatches
        assert [group.size for group in microbatch.groups if group.samples] == [size]

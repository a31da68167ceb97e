"""Pages of a stash in Triton, in its interpreter where there is no GPU: the bits of the reference, counters and lists
included, over pushes and pops in any order."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.experts.page_grid import HEAD, OVERFLOWED, TAIL, PageGrid
from moefold.kernels.experts.row_stash import pop_rows, push_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, CELL = 20, 8


def fresh_pool() -> list[torch.Tensor]:
    pool = torch.zeros(PAGES, 64 * CELL, dtype=torch.int32, device=DEVICE)
    return [pool, torch.arange(PAGES, device=DEVICE), torch.tensor([0, PAGES, 0, 0], device=DEVICE)]


def test_every_list_and_counter_equals_the_references_and_rows_come_back_in_any_order():
    """Two pools in step, one of the reference and one of the kernels; what overflows is zero, and all pages return."""
    generator = random.Random(3)
    pools = {"reference": fresh_pool(), "triton": fresh_pool()}
    live: list[tuple[torch.Tensor, torch.Tensor, dict[str, list[torch.Tensor]]]] = []
    overflows = 0
    for turn in range(24):
        if live and (turn > 18 or generator.random() < 0.4):
            x, ends, receipts = live.pop(generator.randrange(len(live)))
            for name, pool in pools.items():
                got = torch.full_like(x, 7)
                pop_rows.implementations[name](got, ends, *pool, *receipts[name], True)
                count = int(ends[-1])
                expected = x[:count] if receipts[name][0][1] or not count else torch.zeros_like(x[:count])
                assert torch.equal(got[:count], expected)
                behind = got[count : -(-count // 64) * 64 + 64]
                assert not behind.any(), "zeros behind the last row"
        else:
            rows, width = generator.randrange(1, 300), generator.randrange(1, 30)
            x = torch.randint(-(2**31), 2**31 - 1, (rows, width), dtype=torch.int32, device=DEVICE)
            ends = torch.tensor([0, generator.randrange(rows + 1)], dtype=torch.int32, device=DEVICE)
            receipts = {}
            for name, pool in pools.items():
                M = PageGrid.of(x, pool[0]).pages
                receipts[name] = [torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in (2, M)]
                push_rows.implementations[name](x, ends, *pool, *receipts[name])
            for mine, plain in zip(*receipts.values(), strict=True):
                assert torch.equal(mine, plain)
            overflows += int(receipts["triton"][0][1] == 0 and ends[-1] > 0)
            live.append((x, ends, receipts))
        for mine, plain in zip(*pools.values(), strict=True):
            assert torch.equal(mine, plain)
        state = pools["triton"][2]
        held = [page for *_, of in live for page in of["triton"][1].tolist() if page >= 0]
        assert len(set(held)) == len(held) == PAGES - int(state[TAIL] - state[HEAD])
    assert 0 < overflows < 12
    assert state[OVERFLOWED] == 1

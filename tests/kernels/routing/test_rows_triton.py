"""The Triton row kernels, run by Triton's interpreter where there is no GPU: the same code, element by element."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.routing import rows_triton
from moefold.kernels.routing.expert_rows import gather_rows, shuffled_rows, spread_rows, sum_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("n", "k", "d", "drop"), [(1, 1, 4, 0), (33, 2, 16, 3), (9, 8, 600, 0), (0, 2, 8, 0)])
def test_gathering_and_summing_rows_equal_the_references(n: int, k: int, d: int, drop: int):
    index, slots, holes = shuffled_rows(n, k, DEVICE, drop)
    generator = torch.Generator().manual_seed(n)
    source, y = (torch.randn(m, d, generator=generator).to(DEVICE) for m in (n, len(index)))
    assert torch.equal(rows_triton.gather_by_index(source, index), gather_rows(source, index, slots, holes))
    torch.testing.assert_close(rows_triton.sum_over_slots(y, slots), sum_rows(y, index, slots, holes))


@pytest.mark.parametrize(("n", "k", "d", "drop"), [(1, 1, 4, 0), (33, 2, 16, 3), (300, 3, 8, 2), (9, 8, 600, 0)])
def test_spreading_writes_every_row_before_the_last_end_and_none_behind(n: int, k: int, d: int, drop: int):
    """Also rows without a source between others, as padding is."""
    index, slots, _ = shuffled_rows(n, k, DEVICE, drop)
    source = torch.randn(n, d, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    defined = len(index) + 1
    index = torch.cat((index, index.new_full((40,), -1))).int()
    ends = torch.tensor([1, defined], dtype=torch.int32, device=DEVICE)
    untouched = torch.full((len(index), d), torch.nan, device=DEVICE)
    spread = rows_triton.spread_over_slots(source, index, slots, ends, untouched)
    assert torch.equal(spread[:defined], spread_rows(source, index, slots, ends)[:defined])
    assert spread[defined:].isnan().all()


@pytest.mark.parametrize(
    "counts", [[0, 0, 0], [5], [128, 128], [0, 129, 0, 0, 1, 255, 0], [1] * 37, [700, 0, 0], [0, 0, 513]]
)
def test_the_tiles_cover_every_row_once_and_no_tile_has_rows_of_two_experts(counts: list[int]):
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    tiles, count, _ = rows_triton.plan_row_tiles(ends, sum(counts))
    rows = [(e, row) for e, first, real, _ in tiles[: int(count)].tolist() for row in range(first, first + real)]
    owners = [e for e, rows_of in enumerate(counts) for _ in range(rows_of)]
    assert rows == list(zip(owners, range(sum(counts)), strict=True))
    assert all(0 < real <= rows_triton.TILE for _, _, real, _ in tiles[: int(count)].tolist())


@pytest.mark.parametrize("part", [1, 2, 3, 7])
def test_tables_of_some_experts_have_their_tiles_of_the_table_of_all(part: int):
    counts = [0, 129, 0, 0, 1, 255, 0]
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    tiles, count, _ = rows_triton.plan_row_tiles(ends, sum(counts))
    by_part, counts_of_parts = rows_triton.plan_parts(ends, sum(counts), part)
    found = [table[:number].tolist() for table, number in zip(by_part, counts_of_parts.tolist(), strict=True)]
    of_all = tiles[: int(count)].tolist()
    assert found == [[tile for tile in of_all if tile[0] // part == number] for number in range(len(found))]
    assert len(found) == -(-7 // part)


@pytest.mark.parametrize("counts", [[5], [128, 128], [0, 129, 0, 0, 1, 255, 0], [64, 63, 65]])
def test_padded_rows_begin_at_multiples_of_half_a_tile_and_keep_the_order(counts: list[int]):
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    tiles, count, pads = rows_triton.plan_row_tiles(ends, sum(counts))
    sizes = [-(-rows // 64) * 64 for rows in counts]
    assert pads.tolist() == [sum(sizes[:e]) for e in range(len(counts))]
    starts = [end - rows for end, rows in zip(ends.tolist(), counts, strict=True)]
    for e, first, _, padded in tiles[: int(count)].tolist():
        assert padded - pads[e] == first - starts[e]


@pytest.mark.parametrize("d", [8, 600])
@pytest.mark.parametrize("counts", [[5], [128, 128], [0, 129, 0, 0, 1, 255, 0], [64, 63, 65]])
def test_gathering_padded_gives_each_experts_rows_and_zeros_up_to_the_next(counts: list[int], d: int):
    """Some rows have no source: they are zeros too."""
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    tiles, count, _ = rows_triton.plan_row_tiles(ends, sum(counts) + 300)  # tables may have room for more tiles
    source = torch.randn(7, d, generator=torch.Generator().manual_seed(d)).to(DEVICE)
    index = torch.arange(sum(counts), dtype=torch.int32, device=DEVICE) % 8 - 1
    got = rows_triton.gather_padded(source, index, tiles, count, len(counts))
    of_experts = rows_triton.gather_by_index(source, index).split(counts)
    expected = torch.cat([torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 64)) for rows in of_experts])
    assert torch.equal(got[: len(expected)], expected)

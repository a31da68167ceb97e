"""The largest logit of each head in Triton, in its interpreter where there is no GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.attention import largest_logit_triton
from moefold.kernels.attention.attention import random_document_begins
from moefold.kernels.attention.heads_triton import TileOptions
from moefold.kernels.attention.largest_logit import largest_logit
from moefold.kernels.registry import KernelCase, seeded_randn
from tests.kernels.test_every_op import check

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
in_triton = largest_logit.implementations["triton"]
CASES = largest_logit.cases("cpu", torch.float32)


def drawn(length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Two query heads on one key head."""
    q = seeded_randn(DEVICE, dtype, 1, length, 2, 16)
    return q, seeded_randn(DEVICE, dtype, 1, length, 1, 16, seed=1)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks in short sequences."""
    monkeypatch.setattr(largest_logit_triton, "TILES", {1024: TileOptions(32, 16, 4, 2)})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_that_of_the_reference(case: KernelCase):
    check(largest_logit, in_triton, case, "fp32")


@pytest.mark.parametrize("borders", [(0, 1, 2, 3), (0, 32, 64), (0, 16, 17, 48, 69)], ids=str)
def test_documents_may_begin_anywhere(borders: tuple[int, ...], small_tiles: None):
    starts = torch.zeros(70, dtype=torch.int32)
    starts[list(borders)] = torch.tensor(borders, dtype=torch.int32)
    begins = starts.cummax(0).values[None].to(DEVICE)
    inputs = (*drawn(70), None, 20, begins)
    check(largest_logit, in_triton, KernelCase("documents and a window of 20", inputs), "fp32")


@pytest.mark.parametrize("place", [0, 31, 32, 69])
def test_each_place_of_a_tile_is_looked_at(place: int, small_tiles: None):
    """Queries and keys are zero but for one position."""
    q, k = (torch.zeros_like(x) for x in drawn(70))
    q[:, place] = k[:, place] = 1.0
    assert in_triton(q, k).tolist() == [4.0, 4.0]


def test_a_value_that_is_no_number_is_told_where_a_query_sees_it_and_nowhere_else(small_tiles: None):
    q, k = drawn(41)
    sound = in_triton(q[:, :40], k[:, :40])
    k[:, 40] = torch.nan
    assert in_triton(q, k).isnan().all()
    assert torch.equal(in_triton(q[:, :40], k, None, 0, None, 0), sound)


def test_queries_that_see_no_key_have_none(small_tiles: None):
    q, k = drawn(40)
    begins = torch.full((1, 40), 50, dtype=torch.int32, device=DEVICE)
    for function in (in_triton, largest_logit.reference):
        assert (function(q, k, None, 0, begins, 40) == -torch.inf).all()


def test_strides_of_heads_are_followed():
    q, k = drawn(70)
    apart = torch.stack((k, torch.full_like(k, 9.0)), dim=2)[:, :, 0]
    assert not apart.is_contiguous()
    assert torch.equal(in_triton(q, apart), in_triton(q, k))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_on_a_gpu_ten_calls_agree_to_the_bit():
    q, k = (seeded_randn("cuda", torch.bfloat16, 2, 1000, heads, 192, seed=heads) for heads in (8, 8))
    begins = random_document_begins("cuda", 2, 1000)
    first, *others = (in_triton(q, k, None, 300, begins) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_on_a_gpu_a_sequence_of_more_than_two_billion_elements_has_the_numbers_of_its_last_heads():
    """2,100 positions of 8,448 heads of 128: offsets of the last positions need more than 31 bits."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (
        torch.randn(1, 2100, heads, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (8448, 66)
    )
    assert q.numel() > 1 << 31
    assert torch.equal(in_triton(q, k)[-128:], in_triton(q[:, :, -128:], k[:, :, -1:]))

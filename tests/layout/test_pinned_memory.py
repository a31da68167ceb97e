"""Pinned memory of exact size."""

from __future__ import annotations

import gc

import pytest
import torch

from moefold.layout.pinned_memory import host_bytes, host_memory

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("shape", [(0,), (3, 5), (3, 7, 100_003)])
def test_host_memory_has_the_shape_and_type_that_are_asked_for(shape: tuple[int, ...]):
    like = torch.empty(shape, dtype=torch.bfloat16)
    found = host_memory(like)
    assert (found.shape, found.dtype) == (like.shape, like.dtype)
    assert found.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    expected = torch.full_like(like, 2.0)
    found.fill_(2.0)
    assert torch.equal(found, expected)


def test_bytes_begin_at_the_border_of_a_page():
    assert host_bytes(5, pinned=False).data_ptr() % 4096 == 0


@gpu
@pytest.mark.gpu
def test_pinned_memory_is_copied_without_waiting_and_can_be_given_back():
    for _ in range(3):  # the second may have the pages of the first
        x = host_bytes(100_000_001, pinned=True)
        assert x.is_pinned()
        sevens = torch.full_like(x, 7, device="cuda")
        x.copy_(sevens, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((x == 7).all())
        del x
        gc.collect()

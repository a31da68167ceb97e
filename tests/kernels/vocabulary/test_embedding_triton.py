"""The gradient of words in Triton, in its interpreter where there is no GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.vocabulary.embedding import embedding
from moefold.layout.gradient_sink import attach_gradient_sink
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_words_and_their_gradients_equal_the_references_in_every_case():
    for case in embedding.cases(DEVICE, torch.float32):
        check(embedding, embedding.implementations["triton"], case, "fp32")


def test_a_width_of_several_blocks_is_summed_whole():
    words, w = torch.tensor([3, 1, 3, 3, 0, 3, 3], device=DEVICE), torch.randn(5, 2500, device=DEVICE)
    leaves = [w.clone().requires_grad_() for _ in range(2)]
    dy = torch.randn(7, 2500, device=DEVICE)
    for leaf, name in zip(leaves, ("reference", "triton"), strict=True):
        embedding.implementations[name](words, leaf).backward(dy)
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_the_gradient_is_written_where_it_shall_be_with_zeros_for_words_nobody_said():
    w = torch.randn(6, 8, device=DEVICE).requires_grad_()
    place = torch.full((48,), torch.nan, device=DEVICE)
    attach_gradient_sink(w, lambda dtype: place if dtype == w.dtype else None, lambda: None)
    (found,) = torch.autograd.grad(
        embedding.implementations["triton"](torch.tensor([4, 1, 4], device=DEVICE), w), w, torch.ones(3, 8).to(DEVICE)
    )
    assert found.data_ptr() == place.data_ptr()
    assert found[:, 0].tolist() == [0, 1, 0, 0, 2, 0]

"""The kernels between the head's products, in Triton's interpreter where there is no GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.vocabulary import cross_entropy, cross_entropy_triton
from moefold.kernels.vocabulary.vocab_shard import WHOLE_VOCABULARY, VocabShard
from moefold.layout.labels import IGNORE_INDEX

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logits_and_labels(t: int, v: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t + v)
    labels = torch.randint(v, (t,), generator=generator)
    labels[1::3] = IGNORE_INDEX
    return (torch.randn(t, v, generator=generator) * scale).to(DEVICE), labels.to(DEVICE)


@pytest.mark.parametrize(("t", "v"), [(1, 4), (5, 2048), (7, 5000), (3, 2049)])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_loss_and_gradient_equal_those_of_torch(t: int, v: int, scale: float):
    logits, labels = logits_and_labels(t, v, scale)
    gradient, loss = cross_entropy_triton.loss_and_gradient(logits.clone(), labels, WHOLE_VOCABULARY)
    expected_gradient, expected = cross_entropy.loss_and_gradient(logits.clone(), labels, WHOLE_VOCABULARY)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_a_vocabulary_in_two_parts_gives_the_loss_and_the_gradient_of_the_whole():
    """Each part is told what the other has, as a collective would."""
    logits, labels = logits_and_labels(6, 3000, 5.0)
    whole, expected = cross_entropy_triton.loss_and_gradient(logits.clone(), labels, WHOLE_VOCABULARY)
    parts = [logits[:, :1700].contiguous(), logits[:, 1700:].contiguous()]
    largest = torch.stack([x.amax(1) for x in parts]).amax(0)
    sums = torch.stack([(x - largest[:, None]).exp().sum(1) for x in parts]).sum(0)
    targets = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels != IGNORE_INDEX)
    for first, part in zip((0, 1700), parts, strict=True):
        said = iter((sums, targets))
        words = VocabShard(first, lambda x, said=said: next(said), lambda x: largest)
        gradient, loss = cross_entropy_triton.loss_and_gradient(part, labels, words)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, whole[:, first : first + part.shape[1]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2048, 5000])
def test_scaling_writes_every_element(n: int):
    x, out = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE), torch.full((n,), 7.0, device=DEVICE)
    factor = torch.tensor(0.3, device=DEVICE)
    assert cross_entropy_triton.scale_into(x, factor, out) is out
    torch.testing.assert_close(out, x * 0.3)

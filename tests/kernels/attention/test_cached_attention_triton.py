"""Attention to kept positions in Triton, in its interpreter where there is no GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.attention import cached_attention_triton
from moefold.kernels.attention.cached_attention import cached_attention
from tests.kernels.test_every_op import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("least_slots", [8, 1000], ids=["several programs", "one program"])
def test_results_and_rooms_equal_those_of_the_reference(least_slots: int, monkeypatch: pytest.MonkeyPatch):
    """A sequence's slots are shared by programs, some of which have none that is filled, or are one program's."""
    monkeypatch.setattr(cached_attention_triton, "LEAST_SLOTS", least_slots)
    monkeypatch.setattr(cached_attention_triton, "PROGRAMS", 12)
    cases = cached_attention.cases(DEVICE, torch.float32)
    for case in cases[2::3] if least_slots == 8 else cases[::5]:
        check(cached_attention, cached_attention.implementations["triton"], case, "fp32")

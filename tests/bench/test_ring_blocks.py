"""Rates of blocks count the pairs that their masks leave."""

from __future__ import annotations

import pytest
import torch

from moefold.bench.ring_blocks import BlockInputs, block_masks
from moefold.kernels.attention.attention import attention_mask

Q = torch.empty(2, 600, 1, 1)
MASKS = block_masks(BlockInputs(Q, Q, Q, Q))


@pytest.mark.parametrize("name", MASKS)
def test_visible_pairs_are_those_of_the_mask(name: str):
    mask = MASKS[name]
    visible = attention_mask(600, 600, mask.ahead, mask.window, Q.device, mask.begins_BS)
    assert mask.visible_share(Q) == pytest.approx(visible.double().mean().item())

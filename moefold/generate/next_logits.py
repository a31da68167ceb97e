"""Next logits: what follows each sequence, as sequences grow token by token.

`CachedLogits` computes new positions alone and keeps keys and values of the others. `WindowLogits` computes a whole
sequence for each token: for layouts that cut sequences over ranks, and for routers that look at whole sequences.

B sequences, S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moefold.config.errors import UserError
from moefold.config.extensions import find_extension
from moefold.config.run import ModelConfig
from moefold.layout.past_keys import PastKeys
from moefold.memory.graphs import CudaRecorder, Recorder
from moefold.model.transformer import Transformer

PADDING = 0  # any token
TokenIds = Sequence[int]
Forward = Callable[[Tensor, Tensor | None, PastKeys], Tensor]  # tokens_BS, begins_BS, past -> logits_BV
WindowForward = Callable[[TokenIds], Tensor]  # all tokens of a sequence -> logits_V


class NextLogits(Protocol):
    device: torch.device

    def begin(self, prompts: Sequence[TokenIds], most: int) -> Tensor:
        """(B, V): the logits behind each prompt; sequences will have at most `most` tokens."""
        ...

    def follow(self, tokens: TokenIds) -> Tensor:
        """(B, V): the logits behind one more token of each sequence."""
        ...


class CachedLogits:
    """Prompts of different lengths end at the same position: shorter ones have padding before them. `recorder`: what
    records the steps behind the prompts, where these are replayed (generate/replayed_steps.py)."""

    def __init__(self, forward: Forward, device: torch.device, recorder: Recorder | None = None):
        self.forward = forward
        self.device = device
        self.recorder = recorder
        self.past: PastKeys | None = None

    def begin(self, prompts: Sequence[TokenIds], most: int) -> Tensor:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        padded: list[list[int]] = []
        for prompt, missing in zip(prompts, padding, strict=True):
            padded.append([PADDING] * missing + list(prompt))
        tokens_BS = torch.tensor(padded, device=self.device)
        padding_B = torch.tensor(padding, device=self.device)
        begins_BS = document_begins(padding_B, longest) if any(padding) else None
        past = PastKeys(most, padding_B)
        self.past = past
        return self.compute(tokens_BS, begins_BS, past)

    def follow(self, tokens: TokenIds) -> Tensor:
        tokens_B = torch.tensor(tokens, device=self.device)
        return self.follow_on_device(tokens_B)

    def follow_on_device(self, tokens_B: Tensor) -> Tensor:
        """As `follow`. What is computed depends on tensors alone, so that it can be recorded and replayed."""
        assert self.past is not None, "prompts have not begun"
        return self.compute(tokens_B[:, None], None, self.past)

    def compute(self, tokens_BS: Tensor, begins_BS: Tensor | None, past: PastKeys) -> Tensor:
        logits_BV = self.forward(tokens_BS, begins_BS, past)
        past.advance(tokens_BS.shape[1])
        return logits_BV


def document_begins(padding_B: Tensor, count: int) -> Tensor:
    """(B, S): where the document of each position begins: padding with the first, a prompt behind its padding."""
    padding_B1 = padding_B[:, None]
    position_S = torch.arange(count, device=padding_B.device)
    return torch.where(position_S < padding_B1, 0, padding_B1)


class WindowLogits:
    """One sequence after the other."""

    def __init__(self, forward: WindowForward, device: torch.device):
        self.forward = forward
        self.device = device
        self.rows: list[list[int]] = []

    def begin(self, prompts: Sequence[TokenIds], most: int) -> Tensor:
        self.rows = [list(prompt) for prompt in prompts]
        return self.compute()

    def follow(self, tokens: TokenIds) -> Tensor:
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        return self.compute()

    def compute(self) -> Tensor:
        logits = [self.forward(row) for row in self.rows]
        return torch.stack(logits)


def model_logits(model: Transformer) -> CachedLogits:
    """Next logits of a model that this rank holds whole."""
    problems = cache_problems(model.model)
    if problems:
        raise UserError(*problems)

    def compute_last_logits(tokens_BS: Tensor, begins_BS: Tensor | None, past: PastKeys) -> Tensor:
        carry = model.begin(tokens_BS, begins_BS=begins_BS, past=past)
        carry = model.run_bodies(carry)
        return model.last_logits(carry)

    device = next(model.parameters()).device
    recorder = CudaRecorder(device) if device.type == "cuda" else None
    return CachedLogits(compute_last_logits, device, recorder)


def cache_problems(model: ModelConfig) -> list[str]:
    """Why a model cannot be computed token by token; empty if it can."""
    moe = model.moe
    problems: list[str] = []
    if moe.router.kind != "token_choice" or moe.router.force_balance:
        name = "round robin" if moe.router.force_balance else moe.router.kind
        problems.append(
            f"model.moe.router: {name} chooses experts by more than the token itself, so text cannot be generated "
            "token by token; expected token_choice without force_balance"
        )
    if moe.capacity.pad:
        problems.append(
            "model.moe.capacity.pad = true gives experts no rows beyond a capacity, which single tokens exceed; "
            "set model.moe.capacity.pad to false"
        )
    kind = model.attention.kind
    if find_extension("attention", kind) is not None:
        problems.append(f"model.attention.kind = {kind} keeps no keys of earlier tokens; expected gqa or mla")
    return problems

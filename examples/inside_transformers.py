"""moefold inside transformers: train one of its MoE models with moefold's experts, attention, norms, rope and head.

    python examples/inside_transformers.py

The model, its weights and its checkpoints stay transformers'. The losses are those of transformers' own experts up to
rounding (docs/transformers.md).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import moefold.transformers

SMALL = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)


def train(model: Any, steps: int) -> list[float]:
    """The losses of a plain loop on random tokens with a pattern."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        half = torch.randint(256, (4, 16), generator=generator)
        ids = torch.cat([half, half], dim=1)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_model(**implementations: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SMALL, dtype=torch.float32, **implementations).train()


def compare(steps: int = 20) -> tuple[list[float], list[float]]:
    """Losses with transformers' own code, and with moefold's."""
    own = train(make_model(experts_implementation="eager"), steps)
    moefold.transformers.enable(norms=True, rope=True, head=True)
    try:
        ours = train(make_model(experts_implementation="moefold", attn_implementation="moefold"), steps)
    finally:
        moefold.transformers.disable()
    return own, ours


def main() -> None:
    own, ours = compare()
    print(f"transformers: first loss {own[0]:.5f}, last {own[-1]:.5f}")
    print(f"with moefold: first loss {ours[0]:.5f}, last {ours[-1]:.5f}")


if __name__ == "__main__":
    main()

"""A torch model and a training loop of your own, with `moefold.MoeLayer` in the place of the MLP.

    python examples/own_loop.py

Attention, norms, residual connections, optimizer and data are plain torch here. From moefold comes one layer: it
returns its output and a balance loss, and `step_balance` moves the selection bias that evens out the experts' load.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefold

WIDTH = 64
LENGTH = 64


class Block(nn.Module):
    def __init__(self, width: int, experts: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.moe = moefold.MoeLayer(hidden=width, experts=experts, top_k=2, ffn=width, balance__bias_rate=0.01)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norms[0](x)
        attended, _ = self.attention(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)
        x = x + attended
        output, aux = self.moe(self.norms[1](x))
        return x + output, aux


class ByteModel(nn.Module):
    def __init__(self, layers: int = 2, experts: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, experts) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        total = x.new_zeros(())
        for block in self.blocks:
            x, aux = block(x, mask)
            total = total + aux
        return self.head(x), total

    def step_balance(self) -> Tensor:
        """Tokens of each expert of each layer since the last call."""
        loads = [block.moe.step_balance().counts_LE for block in self.blocks]
        return torch.cat(loads)


def text_bytes() -> Tensor:
    """A text that every Python has: the source of a module."""
    source = inspect.getsource(inspect)
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()


def train(steps: int = 200, batch: int = 16) -> tuple[list[float], Tensor]:
    """The loss of every step, and the load of each expert (layers x experts) in the last one."""
    torch.manual_seed(0)
    text = text_bytes()
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    load = torch.zeros(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (batch, 1))
        window = text[starts + torch.arange(LENGTH + 1)]
        logits, aux = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + aux).backward()
        optimizer.step()
        load = model.step_balance()
        losses.append(loss.item())
    return losses, load


def main() -> None:
    losses, load = train()
    for step in range(0, len(losses), 20):
        print(f"step {step}: loss {losses[step]:.3f}")
    print(f"last: loss {losses[-1]:.3f} nats a byte")
    for layer, row in enumerate(load.tolist()):
        print(f"layer {layer}: tokens of each expert {[round(count) for count in row]}")


if __name__ == "__main__":
    main()

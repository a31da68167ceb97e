"""How good the model is: its loss on held-out text, and a sample of what it writes."""

from __future__ import annotations

import torch

from moefold.comm.collectives import sum_
from moefold.config.rules import sequence_part
from moefold.train.assemble import Run


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """Mean loss per token over the same held-out sequences every time."""
    totals = torch.zeros(2, dtype=torch.float64, device=run.world.device)  # cross-entropy, tokens
    count = min(run.config.train.validate_sequences, run.validation.windows)
    run.model.eval()
    for part in run.validation.at(0, count).microbatches(run.config.train.micro_batch):
        losses = run.model(part.tokens_BS, part.labels_BS, part.first)
        totals += torch.stack((losses.cross_entropy, run.model.labelled(part.labels_BS)[0]))
    run.model.train()
    sum_(totals, run.world.axis("dp", "cp"))
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def sample(run: Run, prompt: str, temperature: float = 0.7) -> str:
    """Continue the prompt. The window is recomputed for every token: simple, and quick enough for a few hundred. Every
    rank takes part. What lies behind the last token pads the window to a length that splits over ranks; no token sees
    what is behind it (though it counts where experts have a capacity)."""
    generator = torch.Generator().manual_seed(run.config.train.seed)
    tokens = [int(t) for t in run.tokenizer.encode(prompt)]
    run.model.eval()
    for _ in range(run.config.train.sample_tokens):
        seen = tokens[-run.config.data.seq_len :]
        padding = [0] * (-len(seen) % sequence_part(run.config.parallel))
        window = torch.tensor([seen + padding], device=run.world.device)
        logits_V = run.model.logits(window)[0, len(seen) - 1, : run.tokenizer.size].float().cpu()
        tokens.append(int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)))
    run.model.train()
    return run.tokenizer.decode(tokens)

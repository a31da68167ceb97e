"""How good the model is: its loss on held-out text, and a sample of what it writes."""

from __future__ import annotations

import torch

from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.rules import sequence_multiple
from moefold.data.loader import Batch
from moefold.model.steps import Carry
from moefold.train.assemble import Run


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """Mean loss per token over the same held-out sequences every time."""
    count = min(run.config.train.validate_sequences, run.validation.windows)
    batch = run.validation.at(0, count)
    total = torch.zeros((), dtype=torch.float64, device=run.world.device)

    def add_losses(carry: Carry) -> None:
        nonlocal total
        total = total + run.model.predict(carry)["losses_1M"][0]

    run.model.eval()
    run.executor.forward_only(list(batch.microbatches(run.config.train.micro_batch)), add_losses)
    run.model.train()
    total = all_reduce_no_grad(all_reduce_no_grad(total, run.world.axis("dp", "cp")), run.world.axis("pp"))
    labelled = all_reduce_no_grad(run.model.labelled_token_counts(batch.labels_BS)[0], run.world.axis("dp", "cp"))
    return (total / labelled.clamp(min=1)).item()


@torch.no_grad()
def sample_text(run: Run, prompt: str, temperature: float = 0.7) -> str:
    """Continue the prompt. The window is recomputed for every token: simple, and quick enough for a few hundred. Every
    rank takes part. What lies behind the last token pads the window to a length that splits over ranks; no token sees
    what is behind it (though it counts where experts have a capacity)."""
    generator = torch.Generator().manual_seed(run.config.train.seed)
    tokens = [int(t) for t in run.tokenizer.encode(prompt)]
    run.model.eval()
    for _ in range(run.config.train.sample_tokens):
        seen = tokens[-run.config.data.seq_len :]
        padding = [0] * (-len(seen) % sequence_multiple(run.config.parallel))
        window = torch.tensor([seen + padding], device=run.world.device)
        logits_V = logits_at_position(run, window, len(seen) - 1)[: run.tokenizer.size].cpu()
        tokens.append(int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)))
    run.model.train()
    return run.tokenizer.decode(tokens)


def logits_at_position(run: Run, window: torch.Tensor, place: int) -> torch.Tensor:
    """The logits at one place of one sequence, in fp32, on every rank: those without the last stage add zeros."""
    found = torch.zeros(run.config.model.vocab, device=run.world.device)

    def keep_logits(carry: Carry) -> None:
        found.copy_(run.model.logits_from_carry(carry)[0, place])

    run.executor.forward_only([Batch(window, window)], keep_logits)
    return all_reduce_no_grad(found, run.world.axis("pp"))

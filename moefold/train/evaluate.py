"""Evaluation: validation loss on held-out text, and a sample of generated text."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.rules import sequence_multiple
from moefold.data.loader import Batch
from moefold.model.steps import Carry
from moefold.train.assemble import Run
from moefold.train.step import sum_over_ranks


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """Mean loss per token over the same held-out sequences every time."""
    config = run.config.train
    world = run.world
    count = min(config.validate_sequences, run.validation.sequences.windows)
    batch = run.validation.batch_at(0, count)
    parts = list(batch.microbatches(config.micro_batch))
    device = world.device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def add_losses(carry: Carry) -> None:
        nonlocal loss_sum
        losses_1M = run.model.predict(carry)["losses_1M"]
        loss_sum = loss_sum + losses_1M[0]

    run.model.eval()
    run.executor.forward_only(parts, add_losses)
    run.model.train()
    loss_sum = sum_over_ranks(run, loss_sum)
    own_1M = run.model.labelled_token_counts(batch.labels_BS, batch.begins_BS)
    labelled = all_reduce_no_grad(own_1M[0], world.dp_cp)
    mean = loss_sum / labelled.clamp(min=1)
    return mean.item()


@torch.no_grad()
def sample_text(run: Run, prompt: str, temperature: float = 0.7) -> str:
    """Continue the prompt. The whole window is computed for every token: simple, and fast enough for a few hundred.
    Every rank calls this. The window is padded to a length that splits over ranks; attention is causal, so padding
    behind the last token changes nothing (but counts where experts have a capacity)."""
    config = run.config
    generator = torch.Generator()
    generator.manual_seed(config.train.seed)
    tokens = run.tokenizer.encode(prompt).tolist()
    multiple = sequence_multiple(config.parallel)
    run.model.eval()
    for _ in range(config.train.sample_tokens):
        context = tokens[-config.data.seq_len :]
        missing = -len(context) % multiple
        window = context + [0] * missing
        device = run.world.device
        window_1S = torch.tensor([window], device=device)
        logits_V = logits_at_position(run, window_1S, len(context) - 1)
        logits_V = logits_V[: run.tokenizer.size].cpu()
        probs_V = (logits_V / temperature).softmax(-1)
        drawn = torch.multinomial(probs_V, 1, generator=generator)
        tokens.append(int(drawn))
    run.model.train()
    return run.tokenizer.decode(tokens)


def logits_at_position(run: Run, window_1S: Tensor, position: int) -> Tensor:
    """The logits at one position of one sequence, in fp32, on every rank: ranks without the last stage add zeros."""
    vocab = run.config.model.vocab
    logits_V = torch.zeros(vocab, device=run.world.device)

    def keep_logits(carry: Carry) -> None:
        logits_1SV = run.model.logits_from_carry(carry)
        logits_V.copy_(logits_1SV[0, position])

    batch = Batch(window_1S, window_1S)
    run.executor.forward_only([batch], keep_logits)
    return all_reduce_no_grad(logits_V, run.world.axis("pp"))

"""Evaluation: validation loss on held-out text, and a sample of generated text."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.rules import sequence_multiple
from moefold.data.loader import Batch
from moefold.data.tokenizer import ByteTokenizer, Tokenizer
from moefold.generate.decode import decode_tokens, evaluating, tokens_that_fit
from moefold.generate.next_logits import CachedLogits, NextLogits, TokenIds, WindowLogits, cache_problems
from moefold.generate.sampling import Sampling
from moefold.layout.labels import IGNORE_INDEX
from moefold.layout.past_keys import PastKeys
from moefold.model.steps import Carry
from moefold.pipeline.executor import Executor
from moefold.train.assemble import Run
from moefold.train.step import sum_over_ranks


def validation_loss(run: Run) -> float:
    """Mean loss over the same held-out sequences every time: per token, or as the objective says."""
    return validation_means(run)[0]


@torch.no_grad()
def validation_means(run: Run) -> list[float]:
    """Means of the objective's sums that evaluation has, the loss first."""
    config = run.config.train
    world = run.world
    batch = run.validation.batch_at(0, validation_sequences(run))
    parts = list(batch.microbatches(config.micro_batch))
    if run.reference is not None:
        parts = run.reference.score(parts)
    objective = run.model.objective
    sums_N = torch.zeros(objective.sums_in_evaluation, dtype=torch.float64, device=world.device)

    def add_losses(carry: Carry) -> None:
        sums_N.add_(run.model.predict(carry)["losses_1M"])

    run.model.eval()
    run.executor.forward_only(parts, add_losses)
    run.model.train()
    sums_N = sum_over_ranks(run, sums_N)
    own_N = run.model.loss_counts(batch.labels_BS, batch.begins_BS)
    counts_N = all_reduce_no_grad(own_N[: len(sums_N)].double(), world.dp_cp)
    means_N = sums_N / counts_N.clamp(min=1)
    return means_N.tolist()


def validation_sequences(run: Run) -> int:
    """How many sequences a validation has."""
    return min(run.config.train.validate_sequences, run.validation.sequences.windows)


def bytes_per_label(run: Run) -> float:
    """Bytes of text for each token that validation predicts; 0 where tokens are no text or losses are not theirs. End
    tokens have no bytes."""
    config = run.config
    if config.data.source == "zipf" or config.train.objective != "next_token":
        return 0.0
    labels = size = 0
    for number in range(validation_sequences(run)):
        arrays = run.validation.sequences.arrays(number)
        predicted = arrays.labels[arrays.labels != IGNORE_INDEX]
        text = run.tokenizer.decode(predicted.tolist())
        labels += len(predicted)
        size += len(text.encode())
    return size / max(1, labels)


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss that can be compared between vocabularies."""
    bits = nats_per_token / math.log(2)
    return bits / bytes_per_token


def sample_prompt(tokenizer: Tokenizer) -> str:
    """The begin of a function. Byte pairs hold the space before a word, so that a prompt must not end with it."""
    return "def " if isinstance(tokenizer, ByteTokenizer) else "def"


def sample_text(run: Run, prompt: str, temperature: float = 0.7) -> str:
    """Continue the prompt, to the longest sequence at most. Every rank calls this."""
    config = run.config
    longest = config.data.seq_len
    tokens = run.tokenizer.encode(prompt).tolist()
    tokens = tokens[-longest:]
    count = tokens_that_fit([tokens], longest, config.train.sample_tokens)
    sampling = Sampling(temperature, seed=config.train.seed)
    source = next_logits_of(run.executor)
    with evaluating(run.model):
        for (token,) in decode_tokens(source, [tokens], sampling, count, run.tokenizer.size):
            tokens.append(token)
    return run.tokenizer.decode(tokens)


def next_logits_of(executor: Executor) -> NextLogits:
    """Next logits of a model on any layout, on every rank: with a cache where ranks hold whole sequences, else by
    windows. Ranks that send each other tokens (ep, etp) are given the same prompts."""
    config = executor.config
    device = executor.world.device
    multiple = sequence_multiple(config.parallel)
    if multiple > 1 or cache_problems(config.model):
        return WindowLogits(partial(window_logits, executor, multiple), device)
    return CachedLogits(partial(cached_logits, executor), device)


def cached_logits(executor: Executor, tokens_BS: Tensor, begins_BS: Tensor | None, past: PastKeys) -> Tensor:
    """(B, V): the logits behind the last position."""
    batch = Batch(tokens_BS, tokens_BS, begins_BS=begins_BS, past=past)
    return agreed_logits(executor, batch, executor.model.last_logits)


def window_logits(executor: Executor, multiple: int, tokens: TokenIds) -> Tensor:
    """(V,): the logits behind the last token. The window is padded to a length that splits over ranks; attention is
    causal, so padding behind the last token changes nothing (but counts where experts have a capacity)."""
    missing = -len(tokens) % multiple
    window = [*tokens, *[0] * missing]
    window_1S = torch.tensor([window], device=executor.world.device)
    last = len(tokens) - 1

    def read_logits(carry: Carry) -> Tensor:
        logits_1SV = executor.model.logits_from_carry(carry)
        return logits_1SV[:, last]

    logits_1V = agreed_logits(executor, Batch(window_1S, window_1S), read_logits)
    return logits_1V[0]


def agreed_logits(executor: Executor, batch: Batch, read_logits: Callable[[Carry], Tensor]) -> Tensor:
    """Logits (B, V) in fp32 or better, on every rank: ranks without the last stage add zeros. Where ranks send each
    other tokens, all have the first one's: a row's bits may depend on its place in an expert's product, and ranks that
    draw other tokens would no longer make the same texts."""
    world = executor.world
    sequences = len(batch.tokens_BS)
    shape = (sequences, executor.config.model.vocab)
    any_weight = next(executor.model.parameters())
    wide = torch.promote_types(any_weight.dtype, torch.float32)
    logits_BV = any_weight.new_zeros(shape, dtype=wide)
    shares_experts = world.ep_etp.size > 1
    is_first = world.dp.index == 0

    def keep_logits(carry: Carry) -> None:
        found_BV = read_logits(carry)
        if is_first or not shares_experts:
            logits_BV.copy_(found_BV)

    executor.forward_only([batch], keep_logits)
    if shares_experts:
        all_reduce_no_grad(logits_BV, world.dp)
    return all_reduce_no_grad(logits_BV, world.pp)

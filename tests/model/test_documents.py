"""Documents that share a sequence know nothing of each other: what a packed batch gives, loss and gradients, is the sum
of what each document gives by itself, from position 0 on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig, RopeConfig
from moefold.data.loader import Batch, BatchLoader
from moefold.data.sequences import RowSequences
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import Axis, single_rank_world
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run, build_model, choose_kernels, default_dtype
from moefold.train.evaluate import validation_loss
from moefold.train.parity import random_corpus, shrink_config, single_rank_config
from moefold.train.step import train_step
from tests.support.models import transformer

LENGTH, VOCAB = 16, 48
# Longer than a sequence, of one token, at both ends of a sequence, and one that is a whole sequence.
DOCUMENTS = [40, 1, 7, 16, 1, 1, 14, 16, 5, 27]
KERNELS = BoundKernels(Facts("cpu", "fp64", hidden=16, ffn=16))
GROUPED = ModelConfig(
    layers=2,
    hidden=16,
    vocab=VOCAB,
    init_std=0.3,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=8, qk_norm="head"),
    moe=MoeConfig(experts=4, top_k=2, ffn=16),
)
LATENT = AttentionConfig(kind="mla", heads=2, kv_heads=2, head_dim=8, rope_dim=4, q_rank=6, kv_rank=8, value_dim=6)
YARN = RopeConfig(scaling="yarn", factor=4.0, original_length=8)
MODELS = {
    "grouped": GROUPED,
    "latent": replace(GROUPED, attention=LATENT),
    "window": replace(GROUPED, attention=replace(GROUPED.attention, window=3, full_every=2)),
    "sinks": replace(GROUPED, attention=replace(GROUPED.attention, window=5, sinks=True, qk_norm="none")),
    "stretched": replace(GROUPED, attention=replace(GROUPED.attention, rope=YARN, rope_dim=4)),
    "two tokens ahead": replace(GROUPED, mtp=2),
}


def make(model: ModelConfig) -> Transformer:
    with default_dtype(torch.float64):
        made = transformer(model, LENGTH, KERNELS)
    initialise_parameters(made, seed=1)
    for name, parameter in made.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    return made


def packed() -> Batch:
    tokens = np.random.default_rng(3).integers(VOCAB, size=sum(DOCUMENTS) + 1)
    starts = np.cumsum([0, *DOCUMENTS[:-1]])
    count = sum(DOCUMENTS) // LENGTH
    sequences = RowSequences(tokens, LENGTH, 1, starts)
    return BatchLoader(sequences, count, Axis("dp", (0,), 0), torch.device("cpu")).next_batch()


def each_alone(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens of every document, or part of one, in the batch's sequences, and those that follow within it."""
    assert batch.begins_BS is not None
    length, found = batch.tokens_BS.shape[1], []
    for tokens, labels, begins in zip(batch.tokens_BS, batch.labels_BS, batch.begins_BS, strict=True):
        for first in begins.unique().tolist():
            part = tokens[begins == first]
            last = first + len(part) - 1
            # A document that goes on behind the sequence has its next token for a label; one that ends has none.
            behind = labels[last : last + 1] if last == length - 1 else torch.tensor([IGNORE_INDEX])
            found.append((part, torch.cat((part[1:], behind))))
    return found


def padded(tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence; nothing is asked of what lies behind the document."""
    more = (0, LENGTH - len(tokens))
    return F.pad(tokens, more)[None], F.pad(labels, more, value=IGNORE_INDEX)[None]


def outcome(model: Transformer, *inputs: torch.Tensor, begins: torch.Tensor | None = None) -> list[torch.Tensor]:
    losses = model(*inputs, begins_BS=begins)
    total = losses.cross_entropy + losses.ahead_M.sum()
    return [losses.cross_entropy, losses.ahead_M, *torch.autograd.grad(total, list(model.parameters()))]


def error(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(((x - y).norm() / (y.norm() + 1e-30)).item() for x, y in zip(a, b, strict=True) if y.numel())


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_batch_is_the_sum_of_its_documents_by_themselves(name: str):
    model, batch = make(MODELS[name]), packed()
    together = outcome(model, batch.tokens_BS, batch.labels_BS, begins=batch.begins_BS)
    apart = [outcome(model, *padded(*document)) for document in each_alone(batch)]
    sums = [torch.stack(parts).sum(0) for parts in zip(*apart, strict=True)]
    assert error(together, sums) <= 1e-12
    across = outcome(model, batch.tokens_BS, batch.labels_BS)
    assert error(across, sums) > 1e-3, "documents would not have mattered"


def test_the_batch_has_documents_of_every_kind():
    batch = packed()
    lengths = [len(tokens) for tokens, _ in each_alone(batch)]
    assert sum(lengths) == batch.tokens_BS.numel()
    assert {1, LENGTH} <= set(lengths)
    assert len(batch.tokens_BS) < len(lengths)
    assert (batch.labels_BS[:, -1] == IGNORE_INDEX).any(), "a document ends with a sequence"
    assert (batch.labels_BS[:, -1] != IGNORE_INDEX).any(), "a document goes on behind a sequence"


def balanced_run() -> Run:
    config = single_rank_config(shrink_config(PRESETS["tiny"](), 1))
    balance = replace(config.model.moe.balance, aux_loss=0.5, z_loss=0.2, aux_over="sequence")
    config = replace(config, model=replace(config.model, moe=replace(config.model.moe, balance=balance)))
    train = replace(config.train, precision="fp64")
    config = replace(config, train=train, data=replace(config.data, attend="document"))
    return assemble_run(config, single_rank_world(), Path("."), random_corpus(config))


def test_balance_losses_are_means_over_all_tokens_whatever_share_of_them_has_labels():
    run = balanced_run()
    model = build_model(run.config, run.world, choose_kernels(run.config, run.world))
    batch = run.loader.next_batch()
    labels_BS = batch.labels_BS.clone()
    labels_BS[:, ::2] = IGNORE_INDEX
    batch = replace(batch, labels_BS=labels_BS)
    found = train_step(run, batch).grad_norm
    losses = model(batch.tokens_BS, labels_BS, batch.first, batch.begins_BS)
    labelled = (labels_BS != IGNORE_INDEX).sum()
    assert 2 * labelled <= labels_BS.numel()
    (losses.cross_entropy / labelled + losses.balance / labels_BS.numel()).backward()
    norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert found == pytest.approx(torch.stack(norms).norm().item(), rel=1e-10)


def test_a_run_trains_and_validates_within_documents():
    config = single_rank_config(shrink_config(PRESETS["tiny"](), 1))
    config = replace(
        config, data=replace(config.data, attend="document"), train=replace(config.train, precision="fp64")
    )
    run = assemble_run(config, single_rank_world(), Path("."), random_corpus(config))

    def mean(batch: Batch) -> float:
        documents = each_alone(batch)
        losses = [run.model(tokens[None], labels[None]).cross_entropy.item() for tokens, labels in documents]
        return sum(losses) / sum((labels != IGNORE_INDEX).sum().item() for _, labels in documents)

    with torch.no_grad():
        held_out = mean(run.validation.batch_at(0, config.train.validate_sequences))
        first = mean(run.loader.batch_at(0, 2))
    assert validation_loss(run) == pytest.approx(held_out, rel=1e-12)
    assert train_step(run, run.loader.next_batch()).loss == pytest.approx(first, rel=1e-12)

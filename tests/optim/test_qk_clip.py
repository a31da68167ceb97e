"""QK-clip: a logit above the threshold is lowered to it, in its own head, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moefold.config.run import AttentionConfig, Config, OptimConfig, ParallelConfig
from moefold.kernels.attention.largest_logit import largest_logit
from moefold.layout.axes import single_rank_world
from moefold.model.attention.attention_base import AttentionBase
from moefold.optim.qk_clip import watch_of
from moefold.train.assemble import Run, assemble_run
from moefold.train.evaluate import sample_text, validation_loss
from moefold.train.parity import random_corpus
from moefold.train.step import take_next_step
from tests.test_optimizers_agree import PLAIN, RANKS, differences
from tests.test_optimizers_agree import configuration as small_configuration

KINDS: dict[str, AttentionConfig] = {
    "one key head for each": AttentionConfig(heads=4, kv_heads=4, head_dim=8, qkv_bias=True),
    "shared key heads": AttentionConfig(heads=4, kv_heads=2, head_dim=8),
    "latent": AttentionConfig(kind="mla", heads=4, kv_heads=4, head_dim=8, rope_dim=4, q_rank=12, kv_rank=16),
    "latent keys alone": AttentionConfig(kind="mla", heads=4, kv_heads=4, head_dim=8, rope_dim=4, kv_rank=16),
}


def configuration(attention: AttentionConfig, optim: OptimConfig, parallel: ParallelConfig | None = None) -> Config:
    ranks = RANKS if parallel else 1
    config = small_configuration(parallel or ParallelConfig(), PLAIN, OptimConfig(), ranks)
    return replace(config, model=replace(config.model, attention=attention), optim=optim)


def assemble_whole(config: Config) -> Run:
    return assemble_run(config, single_rank_world(), Path("."), random_corpus(config))


def made(attention: AttentionConfig, threshold: float) -> Run:
    """A run in which one head of the second layer is driven to large logits, and whose steps hardly move weights."""
    config = configuration(attention, OptimConfig(rule="muon", lr=1e-9, warmup=0, weight_decay=0.0, qk_clip=threshold))
    run = assemble_whole(config)
    with torch.no_grad():
        run.model.get_parameter("blocks.1.attention.query.weight")[2] *= 300.0
    return run


def largest_logits(run: Run) -> dict[str, torch.Tensor]:
    """The largest logit of each head on the first batch, which is not trained on."""
    found: dict[str, torch.Tensor] = {}
    for name, module in run.model.named_modules():
        if isinstance(module, AttentionBase):
            module.logit_watch = Watch(found, name)  # pyright: ignore[reportAttributeAccessIssue]
    run.loader.consumed = 0
    batch = run.loader.next_batch()
    with torch.no_grad():
        run.model(batch.tokens_BS, batch.labels_BS)
    return found


class Watch:
    """Scores written out, as attention's reference has them."""

    def __init__(self, found: dict[str, torch.Tensor], name: str):
        self.found, self.name = found, name

    def note(self, q: torch.Tensor, k: torch.Tensor, scale: float, *_: Any) -> None:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores = torch.einsum("bshd,blhd->bhsl", q, k) * scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        self.found[self.name] = scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_logit_above_the_threshold_is_lowered_to_it_and_others_are_left_alone(kind: str):
    before = largest_logits(made(KINDS[kind], 0.0))
    driven = before["blocks.1.attention"][2].item()
    others = max(torch.cat(list(before.values())).sort().values[:-1].tolist())
    threshold = (driven * others) ** 0.5
    assert others < 0.5 * threshold < 0.5 * driven, "one head alone is above the threshold"
    clipped, free = made(KINDS[kind], threshold), made(KINDS[kind], 0.0)
    for run in (clipped, free):
        take_next_step(run)
    changed = set()
    for name, p in clipped.model.named_parameters():
        other = free.model.get_parameter(name)
        if torch.equal(p, other):
            continue
        changed.add(name)
        rows = [h for h in range(len(p)) if not torch.equal(p[h], other[h])]
        assert rows == [2], f"{name}: heads {rows}"
    expected = {
        "one key head for each": {"query.weight", "key.weight"},
        "shared key heads": {"query.weight"},
        "latent": {"query.weight", "key.weight"},
        "latent keys alone": {"query.weight", "key.weight"},
    }
    changed = {name for name in changed if not name.endswith("bias")}  # biases start at zero
    assert changed == {f"blocks.1.attention.{name}" for name in expected[kind]}
    after = largest_logits(clipped)
    assert after["blocks.1.attention"][2].item() == pytest.approx(threshold, rel=1e-4)
    for name, value in largest_logits(free).items():
        rest = [h for h in range(4) if (name, h) != ("blocks.1.attention", 2)]
        if name == "blocks.0.attention":
            assert torch.equal(after[name][rest], value[rest])


def test_no_logit_above_the_threshold_changes_nothing():
    clipped, free = (made(KINDS["latent"], threshold) for threshold in (1e6, 0.0))
    for run in (clipped, free):
        take_next_step(run)
    assert all(torch.equal(p, q) for p, q in zip(clipped.model.parameters(), free.model.parameters(), strict=True))


@pytest.mark.parametrize("recompute", [(), ("core",), ("layer",)], ids=str)
def test_logits_are_looked_at_once_in_training_and_never_in_recompute_validation_or_samples(recompute: tuple[str, ...]):
    config = configuration(KINDS["latent"], OptimConfig(qk_clip=50.0))
    config = replace(config, memory=replace(config.memory, recompute=recompute))
    run = assemble_whole(config)
    calls: list[str] = []
    for name, module in run.qk_clip.layers.items():
        watch = watch_of(module)
        watch.op = partial(counted, calls, name)
    for step in (1, 2):
        take_next_step(run)
        microbatches = config.train.global_batch // config.train.micro_batch
        assert Counter(calls) == dict.fromkeys(run.qk_clip.layers, step * microbatches)
    before = len(calls)
    validation_loss(run)
    sample_text(run, "def ")
    assert len(calls) == before


def counted(calls: list[str], layer: str, *inputs: Any) -> torch.Tensor:
    calls.append(layer)
    return largest_logit(*inputs)


LAYOUTS = [
    (ParallelConfig(tp=2, ep=2), "one key head for each"),
    (ParallelConfig(pp=2, tp=2, etp=2), "latent"),
    (ParallelConfig(tp=2, ep=4), "shared key heads"),
    (ParallelConfig(cp=4, context="ring"), "latent"),
    (ParallelConfig(tp=2, ep=2), "latent keys alone"),
    (ParallelConfig(tp=2, cp=2, context="all_to_all"), "one key head for each"),
    (ParallelConfig(pp=2, cp=2, context="all_gather"), "shared key heads"),
    (ParallelConfig(cp=4, context="hierarchical"), "shared key heads"),
    (ParallelConfig(cp=4, context="all_to_all", tiles=("heads",)), "one key head for each"),
]


@pytest.mark.extended
def test_layouts_agree_with_one_rank_where_all_heads_are_clipped():
    threshold = 1e-3
    optim = OptimConfig(rule="muon", lr=1e-2, warmup=0, qk_clip=threshold, max_norm=1e9, eps=1e-3)
    for kind in {kind for _, kind in LAYOUTS}:
        logits = largest_logits(assemble_whole(configuration(KINDS[kind], optim)))
        assert torch.stack(list(logits.values())).min() > 2 * threshold
    found = differences([configuration(KINDS[kind], optim, parallel) for parallel, kind in LAYOUTS])
    assert not found, "\n".join(found)

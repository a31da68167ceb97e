"""With `kernels.invariant` a token's logits and loss have the same bits alone, in a batch, packed with other documents,
and on any number of dp and ep ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.config.run import (
    AttentionConfig,
    Config,
    KernelsConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
)
from moefold.kernels.catalog import CATALOG, pick_implementation
from moefold.kernels.facts import facts_from_config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.steps import run_step_sequence
from moefold.model.transformer import Transformer
from moefold.train.assemble import build_model, choose_kernels
from tests.support.ranks import run_ranks

LENGTH, VOCAB = 160, 96
BASE = ModelConfig(
    layers=2,
    hidden=48,
    vocab=VOCAB,
    dense_ffn=64,
    init_std=0.3,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=16, qk_norm="head", qkv_bias=True),
    moe=MoeConfig(experts=8, top_k=3, ffn=40, shared_ffn=24, dense_layers=1, router=RouterConfig(score="sigmoid")),
)
LATENT = AttentionConfig(kind="mla", heads=2, kv_heads=2, head_dim=16, rope_dim=8, q_rank=12, kv_rank=16, value_dim=12)
MODELS = {
    "grouped": BASE,
    "latent": replace(BASE, attention=LATENT),
    "window and sinks": replace(
        BASE, attention=replace(BASE.attention, qk_norm="none", window=70, full_every=2, sinks=True)
    ),
}


def config_of(model: ModelConfig, precision: str = "fp32", **parallel: int) -> Config:
    config = Config(
        model=model,
        train=TrainConfig(device="cpu", precision=precision),  # pyright: ignore[reportArgumentType]
        kernels=KernelsConfig(invariant=True),
        parallel=ParallelConfig(**parallel),
    )
    return replace(config, data=replace(config.data, seq_len=LENGTH))


def make_model(config: Config, world: World) -> Transformer:
    return build_model(config, world, choose_kernels(config, world)).eval()


@torch.no_grad()
def logits_of(model: Transformer, ids_BS: torch.Tensor, begins_BS: torch.Tensor | None = None) -> torch.Tensor:
    carry = model.begin(ids_BS, None, 0, begins_BS)
    for stage in model.stages:
        carry = run_step_sequence(model.body(stage), carry)
    return model.logits_from_carry(carry)


@torch.no_grad()
def loss_of(model: Transformer, ids_BS: torch.Tensor, at: tuple[int, int], begins_BS: torch.Tensor | None = None):
    """The loss of one token, among others without labels."""
    labels_BS = torch.full_like(ids_BS, IGNORE_INDEX)
    labels_BS[at] = ids_BS[at]
    return model(ids_BS, labels_BS, 0, begins_BS).cross_entropy


def sequence(length: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def pack(ids: torch.Tensor, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence of three documents, of which the second is `ids`; and where each token's document begins."""
    tokens = torch.cat((sequence(before, 70), ids, sequence(after, 71)))
    begins = torch.zeros(len(tokens), dtype=torch.int64)
    begins[before:] = before
    begins[before + len(ids) :] = before + len(ids)
    return tokens, begins


@torch.no_grad()
def check_bits(model: Transformer, lengths: tuple[int, ...], device: str = "cpu") -> None:
    """Logits and losses of a sequence alone, in a batch, and packed."""
    logits_of(
        model, sequence(3, 0)[None].to(device)
    )  # torch may change its products for good where a first one in bf16 fails
    for length in lengths:
        ids = sequence(length, length)
        batch = torch.stack([*(sequence(length, 200 + i) for i in range(5)), ids, sequence(length, 9), ids]).to(device)
        tokens, begins = pack(ids, 13, 17)
        longer = torch.stack((tokens, sequence(len(tokens), 3))).to(device)
        borders = torch.stack((begins, torch.zeros_like(begins))).to(device)
        ids = ids.to(device)
        alone = logits_of(model, ids[None])[0]
        together = logits_of(model, batch)
        assert torch.equal(together[5], alone)
        assert torch.equal(together[7], alone)
        packed = logits_of(model, longer, borders)
        assert torch.equal(packed[0, 13 : 13 + length], alone)
        # a prefix has the bits that it has with what follows
        if length > 50:
            assert torch.equal(logits_of(model, ids[None, :50])[0], alone[:50])
        last = length - 1
        loss = loss_of(model, ids[None], (0, last))
        assert loss > 0
        assert loss_of(model, batch, (5, last)) == loss
        assert loss_of(model, longer, (0, 13 + last), borders) == loss


@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in MODELS), ("grouped", "bf16")])
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_packed(name: str, precision: str):
    model = make_model(config_of(MODELS[name], precision), single_rank_world())
    check_bits(model, (1, 70) if precision == "fp32" else (20,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_packed_on_a_gpu(name: str, precision: str):
    config = config_of(MODELS[name], precision)
    config = replace(config, train=replace(config.train, device="cuda"))
    check_bits(make_model(config, single_rank_world("cuda")), (1, 70), "cuda")


def logits_on_rank(world: World, layouts: list[dict[str, int]]) -> list[torch.Tensor]:
    """Of a sequence of this rank's own, and of several, so that ranks have different numbers of tokens."""
    found: list[torch.Tensor] = []
    for layout in layouts:
        config = config_of(BASE, **layout)
        here = create_world(world.rank, world.size, world.device, config.parallel)
        model = make_model(config, here)
        more = [sequence(30, 50 + i) for i in range(world.rank)]
        found.append(logits_of(model, torch.stack([sequence(30, world.rank), *more]))[0])
    return found


def test_ranks_of_dp_and_ep_give_the_bits_of_one_rank():
    layouts = [{}, {"ep": 2}, {"ep": 4}]
    ranks = run_ranks(logits_on_rank, 4, layouts)
    alone = make_model(config_of(BASE), single_rank_world())
    for rank, found in enumerate(ranks):
        right = logits_of(alone, sequence(30, rank)[None])[0]
        for layout, logits in zip(layouts, found, strict=True):
            assert torch.equal(logits, right), (rank, layout)


def test_a_run_trains_and_a_gradient_is_that_of_other_kernels():
    config = config_of(replace(BASE, mtp=1), "fp64")
    plain = replace(config, kernels=KernelsConfig())
    ids = torch.stack([sequence(100, 1), sequence(100, 2)])
    gradients: list[dict[str, torch.Tensor]] = []
    for each in (config, plain):
        model = make_model(each, single_rank_world())
        model(ids, ids).cross_entropy.backward()
        named = model.named_parameters()
        gradients.append({name: weight.grad for name, weight in named if weight.grad is not None})
    mine, right = gradients
    assert mine.keys() == right.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-9, atol=1e-9)


def test_the_catalog_chooses_invariant_kernels_and_names_them_only_then():
    config = config_of(BASE)
    facts = facts_from_config(config, "cpu", "fp32")
    able = [op for op, choices in CATALOG.items() if any(choice.name == "invariant" for choice in choices)]
    assert set(able) == {"linear", "grouped_gemm", "router_logits", "cross_entropy", "attention"}
    for op in able:
        assert pick_implementation(op, facts)[0] == "invariant"
        name, why = pick_implementation(op, replace(facts, invariant=False))
        assert "invariant" not in name + why
    hopper = facts_from_config(config, "cuda", "bf16", (9, 0))
    assert pick_implementation("expert_mlp", replace(hopper, hidden=64, ffn=64))[0] == "reference"
    assert pick_implementation("rope", replace(hopper, triton=True))[0] == "rotate_back"

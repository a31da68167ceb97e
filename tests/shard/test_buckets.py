"""Parameters in flat tensors: the same values, at aligned places, still the model's own."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from moefold.config.run import AttentionConfig, ModelConfig, MoeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, single_rank_world
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.dtypes import DTYPES
from moefold.layout.placement import REPLICATED, sharded_over_experts, sharded_over_tp
from moefold.model.initialise import initialise_parameters
from moefold.model.transformer import Transformer
from moefold.shard.buckets import ALIGNMENT, Bucket, BucketGroup, block_of_parameter, fill_buckets
from moefold.train.assemble import default_dtype
from tests.support.models import transformer
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden=12,  # nothing here is a multiple of 128
    vocab=33,
    dense_ffn=20,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=6, qk_norm="head", qkv_bias=True),
    moe=MoeConfig(experts=3, top_k=2, ffn=10, dense_layers=1),
)


def make(dtype: str = "fp32", model: ModelConfig = MODEL, world: World | None = None) -> Transformer:
    with default_dtype(DTYPES[dtype]):
        made = transformer(model, 6, BoundKernels(Facts("cpu", dtype, hidden=12, ffn=10)), world)
    initialise_parameters(made, seed=1)
    return made


def everywhere(buckets: list[Bucket]) -> dict[str, tuple[Bucket, int]]:
    return {p.name: (b, start) for b in buckets for p, start in zip(b.parameters, b.starts, strict=True)}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_filling_buckets_changes_no_value_and_no_shape(dtype: str):
    made = make(dtype)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    identities = {name: id(p) for name, p in made.named_parameters()}
    fill_buckets(made, single_rank_world())
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert id(parameter) == identities[name], "it is the same Parameter object"
        assert parameter.requires_grad


def test_parameters_are_views_of_the_flat_tensor_both_ways():
    made = make()
    places = everywhere(fill_buckets(made, single_rank_world()))
    parameters = dict(made.named_parameters())
    assert places.keys() == parameters.keys()
    with torch.no_grad():
        for name, (bucket, start) in places.items():
            bucket.weights[start] = 123.0
            assert parameters[name].flatten()[0] == 123.0, name
            parameters[name].flatten()[-1] = 45.0
            assert bucket.weights[start + parameters[name].numel() - 1] == 45.0, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_parameter_starts_at_a_multiple_of_the_alignment_and_none_overlap(dtype: str):
    for bucket in fill_buckets(make(dtype), single_rank_world()):
        end = 0
        for parameter, start in zip(bucket.parameters, bucket.starts, strict=True):
            assert start % ALIGNMENT == 0
            assert start >= end
            assert parameter.tensor.data_ptr() % 16 == 0
            assert parameter.tensor.is_contiguous()
            end = start + parameter.tensor.numel()
        assert len(bucket.weights) == len(bucket.gradients) >= end


def test_only_parameters_without_values_are_filled():
    made = make()
    empty = made.embedding.weight
    empty.untyped_storage().resize_(0)
    filled: list[str] = []

    def note_names(parameters: list[DeclaredParameter]) -> None:
        filled.extend(parameter.name for parameter in parameters)

    fill_buckets(made, single_rank_world(), fill=note_names)
    assert filled == ["embedding.weight"]


def test_frozen_parameters_are_in_buckets_of_their_own():
    made = make()
    frozen = {name for name, _ in made.named_parameters() if ".experts." in name}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
    trained = everywhere(fill_buckets(made, single_rank_world()))
    apart = everywhere(fill_buckets(made, single_rank_world(), frozen=True))
    assert apart.keys() == frozen
    assert trained.keys() == dict(made.named_parameters()).keys() - frozen


def test_padding_is_zero():
    for bucket in fill_buckets(make(), single_rank_world()):
        inside = torch.zeros(len(bucket.weights), dtype=torch.bool)
        for _, view in bucket.parameter_views(inside):
            view.fill_(True)
        assert (bucket.weights[~inside] == 0).all()
        assert inside.sum() == sum(p.tensor.numel() for p in bucket.parameters)


def test_parameters_are_grouped_by_placement_and_decay_each_in_one_bucket():
    made = make()
    buckets = fill_buckets(made, single_rank_world())
    kinds = {(b.placement, b.decays) for b in buckets}
    dense = {
        (REPLICATED, True),
        (REPLICATED, False),
        *((sharded_over_tp(dim), True) for dim in (0, 1)),
        (sharded_over_tp(0), False),
    }
    assert kinds == dense | {(sharded_over_experts(2), True)}
    assert len(kinds) == len(buckets)
    places = everywhere(buckets)
    for p in declared_parameters(made):
        bucket = places[p.name][0]
        assert bucket.placement == p.declaration.placement, p.name
        assert bucket.decays == (not p.name.endswith(("norm.weight", "bias"))), p.name


@pytest.mark.parametrize(("dtype", "wide"), [("bf16", "fp32"), ("fp32", "fp64"), ("fp64", "fp64")])
def test_gradients_are_kept_in_fp32_or_better(dtype: str, wide: str):
    for bucket in fill_buckets(make(dtype), single_rank_world()):
        assert bucket.weights.dtype == DTYPES[dtype]
        assert bucket.gradients.dtype == DTYPES[wide]


def test_a_tied_head_is_there_once():
    buckets = fill_buckets(make(model=replace(MODEL, tied_head=True)), single_rank_world())
    names = [p.name for b in buckets for p in b.parameters]
    assert len(names) == len(set(names))
    assert "head.weight" not in names


def test_a_model_in_buckets_computes_what_it_did_before():
    one, two = make(), make()
    fill_buckets(two, single_rank_world())
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(one(tokens, tokens).cross_entropy, two(tokens, tokens).cross_entropy)


def test_buckets_can_follow_blocks_instead_of_sizes():
    made = make()
    buckets = fill_buckets(made, single_rank_world(), most=1, unit=block_of_parameter)
    units = list(dict.fromkeys(bucket.unit for bucket in buckets))
    assert units == ["head", "blocks.1", "blocks.0", "embedding"], "as backward comes to them"
    for bucket in buckets:
        assert {block_of_parameter(p.name) for p in bucket.parameters} == {bucket.unit}
    assert len({bucket.key for bucket in buckets}) == len(buckets)
    assert everywhere(buckets).keys() == dict(made.named_parameters()).keys()


def whole_matrices(parameter: DeclaredParameter) -> BucketGroup:
    return BucketGroup("matrices", "matrices") if parameter.matrix else BucketGroup()


def matrices_held(world: World) -> tuple[list[tuple[str, int]], bool]:
    """The matrices in this rank's shares, as (parameter, number in its stack); whether the model is what it was."""
    plain, made = make(world=world), make(world=world)
    buckets = fill_buckets(made, world, group=whole_matrices)
    found = []
    for bucket in buckets:
        if bucket.group != "matrices":
            continue
        share = bucket.weights[bucket.share]
        for piece, views in bucket.matrix_views(share):
            elements = views[0].numel()
            assert piece.first % elements == piece.last % elements == 0, "no share ends inside a matrix"
            values = piece.parameter.tensor.detach().reshape(-1, *views.shape[1:])
            first = piece.first // elements
            assert torch.equal(views, values[first : first + len(views)])
            found += [(piece.parameter.name, first + i) for i in range(len(views))]
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), made.parameters(), strict=True))
    return found, same


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_cut_between_matrices_hold_each_matrix_on_one_rank(ranks: int):
    results = run_ranks(matrices_held, ranks)
    assert all(same for _, same in results)
    found = [matrix for held, _ in results for matrix in held]
    assert len(found) == len(set(found))
    expected = [p for p in declared_parameters(make()) if p.matrix]
    assert len(found) == sum(p.tensor.numel() // prod(p.matrix or ()) for p in expected)
    assert min(len(held) for held, _ in results) >= 3, "every rank has some"

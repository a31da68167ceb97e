"""Muon: as torch's own on single matrices, and on any layout what one rank computes, to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch

from moefold.comm import byte_counters
from moefold.config.run import MuonConfig, OptimConfig, ParallelConfig, ShardConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.model.transformer import Transformer
from moefold.optim import muon
from moefold.optim.host_states import HostStream, UpdateEnd
from moefold.optim.muon import MUON_SCALES
from moefold.optim.optimizer import Optimizer
from moefold.optim.parameter_groups import ParameterGroups
from moefold.shard.buckets import Bucket, fill_buckets
from moefold.shard.publish import Publisher
from moefold.shard.storage import sharded_storage_maker, storage_maker
from moefold.train.share_out import units_of_model
from tests.shard.test_gradients import MODEL as SMALL
from tests.shard.test_gradients import make
from tests.support.ranks import run_ranks

MUON = OptimConfig(rule="muon")
MODEL = replace(
    SMALL,
    attention=replace(SMALL.attention, kv_heads=2),
    moe=replace(SMALL.moe, experts=8, ffn=12, shared_gate=True),
)
BY_HEAD = replace(MUON, muon=MuonConfig(heads="each"))


def ready(
    optim: OptimConfig = MUON, dtype: str = "fp32", world: World | None = None
) -> tuple[Transformer, list[Bucket], Optimizer]:
    world = world or single_rank_world()
    model = make(dtype, MODEL, world)
    kernels = BoundKernels(Facts("cpu", dtype, hidden=16, ffn=16, moments=optim.moments, main=optim.main))
    groups = ParameterGroups(optim, kernels)
    storage = storage_maker(optim.main)
    options: dict[str, Any] = {}
    if world.shard.mode == "zero3":
        options = {"unit": units_of_model(model), "sharded": sharded_storage_maker(optim.main)}
    buckets = fill_buckets(model, world, group=groups.group_of, cost=groups.cost_of, storage=storage, **options)
    return model, buckets, Optimizer(buckets, groups.rules)


def gradient_of(parameter: DeclaredParameter, step: int) -> torch.Tensor:
    """This rank's part of a gradient that depends on name and step alone."""
    seed = sum(map(ord, parameter.name)) + 1000 * step
    whole = torch.randn(parameter.declaration.shape, generator=torch.Generator().manual_seed(seed))
    return whole[tuple(slice(first, first + size) for first, size in parameter.part)]


def put_gradients(buckets: list[Bucket], step: int) -> None:
    for bucket in buckets:
        for parameter, view in bucket.parameter_views(bucket.gradients):
            view.copy_(gradient_of(parameter, step))


def train(optim: OptimConfig, dtype: str = "fp32", world: World | None = None, steps: int = 3) -> Transformer:
    model, buckets, optimizer = ready(optim, dtype, world)
    publisher = Publisher(model, buckets)
    for step in range(1, steps + 1):
        put_gradients(buckets, step)
        optimizer.step(step, 0.01, {"": torch.tensor(0.5, dtype=torch.float64)})
        publisher.publish()
        publisher.await_all_buckets()
    return model


# Which parameters, and which matrices.


def test_muon_takes_the_matrices_and_adamw_the_rest():
    optimizer = ready()[2]
    kinds: dict[str, set[str]] = {}
    for parameter, kind, _, _ in optimizer.state():
        kinds.setdefault(parameter.name, set()).add(kind)
    for name, found in kinds.items():
        rest = name.startswith(("embedding", "head")) or "norm" in name or name.endswith("shared.gate.weight")
        assert found == ({"mean", "mean_square"} if rest else {"momentum"}), name
    moved = sum(s.weights.numel() for s in optimizer.shares if s.bucket.key.group.cut == "matrices")
    assert optimizer.bytes()["momentum"] == 4 * moved, "one number for each weight"


def test_entries_give_single_parameters_to_either_rule():
    optim = replace(MUON, groups=("*.router.weight: rule=adamw", "head.weight: rule=muon", "blocks.0.*: lr=0.5"))
    kinds = {p.name: kind for p, kind, _, _ in ready(optim)[2].state()}
    assert kinds["blocks.1.moe.router.weight"] == "mean_square"
    assert kinds["head.weight"] == "momentum"
    assert kinds["blocks.0.attention.out.weight"] == "momentum", "an entry without a rule has that of the section"
    assert kinds["blocks.0.attention.norm.weight"] == "mean_square"


@pytest.mark.parametrize("optim", [MUON, BY_HEAD], ids=["whole", "by head"])
def test_gate_up_down_and_heads_are_orthogonalised_by_themselves(optim: OptimConfig):
    optim = replace(optim, weight_decay=0.0, muon=replace(optim.muon, newton_schulz="polar_express", steps=20))
    model, buckets, optimizer = ready(optim, "fp64")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    put_gradients(buckets, 1)
    optimizer.step(1, 1.0)
    views = {
        "blocks.1.moe.experts.gate_up": (16, 12, 16),
        "blocks.1.moe.experts.down": (8, 16, 12),
        "blocks.0.dense.gate_up.weight": (2, 24, 16),
        "blocks.0.attention.query.weight": (2, 8, 16) if optim.muon.heads == "each" else (1, 16, 16),
        "blocks.0.attention.out.weight": (1, 16, 16),
    }
    for name, shape in views.items():
        moved = (before[name] - model.get_parameter(name)).detach().view(shape)
        singular = torch.linalg.svdvals(moved) / (0.2 * max(shape[1:]) ** 0.5)
        torch.testing.assert_close(singular, torch.ones_like(singular), rtol=0, atol=0.05)


# Against torch.


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "theirs"), [("moonlight", "match_rms_adamw"), ("original", "original")])
def test_single_matrices_move_as_torch_s_muon_moves_them(nesterov: bool, scale: Any, theirs: str):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    optim = replace(MUON, weight_decay=0.2, muon=MuonConfig(momentum=0.9, nesterov=nesterov, scale=scale))
    model, buckets, optimizer = ready(optim, "bf16")
    matrices: dict[str, list[torch.nn.Parameter]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    starts: dict[str, torch.Tensor] = {}
    for parameter, kind, _, _ in optimizer.state():
        if kind == "momentum":
            shapes[parameter.name] = (-1, *(parameter.matrix or ()))
            wide = parameter.tensor.detach().float().view(shapes[parameter.name])
            starts[parameter.name] = wide.clone()
            matrices[parameter.name] = [torch.nn.Parameter(x.clone()) for x in wide]
    everything = [x for xs in matrices.values() for x in xs]
    their = torch.optim.Muon(
        everything, lr=0.02, weight_decay=0.2, momentum=0.9, nesterov=nesterov, adjust_lr_fn=theirs
    )
    parameters = {p.name: p for p in declared_parameters(model)}
    for step in range(1, 4):
        put_gradients(buckets, step)
        optimizer.step(step, 0.02)
        for name, xs in matrices.items():
            gradient = gradient_of(parameters[name], step).view(shapes[name])
            for x, g in zip(xs, gradient, strict=True):
                x.grad = g
        their.step()
    mains = {p.name: values for p, kind, _, values in optimizer.state() if kind == "main"}
    for name, xs in matrices.items():
        found = mains[name].view(shapes[name])
        expected = torch.stack([x.detach() for x in xs])
        # Sums of a flat tensor may be rounded otherwise, and that to bf16 by a whole step: 0.4 %.
        error = (found - expected).norm() / (found - starts[name]).norm()
        assert error < 0.01, name


def test_scales():
    assert MUON_SCALES["moonlight"](768, 2048) == pytest.approx(0.2 * 2048**0.5)
    assert MUON_SCALES["original"](2048, 512) == 2.0
    assert MUON_SCALES["original"](512, 2048) == 1.0


# What is not a number changes nothing; options of the state.


def test_a_scale_that_is_not_finite_changes_nothing():
    model, buckets, optimizer = ready()
    put_gradients(buckets, 1)
    for bucket in buckets:
        bucket.gradients[0] = torch.nan
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(1, 0.01, {"": torch.tensor(torch.nan, dtype=torch.float64)})
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(not share.state["momentum"].any() for share in optimizer.shares if "momentum" in share.state)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_momentum_may_be_bf16(rounding: Any):
    optim = replace(MUON, moments="bf16", rounding=rounding)
    optimizer = ready(optim)[2]
    wide = ready()[2]
    shares = [share for share in optimizer.shares if "momentum" in share.state]
    assert shares
    for step in (1, 2):
        for one in (optimizer, wide):
            put_gradients([share.bucket for share in one.shares], step)
            one.step(step, 0.01)
    for share, other in zip(optimizer.shares, wide.shares, strict=True):
        if "momentum" in share.state:
            found, exact = share.state["momentum"], other.state["momentum"]
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("main", ["none", "split", "fp32"])
def test_windows_of_one_matrix_give_the_bits_of_one_window(main: Any, monkeypatch: pytest.MonkeyPatch):
    optim = replace(MUON, main=main, moments="bf16", rounding="stochastic")
    together = train(optim, "bf16")
    monkeypatch.setattr(muon, "WINDOW_ELEMENTS", 1)
    one_by_one = train(optim, "bf16")
    for (name, a), (_, b) in zip(together.named_parameters(), one_by_one.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_split_main_weights_are_those_of_an_fp32_copy():
    one, other = (train(replace(MUON, main=main), "bf16") for main in ("fp32", "split"))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


SHORT_CHUNK = 700  # elements: some matrices visit the device together, some are longer and come alone


def weights_and_states(optim: OptimConfig, dtype: str) -> dict[str, torch.Tensor]:
    """What three steps have left."""
    model, buckets, optimizer = ready(optim, dtype)
    for step in range(1, 4):
        put_gradients(buckets, step)
        optimizer.step(step, 0.01)
    found = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for parameter, kind, _, values in optimizer.state():
        found[f"{parameter.name} {kind}"] = values if isinstance(values, torch.Tensor) else values.get(0, len(values))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("main", ["none", "split", "fp32"])
def test_states_that_visit_the_device_become_those_that_stay_there(main: Any, dtype: str, monkeypatch):
    monkeypatch.setattr(muon, "CHUNK_ELEMENTS", SHORT_CHUNK)
    optim = replace(MUON, main=main, moments="bf16", rounding="stochastic")
    on_host = replace(optim, states="host")
    together = [muon.visiting_matrices(share) for share in ready(on_host)[2].shares]
    assert {1, 2} <= {len(windows) for windows in chain(*together)}
    stay, visit = (weights_and_states(each, dtype) for each in (optim, on_host))
    assert stay.keys() == visit.keys()
    for name, value in stay.items():
        assert torch.equal(value, visit[name]), name


def test_an_update_launched_late_has_the_gradient_of_its_step(monkeypatch: pytest.MonkeyPatch):
    """On a GPU a thread launches updates, perhaps when the next step has begun its sums."""
    stay, visit_at_once = weights_and_states(MUON, "fp32"), HostStream.visit
    model, buckets, optimizer = ready(replace(MUON, states="host"))

    def visit_late(stream: HostStream, owner: int, *visit: Any) -> UpdateEnd:
        (share,) = (share for share in optimizer.shares if share.number == owner)
        share.bucket.sums.take()
        return visit_at_once(stream, owner, *visit)

    monkeypatch.setattr(HostStream, "visit", visit_late)
    for step in range(1, 4):
        put_gradients(buckets, step)
        optimizer.step(step, 0.01)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, stay[name]), name


def test_a_scale_that_is_not_finite_changes_no_visiting_state():
    optim = replace(MUON, states="host")
    model, buckets, optimizer = ready(optim)
    put_gradients(buckets, 1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(1, 0.01, {"": torch.tensor(torch.nan)})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    momenta = [share.state["momentum"] for share in optimizer.shares if "momentum" in share.state]
    assert momenta
    for momentum in momenta:
        assert isinstance(momentum, torch.Tensor)
        assert not momentum.any()


# On several ranks.


ON_HOST = replace(MUON, states="host")
CASES = {"fp32": (MUON, "fp32"), "bf16": (MUON, "bf16"), "by head": (BY_HEAD, "fp32"), "on the host": (ON_HOST, "fp32")}


@cache
def weights_on_one_rank() -> dict[str, dict[str, torch.Tensor]]:
    """Parameters after three steps, by case and name."""
    return {case: dict(train(*settings).named_parameters()) for case, settings in CASES.items()}


def trained_parts(world: World) -> tuple[dict[str, Any], set[str]]:
    """Each parameter of this rank after three steps, with its part, by case; what was sent, and over which axes."""
    parts: dict[str, Any] = {}
    short_chunks = mock.patch.object(muon, "CHUNK_ELEMENTS", SHORT_CHUNK)
    with byte_counters.counted_bytes_sent() as sent, short_chunks:
        for case, (optim, dtype) in CASES.items():
            model = train(optim, dtype, world)
            parts[case] = {p.name: (p.part, p.tensor.detach().clone()) for p in declared_parameters(model)}
    return parts, {f"{what} {axis}" for what, axis in sent}


LAYOUTS = {
    "2": {},
    "2 ep2": {"ep": 2},
    "2 tp2 etp2": {"tp": 2, "etp": 2},
    "4 tp2": {"tp": 2},
    "4 ep2 etp2": {"ep": 2, "etp": 2},
    "4 tp2 cp2 etp4": {"tp": 2, "cp": 2, "etp": 4},
    "8 tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
    "8": {},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_moves_every_matrix_as_one_rank_does_to_the_bit(layout: str):
    parallel = LAYOUTS[layout]
    expected = weights_on_one_rank()
    for by_case, sent in run_ranks(trained_parts, int(layout[0]), **parallel):
        for case, parts in by_case.items():
            for name, (part, value) in parts.items():
                window = tuple(slice(first, first + size) for first, size in part)
                assert torch.equal(value, expected[case][name][window]), (case, name)
        for axis in ("tp", "etp"):
            assert (f"matrices {axis}" in sent) == (axis in parallel), (axis, sent)


FlatPiece = tuple[str, Any, int, torch.Tensor]  # of a parameter: its name and part, and values from an element on


def updated_pieces(world: World, shard: ShardConfig, parallel: ParallelConfig) -> dict[str, list[FlatPiece]]:
    """What this rank has updated after three steps, by case."""
    here = create_world(world.rank, world.size, world.device, parallel, shard=shard)
    found: dict[str, list[FlatPiece]] = {}
    for case, (optim, dtype) in CASES.items():
        _, buckets, optimizer = ready(optim, dtype, here)
        scales = dict.fromkeys(optimizer.units, torch.tensor(0.5, dtype=torch.float64))
        for step in range(1, 4):
            put_gradients(buckets, step)
            optimizer.step(step, 0.01, scales)
        pieces = found.setdefault(case, [])
        for bucket in buckets:
            weights = bucket.storage.weights_of_share(bucket.share)
            pieces += [(p.parameter.name, p.parameter.part, p.first, weights[p.window]) for p in bucket.pieces()]
    return found


SHARDED = {
    "2 zero3": (ShardConfig("zero3"), ParallelConfig()),
    "4 zero3 tp2 etp2": (ShardConfig("zero3"), ParallelConfig(tp=2, etp=2)),
    "4 zero3, two copies": (ShardConfig("zero3", replicas=2), ParallelConfig(ep=2)),
    "4 zero1, two copies": (ShardConfig("zero1", replicas=2), ParallelConfig()),
}


@pytest.mark.parametrize("case", SHARDED)
def test_full_shares_and_copies_of_shares_move_every_matrix_as_one_rank_does_to_the_bit(case: str):
    shard, parallel = SHARDED[case]
    expected = weights_on_one_rank()
    ranks = run_ranks(updated_pieces, int(case[0]), shard, parallel)
    for case, weights in expected.items():
        pieces = [piece for rank in ranks for piece in rank[case]]
        for name, part, begin, values in pieces:
            window = tuple(slice(first, first + size) for first, size in part)
            whole = weights[name][window].flatten()
            assert torch.equal(values, whole[begin : begin + len(values)]), (case, name)
        elements = sum(len(values) for *_, values in pieces)
        assert elements == shard.replicas * sum(weight.numel() for weight in weights.values())


def loads(world: World, optim: OptimConfig) -> tuple[float, int, int]:
    """This rank's share of the operations, and of the elements with and without padding."""
    optimizer = ready(optim, world=world)[2]
    operations, elements, padded = 0.0, 0, 0
    for share in optimizer.shares:
        rule: Any = optimizer.rule_of(share)
        if share.bucket.key.group.cut != "matrices":
            continue
        padded += share.weights.numel()
        for parameter, view in share.matrices(share.weights):
            elements += view.numel()
            operations += rule.matrix_cost(parameter) * view.numel() / parameter.tensor.numel()
    return operations, elements, padded


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_have_equal_shares_of_the_operations(ranks: int):
    results = run_ranks(loads, ranks, MUON)
    (total, elements, _) = loads(single_rank_world(), MUON)
    assert sum(r[0] for r in results) == pytest.approx(total)
    assert sum(r[1] for r in results) == elements, "each matrix on one rank"
    assert max(r[0] for r in results) < 1.15 * total / ranks
    assert max(r[2] for r in results) < 1.3 * elements / ranks


def test_a_matrix_is_a_part_of_its_parameter():
    for parameter in declared_parameters(make("fp32", MODEL)):
        if parameter.matrix:
            assert parameter.tensor.numel() % prod(parameter.matrix) == 0

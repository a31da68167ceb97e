"""An optimizer of rules by parameter group: two toy rules, options by name, and updates unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefold.config.errors import UserError
from moefold.config.extensions import EXTENSIONS, Extension, register_extension
from moefold.config.open_names import OPTIMIZER_NAMES
from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.model.transformer import Transformer
from moefold.optim.optimizer import Optimizer, build_optimizer
from moefold.optim.parameter_groups import ParameterGroups
from moefold.optim.rule import BucketShare
from moefold.shard.buckets import Bucket, block_of_parameter, fill_buckets
from moefold.shard.publish import Publisher
from tests.shard.test_gradients import make
from tests.support.ranks import run_ranks

KERNELS = BoundKernels(Facts("cpu", "fp32", hidden=16, ffn=16))


class Momentum:
    """Plain SGD with momentum, element by element."""

    kinds = ("velocity",)
    whole = False

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        self.beta = (group.betas or (0.9, 0.0))[0]

    def state(self, share: BucketShare) -> dict[str, torch.Tensor]:
        return {"velocity": torch.zeros_like(share.weights, dtype=share.wide_dtype)}

    def step_numbers(self, share: BucketShare, step: int, lr: float) -> Sequence[float]:
        return [lr]

    def update(self, share: BucketShare, scale: torch.Tensor, scalars: torch.Tensor) -> None:
        main, velocity = share.storage.main_values(), share.state["velocity"]
        velocity.mul_(self.beta).add_((share.gradient * scale).to(velocity.dtype))
        share.storage.refresh_weights(main - scalars[0].to(main.dtype) * velocity)


class UnitSteps:
    """Every matrix moves by the same distance: its gradient divided by its norm, which takes the whole matrix."""

    kinds = ("seen",)
    whole = True

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        pass

    def state(self, share: BucketShare) -> dict[str, torch.Tensor]:
        return {"seen": torch.zeros_like(share.weights)}

    def step_numbers(self, share: BucketShare, step: int, lr: float) -> Sequence[float]:
        return [lr, step]

    def update(self, share: BucketShare, scale: torch.Tensor, scalars: torch.Tensor) -> None:
        main = share.storage.main_values()
        gradient = (share.gradient * scale).to(main.dtype)
        triples = zip(share.matrices(main), share.matrices(gradient), share.matrices(share.state["seen"]), strict=True)
        for (parameter, w), (_, g), (_, seen) in triples:
            assert w.shape[1:] == parameter.declaration.matrix, "whole matrices, not pieces"
            w.sub_(scalars[0].to(w.dtype) * g / g.norm(dim=(1, 2), keepdim=True))
            seen.add_(1)
        share.storage.refresh_weights(main)


@pytest.fixture
def toy_rules() -> Iterator[None]:
    register_toy_rules()
    yield
    for name in ("momentum", "unit_steps"):
        EXTENSIONS.pop(("optimizer_rule", name))
        OPTIMIZER_NAMES.remove(name)


def register_toy_rules() -> None:
    register_extension(Extension("optimizer_rule", "momentum", "SGD with momentum", Momentum))
    register_extension(Extension("optimizer_rule", "unit_steps", "normalised steps of whole matrices", UnitSteps))


def put_gradients(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        for parameter, view in bucket.parameter_views(bucket.gradients):
            seed = sum(map(ord, parameter.name))
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))


def ready(
    groups: tuple[str, ...], world: World | None = None, unit: Any = None
) -> tuple[Transformer, list[Bucket], Optimizer]:
    world = world or single_rank_world()
    model = make("fp32", world=world)
    parameter_groups = ParameterGroups(OptimConfig(groups=groups), KERNELS)
    buckets = fill_buckets(model, world, group=parameter_groups.group_of, unit=unit)
    put_gradients(buckets)
    return model, buckets, Optimizer(buckets, parameter_groups.rules)


def weights_of(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_without_groups_buckets_and_optimizer_are_those_of_adamw_alone():
    model, buckets, optimizer = ready(())
    plain = make("fp32")
    expected = fill_buckets(plain, single_rank_world())
    assert [b.key for b in buckets] == [b.key for b in expected]
    assert [b.starts for b in buckets] == [b.starts for b in expected]
    put_gradients(expected)
    build_optimizer(expected, OptimConfig(), KERNELS).step(1, 0.1)
    optimizer.step(1, 0.1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_group_has_its_own_learning_rate_decay_betas_and_eps():
    entry = "*.router.weight: lr=0.5 decay=0 betas=0.5,0.8 eps=1e-3"
    one, _, optimizer = ready((entry,))
    optimizer.step(3, 0.1)
    same, _, plain = ready(())
    plain.step(3, 0.1)
    options = OptimConfig(weight_decay=0.0, beta1=0.5, beta2=0.8, eps=1e-3)
    other = make("fp32")
    buckets = fill_buckets(other, single_rank_world())
    put_gradients(buckets)
    build_optimizer(buckets, options, KERNELS).step(3, 0.05)
    for name, value in weights_of(one).items():
        expected = weights_of(other) if name.endswith("router.weight") else weights_of(same)
        assert torch.equal(value, expected[name]), name


def test_the_first_entry_that_matches_wins():
    model, _, optimizer = ready(("blocks.1.*: lr=0", "blocks.*: lr=1", "*: lr=0"))
    before = weights_of(model)
    optimizer.step(1, 0.1)
    moved = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.startswith("blocks.0.")}


def test_another_rule_updates_its_group_and_names_its_state(toy_rules: None):
    model, _, optimizer = ready(("*.moe.*: lr=2 rule=momentum",))
    before = weights_of(model)
    gradients = {p.name: v.clone() for s in optimizer.shares for p, v in s.bucket.parameter_views(s.bucket.gradients)}
    for step in (1, 2):
        optimizer.step(step, 0.01, {"": torch.tensor(0.5, dtype=torch.float64)})
    for name, value in weights_of(model).items():
        if ".moe." in name:
            expected = before[name] - 0.02 * 0.5 * (1 + 1.9) * gradients[name].float()
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    kinds = {p.name: set[str]() for p in declared_parameters(model)}
    for parameter, kind, _, _ in optimizer.state():
        kinds[parameter.name].add(kind)
    for name, found in kinds.items():
        assert found == ({"velocity"} if ".moe." in name else {"mean", "mean_square"}), name
    assert set(optimizer.bytes()) == {"main", "velocity", "mean", "mean_square"}


MATRICES = ("*norm.weight: lr=1", "*: rule=unit_steps")


def stepped_by_matrix(world: World) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after a step of whole matrices, and how many elements this rank has updated."""
    register_toy_rules()
    model, buckets, optimizer = ready(MATRICES, world)
    publisher = Publisher(model, buckets)
    optimizer.step(1, 0.1)
    publisher.publish()
    publisher.await_all_buckets()
    seen = [share.state["seen"].sum() for share in optimizer.shares if "seen" in share.state]
    return weights_of(model), int(sum(seen))


def test_a_rule_for_matrices_sees_whole_ones_on_two_ranks(toy_rules: None):
    model, _, optimizer = ready(MATRICES)
    optimizer.step(1, 0.1)
    expected = weights_of(model)
    results = run_ranks(stepped_by_matrix, 2)
    matrices = [p for p in declared_parameters(model) if p.matrix]
    assert sum(seen for _, seen in results) == sum(p.tensor.numel() for p in matrices), "each element once"
    assert min(seen for _, seen in results) > 0.4 * max(seen for _, seen in results), "the work is shared"
    for weights, _ in results:
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name


def test_a_rule_for_matrices_refuses_norms_and_biases(toy_rules: None):
    with pytest.raises(UserError, match=r"norm.weight to a rule for matrices, but its shape is \(16,\)"):
        ready(("*: rule=unit_steps",))


def test_a_rule_that_keeps_no_states_on_the_host_is_refused_with_them(toy_rules: None):
    optim = OptimConfig(groups=("*.experts.*: rule=unit_steps",), states="host")
    with pytest.raises(UserError, match=r"the rule unit_steps keeps its states on the device; set optim\.states"):
        ParameterGroups(optim, KERNELS)


def test_a_pattern_without_a_parameter_and_an_unknown_rule_are_refused_with_near_names():
    names = [name for name, _ in make("fp32").named_parameters()]
    groups = ParameterGroups(OptimConfig(groups=("head.wieght: lr=2", "head.*: lr=1", "*.rooter.*: lr=1")), KERNELS)
    with pytest.raises(UserError) as refused:
        groups.require_matches(names)
    problems = refused.value.problems
    assert len(problems) == 2
    assert "head.wieght matches no parameter; the nearest are head.weight, " in problems[0]
    assert "*.rooter.* matches no parameter; the nearest are blocks.1.moe.router.weight, " in problems[1]
    with pytest.raises(UserError, match=r'no rule "adanw" \(did you mean "adamw"\?\)'):
        ParameterGroups(OptimConfig(groups=("*: rule=adanw",)), KERNELS)


def test_units_updated_one_by_one_are_the_step():
    together, one_by_one = (ready((), unit=block_of_parameter) for _ in range(2))
    together[2].step(1, 0.1)
    model, _, optimizer = one_by_one
    optimizer.begin_step(1, 0.1)
    for unit in reversed(optimizer.units):
        before = weights_of(model)
        optimizer.update(unit)
        moved = {name for name, value in weights_of(model).items() if not torch.equal(value, before[name])}
        assert {block_of_parameter(name) for name in moved} == {unit}
    for name, value in weights_of(together[0]).items():
        assert torch.equal(weights_of(model)[name], value), name


def test_the_numbers_of_a_step_have_a_fixed_address():
    _, _, optimizer = ready(())
    address = optimizer.scalars.on_device.data_ptr()
    rows = []
    for step in (1, 2):
        optimizer.step(step, 0.1 / step)
        rows.append(optimizer.scalars.on_device.clone())
    assert optimizer.scalars.on_device.data_ptr() == address
    assert not torch.equal(*rows)


def test_options_of_the_section_hold_where_an_entry_says_nothing():
    optim = replace(OptimConfig(), groups=("head.*: lr=1",), weight_decay=0.3, beta2=0.7)
    default, entry = (rule.rule for rule in ParameterGroups(optim, KERNELS).rules.values())
    assert default.options == entry.options  # pyright: ignore[reportAttributeAccessIssue]

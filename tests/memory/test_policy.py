"""Policies attach to regions by name; a second policy proves the seam: the gradients stay, the saved tensors do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moefold.anatomy.regions import regions_of
from moefold.config.errors import UserError
from moefold.config.memory_regions import REGIONS
from moefold.config.run import AttentionConfig, BalanceConfig, ModelConfig, MoeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.expert_mlp import expert_mlp
from moefold.kernels.facts import Facts
from moefold.memory.policy import Keep, Policy, attach_policies, over_steps, regions_fused_away
from moefold.model.initialise import initialise_parameters
from moefold.model.steps import Region
from moefold.model.transformer import Transformer
from moefold.pipeline.passage import Passage
from moefold.pipeline.segments import one_segment, segments_for_pairing
from moefold.train.assemble import default_dtype
from tests.support.models import transformer

MODEL = ModelConfig(
    layers=3,
    hidden=16,
    vocab=40,
    dense_ffn=24,
    init_std=0.2,
    mtp=1,
    attention=AttentionConfig(heads=2, kv_heads=1, head_dim=8),
    moe=MoeConfig(experts=4, top_k=2, ffn=16, shared_ffn=8, dense_layers=1, balance=BalanceConfig(aux_loss=0.1)),
)
LATENT = replace(MODEL, moe=replace(MODEL.moe, latent=8))
LATENT_ATTENTION = AttentionConfig(
    kind="mla", heads=2, kv_heads=2, head_dim=8, q_rank=8, kv_rank=8, rope_dim=4, value_dim=8
)
MLA = replace(MODEL, attention=LATENT_ATTENTION)
FACTS = Facts("cpu", "fp64", hidden=16, ffn=16)


def made(model: ModelConfig = MODEL, kernels: BoundKernels | None = None) -> Transformer:
    with default_dtype(torch.float64):
        built = transformer(model, 8, kernels or BoundKernels(FACTS))
    initialise_parameters(built, 1)
    return built


class Rebuild:
    """Saves the inputs of a region, and runs its function again in backward: inside the first forward's graph, or
    (`reentrant`) with a graph of its own."""

    def __init__(self, reentrant: bool = False):
        self.reentrant, self.calls = reentrant, 0

    def around(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        self.calls += 1
        return checkpoint(fn, *inputs, use_reentrant=self.reentrant)


class Packed:
    """Replaces every saved tensor by a copy, as an offloading policy would."""

    def __init__(self):
        self.calls, self.packed = 0, 0

    def around(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        self.calls += 1
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda copy: copy):
            return fn(*inputs)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        self.packed += 1
        return x.detach().clone()


def run_model(model: Transformer, cut: bool) -> Iterator[None]:
    """One pass; it stops between forward and backward, while saved tensors are held."""
    rows = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    steps = model.steps(model.stages[0])
    passage = Passage(segments_for_pairing(steps) if cut else one_segment(steps))
    carry = passage.forward(model.begin(rows[:, :-1], rows[:, 1:]))
    loss = carry["losses_1M"].sum() + carry["aux"]
    passage.set_output_gradients([loss], [torch.ones_like(loss)])
    yield
    passage.backward()


def gradients(model: Transformer, cut: bool = False) -> dict[str, torch.Tensor]:
    for _ in run_model(model, cut):
        pass
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def counted_saved_bytes(found: list[int]) -> Iterator[None]:
    """Bytes that autograd saves itself, outside of any policy's own hooks."""
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield
    found.append(sum(storages.values()))


def saved_bytes(model: Transformer) -> int:
    found: list[int] = []
    with counted_saved_bytes(found):
        pass_ = run_model(model, cut=False)
        next(pass_)
    for _ in pass_:
        pass
    return found[0]


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], summed_anew: bool = False) -> list[str]:
    """Gradients that are not equal to the bit; a lookup in two steps is added in another order, and so are the
    gradients of a norm's three outputs, or of its input, where it has a graph of its own (`summed_anew`)."""
    assert set(one) == set(two)
    close = set(one) if summed_anew else {"embedding.weight"}
    assert all(torch.allclose(one[name], two[name], rtol=1e-12, atol=1e-14) for name in close)
    return [name for name in one if name not in close and not torch.equal(one[name], two[name])]


REGION_NAMES = ["norm", "core", "out", "activation", "mlp", "shared", "experts", "moe", "layer"]
POLICIES: dict[str, Callable[[], Any]] = {
    "rebuilt": Rebuild,
    "rebuilt with a graph of its own": lambda: Rebuild(reentrant=True),
    "packed": Packed,
}


@pytest.mark.parametrize("cut", [False, True], ids=["plain", "cut"])
@pytest.mark.parametrize("region", REGION_NAMES)
@pytest.mark.parametrize("kind", POLICIES)
def test_a_policy_is_called_and_the_gradients_stay(kind: str, region: str, cut: bool):
    model, policy = made(LATENT), POLICIES[kind]()
    expected = gradients(model, cut)
    attach_policies(model, {region: policy})
    summed_anew = region in ("norm", "mlp", "moe", "layer") and kind == "rebuilt with a graph of its own"
    assert not differing(gradients(model, cut), expected, summed_anew)
    assert policy.calls > 0
    if isinstance(policy, Packed):
        assert policy.packed > 0
    attach_policies(model, {})
    before = policy.calls
    assert not differing(gradients(model, cut), expected)
    assert policy.calls == before, "attaching replaces what was attached"


def test_projections_up_from_latents_are_a_region_too():
    model, policy = made(MLA), Rebuild()
    expected = gradients(model)
    attach_policies(model, {"up": policy, "core": policy})
    assert not differing(gradients(model), expected)
    assert policy.calls == 2 * 4


@pytest.mark.parametrize("region", ["core", "mlp", "shared", "experts", "moe", "layer"])
def test_a_rebuilt_region_saves_less(region: str):
    """A norm saves its input alone, as a rebuilt one does."""
    model = made()
    kept = saved_bytes(model)
    attach_policies(model, {region: Rebuild()})
    assert saved_bytes(model) < kept


def test_larger_regions_save_less_than_their_parts():
    sizes: list[int] = []
    for region in ("experts", "moe", "layer"):
        model = made()
        attach_policies(model, {region: Rebuild()})
        sizes.append(saved_bytes(model))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2


def test_a_policy_that_keeps_the_function_keeps_none_of_its_outputs():
    """The function of a run of steps is kept until backward; the carry behind the run is not."""
    kept: list[Any] = []

    class Holding(Keep):
        def around(self, fn: Callable[..., Any], *inputs: Any) -> Any:
            kept.append(fn)
            return fn(*inputs)

    model = made()
    attach_policies(model, {"moe": Holding()})
    for _ in run_model(model, cut=False):
        assert kept
        assert all(function.result is None for function in kept)


def test_counts_are_those_of_one_forward():
    plain, rebuilt = made(), made()
    attach_policies(rebuilt, {"layer": Rebuild()})
    gradients(plain)
    gradients(rebuilt)
    for one, two in zip(plain.loads(), rebuilt.loads(), strict=True):
        assert torch.equal(one.counts_E, two.counts_E)
        assert one.counts_E.any()


def test_several_policies_at_once():
    model, norms, steps = made(), Rebuild(), Packed()
    expected = gradients(model)
    attach_policies(model, {"norm": norms, "activation": Rebuild(), "experts": steps, "shared": Keep()})
    assert not differing(gradients(model), expected)
    assert norms.calls
    assert steps.calls == 3


def test_steps_keep_their_names_and_runs_get_the_name_of_their_region():
    model = made()
    names = [step.spec.name for step in model.steps(model.stages[0])]
    attach_policies(model, {"experts": Keep()})
    assert [step.spec.name for step in model.steps(model.stages[0])] == names
    attach_policies(model, {"layer": Keep()})
    joined = ["embed", "layer", "layer", "layer", "look_ahead", "layer", "set_aside", "predict"]
    assert [step.spec.name for step in model.steps(model.stages[0])] == joined
    attach_policies(model, {"moe": Keep(), "mlp": Keep()})
    joined = ["embed", "attend", "mlp", "attend", "moe", "attend", "moe"]
    assert [step.spec.name for step in model.steps(model.stages[0])][:7] == joined


def test_over_steps_without_regions_is_the_same_list():
    model = made()
    steps = model.steps(model.stages[0])
    assert over_steps(steps, {}) == steps


# ---- refusals ----


def refusal(model: Transformer, **wanted: Policy) -> str:
    with pytest.raises(UserError) as refused:
        attach_policies(model, wanted)
    return str(refused.value)


def test_an_unknown_region_is_refused_with_the_nearest():
    text = refusal(made(), activatoin=Keep())
    assert text.startswith('no region "activatoin"; this model has norm, core, swap, out, mlp, shared, dispatch')
    assert text.endswith('(did you mean "activation"?)')


def test_a_region_that_the_model_lacks_is_refused_with_the_reason():
    assert "attention is gqa" in refusal(made(), up=Keep())
    dense = replace(MODEL, moe=replace(MODEL.moe, dense_layers=9))
    assert refusal(made(dense), experts=Keep()) == (
        'no region "experts" in this model: no layer of this model has a step experts'
    )


class FusedKernels(BoundKernels):
    """Kernels whose experts stand for a fused one: it does not call the parts that the model passes."""

    def implementation_name(self, op: Any) -> str:
        return "gluon" if op.name == "expert_mlp" else super().implementation_name(op)

    def __getitem__(self, op: Any) -> Any:
        return run_fused_experts if op.name == "expert_mlp" else super().__getitem__(op)

    def with_facts(self, **changes: Any) -> BoundKernels:
        return self


def run_fused_experts(*inputs: Any) -> torch.Tensor:
    *tensors, _parts = inputs
    return expert_mlp.reference(*tensors)


def test_a_region_inside_a_fused_kernel_is_refused_and_those_around_it_are_not():
    model = made(kernels=FusedKernels(FACTS))
    text = refusal(model, activation=Keep())
    assert "one fused kernel" in text
    assert 'take region "experts"' in text
    policy = Rebuild()
    expected = gradients(model)
    attach_policies(model, {"experts": policy})
    assert not differing(gradients(model), expected)
    assert policy.calls == 3


def test_a_region_inside_another_is_refused():
    assert 'region "experts" lies inside "moe"' in refusal(made(), experts=Keep(), moe=Keep())


def test_a_place_that_is_in_no_list_cannot_be_built():
    with pytest.raises(ValueError, match='no region "activatoin" inside a step'):
        Region("activatoin")
    with pytest.raises(ValueError, match='no region "moe" inside a step'):
        Region("moe")


@pytest.mark.parametrize("kernels", ["reference", "gluon"])
@pytest.mark.parametrize("model", [MODEL, LATENT, MLA], ids=["gqa", "latent", "mla"])
def test_a_model_has_the_regions_of_the_list(model: ModelConfig, kernels: str):
    """What the torch-free list says of a model is what its modules have."""
    built = made(model, FusedKernels(FACTS) if kernels == "gluon" else None)
    listed = regions_of(model, {"expert_mlp": kernels})
    inside = {name for name, region in listed.items() if region.inside}
    modules = {module.name for module in built.modules() if isinstance(module, Region)}
    assert modules - set(regions_fused_away(built)) == inside
    steps = {step.spec.name for step in built.steps(built.stages[0])}
    for name in set(listed) - inside:
        assert REGIONS[name].spans[0] in steps
    attach_policies(built, {name: Keep() for name in inside})

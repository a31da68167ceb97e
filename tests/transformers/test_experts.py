"""Experts of every MoE family of transformers by moefold's ops: outputs and gradients are those of "eager"."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefold.transformers
from moefold.config.errors import UserError
from moefold.transformers.plugin import known_activation

transformers = pytest.importorskip("transformers")
MODELS = Path(transformers.__path__[0]) / "models"
EXPERTS = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
D, F, E, N, K = 16, 24, 6, 20, 2
SIZES = {
    "hidden_size": D,
    "moe_hidden_size": D,
    "moe_latent_size": None,
    "intermediate_size": F,
    "moe_intermediate_size": F,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "moe_num_experts": E,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 1.0,
    "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 4.0,
    "post_norm_eps": 1e-6,
}


def families() -> dict[str, str]:
    """Classes of experts that take an implementation, and their modeling files."""
    found: dict[str, str] = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in EXPERTS.findall(path.read_text()):
            found[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found


FAMILIES = families()


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    moefold.transformers.enable()
    yield
    moefold.transformers.disable()


def make_experts(name: str, **changes: Any) -> nn.Module:
    module = importlib.import_module(FAMILIES[name])
    config = transformers.PreTrainedConfig(**(SIZES | changes))
    torch.manual_seed(0)
    further = (F,) if name == "Ernie4_5_VLMoeMoeExperts" else ()
    experts = getattr(module, name)(config, *further).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def routing(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(ids), D, generator=generator, dtype=torch.float64)
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
    return hidden, ids, weights


def spread_ids(experts: int = E) -> Tensor:
    """Expert 3 has no token."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(N, experts, generator=generator)
    scores[:, 3] = -1
    return scores.topk(K).indices


def outputs_and_gradients(experts: Any, implementation: str, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    experts.config._experts_implementation = implementation
    hidden, ids, weights = inputs
    hidden = hidden.clone().requires_grad_()
    weights = weights.clone().requires_grad_()
    experts.zero_grad()
    output = experts(hidden, ids, weights)
    direction = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
    (output * direction).sum().backward()
    gradients = [parameter.grad for parameter in experts.parameters()]
    return [output.detach(), hidden.grad, weights.grad, *gradients]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_outputs_and_gradients_of_eager(name: str):
    experts = make_experts(name)
    tolerance = 1e-5 if name in COMPUTED_IN_FP32 else 1e-10
    one_expert = torch.full((N, 1), 2)
    for ids in (spread_ids(), one_expert):
        inputs = routing(ids)
        eager = outputs_and_gradients(experts, "eager", inputs)
        ours = outputs_and_gradients(experts, "moefold", inputs)
        for expected, found in zip(eager, ours, strict=True):
            expected = torch.zeros_like(found) if expected is None else expected
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_no_tokens_give_no_output_and_zero_gradients():
    experts = make_experts("MixtralExperts")
    output, _, _, *gradients = outputs_and_gradients(experts, "moefold", routing(spread_ids()[:0]))
    assert output.shape == (0, D)
    assert all(not gradient.any() for gradient in gradients)


COMPUTED_IN_FP32 = ("BeamExperts", "Inkling2Experts", "OpenAIPrivacyFilterExperts", "MuseSparkExperts")


def test_all_kinds_of_families_are_there():
    """Plain, interleaved with biases, without a gate; in newer transformers also transposed, and with a norm."""
    kinds = {"MixtralExperts", "GptOssExperts", "NemotronHExperts"}
    if "AriaExperts" in FAMILIES:
        kinds |= {"AriaExperts", "MuseSparkExperts"}
    assert kinds <= set(FAMILIES)
    assert len(FAMILIES) > 50


@pytest.mark.parametrize(
    ("name", "known"),
    [("MixtralExperts", ("silu", True)), ("NemotronHExperts", ("relu2", False)), ("GptOssExperts", None)],
)
def test_known_activations_run_on_moefolds_ops(name: str, known: tuple[str, bool] | None):
    assert known_activation(make_experts(name)) == known


# transformers' own implementations are this far from each other: its "eager" rounds in other places.
EAGER_IS_ALONE = ("OpenAIPrivacyFilterExperts", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_low_precision_is_as_near_to_eager_as_transformers_asks(name: str, dtype: torch.dtype):
    """transformers' own test of experts: weights of its usual spread, both tolerances 1e-4."""
    experts: Any = make_experts(name).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    hidden, ids, weights = routing(spread_ids())
    oracle = "grouped_mm" if (name, dtype) == EAGER_IS_ALONE else "eager"
    outputs: list[Tensor] = []
    for implementation in ("moefold", oracle):
        experts.config._experts_implementation = implementation
        with torch.no_grad():
            output = experts(hidden.to(dtype), ids, weights.to(dtype))
        outputs.append(output)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_under_autocast_products_have_its_dtype_as_in_linear_layers():
    experts = make_experts("MixtralExperts").float()
    hidden, ids, weights = routing(spread_ids())
    inputs = (hidden.float(), ids, weights.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager, *_ = outputs_and_gradients(experts, "eager", inputs)
        ours, *_ = outputs_and_gradients(experts, "moefold", inputs)
    exact, *_ = outputs_and_gradients(experts, "eager", inputs)
    error = (ours - exact).abs().mean()
    assert 0 < error < 2 * (eager - exact).abs().mean(), "rounded to bf16, as eager"


def test_choices_of_other_ranks_experts_have_no_output_and_no_gradient():
    experts = make_experts("MixtralExperts")
    experts._is_expert_parallel = True
    ids = spread_ids()
    elsewhere = torch.arange(ids.numel()).view_as(ids) % 3 == 0
    hidden, _, weights = routing(ids)
    weights = weights.masked_fill(elsewhere, 0.0)
    here = outputs_and_gradients(experts, "moefold", (hidden, ids.masked_fill(elsewhere, E), weights))
    expected = outputs_and_gradients(experts, "eager", (hidden, ids, weights))
    expected[2] = expected[2].masked_fill(elsewhere, 0.0)
    for found, wanted in zip(here, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_weights_are_read_where_they_are():
    experts = make_experts("GptOssExperts")
    kept = saved_bytes(experts)
    rows = N * K
    activations = rows * (2 * D + 8 * F) * 8
    weights = E * 3 * D * F * 8
    assert kept < activations + weights / 2, "no copy of the weights is saved"


def saved_bytes(experts: Any) -> int:
    """Bytes that backward keeps, beside the parameters themselves."""
    own = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    experts.config._experts_implementation = "moefold"
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(*routing(spread_ids()))
    return sum(seen.values())


def test_quantised_weights_are_refused_by_name():
    experts = make_experts("MixtralExperts")
    for parameter in experts.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.float8_e4m3fn)
    experts.config._experts_implementation = "moefold"
    with pytest.raises(UserError, match=r"weights in torch\.float8_e4m3fn are not supported"):
        experts(*routing(spread_ids()))

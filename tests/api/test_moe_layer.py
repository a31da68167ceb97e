"""moefold.MoeLayer: the layer of moefold's own blocks, callable from any torch model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import moefold
from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import facts_from_config
from moefold.layout.axes import World, create_world
from moefold.model.block import MoeBlock
from moefold.model.norm import ResidualStream
from tests.support.models import choices, share
from tests.support.ranks import run_ranks

SIZES = {"hidden": 16, "experts": 4, "top_k": 2, "ffn": 24}


def by_loop(layer: moefold.MoeLayer, x_TD: torch.Tensor) -> torch.Tensor:
    """Softmax over all experts, the two best renormalised, each token through each of its experts."""
    inner = layer.layer
    scores_TE = (x_TD @ inner.router.weight.T).softmax(-1)
    weights_TK, ids_TK = scores_TE.topk(2)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    rows = []
    for x, weights, ids in zip(x_TD, weights_TK, ids_TK, strict=True):
        total = torch.zeros_like(x)
        for weight, expert in zip(weights, ids, strict=True):
            gate, up = inner.experts.gate_up[expert] @ x
            total = total + weight * (inner.experts.down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (2, 2, 3, 16), (0, 16)])
def test_the_layer_equals_a_loop_over_tokens_for_any_leading_shape(shape: tuple[int, ...]):
    layer = moefold.MoeLayer(**SIZES, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    output, aux = layer(x)
    assert output.shape == x.shape
    assert aux.shape == ()
    if x.numel():
        expected = by_loop(layer, x.reshape(-1, 16)).view(shape)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        wanted = [x, *layer.parameters()]
        mine, plain = (torch.autograd.grad(y.square().sum(), wanted) for y in (output, expected))
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-tiny", "deepseek-v3-tiny", "gpt-oss-20b-tiny", "latent-30b-a3b-tiny"])
def test_the_layer_is_the_one_that_a_block_runs(name: str):
    """The block's steps behind attention give the stream plus the layer of the normed stream, to the bit."""
    layer = moefold.MoeLayer.like(name)
    model = layer.config.model
    facts = facts_from_config(layer.config, "cpu", "fp32")
    block = MoeBlock(model, 0, choices(model, 6, BoundKernels(facts)))
    block.moe.load_state_dict({**layer.layer.state_dict(), "norm.weight": torch.ones(model.hidden)})
    x_TD = torch.randn(12, model.hidden)
    carry = {"stream": ResidualStream(x_TD), "token_shard": share(2, 6), "aux": torch.zeros(())}
    for step in block.steps()[1:]:
        carry = step.run(carry)
    _, h_TD = ResidualStream(x_TD).normed(block.moe.norm)
    output, aux = layer(h_TD.view(2, 6, -1))
    assert torch.equal(carry["stream"].pending_TD, output.flatten(0, 1))
    assert torch.equal(carry["aux"] / 12, aux)


def test_aux_is_weighted_and_a_mean_over_tokens():
    plain, weighted = (moefold.MoeLayer(**SIZES, balance__aux_loss=weight) for weight in (0.0, 0.5))
    x = torch.randn(2, 8, 16)
    assert plain(x)[1] == 0
    once, twice = weighted(x)[1], weighted(torch.cat((x, x)))[1]
    assert 0.5 <= once < 1.5, "even load gives the weight itself"
    torch.testing.assert_close(once, twice)


def test_the_selection_bias_moves_towards_experts_that_lack_tokens():
    layer = moefold.MoeLayer(**SIZES, balance__bias_rate=0.1)
    layer(torch.randn(3, 7, 16))
    counts = layer.layer.router.load.counts_E.clone()
    loads = layer.step_balance()
    assert torch.equal(loads.counts_LE[0], counts)
    bias = layer.layer.router.load.bias_E
    assert (bias[counts * 4 < counts.sum()] > 0).all()
    assert (bias[counts * 4 > counts.sum()] < 0).all()


def test_imposed_expert_ids_replace_the_choice_and_keep_the_scores():
    layer = moefold.MoeLayer(**SIZES)
    ids = torch.tensor([[0, 3]]).expand(5, 2)
    layer(torch.randn(5, 16), expert_ids=ids)
    assert layer.layer.router.load.counts_E.tolist() == [5, 0, 0, 5]


def test_the_layer_has_no_parameter_without_a_gradient():
    layer = moefold.MoeLayer.like("deepseek-v3-tiny", balance__aux_loss=0.1)
    output, aux = layer(torch.randn(2, 40, layer.config.model.hidden))
    (output.sum() + aux).backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []


def test_illegal_sizes_and_unknown_keys_are_refused_by_name():
    with pytest.raises(UserError, match="top_k"):
        moefold.MoeLayer(hidden=16, experts=4, top_k=5, ffn=8)
    with pytest.raises(UserError, match="scor"):
        moefold.MoeLayer(**SIZES, router__scor="sigmoid")
    with pytest.raises(UserError, match="precision"):
        moefold.MoeLayer(**SIZES, dtype=torch.float8_e4m3fn)


def test_explain_names_an_implementation_and_a_reason_for_every_operation_of_the_layer():
    lines = moefold.MoeLayer(**SIZES).explain().splitlines()
    assert any(line.startswith("router_topk") and ": " in line for line in lines)
    assert not any(line.startswith("add_rmsnorm") for line in lines), "the norm is the caller's"


def layer_on_ranks(world: World) -> list[torch.Tensor]:
    world = create_world(world.rank, world.size, world.device, ParallelConfig(ep=2))
    layer = moefold.MoeLayer(**SIZES, dtype=torch.float64, world=world)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    output, _ = layer(x)
    return [x, output.detach()]


def test_experts_on_two_ranks_give_what_one_rank_gives():
    alone = moefold.MoeLayer(**SIZES, dtype=torch.float64)
    for x, output in run_ranks(layer_on_ranks, 2):
        torch.testing.assert_close(output, alone(x)[0].detach(), rtol=1e-12, atol=1e-12)


def test_importing_the_package_and_listing_its_names_does_not_import_torch():
    code = "import sys, moefold; dir(moefold); assert 'torch' not in sys.modules; assert 'MoeLayer' in dir(moefold)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

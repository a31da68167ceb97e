"""How an implementation is chosen: by facts, by the user, and never one that cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moefold.config.errors import UserError
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG, forced_implementations, pick_implementation
from moefold.kernels.choice import RENAMED_IMPLEMENTATIONS
from moefold.kernels.facts import AttentionShape, Facts, facts_from_config
from moefold.kernels.registry import import_every_op, register_op
from moefold.presets.recipe import resolve_recipe

OPS = import_every_op()
HOPPER = Facts("cuda", "bf16", (9, 0), hidden=64, ffn=48)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (HOPPER, "torch_grouped_mm"),
        (Facts("cuda", "bf16", (8, 0), hidden=64, ffn=48), "torch_grouped_mm"),
        (Facts("cuda", "bf16", (7, 5), hidden=64, ffn=48), "reference"),  # too old
        (Facts("cuda", "fp32", (9, 0), hidden=64, ffn=48), "reference"),  # bf16 only on cuda
        (Facts("cpu", "fp32", (0, 0), hidden=64, ffn=48), "torch_grouped_mm"),
        (Facts("cpu", "bf16", (0, 0), hidden=64, ffn=48), "torch_grouped_mm"),
        (Facts("cpu", "fp64", (0, 0), hidden=64, ffn=48), "reference"),
        (Facts("cpu", "fp32", (0, 0), hidden=64, ffn=30), "reference"),  # 30 x 4 = 120 bytes: not a multiple of 16
        (Facts("cpu", "fp32", (0, 0), hidden=30, ffn=64), "reference"),
        (Facts("cpu", "bf16", (0, 0), hidden=64, ffn=12), "reference"),  # 24 bytes
        (Facts("cpu", "fp32", (0, 0), hidden=64, ffn=12), "torch_grouped_mm"),  # 48 bytes
    ],
)
def test_grouped_mm_is_chosen_exactly_where_it_can_run(facts: Facts, expected: str):
    assert pick_implementation("grouped_gemm", facts)[0] == expected


def test_what_the_catalog_lets_run_on_this_machine_runs_and_what_it_does_not_is_really_unable():
    rows, offsets = torch.randn(4, 30), torch.tensor([1, 4], dtype=torch.int32)
    unaligned = OPS["grouped_gemm"].implementations["torch_grouped_mm"]
    with pytest.raises(RuntimeError):
        unaligned(rows, torch.randn(2, 6, 30), offsets)
    with pytest.raises(RuntimeError):
        unaligned(torch.randn(4, 32).double(), torch.randn(2, 8, 32).double(), offsets)
    bound = BoundKernels(Facts("cpu", "fp32", hidden=30, ffn=6))
    assert bound[OPS["grouped_gemm"]](rows, torch.randn(2, 6, 30), offsets).shape == (4, 6)


def test_adamw_is_fused_for_fp32_state_only():
    assert pick_implementation("adamw", Facts("cpu", "bf16"))[0] == "fused"
    assert pick_implementation("adamw", Facts("cpu", "fp64"))[0] == "reference"


def test_the_reason_is_told_for_what_is_chosen_and_for_what_is_not():
    assert pick_implementation("grouped_gemm", HOPPER)[1] == CATALOG["grouped_gemm"][0].why
    assert "torch_grouped_mm needs" in pick_implementation("grouped_gemm", Facts("cpu", "fp64"))[1]
    assert pick_implementation("expert_bias", HOPPER)[1] == "plain torch is the only one yet"


@pytest.mark.parametrize("name", CATALOG)
def test_the_reference_can_always_be_forced(name: str):
    assert pick_implementation(name, HOPPER, "reference") == ("reference", "asked for")
    assert BoundKernels(HOPPER, [f"{name}=reference"])[OPS[name]] is OPS[name].reference


def test_a_forced_implementation_is_the_one_bound_and_others_stay_as_they_were():
    free, forced = BoundKernels(HOPPER), BoundKernels(HOPPER, ("attention=reference", "adamw=fused"))
    assert free[OPS["attention"]] is OPS["attention"].implementations["sdpa"]
    assert forced[OPS["attention"]] is OPS["attention"].reference
    assert forced[OPS["adamw"]] is OPS["adamw"].implementations["fused"]
    assert forced[OPS["grouped_gemm"]] is free[OPS["grouped_gemm"]]


def test_a_forced_implementation_that_cannot_run_is_refused_by_name_with_what_it_needs():
    with pytest.raises(UserError) as refused:
        BoundKernels(Facts("cpu", "fp64", hidden=64, ffn=48), ["grouped_gemm=torch_grouped_mm"])
    assert "grouped_gemm=torch_grouped_mm cannot run here" in str(refused.value)
    assert "multiples of 16 bytes" in str(refused.value)


@pytest.mark.parametrize(
    ("force", "op", "name"),
    [
        ("swiglu=by_hand", "swiglu", "recompute_backward"),
        ("linear=adding", "linear", "fused_dgrad"),
        ("attention=ordered", "attention", "deterministic"),
        ("attention=spans", "attention", "varlen"),
        ("gather_rows=adjoint", "gather_rows", "gather_backward"),
    ],
)
def test_a_name_of_an_earlier_version_is_accepted_as_its_name_now(force: str, op: str, name: str):
    assert forced_implementations([force]) == {op: name}
    assert set(RENAMED_IMPLEMENTATIONS.values()) <= {choice.name for choices in CATALOG.values() for choice in choices}


def test_an_expert_kernel_for_bf16_products_is_not_chosen_for_another_number_format():
    assert pick_implementation("expert_mlp", replace(HOPPER, triton=True))[0] == "gluon"
    assert pick_implementation("expert_mlp", replace(HOPPER, triton=True, recipe="mxfp8"))[0] == "reference"


@pytest.mark.parametrize(
    ("force", "nearest"),
    [
        ("atention=reference", "attention"),
        ("attention=spda", "sdpa"),
        ("attention", "sdpa"),  # no implementation named: all are listed
        ("grouped_gem=reference", "grouped_gemm"),
    ],
)
def test_an_unknown_name_in_force_is_refused_with_the_nearest(force: str, nearest: str):
    with pytest.raises(UserError) as refused:
        forced_implementations([force])
    assert nearest in str(refused.value)
    if "=" in force:
        assert f'did you mean "{nearest}"?' in str(refused.value)


def test_an_implementation_without_a_line_in_the_catalog_is_an_error_at_import():
    with pytest.raises(KeyError, match=r"rmsnorm\.faster has no line"):
        OPS["rmsnorm"].register_fast("faster")
    before = dict(OPS)

    def nameless(x: torch.Tensor) -> torch.Tensor:
        return x

    try:
        with pytest.raises(KeyError):
            register_op(nameless).register_fast("any")
    finally:
        OPS.clear()
        OPS.update(before)


def test_the_facts_are_those_of_the_configuration():
    config = resolve_recipe("tiny", ["--model.moe.ffn=30"])
    assert facts_from_config(config, "cpu", "fp32") == Facts(
        "cpu", "fp32", hidden=config.model.hidden, ffn=30, attention=AttentionShape(256, 4, 2, 32, 32)
    )
    assert pick_implementation("grouped_gemm", facts_from_config(config, "cpu", "fp32"))[0] == "reference"


def test_the_facts_are_those_of_the_rows_that_experts_get():
    """A row is as wide as what travels, and an expert's inner width is cut over etp: these decide what is aligned."""
    latent = resolve_recipe("latent-30b-a3b-tiny")
    assert latent.model.moe.latent != latent.model.hidden
    assert facts_from_config(latent, "cpu", "fp32").hidden == latent.model.moe.latent
    narrow = resolve_recipe("latent-30b-a3b-tiny", ["--model.moe.latent=30"])
    assert pick_implementation("grouped_gemm", facts_from_config(latent, "cpu", "fp32"))[0] == "torch_grouped_mm"
    assert pick_implementation("grouped_gemm", facts_from_config(narrow, "cpu", "fp32"))[0] == "reference"
    cut = resolve_recipe("tiny", ["--parallel.etp=2", "--model.moe.ffn=196"], world=2)
    assert facts_from_config(cut, "cpu", "fp32").ffn == 98
    assert pick_implementation("grouped_gemm", facts_from_config(cut, "cpu", "fp32"))[0] == "reference"


@pytest.mark.parametrize("facts", [HOPPER, Facts("cpu", "fp32"), Facts("cpu", "fp64")])
def test_the_clamped_activation_recomputes_in_its_backward_everywhere(facts: Facts):
    assert BoundKernels(facts)[OPS["clamped_swiglu"]] is OPS["clamped_swiglu"].implementations["recompute_backward"]

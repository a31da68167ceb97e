"""`moefold explain` as data and as tables."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from moefold.anatomy.model_totals import active_parameters, mtp_parameters, total_parameters, train_flops_per_token
from moefold.anatomy.step_specs import prefixed_model_steps, prefixed_mtp_steps
from moefold.cli.explain import (
    BASE_OPS,
    EVERY_MICRO_OP,
    FP8_EXPERT_OPS,
    FP8_OPS,
    FP8_STORAGE_OPS,
    HEAD_OPS,
    MICRO_OPS,
    PEER_OPS,
    PROJECTION_OPS,
    STASH_OPS,
    TILE_OPS,
    describe_regions,
    tiles_in_exchanges,
    work_beside_exchanges,
)
from moefold.cli.main import run_command_line
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG, pick_implementation
from moefold.kernels.facts import facts_from_config
from moefold.kernels.registry import import_every_op
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from moefold.printable import human_readable


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str]):
    def explain(*words: str) -> dict[str, Any]:
        assert run_command_line(["explain", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return explain


def steps_of(found: dict[str, Any], kind: str) -> list[str]:
    return [step["step"] for layer in found["layers"] if layer["kind"] == kind for step in layer["steps"]]


@pytest.mark.parametrize("name", PRESETS)
def test_json_holds_what_the_anatomy_says(name: str, explained: Any):
    found, config = explained(name), PRESETS[name]()
    assert set(found) == {
        "name",
        "parameters",
        "active_parameters",
        "parameters_ahead",
        "train_flops_per_token",
        "adapters",
        "seq_len",
        "vocabulary",
        "packing",
        "cuts",
        "context",
        "mechanism",
        "objective",
        "facts",
        "grids",
        "pipeline",
        "products",
        "routing",
        "dispatcher",
        "clones",
        "fp8_on_the_wire",
        "shard",
        "beside_exchanges",
        "tiles",
        "layers",
        "kernels",
        "regions",
        "recompute",
        "experts_on_host",
        "stash",
        "graphs",
        "optimizer",
        "memory",
        "saves",
    }
    assert found["name"] == name
    assert found["parameters"] == total_parameters(config.model)
    assert found["active_parameters"] == active_parameters(config.model)
    assert found["parameters_ahead"] == mtp_parameters(config.model)
    assert found["train_flops_per_token"] == train_flops_per_token(config.model, config.data.seq_len)
    assert_shown_is_the_whole(found)


def assert_shown_is_the_whole(found: dict[str, Any]) -> None:
    """The layers shown, each as often as it is there, make up all parameters and all FLOPs."""
    steps = [(layer["count"], step) for layer in found["layers"] for step in layer["steps"]]
    every = found["parameters"] + found["parameters_ahead"]
    assert sum(count * step["parameters"] for count, step in steps) == every
    assert 3 * sum(count * step["forward_flops_per_token"] for count, step in steps) == pytest.approx(
        found["train_flops_per_token"], rel=1e-12
    )


def test_packing_is_shown_where_sequences_are_no_windows(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["explain", "tiny"]) == 0
    assert "packing" not in capsys.readouterr().out
    assert run_command_line(["explain", "tiny", "--data.packing", "first_fit", "--data.attend", "document"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "packing: whole documents by first-fit in bins of 256 tokens, 8 bins a batch" in shown
    samples = ["--data.packing", "best_fit", "--data.attend", "document", "--data.batch_of", "samples"]
    assert run_command_line(["explain", "tiny", *samples, "--train.micro_batch", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in bins of 256 tokens, as many as 8 documents a batch fill (at most 8, " in shown


def test_dynamic_context_says_which_ranks_share_a_sample(capsys: pytest.CaptureFixture[str]):
    packed = ["--data.packing", "best_fit", "--data.attend", "document", "--parallel.cp", "2"]
    assert run_command_line(["explain", "tiny", *packed, "--nproc", "4"]) == 0
    assert "dynamic context" not in capsys.readouterr().out
    assert run_command_line(["explain", "tiny", *packed, "--nproc", "4", "--parallel.context_sizes", "dynamic"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "on groups of 1, 2, 4 of the 4 dp x cp ranks, by ring" in shown
    assert "256 tokens a rank" in shown


def test_rules_and_groups_are_shown_where_they_are_not_the_default(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["explain", "tiny", "--optim.rule", "muon", "--optim.groups", "head.*: frozen"]) == 0
    shown = capsys.readouterr().out
    assert "optimizer: Muon: orthogonalised momentum of each matrix" in shown
    rows = [re.findall(r"[^│ ]+(?: [^│ ]+)*", line) for line in shown.splitlines()]
    assert ["head.*", "frozen", "32.9 k"] in rows
    assert ["all others", "muon", "0.004", "0.1", "2.56 M"] in rows
    assert ["all others", "adamw", "0.004", "0.1 of 32.8 k", "34 k"] in rows
    assert "frozen: head.norm.weight, head.weight" in shown
    assert "newton_schulz" in shown
    assert run_command_line(["explain", "tiny", "--optim.groups", "haed.*: frozen"]) == 2
    assert "haed.* matches no parameter; the nearest are head.weight" in capsys.readouterr().err
    assert run_command_line(["explain", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert "optimizer:" not in shown
    assert "newton_schulz" not in shown


VARIANTS = {
    "experts in every other layer": ("tiny", "--model.moe.every 2"),
    "and a dense first": ("tiny", "--model.moe.every 2 --model.moe.dense_layers 1"),
    "windows with experts in every other layer": (
        "gpt-oss-20b-tiny",
        "--model.layers 6 --model.moe.every 2 --model.attention.full_every 3",
    ),
    "two layers ahead": ("tiny", "--model.mtp 2"),
    "two layers ahead, of two windows": ("gpt-oss-20b-tiny", "--model.mtp 2"),
    "two layers ahead, one with experts": ("tiny", "--model.mtp 2 --model.moe.every 2"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_layers_a_model_mixes_those_shown_make_up_the_whole(variant: str, explained: Any):
    recipe, words = VARIANTS[variant]
    found, model = explained(recipe, *words.split()), resolve_recipe(recipe, words.split()).model
    assert_shown_is_the_whole(found)
    blocks = [layer for layer in found["layers"] if layer["kind"] in ("dense layer", "MoE layer")]
    assert sum(layer["count"] for layer in blocks) == model.layers
    assert {s["step"] for layer in found["layers"] for s in layer["steps"]} == {
        step.name for _, step in (*prefixed_model_steps(model), *prefixed_mtp_steps(model))
    }


def test_each_kind_of_layer_is_shown_once_with_its_number(explained: Any):
    found = explained("tiny", "--model.moe.dense_layers", "1", "--model.moe.shared_ffn", "64")
    kinds = [(layer["kind"], layer["count"]) for layer in found["layers"]]
    assert kinds == [("embedding", 1), ("dense layer", 1), ("MoE layer", 3), ("head", 1)]
    assert steps_of(found, "dense layer") == ["attend", "mlp"]
    inner = ["attend", "route", "plan", "dispatch", "shared", "experts", "combine", "add"]
    assert steps_of(found, "MoE layer") == inner
    assert steps_of(explained("tiny"), "MoE layer") == ["attend", "route", "plan", "dispatch", "experts", "combine"]
    found = explained("latent-30b-a3b-tiny")
    assert steps_of(found, "MoE layer") == [
        "attend",
        "route",
        "narrow",
        "plan",
        "dispatch",
        "experts",
        "combine",
        "widen",
    ]


def test_layers_that_see_differently_far_are_shown_apart(explained: Any):
    found = explained("gpt-oss-20b")
    layers = [layer for layer in found["layers"] if layer["kind"] == "MoE layer"]
    assert [layer["count"] for layer in layers] == [12, 12]
    shapes = [layer["steps"][0]["shapes"] for layer in layers]
    assert ["the last 128 tokens" in text for text in shapes] == [True, False]


def test_the_layers_ahead_are_shown_before_the_head_that_they_share(explained: Any):
    found = explained("deepseek-v3")
    kinds = [(layer["kind"], layer["count"]) for layer in found["layers"]]
    assert kinds == [("embedding", 1), ("dense layer", 3), ("MoE layer", 58), ("layer ahead", 1), ("head", 1)]
    inner = ["attend", "route", "plan", "dispatch", "shared", "experts", "combine", "add"]
    assert steps_of(found, "layer ahead") == ["look_ahead", *inner, "set_aside"]


def test_latent_attention_is_shown_with_the_widths_of_its_heads(explained: Any):
    attend = next(s for layer in explained("deepseek-v3")["layers"] for s in layer["steps"] if s["step"] == "attend")
    assert attend["shapes"] == "T,7168 -> q T,128,192; k T,128,192; v T,128,128 -> T,7168"


def test_attention_that_does_not_repeat_on_a_gpu_is_said_not_to(explained: Any):
    on_gpu = ["--train.device", "cuda", "--train.precision", "bf16"]
    why = explained("deepseek-v3", *on_gpu)["kernels"]["attention"]["why"]
    assert "runs may not repeat to the bit, though kernels.repeatable asks for it" in why
    why = explained("deepseek-v3", *on_gpu, "--kernels.repeatable", "false")["kernels"]["attention"]["why"]
    assert "repeat" not in why
    assert "repeat" not in explained("deepseek-v3", "--train.device", "cpu")["kernels"]["attention"]["why"]


def test_recorded_and_replayed_routing_is_shown(explained: Any, capsys: pytest.CaptureFixture[str]):
    assert explained("tiny")["routing"] == "chosen by the routers"
    files = ["--train.replay_routing", "old", "--train.record_routing", "new"]
    found = explained("tiny", *files)["routing"]
    assert found == "replayed from old; weights and gradients come from the routers' scores; recorded to new"
    assert run_command_line(["explain", "tiny", *files]) == 0
    assert "experts of a token: replayed from old" in capsys.readouterr().out


def test_the_grids_are_those_of_that_many_ranks(explained: Any):
    found = explained("tiny", "--nproc", "4")
    assert found["grids"]["dense"] == {"pp": 1, "dp": 4, "cp": 1, "tp": 1}
    assert found["grids"]["expert"] == {"pp": 1, "edp": 4, "ep": 1, "etp": 1}


@pytest.mark.parametrize("nproc", ["0", "-4"])
def test_a_number_of_ranks_below_one_is_refused(nproc: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["explain", "tiny", "--nproc", nproc]) == 2
    assert f"--nproc {nproc} is not legal" in capsys.readouterr().err


RING = {"attention_block", "attention_block_backward"}
MUON = {"muon_momentum", "newton_schulz", "muon_weights", "largest_logit"}
IN_EXCHANGES = {"project_to_heads", "project_from_heads"}  # which no run uses
IN_EXCHANGES |= PROJECTION_OPS | set(TILE_OPS)  # which a key asks for
RARE = RING | MUON | FP8_OPS | FP8_EXPERT_OPS | FP8_STORAGE_OPS | {"clamped_swiglu", "mlp_activation", "expert_bias"}
RARE |= {"token_losses", "decode_moment", "cached_attention"} | EVERY_MICRO_OP | STASH_OPS | PEER_OPS | BASE_OPS
RARE |= IN_EXCHANGES | {"add_in_blocks"}
USED = set(CATALOG) - RARE
PREFERENCES = ["--data.source", "files", "--data.files", "a.jsonl", "--data.format", "preferences"]
PREFERENCES += ["--data.attend", "document", "--data.packing", "best_fit"]


def test_the_kernels_shown_are_those_the_model_uses(explained: Any):
    gpt_oss = explained("gpt-oss-20b-tiny")
    its_own, lacking = {"clamped_swiglu", "expert_bias"}, {"swiglu", "norm_rope", "rmsnorm"}
    assert set(gpt_oss["kernels"]) == USED - lacking | its_own
    assert set(explained("tiny", "--pipeline.pair", "true")["kernels"]) == USED
    assert set(explained("tiny", "--precision.recipe", "mxfp8")["kernels"]) == USED | MICRO_OPS["mxfp8"]
    nvfp4 = ["--precision.recipe", "nvfp4"]
    assert set(explained("tiny", *nvfp4)["kernels"]) == USED | MICRO_OPS["nvfp4"]
    untransformed = USED | MICRO_OPS["nvfp4"] - {"hadamard_blocks"}
    assert set(explained("tiny", *nvfp4, "--precision.hadamard", "false")["kernels"]) == untransformed
    clipped = ["--optim.rule", "muon", "--optim.qk_clip", "100", "--model.attention.qk_norm", "none"]
    assert set(explained("tiny", *clipped)["kernels"]) == (USED | MUON) - {"norm_rope", "rmsnorm"}
    assert set(explained("tiny", "--optim.second_moment", "int8")["kernels"]) == USED | {"decode_moment"}
    in_blocks = ["--train.precision", "bf16", "--optim.gradients", "int8"]
    assert set(explained("tiny", *in_blocks)["kernels"]) == USED | {"add_in_blocks"}
    rings = explained("tiny", "--nproc", "2", "--parallel.cp", "2", "--parallel.context", "ring")
    assert set(rings["kernels"]) == USED | RING
    swaps = explained("tiny", "--nproc", "2", "--parallel.cp", "2", "--parallel.context", "all_to_all")
    assert set(swaps["kernels"]) == USED
    direct = explained("tiny", "--nproc", "2", "--parallel.ep", "2", "--parallel.dispatcher", "symmetric")
    assert set(direct["kernels"]) == USED | PEER_OPS
    assert "parallel.tiles" not in direct["beside_exchanges"]
    tiled = explained("tiny", "--nproc", "2", "--parallel.tp", "2", "--parallel.tiles", "projections")
    assert set(tiled["kernels"]) == USED | PROJECTION_OPS
    tiled = explained("tiny", "--nproc", "2", *SWAPPED_HEADS)
    assert set(tiled["kernels"]) == USED | HEAD_OPS
    dpo = explained("tiny", "--train.objective", "dpo", *PREFERENCES)
    assert set(dpo["kernels"]) == USED - {"cross_entropy"} | {"token_losses"}
    assert "a frozen copy of the first weights" in dpo["objective"]
    assert "longer preferences are refused" in dpo["packing"]


SWAPPED_HEADS = ["--parallel.cp=2", "--parallel.context=all_to_all", "--parallel.tiles=heads"]
SENT_DIRECTLY = ["--parallel.ep=2", "--parallel.dispatcher=symmetric", "--parallel.tiles=experts"]


def test_experts_inside_exchanges_are_told_with_their_kernels(explained: Any):
    on_cpu = explained("tiny", "--nproc", "2", *SENT_DIRECTLY)
    assert set(on_cpu["kernels"]) == USED | PEER_OPS | set(TILE_OPS)
    assert "multiply_arrivals (reference)" in on_cpu["beside_exchanges"]
    assert on_cpu["beside_exchanges"].endswith("references exchange and multiply one behind the other")
    choices: Any = {op: {"implementation": "triton", "why": ""} for op in TILE_OPS}
    config = resolve_recipe("tiny", [*SENT_DIRECTLY, "--parallel.tile_senders=8"], 2)
    said = work_beside_exchanges(config, choices)
    assert said.endswith("return_products (triton) while results return; of a kernel's programs 8 send")


def test_projections_inside_exchanges_are_named_with_their_kernels_and_the_others_with_the_reason(explained: Any):
    words = ["--parallel.tp=2", "--parallel.tiles=projections", "--model.moe.shared_ffn=64"]
    assert explained("tiny", *words[:1], "--nproc", "2")["tiles"] is None
    inside = explained("tiny", *words, "--nproc", "2")["tiles"]["inside"]
    assert inside[0] == (
        "rows gathered before attention.key, attention.query, attention.value, moe.shared.gate_up "
        "(multiply_gathered: reference)"
    )
    assert inside[1] == "sums scattered behind attention.out, moe.shared.down (scatter_products: reference)"
    assert inside[2] == "references exchange and multiply one behind the other, not while rows travel"
    latent = ["--parallel.tp=2", "--parallel.tiles=projections", "--parallel.tile_senders=4"]
    config = resolve_recipe("deepseek-v3-tiny", latent, 2)
    kernels = {op: {"implementation": "triton"} for op in PROJECTION_OPS}
    tiles = tiles_in_exchanges(config, kernels, facts_from_config(config, "cuda", "bf16", (9, 0)))
    assert tiles is not None
    assert tiles["inside"][0] == "rows gathered before dense.gate_up, moe.shared.gate_up (multiply_gathered: triton)"
    assert tiles["inside"][2] == "4 programs of a kernel send, all others multiply"
    assert tiles["apart"][0] == "latents of attention, which are narrow and read by several products"


def test_heads_inside_exchanges_are_told_with_their_kernels(explained: Any):
    tiles = explained("tiny", *SWAPPED_HEADS, "--nproc", "2")["tiles"]
    assert tiles["inside"][:2] == [
        "heads sent behind attention.query, attention.key, attention.value (project_to_heads: reference)",
        "heads gathered before attention.out (project_from_heads: reference)",
    ]
    assert tiles["inside"][3].startswith("0.5 MiB of rooms of a rank, for 512 rows of 2 ranks")
    assert tiles["apart"] == ["passes without backward, such as validation"]
    rebuilt = explained("tiny", *SWAPPED_HEADS, "--nproc", "2", "--memory.recompute", "core")
    assert rebuilt["recompute"]["sent_again"] == {}
    assert "swap" not in rebuilt["regions"]["present"]
    assert "inside the projection back" in rebuilt["regions"]["absent"]["swap"]


UNFUSED = {
    "moe.activation = geglu": "mlp_activation",
    "moe.activation = geglu_tanh": "mlp_activation",
    "moe.activation = reglu": "mlp_activation",
    "moe.activation = silu": "mlp_activation",
    "moe.activation = gelu": "mlp_activation",
    "moe.activation = gelu_tanh": "mlp_activation",
    "moe.activation = relu": "mlp_activation",
    "moe.activation = relu2": "mlp_activation",
    "moe.activation = clamped_swiglu": "clamped_swiglu",
    "moe.biases = true": "swiglu",
    "moe.gate = output": "swiglu",
    "moe.activation = relu2, moe.biases = true, moe.gate = output": "mlp_activation",
}


@pytest.mark.parametrize(("keys", "op"), UNFUSED.items())
def test_experts_that_are_not_on_the_fused_kernel_are_said_to_run_as_ops_and_why(keys: str, op: str, explained: Any):
    """On a Hopper GPU too: the reason is the model's, not the device's."""
    words = [f"--model.{key.replace(' = ', '=')}" for key in keys.split(", ")]
    kernels = explained("tiny", *words)["kernels"]
    said = f"{keys}: not on the fused expert kernel; the experts run as a composition of ops"
    assert kernels["expert_mlp"] == {"implementation": "reference", "why": said}
    assert op in kernels
    hopper = facts_from_config(resolve_recipe("tiny", words), "cuda", "bf16", (9, 0))
    assert pick_implementation("expert_mlp", replace(hopper, triton=True)) == ("reference", said)
    plain = facts_from_config(resolve_recipe("tiny"), "cuda", "bf16", (9, 0))
    assert pick_implementation("expert_mlp", replace(plain, triton=True))[0] == "gluon"


def test_activations_are_shown_with_the_shapes_of_their_steps(explained: Any):
    words = ["--model.moe.activation=relu2", "--model.moe.shared_ffn=64", "--model.moe.dense_layers=1"]
    layers = explained("tiny", *words, "--model.dense_activation=geglu")["layers"]
    shapes = {step["step"]: step["shapes"] for layer in layers for step in layer["steps"]}
    assert shapes["experts"] == "R,128 -> R,192 -> R,128  (relu2)"
    assert shapes["shared"] == "T,128 -> T,64 -> T,128  (relu2)"
    assert shapes["mlp"] == "T,128 -> T,2,512 -> T,128  (geglu)"


@pytest.mark.parametrize("force", [[], ["attention=reference"], ["grouped_gemm=reference", "cross_entropy=reference"]])
def test_the_kernels_shown_are_those_a_run_binds(force: list[str], explained: Any):
    words = ["--train.device", "cpu", *(["--kernels.force", ",".join(force)] if force else [])]
    found = explained("tiny", *words)
    kernels = BoundKernels(facts_from_config(resolve_recipe("tiny"), "cpu", "fp32"), force)
    ops = import_every_op()
    assert set(found["kernels"]) == USED
    for op in found["kernels"]:
        assert ops[op].implementations[found["kernels"][op]["implementation"]] is kernels[ops[op]]
        assert found["kernels"][op]["why"]
    for text in force:
        op, _, name = text.partition("=")
        assert found["kernels"][op] == {"implementation": name, "why": "asked for"}


@pytest.mark.parametrize(("force", "near"), [("atention=sdpa", "attention"), ("attention=spda", "sdpa"), ("x", "")])
def test_an_unknown_kernel_is_refused_with_the_nearest(force: str, near: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["explain", "tiny", "--kernels.force", force]) == 2
    message = capsys.readouterr().err
    assert f'did you mean "{near}"' in message or not near
    assert "there are: " in message


def test_the_table_tells_name_sizes_and_every_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run_command_line(["explain", "qwen3-30b-a3b"]) == 0
    shown = capsys.readouterr().out
    for part in ("qwen3-30b-a3b", "30.5 G parameters", "3.35 G active", "48 x MoE layer", "length 4096", "T,2048"):
        assert part in shown, part
    assert all(
        step in shown for step in ("embed", "attend", "route", "plan", "dispatch", "experts", "combine", "predict")
    )
    assert all(op in shown for op in USED)
    assert all(op not in shown for op in set(CATALOG) - USED), "nothing goes round a ring of one"


def test_the_table_tells_what_predicts_further_tokens_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command_line(["explain", "deepseek-v3"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "671 G parameters (and 11.6 G to predict further tokens), 37.6 G active",
        "260 G FLOPs",
        "layer ahead",
    ):
        assert part in shown, part
    assert run_command_line(["explain", "mixtral-8x7b"]) == 0
    assert "further tokens" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["[/nope]", "../up", "a/b", ".hidden", "x" * 100])
def test_a_name_that_cannot_be_a_folders_is_refused_and_shown(name: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["explain", "tiny", "--name", name]) == 2
    assert f"name = {name[:70]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (46_702_792_704, "46.7 G"), (264_192, "264 k"), (1.2e13, "12 T")]
)
def test_numbers_are_short(number: float, text: str):
    assert human_readable(number) == text


def test_what_recompute_sends_again_is_named(explained: Any):
    layout = ["--nproc", "4", "--parallel.ep", "4", "--memory.recompute", "sar@1-2"]
    recompute = explained("tiny", *layout)["recompute"]
    assert recompute["rebuilt"] == dict.fromkeys(("norm", "swap", "dispatch", "activation"), "layers 1-2")
    assert recompute["sent_again"] == {"dispatch": "dispatch to the experts' ranks"}
    assert recompute["saves"]["dispatch"] > 0
    assert recompute["saves"]["swap"] == 0


def test_regions_are_listed_with_their_places_and_absent_ones_with_reasons(explained: Any):
    regions = explained("tiny")["regions"]
    assert regions["present"]["activation"]["place"] == "inside experts"
    assert regions["present"]["moe"]["place"] == "route to combine"
    assert regions["absent"]["up"].startswith("attention is gqa")
    assert not set(regions["present"]) & set(regions["absent"])


def test_fused_experts_have_no_activation_region():
    fused = {"expert_mlp": {"implementation": "gluon", "why": ""}}
    absent = describe_regions(PRESETS["qwen3-30b-a3b"](), fused)["absent"]
    assert "one fused kernel (expert_mlp: gluon)" in absent["activation"]


def test_it_says_what_runs_beside_the_exchanges_of_a_microbatch(explained: Any):
    assert explained("tiny")["beside_exchanges"] == ""
    assert explained("deepseek-v3-tiny")["beside_exchanges"] == "", "on one rank nothing is sent"
    spread = explained("deepseek-v3-tiny", "--parallel.ep", "2", "--nproc", "2")["beside_exchanges"]
    assert spread.startswith("shared experts, beside plan and dispatch")
    chunked = explained("tiny", "--parallel.ep", "2", "--nproc", "2", "--parallel.row_chunks", "3")["beside_exchanges"]
    assert chunked == "experts of its other row chunks (3 of up to 171 tokens of a rank)"


def test_products_are_shown_with_recipe_format_and_reason(explained: Any, capsys: pytest.CaptureFixture[str]):
    words = ["--precision.recipe", "fp8_hybrid", "--precision.exclude_first", "1", "--model.moe.ffn", "128"]
    explanation = explained("tiny", *words)
    recipes = explanation["products"]["recipes"]
    assert list(recipes) == ["plain", "fp8_hybrid"]
    assert recipes["fp8_hybrid"]["weight_gradient"] == f"x and dy {explanation['facts']['dtype']}"
    kinds = {(kind["product"], kind["recipe"]): kind for kind in explanation["products"]["kinds"]}
    assert kinds["moe.experts.up_product", "plain"]["why"] == "precision.exclude_first"
    assert kinds["moe.experts.up_product", "fp8_hybrid"]["count"] == 3
    assert set(explanation["kernels"]) == USED | FP8_OPS | FP8_EXPERT_OPS
    assert explanation["kernels"]["expert_mlp"]["implementation"] == "fp8"
    composed = explained("tiny", *words, "--model.moe.ffn", "64")["kernels"]
    assert composed["expert_mlp"]["implementation"] == "reference", "ffn is no multiple of 128"
    assert set(composed) == USED | FP8_OPS
    assert explanation["products"]["storage"] == f"{explanation['facts']['dtype']}, and e4m3 in both layouts"
    assert run_command_line(["explain", "tiny", *words]) == 0
    assert "products (linear; router, embedding and head have no recipe)" in capsys.readouterr().out
    stored = explained("tiny", *words, "--precision.storage", "fp8")
    assert stored["products"]["storage"].startswith("e4m3 in both layouts and no copy in another dtype")
    assert set(stored["kernels"]) - set(explanation["kernels"]) == FP8_STORAGE_OPS
    assert run_command_line(["explain", "tiny"]) == 0
    assert "products (linear" not in capsys.readouterr().out


def test_an_entry_that_matches_no_product_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["explain", "tiny", "--precision.recipes", "*.atention.*: fp8_row"]) == 2
    assert 'no product of the model matches "*.atention.*"' in capsys.readouterr().err


def test_auto_says_the_links_that_it_knows_without_ranks_to_measure_them(explained: Any):
    words = ["--nproc", "16", "--parallel.ep", "16", "--train.global_batch", "16", "--train.device", "cpu"]
    why = explained("qwen3-30b-a3b", *words)["dispatcher"]["why"]
    known = "links of gloo on CPUs, round numbers: 1 GB/s inside a node; 1 GB/s between nodes"
    assert why.endswith(f"; {known}; a run measures its links")
    assert explained("tiny")["dispatcher"] == {"name": "local", "why": "all experts are on this rank"}


def test_shards_are_explained_with_their_bytes(capsys: pytest.CaptureFixture[str]):
    """Four ranks with a quarter of all weights each, in fp32; a block is the largest unit."""
    assert run_command_line(["explain", "tiny", "--nproc", "4", "--shard.mode", "zero3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shard = found["shard"]
    layer = sum(step["parameters"] for step in found["layers"][1]["steps"])
    assert shard["weight_bytes"] == pytest.approx(found["parameters"])
    assert shard["unit_bytes"] == pytest.approx(2 * layer * 4)
    assert run_command_line(["explain", "tiny", "--nproc", "4", "--shard.replicas", "2"]) == 0
    assert "2 copies of all shares" in " ".join(capsys.readouterr().out.split())


def test_shares_of_experts_on_the_host_are_not_among_those_of_the_device(capsys: pytest.CaptureFixture[str]):
    words = ["tiny", "--nproc", "4", "--shard.mode", "zero3", "--lora.rank", "4", "--model.moe.balance.bias_rate", "0"]
    found: list[Any] = []
    for offload in ("", "expert_weights"):
        assert run_command_line(["explain", *words, "--memory.offload", offload, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    before, after = found
    on_host = after["experts_on_host"]["bytes"]
    assert on_host > 0
    assert before["shard"]["weight_bytes"] - after["shard"]["weight_bytes"] == pytest.approx(on_host)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints, in one line."""
    assert run_command_line(["explain", "tiny", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_sums_in_two_levels_are_told_with_the_ranks_of_each(capsys: pytest.CaptureFixture[str]):
    words = ["--train.global_batch", "16", "--parallel.ep", "2", "--shard.sync"]
    assert "summed inside" not in shown(capsys, "--nproc", "16", *words, "flat")
    order = "on nodes of at most 8 ranks gradients are summed inside nodes, then across"
    two = shown(capsys, "--nproc", "16", *words, "hierarchical")
    assert order in two
    assert "; dense weights over 8 ranks of each of 2 nodes, experts over 4 ranks of each of 2 nodes" in two
    copies = shown(capsys, "--nproc", "16", *words, "hierarchical", "--shard.replicas", "2")
    assert "dense weights in one level, since their replicas lie in one node or in a node each" in copies


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--optim.when backward --optim.clip_by unit", "updates inside backward: of each unit (a layer,"),
        ("--optim.when backward --optim.clip_by unit", "clipping: of each unit by the norm of its own gradients"),
        ("--optim.clip_by previous", "clipping: of each unit by the norm of all gradients of the step before"),
        ("--optim.states host", "states in host memory: moments, momentum and main weights visit the device"),
        ("--optim.states host --optim.update host", "updates on the host: gradients come to AdamW's states there"),
    ],
)
def test_ways_of_updates_are_told_where_they_are_not_ordinary(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
):
    begin = told.split(":")[0] + ":"
    assert begin not in shown(capsys)
    assert told in shown(capsys, *words.split())


def test_what_is_sent_in_fp8_is_said(explained: Any):
    plain = explained("tiny")
    assert plain["fp8_on_the_wire"] == []
    assert not any("payload" in op for op in plain["kernels"])
    words = [
        "--parallel.ep",
        "2",
        "--nproc",
        "2",
        "--precision.dispatch",
        "fp8",
        "--precision.combine_gradient",
        "e5m2",
    ]
    tokens, gradients = explained("tiny", *words)["fp8_on_the_wire"]
    assert tokens == "tokens to experts (e4m3, a scale for 128 values of a token)"
    assert gradients == "gradients of experts' sums (e5m2, a scale for 128 values of a token)"
    words = ["--parallel.tp", "2", "--nproc", "2", "--precision.tp_sums", "fp8", "--precision.tp_sum_gradients", "fp8"]
    over_tp = explained("tiny", *words)
    assert len(over_tp["fp8_on_the_wire"]) == 2
    assert {"channels_to_payload", "payloads_to_channels"} <= set(over_tp["kernels"])
    words = ["--nproc", "2", "--optim.gradient_reduce", "fp8"]
    (gradients,) = explained("tiny", *words)["fp8_on_the_wire"]
    assert {"rows_to_payload", "sum_payload_rows"} <= set(explained("tiny", *words)["kernels"])
    assert gradients.startswith("gradients to the ranks that update their weights (e4m3")
    (gradients,) = explained("tiny", *words, "--shard.replicas", "2")["fp8_on_the_wire"]
    assert gradients.endswith("between copies of shares their sums are sent in fp32")
    storage = explained("tiny", "--precision.recipe", "fp8_block", "--precision.storage", "fp8")
    assert storage["fp8_on_the_wire"] == ["weights to replicas (as they are stored)"]


def test_it_says_what_a_graph_captures_and_what_stands_in_its_way(explained: Any, capsys: pytest.CaptureFixture[str]):
    on_gpu = ["--train.device", "cuda"]
    whole = explained("tiny", *on_gpu, "--memory.graphs", "whole")["graphs"]
    assert whole["captured"].startswith("forward, backward, clipping and update of all microbatches")
    assert "validation" in whole["eager"]
    static = explained("deepseek-v3-tiny", *on_gpu, "--memory.graphs", "static")["graphs"]
    assert static["captured"].startswith("attend+mlp, attend+route, shared: forward and backward of each")
    without = explained("tiny", *on_gpu, "--kernels.force", "adamw=reference", "--pipeline.pair", "true")["graphs"]
    assert without["graphs"] == "none"
    assert "kernel adamw = reference reads values on the host" in without["in_the_way"]
    assert any("pipeline.pair = true" in reason for reason in without["in_the_way"])
    on_cpu = ["--train.device", "cpu"]
    taped = [*on_cpu, "--memory.tape", "true"]
    assert explained("tiny", *taped)["graphs"]["in_the_way_of_a_tape"] == []
    assert explained("tiny", *taped, "--pipeline.pair", "true")["graphs"]["in_the_way_of_a_tape"]
    assert "in_the_way_of_a_tape" not in explained("tiny", *on_cpu)["graphs"]
    assert run_command_line(["explain", "tiny", *taped, "--memory.tape_processes", "2"]) == 0
    assert "two processes share the replays" in " ".join(capsys.readouterr().out.split())
    blocks = ["--lora.rank", "4", "--lora.base", "nf4", "--model.moe.balance.bias_rate", "0"]
    of_any_device = explained("tiny", *blocks, "--memory.tape", "true")["graphs"]["in_the_way_of_a_tape"]
    assert any("lora.base = nf4" in reason for reason in of_any_device)
    unfused = explained("tiny", *on_gpu, *blocks, "--lora.dropout", "0.1")["graphs"]["in_the_way"]
    assert any("expert_mlp = reference of a base in blocks" in reason for reason in unfused)
    words = [*on_gpu, "--nproc", "2", "--parallel.ep", "2", "--parallel.dispatcher", "all_gather"]
    assert any(
        "parallel.ep = 2 is in the way" in reason for reason in explained("tiny", *words)["graphs"]["in_the_way"]
    )
    assert run_command_line(["explain", "tiny", *words, "--memory.graphs", "static"]) == 0
    assert "CUDA graphs of steps: attend+route: forward and backward" in " ".join(capsys.readouterr().out.split())
    assert run_command_line(["explain", "tiny", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "CUDA graphs: none; in the way of memory.graphs whole: memory.graphs = whole: parallel.ep = 2" in shown


def test_it_says_how_much_of_a_stash_is_expected_in_use(explained: Any, capsys: pytest.CaptureFixture[str]):
    assert explained("tiny")["stash"] is None
    found = explained("tiny", "--memory.stash", "stack", "--memory.stash_gib", "0.25")
    assert found["stash"]["pool_bytes"] == 2**28
    assert 0 < found["stash"]["planned_bytes"] < 2**28
    assert found["kernels"]["push_rows"]["implementation"] == "reference"
    assert run_command_line(["explain", "tiny", "--memory.stash", "pages", "--memory.stash_gib", "0.001"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "stash of experts' rows: pages, a pool of 1.0 MiB" in shown
    assert "too little" in shown


def test_a_run_with_adapters_tells_what_is_trained_and_which_kernel_its_experts_have(explained: Any):
    """FLOPs lack the gradients of frozen weights, a third of all products, and have those of adapters."""
    words = ("qwen3-30b-a3b", "--lora.rank", "16", "--lora.targets", "*.experts.*,*.attention.out: rank=4")
    found, config = explained(*words), PRESETS["qwen3-30b-a3b"]()
    model = config.model
    experts = model.layers * model.moe.experts * 16 * (2 * model.hidden + 3 * model.moe.ffn)
    out = model.layers * 4 * (model.hidden + model.attention.heads * model.attention.head_dim)
    expected = {"products": 3 * model.layers, "ranks": [4, 16], "parameters": experts + out, "magnitudes": 0}
    assert found["adapters"] == expected
    whole = train_flops_per_token(model, config.data.seq_len)
    adapters = 6 * (experts * model.moe.top_k / model.moe.experts + out)
    weights = sum(2 * step.matmul for _, step in prefixed_model_steps(model))
    assert found["train_flops_per_token"] == pytest.approx(whole - weights + adapters)
    assert explained("tiny")["adapters"] is None
    chosen = found["kernels"]["expert_mlp"]
    assert chosen["implementation"] == "reference"
    assert "lora" not in chosen["why"]
    dropped = explained(*words, "--lora.dropout", "0.1")["kernels"]["expert_mlp"]
    assert "lora.dropout: not on the fused expert kernel" in dropped["why"]
    fp8 = explained(*words, "--precision.recipe", "fp8_block")["kernels"]["expert_mlp"]
    assert "lora.rank = 16: adapters are not inside FP8 products" in fp8["why"]


def test_a_base_in_blocks_tells_its_bytes(explained: Any, capsys: pytest.CaptureFixture[str]):
    words = ["qwen3-30b-a3b", "--lora.rank", "16", "--lora.base", "nf4", "--train.precision", "bf16"]
    words += ["--model.moe.balance.bias_rate", "0"]
    found = explained(*words)
    base = found["adapters"]["base"]
    assert base["format"] == "nf4"
    assert base["plain_bytes"] == 2 * base["weights"]
    assert base["bytes"] == base["weights"] * (4 + 16 / 64) / 8
    assert set(found["kernels"]) == USED | BASE_OPS
    assert run_command_line(["explain", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "29.9 G of them in blocks of nf4, 14.79 GiB in place of 55.69" in shown


def test_experts_on_the_host_are_told_with_their_bytes(explained: Any, capsys: pytest.CaptureFixture[str]):
    words = ["qwen3-30b-a3b", "--lora.rank", "16", "--train.precision", "bf16", "--model.moe.balance.bias_rate", "0"]
    assert explained(*words)["experts_on_host"] is None
    words += ["--memory.offload", "expert_weights@4-13,core"]
    layer = 2 * 3 * 128 * 768 * 2048
    found = explained(*words)
    assert found["experts_on_host"] == {"layers": "4-13", "bytes": 10 * layer, "device_bytes": 2 * layer}
    assert found["recompute"]["offloaded"] == {"core": "layers 0-46"}
    assert run_command_line(["explain", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "experts of layers 4-13 on the host: 11.25 GiB of the first rank in host memory, at most 2.25 GiB" in shown


def test_clones_of_hot_experts_are_told_where_a_run_makes_them(explained: Any):
    assert explained("tiny")["clones"] == ""
    words = ("--nproc", "2", "--parallel.ep", "2", "--parallel.dispatcher", "dedup", "--parallel.clone_slots", "3")
    assert explained("tiny", *words)["clones"] == "up to 3 on each of 2 ep ranks, by the counts of this microbatch"
    found = explained("tiny", *words, "--parallel.clone_decision", "previous")
    assert found["clones"].endswith("by the counts of the layer's microbatch before")


def test_a_window_for_checkpoints_is_told_with_its_size(explained: Any, capsys: pytest.CaptureFixture[str]):
    whole = explained("tiny")["saves"]
    assert not whole["in_pieces"]
    assert whole["host_bytes"] == whole["file_bytes"]
    bound = ("--checkpoint.host_gib", "0.01")
    pieces = explained("tiny", *bound)["saves"]
    assert pieces["in_pieces"]
    assert pieces["host_bytes"] == pytest.approx(0.01 * 2**30)
    assert run_command_line(["explain", "tiny", *bound]) == 0
    assert "they are written in pieces, through 10.2 MiB" in " ".join(capsys.readouterr().out.split())

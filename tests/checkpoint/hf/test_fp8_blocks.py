"""Weights in 128 x 128 FP8 blocks, as DeepSeek-V3 has them: written, read, and the same names as its files."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.format.safetensors_header import DTYPE_BYTES
from moefold.checkpoint.hf.config_json import FAMILIES, read_model_config
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.export import export_hf_weights, written_dtypes
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.published_defaults import family_keys
from moefold.checkpoint.hf.read_weights import FolderWeights
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.quantise_weight import quantise_weight, spread_over_blocks
from moefold.layout.axes import single_rank_world
from moefold.train.convert import plan_written_tensors
from moefold.train.from_hf import from_hf
from tests.support.hf_models import CASES, DENSE, hf, make, save, tokens

BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
SUFFIX = "_scale_inv"
RAGGED = {"hidden_size": 160, "intermediate_size": 144, "num_hidden_layers": 2}  # two blocks, the second one cut off
WIDE_EXPERTS = {**RAGGED, "moe_intermediate_size": 136}
# By family: a model, and the linear layers of layer 1 that are not quantised.
WRITTEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "deepseek v3": ({**WIDE_EXPERTS, "kv_lora_rank": 136}, []),
    "deepseek v2": ({**RAGGED, "q_lora_rank": 136}, []),
    "glm qk-norm, biased, groups, two dense layers": ({**WIDE_EXPERTS, "first_k_dense_replace": 1}, []),
    "mixtral": (RAGGED, ["block_sparse_moe.gate"]),
    "olmoe biased, normalised, one key head": (RAGGED, ["mlp.gate"]),
    "qwen3 tied, biased, not normalised": (WIDE_EXPERTS, ["mlp.gate"]),
    "qwen2": ({**RAGGED, "shared_expert_intermediate_size": 136}, ["mlp.gate", "mlp.shared_expert_gate"]),
}
NOT_QUANTISED = ("norm.weight", "embed_tokens.weight", "lm_head.weight", "gate.weight", "bias", "eh_proj.weight")


def ragged_model(case: str) -> Any:
    kind, options = CASES[case]
    return make(kind, **{**options, **WRITTEN[case][0]})


def write_fp8(start: Path, out: Path, *more: str) -> dict[str, torch.Tensor]:
    assert run_command_line(["convert", str(start), str(out), "--dtype", "fp8_block", *more]) == 0
    return load_file(out / "model.safetensors")


def rounded_to_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Quantised and dequantised by the reference rule."""
    made = quantise_weight(tensor[None], "block", ScaleRule()).forward
    return (made.values.float() * spread_over_blocks(made.scales, tensor[None]))[0]


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written_in_blocks_is_read_as_the_rounded_weights(case: str, tmp_path: Path):
    """Every projection, to the bit; all else is bf16. transformers computes the same with the rounded weights."""
    start = save(ragged_model(case), tmp_path / "hf")
    before = load_file(start / "model.safetensors")
    written = write_fp8(start, tmp_path / "out")
    scales = {name for name in written if name.endswith(SUFFIX)}
    assert written.keys() - scales == before.keys()
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in before.items():
        if name.endswith(NOT_QUANTISED):
            assert written[name].dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
            assert name + SUFFIX not in scales
            expected[name] = tensor.to(written[name].dtype).float()
            continue
        assert written[name].dtype == torch.float8_e4m3fn
        assert written[name + SUFFIX].dtype == torch.float32
        assert written[name + SUFFIX].shape == tuple(-(-size // 128) for size in tensor.shape)
        expected[name] = rounded_to_blocks(tensor)

    plain = save(ragged_model(case), tmp_path / "plain")
    save_file(expected, plain / "model.safetensors")
    ours, right = from_hf(tmp_path / "out", seq_len=32), from_hf(plain, seq_len=32)
    for name, tensor in right.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    theirs = hf().AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", WRITTEN)
def test_transformers_quantises_the_same_layers(case: str, tmp_path: Path):
    """The modules that transformers replaces, by the config.json that was written, are those with scales in the files;
    its own dequantisation gives the same values where blocks are whole."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts, FP8Linear, replace_with_fp8_linear
    from transformers.quantizers.auto import AutoHfQuantizer

    written = write_fp8(save(ragged_model(case), tmp_path / "hf"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    quantisation = config["quantization_config"]
    gates = quantisation.pop("modules_to_not_convert", [])
    assert quantisation == BLOCKS
    assert gates[:1] == ["lm_head"] * bool(gates)
    assert [name for name in gates if ".1." in name] == [f"model.layers.1.{name}" for name in WRITTEN[case][1]]

    model = ragged_model(case)
    quantiser = AutoHfQuantizer.from_config({**BLOCKS, "modules_to_not_convert": gates}, pre_quantized=True)
    left_out = quantiser.get_modules_to_not_convert(model, gates or None)
    replace_with_fp8_linear(model, left_out, quantiser.quantization_config, pre_quantized=True)
    modules = dict(model.named_modules())
    linear = {name: module for name, module in modules.items() if isinstance(module, FP8Linear)}
    assert sum(isinstance(module, FP8Experts) for module in modules.values()) >= 1
    scales = {name.removesuffix(".weight" + SUFFIX): t.shape for name, t in written.items() if name.endswith(SUFFIX)}
    outside = {name: shape for name, shape in scales.items() if ".experts." not in name}
    assert outside == {name: module.weight_scale_inv.shape for name, module in linear.items()}

    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    made = quantise_weight(weight[None], "block", ScaleRule()).forward
    whole = Fp8Dequantize(quantiser)._dequantize_one(made.values[0], made.scales[0])
    assert torch.equal(whole, rounded_to_blocks(weight))


def published_plan() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of DeepSeek-V3 at its own sizes, with one layer of each kind."""
    family = FAMILIES["deepseek_v3"]
    few = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    model = read_model_config(family, ConfigOptions(few, "config.json", family_keys("deepseek_v3")))
    table = family.name_table(model)
    plan = plan_written_tensors(table, written_dtypes(family, table, model, torch.float8_e4m3fn))
    return {tensor.name: (tensor.dtype_code, tensor.shape) for tensor in plan}


DEEPSEEK_PAIRS = {  # of a layer: shapes of the bytes and of the scales
    "self_attn.q_a_proj": ((1536, 7168), (12, 56)),
    "self_attn.q_b_proj": ((24576, 1536), (192, 12)),
    "self_attn.kv_a_proj_with_mqa": ((576, 7168), (5, 56)),
    "self_attn.kv_b_proj": ((32768, 512), (256, 4)),
    "self_attn.o_proj": ((7168, 16384), (56, 128)),
}
DENSE_PAIRS = {
    "mlp.gate_proj": ((18432, 7168), (144, 56)),
    "mlp.up_proj": ((18432, 7168), (144, 56)),
    "mlp.down_proj": ((7168, 18432), (56, 144)),
}
EXPERT_PAIRS = {
    "gate_proj": ((2048, 7168), (16, 56)),
    "up_proj": ((2048, 7168), (16, 56)),
    "down_proj": ((7168, 2048), (56, 16)),
}
EXPERTS = ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(256))]
SPARSE_PAIRS = {f"{expert}.{name}": pair for expert in EXPERTS for name, pair in EXPERT_PAIRS.items()}
LAYER_NORMS = {
    "input_layernorm": (7168,),
    "post_attention_layernorm": (7168,),
    "self_attn.q_a_layernorm": (1536,),
    "self_attn.kv_a_layernorm": (512,),
}
MTP_PLAIN = {
    "embed_tokens": (129280, 7168),
    "enorm": (7168,),
    "hnorm": (7168,),
    "eh_proj": (7168, 14336),
    "shared_head.norm": (7168,),
    "shared_head.head": (129280, 7168),
}


def test_names_dtypes_and_shapes_are_those_of_deepseek_v3():
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    plain = {"model.embed_tokens": (129280, 7168), "model.norm": (7168,), "lm_head": (129280, 7168)}
    for layer, pairs in enumerate((DENSE_PAIRS, SPARSE_PAIRS, SPARSE_PAIRS)):
        prefix = f"model.layers.{layer}."
        for name, (shape, scales) in {**DEEPSEEK_PAIRS, **pairs}.items():
            expected[f"{prefix}{name}.weight"] = ("F8_E4M3", shape)
            expected[f"{prefix}{name}.weight_scale_inv"] = ("F32", scales)
        plain |= {prefix + name: shape for name, shape in LAYER_NORMS.items()}
        if layer > 0:
            plain[f"{prefix}mlp.gate"] = (256, 7168)
            expected[f"{prefix}mlp.gate.e_score_correction_bias"] = ("F32", (256,))
    plain |= {f"model.layers.2.{name}": shape for name, shape in MTP_PLAIN.items()}
    expected |= {f"{name}.weight": ("BF16", shape) for name, shape in plain.items()}
    assert published_plan() == expected


def test_several_files_hold_what_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = save(ragged_model("deepseek v3"), tmp_path / "hf")
    one = write_fp8(start, tmp_path / "one")
    monkeypatch.setattr("moefold.checkpoint.hf.write_weights.SHARD_BYTES", 100_000)
    assert run_command_line(["convert", str(start), str(tmp_path / "out"), "--dtype", "fp8_block"]) == 0
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in files:
        held = load_file(file)
        found |= held
        assert all(index["weight_map"][name] == file.name for name in held)
    assert found.keys() == one.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name].view(torch.uint8), one[name].view(torch.uint8)) for name in one)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in one.values())
    split, whole = (from_hf(tmp_path / name, seq_len=32).state_dict() for name in ("out", "one"))
    assert all(torch.equal(split[name], whole[name]) for name in whole)


def test_a_live_model_is_handed_on_as_it_is_written(tmp_path: Path):
    start = save(ragged_model("deepseek v3"), tmp_path / "hf")
    written = write_fp8(start, tmp_path / "out")
    model = from_hf(start, seq_len=32)
    weights = export_hf_weights(model, model.model, single_rank_world(), "deepseek_v3", torch.float8_e4m3fn)
    handed_on = dict(weights)
    assert handed_on.keys() == written.keys()
    for name, tensor in written.items():
        assert handed_on[name].dtype == tensor.dtype
        assert torch.equal(handed_on[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


def test_blocks_can_be_written_again_as_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    start = save(ragged_model("mixtral"), tmp_path / "hf")
    write_fp8(start, tmp_path / "out")
    assert "as bfloat16, float32, float8_e4m3fn" in capsys.readouterr().out
    assert run_command_line(["convert", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    back = load_file(tmp_path / "back" / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    weight = load_file(start / "model.safetensors")[name]
    assert torch.equal(back[name], rounded_to_blocks(weight).bfloat16())


def write_by_hand(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file, put together byte by byte."""
    header: dict[str, Any] = {}
    begin = 0
    for name, (dtype, shape, raw) in tensors.items():
        assert len(raw) == prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(raw)]}
        begin += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for *_, raw in tensors.values()))


def by_hand(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[int], bytes]]:
    codes = {torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16"}
    return {
        name: (codes[t.dtype], list(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


E4M3_BYTES = {0x00: 0.0, 0x01: 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}
SCALES = {  # by dtype: the bytes of 0.5, 2, 4 and 0.25
    "F32": struct.pack("<4f", 0.5, 2.0, 4.0, 0.25),
    "BF16": struct.pack("<4H", 0x3F00, 0x4000, 0x4080, 0x3E80),
    "F8_E8M0": bytes([126, 128, 129, 125]),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (CASES["deepseek v3"], "model.layers.0.mlp.down_proj.weight"),
        (CASES["mixtral"], "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        (CASES["olmoe"], "model.layers.1.mlp.experts.5.down_proj.weight"),
        (CASES["gpt-oss"], "model.layers.0.self_attn.q_proj.weight"),
        (DENSE["llama"], "model.layers.0.mlp.down_proj.weight"),
        (DENSE["qwen3"], "model.layers.1.mlp.down_proj.weight"),
    ],
)
@pytest.mark.parametrize("dtype", SCALES)
def test_known_bytes_are_read_as_known_values(case: tuple[str, dict[str, Any]], name: str, dtype: str, tmp_path: Path):
    """A file made by hand: a matrix of four blocks, the outer ones cut off, in a model of any family."""
    kind, options = case
    model = make(kind, **{**options, **RAGGED, "head_dim": 40} if kind == "GptOss" else {**options, **RAGGED})
    folder = save(model, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    rows, columns = tensors[name].shape
    assert 128 < rows <= 256
    assert 128 < columns <= 256
    codes = [list(E4M3_BYTES)[(3 * i + j) % 8] for i in range(rows) for j in range(columns)]
    files = by_hand(tensors)
    files[name] = ("F8_E4M3", [rows, columns], bytes(codes))
    files[name + SUFFIX] = (dtype, [2, 2], SCALES[dtype])
    write_by_hand(folder / "model.safetensors", files)
    set_quantisation(folder, BLOCKS)

    values = torch.tensor([E4M3_BYTES[code] for code in codes]).view(rows, columns)
    values[:128, :128] *= 0.5
    values[:128, 128:] *= 2.0
    values[128:, :128] *= 4.0
    values[128:, 128:] *= 0.25
    box = ((0, rows), (0, columns))
    assert torch.equal(FolderWeights(open_model_folder(folder)).fetch_box(name, box), values)
    read = from_hf(folder, seq_len=32).state_dict().values()
    assert any(torch.equal(part, values) for t in read for part in matrices_of(t, rows, columns))


def matrices_of(tensor: torch.Tensor, rows: int, columns: int) -> list[torch.Tensor]:
    """The matrices of this size in one of our tensors, whose outer dims count experts or heads."""
    if tensor.ndim < 2 or tensor.numel() % (rows * columns):
        return []
    return list(tensor.reshape(-1, rows, columns))


def set_quantisation(folder: Path, quantisation: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"weight_block_size": [64, 128]},
            "weight_block_size = [64, 128], which is not supported; expected [128, 128]",
        ),
        ({"weight_block_size": None}, "weight_block_size = null, which is not supported"),
        ({"fmt": "e5m2"}, "fmt = e5m2, which is not supported; expected e4m3"),
        ({"activation_scheme": "static"}, "activation_scheme = static, which is not supported; expected dynamic"),
        ({"expert_dtype": "fp4"}, "expert_dtype = fp4, which is not supported; expected fp8"),
        ({"scale_fmt": "int8"}, "scale_fmt = int8"),
        ({"zero_point": True}, "zero_point = true, which is not supported; expected no such key"),
        ({"quant_method": "compressed-tensors"}, "quant_method = compressed-tensors; expected one of fp8: blocks"),
        ({"quant_method": None}, "quant_method = None"),
    ],
)
def test_other_quantisation_is_refused_by_name(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kind, options = DENSE["llama"]
    folder = save(make(kind, **options), tmp_path / "hf")
    set_quantisation(folder, {**BLOCKS, **changes})
    assert run_command_line(["convert", str(folder), str(tmp_path / "out"), "--upcycle", "E4T2"]) == 2
    refusal = capsys.readouterr().err
    assert said in refusal
    assert "dequantise the folder with the library that wrote it and save it in bf16" in refusal
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_fmt": "ue8m0"},
        {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["lm_head"]},
        {"scale_fmt": None, "ignored_layers": None},
    ],
)
def test_further_keys_of_published_blocks_are_read(changes: dict[str, Any], tmp_path: Path):
    start = save(ragged_model("deepseek v3"), tmp_path / "hf")
    write_fp8(start, tmp_path / "out")
    before = from_hf(tmp_path / "out", seq_len=32).state_dict()
    set_quantisation(tmp_path / "out", {**BLOCKS, **changes})
    after = from_hf(tmp_path / "out", seq_len=32).state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_scales_of_another_dtype_are_named(tmp_path: Path):
    written = write_fp8(save(ragged_model("mixtral"), tmp_path / "hf"), tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    written[name + SUFFIX] = written[name + SUFFIX].to(torch.int32)
    save_file(written, tmp_path / "out" / "model.safetensors")
    with pytest.raises(UserError, match=r"is I32 \[2, 2\]; expected F8_E4M3 .*, one of F32, BF16, F16, F8_E8M0"):
        from_hf(tmp_path / "out", seq_len=32)


def test_a_family_without_matrices_of_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kind, options = CASES["gpt-oss"]
    start = save(make(kind, **options), tmp_path / "hf")
    assert run_command_line(["convert", str(start), str(tmp_path / "out"), "--dtype", "fp8_block"]) == 2
    said = capsys.readouterr().err
    assert '"model.layers.0.mlp.experts.gate_up_proj" of a gpt_oss model has the shape [4, 32, 48]' in said
    assert "write it with --dtype bf16" in said
    assert not (tmp_path / "out").exists()


def test_upcycling_and_blocks_are_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kind, options = DENSE["llama"]
    start = save(make(kind, **options), tmp_path / "hf")
    words = ["convert", str(start), str(tmp_path / "out"), "--upcycle", "E4T2", "--dtype", "fp8_block"]
    assert run_command_line(words) == 2
    assert "upcycle to bf16, then convert that folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

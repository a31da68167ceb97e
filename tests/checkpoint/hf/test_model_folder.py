"""What strangers hand us: everything wrong is told in one refusal, nothing is executed, nothing is overwritten."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.hf.config_json import family_for_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.presets.zoo import PRESETS
from moefold.train.from_hf import from_hf
from tests.support.hf_models import CASES, make, save


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, options = CASES["qwen3"]
    return save(make(kind, **options), tmp_path_factory.mktemp("sound") / "hf")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "hf"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((sound / name).read_bytes())
    return copy


def options_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def set_options(folder: Path, **options: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**options_of(folder), **options}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        from_hf(folder, seq_len=16)
    return str(refused.value)


def test_all_that_does_not_fit_is_told_at_once_with_near_names(folder: Path):
    """A dropped expert, a renamed key, one of another shape and one of another type."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_prj.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    change_tensors(folder, change)
    said = refusal(folder)
    assert '"model.layers.1.mlp.experts.2.up_proj.weight" is not in the files' in said
    near = '(did you mean "model.layers.0.self_attn.q_prj.weight"?)'
    assert f'"model.layers.0.self_attn.q_proj.weight" is not in the files {near}' in said
    assert '"model.layers.0.self_attn.q_prj.weight" is in the files, but the model has no such tensor' in said
    assert '"model.norm.weight" is F32 [31]; expected one of F64, F32, F16, BF16, [32]' in said
    assert '"lm_head.weight" is I8' in said


def test_options_that_change_what_is_computed_are_refused_by_name(folder: Path):
    set_options(folder, hidden_act="mish", attention_dropout=0.1, logit_softcapping=30.0)
    set_options(folder, rope_parameters={"rope_type": "su", "rope_theta": 10_000.0})
    said = refusal(folder)
    for text in ("hidden_act = mish", "attention_dropout = 0.1", "logit_softcapping = 30.0", "rope_type = su"):
        assert text in said
    assert "moefold does not know what it changes" in said


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        ("mixtral", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        (
            "mixtral",
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("deepseek v3", {"rope_interleave": False}, "rope_interleave = false"),
        ("deepseek v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ("deepseek v3", {"scoring_func": "softmax"}, "scoring_func = softmax"),
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob = true"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5"),
        ("gpt-oss", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen3", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
        ("qwen3", {"hidden_size": "big"}, "hidden_size = big is not legal"),
        ("qwen3", {"num_hidden_layers": -1}, "num_hidden_layers = -1 is not legal"),
        ("qwen3", {"num_hidden_layers": 10**12}, "expected a whole number from 1 to 10000"),
        ("qwen3", {"num_hidden_layers": 9999}, "tells of 9999 layers"),
        ("qwen3", {"num_local_experts": 60_000}, "60000 experts"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "quant_method = gptq"),
        ("qwen3", {"quantization_config": "fp8"}, "quantization_config = fp8 is not legal; expected an object"),
        ("qwen3", {"quantization_config": {"quant_method": ["fp8"]}}, "quant_method = ['fp8']; expected one of fp8"),
        ("qwen3", {"model_type": "qwen3_mo"}, 'did you mean "qwen3_moe"?'),
    ],
)
def test_each_family_refuses_what_it_cannot_do(case: str, options: dict[str, Any], said: str, tmp_path: Path):
    kind, made = CASES[case]
    folder = save(make(kind, **made), tmp_path / "hf")
    set_options(folder, **options)
    assert said in refusal(folder)


class Bomb:
    """Whoever unpickles this leaves a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickled_files_are_never_opened(folder: Path, tmp_path: Path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert "pytorch_model.bin, a pickled file, which is never opened" in refusal(folder)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_under_another_name_is_no_safetensors_file(folder: Path, tmp_path: Path):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")) + b"0" * 100)
    assert "is no safetensors file" in refusal(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors", "..", "weights.bin", 7])
def test_an_index_that_leads_elsewhere_is_refused(name: Any, folder: Path, tmp_path: Path):
    (tmp_path / "elsewhere.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    places = dict.fromkeys(load_file(folder / "model.safetensors"), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    said = refusal(folder)
    assert "expected a plain name" in said or "only safetensors files are read" in said


def test_an_index_that_says_other_than_the_files_is_refused(folder: Path):
    places = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    del places["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**places, "ghost": "model.safetensors"}})
    )
    said = refusal(folder)
    assert '"ghost" is not in model.safetensors' in said
    assert '"lm_head.weight" is in a file, but not in' in said


def test_links_that_leave_the_folder_are_refused_but_for_the_hubs_own(folder: Path, tmp_path: Path):
    os.rename(folder / "model.safetensors", tmp_path / "outside.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    assert "is a link that leaves the folder" in refusal(folder)
    hub = tmp_path / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "1234").mkdir(parents=True)
    os.rename(tmp_path / "outside.safetensors", hub / "blobs" / "beef")
    os.rename(folder / "config.json", hub / "blobs" / "cafe")
    (hub / "snapshots" / "1234" / "model.safetensors").symlink_to("../../blobs/beef")
    (hub / "snapshots" / "1234" / "config.json").symlink_to("../../blobs/cafe")
    assert len(open_model_folder(hub / "snapshots" / "1234").tensors) > 10


def test_a_tokenizer_that_is_a_link_elsewhere_is_not_followed(folder: Path, tmp_path: Path):
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert run_command_line(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert run_command_line(["train", "--from-hf", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "secret"]


def rewritten(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def shift(header: dict[str, Any]) -> None:
    first = next(entry for name, entry in header.items() if name != "__metadata__")
    first["shape"] = [size * 2 for size in first["shape"]]


def overlap(header: dict[str, Any]) -> None:
    entries = [entry for name, entry in header.items() if name.endswith("input_layernorm.weight")]
    entries[0]["data_offsets"] = entries[1]["data_offsets"]


def negative(header: dict[str, Any]) -> None:
    header["x"] = {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-5],
        lambda raw: raw + b"more",
        lambda raw: raw[:4],
        lambda raw: b"",
        lambda raw: struct.pack("<Q", 2**63) + raw[8:],
        lambda raw: struct.pack("<Q", 99_000_000) + raw[8:],
        lambda raw: raw[:8] + b"[" * 2000 + raw[2008:],
        lambda raw: rewritten(raw, shift),
        lambda raw: rewritten(raw, overlap),
        lambda raw: rewritten(
            raw, lambda header: header.update(x={"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]})
        ),
        lambda raw: rewritten(raw, lambda header: header.update(x=3)),
    ],
)
def test_files_that_lie_about_themselves_are_refused_in_one_line(damage: Callable[[bytes], bytes], folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError) as refused:
        open_model_folder(folder)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_command_refuses_with_code_two_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    assert run_command_line(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert run_command_line(["train", "--from-hf", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert run_command_line(["convert", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert run_command_line(["train", "--from-hf", str(tmp_path / "nothing"), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("moefold: ") == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_model_that_no_family_has_a_place_for_is_refused_with_what_is_in_the_way():
    model = PRESETS["latent-30b-a3b"]().model
    with pytest.raises(UserError, match=r"the nearest, qwen3_moe, has none for\nmodel.moe.latent = 512"):
        family_for_model(model)


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("mixtral-8x7b", "mixtral"),
        ("olmoe-1b-7b", "olmoe"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("qwen2-57b-a14b", "qwen2_moe"),
        ("deepseek-v2-lite", "deepseek_v2"),
        ("deepseek-v2", "deepseek_v2"),
        ("deepseek-v3", "deepseek_v3"),
        ("kimi-k2", "deepseek_v3"),
        ("gpt-oss-20b", "gpt_oss"),
        ("glm-4.5-air", "glm4_moe"),
    ],
)
def test_every_preset_of_a_published_model_has_its_family(preset: str, kind: str):
    assert family_for_model(PRESETS[preset]().model).kind == kind

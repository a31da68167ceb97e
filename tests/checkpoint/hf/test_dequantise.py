"""Weights in few bits, and layers that predict further tokens, as DeepSeek and GPT-OSS publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.format.boxes import box_slices
from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.export import export_hf_weights
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.read_weights import FolderWeights
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.layout.axes import single_rank_world
from moefold.train.from_hf import from_hf
from tests.support.hf_models import CASES, hf, make, save, tokens


def changed(folder: Path, change: Any) -> Path:
    """The folder with its tensors changed by a function."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def with_option(folder: Path, text: str) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", "{" + text + ",", 1))


def to_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every projection as DeepSeek-V3 has it; norms, router, embedding and head stay as they are."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") or "proj_with_mqa" in name:
            rows, columns = (-(-size // 128) for size in tensor.shape)
            scales = torch.empty(rows, columns)
            made = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
            for i in range(rows):
                for j in range(columns):
                    place = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                    scales[i, j] = tensor[place].abs().max() / 448
                    made[place] = (tensor[place] / scales[i, j]).to(torch.float8_e4m3fn)
            found |= {name: made, f"{name}_scale_inv": scales}
    return found


def from_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        found[name] = tensor
        if f"{name}_scale_inv" in tensors:
            whole = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            found[name] = tensor.float() * whole[: tensor.shape[0], : tensor.shape[1]]
    return found


def test_fp8_blocks_are_made_whole(tmp_path: Path):
    """As transformers computes with the weights made whole by hand; slices that cut blocks are right too."""
    kind, options = CASES["deepseek v3"]
    options = {
        **options,
        "hidden_size": 160,
        "intermediate_size": 136,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    model = make(kind, **{**options, "num_key_value_heads": 8})
    folder = changed(save(model, tmp_path / "hf"), to_fp8)
    with_option(folder, '"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}')
    whole = from_fp8(load_file(folder / "model.safetensors"))
    name = "model.layers.0.mlp.gate_proj.weight"
    box = ((100, 33), (3, 150))
    assert torch.equal(FolderWeights(open_model_folder(folder)).fetch_box(name, box), whole[name][box_slices(box)])

    plain = save(model, tmp_path / "plain")
    save_file(whole, plain / "model.safetensors")
    theirs = hf().AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(tokens()).logits
        torch.testing.assert_close(from_hf(folder, seq_len=32).logits(tokens()), expected, rtol=1e-5, atol=1e-5)
    assert run_command_line(["convert", str(folder), str(tmp_path / "out")]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == whole.keys()
    assert torch.equal(written[name], whole[name].bfloat16()), "what was quantised is written as bf16"


def to_fp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts in random 4-bit blocks, as GPT-OSS is published."""
    found = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32, 16)
            del found[name]
            found[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            found[f"{name}_scales"] = torch.randint(120, 127, shape[:-1], dtype=torch.uint8, generator=generator)
    return found


def test_mxfp4_blocks_are_made_whole(tmp_path: Path):
    """Against transformers' own unpacking; every value is one that bf16 has."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kind, options = CASES["gpt-oss"]
    model = make(kind, **{**options, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2})
    folder = changed(save(model, tmp_path / "hf"), to_fp4)
    with_option(folder, '"quantization_config": {"quant_method": "mxfp4"}')
    packed = load_file(folder / "model.safetensors")
    whole = {name: tensor for name, tensor in packed.items() if not name.endswith(("_blocks", "_scales"))}
    for name in [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]:
        unpacked = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.bfloat16)
        whole[name] = unpacked.float().contiguous()
    plain = save(model, tmp_path / "plain")
    save_file(whole, plain / "model.safetensors")
    theirs = hf().AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(tokens()).logits
        torch.testing.assert_close(from_hf(folder, seq_len=32).logits(tokens()), expected, rtol=1e-5, atol=1e-5)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    box = ((1, 2), (5, 40), (3, 7))
    assert torch.equal(FolderWeights(open_model_folder(folder)).fetch_box(name, box), whole[name][box_slices(box)])
    assert run_command_line(["convert", str(folder), str(tmp_path / "out")]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[name].float(), whole[name]), "bf16 holds every value"


def with_layer_ahead(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A third layer, a copy of the second, that predicts the token after next."""
    generator = torch.Generator().manual_seed(1)
    found = dict(tensors)
    found |= {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    d = len(tensors["model.norm.weight"])
    shapes = {"enorm": (d,), "hnorm": (d,), "eh_proj": (d, 2 * d), "shared_head.norm": (d,)}
    for name, shape in shapes.items():
        found[f"model.layers.3.{name}.weight"] = torch.randn(shape, generator=generator)
    found["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    found["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return found


@pytest.mark.parametrize("case", ["deepseek v3", "glm qk-norm, biased, groups, two dense layers"])
def test_layers_that_predict_further_tokens_predict_what_published_code_does(case: str, tmp_path: Path):
    """It joins the next token's embedding with the stream behind the last norm; theirs is put together from the layer
    that this one is a copy of."""
    kind, options = CASES[case]
    theirs = make(kind, **options).eval()
    folder = changed(save(theirs, tmp_path / "hf"), with_layer_ahead)
    files = load_file(folder / "model.safetensors")
    own = {name.removeprefix("model.layers.3."): t for name, t in files.items() if ".3." in name}
    ids = tokens()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], own[f"{name}.weight"], theirs.config.rms_norm_eps)

    with torch.no_grad():
        stream = theirs.model(ids, use_cache=False).last_hidden_state[:, :-1]
        ahead = theirs.get_input_embeddings()(ids[:, 1:])
        joined = torch.cat((norm(ahead, "enorm"), norm(stream, "hnorm")), -1) @ own["eh_proj.weight"].T
        theirs.model.layers = theirs.model.layers[2:3]
        theirs.config.num_hidden_layers = 1
        theirs.model.norm.weight.copy_(own["shared_head.norm.weight"])
        expected = theirs(inputs_embeds=joined, use_cache=False).logits

        model = from_hf(folder, seq_len=ids.shape[1]).train()
        seen: list[torch.Tensor] = []
        model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(ids, torch.roll(ids, -1, 1))
        found = model.head.logits(seen[1]).unflatten(0, ids.shape)[:, :-1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["deepseek v3", "glm qk-norm, biased, groups, two dense layers"])
def test_layers_that_predict_further_tokens_come_and_go(case: str, tmp_path: Path):
    kind, options = CASES[case]
    folder = changed(save(make(kind, **options), tmp_path / "hf"), with_layer_ahead)
    before = load_file(folder / "model.safetensors")
    model = from_hf(folder, seq_len=32)
    assert model.model.mtp == 1
    state = model.state_dict()
    of_layer = {name.removeprefix("blocks.2."): t for name, t in state.items() if name.startswith("blocks.2.")}
    assert all(torch.equal(state[f"ahead.0.block.{name}"], tensor) for name, tensor in of_layer.items())

    x, e = torch.randn(5, 32), torch.randn(5, 32)
    normed = [
        torch.nn.functional.rms_norm(v, (32,), before[f"model.layers.3.{n}.weight"], model.model.norm_eps)
        for v, n in ((e, "enorm"), (x, "hnorm"))
    ]
    expected = torch.cat(normed, -1) @ before["model.layers.3.eh_proj.weight"].T  # the token first, then the stream
    torch.testing.assert_close(model.ahead[0](x, e), expected)

    after = dict(
        export_hf_weights(
            model, model.model, single_rank_world(), describe_model(open_model_folder(folder)).family.kind
        )
    )
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_second_copy_that_differs_is_refused(tmp_path: Path):
    def differing(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = with_layer_ahead(tensors)
        tensors["model.layers.3.shared_head.head.weight"][7, 3] += 1
        return tensors

    kind, options = CASES["deepseek v3"]
    folder = changed(save(make(kind, **options), tmp_path / "hf"), differing)
    with pytest.raises(UserError, match=r'"model.layers.3.shared_head.head.weight" differs from "lm_head.weight"'):
        from_hf(folder, seq_len=32)


def test_factors_that_do_not_fit_their_blocks_are_named(tmp_path: Path):
    def without_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = to_fp8(tensors)
        del tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"]
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(2, 2)
        return tensors

    kind, options = CASES["deepseek v3"]
    folder = changed(save(make(kind, **options), tmp_path / "hf"), without_one)
    with pytest.raises(UserError) as refused:
        from_hf(folder, seq_len=32)
    assert '"model.layers.1.self_attn.o_proj.weight_scale_inv" is nothing' in str(refused.value)
    assert "F32 [2, 2]; expected F8_E4M3 in two dims and factors of shape [1, 1]" in str(refused.value)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path):
    kind, options = CASES["deepseek v3"]
    model = make(kind, **options)
    folder = save(model, tmp_path / "hf")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"deepseek_v3"', '"kimi_k2"'))
    assert describe_model(open_model_folder(folder)).family.kind == "kimi_k2"
    with torch.no_grad():
        found = from_hf(folder, seq_len=32).logits(tokens())
        torch.testing.assert_close(found, model(tokens()).logits, rtol=0, atol=1e-5)

"""Adapters as PEFT loads them: on a transformers model they give our logits, and merged weights do so without PEFT."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.format.boxes import whole_box
from moefold.checkpoint.hf.config_json import DescribedModel, describe_model
from moefold.checkpoint.hf.export import GatheredBoxes, export_hf_weights, iterate_hf_tensors
from moefold.checkpoint.hf.merged_weights import MergedWeights, weight_adapters
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.peft_folder import peft_adapter, write_adapter
from moefold.checkpoint.hf.read_weights import local_tensors
from moefold.cli.main import run_command_line
from moefold.config.base_formats import BASE_FORMATS
from moefold.config.errors import UserError
from moefold.config.run import Config, DataConfig, LoraConfig, OptimConfig, ParallelConfig, TrainConfig
from moefold.data.corpus import Corpus
from moefold.layout.axes import World, single_rank_world
from moefold.layout.declare import declared_parameters
from moefold.layout.held_blocks import held_blocks_of
from moefold.model.transformer import Transformer
from moefold.observe.printer import print_nothing
from moefold.precision.base_blocks import empty_blocks
from moefold.precision.low_rank import without_adapters
from moefold.train.assemble import assemble_run, build_model, choose_kernels
from moefold.train.from_hf import starting_weights
from moefold.train.lora_from import starting_adapters
from moefold.train.resume import begin_checkpoint, make_background_saver
from moefold.train.step import take_next_step
from tests.support.hf_models import CASES, SIZES, hf, make, save, tokens
from tests.support.ranks import run_ranks
from tests.support.tiny_tokenizer import write_words

Tensors = dict[str, torch.Tensor]
LORA = LoraConfig(rank=3, alpha=6.0)
UNEVEN = LoraConfig(rank=2, alpha=5.0, rs=True, targets=("*.attention.*", "*.attention.key: rank=4", "*.experts.*"))
CHOSEN = {
    "qwen3": LORA,
    "qwen3 dense layers, window": replace(LORA, targets=("*.dense.*", "*.experts.down_product", "*.out: rank=1")),
    "qwen2": LORA,
    "qwen2 window, normalised, dense layers": LoraConfig(rank=3, dora=True, targets=("*.attention.*",)),
    "deepseek v3 yarn, no query latent, biased": LoraConfig(rank=2, dora=True, targets=("*.key", "*.latent", "*.out")),
    "mixtral": replace(LORA, rs=True, targets=("*.attention.*", "*.experts.*", "*.router: rank=1")),
    "deepseek v3": UNEVEN,
    "deepseek v2": LORA,
    "gpt-oss": LORA,
    "olmoe": LORA,
    "glm": LORA,
}


def adapted_model(folder: Path, lora: LoraConfig) -> tuple[Transformer, Config, DescribedModel]:
    """Our model of a folder, with adapters that change what it computes."""
    described = describe_model(open_model_folder(folder))
    balance = replace(described.model.moe.balance, bias_rate=0.0)
    model = replace(described.model, moe=replace(described.model.moe, balance=balance), mtp=0)
    train = TrainConfig(device="cpu", precision="fp32")
    config = Config(model=model, data=DataConfig(seq_len=32, tokenizer="byte"), train=train, lora=lora)
    world = single_rank_world()
    fill = starting_weights(folder, config, world, print_nothing)
    ours = build_model(config, world, choose_kernels(config, world), fill).eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in ours.named_parameters():
        if name.endswith(".lora.b"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        elif name.endswith(".lora.magnitude"):
            parameter.data.mul_(1 + torch.rand(parameter.shape, generator=generator))
    return ours, config, described


@pytest.mark.parametrize("case", CHOSEN)
def test_peft_gives_our_logits(case: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    kind, options = CASES[case]
    theirs = make(kind, **options)
    folder = save(theirs, tmp_path / "hf")
    ours, config, described = adapted_model(folder, CHOSEN[case])
    boxes = GatheredBoxes(local_tensors(ours), single_rank_world())
    table = described.family.name_table(config.model)
    adapters = weight_adapters(config)
    write_adapter(tmp_path / "peft", peft_adapter(table, adapters, config.lora, boxes.fetch_box), overwrite=False)
    ids = tokens()
    with torch.no_grad():
        base = theirs(ids).logits
        expected = ours.logits(ids)
        with without_adapters(ours):
            close(ours.logits(ids), base)
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    loaded = {name: p for name, p in wrapped.named_parameters() if ".lora_" in name}
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert sorted(p.numel() for p in loaded.values()) == sorted(x.numel() for x in written.values())
    weights = {name: p.detach().clone() for name, p in theirs.named_parameters() if ".lora_" not in name}
    with torch.no_grad():
        close(wrapped(ids).logits, expected)
        assert float((expected - base).abs().max()) > 1e-2 * float(expected.abs().max())
        wrapped.merge_adapter()
        assert changed(theirs, weights), "merged weights are others"
        close(wrapped(ids).logits, expected)
        wrapped.unmerge_adapter()
        assert not changed(theirs, weights), "unmerged weights are those before, to rounding"
        with wrapped.disable_adapter():
            close(wrapped(ids).logits, base)
        close(wrapped(ids).logits, expected)
        close(wrapped.merge_and_unload()(ids).logits, expected)


def changed(model: torch.nn.Module, weights: Tensors) -> list[str]:
    """The names of those that are others now, by more than sums and differences round."""
    now = dict(model.named_parameters())
    return [name for name, before in weights.items() if not torch.allclose(now[name], before, rtol=1e-6, atol=1e-6)]


@pytest.mark.parametrize("case", ["qwen2", "deepseek v3", "gpt-oss"])
def test_a_folder_fills_a_base_in_blocks(case: str, tmp_path: Path):
    """Blocks are those of the weights that a plain base has, whatever pieces of files a weight is joined from."""
    kind, options = CASES[case]
    folder = save(make(kind, **options), tmp_path / "hf")
    plain = dict(adapted_model(folder, LORA)[0].named_parameters())
    ours, _, _ = adapted_model(folder, replace(LORA, base="mxfp4"))
    held = 0
    for name, parameter in ours.named_parameters():
        blocks = held_blocks_of(parameter)
        if blocks is None:
            assert torch.equal(parameter, plain[name])
            continue
        expected = empty_blocks(plain[name], BASE_FORMATS["mxfp4"])
        expected.copy_(plain[name].detach())
        assert torch.equal(blocks.dequantised(), expected.dequantised()), name
        held += 1
    assert held > 5
    with torch.no_grad():
        assert bool(ours.logits(tokens()).isfinite().all())


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    error = float((actual - expected).abs().max())
    assert error < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("case", ["gpt-oss", "deepseek v3", "deepseek v3 yarn, no query latent, biased"])
def test_merged_weights_are_the_explicit_sum(case: str, tmp_path: Path):
    """transformers loads them and computes what our model with adapters does."""
    kind, options = CASES[case]
    folder = save(make(kind, **options), tmp_path / "hf")
    ours, config, described = adapted_model(folder, CHOSEN[case])
    boxes = GatheredBoxes(local_tensors(ours), single_rank_world())
    merged = MergedWeights(boxes.fetch_box, weight_adapters(config))
    tensors = dict(iterate_hf_tensors(described.family.name_table(config.model), merged.fetch_box))
    theirs = make(kind, **options)
    state = theirs.state_dict()
    before = load_file(folder / "model.safetensors")
    assert {name for name in before if not torch.equal(before[name], tensors[name].to(before[name].dtype))}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded = hf().AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert loaded.state_dict().keys() == state.keys()
    ids = tokens()
    with torch.no_grad():
        close(loaded(ids).logits, ours.logits(ids))


def train_and_save(world: World, start: str, given: str, out: str) -> Tensors:
    """Two steps from a folder and given adapters, on this layout, and a checkpoint. The adapters as they began."""
    folder = Path(start)
    degrees = {name: world.axis(name).size for name in ("tp", "ep")}
    config = Config(
        model=describe_model(open_model_folder(folder)).model,
        data=DataConfig(seq_len=16, tokenizer=str(folder / "tokenizer.json")),
        train=TrainConfig(global_batch=4, micro_batch=1, validate_sequences=4, precision="fp32"),
        optim=OptimConfig(lr=0.05, warmup=0),
        parallel=ParallelConfig(**degrees),
        lora=LORA,
    )
    corpus = Corpus(np.arange(400) % 48, np.arange(400) % 48)
    weights = starting_weights(folder, config, world, print_nothing)
    adapters = starting_adapters(Path(given), config, world, print_nothing)
    made = assemble_run(config, world, Path(out), corpus, weights, adapters)
    held = local_tensors(made.model)
    boxes = GatheredBoxes(held, world)
    shapes = {each.name: each.declaration.shape for each in declared_parameters(made.model) if ".lora." in each.name}
    began = {name: boxes.fetch_box(name, whole_box(shape)) for name, shape in shapes.items()}
    with pytest.raises(UserError, match="which a live export does not merge"):
        next(export_hf_weights(made.model, config.model, world))
    for _ in range(2):
        take_next_step(made)
    with make_background_saver(made, str) as saver:
        begin_checkpoint(made, saver)
    return began


def test_adapters_of_four_ranks_begin_as_given_and_load_in_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kind, options = CASES["qwen3"]
    base = make(kind, **options)
    start = save(base, tmp_path / "hf")
    ours, config, described = adapted_model(start, LORA)
    table = described.family.name_table(config.model)
    fetch = GatheredBoxes(local_tensors(ours), single_rank_world()).fetch_box
    write_adapter(tmp_path / "given", peft_adapter(table, weight_adapters(config), LORA, fetch), overwrite=False)
    run = str(tmp_path / "run")
    write_words(start, SIZES["vocab_size"])
    ranks = run_ranks(train_and_save, 4, str(start), str(tmp_path / "given"), run, tp=2, ep=2)
    given = {name: p.detach() for name, p in ours.named_parameters() if ".lora." in name}
    for began in ranks:
        assert began.keys() == given.keys()
        assert all(torch.equal(began[name], given[name]) for name in given)
    assert run_command_line(["convert", run, str(tmp_path / "merged"), "--merge"]) == 0
    assert run_command_line(["convert", run, str(tmp_path / "peft"), "--merge", "--to", "peft"]) == 2
    assert "--to peft adapters alone" in capsys.readouterr().err
    assert run_command_line(["convert", run, str(tmp_path / "peft"), "--to", "peft"]) == 0
    assert "adapters for qwen3_moe" in capsys.readouterr().out
    merged = hf().AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    ids = tokens()
    with torch.no_grad():
        expected = merged(ids).logits
        assert float((base(ids).logits - expected).abs().max()) > 1e-2 * float(expected.abs().max())
    options = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert options["target_parameters"][:2] == [
        f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down")
    ]
    assert run_command_line(["convert", str(start), str(tmp_path / "none"), "--to", "peft"]) == 2
    peft = pytest.importorskip("peft")
    wrapped = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    with torch.no_grad():
        close(wrapped(ids).logits, expected)


def test_adapters_of_layers_that_transformers_lacks_are_refused(tmp_path: Path):
    kind, options = CASES["deepseek v3"]
    folder = save(make(kind, **options), tmp_path / "hf")
    described = describe_model(open_model_folder(folder))
    model = replace(described.model, mtp=1)
    config = Config(model=model, lora=replace(LORA, targets=("ahead.*.attention.*",)))
    table = described.family.name_table(model)
    with pytest.raises(UserError, match="no layers of multi-token prediction"):
        peft_adapter(table, weight_adapters(config), config.lora, lambda name, box: torch.zeros(()))

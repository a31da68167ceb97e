"""A key that nothing reads is a setting that pretends. Runs are watched, and every key must have been looked at."""

import contextlib
import io
import json
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.explain import PROJECTION_OPS, tiles_in_exchanges
from moefold.cli.main import run_command_line
from moefold.config.keys import iterate_keys
from moefold.config.rules import RULES
from moefold.config.run import Config, ParallelConfig
from moefold.dispatch.price import cheapest_dispatcher
from moefold.kernels.facts import facts_from_config
from tests.support.runs import SMALL, corpus

CONSENTS = {"model.moe.router.looks_ahead"}  # what a person agrees to: a rule asks for it, and nothing else has to


def sections(node: Any) -> dict[type, str]:
    """Every configuration class with its place in the tree."""
    found = {type(node): ""}
    for each in fields(node):
        value = getattr(node, each.name)
        if is_dataclass(value):
            found |= {kind: f"{each.name}.{path}" for kind, path in sections(value).items()}
    return found


def watch(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys read by any module of moefold but those of config, from now on."""
    seen: set[str] = set()
    for kind, path in sections(Config()).items():

        def look(self: Any, name: str, path: str = path) -> Any:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if reader.startswith("moefold.") and not reader.startswith("moefold.config"):
                seen.add(path + name)
            return object.__getattribute__(self, name)

        monkeypatch.setattr(kind, "__getattribute__", look, raising=False)
    return seen


def test_every_key_is_read_by_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        "".join(json.dumps({"body": f"line {i} of many, each a little different\n"}) + "\n" for i in range(900))
    )
    folder = str(tmp_path / "prepared")
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_command_line(["data", "prepare", corpus(tmp_path)[-1], "--out", folder, "--workers", "1"]) == 0
    text = ["--data.source", "prepared", "--data.files", folder, "--data.weights", "1"]
    variants = [
        ["--model.attention.rope.scaling", "llama3", "--model.attention.qkv_bias", "true", *text],
        ["--model.attention.rope.scaling", "yarn", "--optim.decay", "wsd", "--model.moe.dense_layers", "1"],
    ]
    variants[0] += ["--model.moe.capacity.factor", "1.5", "--model.mtp", "1", "--pipeline.pair", "true"]
    variants[0] += ["--model.moe.activation", "clamped_swiglu", "--model.moe.shared_ffn", "8"]
    variants[0] += ["--model.moe.balance.device_loss", "0.1", "--model.moe.balance.devices", "2"]
    variants[0] += ["--memory.offload", "layer", "--memory.offload_least", "64"]
    variants[0] += ["--model.attention.window", "8", "--model.attention.full_every", "2"]
    variants[0] += ["--train.precision", "fp16", "--checkpoint.memory_every", "1"]
    variants[1] += [
        "--model.attention.kind",
        "mla",
        "--model.attention.kv_heads",
        "2",
        "--model.attention.rope_dim",
        "8",
    ]
    variants[1] += [
        "--model.attention.qk_norm",
        "none",
    ]
    recipes = "*.experts.up_product: fp8_tensor,*.experts.down_product: nvfp4,*.attention.out: mxfp8"
    variants[1] += ["--precision.recipes", recipes, "--precision.scaling", "delayed"]
    variants[1] += ["--data.source", "files", "--data.files", str(lines), "--data.text_key", "body"]
    variants[1] += ["--optim.groups", "*.experts.*: rule=muon"]
    adapted = [
        "--lora.rank",
        "2",
        "--lora.targets",
        "*.attention.*",
        "--lora.base",
        "nf4",
        "--model.moe.balance.bias_rate",
        "0",
        *corpus(tmp_path),
    ]
    adapted += ["--memory.stash", "stack", "--memory.stash_gib", "0.01"]
    variants.append(adapted)
    pairs = tmp_path / "preferences.jsonl"
    pairs.write_text('{"prompt": "ab", "chosen": "cd", "rejected": "e"}\n' * 200)
    preferred = ["--train.objective", "dpo", "--data.source", "files", "--data.files", str(pairs)]
    preferred += ["--data.format", "preferences", "--data.attend", "document", "--data.packing", "best_fit"]
    variants.append(preferred)
    variants.append(["--memory.tape", "true", *corpus(tmp_path)])
    seen = watch(monkeypatch)
    for i, variant in enumerate(variants):
        argv = ["train", "tiny", *SMALL, "--train.steps", "2", "--optim.warmup", "1", *variant]
        with contextlib.redirect_stdout(io.StringIO()):
            assert run_command_line([*argv, "--out", str(tmp_path / str(i))]) == 0
    cheapest_dispatcher(Config(parallel=ParallelConfig(ep=2)), 2, 4)  # a run of one rank has no tokens to carry
    exchanging = Config(parallel=ParallelConfig(tp=2, tiles=("projections",)))  # whose kernels are of a GPU
    kernels = {op: {"implementation": "triton"} for op in PROJECTION_OPS}
    tiles_in_exchanges(exchanging, kernels, facts_from_config(exchanging, "cuda", "bf16"))
    assert {path for rule in RULES for path in rule.reads} >= CONSENTS
    unread = {key.path for key in iterate_keys(Config())} - seen - CONSENTS
    assert not unread, f"nothing reads {sorted(unread)}: use them or take them out of config/run.py"

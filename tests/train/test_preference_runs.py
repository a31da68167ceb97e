"""Runs on preferences (DPO): loss, figures and gradients are those of the formula, with a reference that is the base
without adapters or a frozen copy; layouts of four ranks are equal to one; a run goes on to the bit and learns."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from moefold.checkpoint.format.boxes import box_corner
from moefold.checkpoint.live.logical_tensors import TensorPart
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.rules import check_config
from moefold.config.run import Config, LoraConfig, ParallelConfig, ShardConfig
from moefold.data.corpus import Corpus
from moefold.data.loader import Batch
from moefold.data.prepared_corpus import open_prepared
from moefold.data.prepared_folder import read_index
from moefold.data.tokenizer import ByteTokenizer
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.transformer import Transformer
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run, build_model, choose_kernels
from moefold.train.evaluate import validation_means
from moefold.train.parity import (
    Trace,
    TraceEntry,
    first_mismatch,
    local_gradients,
    scalar_entry,
    shrink_config,
    single_rank_config,
)
from moefold.train.step import StepReport, take_next_step, train_step
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, metrics

SEQ = 32
BETA = 0.7
LORA = LoraConfig(rank=4, alpha=6.0)


def preferences() -> Corpus:
    """Pairs of random responses, shorter than a bin."""
    chance = np.random.default_rng(4)
    lengths, masks = [], []
    for _ in range(150):
        prompt, chosen, rejected = chance.integers(1, 4, 3)
        mask = np.repeat([False, True, False, True], (prompt, chosen + 1, prompt, rejected + 1))
        masks.append(mask)
        lengths.append(len(mask))
    tokens = chance.integers(0, 256, sum(lengths)).astype(np.uint8)
    starts = np.cumsum([0, *lengths[:-1]])
    mask = np.concatenate(masks)
    return Corpus(tokens, tokens, starts, starts, (), mask, mask)


def config_of(world: int = 1, lora: LoraConfig = LORA, aux: float = 0.0, **parallel: Any) -> Config:
    config = PRESETS["tiny"]()
    moe = with_moe_keys(config.model.moe, aux_loss=aux, z_loss=0.0, bias_rate=0.0)
    model = replace(config.model, moe=moe)
    train = replace(config.train, precision="fp64")
    config = replace(config, model=model, train=train, lora=lora, parallel=ParallelConfig(**parallel))
    small = shrink_config(config, world)
    data = replace(small.data, source="files", files=("none",), format="preferences", seq_len=SEQ)
    data = replace(data, attend="document", packing="best_fit")
    train = replace(small.train, objective="dpo", dpo_beta=BETA, global_batch=4, validate_sequences=4)
    optim = replace(small.optim, lr=0.05)  # so that margins are far from zero in the second step
    stages = replace(small.pipeline, layout="Et|tL" if small.parallel.pp > 1 else "")
    return check_config(replace(small, data=data, train=train, optim=optim, pipeline=stages), world)


def begin(config: Config, world: World | None = None) -> Run:
    return assemble_run(config, world or single_rank_world(), Path("."), preferences())


def responses_of(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each document of a batch, without padding."""
    assert batch.begins_BS is not None
    assert batch.filled_B is not None
    found = []
    for tokens, labels, begins, filled in zip(
        batch.tokens_BS, batch.labels_BS, batch.begins_BS, batch.filled_B, strict=True
    ):
        is_real = torch.arange(SEQ) < filled
        for begin in begins[is_real].unique().tolist():
            is_own = is_real & (begins == begin)
            found.append((tokens[is_own], labels[is_own]))
    return found


def plain_model(run: Run, lora: LoraConfig) -> Transformer:
    """A model of the run's shape, of which logits alone are asked."""
    train = replace(run.config.train, objective="next_token")
    config = replace(run.config, train=train, lora=lora)
    return build_model(config, run.world, choose_kernels(config, run.world))


def log_probability(model: Transformer, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the response behind a prompt, summed token by token."""
    log_p = model.logits(tokens[None])[0].log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(log_p, labels.tolist(), strict=True):
        if label != IGNORE_INDEX:
            total = total + row[label]
    return total


def margins_by_formula(policy: Transformer, reference: Transformer, batch: Batch) -> torch.Tensor:
    """beta ((log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected))) of each pair, p of the model and r
    of the reference."""
    gains = []
    for response in responses_of(batch):
        with torch.no_grad():
            known = log_probability(reference, *response)
        gains.append(log_probability(policy, *response) - known)
    return BETA * (torch.stack(gains[::2]) - torch.stack(gains[1::2]))


@pytest.mark.parametrize("lora", [LORA, LoraConfig()], ids=["adapters", "all weights"])
def test_loss_figures_and_gradients_are_those_of_the_formula(lora: LoraConfig):
    run = begin(config_of(lora=lora))
    reference = plain_model(run, LoraConfig())
    reference.load_state_dict({name: run.model.state_dict()[name].clone() for name in reference.state_dict()})
    first = take_next_step(run)
    assert first.loss == pytest.approx(float(np.log(2)), rel=1e-12)  # model and reference are the same
    assert run.model.objective.figures(first.further_means) == {"reward_margin": 0, "reward_accuracy": 0}
    policy = plain_model(run, lora)
    policy.load_state_dict(run.model.state_dict())
    batch = run.loader.next_batch()
    report = train_step(run, batch)
    margin_P = margins_by_formula(policy, reference, batch)
    loss = -F.logsigmoid(margin_P).mean()
    loss.backward()
    trained = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    expected = [TraceEntry(f"gradient {name}", (0,) * grad.ndim, grad) for name, grad in trained.items()]
    assert margin_P.abs().max() > 0.05
    assert len(margin_P) > 2 * len(batch.tokens_BS), "bins hold several pairs"
    assert report.loss == pytest.approx(loss.item(), rel=1e-11)
    assert report.further_means[0] == pytest.approx(margin_P.mean().item(), rel=1e-10)
    assert report.further_means[1] == pytest.approx((margin_P > 0).double().mean().item(), rel=1e-12)
    labels = torch.cat([labels for _, labels in responses_of(batch)])
    assert report.tokens == int((labels != IGNORE_INDEX).sum())
    found = local_gradients(run, "")
    assert {entry.what for entry in found} == {entry.what for entry in expected}
    assert first_mismatch(expected, [found], 1e-10) is None


def steps_of(report: StepReport, number: int) -> list[TraceEntry]:
    figures = [report.loss, report.tokens, *report.further_means]
    return [scalar_entry(f"step {number}: figure {i}", value) for i, value in enumerate(figures)]


def traces(world: World, configs: Sequence[Config]) -> list[Trace]:
    """Figures and gradients of two steps and a validation, for each configuration."""
    found: list[Trace] = []
    for config in configs:
        here = world
        if world.size > 1:
            here = create_world(world.rank, world.size, world.device, config.parallel, shard=config.shard)
        run = begin(config, here)
        trace: Trace = []
        for number in (1, 2):
            report = take_next_step(run)
            trace += [*steps_of(report, number), *local_gradients(run, f"step {number}: ")]
        means = validation_means(run)
        trace += [scalar_entry(f"validation {i}", mean) for i, mean in enumerate(means)]
        trace += reference_weights(run)
        found.append(trace)
    return found


def reference_weights(run: Run) -> list[TraceEntry]:
    """Of a frozen copy, as a checkpoint has them."""
    copy = run.further_state.get("reference")
    found: list[TraceEntry] = []
    for name, tensor in copy.named_state() if copy else ():
        if isinstance(tensor, TensorPart):
            for held in tensor.held:
                found.append(TraceEntry(f"reference {name}", tuple(box_corner(held.box)), held.read().clone()))
    return found


def grouped(config: Config) -> Config:
    """With groups of ranks for each microbatch: a pair is one sample, so that its responses stay together. The longest
    pairs are two ranks'."""
    parallel = replace(config.parallel, context_sizes="dynamic", context_sending=("0",))
    return check_config(replace(config, parallel=parallel, train=replace(config.train, micro_batch=1)), 4)


def sizes_of_groups(world: World, config: Config) -> list[int]:
    """Of the first batch of this rank."""
    here = create_world(world.rank, world.size, world.device, config.parallel)
    batch = begin(config, here).loader.next_batch()
    return [part.cp_size for part in batch.parts if part.cp_size]


@pytest.mark.extended
def test_layouts_of_four_ranks_are_equal_to_one():
    configs = [
        config_of(4, LoraConfig(), aux=0.01, tp=2, cp=2, context="ring"),
        config_of(4, LORA, aux=0.01, pp=2, ep=2),
        config_of(4, LORA, cp=2, ep=4, context="all_to_all"),
        config_of(4, LoraConfig(), pp=2, tp=2, etp=2),
        replace(config_of(4, LORA, ep=2), shard=ShardConfig("zero3")),
        replace(config_of(4, LoraConfig(), tp=2), shard=ShardConfig("zero3")),
        replace(config_of(4, LoraConfig(), pp=2, ep=2), shard=ShardConfig("zero3")),
        grouped(config_of(4, LORA, cp=4, ep=2, dispatcher="all_to_all", context="ring")),
        grouped(config_of(4, LoraConfig(), cp=4, context="all_gather")),
    ]
    sizes = run_ranks(sizes_of_groups, 4, configs[-1])
    assert set(chain.from_iterable(sizes)) >= {1, 2}
    by_rank = run_ranks(traces, 4, configs)
    expected = traces(single_rank_world(), [single_rank_config(config) for config in configs])
    for number, config in enumerate(configs):
        mismatch = first_mismatch(expected[number], [found[number] for found in by_rank], 1e-9)
        assert mismatch is None, f"{config.parallel}: {mismatch}"


def preference_file(folder: Path) -> Path:
    path = folder / "preferences.jsonl"
    with path.open("w") as file:
        for number in range(120):
            word = "abcdefgh"[number % 8]
            record = {"prompt": f"{word}{number % 5}:", "chosen": "yes", "rejected": "no."}
            file.write(json.dumps(record) + "\n")
    return path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def from_files(folder: Path) -> list[str]:
    return ["--data.source", "files", "--data.files", str(preference_file(folder)), "--data.format", "preferences"]


def from_folders(folder: Path, names: Sequence[str] = ("first", "second")) -> list[str]:
    """Prepared folders, of different preferences where they are two, with weights."""
    lines = preference_file(folder).read_text().splitlines()
    size = len(lines) // len(names)
    for number, name in enumerate(names):
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(lines[number * size : (number + 1) * size]))
        words = ["data", "prepare", str(file), "--out", str(folder / name), "--workers", "1"]
        words += ["--data.format", "preferences", "--data.seq_len", "32", "--data.held_out", "0.1"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert run_command_line(words) == 0
    weights = ["--data.weights", "0.25/0.75"] if len(names) > 1 else []
    folders = ",".join(str(folder / name) for name in names)
    return ["--data.source", "prepared", "--data.files", folders, "--data.format", "preferences", *weights]


DPO = ["--train.objective", "dpo", "--train.dpo_beta", "0.5", "--model.moe.balance.bias_rate", "0"]
KINDS: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "adapters, from files": (from_files, ["--lora.rank", "4"]),
    "all weights, prepared": (from_folders, []),
    "all weights, fully sharded": (from_files, ["--nproc", "2", "--shard.mode", "zero3"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_what_is_preferred_and_goes_on_to_the_bit(tmp_path: Path, kind: str):
    make_data, more = KINDS[kind]
    data = make_data(tmp_path)
    packed = ["--data.attend", "document", "--data.packing", "best_fit", "--data.held_out", "0.1"]
    times = ["--train.steps", "8", "--optim.warmup", "1", "--checkpoint.every", "4", "--train.validate_every", "4"]
    words = ["train", "tiny", *SMALL, *data, *packed, *DPO, *more, *times, "--optim.lr", "0.02"]
    out = tmp_path / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_command_line([*words, "--out", str(out)]) == 0
    records = metrics(out)
    assert records[0]["val_loss"] == pytest.approx(float(np.log(2)), rel=1e-6)
    assert records[-1]["reward_accuracy"] == records[-1]["val_reward_accuracy"] == 1
    assert records[-1]["reward_margin"] > records[1]["reward_margin"]
    assert records[-1]["val_loss"] < 0.5
    last = out / "checkpoints" / "step-00000008"
    expected = tensors_of(last)
    assert any(name.startswith("reference.") for name in expected) == ("--lora.rank" not in more)
    shutil.rmtree(last)
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_command_line([*words, "--out", str(out), "--resume", "auto"]) == 0
    actual = tensors_of(last)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    again = metrics(out)
    for before, after in zip(records, again, strict=True):
        assert [before.get(key) for key in ("loss", "reward_margin", "val_loss")] == [
            after.get(key) for key in ("loss", "reward_margin", "val_loss")
        ]


def test_prepared_preferences_give_the_losses_of_their_files(tmp_path: Path):
    """A batch has every pair once, so that losses do not depend on the order, which differs."""
    sources = [from_files(tmp_path), from_folders(tmp_path, ["whole"])]
    pairs = read_index(tmp_path / "whole").documents("train")
    words = [*DPO, "--data.attend", "document", "--data.packing", "best_fit", "--data.held_out", "0.1"]
    words += ["--data.batch_of", "samples", "--train.micro_batch", "1", "--train.global_batch", str(pairs)]
    words += [
        "--data.seq_len",
        "128",
        "--model.layers",
        "1",
        "--train.precision",
        "fp64",
        "--optim.warmup",
        "1",
        "--optim.lr",
        "0.02",
    ]
    losses: list[list[float]] = []
    for data in sources:
        config = resolve_recipe("tiny", [*SMALL, *data, *words])
        run = assemble_run(config, single_rank_world(), tmp_path)
        losses.append([take_next_step(run).loss for _ in range(2)])
    assert losses[0][1] < 0.9 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    short = resolve_recipe("tiny", [*SMALL, *sources[1], *words, "--data.seq_len", "8"])
    with pytest.raises(UserError, match=r"data.seq_len = 8 cuts \d+ of \d+ samples.*since preferences are never cut"):
        assemble_run(short, single_rank_world(), tmp_path)
    as_text = replace(short.data, format="text")
    with pytest.raises(UserError, match=r"holds preferences, but data\.format = text"):
        open_prepared(as_text, ByteTokenizer(), 256)

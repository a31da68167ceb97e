"""The experts of every token, recorded on one layout and replayed on another, through whole training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus, shrink_config
from moefold.train.routing_log import open_routing_log
from moefold.train.step import take_next_step
from tests.support.models import with_moe_keys
from tests.support.ranks import run_ranks

STEPS = 2
RANKS = 4
LAYOUTS: dict[str, tuple[ParallelConfig, PipelineConfig]] = {
    "tp and ep": (ParallelConfig(tp=2, ep=4, dispatcher="dedup"), PipelineConfig()),
    "cp": (ParallelConfig(cp=2, ep=2, context="all_gather"), PipelineConfig()),
    "tp and cp": (ParallelConfig(tp=2, cp=2, ep=2, etp=2), PipelineConfig()),
    "pp and vpp": (ParallelConfig(pp=2, ep=2), PipelineConfig(vpp=2)),
    "paired": (ParallelConfig(pp=2, tp=2, ep=2), PipelineConfig(vpp=2, pair=True)),
}


def sized(**changes: Any) -> Config:
    """A model with multi-token prediction, small enough for every layout, in fp64; the same for all of them."""
    tiny = PRESETS["tiny"]()
    keys = {"bias_rate": 0.01} | changes
    model = replace(tiny.model, mtp=1, moe=with_moe_keys(tiny.model.moe, **keys))
    # As large as the most demanding layout needs; then on one rank.
    largest = ParallelConfig(tp=2, cp=2, pp=1, ep=4)
    small = shrink_config(replace(tiny, model=model, parallel=largest), RANKS)
    layers = replace(small.model, layers=4)
    train = replace(small.train, steps=STEPS, precision="fp64", global_batch=4, micro_batch=1)
    return replace(small, model=layers, train=train, parallel=ParallelConfig())


def on_layout(config: Config, name: str) -> Config:
    parallel, pipeline = LAYOUTS[name]
    return replace(config, parallel=parallel, pipeline=pipeline)


def with_files(config: Config, record: Path | str = "", replay: Path | str = "") -> Config:
    train = replace(config.train, record_routing=str(record), replay_routing=str(replay))
    return replace(config, train=train)


def train_recorded(world: World, config: Config) -> list[float]:
    """The losses of all steps; the routing is recorded where the configuration asks for it."""
    here = create_world(world.rank, world.size, world.device, config.parallel, node_size=2)
    run = assemble_run(config, here, Path("."), random_corpus(config))
    log = open_routing_log(run)
    losses = []
    for _ in range(STEPS):
        report = take_next_step(run)
        losses.append(report.loss)
        if log:
            log.write_through(report.number)
    if log:
        log.close()
    return losses


def train_each(world: World, configs: list[Config]) -> list[list[float]]:
    return [train_recorded(world, config) for config in configs]


def on_one_rank(config: Config) -> list[float]:
    return train_recorded(single_rank_world(), config)


def other_experts(path: Path, target: Path, experts: int) -> None:
    """The same file with the next expert in place of each."""
    content = load_file(path)
    for name, values in content.items():
        if values.dtype == np.int16:
            content[name] = np.where(values < 0, values, (values + 1) % experts).astype(np.int16)
    save_file(content, target)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_one_rank_recorded_is_replayed_on_any_layout_and_the_reverse(name: str, tmp_path: Path):
    config = sized()
    recorded, edited = tmp_path / "recorded", tmp_path / "edited"
    free = on_one_rank(with_files(config, record=recorded))
    other_experts(recorded, edited, config.model.moe.experts)
    forced = on_one_rank(with_files(config, replay=edited))
    assert max(abs(a - b) for a, b in zip(free, forced, strict=True)) > 1e-6, "other experts give another loss"

    layout = on_layout(config, name)
    there, again = tmp_path / "there", tmp_path / "again"
    runs = [with_files(layout, record=there), with_files(layout, record=again, replay=edited)]
    for _, losses in run_ranks(train_each, RANKS, runs):
        assert losses == pytest.approx(forced, rel=1e-9), "replayed there: the losses of one rank"
    assert there.read_bytes() == recorded.read_bytes(), "recorded there: the same choices"
    chosen, wanted = load_file(again), load_file(edited)
    assert chosen.keys() == wanted.keys()
    assert all(np.array_equal(chosen[layer], wanted[layer]) for layer in wanted)


KINDS: dict[str, dict[str, Any]] = {
    "experts choose": {"router": "expert_choice", "looks_ahead": True, "bias_rate": 0.0, "normalize": "none"},
    "counted first": {"aux_over": "global_batch", "aux_loss": 0.1},
    "with a capacity": {"capacity_factor": 0.75},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_routers_are_recorded_and_replayed_too(kind: str, tmp_path: Path):
    config = sized(**KINDS[kind])
    path = tmp_path / "recorded"
    free = on_one_rank(with_files(config, record=path))
    assert on_one_rank(with_files(config, replay=path)) == free
    content = load_file(path)
    assert sorted(content) == sorted(f"layer.{n}{end}" for n in range(5) for end in ("", ".recorded"))
    assert all(values.all() for name, values in content.items() if name.endswith("recorded"))


Content = dict[str, np.ndarray]


def without_a_layer(content: Content) -> None:
    del content["layer.1"]


def one_choice_less(content: Content) -> None:
    content["layer.0"] = content["layer.0"][..., :1].copy()


def other_length(content: Content) -> None:
    content["layer.0"] = content["layer.0"][:, :-1].copy()


def fewer_sequences(content: Content) -> None:
    for name, values in content.items():
        content[name] = values[:-1].copy()


def expert_that_is_none(content: Content) -> None:
    content["layer.1"][7, 3, 0] = 100


def wide_ids(content: Content) -> None:
    content["layer.0"] = content["layer.0"].astype(np.int64)


def not_recorded(content: Content) -> None:
    content["layer.0.recorded"][-1] = 0


def twice_the_same(content: Content) -> None:
    content["layer.1"][0, 0] = 3


BAD: list[tuple[Callable[[Content], None], str]] = [
    (without_a_layer, r'no tensors "layer.1" and "layer.1.recorded"'),
    (one_choice_less, "layer 0 has 1 experts for each token; expected 2 "),
    (other_length, "layer 0 has sequences of 31 tokens; expected data.seq_len = 32"),
    (fewer_sequences, "layer 0 has 7 sequences; expected 8, train.steps x train.global_batch"),
    (expert_that_is_none, r"layer 1, sequences \d to \d: expert ids from 0 to 100; expected -1 .* to 7"),
    (wide_ids, r'"layer.0" is I64 \[8, 32, 2\]; expected I16'),
    (not_recorded, r"layer 0, sequences 4 to 7: some were not recorded"),
    (twice_the_same, "a token has the same expert twice"),
]
WORDS = "--model.layers 2 --train.steps 2 --train.global_batch 4 --train.micro_batch 2 --data.seq_len 32 "
WORDS += "--train.device cpu --train.sample_tokens 0 --train.validate_sequences 2 --data.source zipf"


def train_command(out: Path, *more: str) -> int:
    return run_command_line(["train", "tiny", *WORDS.split(), "--out", str(out), *more])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    assert train_command(folder / "run", "--train.record_routing", str(folder / "new" / "routing")) == 0
    return folder / "new" / "routing"


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=lambda x: getattr(x, "__name__", ""))
def test_a_file_that_does_not_fit_is_refused_with_exit_code_2(
    spoil: Callable[[Content], None],
    message: str,
    recorded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    content = load_file(recorded)
    spoil(content)
    save_file(content, tmp_path / "bad")
    assert train_command(tmp_path / "run", "--train.replay_routing", str(tmp_path / "bad")) == 2
    printed = " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match=message):
        raise UserError(printed)
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "refused before the first step"


def test_a_replayed_run_writes_the_losses_of_the_recorded_one(recorded: Path, tmp_path: Path):
    assert train_command(tmp_path / "run", "--train.replay_routing", str(recorded)) == 0
    there, here = (path / "metrics.jsonl" for path in (recorded.parent.parent / "run", tmp_path / "run"))
    assert losses_in(there) == losses_in(here)


def losses_in(metrics: Path) -> list[str]:
    return [line.split('"grad_norm"')[0] for line in metrics.read_text().splitlines() if '"loss"' in line]


def test_no_file_another_file_and_a_file_in_use_are_refused(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train_command(tmp_path / "a", "--train.replay_routing", str(tmp_path / "none")) == 2
    assert "no file" in capsys.readouterr().err
    (tmp_path / "text").write_text("some words, no header")
    assert train_command(tmp_path / "b", "--train.replay_routing", str(tmp_path / "text")) == 2
    assert "is no safetensors file" in " ".join(capsys.readouterr().err.split())
    assert train_command(tmp_path / "c", "--train.record_routing", str(tmp_path / "text")) == 2
    assert "holds something else" in " ".join(capsys.readouterr().err.split())
    both = ["--train.record_routing", str(recorded), "--train.replay_routing", str(recorded)]
    assert train_command(tmp_path / "d", *both) == 2
    assert "same file" in " ".join(capsys.readouterr().err.split())

"""Runs that cannot fit a machine are refused before anything is allocated; runs that fit are never refused."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

from moefold.config.run import Config
from moefold.layout.axes import single_rank_world
from moefold.layout.environment import Rendezvous
from moefold.plan.machine.this_machine import MachineMemory
from moefold.plan.memory.fit_proposals import describe_shortage, propose_changes
from moefold.plan.memory.machine_fit import MachineFit, certain_bytes, ranks_of_machine
from moefold.plan.memory.run_setting import GIB
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus
from moefold.train.step import train_step

HUGE = ["train", "deepseek-v3", "--train.device", "cpu", "--train.steps", "10", "--train.global_batch", "8"]


def command(*argv: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "moefold", *argv], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def fit(recipe: str, *words: str, host: float = 24.0, gpus: tuple[float, ...] = (), ranks: int = 1) -> MachineFit:
    place = ranks_of_machine(Rendezvous(size=ranks, local_size=ranks))
    gpu_bytes = tuple(int(size * GIB) for size in gpus)
    return MachineFit(resolve_recipe(recipe, words, ranks), place, MachineMemory(gpu_bytes, int(host * GIB)))


def test_a_model_that_cannot_fit_is_refused_at_once_with_what_is_there_and_what_would_fit(tmp_path: Path):
    begun = time.monotonic()
    code, output = command(*HUGE, "--out", str(tmp_path / "run"))
    assert code == 2, output
    assert time.monotonic() - begun < 30
    assert re.search(r"1 rank on cpu in fp32: [\d,.]+ GiB of host memory at least", output)
    assert re.search(r"there are [\d,.]+ GiB\nwhat would fit: ", output)
    assert "--force" in output
    assert not (tmp_path / "run").exists()


def test_force_goes_on(tmp_path: Path):
    """To the text, which is read before the model is made."""
    argv = [*HUGE, "--data.files", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run"), "--force"]
    code, output = command(*argv)
    assert code == 2
    assert "does not fit" not in output
    assert "no file" in output


@pytest.mark.parametrize("ranks", [1, 4, 16])
@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("tiny")])
def test_presets_for_a_cpu_fit_a_small_machine(name: str, ranks: int):
    batch = ["--train.global_batch", str(8 * ranks)]
    assert fit(name, *batch, host=4.0, ranks=ranks).first_shortage() is None


def test_ranks_of_one_machine_share_its_memory():
    words = ["--model.hidden", "1024", "--model.moe.ffn", "4096", "--train.global_batch", "64"]
    one = fit("tiny", *words, host=15.0)
    eight = fit("tiny", *words, host=15.0, ranks=8)
    assert one.first_shortage() is None
    shortage = eight.first_shortage()
    assert shortage is not None
    assert shortage.ranks == 8
    spread = fit("tiny", *words, "--parallel.ep", "8", host=15.0, ranks=8)
    assert spread.first_shortage() is None, "experts that are spread are held once"


QWEN = ["--train.device", "cuda", "--parallel.ep", "8", "--train.precision", "bf16", "--optim.moments", "bf16"]


def test_gpus_hold_the_ranks_that_use_them_and_the_host_their_checkpoints():
    eight = fit("qwen3-30b-a3b", *QWEN, host=2000.0, gpus=(140.0,) * 8, ranks=8)
    assert eight.first_shortage() is None
    shared = fit("qwen3-30b-a3b", *QWEN, host=2000.0, gpus=(140.0,) * 2, ranks=8)
    shortage = shared.first_shortage()
    assert shortage is not None
    assert (shortage.memory, shortage.ranks) == ("GPU 0", 4)
    no_room = fit("qwen3-30b-a3b", *QWEN, host=100.0, gpus=(140.0,) * 8, ranks=8).first_shortage()
    assert no_room is not None
    assert no_room.memory == "host memory"


@pytest.mark.parametrize(("size", "copies"), [(2, 1 + 2), (4, 1 + 2 * 2)])
def test_checkpoints_in_memory_count_with_both_generations_and_those_of_a_peer(size: int, copies: int):
    machine = MachineMemory((), GIB)
    place = ranks_of_machine(Rendezvous(size=size, local_size=2))
    on_disk = MachineFit(resolve_recipe("tiny", [], size), place, machine)
    words = ["--checkpoint.every", "0", "--checkpoint.memory_every", "2"]
    in_memory = MachineFit(resolve_recipe("tiny", words, size), place, machine)
    ranks = on_disk.by_pipeline_rank
    assert in_memory.checkpoint_bytes(ranks) == copies * on_disk.checkpoint_bytes(ranks)


def test_the_ranks_of_another_machine_of_a_pipeline_are_counted_for_that_machine():
    words = ["--parallel.pp", "2", "--train.global_batch", "16", "--model.vocab", "200000", "--data.tokenizer", "byte"]
    config = resolve_recipe("tiny", words, 2)
    last = MachineFit(config, ranks_of_machine(Rendezvous(1, 2)), MachineMemory((), GIB))
    assert last.ranks.first == 1
    first_rank, last_rank = last.by_pipeline_rank
    assert first_rank.total != last_rank.total


@pytest.mark.parametrize(
    ("recipe", "words", "host"),
    [
        ("olmoe-1b-7b", ["--train.device", "cpu"], 24.0),
        ("tiny", ["--data.seq_len", "65536", "--train.micro_batch", "8"], 24.0),
        ("mixtral-8x7b", ["--train.device", "cpu"], 300.0),
    ],
)
def test_what_is_proposed_is_legal_and_fits(recipe: str, words: list[str], host: float):
    case = fit(recipe, *words, host=host)
    shortage = case.first_shortage()
    assert shortage is not None
    proposed = describe_shortage(case, shortage)[1].removeprefix("what would fit: ").split("; ")
    assert proposed
    for text in proposed:
        keys = re.findall(r"--\S+ \S+", text)
        more = [word for key in keys for word in key.split()]
        machines = re.match(r"(\d+) times as many machines", text)
        ranks = int(machines[1]) if machines else 1
        if machines:
            more += ["--train.global_batch", str(8 * ranks)]
        config = resolve_recipe(recipe, [*words, *more], ranks)
        place = ranks_of_machine(Rendezvous(size=ranks, local_size=1))
        assert MachineFit(config, place, case.machine).fits_everywhere(), text


def test_regions_are_proposed_by_the_names_of_the_trainer_and_as_its_rules_allow():
    """Selective rematerialisation is refused where weights are gathered."""
    words = ["--train.device", "cuda", "--train.global_batch", "128", "--train.micro_batch", "16", "--parallel.ep", "8"]
    for mode, regions in (("zero1", "sar"), ("zero3", "norm,experts")):
        case = fit("olmoe-1b-7b", *words, "--shard.mode", mode, gpus=(170.0,) * 8, host=2000.0, ranks=8)
        proposed = propose_changes(case)
        assert f"--memory.recompute {regions}" in proposed, proposed


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny", "deepseek-v3-tiny", "gpt-oss-20b-tiny"])
def test_a_step_on_a_cpu_takes_at_least_the_memory_that_a_refusal_would_count(recipe: str):
    words = ["--model.hidden", "512", "--data.seq_len", "512", "--train.global_batch", "4", "--train.micro_batch", "2"]
    measured = peak_of_tensors(resolve_recipe(recipe, words))
    counted = certain_bytes(fit(recipe, *words).by_pipeline_rank)
    assert 0.85 * measured < counted <= measured


LARGE = [
    *("--train.device", "cpu", "--train.precision", "fp32", "--train.micro_batch", "4", "--train.global_batch", "8"),
    *("--data.tokenizer", "byte", "--model.moe.shared_ffn", "128", "--model.moe.dense_layers", "1"),
]


@pytest.fixture(scope="module")
def share_counted_when_all_is_kept() -> float:
    return share_counted(LARGE)


def share_counted(words: list[str]) -> float:
    return certain_bytes(fit("tiny", *words).by_pipeline_rank) / peak_of_tensors(resolve_recipe("tiny", words))


@pytest.mark.parametrize("regions", ["norm,activation", "experts", "moe", "layer", "layer@0-1,norm"])
def test_a_recomputing_run_takes_the_memory_planned_as_one_that_keeps_all(
    regions: str, share_counted_when_all_is_kept: float
):
    """A plan leaves some temporaries of a CPU run out: the same with every policy."""
    share = share_counted([*LARGE, "--memory.recompute", regions])
    assert share == pytest.approx(share_counted_when_all_is_kept, rel=0.03)


def peak_of_tensors(config: Config) -> int:
    """Bytes that tensors hold at most in two steps, by torch's allocator: a process's resident set does not repeat.
    Drawing the first weights may need more."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run = assemble_run(config, single_rank_world("cpu"), Path("unused"), corpus=random_corpus(config))
        with record_function("two steps"):
            for _ in range(2):
                train_step(run, run.loader.next_batch())
    recorded: Any = profiler.profiler
    events = recorded.kineto_results.events()
    begun = min(event.start_ns() for event in events if event.name() == "two steps")
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = accumulate(size for _, size in changes)
    return max(size for size, (time, _) in zip(held, changes, strict=True) if time >= begun)


def test_the_copies_of_weights_of_an_fp8_recipe_count():
    words = ("--train.device", "cpu", "--train.precision", "bf16", "--model.hidden", "1024", "--model.moe.ffn", "1024")
    (plain,) = fit("tiny", *words).by_pipeline_rank
    (block,) = fit("tiny", *words, "--precision.recipe", "fp8_block").by_pipeline_rank
    assert plain.weights == 2 * plain.parameters
    assert 1.9 < block.weights / plain.weights < 2  # embedding, head and router have no copies
    assert block.activations < plain.activations
    (hybrid,) = fit("tiny", *words, "--precision.recipe", "fp8_hybrid").by_pipeline_rank
    assert hybrid.weights == block.weights
    stored = ("--precision.recipe", "fp8_block", "--precision.storage", "fp8")
    (alone,) = fit("tiny", *words, *stored).by_pipeline_rank
    assert 1 < alone.weights / plain.weights < 1.01  # scales
    assert alone.main == block.main
    (split,) = fit("tiny", *words, *stored, "--optim.main", "split").by_pipeline_rank
    assert 0.9 < split.main / block.main < 1  # fp32 but for embedding, head, router and norms
    assert hybrid.activations > block.activations

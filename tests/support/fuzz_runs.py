"""Random settings of whole runs on CPU ranks: each is refused by a rule, or keeps what every run promises.

    python -m tests.support.fuzz_runs parity --cases 200 --seed 1      a layout has the numbers of one rank
    python -m tests.support.fuzz_runs resume --cases 50 --seed 1       a run that was resumed ends as one that was not
    python -m tests.support.fuzz_runs explain --cases 500 --seed 1     what is legal can be explained and planned

Printed: every case that failed, with its words, and how many were refused. The exit code is the number of failed cases.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from moefold.checkpoint.format.retention import step_folder_name
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS
from moefold.train.parity import (
    ROUTINGS,
    TOLERANCE,
    RankTrace,
    comparable_config,
    first_mismatch,
    played_node_size,
    single_rank_config,
    trace_run,
)
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, corpus, numbers

STEPS = 2
DOES_NOT_FIT = 3  # exit code of a plan
RESUMED = [
    *("--model.attention.kv_heads", "2", "--train.device", "cpu", "--train.sample_tokens", "0", "--train.steps", "4"),
    *("--checkpoint.every", "2", "--checkpoint.keep", "9", "--train.validate_every", "100"),
]
FORGETFUL = "--parallel.clone_decision=previous"  # loads of the step before, which no checkpoint has
MODELS = [
    "tiny", "tiny", "deepseek-v3-tiny", "gpt-oss-20b-tiny", "qwen3-30b-a3b-tiny", "olmoe-1b-7b-tiny",
    "mixtral-8x22b-tiny", "deepseek-v2-lite-tiny",
]  # fmt: skip
MODEL = """
model.mtp=1
model.mtp=2

model.tied_head=true

model.attention.window=3
model.attention.window=5 model.attention.full_every=2

model.attention.sinks=true

model.attention.qk_norm=head
model.attention.qk_norm=full

model.attention.qkv_bias=true
model.attention.out_bias=true

model.moe.shared_ffn=32
model.moe.shared_ffn=32 model.moe.shared_gate=true

model.moe.latent=16

model.moe.activation=geglu
model.moe.activation=relu2
model.moe.activation=clamped_swiglu

model.moe.biases=true

model.moe.dense_layers=1
model.moe.every=2

model.moe.gate=output

model.moe.router.score=sigmoid
model.moe.router.score=sigmoid model.moe.router.groups=2

model.moe.router.kind=expert_choice model.moe.router.looks_ahead=true
model.moe.router.kind=sinkhorn model.moe.router.looks_ahead=true

model.moe.router.force_balance=true

model.moe.capacity.factor=1.0
model.moe.capacity.factor=1.25 model.moe.capacity.drop=position
model.moe.capacity.factor=1 model.moe.capacity.pad=true

model.moe.capacity.pad_rows=4

model.moe.balance.bias_rate=0.01
model.moe.balance.bias_rate=0.01 model.moe.balance.bias_step=proportional

model.moe.balance.aux_loss=0.01
model.moe.balance.aux_loss=0.01 model.moe.balance.aux_over=global_batch
model.moe.balance.aux_loss=0.01 model.moe.balance.aux_over=microbatch
model.moe.balance.aux_loss=0.01 model.moe.balance.aux_over=previous_batch

model.moe.balance.device_loss=0.01 model.moe.balance.devices=2

model.moe.balance.z_loss=0.001
"""
LAYOUT = """
parallel.tp=2
parallel.tp=4

parallel.cp=2
parallel.cp=2 parallel.context=ring
parallel.cp=2 parallel.context=all_to_all
parallel.cp=2 parallel.context=all_gather
parallel.cp=4 parallel.context=hierarchical
parallel.context_sizes=dynamic

parallel.pp=2
parallel.pp=2 pipeline.vpp=2 pipeline.schedule=interleaved
parallel.pp=2 pipeline.schedule=zb_h1
parallel.pp=2 pipeline.vpp=2 pipeline.schedule=zb_v
parallel.pp=2 pipeline.vpp=2 pipeline.schedule=dualpipe_v
parallel.pp=2 pipeline.schedule=gpipe

parallel.ep=2
parallel.ep=4
parallel.ep=2

parallel.etp=2

parallel.ep=2 parallel.dispatcher=all_gather
parallel.ep=2 parallel.dispatcher=all_to_all
parallel.ep=2 parallel.dispatcher=dedup
parallel.ep=4 parallel.dispatcher=hierarchical
parallel.ep=2 parallel.dispatcher=symmetric
parallel.ep=4 parallel.dispatcher=symmetric

parallel.ep=2 parallel.dispatcher=symmetric parallel.room=1.5

parallel.ep=2 parallel.dispatcher=symmetric parallel.tiles=experts
parallel.ep=4 parallel.dispatcher=symmetric parallel.tiles=experts

parallel.ep=2 parallel.row_chunks=2

parallel.tp=2 parallel.tiles=projections
parallel.tp=2 parallel.ep=2 parallel.dispatcher=symmetric parallel.tiles=experts,projections
parallel.cp=2 parallel.context=all_to_all parallel.tiles=heads

parallel.ep=2 parallel.dispatcher=dedup parallel.clone_slots=2
parallel.ep=2 parallel.dispatcher=dedup parallel.clone_slots=1 parallel.clone_decision=previous

shard.mode=zero3
shard.mode=zero3 shard.replicas=2
shard.replicas=2
shard.sync=hierarchical

pipeline.pair=true
pipeline.pair=true pipeline.pairs=alike
pipeline.pair=true pipeline.fill=false

pipeline.defer=true

memory.recompute=layer
memory.recompute=experts
memory.recompute=core
memory.recompute=activation,norm
memory.recompute=moe
memory.recompute=dispatch,up
memory.recompute=swap,shared,mlp

memory.offload=core,up
memory.offload=experts
memory.offload=out,norm
memory.offload=layer

memory.expert_chunk=128

memory.stash=stack
memory.stash=pages

memory.tape=true

kernels.invariant=true
kernels.repeatable=true

data.attend=document
data.attend=document data.packing=first_fit
data.attend=document data.packing=best_fit
data.attend=document data.packing=best_fit data.batch_of=samples
"""
UPDATE = """
optim.rule=muon
optim.rule=muon optim.muon.newton_schulz=polar_express
optim.rule=muon optim.muon.heads=each

optim.when=backward optim.clip_by=previous
optim.when=backward optim.clip_by=unit

optim.states=host
optim.update=host
optim.states=host optim.states_window_gib=0.001

optim.qk_clip=0.5

optim.decay=wsd
optim.decay=constant

lora.rank=4
lora.rank=4 lora.dropout=0.1
lora.rank=4 lora.dora=true
lora.rank=4 lora.base=nf4
lora.rank=4 lora.base=fp8
"""
TYPES = """
optim.main=split
optim.main=bf16
optim.main=none
optim.main=int8
optim.main=fp8
optim.main=fp16

optim.moments=bf16
optim.moments=int8
optim.moments=fp8
optim.moments=fp16 optim.second_moment=fp32

optim.rounding=stochastic

optim.gradients=bf16
optim.gradients=int8
optim.gradients=fp8

optim.gradient_reduce=bf16
optim.gradient_reduce=fp8

precision.recipe=fp8_block
precision.recipe=fp8_tensor
precision.recipe=fp8_row
precision.recipe=fp8_hybrid
precision.recipe=mxfp8
precision.recipe=nvfp4

precision.scaling=delayed
precision.scaling=delayed precision.margin=1

precision.storage=fp8

precision.dispatch=fp8
precision.combine_gradient=e5m2
precision.tp_sums=fp8
precision.tp_sum_gradients=fp8

precision.exclude_first=1

precision.power_of_two_scales=true
precision.gradient_format=e5m2
precision.accumulate=fast

train.precision=bf16
train.precision=bf16
train.precision=fp64

train.skip_spikes=true

observe.fp8_every=2

observe.compare_every=1

checkpoint.memory_every=1

model.moe.router.jitter=0.01
"""


def alternatives(text: str) -> list[list[list[str]]]:
    """Of each paragraph a case has one line at most; its settings are words of a command."""
    paragraphs = text.strip().split("\n\n")
    return [[line.split() for line in paragraph.splitlines()] for paragraph in paragraphs]


def draw(chance: random.Random, text: str, share: float) -> list[str]:
    words: list[str] = []
    for lines in alternatives(text):
        if chance.random() < share:
            words += [f"--{setting}" for setting in chance.choice(lines)]
    return words


def draw_parity(chance: random.Random) -> tuple[str, list[str], int]:
    words = draw(chance, MODEL, 0.1) + draw(chance, LAYOUT, 0.18) + draw(chance, UPDATE, 0.12)
    return chance.choice(MODELS), unique(words), chance.choice([2, 4, 4, 8])


def draw_resume(chance: random.Random) -> tuple[str, list[str], int]:
    words = draw(chance, MODEL, 0.06) + draw(chance, LAYOUT, 0.08) + draw(chance, UPDATE, 0.12)
    words += draw(chance, TYPES, 0.12)
    words = [word for word in words if word != FORGETFUL]
    return chance.choice(["tiny", "tiny", "deepseek-v3-tiny"]), unique(words), chance.choice([1, 2, 2, 4])


def draw_explain(chance: random.Random) -> tuple[str, list[str], int]:
    words = [word for text in (MODEL, LAYOUT, UPDATE, TYPES) for word in draw(chance, text, 0.12)]
    ranks = 2 ** chance.randrange(10)
    words.append(f"--train.global_batch={8 * ranks}")
    return chance.choice(list(PRESETS)), unique(words), ranks


def unique(words: list[str]) -> list[str]:
    """The first of each key."""
    found: dict[str, str] = {}
    for word in words:
        found.setdefault(word.partition("=")[0], word)
    return list(found.values())


def trace_rank(world: World, config: Config, routing: str) -> RankTrace:
    node_size = played_node_size(config, world.size)
    here = create_world(world.rank, world.size, world.device, config.parallel, node_size=node_size, shard=config.shard)
    return trace_run(config, here, STEPS, routing)


def until_legal(words: list[str], read: Callable[[list[str]], Config], chance: random.Random) -> Config:
    """The configuration of the words; while it is refused, one of those that the refusal names is left out."""
    while True:
        try:
            return read(words)
        except UserError as error:
            named = [word for word in words if word[2:].partition("=")[0] in str(error)]
            if not named:
                raise
            words.remove(chance.choice(named))


def judge_parity(recipe: str, words: list[str], ranks: int, chance: random.Random) -> str | None:
    def read(words: list[str]) -> Config:
        config = resolve_recipe(recipe, [*words, "--train.precision", "fp64"], None)
        return comparable_config(config, ranks)

    small = until_legal(words, read, chance)
    routing = chance.choice(ROUTINGS)
    expected = trace_run(single_rank_config(small), single_rank_world(), STEPS, routing)
    found = run_ranks(trace_rank, ranks, small, routing)
    difference = first_mismatch(expected, found, TOLERANCE["fp64"])
    return None if difference is None else f"{routing}: {difference}"


def judge_resume(recipe: str, words: list[str], ranks: int, chance: random.Random) -> str | None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = [*SMALL, *corpus(folder), *RESUMED]
        until_legal(words, lambda words: resolve_recipe(recipe, [*small, *words], ranks), chance)
        start = ["train", recipe, *small, *words, "--nproc", str(ranks)]
        whole, parts = folder / "whole", folder / "parts"
        done = run_to_end([*start, "--out", str(whole)])
        if done.returncode == 2:  # by a rule over what is known on a machine alone
            raise UserError(done.stderr)
        if wrong := complaint(done):
            return wrong
        shutil.copytree(whole, parts)
        shutil.rmtree(parts / "checkpoints" / step_folder_name(4))
        if wrong := complaint(run_to_end([*start, "--out", str(parts), "--resume", "auto"])):
            return f"resumed: {wrong}"
        if numbers(whole) != numbers(parts):
            return f"{numbers(whole)[-1]} and {numbers(parts)[-1]}"
        return complaint(run_to_end(["ckpt", "diff", str(whole), str(parts)]))


def judge_explain(recipe: str, words: list[str], ranks: int, chance: random.Random) -> str | None:
    until_legal(words, lambda words: resolve_recipe(recipe, words, ranks), chance)
    commands = (["explain", recipe, "--nproc", str(ranks)], ["plan", recipe, "--gpus", str(ranks), "--gpu", "h100"])
    for command in commands:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = run_command_line([*command, *words])
        if code not in (0, 2, DOES_NOT_FIT):
            return f"{command[0]} ended with {code}: {said.getvalue()[-3000:]}"
    return None


def run_to_end(argv: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moefold", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def complaint(done: subprocess.CompletedProcess[str]) -> str | None:
    """What a command says that did not end well."""
    said = done.stdout + done.stderr
    return f"ended with {done.returncode}: {said[-3000:]}" if done.returncode else None


Draw = Callable[[random.Random], tuple[str, list[str], int]]
KINDS: dict[str, tuple[Draw, Callable[[str, list[str], int, random.Random], str | None]]] = {
    "parity": (draw_parity, judge_parity),
    "resume": (draw_resume, judge_resume),
    "explain": (draw_explain, judge_explain),
}


REFUSED = "refused"


def try_case(kind: str, seed: int, number: int) -> tuple[str, str | None]:
    """What is drawn, in words, and what is wrong with it."""
    chance = random.Random(f"{seed} {number}")
    pick, judge = KINDS[kind]
    recipe, words, ranks = pick(chance)
    begun = time.monotonic()
    try:
        wrong = judge(recipe, words, ranks, chance)
    except UserError:
        return REFUSED, None
    except Exception:
        wrong = traceback.format_exc()[-3000:]
    seconds = time.monotonic() - begun
    return f"{number} ({seconds:.0f} s) {recipe} on {ranks}: {' '.join(words)}", wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    refused = failed = 0
    for number in range(options.cases):
        what, wrong = try_case(options.kind, options.seed, number)
        refused += what == REFUSED
        failed += wrong is not None
        if what != REFUSED:
            print(f"{'FAILED' if wrong else 'ok'} {what}\n{wrong or ''}".rstrip(), flush=True)
    print(f"{options.cases} drawn, {refused} refused, {failed} failed")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())

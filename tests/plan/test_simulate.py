"""A step on the clock: parts add up, long pipelines repeat themselves, weaving hides travel."""

from dataclasses import replace

import pytest

from moefold.anatomy.stages import program_for
from moefold.plan.choices import Choices
from moefold.plan.hardware import find_gpu
from moefold.plan.memory import setting_of
from moefold.plan.simulate import StepTime, enough, time_step
from moefold.presets.recipe import resolve
from moefold.schedule.simulate import simulate

H100 = find_gpu("h100")


def step(*words: str, world: int = 64, model: str = "qwen3-235b-a22b", choices: Choices | None = None) -> StepTime:
    return time_step(setting_of(resolve(model, words, world), world, choices or Choices()), H100)


LAYOUTS = [
    ("--parallel.pp=4", "--parallel.ep=16", "--train.global_batch=512"),
    ("--parallel.pp=4", "--pipeline.vpp=4", "--parallel.ep=16", "--train.global_batch=512"),
    ("--parallel.pp=8", "--pipeline.vpp=2", "--parallel.ep=8", "--pipeline.pair=true", "--train.global_batch=408"),
    ("--parallel.pp=4", "--pipeline.schedule=zb_h1", "--parallel.ep=8", "--train.global_batch=512"),
    ("--parallel.tp=4", "--parallel.ep=64", "--pipeline.pair=true", "--train.global_batch=512"),
]


@pytest.mark.parametrize("words", LAYOUTS)
def test_walls_add_up_to_the_step(words: tuple[str, ...]):
    found = step(*words)
    assert sum(found.walls.values()) == pytest.approx(found.seconds)
    assert all(seconds >= -1e-9 * found.seconds for seconds in found.walls.values())
    assert found.seconds == pytest.approx(found.clocked.seconds + found.exchange + found.optimizer)


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_long_pipeline_is_its_beginning_repeated(words: tuple[str, ...]):
    config = resolve("qwen3-235b-a22b", words, 64)
    setting = setting_of(config, 64, Choices())
    found = time_step(setting, H100)
    whole = simulate(program_for(config, setting.microbatches), found.costs).makespan
    assert found.clocked.seconds == pytest.approx(whole, rel=5e-3)


def test_few_microbatches_are_all_shown():
    assert enough(7, 8) == 7
    assert enough(128, 4) == 16
    assert enough(129, 4) == 17


def test_weaving_hides_travel_over_a_slow_network():
    words = ("--parallel.pp=4", "--parallel.ep=16", "--train.global_batch=1024")
    apart, woven = step(*words), step(*words, "--pipeline.pair=true")
    assert woven.seconds < apart.seconds
    assert woven.walls["communication"] < 0.7 * apart.walls["communication"]


def test_more_stages_a_rank_make_the_bubble_smaller():
    one, four = (
        step("--parallel.pp=8", f"--pipeline.vpp={vpp}", "--parallel.ep=8", "--train.global_batch=128")
        for vpp in (1, 4)
    )
    assert four.walls["bubble"] < 0.5 * one.walls["bubble"]


def test_the_exchange_shows_when_there_is_little_to_hide_it():
    much, little = (step("--parallel.ep=8", f"--train.global_batch={n}", world=64) for n in (4096, 64))
    assert little.exchange / little.seconds > much.exchange / much.seconds


def test_state_on_the_host_makes_the_optimizer_slow():
    here, there = (
        step("--parallel.ep=8", "--train.global_batch=64", choices=Choices(states_on_host=h)) for h in (False, True)
    )
    assert there.optimizer > 5 * here.optimizer


def test_a_faster_network_is_never_slower():
    config = resolve("deepseek-v3", ["--parallel.ep=64", "--train.global_batch=512"], 64)
    slow, fast = (
        time_step(setting_of(config, 64, Choices()), replace(H100, network=rate)).seconds for rate in (25e9, 100e9)
    )
    assert fast < slow

"""A step on the clock: parts add up, long pipelines repeat themselves, weaving hides travel."""

from dataclasses import replace

import pytest

from moefold.anatomy.stage_contents import pipeline_program
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.peak_memory import build_run_setting
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import StepTime, simulated_microbatches, time_training_step
from moefold.presets.recipe import resolve_recipe
from moefold.schedule.simulate_program import simulate_program

H100 = find_gpu_by_name("h100")


def step(*words: str, world: int = 64, model: str = "qwen3-235b-a22b", choices: PlanChoices | None = None) -> StepTime:
    return time_training_step(
        build_run_setting(resolve_recipe(model, words, world), world, choices or PlanChoices()), H100
    )


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
    assert found.seconds == pytest.approx(found.pipeline_time.seconds + found.exchange + found.optimizer)


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_long_pipeline_is_its_beginning_repeated(words: tuple[str, ...]):
    config = resolve_recipe("qwen3-235b-a22b", words, 64)
    setting = build_run_setting(config, 64, PlanChoices())
    found = time_training_step(setting, H100)
    whole = simulate_program(pipeline_program(config, setting.microbatches), found.costs).makespan
    assert found.pipeline_time.seconds == pytest.approx(whole, rel=5e-3)


def test_the_busiest_rank_determines_the_time_once_its_slack_is_used():
    """GPT-OSS on 4 x 2 stages: rank 1 has the most work, but needs 24 microbatches to be the last; once 0.4 % too fast,
    below the lower bound of the search."""
    words = ("--parallel.pp=4", "--pipeline.vpp=2", "--parallel.ep=8", "--train.global_batch=256")
    config = resolve_recipe("gpt-oss-120b", [*words, "--train.micro_batch=1"], 32)
    setting = build_run_setting(config, 32, PlanChoices())
    found = time_training_step(setting, H100)
    whole = simulate_program(pipeline_program(config, setting.microbatches), found.costs).makespan
    assert found.pipeline_time.seconds == pytest.approx(whole, rel=1e-9)


def test_few_microbatches_are_all_shown():
    assert simulated_microbatches(7, 8) == 7
    assert simulated_microbatches(128, 4) == 16
    assert simulated_microbatches(129, 4) == 17


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
        step("--parallel.ep=8", "--train.global_batch=64", choices=PlanChoices(states_on_host=h)) for h in (False, True)
    )
    assert there.optimizer > 5 * here.optimizer


def test_a_faster_network_is_never_slower():
    config = resolve_recipe("deepseek-v3", ["--parallel.ep=64", "--train.global_batch=512"], 64)
    slow, fast = (
        time_training_step(build_run_setting(config, 64, PlanChoices()), replace(H100, network=rate)).seconds
        for rate in (25e9, 100e9)
    )
    assert fast < slow

"""Links are measured between the ranks of a run, the same on every rank, and `auto` chooses a dispatcher by them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moefold.comm import collectives
from moefold.config.run import Config, ParallelConfig
from moefold.dispatch.build import choose_dispatcher
from moefold.dispatch.measure_links import TRIAL_BYTES, fit_link, measure_links
from moefold.layout.axes import World, create_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.loop import introduction_lines
from moefold.train.parity import random_corpus, shrink_config
from tests.support.machine_speed import least_seconds
from tests.support.ranks import run_ranks


class Slowness(NamedTuple):
    """Seconds that an all-to-all over an axis takes beside its own."""

    axis: str
    latency: float
    per_byte: float


SLOW_NETWORK = Slowness("ep nodes", 0.0, 1 / 10e6)  # 10 MB/s between nodes
LATE_INSIDE = Slowness("ep inside", 0.05, 0.0)


@contextmanager
def slowed(slowness: Slowness) -> Iterator[None]:
    quick = collectives.all_to_all_no_grad

    def slow_all_to_all(x: Any, send: Any, receive: Any, axis: Any, what: str = "rows") -> Any:
        if axis.name == slowness.axis:
            sent = x.nbytes - x.nbytes // axis.size
            time.sleep(slowness.latency + sent * slowness.per_byte)
        return quick(x, send, receive, axis, what)

    collectives.all_to_all_no_grad = slow_all_to_all
    try:
        yield
    finally:
        collectives.all_to_all_no_grad = quick


def config_on(ranks: int) -> Config:
    """A model whose tokens choose many experts, on expert-parallel ranks."""
    small = shrink_config(replace(PRESETS["tiny"](), parallel=ParallelConfig(ep=ranks)), ranks)
    experts = replace(small.model.moe, experts=16, top_k=8)
    model = replace(small.model, hidden=256, moe=experts)
    train = replace(small.train, precision="fp32", global_batch=ranks, micro_batch=1)
    data = replace(small.data, seq_len=512)
    return replace(small, model=model, train=train, data=data)


def on_two_nodes(world: World) -> World:
    parallel = ParallelConfig(ep=world.size)
    return create_world(world.rank, world.size, world.device, parallel, node_size=world.size // 2)


def links_and_choice(world: World, slowness: Slowness) -> Any:
    world = on_two_nodes(world)
    with slowed(slowness):
        links = measure_links(world)
        chosen = choose_dispatcher(config_on(world.size), world)
    return links, chosen


def test_a_slow_network_is_measured_and_gets_one_copy_of_a_token_per_node():
    answers = run_ranks(links_and_choice, 4, SLOW_NETWORK, ep=4)
    links, choice = answers[0]
    assert set(answers) == {(links, choice)}, "every rank has the same figures and the same choice"
    assert links.measured
    assert 3e6 < links.network < 20e6
    assert links.inside > links.network
    assert choice[0] == "hierarchical"


def test_a_long_latency_inside_nodes_is_measured_and_spares_the_second_hop():
    answers = run_ranks(links_and_choice, 4, LATE_INSIDE, ep=4)
    links, choice = answers[0]
    assert set(answers) == {(links, choice)}
    assert 0.04 < links.inside_latency < 1
    assert choice[0] == "dedup"


def assembled(world: World, slowness: Slowness) -> tuple[str, str]:
    world = on_two_nodes(world)
    config = config_on(world.size)
    with slowed(slowness):
        run = assemble_run(config, world, Path("."), random_corpus(config))
    return run.config.parallel.dispatcher, introduction_lines(run)[-1]


def test_a_run_names_its_dispatcher_in_its_configuration_and_its_figures_at_the_start():
    answers = run_ranks(assembled, 4, SLOW_NETWORK, ep=4)
    name, line = answers[0]
    assert set(answers) == {(name, line)}
    assert name == "hierarchical"
    assert line.startswith("dispatcher: hierarchical (least predicted time")
    assert "links measured: " in line
    assert "us inside a node; " in line
    assert line.endswith("us between nodes)")


def seconds_to_measure(world: World) -> float:
    begun = time.perf_counter()
    measure_links(world)
    return time.perf_counter() - begun


@pytest.mark.alone
def test_links_of_one_node_are_measured_in_less_than_a_second():
    """A second on a machine of usual speed."""
    assert least_seconds(lambda: max(run_ranks(seconds_to_measure, 2, ep=2)), 1.0) < 1


def test_two_sizes_give_bandwidth_and_latency():
    sizes = list(TRIAL_BYTES["cuda"])
    found = fit_link(sizes, [1e-4 + size / 2e11 for size in sizes])
    assert found.bandwidth == pytest.approx(2e11)
    assert found.latency == pytest.approx(1e-4)
    noisy = fit_link(sizes, [2e-4, 1e-4])
    assert 0 < noisy.bandwidth < float("inf")
    assert 0 <= noisy.latency <= 2e-4

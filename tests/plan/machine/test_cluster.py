"""Seconds of sums and gathers over replicas: the bytes of each level by hand, over the bandwidth of its links."""

import pytest

from moefold.plan.machine.cluster import COLLECTIVE_LATENCY, Cluster
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.memory.run_setting import RunSetting
from moefold.plan.time.simulate_step import time_training_step
from tests.plan.time.test_step_times import setting

GPU = find_gpu_by_name("h100")  # nodes of 8
WORLD = 32
CLUSTER = Cluster(GPU, WORLD)
DENSE = {("dense", ()): 1e9}
BYTES = 4e9  # in fp32


def on_four_nodes(**keys: object) -> RunSetting:
    return setting(world=WORLD, train__global_batch=WORLD, parallel__ep=8, **keys)


def dense_seconds(s: RunSetting) -> float:
    return CLUSTER.exchange_seconds(DENSE, s, element=4)


def test_one_level_is_a_ring_through_all_cards_of_a_node():
    sent = BYTES * 31 / 32
    assert dense_seconds(on_four_nodes()) == pytest.approx(COLLECTIVE_LATENCY + sent / CLUSTER.nvlink_bandwidth)
    assert 8 * GPU.network > CLUSTER.nvlink_bandwidth, "or cards would be the narrow place"


def test_two_levels_take_as_long_as_the_slower_one():
    inside = BYTES * 7 / 8 / CLUSTER.nvlink_bandwidth
    across = BYTES / 8 * 3 / 4 / GPU.network
    assert dense_seconds(on_four_nodes(shard__sync="hierarchical")) == pytest.approx(
        2 * COLLECTIVE_LATENCY + max(inside, across)
    )


def test_experts_with_one_replica_in_a_node_have_one_level():
    experts = {("expert", ()): 1e9}
    one, two = (
        CLUSTER.exchange_seconds(experts, on_four_nodes(shard__sync=sync), 4) for sync in ("flat", "hierarchical")
    )
    assert one == two > 0


def test_copies_of_shares_are_summed_over_the_ranks_that_hold_the_same_share():
    s = on_four_nodes(shard__replicas=4)
    share = BYTES / 8  # a copy fills a node
    sent = 2 * share * 3 / 4
    assert CLUSTER.copies_seconds(DENSE, s, 4) == pytest.approx(COLLECTIVE_LATENCY + sent / GPU.network)
    assert CLUSTER.copies_seconds(DENSE, on_four_nodes(), 4) == 0.0


@pytest.mark.parametrize("mode", ["zero1", "zero3"])
def test_a_step_pays_for_its_copies(mode: str):
    s = on_four_nodes(shard__replicas=4, shard__mode=mode)
    step = time_training_step(s, GPU)
    counts = [s.count_piece(piece, layer).parameters for piece, layer in pieces_of(s)]
    copies = sum(CLUSTER.copies_seconds(count, s, 4) for count in counts)
    assert step.exchange >= 0.9 * copies > 0


def pieces_of(s: RunSetting) -> list[tuple[str, int]]:
    layers = [("t", layer) for layer in range(s.config.model.layers)]
    return [("E", 0), *layers, ("L", 0)]

"""Known links: of the planner's GPU of the same name, of CPUs, and of an H100 where the GPU is not known."""

import pytest

from moefold.dispatch.catalog import CPU_LINKS, LinkSpeeds
from moefold.plan.machine.gpu import find_gpu_by_name
from moefold.plan.machine.known_links import known_links


@pytest.mark.parametrize(("driver", "name"), [("NVIDIA GB200", "gb200"), ("NVIDIA H20", "h20")])
def test_a_gpu_of_the_planner_has_its_links(driver: str, name: str):
    links = known_links("cuda", driver)
    gpu = find_gpu_by_name(name)
    assert (links.inside, links.network, links.source) == (gpu.inside, gpu.network, gpu.name)
    assert not links.measured


def test_another_gpu_has_those_of_an_h100_and_a_cpu_its_own():
    assert known_links("cuda", "NVIDIA GeForce GTX 1080") == LinkSpeeds()
    assert known_links("cpu", "") == CPU_LINKS

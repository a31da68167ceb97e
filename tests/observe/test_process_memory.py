"""The peak of memory rises with what a process has used, and never falls."""

import torch

from moefold.observe.process_memory import peak_memory_gib


def test_the_peak_covers_what_was_used_and_stays():
    cpu = torch.device("cpu")
    before = peak_memory_gib(cpu)
    held = torch.ones(2**28, dtype=torch.uint8)
    within = peak_memory_gib(cpu)
    assert within >= 0.25, "the tensor alone has a quarter of a GiB"
    assert within >= before > 0
    del held
    assert peak_memory_gib(cpu) >= within

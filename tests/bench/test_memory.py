"""`moefold bench memory`: the report where there is no GPU, its cases, and parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moefold.bench.memory import case_config, offload_cases, recompute_cases, share_beside_kernels
from moefold.cli.bench import run_command
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules
from moefold.observe.profile import UNASSIGNED, ProfiledKernel, StepProfile

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the full models would run")


@no_gpu
def test_rows_are_printed_as_they_are_measured_and_compared_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["memory", "--json", "--steps", "1", "--model", "olmoe-1b-7b", "--out", str(tmp_path / "memory.json")]
    assert run_command([*words, "--part", "offload", "longest", "--length", "128"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert json.loads((tmp_path / "memory.json").read_text()) == report
    plain, *offloading, longest = report["results"]
    assert len(printed.err.splitlines()) == 2 + len(offloading)
    assert report["bandwidth"] > 0
    assert plain["offloaded_gib"] == 0
    for row in offloading:
        assert row["kept_gib"] + row["offloaded_gib"] == pytest.approx(plain["kept_gib"], rel=0.05)
        assert row["times"] == row["step_ms"] / plain["step_ms"]
        assert 0 < row["hidden"] < 1
    sizes = [row["offloaded_gib"] for row in offloading]
    assert sizes == sorted(sizes)
    assert (longest["tokens"], longest["part"]) == (128, "longest")
    assert longest["planned_gib"] > 0


@pytest.mark.parametrize("case", [*recompute_cases(), *offload_cases("cuda")], ids=str)
def test_the_cases_of_a_gpu_are_legal(case: object):
    assert not broken_rules(ConfigOnRanks(case_config(case, "cuda"), 1))  # pyright: ignore[reportArgumentType]


def test_the_share_of_copies_beside_kernels_is_that_of_their_time():
    def kernel(name: str, start: float, end: float) -> ProfiledKernel:
        return ProfiledKernel(name, UNASSIGNED, "device", start, end, end - start, start)

    kernels = [kernel("gemm", 1, 2), kernel("gemm", 3, 6), kernel("norm", 5, 7)]
    copies = [kernel("Memcpy DtoH (Device -> Pinned)", 0, 4)]
    assert share_beside_kernels(StepProfile(0, 7, "cuda", kernels + copies)) == 0.5
    assert share_beside_kernels(StepProfile(0, 7, "cuda", kernels)) is None

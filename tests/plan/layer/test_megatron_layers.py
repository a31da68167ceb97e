"""What Megatron-Core keeps of one layer, against its published table."""

from __future__ import annotations

from dataclasses import replace

from moefold.plan.layer.layer_costs import count_piece
from moefold.plan.memory.run_setting import build_run_setting
from tests.plan.memory.test_peak_memory import DEEPSEEK, EVEN, with_gate


def test_the_saved_tensors_of_one_layer_are_the_published_ones():
    s = build_run_setting(with_gate(DEEPSEEK, "output"), 256, EVEN)
    steps = count_piece(DEEPSEEK.model, "t", 3, s.portion, EVEN).steps
    mib = {(t.step, t.name): t.bytes / 2**20 for step in steps for t in step.saved}
    assert mib == {
        ("attend", "stream"): 56,
        ("attend", "normed"): 56,
        ("attend", "query latent"): 12,
        ("attend", "key latent and rotary key"): 4.5,
        ("attend", "key latent"): 4,
        ("attend", "query latent normed"): 12,
        ("attend", "key latent normed"): 4,
        ("attend", "q k v"): 512,
        ("attend", "attended"): 128,
        ("attend", "log-sum-exp"): 2,
        ("route", "stream"): 56,
        ("route", "normed"): 56,
        ("route", "scores"): 4,
        ("route", "choice"): 1,
        ("shared", "normed, for shared experts"): 0,
        ("shared", "pre-activation"): 32,
        ("shared", "activated"): 16,
        ("experts", "rows"): 448,
        ("experts", "pre-activation"): 256,
        ("experts", "activated"): 128,
    }
    outside = replace(DEEPSEEK.model, moe=replace(DEEPSEEK.model.moe, gate="output"))
    layer = count_piece(outside, "t", 3, s.portion, EVEN)
    assert layer.kept / 2**20 == 2235.5
    assert {t.name: t.bytes / 2**20 for step in layer.steps for t in step.saved if step.name == "experts"}[
        "results"
    ] == 448

"""A profile puts every piece of work down to the step that asked for it, also in backward, and finds the gaps."""

from __future__ import annotations

import pytest
import torch

from moefold.observe.profile import ProfiledKernel, StepPhase, StepProfile, profile_device, profiler_mark

CPU = torch.device("cpu")


def profiled() -> StepProfile:
    """Two steps of other operations, their backward, and a phase."""
    a, b = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    with profile_device(CPU) as found:
        with profiler_mark("first", "forward"):
            x = a @ b
        with profiler_mark("second", "forward"):
            y = x.softmax(-1).sum()
        y.backward()
        with profiler_mark("update"):
            a.detach().sin_()
    return found()


def places_of(profile: StepProfile, name: str) -> set[StepPhase]:
    return {work.place for work in profile.kernels_run if work.name == name}


def test_forward_work_belongs_to_the_step_around_it_and_backward_work_to_the_step_that_made_its_node():
    profile = profiled()
    assert places_of(profile, "aten::mm") == {StepPhase("first", "forward"), StepPhase("first", "backward")}
    assert places_of(profile, "aten::_softmax") == {StepPhase("second", "forward")}
    assert places_of(profile, "aten::_softmax_backward_data") == {StepPhase("second", "backward")}
    assert places_of(profile, "aten::sin_") == {StepPhase("update")}


def test_gradients_that_are_complete_are_a_place_of_their_own():
    assert StepPhase("add up gradients", "backward") in profiled().seconds_by_phase()


def test_every_moment_counts_once():
    profile = profiled()
    assert sum(profile.seconds_by_phase().values()) == pytest.approx(sum(work.seconds for work in profile.kernels_run))
    assert sum(profile.seconds_by_phase().values()) <= profile.seconds * 1.001


def kernel(name: str, start: float, end: float, step: str = "attend", lane: str = "stream 7") -> ProfiledKernel:
    return ProfiledKernel(name, StepPhase(step, "forward"), lane, start, end, end - start, start - 0.5)


def test_a_device_is_idle_only_where_no_stream_works():
    works = [kernel("a", 0, 2), kernel("b", 1, 3, lane="stream 8"), kernel("c", 5, 6, "route"), kernel("d", 6.5, 7)]
    profile = StepProfile(0, 7, "cuda", works)
    assert profile.busy_seconds == pytest.approx(4.5)
    assert profile.launch_overhead == pytest.approx(2.5 / 7)
    assert [(gap.seconds, gap.before.name) for gap in profile.idle_gaps()] == [(2, "route"), (0.5, "attend")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "gemm"),
        ("expert_gemm", "gemm"),
        ("aten::_grouped_mm", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("dq_kernel", "attention"),
        ("dkdv_kernel", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_the_kind_of_work_is_told_by_its_name(name: str, kind: str):
    assert kernel(name, 0, 1).kind == kind


def test_a_trace_has_every_work_with_its_step():
    events = StepProfile(0, 1, "cuda", [kernel("a", 0, 1)], [("attend", 0, 1)]).trace_events(3)
    assert [(e.rank, e.lane, e.name) for e in events] == [(3, "steps", "attend"), (3, "stream 7", "a")]
    assert events[1].details["step"] == "attend"

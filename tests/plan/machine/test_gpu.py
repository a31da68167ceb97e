"""GPUs by name and by file: the shipped ones are whole, the measured one fits its points, wrong ones are refused."""

from pathlib import Path
from statistics import median

import pytest
import yaml

from moefold.config.errors import UserError
from moefold.plan.machine.efficiency_fit import TimedKernel, attention_efficiency
from moefold.plan.machine.gpu import (
    PEAK_BY_PRECISION,
    check_precision,
    find_gpu_by_name,
    known_gpu_names,
    match_gpu_name,
    roofline_seconds,
)


def test_all_are_there_and_sane():
    assert set(known_gpu_names()) == {"a100", "b200", "b300", "gb200", "gb300", "h100", "h20", "h200", "h800"}
    for name in known_gpu_names():
        gpu = find_gpu_by_name(name)
        assert gpu.name.lower() == name
        assert 50 < gpu.memory < 300
        assert gpu.network < gpu.inside < gpu.hbm < gpu.peak["bf16"]
        assert all(0.2 < share <= 1 for share in gpu.kernels.gemm.values())
        assert all(PEAK_BY_PRECISION[precision] in gpu.peak for precision in gpu.precisions)


def test_names_know_no_case_and_near_ones_are_offered():
    assert find_gpu_by_name("GB200") == find_gpu_by_name("gb200")
    with pytest.raises(UserError, match=r'no GPU "h10".*did you mean "h100"'):
        find_gpu_by_name("h10")


def test_a_gpu_is_known_by_the_name_of_its_driver():
    assert match_gpu_name("NVIDIA H200") == "h200"
    assert match_gpu_name("NVIDIA H20") == "h20"
    assert match_gpu_name("NVIDIA A100-SXM4-80GB") == "a100"
    assert match_gpu_name("NVIDIA GeForce GTX 1080") is None


def test_the_measured_curves_lie_on_their_points():
    """Each within what one number a curve can do; half of them much nearer."""
    tree = yaml.safe_load((Path(__file__).parents[1] / "data" / "h200_points.yaml").read_text())
    gpu, off = find_gpu_by_name("h200"), []
    assert "measured 2026" in gpu.origin
    for point in (TimedKernel(**each) for each in tree["points"] if each["what"] != "stream"):
        k = gpu.kernels
        if point.what.startswith("attention"):
            there = point.what == "attention_forward"
            share, half = (k.attention_forward, k.forward_half) if there else (k.attention_backward, k.backward_half)
            seconds = point.flops / (gpu.peak["bf16"] * share * attention_efficiency(point.length, point.width, half))
        else:
            rate = gpu.achieved_rate(point.precision) * (k.grouped if point.what == "grouped" else 1)
            seconds = roofline_seconds(point.padded_flops / rate, point.bytes / gpu.hbm, k.blend)
        off.append(abs(seconds / point.seconds - 1))
    assert len(off) > 30
    assert max(off) < 0.20
    assert median(off) < 0.07


def test_a_file_may_begin_from_a_gpu_and_change_some(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("like: h100\nname: mine\nnetwork: 25e9\nkernels: {grouped: 0.8}\n")
    mine, h100 = find_gpu_by_name(str(path)), find_gpu_by_name("h100")
    assert (mine.network, mine.kernels.grouped) == (25e9, 0.8)
    assert (mine.hbm, mine.kernels.gemm) == (h100.hbm, h100.kernels.gemm)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("like: h100\nnetwrk: 1", 'no "netwrk".*did you mean "network"'),
        ("like: h100\nhbm: fast", "hbm = fast is not legal"),
        ("like: h100\nhost: 3", "host = 3; expected keys"),
        ("like: h100\nkernels: {gemm: 0.5}", "expected numbers by precision"),
        ("name: bare", "has no memory"),
        ("like: g100", 'no GPU "g100"'),
        ("[1, 2]", "holds a list"),
    ],
)
def test_a_bad_file_is_refused_by_key(tmp_path: Path, text: str, says: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        find_gpu_by_name(str(path))


def test_a_precision_that_a_gpu_lacks_is_refused_with_the_nearest():
    assert check_precision(find_gpu_by_name("gb200"), "mxfp8") == "mxfp8"
    with pytest.raises(UserError, match=r"H100 does not multiply in mxfp8.*set --precision fp8-blockwise"):
        check_precision(find_gpu_by_name("h100"), "mxfp8")
    with pytest.raises(UserError, match="set --precision bf16"):
        check_precision(find_gpu_by_name("a100"), "fp8")

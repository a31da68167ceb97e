"""Error bands: which compared runs stand behind a plan, and what is said where none do."""

from moefold.plan.error_band import ErrorBand, band_lines, band_warning, describe_band, find_band, read_bands
from moefold.plan.machine.gpu import find_gpu_by_name, known_gpu_names


def warning(gpu: str, gpus: int = 8, precision: str = "bf16") -> str:
    name = find_gpu_by_name(gpu).name
    return band_warning(find_band(name, gpus, precision), name)


def test_every_card_and_precision_has_a_band():
    for name in known_gpu_names():
        gpu = find_gpu_by_name(name)
        for precision in gpu.precisions:
            band = find_band(gpu.name, 64, precision)
            assert 0.3 < band.low <= band.middle <= band.high < 2
            assert f"{band.runs} " in describe_band(band, gpu.name)


def test_cards_with_a_known_bias_or_no_runs_are_warned_about():
    assert "too fast" in warning("b200")
    assert "too fast" in warning("b300")
    assert "never compared" in warning("a100")
    assert "never compared" in warning("h20")
    assert not warning("h100")
    assert not warning("h100", precision="fp8-blockwise")


def test_an_h200_is_judged_by_runs_here_and_a_cluster_of_them_by_the_same_chip():
    alone, many = find_band("H200", 1, "bf16"), find_band("H200", 64, "bf16")
    assert (alone.gpu, alone.runs) == ("H200", 10)
    assert many.gpu == "H100"
    assert "H100, which has the chip of H200" in describe_band(many, "H200")


def test_few_runs_of_a_precision_give_way_to_all_runs_of_the_card():
    assert read_bands()["H800", "low"].runs == 1
    assert find_band("H800", 64, "fp8").runs == find_band("H800", 64, "bf16").runs + 1


def test_a_card_of_ones_own_has_the_band_of_all():
    band = find_band("my card", 8, "bf16")
    assert band.gpu == "any"
    assert describe_band(band, "my card").startswith("no run on my card was compared; ")


def test_a_plan_that_is_too_slow_is_told_as_such():
    band = ErrorBand("X", "bf16", 9, 1.2, 1.5, 1.6)
    assert band_warning(band, "X") == "plans for X are 33% too slow in the median of 9 compared runs"
    assert list(band_lines([band])) == ["gpu,family,runs,low,middle,high", "X,bf16,9,1.200,1.500,1.600"]

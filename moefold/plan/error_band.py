"""Error band of a planned speed: what published runs on the same GPU reached, over what is planned for them.

`gpus/judged.csv` is written by the judge of published rows (`python -m tests.support.published --write`): of each GPU
and family of precision the number of compared runs, and the tenth percentile, the median and the ninetieth percentile
of measured over planned speed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from functools import cache

from moefold.plan.machine.gpu import GPU_FOLDER

JUDGED = GPU_FOLDER / "judged.csv"
LARGE_BIAS = 0.15  # of the median: the plan is known to be too fast or too slow
FEW_RUNS = 5
ONE_GPU_RUNS = {"H200": "H100"}  # judged by runs of this trainer on one GPU -> a card with the same chip, for clusters


@dataclass(frozen=True)
class ErrorBand:
    """Measured over planned speed of `runs` compared runs. `family`: bf16, low (8 bits and fewer) or any."""

    gpu: str
    family: str
    runs: int
    low: float
    middle: float
    high: float


def family_of(precision: str) -> str:
    return "bf16" if precision in ("bf16", "fp32") else "low"


def band_lines(bands: Iterable[ErrorBand]) -> Iterator[str]:
    """The lines of judged.csv."""
    yield ",".join(field.name for field in fields(ErrorBand))
    for band in bands:
        gpu, family, runs, *shares = astuple(band)
        numbers = [f"{share:.3f}" for share in shares]
        fields_of_line = gpu, family, str(runs), *numbers
        yield ",".join(fields_of_line)


@cache
def read_bands() -> dict[tuple[str, str], ErrorBand]:
    bands: dict[tuple[str, str], ErrorBand] = {}
    with JUDGED.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            runs = int(row["runs"])
            low = float(row["low"])
            middle = float(row["middle"])
            high = float(row["high"])
            band = ErrorBand(row["gpu"], row["family"], runs, low, middle, high)
            bands[band.gpu, band.family] = band
    return bands


def find_band(gpu: str, gpus: int, precision: str) -> ErrorBand:
    """The band of the GPU in this family of precision, else of the GPU, else of all compared runs."""
    bands = read_bands()
    if gpus > 1:
        gpu = ONE_GPU_RUNS.get(gpu, gpu)
    family = family_of(precision)
    keys = (gpu, family), (gpu, "any"), ("any", "any")
    for key in keys:
        band = bands.get(key)
        if band and (band.runs >= FEW_RUNS or key[1] == "any"):
            return band
    raise AssertionError("judged.csv has a line for any GPU")


def describe_band(band: ErrorBand, gpu: str) -> str:
    shares = f"{band.low:.0%} to {band.high:.0%} of the planned speed (median {band.middle:.0%})"
    if band.gpu == "any":
        return f"no run on {gpu} was compared; {band.runs} published runs on other GPUs reached {shares}"
    chip = "" if band.gpu == gpu else f", which has the chip of {gpu},"
    return f"{band.runs} compared runs on {band.gpu}{chip} reached {shares}"


def band_warning(band: ErrorBand, gpu: str) -> str:
    """A warning about a GPU that plans are known to be wrong for, or not known to be right for; else nothing."""
    if band.gpu == "any":
        return f"plans for {gpu} were never compared with a run"
    bias = 1 / band.middle - 1
    if abs(bias) > LARGE_BIAS:
        word = "fast" if bias > 0 else "slow"
        return f"plans for {band.gpu} are {abs(bias):.0%} too {word} in the median of {band.runs} compared runs"
    return ""

"""What a GPU and its cluster are: peaks, memory, links, host, and which share of the peaks real work reaches.

One YAML file a GPU lies in `gpus/`; a user's own has the same keys and may begin from one of them (`like: h100`). Peaks
are those of the data sheet without sparsity; shares are measured where the file says so (`moefold bench calibrate`
writes such a file), else published or taken from the nearest GPU that was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints

from moefold.config.errors import UserError, did_you_mean, one_of, printable_text
from moefold.config.read import read_yaml_mapping

GPU_FOLDER = Path(__file__).parents[1] / "gpus"
PEAK_BY_PRECISION = {
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8-blockwise": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
}  # -> the peak used


def roofline_seconds(computing: float, moving: float, blend: float) -> float:
    """Seconds of a kernel that computes and moves for so long: the larger of the two, and a part of the other."""
    return (computing**blend + moving**blend) ** (1 / blend)


@dataclass(frozen=True)
class KernelEfficiency:
    """Which share of the peaks kernels reach.

    `gemm` by precision is for large products; `grouped` is over that. A product of f FLOPs that moves b bytes takes
    ((f / rate)^blend + (b / bandwidth)^blend)^(1 / blend): the two limits of a roofline, joined smoothly. Attention
    reaches its share of the bf16 peak with long sequences and wide heads, and half of it at so many tokens.
    Kernels stand `start` seconds apart.
    """

    gemm: dict[str, float]
    grouped: float
    blend: float
    start: float
    attention_forward: float
    attention_backward: float
    forward_half: float
    backward_half: float
    stream: float  # share of the memory's bandwidth that pointwise work reaches


@dataclass(frozen=True)
class HostLatency:
    """What the CPU costs: seconds to launch a kernel from Python, and to wait for the device once."""

    launch: float
    sync: float


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: int  # of its instructions: 90 is 9.0, Hopper; kernels are chosen by it
    memory: float  # GiB that a program can have
    peak: dict[str, float]  # FLOP/s by bf16, fp8, fp4
    hbm: float  # bytes/s
    domain: int  # GPUs that NVLink joins
    inside: float  # bytes/s one GPU sends to others of its domain
    network: float  # bytes/s one GPU sends beyond it
    host_link: float  # bytes/s between GPU and host memory
    host: HostLatency
    kernels: KernelEfficiency
    dollars: float  # of one hour
    origin: str  # where the shares come from

    def achieved_rate(self, precision: str) -> float:
        """FLOP/s that large products reach."""
        return self.peak_flops(precision) * self.kernels.gemm[precision]

    def peak_flops(self, precision: str) -> float:
        return self.peak[PEAK_BY_PRECISION[precision]]

    @property
    def precisions(self) -> list[str]:
        return [p for p in PEAK_BY_PRECISION if p in self.kernels.gemm]


def check_precision(gpu: Gpu, precision: str) -> str:
    """Refuses a precision that is unknown, or that this GPU does not have, with the nearest one it has."""
    one_of("precision", precision, PEAK_BY_PRECISION)
    if precision in gpu.precisions:
        return precision
    order = list(PEAK_BY_PRECISION)
    nearest = min(gpu.precisions, key=lambda p: abs(order.index(p) - order.index(precision)))
    raise UserError(
        f"{gpu.name} does not multiply in {precision}; it has {', '.join(gpu.precisions)}: set --precision {nearest}"
    )


def known_gpu_names() -> list[str]:
    return sorted(path.stem for path in GPU_FOLDER.glob("*.yaml"))


def find_gpu_by_name(name: str) -> Gpu:
    """A GPU of the package by its name, whatever the case, or the one that a YAML file describes."""
    if name.endswith((".yaml", ".yml")):
        return read_gpu_file(Path(name))
    return read_gpu_file(GPU_FOLDER / f"{one_of('GPU', name.lower(), known_gpu_names())}.yaml")


@cache
def read_gpu_file(path: Path) -> Gpu:
    return cast(Gpu, build_dataclass(Gpu, read_gpu_tree(path, ()), ""))


def read_gpu_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's keys, laid over those of the GPU it is like."""
    tree = read_yaml_mapping(path)
    tree.pop("points", None)  # what the shares were fitted to: for people, and for a test of the fit
    base = tree.pop("like", None)
    if base is None:
        return tree
    if path in seen:
        raise UserError(f"{path} is like itself; expected `like` to name another GPU")
    source = GPU_FOLDER / f"{one_of('GPU', str(base).lower(), known_gpu_names())}.yaml"
    return merge_trees(read_gpu_tree(source, (*seen, path)), tree)


def merge_trees(base: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in tree.items():
        old = both.get(key)
        both[key] = merge_trees(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value  # pyright: ignore
    return both


def build_dataclass(kind: type[Any], tree: Mapping[str, Any], prefix: str) -> Any:
    """The dataclass that a mapping describes; all problems at once."""
    problems: list[str] = []
    hints = get_type_hints(kind)
    for key in tree:
        if key not in hints:
            problems.append(f'a GPU has no "{printable_text(prefix + str(key))}"{did_you_mean(str(key), hints)}')
    values: dict[str, Any] = {}
    for each in fields(kind):
        path = prefix + each.name
        if each.name not in tree:
            problems.append(f"the GPU's file has no {path}; add it, or begin with `like: h100` to take over the rest")
            continue
        try:
            values[each.name] = parse_field(hints[each.name], tree[each.name], path)
        except UserError as refused:
            problems += refused.problems
    if problems:
        raise UserError(*problems)
    return kind(**values)


def parse_field(kind: Any, raw: Any, path: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(raw, Mapping):
            raise UserError(f"{path} = {printable_text(str(raw))}; expected keys below it")
        return build_dataclass(cast(type[Any], kind), cast(Mapping[str, Any], raw), path + ".")
    if kind is str:
        return str(raw)
    if kind is int or kind is float:
        return kind(parse_number(raw, path))
    if not isinstance(raw, Mapping):
        raise UserError(f"{path} = {printable_text(str(raw))}; expected numbers by precision, such as {{bf16: 989e12}}")
    return {str(k): parse_number(v, f"{path}.{k}") for k, v in cast(Mapping[str, Any], raw).items()}


def parse_number(raw: Any, path: str) -> float:
    """YAML reads 2e9, without a sign in the exponent, as a text."""
    try:
        value = float(raw) if isinstance(raw, int | float | str) and not isinstance(raw, bool) else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e30:
        raise UserError(
            f"{path} = {printable_text(str(raw))} is not legal; expected a number at least 0, such as 3.35e12"
        )
    return value

"""GPUs of a plan: peaks, memory, links, host, and the share of the peaks that kernels reach.

`gpus/` has one YAML file per GPU. A user's own file has the same keys and may inherit from a packaged GPU
(`like: h100`). Peaks are those of the data sheet, without sparsity. Shares are measured where `origin` says so
(`moefold bench calibrate` writes such a file), otherwise published or those of the nearest measured GPU.
"""

from __future__ import annotations

import contextlib
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

Tree = Mapping[str, Any]


def roofline_seconds(computing: float, moving: float, blend: float) -> float:
    """Seconds of a kernel from its compute time and its memory time: the larger of the two, plus a part of the other.
    `blend` is the exponent of the norm that joins them."""
    return (computing**blend + moving**blend) ** (1 / blend)


@dataclass(frozen=True)
class KernelEfficiency:
    """Shares of the peaks that kernels reach.

    `gemm`: share of the peak, by precision, of large GEMMs; `grouped`: rate of grouped GEMMs over that of dense ones.
    A GEMM of f FLOPs and b bytes takes ((f / rate)^blend + (b / bandwidth)^blend)^(1 / blend): a smooth roofline.
    `attention_forward`, `attention_backward`: share of the bf16 peak with long sequences and wide heads;
    `forward_half`, `backward_half`: sequence length at which attention reaches half of that share. `start`: seconds
    between one kernel and the next.
    """

    gemm: dict[str, float]
    grouped: float
    blend: float
    start: float
    attention_forward: float
    attention_backward: float
    forward_half: float
    backward_half: float
    stream: float  # share of the memory bandwidth that pointwise kernels reach


@dataclass(frozen=True)
class HostLatency:
    """Latencies of the host in seconds: of a kernel launch from Python, and of one synchronisation."""

    launch: float
    sync: float


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: int  # compute capability: 90 is 9.0, Hopper; kernels are chosen by it
    memory: float  # GiB available to a program
    peak: dict[str, float]  # FLOP/s by bf16, fp8, fp4
    hbm: float  # bytes/s
    domain: int  # GPUs of one NVLink domain
    inside: float  # bytes/s from one GPU to others of its domain
    network: float  # bytes/s from one GPU to other domains
    host_link: float  # bytes/s between GPU and host memory
    host: HostLatency
    kernels: KernelEfficiency
    dollars: float  # per GPU hour
    origin: str  # source of the shares

    def achieved_rate(self, precision: str) -> float:
        """FLOP/s that large GEMMs reach."""
        return self.peak_flops(precision) * self.kernels.gemm[precision]

    def peak_flops(self, precision: str) -> float:
        return self.peak[PEAK_BY_PRECISION[precision]]

    @property
    def precisions(self) -> list[str]:
        return [p for p in PEAK_BY_PRECISION if p in self.kernels.gemm]


def check_precision(gpu: Gpu, precision: str) -> str:
    """The precision, if this GPU has it; otherwise a refusal with the nearest precision that it has."""
    one_of("precision", precision, PEAK_BY_PRECISION)
    if precision in gpu.precisions:
        return precision
    order = list(PEAK_BY_PRECISION)
    wanted = order.index(precision)

    def distance(name: str) -> int:
        return abs(order.index(name) - wanted)

    nearest = min(gpu.precisions, key=distance)
    known = ", ".join(gpu.precisions)
    raise UserError(f"{gpu.name} does not multiply in {precision}; it has {known}: set --precision {nearest}")


def known_gpu_names() -> list[str]:
    names = [path.stem for path in GPU_FOLDER.glob("*.yaml")]
    return sorted(names)


def match_gpu_name(full_name: str) -> str | None:
    """The planner's name of a GPU by the driver's: `NVIDIA H200` -> h200; None for a GPU that the planner lacks."""
    longest_first = sorted(known_gpu_names(), key=len, reverse=True)  # h200 before h20
    for known in longest_first:
        if known.upper() in full_name:
            return known
    return None


def find_gpu_by_name(name: str) -> Gpu:
    """A packaged GPU by its name, in upper or lower case, or the GPU that a YAML file describes."""
    if name.endswith((".yaml", ".yml")):
        return read_gpu_file(Path(name))
    return read_gpu_file(packaged_gpu_path(name))


def packaged_gpu_path(name: str) -> Path:
    names = known_gpu_names()
    known = one_of("GPU", name.lower(), names)
    return GPU_FOLDER / f"{known}.yaml"


@cache
def read_gpu_file(path: Path) -> Gpu:
    tree = read_gpu_tree(path, ())
    return cast(Gpu, build_dataclass(Gpu, tree, ""))


def read_gpu_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The keys of the file, merged into those of the GPU that `like` names."""
    tree = read_yaml_mapping(path)
    tree.pop("points", None)  # timings that the shares were fitted to: for readers, and for a test of the fit
    base = tree.pop("like", None)
    if base is None:
        return tree
    if path in seen:
        raise UserError(f"{path} is like itself; expected `like` to name another GPU")
    source = packaged_gpu_path(str(base))
    base_tree = read_gpu_tree(source, (*seen, path))
    return merge_trees(base_tree, tree)


def merge_trees(base: Tree, tree: Tree) -> dict[str, Any]:
    merged = dict(base)
    for key, value in tree.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            base_section = cast(Tree, old)
            value = merge_trees(base_section, cast(Tree, value))
        merged[key] = value
    return merged


def build_dataclass(kind: type[Any], tree: Tree, prefix: str) -> Any:
    """The dataclass that a mapping describes; all its problems are refused at once."""
    problems: list[str] = []
    hints = get_type_hints(kind)
    for key in tree:
        if key not in hints:
            shown = printable_text(prefix + str(key))
            problems.append(f'a GPU has no "{shown}"{did_you_mean(str(key), hints)}')
    # No field may be missing; nested dataclasses collect their own problems.
    values: dict[str, Any] = {}
    for field in fields(kind):
        path = prefix + field.name
        if field.name not in tree:
            problems.append(f"the GPU's file has no {path}; add it, or add `like: h100` to inherit missing keys")
            continue
        try:
            raw = tree[field.name]
            hint = hints[field.name]
            values[field.name] = parse_field(hint, raw, path)
        except UserError as refused:
            problems += refused.problems
    if problems:
        raise UserError(*problems)
    return kind(**values)


def parse_field(kind: Any, raw: Any, path: str) -> Any:
    if kind is str:
        return str(raw)
    if kind is int or kind is float:
        return kind(parse_number(raw, path))
    shown = printable_text(str(raw))
    if is_dataclass(kind):
        if not isinstance(raw, Mapping):
            raise UserError(f"{path} = {shown}; expected keys below it")
        section = cast(Tree, raw)
        dataclass = cast(type[Any], kind)
        return build_dataclass(dataclass, section, path + ".")
    if not isinstance(raw, Mapping):
        raise UserError(f"{path} = {shown}; expected numbers by precision, such as {{bf16: 989e12}}")
    numbers = cast(Tree, raw)
    by_precision: dict[str, float] = {}
    for name, number in numbers.items():
        by_precision[str(name)] = parse_number(number, f"{path}.{name}")
    return by_precision


def parse_number(raw: Any, path: str) -> float:
    """A number of a GPU's file. YAML reads 2e9, without a sign in the exponent, as a text."""
    value = math.nan
    is_number = isinstance(raw, int | float | str)
    if is_number and not isinstance(raw, bool):
        with contextlib.suppress(ValueError):
            value = float(raw)
    if not 0 <= value < 1e30:
        shown = printable_text(str(raw))
        raise UserError(f"{path} = {shown} is not legal; expected a number at least 0, such as 3.35e12")
    return value

"""One op, many implementations: the reference is the op itself; fast ones register beside it, in the same file.

The reference is plain torch, differentiable, on any device. `cases` feed one shared test and one shared benchmark, so
a new implementation is checked and timed by being registered. See docs/add_a_kernel.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from moefold import kernels
from moefold.kernels.attention.timings import AttentionShape
from moefold.kernels.catalog import CATALOG, Facts

DEVICE_CODE = ("_triton", "_hopper", "_launch", ".hopper")  # endings of modules that import Triton
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, KernelOp[..., Any]] = {}  # those whose files have been imported


@dataclass(frozen=True)
class KernelCase:
    """Inputs for one op. The rest are the facts the catalog's conditions look at."""

    name: str
    inputs: tuple[Any, ...]
    hidden: int = 0
    ffn: int = 0
    moments: str = "fp32"
    main: str = "fp32"
    attention: AttentionShape | None = None
    sees_all: bool = True

    def facts(self, device: str, dtype: str, capability: tuple[int, int]) -> Facts:
        sizes = (self.hidden, self.ffn, self.moments, self.main, self.attention, self.sees_all)
        return Facts(device, dtype, capability, *sizes)


CaseMaker = Callable[[str, torch.dtype], Iterable[KernelCase]]


class KernelOp(Generic[P, R]):
    """An operation. Calling it runs the reference; a run calls what `BoundKernels` chose."""

    def __init__(self, reference: Callable[P, R], mutates: bool):
        self.name = reference.__name__
        self.reference = reference
        self.mutates = mutates
        self.implementations: dict[str, Callable[P, R]] = {"reference": reference}
        self.make_cases: CaseMaker | None = None
        self.__doc__ = reference.__doc__

    def register_fast(self, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a fast implementation; its condition and its reason are in the catalog."""
        if name not in {choice.name for choice in CATALOG[self.name]}:
            raise KeyError(f"{self.name}.{name} has no line in kernels/catalog.py")

        def register_under_name(implementation: Callable[P, R]) -> Callable[P, R]:
            self.implementations[name] = implementation
            return implementation

        return register_under_name

    def register_cases(self, make: CaseMaker) -> CaseMaker:
        """Register the function that makes this op's cases for a device and a dtype."""
        self.make_cases = make
        return make

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)


def import_every_op() -> dict[str, KernelOp[..., Any]]:
    """All ops, for tests and benchmarks: a run imports those it calls. Device code, which needs Triton, is left out."""
    for module in pkgutil.walk_packages(kernels.__path__, "moefold.kernels."):
        if not module.name.endswith(DEVICE_CODE):
            importlib.import_module(module.name)
    return OPS


def register_op(reference: Callable[P, R]) -> KernelOp[P, R]:
    """Make an op of its reference."""
    OPS[reference.__name__] = made = KernelOp(reference, mutates=False)
    return made


def register_in_place_op(reference: Callable[P, None]) -> KernelOp[P, None]:
    """Make an op that returns nothing and changes its inputs."""
    OPS[reference.__name__] = made = KernelOp(reference, mutates=True)
    return made


def seeded_randn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)


def map_tensors(inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A case's inputs with every tensor changed, those in plain lists and tuples too. Named tuples are constants."""
    if isinstance(inputs, torch.Tensor):
        return change(inputs)
    if type(inputs) in (list, tuple):
        return [map_tensors(value, change) for value in inputs]
    return inputs


def float_tensors(inputs: Any) -> list[torch.Tensor]:
    """The tensors of a case's inputs that have gradients, in order."""
    tensors: list[torch.Tensor] = []

    def note_tensor(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            tensors.append(x)
        return x

    map_tensors(inputs, note_tensor)
    return tensors

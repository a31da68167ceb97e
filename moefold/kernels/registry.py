"""One op, many implementations: the reference is the op itself; fast ones register beside it, in the same file.

The reference is plain torch, differentiable, on any device. `cases` feed one shared test and one shared benchmark, so
a new implementation is checked and timed by being registered. See docs/add_a_kernel.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moefold.kernels.attention_times import Shape
from moefold.kernels.catalog import CATALOG, Facts

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Case:
    """Inputs for one op. The rest are the facts the catalog's conditions look at."""

    name: str
    inputs: tuple[Any, ...]
    hidden: int = 0
    ffn: int = 0
    moments: str = "fp32"
    main: str = "fp32"
    attention: Shape | None = None
    sees_all: bool = True

    def facts(self, device: str, dtype: str, capability: tuple[int, int]) -> Facts:
        sizes = (self.hidden, self.ffn, self.moments, self.main, self.attention, self.sees_all)
        return Facts(device, dtype, capability, *sizes)


Cases = Callable[[str, torch.dtype], Iterable[Case]]


class Op:
    """An operation. Calling it runs the reference; a run uses what `bind` chose."""

    def __init__(self, reference: Callable[..., Any], mutates: bool):
        self.name = reference.__name__
        self.reference = reference
        self.mutates = mutates
        self.implementations: dict[str, Callable[..., Any]] = {"reference": reference}
        self.make_cases: Cases | None = None
        self.__doc__ = reference.__doc__

    def fast(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a fast implementation; its condition and its reason are in the catalog."""
        if name not in {choice.name for choice in CATALOG[self.name]}:
            raise KeyError(f"{self.name}.{name} has no line in kernels/catalog.py")

        def add(implementation: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations[name] = implementation
            return implementation

        return add

    def cases(self, make: Cases) -> Cases:
        """Register the function that makes this op's cases for a device and a dtype."""
        self.make_cases = make
        return make

    def __call__(self, *args: Any) -> Any:
        return self.reference(*args)


def op(reference: Callable[..., Any]) -> Op:
    """Make an op of its reference."""
    OPS[reference.__name__] = made = Op(reference, mutates=False)
    return made


def op_in_place(reference: Callable[..., Any]) -> Op:
    """Make an op that returns nothing and changes its inputs."""
    OPS[reference.__name__] = made = Op(reference, mutates=True)
    return made


def random(device: str, dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)

"""Ops and their implementations: the reference is the op itself; fast implementations register beside it.

The reference is plain torch, differentiable, on any device. An op's cases feed one shared test and one shared
benchmark, so a new implementation is checked and timed by being registered. See docs/add_a_kernel.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from moefold.kernels.catalog import CATALOG
from moefold.kernels.facts import AttentionShape, Capability, Facts

KERNELS_FOLDER = Path(__file__).parent
DEVICE_CODE = ("_triton", "_hopper", "_launch", ".hopper")  # endings of modules that import Triton

P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, KernelOp[..., Any]] = {}  # ops whose files have been imported


@dataclass(frozen=True)
class KernelCase:
    """Inputs of one op, and the facts that the catalog's conditions read.

    `rows` of a case with undefined rows: (how many are defined, how many there are). Of tensors with so many rows, the
    inputs behind the defined ones are NaN, and outputs and gradients there are not compared.
    """

    name: str
    inputs: tuple[Any, ...]
    _: KW_ONLY
    hidden: int = 0
    ffn: int = 0
    moments: str = "fp32"
    main: str = "fp32"
    gradients: str = "fp32"
    attention: AttentionShape | None = None
    sees_all: bool = True
    square: bool = True
    rows: tuple[int, int] | None = None

    def facts(self, device: str, dtype: str, capability: Capability) -> Facts:
        return Facts(
            device,
            dtype,
            capability,
            hidden=self.hidden,
            ffn=self.ffn,
            moments=self.moments,
            main=self.main,
            gradients=self.gradients,
            attention=self.attention,
            sees_all=self.sees_all,
            square=self.square,
        )

    def defined(self, tensor: Tensor) -> Tensor:
        """The tensor without its undefined rows."""
        if self.rows is None or tensor.ndim == 0:
            return tensor
        defined, rows = self.rows
        if len(tensor) != rows:
            return tensor
        return tensor[:defined]

    def spoiled(self, tensor: Tensor) -> Tensor:
        """The tensor with NaN in its undefined rows."""
        defined = self.defined(tensor)
        if defined.shape == tensor.shape:
            return tensor
        kept = len(defined)
        undefined = torch.full_like(tensor[kept:], torch.nan)
        return torch.cat((defined, undefined))


class CaseInputs(NamedTuple):
    """Draws the tensors of cases for a device and a dtype."""

    device: str
    dtype: torch.dtype

    def normal(self, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        """Normal random numbers, the same on every device."""
        return seeded_randn(self.device, self.dtype, *shape, seed=seed, scale=scale)

    def wide(self, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
        """Normal random numbers in fp32 or better."""
        dtype = self.wide_dtype
        return seeded_randn(self.device, dtype, *shape, seed=seed, scale=scale)

    @property
    def wide_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


Cases = Iterator[KernelCase]
CaseMaker = Callable[[CaseInputs], Cases]


class KernelOp(Generic[P, R]):
    """An operation. Calling it runs the reference; a run calls the implementation that `BoundKernels` chose."""

    def __init__(self, reference: Callable[P, R], mutates: bool = False, differentiable: bool = True):
        self.name = reference.__name__
        self.reference = reference
        self.mutates = mutates
        self.differentiable = differentiable
        self.implementations = {"reference": reference}
        self.make_cases: CaseMaker | None = None
        self.__doc__ = reference.__doc__

    def register_fast(self, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a fast implementation; its condition and its reason are in the subject's choices.py."""
        choices = CATALOG.get(self.name, ())
        listed = [choice.name for choice in choices]
        if name not in listed:
            raise KeyError(f"{self.name}.{name} has no line in the choices.py of its folder (kernels/catalog.py)")

        def register_under_name(implementation: Callable[P, R]) -> Callable[P, R]:
            self.implementations[name] = implementation
            return implementation

        return register_under_name

    def register_cases(self, make: CaseMaker) -> CaseMaker:
        """Register the function that makes this op's cases."""
        self.make_cases = make
        return make

    def cases(self, device: str, dtype: torch.dtype) -> list[KernelCase]:
        """The op's cases for a device and a dtype, for tests and benchmarks."""
        if self.make_cases is None:
            raise KeyError(f"{self.name} has no cases; register a function that makes them (register_cases)")
        draw = CaseInputs(device, dtype)
        return list(self.make_cases(draw))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)


def import_every_op() -> dict[str, KernelOp[..., Any]]:
    """All ops, for tests and benchmarks; a run imports those it calls. Device code, which needs Triton, is left out."""
    folder = str(KERNELS_FOLDER)
    modules = pkgutil.walk_packages([folder], "moefold.kernels.")
    for module in modules:
        name = module.name
        if not name.endswith(DEVICE_CODE):
            importlib.import_module(name)
    return OPS


def register_op(reference: Callable[P, R]) -> KernelOp[P, R]:
    """Make an op of its reference."""
    op = KernelOp(reference)
    OPS[op.name] = op
    return op


def register_inner_op(reference: Callable[P, R]) -> KernelOp[P, R]:
    """Make an op that autograd does not see: a part of an autograd function's forward or backward."""
    op = KernelOp(reference, differentiable=False)
    OPS[op.name] = op
    return op


def register_in_place_op(reference: Callable[P, None]) -> KernelOp[P, None]:
    """Make an op that returns nothing and changes its inputs."""
    op = KernelOp(reference, mutates=True, differentiable=False)
    OPS[op.name] = op
    return op


def seeded_randn(device: str, dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal random numbers, the same on every device."""
    generator = torch.Generator()
    generator.manual_seed(seed + sum(shape))
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
    scaled = numbers * scale
    return scaled.to(device, dtype)


def map_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A case's inputs with every tensor changed, those in plain lists and tuples too. Named tuples are constants."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if type(inputs) in (list, tuple):
        return [map_tensors(value, change) for value in inputs]
    return inputs


def float_tensors(inputs: Any) -> list[Tensor]:
    """The tensors of a case's inputs that have gradients, in order."""
    tensors: list[Tensor] = []

    def note_tensor(x: Tensor) -> Tensor:
        if x.is_floating_point():
            tensors.append(x)
        return x

    map_tensors(inputs, note_tensor)
    return tensors

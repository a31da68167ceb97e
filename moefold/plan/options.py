"""What a plan may choose beyond a run's configuration: precision, what is recomputed or offloaded, how state is cut.

The keys of a run (`config/run.py`) already say degrees, schedule, pairing, dispatcher, where the router's weight acts
and how moments are kept. Here is the rest. The planner plans for all of it; what the trainer cannot do yet is marked
in `docs/planner.md`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from moefold.anatomy.regions import REGIONS
from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.keys import key

StackName = Literal["moefold", "megatron"]
PrecisionName = Literal["fp32", "bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class PrecisionRecipe:
    """Bytes an element takes: of a plain tensor; of a linear layer's input as it is kept; of the copies of a weight
    that GEMMs read beside the weight itself. Scales of blocks are counted in."""

    wide: float
    linear: float
    copies: float = 0.0

    @property
    def quantizes(self) -> bool:
        return self.linear < self.wide


PRECISION_RECIPES: dict[str, PrecisionRecipe] = {
    "fp32": PrecisionRecipe(4, 4),
    "bf16": PrecisionRecipe(2, 2),
    "fp8": PrecisionRecipe(2, 1, 2),  # weights twice: both products of a backward want rows of their own
    "fp8-blockwise": PrecisionRecipe(2, 1 + 4 / 128, 2 * (1 + 4 / 128**2)),  # an fp32 scale for 1 x 128, for 128 x 128
    "mxfp8": PrecisionRecipe(2, 1 + 1 / 32, 2 * (1 + 1 / 32)),  # a one-byte scale for 32 elements
    "nvfp4": PrecisionRecipe(2, 0.5 + 1 / 16, 2 * (0.5 + 1 / 16)),  # a one-byte scale for 16
}

RECOMPUTE_REGIONS = {name: region.meaning for name, region in REGIONS.items()}
REGION_ALIASES = {  # as other trainers say it
    "layernorm": "norm",
    "mla_up_proj": "up",
    "core_attn": "core",
    "attn_proj": "out",
    "shared_experts": "shared",
    "expert_fc1": "experts",
    "moe_act": "activation",
    "full": "layer",
}


def parse_regions(names: Iterable[str]) -> frozenset[str]:
    """The regions meant; names of other trainers are understood, others refused with the nearest."""
    meant = {name: REGION_ALIASES.get(name, name) for name in names}
    strange = [name for name, region in meant.items() if region not in RECOMPUTE_REGIONS]
    if strange:
        known = [*RECOMPUTE_REGIONS, *REGION_ALIASES]
        raise UserError(
            *(
                f'no region "{printable_text(name)}"{did_you_mean(name, known)}; there are: {", ".join(RECOMPUTE_REGIONS)}'
                for name in strange
            )
        )
    return frozenset(meant.values())


@dataclass(frozen=True)
class PlanChoices:
    """Beside a run's configuration. A key's doc says what it means; `keys_of(Choices())` lists them."""

    stack: StackName = key("moefold", "whose layers are planned: what they keep for backward differs")
    precision: PrecisionName = key("bf16", "of weights, activations and GEMMs")
    recompute: tuple[str, ...] = key((), "regions whose outputs are made again in backward instead of kept")
    offload: tuple[str, ...] = key((), "regions whose inputs wait in host memory between forward and backward")
    sharding: Literal["none", "zero", "fsdp"] = key(
        "zero", "over replicas: nothing is cut; optimizer state is (ZeRO-1); weights and gradients are too (FSDP)"
    )
    quantized_weights: bool = key(False, "with a low precision: no bf16 weights beside the quantised and the main ones")
    states_on_host: bool = key(False, "optimizer state and main weights wait in host memory while a step computes")
    graphs: Literal["none", "static", "whole"] = key(
        "none", "CUDA graphs of steps whose shapes do not depend on routing, or of whole layers"
    )
    travel: Literal["bf16", "fp8"] = key("bf16", "how tokens travel to experts; results come back in bf16")
    spread: float = key(0.1, "how uneven experts' load is: standard deviation over mean; 0: even", at_least=0)
    quantile: float = key(0.99, "room is kept for so large a share of all loads", above=0, below=1)
    node: int = key(8, "GPUs that share a fast domain", at_least=1)
    device: Literal["cuda", "cpu"] = key("cuda", "what kernels are chosen for")
    capability: int = key(90, "compute capability of the GPU: 90 is 9.0, Hopper", at_least=0)

    def __post_init__(self) -> None:
        for name, kind in (("stack", StackName), ("precision", PrecisionName)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise UserError(
                    f'no {name} "{printable_text(str(value))}"{did_you_mean(str(value), get_args(kind))}; '
                    f"there are: {', '.join(get_args(kind))}"
                )
        _ = self.recomputed, self.offloaded

    @property
    def recipe(self) -> PrecisionRecipe:
        return PRECISION_RECIPES[self.precision]

    @cached_property
    def recomputed(self) -> frozenset[str]:
        return parse_regions(self.recompute)

    @cached_property
    def offloaded(self) -> frozenset[str]:
        return parse_regions(self.offload)

    @cached_property
    def identity(self) -> int:
        return hash(tuple(vars(self)[name] for name in self.__dataclass_fields__))

    def __hash__(self) -> int:
        return self.identity

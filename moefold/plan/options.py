"""Choices of a plan beyond a run's configuration: precision, recompute and offload, sharding of state.

Degrees, schedule, pairing, dispatcher, the place of the router weight and the dtype of moments are keys of a run
(`config/run.py`). The planner covers all choices below; `TRAINER_VALUES` lists those that the trainer has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.keys import key
from moefold.config.memory_regions import ENTRY, PRESETS, REBUILT_REGIONS, REGIONS, entry_layers, without_presets
from moefold.plan.length_histogram import Lengths, parse_lengths

StackName = Literal["moefold", "megatron"]
PrecisionName = Literal["fp32", "bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class PrecisionRecipe:
    """Bytes per element: `wide` of a plain tensor, `linear` of a saved input of a linear layer, `copies` of the
    quantised copies of a weight that GEMMs read. Block scales are included."""

    wide: float
    linear: float
    copies: float = 0.0

    @property
    def quantizes(self) -> bool:
        return self.linear < self.wide


PRECISION_RECIPES: dict[str, PrecisionRecipe] = {
    "fp32": PrecisionRecipe(4, 4),
    "bf16": PrecisionRecipe(2, 2),
    "fp8": PrecisionRecipe(2, 1, 2),  # two copies of a weight: forward and backward quantise it along different axes
    "fp8-blockwise": PrecisionRecipe(2, 1 + 4 / 128, 2 * (1 + 4 / 128**2)),  # an fp32 scale per 1 x 128, per 128 x 128
    "mxfp8": PrecisionRecipe(2, 1 + 1 / 32, 2 * (1 + 1 / 32)),  # a one-byte scale per 32 elements
    "nvfp4": PrecisionRecipe(2, 0.5 + 1 / 16, 2 * (0.5 + 1 / 16)),  # a one-byte scale per 16
}

RECOMPUTE_REGIONS = {name: region.meaning for name, region in REGIONS.items()}
REGION_ALIASES = {  # names in other trainers
    "layernorm": "norm",
    "mla_up_proj": "up",
    "core_attn": "core",
    "attn_proj": "out",
    "shared_experts": "shared",
    "expert_fc1": "experts",
    "moe_act": "activation",
    "full": "layer",
}


RECOMPUTE_LADDER: tuple[tuple[str, ...], ...] = (  # recomputed regions: a rung costs more than those that it contains
    (),
    ("activation", "norm"),
    ("sar",),
    ("activation", "norm", "up", "mlp"),
    ("norm", "up", "mlp", "shared", "experts"),
    ("layer",),
)

TRAINER_VALUES: dict[str, tuple[object, ...]] = {  # values of `PlanChoices` that a run can have today
    "stack": ("moefold",),
    "precision": ("fp32", "bf16"),
    "sharding": ("zero",),
    "quantized_weights": (False,),
    "states_on_host": (False,),
    "graphs": ("none", "static", "whole"),
    "travel": ("bf16",),
}


def parse_regions(names: Iterable[str]) -> frozenset[str]:
    """Regions by name. Names of other trainers are accepted; unknown names are refused with the nearest."""
    regions: set[str] = set()
    problems: list[str] = []
    for entry in without_presets(names):
        name, _, _ = entry.partition("@")
        region = REGION_ALIASES.get(name, name)
        if region in RECOMPUTE_REGIONS:
            regions.add(region)
        else:
            problems.append(unknown_region_problem(name))
    if problems:
        raise UserError(*problems)
    return frozenset(regions)


def regions_in_layer(entries: Iterable[str], layer: int) -> frozenset[str]:
    """The regions that entries such as `moe@0-7` name for a layer."""
    names: set[str] = set()
    for entry in without_presets(entries):
        match = ENTRY.fullmatch(entry)
        layers = entry_layers(match) if match else None
        if layers is None or layer in layers:
            names.add(entry.partition("@")[0])
    return parse_regions(names)


def unknown_region_problem(name: str) -> str:
    guess = did_you_mean(name, [*RECOMPUTE_REGIONS, *PRESETS, *REGION_ALIASES])
    return f'no region "{printable_text(name)}"{guess}; there are: {", ".join(RECOMPUTE_REGIONS)}'


def check_known_name(what: str, name: str, known: tuple[str, ...]) -> None:
    if name in known:
        return
    guess = did_you_mean(str(name), known)
    raise UserError(f'no {what} "{printable_text(str(name))}"{guess}; there are: {", ".join(known)}')


@dataclass(frozen=True)
class PlanChoices:
    """Choices beyond a run's configuration. `iterate_keys(PlanChoices())` lists the keys with their docs."""

    stack: StackName = key("moefold", "trainer whose layers are planned; trainers save different tensors for backward")
    precision: PrecisionName = key("bf16", "precision of weights, activations and GEMMs")
    recompute: tuple[str, ...] = key((), "regions whose outputs are recomputed in backward instead of saved")
    offload: tuple[str, ...] = key((), "regions whose saved tensors are held in host memory until backward")
    sharding: Literal["none", "zero", "fsdp"] = key(
        "zero", "none; zero: optimizer state sharded (ZeRO-1); fsdp: weights and gradients sharded too"
    )
    quantized_weights: bool = key(False, "low precision: only quantised and main weights are held, no bf16 weights")
    states_on_host: bool = key(
        False, "optimizer state and main weights are held in host memory during forward and backward"
    )
    graphs: Literal["none", "static", "whole"] = key(
        "none", "CUDA graphs; static: of steps whose shapes do not depend on routing; whole: of whole layers"
    )
    travel: Literal["bf16", "fp8"] = key("bf16", "dtype of tokens sent to experts; results are returned in bf16")
    spread: float = key(0.1, "imbalance of expert load: standard deviation over mean; 0: even", at_least=0)
    quantile: float = key(0.99, "quantile of expert load that must fit in memory", above=0, below=1)
    lengths: tuple[str, ...] = key(
        (), "lengths of documents as length:share, such as 700:0.9,65536:0.1; empty: tokens attend to whole sequences"
    )
    node: int = key(8, "GPUs of one NVLink domain", at_least=1)
    device: Literal["cuda", "cpu"] = key("cuda", "device that kernels are chosen for")
    capability: int = key(90, "compute capability of the GPU: 90 is 9.0, Hopper", at_least=0)

    def __post_init__(self) -> None:
        check_known_name("stack", self.stack, get_args(StackName))
        check_known_name("precision", self.precision, get_args(PrecisionName))
        _ = self.recomputed, self.offloaded, self.documents  # refuses what cannot be read

    @property
    def not_in_trainer(self) -> list[str]:
        """The choices that the trainer does not have yet, as `sharding fsdp`."""
        missing: list[str] = []
        for name, known in TRAINER_VALUES.items():
            value = getattr(self, name)
            if value not in known:
                missing.append(f"{name} {value}")
        if self.recomputed.difference(REBUILT_REGIONS):
            missing.append(f"recompute {','.join(self.recompute)}")
        return missing

    @property
    def recipe(self) -> PrecisionRecipe:
        return PRECISION_RECIPES[self.precision]

    @cached_property
    def documents(self) -> Lengths:
        """The histogram of `lengths`."""
        return parse_lengths(self.lengths)

    @cached_property
    def recomputed(self) -> frozenset[str]:
        return parse_regions(self.recompute)

    def in_layer(self, layer: int, is_last: bool) -> PlanChoices:
        """The choices with the regions that are recomputed and offloaded in a layer. The last layer offloads
        nothing."""
        offload = () if is_last else self.offload
        entries = (*self.recompute, *offload)
        names_layers = any("@" in entry for entry in entries)
        if offload == self.offload and not names_layers:
            return self
        recomputed = sorted(regions_in_layer(self.recompute, layer))
        offloaded = sorted(regions_in_layer(offload, layer))
        return replace(self, recompute=tuple(recomputed), offload=tuple(offloaded))

    @cached_property
    def offloaded(self) -> frozenset[str]:
        return parse_regions(self.offload)

    @cached_property
    def identity(self) -> int:
        values = vars(self)
        fields = [values[name] for name in self.__dataclass_fields__]
        return hash(tuple(fields))

    def __hash__(self) -> int:
        return self.identity

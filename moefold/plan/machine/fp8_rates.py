"""Rates of FP8 kernels: what products and quantisation reached on one H200, and the ratios that a plan takes from it.

Measured with this repository's grouped kernels on the shapes of OLMoE-7B's experts, beside bf16 kernels of the same
shapes. Another Hopper GPU is planned with the same ratios: of its bf16 rate, and of its memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moefold.config.precision_recipes import Sums

PassName = Literal["forward", "data", "weight"]

BF16_TFLOPS = 660.0
H200_BANDWIDTH = 4.8e12
QUANTISE_BANDWIDTH = 2.2e12  # bytes/s read and written
QUANTISE_SHARE = QUANTISE_BANDWIDTH / H200_BANDWIDTH


@dataclass(frozen=True)
class MeasuredRates:
    """TFLOP/s of products in FP8. `up` has SwiGLU in its epilogue, `down_data` has SwiGLU's gradient; the others are
    plain products."""

    up: float
    down: float
    down_data: float
    up_data: float
    down_weight: float
    up_weight: float

    def of_expert_product(self, is_up: bool, pass_name: PassName) -> float:
        if pass_name == "forward":
            return self.up if is_up else self.down
        if pass_name == "data":
            return self.up_data if is_up else self.down_data
        return self.up_weight if is_up else self.down_weight

    @property
    def all(self) -> tuple[float, ...]:
        return self.up, self.down, self.down_data, self.up_data, self.down_weight, self.up_weight

    def of_plain_product(self, pass_name: PassName) -> float:
        by_pass = {"forward": self.down, "data": self.up_data, "weight": self.up_weight}
        return by_pass[pass_name]


BLOCK_RATES = MeasuredRates(890, 1033, 556, 1114, 928, 881)
FAST_RATES = MeasuredRates(1230, 1136, 748, 1297, 1214, 1242)
MEASURED_RATES: dict[Sums, MeasuredRates] = {
    "block": BLOCK_RATES,
    "promoted": BLOCK_RATES,  # not measured: adds to fp32 as often as block
    "fast": FAST_RATES,
}


def describe_ratios(rates: MeasuredRates) -> str:
    """0.84 to 1.69 times"""
    return f"{min(rates.all) / BF16_TFLOPS:.2f} to {max(rates.all) / BF16_TFLOPS:.2f} times"


FP8_RATIOS = f"{describe_ratios(BLOCK_RATES)} the bf16 rate, summed in the tensor core {describe_ratios(FAST_RATES)}"

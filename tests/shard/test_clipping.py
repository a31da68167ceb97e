"""Clipping as a policy: one norm over all units, and two others that need not wait for all of them."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

from moefold.layout.axes import single_rank_world
from moefold.shard.buckets import block_of_parameter, fill_buckets
from moefold.shard.clipping import ClippingPolicy, GlobalNormClipping, PreviousNormClipping, UnitNormClipping
from moefold.shard.gradients import Gradients
from tests.shard.test_gradients import make


class NoClipping:
    needs_all_units = False

    def clip_units(self, gradients: Gradients, units: Collection[str]) -> torch.Tensor:
        return gradients.norm(units)

    def end_step(self, norm: torch.Tensor) -> None: ...


def filled(value: float) -> Gradients:
    gradients = Gradients(fill_buckets(make("fp64"), single_rank_world(), unit=block_of_parameter), single_rank_world())
    for bucket in gradients.buckets:
        for _, view in bucket.parameter_views(bucket.gradients):
            view.fill_(value)
    return gradients


@pytest.mark.parametrize("policy", [GlobalNormClipping(0.5), UnitNormClipping(0.5), NoClipping()])
def test_every_policy_reports_the_same_norm_and_limits_its_own(policy: ClippingPolicy):
    gradients = filled(1e-2)
    expected = gradients.norm().item()
    assert policy.clip_units(gradients, gradients.units).item() == pytest.approx(expected)
    limited = {unit: gradients.norm([unit]).item() for unit in gradients.units}
    assert len(limited) > 3
    if isinstance(policy, GlobalNormClipping):
        assert sum(n**2 for n in limited.values()) ** 0.5 == pytest.approx(0.5, rel=1e-4)
        assert len({id(scale) for scale in gradients.scales.values()}) == 1
    elif isinstance(policy, UnitNormClipping):
        assert max(limited.values()) == pytest.approx(0.5, rel=1e-4)
    else:
        assert sum(n**2 for n in limited.values()) ** 0.5 == pytest.approx(expected)


def test_a_unit_of_its_own_is_spoilt_alone():
    gradients = filled(1e-2)
    spoilt = gradients.buckets[0]
    spoilt.gradients[0] = torch.nan
    UnitNormClipping(0.5).clip_units(gradients, gradients.units)
    assert {unit for unit, scale in gradients.scales.items() if scale.isnan()} == {spoilt.unit}


def test_the_norm_of_the_step_before_clips_all_units_alike_and_the_first_step_has_its_own():
    policy = PreviousNormClipping(1.0, torch.device("cpu"))
    first = filled(3.0)
    norm = policy.clip_units(first, first.units)
    policy.end_step(norm)
    torch.testing.assert_close(first.scales[first.units[0]], 1 / (norm + 1e-6))
    second = filled(5.0)
    for unit in second.units:
        policy.clip_units(second, [unit])
        torch.testing.assert_close(second.scales[unit], 1 / (norm + 1e-6))
    policy.end_step(torch.tensor(torch.nan, dtype=torch.float64))
    assert policy.previous == norm, "a step without a norm does not count"
    assert dict(policy.named_state())["previous_norm"] is policy.previous

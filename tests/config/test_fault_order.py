"""Orders of faults."""

from __future__ import annotations

import pytest

from moefold.config.fault_order import parse_fault


@pytest.mark.parametrize("fault", ["nan gradient=head.norm.weight", "slow times=9", "clock seconds=-5"])
def test_any_fault_may_be_ordered_once(fault: str):
    assert parse_fault(f"{fault} rank=1 once") == parse_fault(f"{fault} rank=1")._replace(once=True)

"""Orders of faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from moefold.config.fault_order import fault_problem, parse_fault


@pytest.mark.parametrize("fault", ["nan gradient=head.norm.weight", "slow times=9", "clock seconds=-5"])
def test_any_fault_may_be_ordered_once(fault: str):
    assert parse_fault(f"{fault} rank=1 once") == parse_fault(f"{fault} rank=1")._replace(once=True)


def test_a_fault_can_be_ordered_while_the_run_runs(tmp_path: Path):
    order = parse_fault("nan gradient=head.norm.weight rank=1 at=now")
    assert not order.is_due(1, 7, tmp_path)
    for text, is_due in (("7\n", True), ("8", False), ("", False), ("x", False), ("9" * 5000, False)):
        (tmp_path / "now").write_text(text)
        assert order.is_due(1, 7, tmp_path) == is_due
        assert not order.is_due(0, 7, tmp_path)
    for odd in ("at=", "at=..", "at=a/b"):
        assert fault_problem(f"nan gradient=head.norm.weight {odd}")

"""The loss scale halves at an overflow and doubles after clean steps; AdamW counts the updates that were made."""

from __future__ import annotations

import torch

from moefold.optim.loss_scale import LARGEST_SCALE, DynamicLossScale, UnitLossScale
from moefold.optim.step_scalars import StepScalars, UpdateNumber

CPU = torch.device("cpu")
FINITE = torch.tensor(True)
OVERFLOW = torch.tensor(False)


def scales_after(first: float, growth: int, steps: str) -> list[float]:
    """The scale after each step: `.` is clean, `x` overflows."""
    loss_scale = DynamicLossScale(first, growth, CPU)
    found: list[float] = []
    for number, step in enumerate(steps, 1):
        loss_scale.update_number(number)
        finite = FINITE if step == "." else OVERFLOW
        assert loss_scale.judge(finite).item() is (step == ".")
        found.append(loss_scale.scale.item())
    return found


def test_an_overflow_halves_and_clean_steps_in_a_row_double():
    assert scales_after(8.0, 3, "..x...") == [8, 8, 4, 4, 4, 8]
    assert scales_after(8.0, 1, "..x.") == [16, 32, 16, 32]
    assert scales_after(8.0, 2, "x.x..") == [4, 4, 2, 2, 4], "only clean steps in a row count"


def test_the_scale_has_a_smallest_and_a_largest_value():
    assert scales_after(2.0, 3, "xxx") == [1, 1, 1]
    assert scales_after(LARGEST_SCALE, 1, "..") == [LARGEST_SCALE] * 2
    loss_scale = DynamicLossScale(2.0, 3, CPU)
    assert loss_scale.can_go_on(2.0)
    assert not loss_scale.can_go_on(1.0), "there is nothing left to halve"


def test_updates_are_counted_without_skipped_steps_though_the_host_is_a_step_behind():
    loss_scale = DynamicLossScale(1024.0, 100, CPU)
    numbers: list[int] = []
    for step, finite in enumerate([FINITE, OVERFLOW, OVERFLOW, FINITE, FINITE, OVERFLOW, FINITE], 1):
        highest, is_less = loss_scale.update_number(step)
        assert is_less is not None
        numbers.append(highest - int(is_less))
        loss_scale.judge(finite)
    assert numbers == [1, 2, 2, 2, 3, 4, 4]


def test_loaded_counts_are_read_again():
    loss_scale = DynamicLossScale(1024.0, 100, CPU)
    loss_scale.update_number(1)
    loss_scale.judge(FINITE)
    loss_scale.skipped.fill_(5)  # as loading does
    loss_scale.forget_counts()
    assert loss_scale.update_number(20) == UpdateNumber(15, torch.tensor(False))


def test_the_factor_of_losses_is_the_scale_over_a_power_of_two():
    loss_scale = DynamicLossScale(1024.0, 100, CPU)
    for tokens, near in ((0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)):
        factor = loss_scale.loss_factor(torch.tensor(float(tokens), dtype=torch.float64))
        assert factor.item() == 1024 / near
    assert UnitLossScale(CPU).loss_factor(torch.tensor(7.0)).item() == 1


def test_without_fp16_nothing_is_updated_after_the_first_overflow():
    unit = UnitLossScale(CPU)
    assert [unit.judge(finite).item() for finite in (FINITE, OVERFLOW, FINITE)] == [True, False, False]
    assert not unit.can_go_on(1.0)
    assert list(unit.named_state()) == []


def test_rows_are_replaced_where_a_flag_says_so():
    scalars = StepScalars([[1.0, 2.0], [3.0]], CPU)
    scalars.write_rows([[1.0, 2.0], [3.0]])
    scalars.write_rows_where(OVERFLOW, [[7.0, 8.0], [9.0]])
    assert scalars.row_of(0)[:2].tolist() == [1, 2]
    scalars.write_rows_where(FINITE, [[7.0, 8.0], [9.0]])
    assert scalars.row_of(0)[:2].tolist() == [7, 8]
    assert scalars.row_of(1)[0].item() == 9

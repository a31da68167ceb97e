"""The op order of torch.distributed.pipelining, read off its own generators without running anything."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules as theirs

from moefold.schedule.program import PipelineOp, Program, Slot
from moefold.schedule.round_robin_schedules import backward_slot, forward_slot
from moefold.schedule.schedule_catalog import build_program

KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "D", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "DW"}


def ops(action: Any) -> tuple[PipelineOp, ...]:
    if action.computation_type.name == "OVERLAP_F_B":
        return tuple(op for part in action.sub_actions for op in ops(part))
    kinds: Any = KINDS.get(action.computation_type.name, "")
    return tuple(PipelineOp(kind, action.stage_index, action.microbatch_index) for kind in kinds)


def slots(actions: Any) -> list[tuple[PipelineOp, ...]]:
    return [found for action in actions if action is not None and (found := ops(action))]


def planned(schedule: Any, p: int, v: int, m: int) -> Program:
    """The order a schedule of torch writes down for each rank; the fields are those its generator reads."""
    rounds = max(1, m // p)
    fields = {
        "n_local_stages": v,
        "num_stages": p * v,
        "number_of_rounds": rounds,
        "microbatches_per_round": m // rounds,
    }
    fake = SimpleNamespace(pp_group_size=p, _n_microbatches=m, _num_stages=p * v, **fields)
    return [slots(schedule._calculate_single_rank_operations(fake, rank)) for rank in range(p)]


def executed(schedule: Any, p: int, m: int) -> Program:
    """The order in which a schedule of torch calls its stage. (What it writes down for 1F1B starts the last rank with
    microbatch 1; what it runs starts with 0.)"""
    program: Program = []
    for rank in range(p):
        stage = MagicMock(stage_index=rank)
        for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, name).return_value = []
        line: list[Slot] = []
        stage.forward_one_chunk.side_effect = lambda at, *_, rank=rank, line=line, **__: line.append(
            forward_slot(rank, at)
        )
        stage.backward_one_chunk.side_effect = lambda at, *_, rank=rank, line=line, **__: line.append(
            backward_slot(rank, at)
        )
        fake = MagicMock(_stage=stage, _n_microbatches=m, _num_stages=p)
        fake._check_inputs.return_value = [None] * m, [{}] * m
        schedule._step_microbatches(fake)
        program.append(line)
    return program


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_gpipe_and_1f1b_are_what_torch_executes(p: int):
    for m in (1, p, p + 1, 2 * p):
        assert build_program("gpipe", p, 1, m) == executed(theirs.ScheduleGPipe, p, m)
        assert build_program("1f1b", p, 1, m) == executed(theirs.Schedule1F1B, p, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_is_torchs_wherever_torch_has_one(p: int, v: int):
    for m in range(1, 4 * p + 1):
        if m % max(1, m // p) == 0:
            assert build_program("interleaved", p, v, m) == planned(theirs.ScheduleInterleaved1F1B, p, v, m), m


@pytest.mark.parametrize("p", [1, 2, 4])
def test_the_v_schedules_are_torchs(p: int):
    for m in (2 * p, 2 * p + 3, 6 * p):
        assert build_program("zb_v", p, 2, m) == planned(theirs.ScheduleZBVZeroBubble, p, 2, m)
        assert build_program("dualpipe_v", p, 2, m) == planned(theirs.ScheduleDualPipeV, p, 2, m)

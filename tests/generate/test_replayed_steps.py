"""Replayed steps: a recording of one step gives the tokens of steps that are computed one by one, and the host reads
them without being asked in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moefold
from moefold.config.errors import RunFailure
from moefold.generate.decode import decode_tokens
from moefold.generate.next_logits import model_logits
from moefold.generate.sampling import Sampling
from moefold.memory.graphs import CudaRecorder
from tests.generate.test_next_logits import CASES
from tests.support.tape import TapeRecorder

PROMPTS = [[5, 17, 3, 200, 9, 14, 77], [8, 2], [1, 4, 4, 90]]
COUNT = 21
SAMPLED = Sampling(1.5, top_k=50, top_p=0.9, min_p=0.01, seed=3)


def decoded(model: moefold.Model, recorder: TapeRecorder | None, sampling: Sampling, count: int = COUNT) -> Any:
    source = model_logits(model.transformer)
    source.recorder = recorder
    return list(decode_tokens(source, PROMPTS, sampling, count, vocab=250))


@pytest.mark.parametrize("case", CASES)
def test_replays_give_the_tokens_of_single_steps(case: str):
    preset, keys = CASES[case]
    model = moefold.Model(preset, dtype=torch.float32, seq_len=64, layers=2, **keys).eval()
    for sampling in (Sampling(0), SAMPLED):
        recorder = TapeRecorder()
        assert decoded(model, recorder, sampling) == decoded(model, None, sampling)
        assert recorder.recordings == 1


def test_few_tokens_are_not_recorded_and_ends_need_not_be_whole_readings():
    model = moefold.Model("tiny", dtype=torch.float32, seq_len=64, layers=1).eval()
    whole = decoded(model, None, SAMPLED)
    for count, recordings in ((1, 0), (2, 0), (3, 0), (10, 1), (11, 1)):
        recorder = TapeRecorder()
        assert decoded(model, recorder, SAMPLED, count) == whole[:count]
        assert recorder.recordings == recordings


def test_a_step_that_cannot_be_recorded_is_computed_each_time():
    class NoRecorder(TapeRecorder):
        def record(self, work: Any) -> Any:
            raise RunFailure("a host reads a value")

    model = moefold.Model("tiny", dtype=torch.float32, seq_len=64, layers=1).eval()
    assert decoded(model, NoRecorder(), SAMPLED) == decoded(model, None, SAMPLED)


def test_damaged_weights_end_the_generation():
    model = moefold.Model("tiny", dtype=torch.float32, seq_len=64, layers=1).eval()
    model.transformer.head.norm.weight.data.fill_(torch.nan)
    with pytest.raises(RunFailure, match="not a number"):
        decoded(model, TapeRecorder(), SAMPLED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_graphs_give_the_tokens_of_single_steps(case: str):
    """In bf16, with the kernels of few rows; the logits are those of whole sequences within its rounding."""
    preset, keys = CASES[case]
    model = moefold.Model(preset, device="cuda", dtype=torch.bfloat16, seq_len=64, layers=2, **keys).eval()
    source = model_logits(model.transformer)
    recorder = CountingRecorder(source.device)
    for sampling in (Sampling(0), SAMPLED):
        found: list[list[list[int]]] = []
        for each in (recorder, None):
            source.recorder = each
            found.append(list(decode_tokens(source, PROMPTS, sampling, COUNT, vocab=250)))
        assert found[0] == found[1]
    assert recorder.recordings == 2
    with torch.no_grad():
        source.begin(PROMPTS[:1], 20)
        logits = source.follow([3]).float()
        whole = model(torch.tensor([[*PROMPTS[0], 3]], device="cuda")).logits[:, -1].float()
    assert (logits - whole).norm() / whole.norm() < 3e-2


class CountingRecorder(CudaRecorder):
    recordings = 0

    def record(self, work: Any) -> Any:
        recorded = super().record(work)  # raises where work cannot be captured
        self.recordings += 1
        return recorded

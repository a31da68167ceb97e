"""Log-likelihoods are those of transformers' logits, whatever the batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.config.run import Config, ParallelConfig
from moefold.generate import likelihood
from moefold.generate.likelihood import Continuation, Likelihood, ScoreRows, score_continuations
from moefold.layout.axes import World, single_rank_world
from moefold.observe.printer import print_nothing
from moefold.train.evaluation_config import evaluation_config
from moefold.train.from_hf import WeightFiller, build_to_evaluate, starting_weights
from moefold.train.row_scores import score_rows
from tests.support.hf_models import CASES, make, save, tokens

LONGEST = 24
FP32 = 1e-6  # transformers has rotary tables and router scores in fp32 in any model


def plain_likelihood(theirs: torch.nn.Module, continuation: Continuation) -> Likelihood:
    """From whole logits of transformers, one continuation at a time."""
    context, wanted = continuation
    ids = torch.tensor([[*context, *wanted]])
    with torch.no_grad():
        log_p = theirs(ids).logits.log_softmax(-1)[0]
    rows = log_p[len(context) - 1 : -1]
    index = torch.tensor(list(wanted))
    chosen = rows.gather(1, index[:, None])
    return Likelihood(chosen.sum().item(), bool((rows.argmax(1) == index).all()))


def model_pair(case: str, folder: Path) -> tuple[torch.nn.Module, ScoreRows]:
    kind, options = CASES[case]
    theirs = make(kind, **options).double().eval()
    save(theirs, folder)

    def fill_from_folder(config: Config, world: World) -> WeightFiller:
        return starting_weights(folder, config, world, print_nothing)

    described = describe_model(open_model_folder(folder))
    config = evaluation_config(described.model, ParallelConfig(), LONGEST, 1)
    return theirs, partial(score_rows, build_to_evaluate(config, "fp64", single_rank_world(), fill_from_folder))


@pytest.mark.parametrize("case", ["mixtral", "deepseek v3", "gpt-oss"])
def test_they_are_those_of_whole_logits_in_batches_of_any_lengths(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs, ours = model_pair(case, tmp_path / "hf")
    ids = tokens(sequences=1, length=20)[0].tolist()
    with torch.no_grad():
        best = theirs(torch.tensor([ids])).logits[0, -1].argmax().item()
    asked = [
        Continuation(ids[:1], ids[1:]),
        Continuation(ids[:5], ids[5:8]),
        Continuation(ids, [best]),
        Continuation(ids[:9], ids[9:10]),
    ]
    expected = [plain_likelihood(theirs, each) for each in asked]
    monkeypatch.setattr(likelihood, "CHUNK", 7)  # borders within sequences
    for batch in (1, 3, 8):
        found = score_continuations(ours, asked, LONGEST, batch)
        assert [each.is_greedy for each in found] == [each.is_greedy for each in expected]
        assert [each.log_p for each in found] == pytest.approx([each.log_p for each in expected], rel=FP32)
    assert expected[2].is_greedy


def test_a_context_that_does_not_fit_loses_its_first_tokens(tmp_path: Path):
    theirs, ours = model_pair("mixtral", tmp_path / "hf")
    ids = tokens(sequences=1, length=2 * LONGEST)[0].tolist()
    asked = Continuation(ids[:-4], ids[-4:])
    (found,) = score_continuations(ours, [asked], LONGEST, 1)
    fits = Continuation(ids[-LONGEST - 1 : -4], ids[-4:])
    assert found.log_p == pytest.approx(plain_likelihood(theirs, fits).log_p, rel=FP32)

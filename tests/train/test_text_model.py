"""A text model that is cut over ranks has the likelihoods and the texts of one rank, and each rank holds its part
alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from moefold.config.run import ParallelConfig
from moefold.generate.likelihood import Continuation, Likelihood
from moefold.generate.sampling import Sampling
from moefold.layout.axes import World
from moefold.train.text_generator import GenerationRequest, TextGenerator
from moefold.train.text_model import TextModel, load_text_model
from tests.support.hf_models import CASES, make, save
from tests.support.ranks import run_ranks
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

LONGEST = 30  # no multiple of what sequences are cut into
PROMPTS = ["what is the", "that is here? the name"]
GREEDY = GenerationRequest(PROMPTS, tokens=8, sampling=Sampling(temperature=0))
DRAWN = GenerationRequest(PROMPTS, tokens=8, sampling=Sampling(temperature=1.0, seed=3))
TEXT = "what is the name of the one that is here? the name of what is here is that of the one"
MODELS = ["mixtral", "deepseek v3", "gpt-oss", "olmoe"]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp 2": (2, {}),
    "ep 2": (2, {"ep": 2}),
    "tp 2, etp 2": (2, {"tp": 2, "etp": 2}),
    "cp 2": (2, {"cp": 2}),
    "pp 2": (2, {"pp": 2}),
    "ep 4": (4, {"ep": 4}),
    "tp 2, ep 4": (4, {"tp": 2, "ep": 4}),
    "cp 2, tp 2, ep 2": (4, {"cp": 2, "tp": 2, "ep": 2}),
    "pp 2, ep 2": (4, {"pp": 2, "ep": 2}),
    "dp 2, tp 2": (4, {"tp": 2}),
}


class Found(NamedTuple):
    likelihoods: list[Likelihood]
    greedy: list[str]
    drawn: list[str]
    expert_elements: int


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for name in MODELS:
        kind, options = CASES[name]
        folder = tmp_path_factory.mktemp("published")
        save(make(kind, **{**options, "vocab_size": ENTRIES}), folder)
        write_tokenizer(folder)
        made[name] = folder
    return made


def found_by(text_model: TextModel) -> Found:
    ids = list(text_model.encode(TEXT))
    asked = [Continuation(ids[:first], ids[first : first + count]) for first, count in ((3, 9), (1, 25), (20, 1))]
    asked += [Continuation(ids[:1], ids[1 : 1 + LONGEST]), Continuation(ids, ids[:2])]
    likelihoods = text_model.score(asked, batch=1) + text_model.score(asked, batch=3)
    for first in range(0, 12, 4):
        likelihoods += every_next_word(text_model, ids[first : first + 4])
    generator = TextGenerator(text_model)
    named = text_model.model.named_parameters()
    expert_elements = sum(each.numel() for name, each in named if ".experts." in name)
    return Found(likelihoods, generator.answer(GREEDY), generator.answer(DRAWN), expert_elements)


def every_next_word(text_model: TextModel, context: list[int]) -> list[Likelihood]:
    """Of all words one is the likeliest, and together they are certain."""
    found = text_model.score([Continuation(context, [word]) for word in range(ENTRIES)], batch=ENTRIES)
    assert sum(math.exp(each.log_p) for each in found) == pytest.approx(1, rel=1e-12)
    assert sum(each.is_greedy for each in found) == 1
    return found


def found_on_rank(world: World, folder: Path, parallel: ParallelConfig) -> Found:
    return found_by(load_text_model(folder, precision="fp64", seq_len=LONGEST, world=world, parallel=parallel))


def compare_with_one_rank(folder: Path, layout: str) -> None:
    expected = found_by(load_text_model(folder, device="cpu", precision="fp64", seq_len=LONGEST))
    ranks, degrees = LAYOUTS[layout]
    parallel = replace(ParallelConfig(), **degrees)
    shares = degrees.get("ep", 1) * degrees.get("etp", 1)
    found_by_rank = run_ranks(found_on_rank, ranks, folder, parallel, **degrees)
    held = sum(found.expert_elements for found in found_by_rank)
    assert held * shares * degrees.get("pp", 1) == expected.expert_elements * ranks
    for found in found_by_rank:
        assert [each.is_greedy for each in found.likelihoods] == [each.is_greedy for each in expected.likelihoods]
        log_p = [each.log_p for each in expected.likelihoods]
        assert [each.log_p for each in found.likelihoods] == pytest.approx(log_p, rel=1e-9)
        assert found.greedy == expected.greedy
        assert found.drawn == expected.drawn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_likelihoods_and_the_texts_of_one_rank(layout: str, folders: dict[str, Path]):
    compare_with_one_rank(folders["mixtral"], layout)


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["ep 4", "cp 2, tp 2, ep 2", "pp 2, ep 2"])
@pytest.mark.parametrize("name", MODELS[1:])
def test_other_families_have_them_too(name: str, layout: str, folders: dict[str, Path]):
    compare_with_one_rank(folders[name], layout)

"""Random odd models of every family: the logits of `transformers`, or refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.support.hf_comparison import WRONG, Comparison, compare_with_transformers
from tests.support.random_hf_configs import BUILDERS, compare_all, is_sound, random_config, summary

SEED = 16


@pytest.mark.parametrize("number", range(200))
def test_a_random_model_has_the_logits_of_transformers_or_is_refused(number: int, tmp_path: Path):
    kind, options = random_config(Random(f"{SEED} {number}"))
    found = compare_with_transformers(kind, options, tmp_path)
    assert found.verdict not in WRONG, (found, options)


def test_every_family_and_every_number_is_drawn_anew():
    drawn = [random_config(Random(f"{SEED} {number}")) for number in range(200)]
    kinds = Counter(kind for kind, _ in drawn)
    assert kinds.keys() == BUILDERS.keys()
    assert drawn[7] == random_config(Random(f"{SEED} 7"))
    assert drawn[7] != random_config(Random(f"{SEED + 1} 7"))


@pytest.mark.parametrize(
    ("verdicts", "sound"),
    [
        (["equal", "equal", "equal", "refused"], True),
        (["equal", "equal", "refused by both", "refused"], False),
        (["equal", "equal", "equal", "different"], False),
        (["equal", "equal", "equal", "accepted alone"], False),
        (["equal", "equal", "equal", "lost in export"], False),
    ],
)
def test_what_is_wrong_or_too_much_refused_is_told(verdicts: list[str], sound: bool):
    found = {number: ("qwen3", Comparison(verdict)) for number, verdict in enumerate(verdicts)}  # pyright: ignore[reportArgumentType]
    assert is_sound(found) == sound
    assert "4 configs" in summary(found)


@pytest.mark.extended
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A default of our own in the place of the published one."""
    from moefold.checkpoint.hf import published_defaults

    for defaults in published_defaults.CLASS_DEFAULTS.values():
        monkeypatch.setitem(defaults, "rope_theta", 123.0)
    found = compare_all(SEED, range(12, 24))
    assert not is_sound(found)
    assert "different" in capsys.readouterr().out

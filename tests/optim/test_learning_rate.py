"""The shape of the learning rate over a run."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.run import OptimConfig
from moefold.optim.learning_rate import learning_rate

optims = st.builds(
    OptimConfig,
    lr=st.floats(1e-6, 100),
    warmup=st.integers(0, 300),
    decay=st.sampled_from(["cosine", "wsd", "constant"]),
    decay_share=st.floats(0.001, 1),
    final_lr=st.floats(0, 1),
)


def rates(steps: int, **optim: object) -> list[float]:
    config = OptimConfig(**optim)  # pyright: ignore[reportArgumentType]
    return [learning_rate(step, steps, config) for step in range(1, steps + 1)]


@settings(deadline=None)
@given(st.integers(1, 250), optims)
def test_the_rate_is_never_above_the_highest_nor_below_zero_and_falls_after_warm_up(steps: int, optim: OptimConfig):
    found = [learning_rate(step, steps, optim) for step in range(1, steps + 1)]
    assert all(0 <= rate <= optim.lr * (1 + 1e-12) for rate in found)
    after = found[optim.warmup :]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(after))
    assert all(rate >= optim.lr * optim.final_lr * (1 - 1e-12) for rate in after)


@pytest.mark.parametrize("decay", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_highest_rate(decay: str):
    found = rates(100, lr=0.5, warmup=20, decay=decay)
    assert found[:20] == pytest.approx([0.5 * step / 20 for step in range(1, 21)])
    assert found[0] > 0, "the first step already learns"
    assert max(found) == found[19] == 0.5


@pytest.mark.parametrize("decay", ["cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 40, 99])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_last_step_has_the_final_share(decay: str, warmup: int, final: float):
    assert rates(100, lr=2.0, warmup=warmup, decay=decay, final_lr=final)[-1] == pytest.approx(2.0 * final)


def test_cosine_is_half_way_down_in_the_middle():
    found = rates(120, lr=1.0, warmup=20, final_lr=0.2)
    assert found[70 - 1] == pytest.approx(0.6)
    assert found[45 - 1] == pytest.approx(0.2 + 0.8 * (1 + 0.5**0.5) / 2)


def test_wsd_is_flat_and_falls_in_a_line_over_its_last_share():
    found = rates(100, lr=1.0, warmup=10, decay="wsd", decay_share=0.2, final_lr=0.1)
    assert found[9:80] == [1.0] * 71
    assert found[80:] == pytest.approx([1.0 - 0.9 * done / 20 for done in range(1, 21)])


def test_wsd_with_a_share_of_everything_falls_from_the_end_of_warm_up():
    found = rates(100, lr=1.0, warmup=10, decay="wsd", decay_share=1.0, final_lr=0.0)
    assert found[9:] == pytest.approx([1.0 - done / 90 for done in range(91)])


def test_constant_stays():
    assert rates(50, lr=0.3, warmup=0, decay="constant", final_lr=0.0) == [0.3] * 50


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    assert rates(5, lr=1.0, warmup=10) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_wsd_ends_at_the_final_share_also_when_its_share_is_less_than_a_step():
    assert rates(3, lr=1.0, warmup=0, decay="wsd", decay_share=0.2, final_lr=0.1)[-1] == pytest.approx(0.1)

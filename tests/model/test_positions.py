"""Stretched rotary frequencies against the published definitions, computed here one number at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moefold.config.run import RopeConfig
from moefold.model.attention.rope_tables import rope_frequencies, rotary_tables, softmax_scale
from moefold.presets.zoo import PRESETS

WIDTHS = [8, 64, 128]


def plain(i: int, width: int, theta: float) -> float:
    return 1.0 / theta ** (2 * i / width)


def assert_frequencies(width: int, rope: RopeConfig, expected: list[float]) -> None:
    torch.testing.assert_close(
        rope_frequencies(width, rope), torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_plain_frequencies_are_powers_of_theta(width: int):
    rope = RopeConfig(theta=1e6)
    assert_frequencies(width, rope, [plain(i, width, 1e6) for i in range(width // 2)])


@pytest.mark.parametrize("width", WIDTHS)
def test_linear_stretching_divides_every_frequency(width: int):
    rope = RopeConfig(scaling="linear", factor=4.0)
    assert_frequencies(width, rope, [plain(i, width, 1e4) / 4 for i in range(width // 2)])


def llama3(width: int, r: RopeConfig) -> list[float]:
    """As Meta published it with Llama 3.1 (models/llama3/reference_impl/model.py, apply_scaling)."""
    found = []
    for i in range(width // 2):
        frequency = plain(i, width, r.theta)
        wavelength = 2 * math.pi / frequency
        if wavelength < r.original_length / r.high_frequency:
            found.append(frequency)
        elif wavelength > r.original_length / r.low_frequency:
            found.append(frequency / r.factor)
        else:
            smooth = (r.original_length / wavelength - r.low_frequency) / (r.high_frequency - r.low_frequency)
            found.append((1 - smooth) * frequency / r.factor + smooth * frequency)
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_llama3_stretching_is_that_of_llama_3_1(width: int):
    rope = RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0, original_length=8192)
    expected = llama3(width, rope)
    assert_frequencies(width, rope, expected)
    kept = [a == plain(i, width, rope.theta) for i, a in enumerate(expected)]
    assert any(kept)
    assert not all(kept)


def yarn(width: int, r: RopeConfig) -> list[float]:
    """As its authors published it (jquesnelle/yarn: find_correction_range, linear_ramp_mask). GPT-OSS does not round
    the range to whole dims."""

    def correction_dim(rotations: float) -> float:
        return (width * math.log(r.original_length / (rotations * 2 * math.pi))) / (2 * math.log(r.theta))

    low, high = correction_dim(r.beta_fast), correction_dim(r.beta_slow)
    if r.round_dims:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    found = []
    for i in range(width // 2):
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        extrapolation = plain(i, width, r.theta)
        found.append(extrapolation / r.factor * ramp + extrapolation * (1 - ramp))
    return found


@pytest.mark.parametrize("original", [2048, 4096, 32_768])
@pytest.mark.parametrize("width", WIDTHS)
def test_yarn_stretching_is_that_of_its_authors(width: int, original: int):
    rope = RopeConfig(scaling="yarn", factor=16.0, original_length=original)
    assert_frequencies(width, rope, yarn(width, rope))


def mscale(factor: float, strength: float) -> float:
    """As DeepSeek published it (yarn_get_mscale)."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def yarn_of(name: str) -> tuple[int, RopeConfig]:
    """How many dims turn in a preset, and how."""
    a = PRESETS[name]().model.attention
    return a.rope_dim or a.head_dim, a.rope


def test_the_ranges_of_the_published_models_are_stretched_as_theirs_are():
    """DeepSeek: from 32 turns to one. Kimi K2: from one turn to one, whose dim lies between two whole ones. GPT-OSS:
    from 32 to one, and the limits are no whole dims."""
    for name, factor, theta in [("deepseek-v3", 40.0, 1e4), ("kimi-k2", 32.0, 5e4), ("gpt-oss-20b", 32.0, 1.5e5)]:
        width, rope = yarn_of(name)
        assert (width, rope.factor, rope.theta, rope.original_length) == (64, factor, theta, 4096)
        assert_frequencies(width, rope, yarn(width, rope))
    kimi = yarn_of("kimi-k2")[1]
    assert kimi.beta_fast == kimi.beta_slow == 1
    ratio = rope_frequencies(64, kimi) / rope_frequencies(64, RopeConfig(theta=kimi.theta))
    assert sorted({round(x, 12) for x in ratio.tolist()}) == [1 / 32, 1.0], "one step, between two dims"
    assert not yarn_of("gpt-oss-20b")[1].round_dims


def gpt_oss(width: int, theta: float, factor: float, original: int, ntk_alpha: float, ntk_beta: float) -> list[float]:
    """As OpenAI published it (gpt_oss/torch/model.py, RotaryEmbedding._compute_concentration_and_inv_freq)."""
    half = width / 2
    low = half * math.log(original / (ntk_beta * 2 * math.pi)) / math.log(theta)
    high = half * math.log(original / (ntk_alpha * 2 * math.pi)) / math.log(theta)
    found = []
    for i in range(int(half)):
        freq = theta ** (2 * i / width)
        mask = 1 - min(1.0, max(0.0, (i - low) / (high - low)))
        found.append(1.0 / (factor * freq) * (1 - mask) + 1.0 / freq * mask)
    return found


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss_turns_and_sharpens_as_its_authors_published(name: str):
    width, rope = yarn_of(name)
    assert_frequencies(width, rope, gpt_oss(64, 150_000.0, 32.0, 4096, 1.0, 32.0))
    rounded = rope_frequencies(width, replace(rope, round_dims=True))
    assert not torch.allclose(rounded, rope_frequencies(width, rope), rtol=1e-3)
    cos, sin = rotary_tables(8, width, rope)
    torch.testing.assert_close((cos.square() + sin.square()).sqrt(), torch.full_like(cos, 0.1 * math.log(32) + 1))
    assert softmax_scale(64, rope) == 64**-0.5


@pytest.mark.parametrize("betas", [(32.0, 1.0), (1.0, 1.0), (2.0, 2.0), (64.0, 0.5), (1.0, 32.0), (0.5, 3.0)])
@pytest.mark.parametrize("round_dims", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
def test_yarn_with_any_range_rounded_or_not_is_that_of_its_authors(width: int, round_dims: bool, betas):
    fast, slow = betas
    rope = RopeConfig(
        scaling="yarn", factor=32.0, original_length=4096, beta_fast=fast, beta_slow=slow, round_dims=round_dims
    )
    assert_frequencies(width, rope, yarn(width, rope))


@pytest.mark.parametrize(("mine", "all_dims"), [(1.0, 1.0), (0.707, 0.707), (1.0, 0.0), (0.5, 2.0), (0.0, 1.0)])
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_yarn_sharpens_turned_dims_and_whole_scores_as_deepseek_published(factor: float, mine: float, all_dims: float):
    """DeepseekV2YarnRotaryEmbedding: cos and sin times mscale(mscale) / mscale(mscale_all_dim). DeepseekV2Attention:
    softmax_scale = q_head_dim^-0.5 times mscale(mscale_all_dim) squared."""
    rope = RopeConfig(scaling="yarn", factor=factor, original_length=4096, mscale=mine, mscale_all=all_dims)
    tables = rotary_tables(32, 64, rope)
    angle = torch.arange(32, dtype=torch.float64)[:, None] * torch.tensor(yarn(64, rope), dtype=torch.float64)
    expected = mscale(factor, mine) / mscale(factor, all_dims)
    for found, plain in zip(tables, (angle.cos(), angle.sin()), strict=True):
        torch.testing.assert_close(found, plain * expected, rtol=1e-12, atol=1e-12)
    assert softmax_scale(192, rope) == pytest.approx(192**-0.5 * mscale(factor, all_dims) ** 2, rel=1e-14)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2"])
def test_deepseeks_models_sharpen_whole_scores_and_not_the_turned_dims(name: str):
    _, rope = yarn_of(name)
    strength = 0.707 if "v2" in name else 1.0
    assert softmax_scale(192, rope) == pytest.approx(192**-0.5 * mscale(rope.factor, strength) ** 2, rel=1e-14)
    cos, sin = rotary_tables(32, 64, rope)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
def test_only_yarn_sharpens_scores(scaling):
    rope = RopeConfig(scaling=scaling, factor=8.0, mscale=1.0, mscale_all=1.0)
    assert softmax_scale(64, rope) == 64**-0.5


def test_yarn_keeps_fast_dims_stretches_slow_ones_and_ramps_between():
    rope = RopeConfig(scaling="yarn", factor=16.0, original_length=4096)
    found, before = rope_frequencies(128, rope), rope_frequencies(128, RopeConfig())
    ratio = (found / before).tolist()
    turns = [4096 * f / (2 * math.pi) for f in before.tolist()]
    assert all(abs(r - 1) < 1e-12 for r, n in zip(ratio, turns, strict=True) if n > 1.3 * rope.beta_fast)
    assert all(abs(r - 1 / 16) < 1e-12 for r, n in zip(ratio, turns, strict=True) if n < rope.beta_slow / 1.3)
    assert ratio == sorted(ratio, reverse=True)


def test_yarn_sharpens_attention_by_its_published_factor_and_the_others_do_not():
    stretched = RopeConfig(scaling="yarn", factor=16.0, original_length=4096)
    cos, sin = rotary_tables(32, 64, stretched)
    factor = 0.1 * math.log(16.0) + 1.0
    torch.testing.assert_close((cos.square() + sin.square()).sqrt(), torch.full_like(cos, factor))
    for scaling in ("none", "linear", "llama3"):
        cos, sin = rotary_tables(32, 64, replace(stretched, scaling=scaling))
        torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_a_factor_of_one_is_no_stretching(scaling):
    rope = RopeConfig(scaling=scaling, factor=1.0, original_length=2048)
    torch.testing.assert_close(rope_frequencies(64, rope), rope_frequencies(64, RopeConfig()), rtol=1e-14, atol=0)
    for mine, none in zip(rotary_tables(32, 64, rope), rotary_tables(32, 64, RopeConfig()), strict=True):
        torch.testing.assert_close(mine, none, rtol=1e-6, atol=1e-7)


def test_the_tables_are_fp64_and_exact_at_far_positions():
    cos, sin = rotary_tables(100_001, 64, RopeConfig(theta=1e6))
    assert cos.dtype == sin.dtype == torch.float64
    assert cos.shape == sin.shape == (100_001, 32)
    for i in (0, 5, 31):
        angle = 100_000 * plain(i, 64, 1e6)
        assert cos[-1, i].item() == pytest.approx(math.cos(angle), abs=1e-10)
        assert sin[-1, i].item() == pytest.approx(math.sin(angle), abs=1e-10)


def test_the_tables_do_not_depend_on_the_default_dtype_or_device():
    expected = rotary_tables(16, 8, RopeConfig())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = rotary_tables(16, 8, RopeConfig())
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

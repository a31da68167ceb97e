"""The optimizer's Triton kernels, run by Triton's interpreter where there is no GPU: the same code by element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import interpreter

from moefold.kernels.optimizer import optimizer_triton
from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_blocks import adamw_blocks
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.kernels.optimizer.add_in_blocks import add_in_blocks
from moefold.kernels.optimizer.add_squares import add_squares
from moefold.kernels.optimizer.decode_moment import decode_moment
from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest
from moefold.kernels.optimizer.state_blocks import CODE_DTYPES, BlockCodes, block_dtypes, decode_blocks, encode_blocks
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.quantise_weight import quantise_weight
from tests.support.fp8_interpreter import convert_by_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_triton = adamw.implementations["triton"]
OPTIONS = AdamWOptions(0.9, 0.95, 1e-8, 0.1)


def step_scalars(step: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.tensor(adamw_scalars(step, 1e-2, OPTIONS, seed), dtype=torch.float64, device=DEVICE)


def state(form: str, moments: torch.dtype, gradients: torch.dtype, n: int) -> list[Any]:
    generator = torch.Generator().manual_seed(n)
    main, g, m, v = (torch.randn(n, generator=generator).to(DEVICE) for _ in range(4))
    weights = None if form == "own" else round_to_nearest(main, torch.bfloat16)
    kept = lower_16_bits(main) if form == "split" else main
    return [kept, g.to(gradients), m.to(moments), v.square().to(moments), weights]


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("name", CODE_DTYPES)
def test_decoded_moments_are_those_of_the_reference_to_the_bit(name, is_second, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    codes, scales = encode_blocks(x.square() if is_second else x, CODE_DTYPES[name][is_second], is_second)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    optimizer_triton.launch_decode_moment(mine, codes, scales, is_second)
    decode_moment(theirs, codes, scales, is_second)
    assert torch.equal(mine, theirs)
    again = encode_blocks(mine, codes.dtype, is_second)
    assert torch.equal(again.codes.float(), codes.float())
    assert torch.equal(again.scales, scales)


@pytest.mark.parametrize("form", ["own", "copy", "split"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("n", [1, 130, 3000])
def test_adamw_equals_the_reference(form, moments, gradients, seed, n):
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    now, options = step_scalars(seed=seed or 0), OPTIONS._replace(stochastic=seed is not None)
    mine, theirs = state(form, moments, gradients, n), state(form, moments, gradients, n)
    in_triton(*mine, scale, now, options)
    adamw(*theirs, scale, now, options)
    if form == "split":
        mine[0], theirs[0] = (joined_fp32(x[4], x[0]) for x in (mine, theirs))
    for a, b in zip(mine, theirs, strict=True):
        if a is None or b is None:
            assert a is b
        else:  # bf16 may fall to the other side where fp32 differs in the last bit, which is rare
            off = (a.double() - b.double()).norm() / b.double().norm()
            assert off <= (1e-6 if a.dtype == torch.float32 else 2e-4), (form, off)


def state_in_blocks(main: str, first: str, second: str, n: int) -> tuple[list[Any], list[Any]]:
    """A state as above with moments in types of their own, and its scales."""
    whole = state("own" if main == "none" else main, torch.float32, torch.bfloat16, n)
    if main == "none":
        whole[0] = round_to_nearest(whole[0], torch.bfloat16)
    scales: list[Any] = []
    for place, name, is_second in ((2, first, False), (3, second, True)):
        dtypes = block_dtypes(name)
        codes = BlockCodes(whole[place], None)  # pyright: ignore[reportArgumentType]
        if dtypes is not None:
            codes = encode_blocks(whole[place] * 1e-5, dtypes[is_second], is_second)
        whole[place] = codes.codes
        scales.append(codes.scales)
    return whole, scales


@pytest.mark.parametrize("main", ["none", "copy", "split"])
@pytest.mark.parametrize(("first", "second"), [("int8", "int8"), ("fp8", "fp8"), ("fp16", "fp16"), ("fp32", "int8")])
@pytest.mark.parametrize("n", [128, 384, 2048, 5000])
def test_adamw_with_moments_in_blocks_equals_the_reference(main, first, second, n, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    scale = torch.tensor(3e-6, dtype=torch.float64, device=DEVICE)
    runs = []
    for run in (in_triton, adamw.reference):
        tensors, scales = state_in_blocks(main, first, second, n)
        run(*tensors, scale, step_scalars(seed=5), OPTIONS, 256, *scales)
        if main == "split":
            tensors[0] = joined_fp32(tensors[4], tensors[0])
        runs.append([*tensors, *scales])
    for a, b in zip(*runs, strict=True):
        if a is None:
            assert b is None
            continue
        off = (a.double() - b.double()).norm() / b.double().norm()
        assert off <= (1e-6 if a.dtype == torch.float32 else 2e-3), (a.dtype, off)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("main", ["fp16", "fp8", "int8", "bf16"])
@pytest.mark.parametrize("n", [128, 2048, 5000])
def test_adamw_with_main_weights_in_few_bits_equals_the_reference(main, moments, stochastic, n, monkeypatch):
    """Codes may fall to the other side where fp32 differs in the last bit, which is rare."""
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    scale = torch.tensor(3e-6, dtype=torch.float64, device=DEVICE)
    options = OPTIONS._replace(stochastic_main=stochastic)
    runs: list[list[Any]] = []
    for run in (in_triton, adamw.reference):
        tensors, scales = state_in_blocks("none" if main == "bf16" else "copy", moments, moments, n)
        main_scales = None
        if main != "bf16":
            tensors[0], main_scales = encode_blocks(tensors[0], CODE_DTYPES[main][0], is_second=False)
        run(*tensors, scale, step_scalars(seed=5), options, 256, *scales, main_scales)
        runs.append([*tensors, *scales, main_scales])
    for a, b in zip(*runs, strict=True):
        if a is None:
            assert b is None
            continue
        off = (a.double() - b.double()).norm() / b.double().norm()
        assert off <= (1e-6 if a.dtype == torch.float32 else 2e-3), (a.dtype, off)


@pytest.mark.parametrize("gradients", CODE_DTYPES)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("n", [128, 2048, 5000])
def test_adamw_with_gradients_in_blocks_equals_the_reference(gradients, moments, n, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    scale = torch.tensor(3e-6, dtype=torch.float64, device=DEVICE)
    runs: list[list[Any]] = []
    for run in (in_triton, adamw.reference):
        tensors, scales = state_in_blocks("copy", moments, moments, n)
        tensors[1], g_scales = encode_blocks(tensors[1], CODE_DTYPES[gradients][0], is_second=False)
        run(*tensors, scale, step_scalars(seed=5), OPTIONS, 256, *scales, None, g_scales)
        runs.append([*tensors, *scales])
    for a, b in zip(*runs, strict=True):
        if a is None:
            assert b is None
            continue
        off = (a.double() - b.double()).norm() / b.double().norm()
        assert off <= (1e-6 if a.dtype == torch.float32 else 2e-3), (a.dtype, off)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", CODE_DTYPES)
@pytest.mark.parametrize("n", [1, 128, 5000])
def test_sums_in_blocks_are_those_of_the_reference(name, adds, n, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    runs: list[list[torch.Tensor]] = []
    for run in ("triton", "reference"):
        codes, scales = encode_blocks(x[0], CODE_DTYPES[name][0], is_second=False)
        add_in_blocks.implementations[run](codes, scales, x[1].to(torch.bfloat16), adds)
        runs.append([codes, scales])
    for a, b in zip(*runs, strict=True):
        off = (a.double() - b.double()).norm() / b.double().norm()
        assert off <= (1e-6 if a.dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", CODE_DTYPES)
@pytest.mark.parametrize("run", ["triton", "reference"])
def test_a_block_with_a_number_that_is_not_finite_stays_not_finite(run, name, bad, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    x = torch.ones(256, device=DEVICE)
    codes, scales = encode_blocks(x, CODE_DTYPES[name][0], is_second=False)
    x[5] = bad
    for added in (x, torch.ones_like(x)):
        add_in_blocks.implementations[run](codes, scales, added, True)
        values = decode_blocks(codes, scales, is_second=False)
        assert not values[5].isfinite()
        assert not values[:128].isfinite().any()
        assert values[128:].isfinite().all()


def test_split_fp32_and_a_copy_give_the_same_numbers_to_the_bit():
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    whole, split = (state(form, torch.bfloat16, torch.bfloat16, 3000) for form in ("copy", "split"))
    for x in (whole, split):
        in_triton(*x, scale, step_scalars(), OPTIONS)
    assert torch.equal(lower_16_bits(whole[0]), split[0])
    assert torch.equal(round_to_nearest(whole[0], torch.bfloat16), whole[4])
    assert all(torch.equal(a, b) for a, b in zip(whole[1:], split[1:], strict=True))


def test_the_numbers_of_a_step_are_read_on_the_device():
    """The same launch, with other numbers written to the same tensor, does the other step."""
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    standing = step_scalars(3)
    for step in (3, 50):
        standing.copy_(step_scalars(step))
        mine, theirs = (state("copy", torch.float32, torch.float32, 300) for _ in range(2))
        in_triton(*mine, scale, standing, OPTIONS)
        adamw(*theirs, scale, step_scalars(step), OPTIONS)
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_leaves_everything_as_it_is(scale: float):
    mine, before = (state("split", torch.bfloat16, torch.bfloat16, 300) for _ in range(2))
    in_triton(*mine, torch.tensor(scale, dtype=torch.float64, device=DEVICE), step_scalars(), OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 1025, 40_000])
def test_squares_are_added_to_what_is_there(n: int, dtype: torch.dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(DEVICE, dtype)
    mine, theirs = (torch.tensor(0.5, dtype=torch.float64, device=DEVICE) for _ in range(2))
    optimizer_triton.launch_add_squares(mine, x, x[: n // 3], x)
    add_squares(theirs, x, x[: n // 3], x)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def copies_of(w: torch.Tensor, rule: ScaleRule) -> list[torch.Tensor]:
    (values_END, scales_EIJ), (values_EDN, scales_EJI) = quantise_weight(w, "block", rule)
    return [values_END, values_EDN, scales_EIJ, scales_EJI]


def as_integers(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("form", ["own", "copy", "split", "main alone"])
@pytest.mark.parametrize("seed", [None, 5])
def test_an_update_that_writes_copies_is_the_update_and_the_copies_are_those_of_its_weights(seed, form, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)
    shape = (2, 130, 40)
    rule = ScaleRule(power_of_two=seed is not None)
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    now, options = step_scalars(seed=seed or 0), OPTIONS._replace(stochastic=seed is not None)
    moments = torch.float32 if seed is None else torch.bfloat16
    kept = "own" if form == "main alone" else form
    mine, flat = (state(kept, moments, torch.float32, math.prod(shape)) for _ in range(2))
    copies = copies_of(torch.ones(shape, device=DEVICE), rule)
    dtype = torch.float32 if form == "own" else torch.bfloat16
    first = 1280  # as a part of a longer tensor
    adamw_blocks.implementations["triton"](*mine, scale, now, options, first, *copies, rule, dtype)
    in_triton(*flat, scale, now, options, first)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(mine, flat, strict=True))
    updated = round_to_nearest(flat[0], dtype) if flat[4] is None else flat[4]
    for a, b in zip(copies, copies_of(updated.view(shape), rule), strict=True):
        assert torch.equal(as_integers(a), as_integers(b))


def test_an_update_in_parts_rounds_stochastically_as_the_whole():
    scale = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    options = OPTIONS._replace(stochastic=True)
    for run in (in_triton, adamw.reference):
        whole, parts = (state("copy", torch.bfloat16, torch.float32, 3000) for _ in range(2))
        run(*whole, scale, step_scalars(seed=5), options)
        for window in (slice(0, 1280), slice(1280, 3000)):
            run(*(x[window] for x in parts), scale, step_scalars(seed=5), options, window.start)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_a_scale_that_is_no_number_leaves_the_copies_as_they_are():
    shape, rule = (1, 40, 48), ScaleRule()
    mine = state("copy", torch.float32, torch.float32, math.prod(shape))
    copies = copies_of(torch.ones(shape, device=DEVICE), rule)
    before = [x.clone() for x in (*mine, *copies)]
    scale = torch.tensor(math.nan, dtype=torch.float64, device=DEVICE)
    for name in ("triton", "fused", "reference"):
        run = adamw_blocks.implementations[name]
        run(*mine, scale, step_scalars(), OPTIONS, 0, *copies, rule, torch.bfloat16)
        for a, b in zip((*mine, *copies), before, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

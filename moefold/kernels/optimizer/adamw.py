"""One AdamW update of a flat tensor of main weights, in place.

m = b1 m + (1-b1) g        v = b2 v + (1-b2) g^2
w = w - lr decay w - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)

g is the gradient times a factor on the device: one over the number of tokens, less where the gradient is clipped. A
factor that is not finite leaves everything as it is, so the host need not wait for it. The numbers that change from
step to step are on the device too (`AdamWScalars`): a captured graph reads those of the step it is replayed for.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars, scalars_on_host
from moefold.kernels.optimizer.split_fp32 import joined_fp32, lower_16_bits, round_to_nearest
from moefold.kernels.optimizer.state_blocks import CODE_DTYPES, block_dtypes, decode_blocks, encode_blocks
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op
from moefold.layout.tape_entries import entry_facts

SCALED_TOGETHER = 1 << 20  # elements
LEAST_IN_HALVES = 1 << 16  # weights
HALF_STEP = 64  # weights: whole vectors of any CPU
ALL_32_BITS = 0xFFFFFFFF


@register_in_place_op
def adamw(
    main: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    weights: Tensor | None,
    scale: Tensor,
    scalars: Tensor,
    options: AdamWOptions,
    first: int = 0,
    m_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    main_scales: Tensor | None = None,
    g_scales: Tensor | None = None,
) -> None:
    """`main` are fp32 or better: the model's own weights, or else `weights` are the model's and get the rounded
    result. As int16, `main` is what bf16 `weights` lack of fp32 (split_fp32.py). As bf16, `main` are the model's
    weights, or there are none that products read beside them. `first`: the number of the first element, where a longer
    tensor is updated in parts; stochastic rounding depends on it. States with scales are codes (state_blocks.py), and
    `first` is a multiple of a block."""
    if not scale.isfinite():
        return
    now = scalars_on_host(scalars)
    w = whole_main_weights(main, weights, main_scales)
    # Moments: m and v themselves, unless they are kept in lower precision.
    if g_scales is not None:
        g = decode_blocks(g, g_scales, is_second=False)
    g = scaled_gradient(g, scale, w.dtype)
    mean = read_moment(m, m_scales, w.dtype, is_second=False)
    mean.lerp_(g, 1 - options.beta1)
    square = read_moment(v, v_scales, w.dtype, is_second=True)
    square.mul_(options.beta2)
    square.addcmul_(g, g, value=1 - options.beta2)
    # Weights: decay, then the step.
    root = square / now.square_correction
    root.sqrt_()
    root.add_(options.eps)
    w.mul_(now.keep)
    w.addcdiv_(mean, root, value=-now.step_size)
    seed = int(now.seed)
    if options.stochastic:
        random_bits = hashed_random_bits(first, len(w), seed, w.device)
        mean = stochastic_round(mean, m.dtype, random_bits & 0xFFFF)
        square = stochastic_round(square, v.dtype, random_bits >> 16)
    store_moment(m, m_scales, mean, is_second=False)
    store_moment(v, v_scales, square, is_second=True)
    random_bits = None
    if options.stochastic_main:
        random_bits = weight_random_bits(first, len(w), seed, w.device)
    if main_scales is None:
        store_or_round_weights(w, main, weights, random_bits)
    else:
        store_weights_in_blocks(w, main, main_scales, weights, random_bits)


def read_moment(moment: Tensor, scales: Tensor | None, dtype: torch.dtype, is_second: bool) -> Tensor:
    """A moment in the dtype of the main weights: the moment itself, where it is kept in that dtype."""
    if scales is not None:
        moment = decode_blocks(moment, scales, is_second)
    return moment.to(dtype)


def store_moment(moment: Tensor, scales: Tensor | None, x: Tensor, is_second: bool) -> None:
    if scales is None:
        copy_rounded(moment, x)
        return
    encoded = encode_blocks(x, moment.dtype, is_second)
    moment.copy_(encoded.codes)
    scales.copy_(encoded.scales)


def whole_main_weights(main: Tensor, weights: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """The main weights themselves, or as fp32 a copy of those that are split, that are bf16, or in blocks."""
    if scales is not None:
        return decode_blocks(main, scales, is_second=False)
    if main.dtype == torch.bfloat16:
        return main.float()
    if main.dtype != torch.int16:
        return main
    assert weights is not None
    return joined_fp32(weights, main)


def store_weights(w: Tensor, main: Tensor, weights: Tensor | None) -> None:
    """Write updated main weights back, if they are a copy, and the model's weights."""
    if main.dtype == torch.int16:
        lower = lower_16_bits(w)
        main.copy_(lower)
    if weights is not None:
        copy_rounded(weights, w)


def store_or_round_weights(w: Tensor, main: Tensor, weights: Tensor | None, random_bits: Tensor | None) -> None:
    """`store_weights`, and main weights in bf16 are rounded stochastically, where there are random bits."""
    if main.dtype != torch.bfloat16:
        store_weights(w, main, weights)
        return
    if random_bits is not None:
        w = stochastic_round(w, main.dtype, random_bits)
    copy_rounded(main, w)


def store_weights_in_blocks(
    w: Tensor, main: Tensor, scales: Tensor, weights: Tensor | None, random_bits: Tensor | None
) -> None:
    """Store main weights in blocks; the model's are the nearest to what these hold."""
    encoded = encode_blocks(w, main.dtype, False, random_bits)
    main.copy_(encoded.codes)
    scales.copy_(encoded.scales)
    if weights is not None:
        held = decode_blocks(main, scales, is_second=False)
        copy_rounded(weights, held)


def copy_rounded(to: Tensor, x: Tensor) -> None:
    rounded = round_to_nearest(x, to.dtype)
    to.copy_(rounded)


def scaled_gradient(g: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(g.dtype, dtype)
    wide_g = g.to(wide)
    scaled = wide_g * scale
    return scaled.to(dtype)


def scaled_in_parts(g: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of a long tensor: what is rounded is never in memory as a whole."""
    if g.dtype == dtype:  # nothing is
        return g * scale
    gradient = torch.empty_like(g, dtype=dtype)
    parts = gradient.split(SCALED_TOGETHER)
    unscaled = g.split(SCALED_TOGETHER)
    for part, of in zip(parts, unscaled, strict=True):
        scaled = scaled_gradient(of, scale, dtype)
        part.copy_(scaled)
    return gradient


def hashed_random_bits(first: int, n: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """32 random bits for each of n elements, as int64: the number of the element, mixed with the seed until every bit
    depends on every other (shifts and odd factors, each of which can be undone: no two elements get the same)."""
    x = seeded_numbers(first, n, seed, device)
    x = mixed_down(x, 16)
    x = multiplied(x, 0x7FEB352D)
    x = mixed_down(x, 15)
    x = multiplied(x, 0x846CA68B)
    return mixed_down(x, 16)


def weight_random_bits(first: int, n: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """16 random bits for each of n weights, as int64: the upper half of a number that is multiplied twice."""
    x = seeded_numbers(first, n, seed, device)
    x = multiplied(x, 0x9E3779B1)
    x = mixed_down(x, 15)
    x = multiplied(x, 0x85EBCA77)
    return x >> 16


def mixed_down(x: Tensor, bits: int) -> Tensor:
    """Upper bits mixed into those so many places below."""
    upper = x >> bits
    return x ^ upper


def multiplied(x: Tensor, factor: int) -> Tensor:
    product = x * factor
    return product & ALL_32_BITS


def seeded_numbers(first: int, n: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """The numbers of n elements, mixed with the seed."""
    last = first + n
    numbers = torch.arange(first, last, device=device)
    return numbers ^ seed


def stochastic_round(x: Tensor, dtype: torch.dtype, random_bits: Tensor) -> Tensor:
    """fp32 to bf16: up in magnitude if the 16 bits that go exceed a random number. Other types are kept as they are."""
    if (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x
    added = random_bits.to(torch.int32)
    bits = x.view(torch.int32) + added
    upper = bits & -65536
    return upper.view(torch.float32)


@adamw.register_fast("triton")
def adamw_triton(
    main, g, m, v, weights, scale, scalars, options, first=0,
    m_scales=None, v_scales=None, main_scales=None, g_scales=None,
) -> None:  # fmt: skip
    from moefold.kernels.optimizer import optimizer_triton

    scales = (m_scales, v_scales, main_scales, g_scales)
    optimizer_triton.launch_adamw(main, g, m, v, weights, scale, scalars, options, first, *scales)


def halves_of_update(
    main, g, m, v, weights, scale, scalars, options, first=0, *block_scales,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """The update of the first and of the other weights; of few weights, and with scales of blocks, it is one."""
    if main.numel() < LEAST_IN_HALVES or any(x is not None for x in block_scales):
        return []
    middle = main.numel() // 2 // HALF_STEP * HALF_STEP
    states = (main, g, m, v, weights)
    before = [None if x is None else x[:middle] for x in states]
    behind = [None if x is None else x[middle:] for x in states]
    return [(*before, scale, scalars, options, first), (*behind, scale, scalars, options, first + middle)]


@adamw.register_fast("fused")
@entry_facts(halves=halves_of_update)
def adamw_fused(
    main, g, m, v, weights, scale, scalars, options, first=0,
    m_scales=None, v_scales=None, main_scales=None, g_scales=None,
) -> None:  # fmt: skip
    if not isfinite(scale.item()):
        return
    now = scalars_on_host(scalars)
    w = whole_main_weights(main, weights)
    step = w.new_tensor(now.step, dtype=torch.float32)
    if g_scales is not None:
        g = decode_blocks(g, g_scales, is_second=False)
    gradient = scaled_in_parts(g, scale, w.dtype)
    torch._fused_adamw_(
        [w],
        [gradient],
        [m],
        [v],
        [],
        [step],
        lr=now.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.decay,
        eps=options.eps,
        amsgrad=False,
        maximize=False,
    )
    store_weights(w, main, weights)


@adamw.register_cases
def adamw_cases(draw: CaseInputs) -> Cases:
    for n in (1, 33, 100_003):
        for step in (1, 100):
            yield from cases_of_size(draw, n, step)


def cases_of_size(draw: CaseInputs, n: int, step: int) -> Cases:
    main = draw.wide(n)
    g = draw.wide(n, seed=1)
    m = draw.wide(n, seed=2)
    root = draw.wide(n, seed=3)
    v = root.square()
    scale = torch.tensor(0.5, dtype=draw.wide_dtype, device=draw.device)
    options = AdamWOptions(0.9, 0.95, 1e-8, 0.1)
    now = adamw_scalars(step, 1e-3, options, seed=7)
    scalars = torch.tensor(now, dtype=torch.float64, device=draw.device)
    weights = None
    if draw.wide_dtype != draw.dtype:
        weights = round_to_nearest(main, draw.dtype)
    name = f"{n} weights, step {step}"
    inputs = (main, g, m, v, weights, scale, scalars, options)
    yield KernelCase(name, inputs)
    if weights is None:
        return
    lower = lower_16_bits(main)
    split = (lower, *inputs[1:])
    yield KernelCase(f"{name}, split", split, main="split")
    low = [x.to(draw.dtype) for x in (g, m, v)]
    state = (*low, weights, scale, scalars)
    for rounding in ("nearest", "stochastic"):
        stochastic = rounding == "stochastic"
        rounded = options._replace(stochastic=stochastic)
        about = f"{name}, bf16 gradients and moments, {rounding}"
        whole = (main, *state, rounded)
        yield KernelCase(about, whole, moments="bf16")
        split = (lower, *state, rounded)
        yield KernelCase(f"{about}, split", split, moments="bf16", main="split")
    low_g, _, _ = low
    numbers = (scale, scalars, options)
    yield from cases_in_blocks(name, main, (weights, low_g, m, v, None, *numbers))


def cases_in_blocks(name: str, main: Tensor, inputs: tuple[Any, ...]) -> Cases:
    """bf16 weights alone and moments in blocks; main weights in blocks; gradients in blocks."""
    weights, g, m, v, *numbers = inputs
    for moments in ("fp16", "fp8", "int8"):
        dtypes = block_dtypes(moments)
        assert dtypes is not None
        m_dtype, v_dtype = dtypes
        m_codes, m_scales = encode_blocks(m, m_dtype, is_second=False)
        v_codes, v_scales = encode_blocks(v, v_dtype, is_second=True)
        state = (weights, g, m_codes, v_codes)
        first = 0
        inputs = (*state, *numbers, first, m_scales, v_scales)
        about = f"{name}, {moments} moments, no main weights"
        yield KernelCase(about, inputs, moments=moments, main="none")
    _, *rest, options = numbers
    behind = (*rest, options._replace(stochastic_main=False))
    for type in CODE_DTYPES:
        codes, scales = encode_blocks(weights, CODE_DTYPES[type][0], is_second=False)
        state = (codes, g, m.clone(), v.clone(), weights)
        inputs = (*state, *behind, 0, None, None, scales)
        yield KernelCase(f"{name}, {type} main weights", inputs, main=type)
        g_codes, g_scales = encode_blocks(g, CODE_DTYPES[type][0], is_second=False)
        state = (main, g_codes, m.clone(), v.clone(), weights)
        inputs = (*state, *behind, 0, None, None, None, g_scales)
        yield KernelCase(f"{name}, {type} gradients", inputs, gradients=type)

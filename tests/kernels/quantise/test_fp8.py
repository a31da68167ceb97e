"""Rules of FP8 numbers: the references against formats written out in plain Python (tests/support/fp8_numbers.py) and
against tables of bytes and scales; and the kernels against the references, to the bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.kernels.quantise.delayed_tiles import DelayedScales, note_maxima, quantise_delayed
from moefold.kernels.quantise.fp8 import E4M3, E5M2, Fp8Format, Quantised, ScaleRule, round_to_fp8, scale_from_amax
from moefold.kernels.quantise.gather_tiles import gather_tiles
from moefold.kernels.quantise.matrix_places import MatrixPlace
from moefold.kernels.quantise.quantise_tiles import quantise_tiles, tile_maxima
from moefold.kernels.quantise.quantise_weight import WEIGHT_SCALES, WeightScales, quantise_weight
from moefold.kernels.quantise.quantise_weight_share import cast_share, share_maxima, transpose_values
from moefold.kernels.quantise.rounding_figures import (
    CopyMatrices,
    RoundingFigures,
    matrices_of_columns,
    matrices_of_rows,
    rounding_figures,
)
from moefold.kernels.quantise.row_tiles import RowTiles, ends_of_experts, pad_to_tiles, padded_index, row_tiles
from tests.support.fp8_numbers import FINITE, bytes_of_block, nearest_byte, scale_of_block, value_of_byte

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []  # without one, kernels run in Triton's interpreter
FORMATS = {format.name: format for format in (E4M3, E5M2)}
RULES = [ScaleRule(format, power_of_two) for format in FORMATS.values() for power_of_two in (False, True)]
INF, NAN = math.inf, math.nan


def rule_name(rule: ScaleRule) -> str:
    return f"{rule.format.name}, powers of two" if rule.power_of_two else rule.format.name


each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
each_rule = pytest.mark.parametrize("rule", RULES, ids=rule_name)


@pytest.fixture(autouse=True)
def kernels_round_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        pytest.importorskip("triton")
        from triton.runtime import interpreter

        from tests.support.fp8_interpreter import convert_by_torch

        monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor, so that NaN equals NaN and -0 differs from 0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.contiguous().view(integers[x.element_size()])


def rounded(values: list[float], format: Fp8Format, scale: float = 1.0) -> list[int]:
    return bits(round_to_fp8(torch.tensor(values), torch.tensor(scale), format)).tolist()


# Formats


@each_format
def test_the_plain_value_of_every_byte_is_the_one_torch_reads(format: Fp8Format):
    values = torch.arange(256).to(torch.uint8).view(format.dtype).float().tolist()
    for byte, value in enumerate(values):
        assert struct.pack("f", value_of_byte(byte, format.name)) == struct.pack("f", value) or math.isnan(value)
        assert math.isnan(value) == math.isnan(value_of_byte(byte, format.name))
    assert FINITE[format.name][-1] == format.largest


ABOVE = 1 + 2.0**-23  # the next fp32 after a power of two, as a factor
E4M3_BYTES = [
    (0.0, 0x00),
    (-0.0, 0x80),
    (1.0, 0x38),
    (1.0625, 0x38),  # ties go to the even mantissa: down,
    (1.1875, 0x3A),  # up,
    (-1.0625, 0xB8),
    (15.5, 0x58),  # and into the next exponent
    (1.0625 * ABOVE, 0x39),
    (2.0**-6, 0x08),  # the smallest normal number
    (7.5 * 2.0**-9, 0x08),  # a tie between the largest subnormal number and that
    (2.0**-9, 0x01),  # the smallest subnormal number
    (2.0**-10, 0x00),
    (-(2.0**-10), 0x80),
    (2.0**-10 * ABOVE, 0x01),
    (3 * 2.0**-10, 0x02),
    (2.0**-149, 0x00),
    (448.0, 0x7E),
    (464.0, 0x7E),
    (480.0, 0x7E),  # the next one, if the format had it
    (3e38, 0x7E),
    (INF, 0x7E),
    (-INF, 0xFE),
    (NAN, 0x7F),
    (-NAN, 0x7F),
]
E5M2_BYTES = [
    (0.0, 0x00),
    (-0.0, 0x80),
    (1.0, 0x3C),
    (1.125, 0x3C),
    (1.375, 0x3E),
    (-1.375, 0xBE),
    (1.875, 0x40),
    (2.0**-14, 0x04),
    (3.5 * 2.0**-16, 0x04),
    (2.0**-16, 0x01),
    (2.0**-17, 0x00),
    (2.0**-17 * ABOVE, 0x01),
    (3 * 2.0**-17, 0x02),
    (57344.0, 0x7B),
    (61440.0, 0x7B),  # not infinity
    (INF, 0x7B),
    (-INF, 0xFB),
    (NAN, 0x7F),
    (-NAN, 0x7F),
]
BYTES = {"e4m3": E4M3_BYTES, "e5m2": E5M2_BYTES}


@each_format
def test_ties_subnormal_and_large_numbers_become_the_bytes_of_the_table(format: Fp8Format):
    values, expected = zip(*BYTES[format.name], strict=True)
    assert rounded(list(values), format) == list(expected)
    assert [nearest_byte(x, format.name) for x in values] == list(expected)


@each_format
def test_numbers_at_and_beside_every_midpoint_become_the_nearest_byte(format: Fp8Format):
    magnitudes = FINITE[format.name]
    middles = [(a + b) / 2 for a, b in pairwise(magnitudes)]
    values = [sign * x * shift for x in middles for sign in (1, -1) for shift in (1 - 2.0**-24, 1, ABOVE)]
    assert rounded(values, format) == [nearest_byte(x, format.name) for x in values]


# Scales

TINY = 2.0**-126
SCALES = [  # rule, amax, scale
    (ScaleRule(), 0.0, 1.0),
    (ScaleRule(), 448.0, 1.0),
    (ScaleRule(), 896.0, 2.0),
    (ScaleRule(), 512.0, struct.unpack("f", struct.pack("f", 8 / 7))[0]),
    (ScaleRule(), 448 * TINY, TINY),
    (ScaleRule(), 224 * TINY, TINY),  # not 2^-127, whose reciprocal would be infinite
    (ScaleRule(), 2.0**-149, TINY),
    (ScaleRule(), INF, NAN),
    (ScaleRule(), NAN, NAN),
    (ScaleRule(E5M2), 57344.0, 1.0),
    (ScaleRule(power_of_two=True), 0.0, 1.0),
    (ScaleRule(power_of_two=True), 448.0, 1.0),
    (ScaleRule(power_of_two=True), 449.0, 2.0),
    (ScaleRule(power_of_two=True), 1.0, 2.0**-8),
    (ScaleRule(power_of_two=True), 512.0, 2.0),
    (ScaleRule(power_of_two=True), 224 * TINY, TINY),
    (ScaleRule(power_of_two=True), 3e38, 2.0**120),
    (ScaleRule(power_of_two=True), INF, NAN),
    (ScaleRule(E5M2, power_of_two=True), 57345.0, 2.0),
]


def same_number(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(("rule", "amax", "scale"), SCALES)
def test_a_largest_magnitude_has_the_scale_of_the_table(rule: ScaleRule, amax: float, scale: float):
    assert same_number(scale_from_amax(torch.tensor(amax), rule).item(), scale)
    assert same_number(scale_of_block([0.0, -amax], rule.format.name, rule.power_of_two), scale)


BLOCKS = {
    "zeros": [0.0, -0.0, 0.0],
    "amax at a power of two": [512.0, 511.0, -300.0, 1e-3],
    "one value": [-3.7],
    "a product with the reciprocal, not a quotient": [1.5911533832550049, 0.004217621870338917],
    "tiny": [2.0**-149, -(2.0**-130), 2.0**-126],
    "large": [3.4e38, -1e38, 1.0],
    "infinite": [INF, 1.0, 0.0],
    "not a number": [1.0, NAN, 0.0],
}


@each_rule
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_has_the_scale_and_the_bytes_of_the_plain_rule(name: str, rule: ScaleRule):
    block = torch.zeros(1, 128)
    block[0, : len(BLOCKS[name])] = torch.tensor(BLOCKS[name])
    tiles = dense_tiles(1)
    quantised = quantise_tiles(block, tiles, rule, rows="block").rows
    assert quantised is not None
    values = block[0].tolist()
    scale = scale_of_block(values, rule.format.name, rule.power_of_two)
    assert same_number(quantised.scales[0, 0].item(), scale)
    assert bits(quantised.values)[0].tolist() == bytes_of_block(values, scale, rule.format.name)


@each_rule
def test_random_blocks_of_any_magnitude_have_scales_and_bytes_of_the_plain_rule(rule: ScaleRule):
    generator = torch.Generator().manual_seed(5)
    magnitudes = 10 ** torch.linspace(-44, 37, 90)
    x = torch.randn(90, 128, generator=generator) * magnitudes[:, None]
    quantised = quantise_tiles(x, dense_tiles(90), rule, rows="block").rows
    assert quantised is not None
    for values, scale, found in zip(x.tolist(), quantised.scales[:, 0].tolist(), bits(quantised.values), strict=False):
        assert scale == scale_of_block(values, rule.format.name, rule.power_of_two)
        assert found.tolist() == bytes_of_block(values, scale, rule.format.name)


# Row tiles


def dense_tiles(rows: int, device: str = "cpu") -> RowTiles:
    return row_tiles(ends_of_experts([rows], device), rows)


ROWS_OF_EXPERTS = {
    "random": [77, 130, 256, 40],
    "skewed": [1, 500, 0, 2],
    "empty": [0, 0, 0],
    "one expert": [384],
    "a dense matrix": [300],
}


@pytest.mark.parametrize("name", ROWS_OF_EXPERTS)
def test_padding_keeps_every_row_at_its_place_in_a_tile_of_its_expert(name: str):
    rows_E = ROWS_OF_EXPERTS[name]
    rows = sum(rows_E)
    x = torch.arange(1.0, rows + 1)[:, None]
    tiles = row_tiles(ends_of_experts(rows_E, "cpu"), rows)
    padded: list[float] = []
    for part in x.flatten().split(rows_E):
        padded += part.tolist() + [0.0] * (-len(part) % 128)
    assert tiles.count.item() == len(padded) // 128
    found = pad_to_tiles(x, tiles).flatten()
    assert found[: len(padded)].tolist() == padded
    assert not found[len(padded) :].any()


# Kernels


class TilesOfUse:
    """Tiles with a source of rows, and comparison of what is defined: padded rows of tiles in use."""

    def __init__(self, rows_E: list[int], width: int, dtype: torch.dtype, gathered: bool):
        rows = sum(rows_E) + 60  # some behind the last expert's
        self.tiles = row_tiles(ends_of_experts(rows_E, DEVICE), rows)
        self.used = int(self.tiles.count)
        sources = 90 if gathered else rows
        generator = torch.Generator().manual_seed(width)
        magnitudes = 10 ** torch.linspace(-42, 37, sources)
        x = torch.randn(sources, width, generator=generator) * magnitudes[:, None]
        x[3::11] = 0
        x[4::29, width // 2] = INF
        x[5::31, 0] = -NAN
        self.source = x.to(DEVICE, dtype)
        index = torch.randint(-1, sources, (rows,), generator=generator, dtype=torch.int32)
        self.index = index.to(DEVICE) if gathered else None

    def check_rows(self, mine: Quantised | None, reference: Quantised | None) -> None:
        assert mine is not None
        assert reference is not None
        defined = self.used * 128
        for a, b in zip(mine, reference, strict=True):
            assert a.shape == b.shape
            assert torch.equal(bits(a[:defined]), bits(b[:defined]))
        assert mine.scales.T.is_contiguous()

    def check_columns(self, mine: Quantised | None, reference: Quantised | None) -> None:
        assert mine is not None
        assert reference is not None
        assert mine.values.is_contiguous()
        assert mine.values.shape == reference.values.shape
        assert mine.scales.shape == reference.scales.shape
        for a, b in zip(mine, reference, strict=True):
            assert torch.equal(bits(a[: self.used]), bits(b[: self.used]))
        assert mine.scales.is_contiguous()


def triton_of(op: Any) -> Callable[..., Any]:
    pytest.importorskip("triton")
    return op.implementations["triton"]


def equal_numbers(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))


each_routing = pytest.mark.parametrize("rows_E", ROWS_OF_EXPERTS.values(), ids=list(ROWS_OF_EXPERTS))
each_width = pytest.mark.parametrize("width", [128, 72, 200])
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@each_routing
def test_the_kernel_of_row_tiles_equals_the_reference(rows_E: list[int]):
    for spare in (0, 60, 200):
        given = ends_of_experts(rows_E, DEVICE), sum(rows_E) + spare
        for mine, reference in zip(triton_of(row_tiles)(*given), row_tiles.reference(*given), strict=True):
            assert mine.dtype == reference.dtype
            assert torch.equal(mine, reference)


@pytest.mark.parametrize("gathered", [False, True], ids=["in order", "gathered"])
@each_dtype
@each_width
@each_routing
def test_the_kernels_of_tiles_give_the_bits_of_the_references(
    rows_E: list[int], width: int, dtype: torch.dtype, gathered: bool
):
    use = TilesOfUse(rows_E, width, dtype, gathered)
    maxima = triton_of(tile_maxima)(use.source, use.tiles, use.index)
    expected = tile_maxima.reference(use.source, use.tiles, use.index)
    assert all(equal_numbers(a, b) for a, b in zip(maxima, expected, strict=True))
    rule = RULES[(width + gathered) % len(RULES)]
    scales = scale_from_amax(expected.rows_P, rule), scale_from_amax(expected.columns_MD, rule)
    for rows, columns in (("block", "block"), scales):
        given = (use.source, use.tiles, rule, rows, columns, use.index)
        mine, reference = triton_of(quantise_tiles)(*given), quantise_tiles.reference(*given)
        use.check_rows(mine.rows, reference.rows)
        use.check_columns(mine.columns, reference.columns)


@pytest.mark.parametrize("gathered", [False, True], ids=["in order", "gathered"])
@pytest.mark.parametrize("by_channel", [False, True], ids=["experts", "channels"])
@each_dtype
@each_routing
def test_the_kernels_of_delayed_scales_give_the_bits_maxima_and_counts_of_the_references(
    rows_E: list[int], dtype: torch.dtype, by_channel: bool, gathered: bool
):
    width = 200 if by_channel else 72
    use = TilesOfUse(rows_E, width, dtype, gathered)
    rule = RULES[(by_channel + gathered) % len(RULES)]
    generator = torch.Generator().manual_seed(width)
    magnitudes = 10 ** (40 * torch.rand(len(rows_E), width, generator=generator) - 20)
    scales_EC = magnitudes.to(DEVICE) if by_channel else magnitudes[:, :1].to(DEVICE)
    scales_EC[:, 0] = torch.nan if by_channel else 1e3
    scales = DelayedScales(scales_EC[:, :1].contiguous(), scales_EC)
    now_E = torch.rand(len(rows_E), generator=generator).to(DEVICE)
    now_ED = torch.rand(len(rows_E), width, generator=generator).to(DEVICE)
    for rows, columns in ((True, True), (True, False), (False, True)):
        given = (use.source, use.tiles, rule, scales, rows, columns, use.index)
        mine, reference = triton_of(quantise_delayed)(*given), quantise_delayed.reference(*given)
        if rows:
            use.check_rows(mine.copies.rows, reference.copies.rows)
        if columns:
            use.check_columns(mine.copies.columns, reference.copies.columns)
        assert [copy is None for copy in mine.copies] == [not rows, not columns]
        assert equal_numbers(mine.maxima_MD[: use.used], reference.maxima_MD[: use.used])
        assert torch.equal(mine.saturated_1, reference.saturated_1)
    mine.maxima_MD[use.used :] = torch.nan  # of tiles that are not in use
    noted = [(now_E.clone(), now_ED.clone()) for _ in range(2)]
    for note, windows in zip((triton_of(note_maxima), note_maxima.reference), noted, strict=True):
        note(mine.maxima_MD, use.tiles, *windows)
    assert all(equal_numbers(a, b) for a, b in zip(*noted, strict=True))
    alone_E = now_E.clone()
    triton_of(note_maxima)(mine.maxima_MD, use.tiles, alone_E)
    assert equal_numbers(alone_E, noted[0][0])


def test_the_kernel_of_tiles_makes_only_what_is_asked_for():
    use = TilesOfUse([130], 72, torch.bfloat16, gathered=False)
    for rows, columns in (("block", None), (None, "block")):
        given = (use.source, use.tiles, RULES[0], rows, columns)
        mine, reference = triton_of(quantise_tiles)(*given), quantise_tiles.reference(*given)
        if rows is None:
            assert mine.rows is None
            use.check_columns(mine.columns, reference.columns)
        else:
            assert mine.columns is None
            use.check_rows(mine.rows, reference.rows)


@each_format
def test_the_kernel_gives_every_bf16_number_the_byte_of_the_reference(format: Fp8Format):
    """Which shows the cast of a GPU, where there is one: ties, subnormal numbers, infinities, every NaN."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    x = patterns.view(torch.bfloat16).view(512, 128)
    rule = ScaleRule(format)
    rows = quantise_tiles.reference(x, dense_tiles(512), rule, torch.ones(512 + 128)).rows
    given = (x.to(DEVICE), dense_tiles(512, DEVICE), rule, torch.ones(512 + 128, device=DEVICE))
    mine = triton_of(quantise_tiles)(*given).rows
    assert rows is not None
    assert torch.equal(bits(mine.values[:512]).cpu(), bits(rows.values[:512]))


@each_rule
@each_dtype
@pytest.mark.parametrize("scales", WEIGHT_SCALES)
@pytest.mark.parametrize("shape", [(2, 200, 72), (3, 128, 256), (1, 5, 130)])
def test_the_kernels_of_weights_give_the_bits_of_the_reference(
    shape: tuple[int, int, int], scales: WeightScales, dtype: torch.dtype, rule: ScaleRule
):
    w = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    w[0, 1] = 0
    w[0, 3, 4] = -NAN
    w[-1, -1, -1] = INF
    w = w.to(DEVICE, dtype)
    mine, reference = triton_of(quantise_weight)(w, scales, rule), quantise_weight.reference(w, scales, rule)
    for layout, expected in zip(mine, reference, strict=True):
        for a, b in zip(layout, expected, strict=True):
            assert a.is_contiguous()
            assert a.shape == b.shape
            assert torch.equal(bits(a), bits(b))


PLACES = (MatrixPlace(0, (2, 200, 72), 0), MatrixPlace(28_800, (1, 130, 300), 4))
FLAT = 68_096  # elements, some behind the last matrix


def flat_weights() -> Tensor:
    flat = 0.02 * torch.randn(FLAT, generator=torch.Generator().manual_seed(5))
    flat[300:372] = 0
    flat[9_000] = -NAN
    flat[67_000] = -INF
    return flat.to(DEVICE)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize(("shares", "rule"), [(1, ScaleRule()), (7, ScaleRule(power_of_two=True))])
def test_shares_that_cut_blocks_have_together_the_bytes_of_whole_weights(shares: int, kernels: str, rule: ScaleRule):
    flat = flat_weights()
    size = FLAT // shares
    begins = range(0, FLAT, size)
    maxima_of, cast = (op.implementations[kernels] for op in (share_maxima, cast_share))
    for dtype in (torch.float32, torch.bfloat16):
        of_shares = [maxima_of(flat[i : i + size], i, PLACES, dtype) for i in begins]
        maxima_B = torch.stack(of_shares).amax(0)
        scales_B = scale_from_amax(maxima_B.view(torch.float32), rule)
        values = torch.cat([cast(flat[i : i + size], i, PLACES, scales_B, rule, dtype) for i in begins])
        for place in PLACES:
            w = round_to_nearest(flat[place.start : place.stop].view(place.shape), dtype)
            whole = quantise_weight.reference(w, "block", rule)
            mine = values[place.start : place.stop].view(place.shape)
            last_block = place.first_block + place.blocks
            assert torch.equal(bits(mine), bits(whole.forward.values))
            assert torch.equal(bits(scales_B[place.first_block : last_block]), bits(whole.forward.scales.flatten()))
            turned = transpose_values.implementations[kernels](mine)
            assert torch.equal(bits(turned), bits(whole.transposed.values))


@pytest.mark.parametrize("width", [1024, 200])
@pytest.mark.parametrize("per_row", [False, True], ids=["scales of blocks", "scales of rows"])
@each_routing
def test_rows_quantised_before_the_gather_equal_rows_quantised_after_it(rows_E: list[int], per_row: bool, width: int):
    use = TilesOfUse(rows_E, width, torch.bfloat16, gathered=True)
    sources = len(use.source)
    tokens = dense_tiles(sources, DEVICE)
    maxima = tile_maxima(use.source, tokens)
    scales = scale_from_amax(maxima.rows_P, RULES[0]) if per_row else "block"
    before = quantise_tiles(use.source, tokens, RULES[0], scales).rows
    assert before is not None
    values, block_scales = before.values[:sources], before.scales[:sources]
    mine = triton_of(gather_tiles)(values, block_scales, use.tiles, use.index)
    use.check_rows(mine, gather_tiles.reference(values, block_scales, use.tiles, use.index))
    if per_row:
        moved = tile_maxima(use.source, use.tiles, use.index)
        scales = scale_from_amax(moved.rows_P, RULES[0])
    use.check_rows(mine, quantise_tiles.reference(use.source, use.tiles, RULES[0], scales, None, use.index).rows)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_references_give_the_same_bits_on_a_gpu_and_on_the_cpu():
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)) * 10 ** torch.linspace(-42, 36, 300)[:, None]
    for rule in RULES:
        here = quantise_tiles.reference(x, dense_tiles(300), rule, "block", "block")
        there = quantise_tiles.reference(x.cuda(), dense_tiles(300, "cuda"), rule, "block", "block")
        for a, b in zip(here, there, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(bits(a.values), bits(b.values).cpu())
            assert torch.equal(bits(a.scales), bits(b.scales).cpu())


@pytest.mark.extended
def test_the_kernel_of_rounding_figures_counts_as_the_reference_does_and_leaves_out_tiles_that_are_not_in_use():
    for dtype in (torch.bfloat16, torch.float32):
        for case in rounding_figures.cases(DEVICE, dtype):
            check_figures(*case.inputs)
    ends_E = ends_of_experts([3, 0, 130], DEVICE)
    tiles = row_tiles(ends_E, 600)
    x = torch.randn(600, 72, device=DEVICE)
    copies = quantise_tiles(x, tiles, RULES[0], "block", "block")
    unused = tiles.tiles_M4[:, 2] == 0
    assert unused.any()
    rows, columns = copies.wanted_rows, copies.wanted_columns
    for values, scales in (rows, columns):
        bits(values).view(len(unused), -1)[unused] = 0x7F  # NaN
        scales.unflatten(0, (len(unused), -1))[unused] = torch.nan
    for copy in (matrices_of_rows(rows), matrices_of_columns(columns)):
        counted = check_figures(x, padded_index(tiles), copy).sums_4[0]
        assert counted == 133 * 72


def check_figures(source: Tensor, index: Tensor, copy: CopyMatrices) -> RoundingFigures:
    mine = triton_of(rounding_figures)(source, index, copy)
    reference = rounding_figures.reference(source, index, copy)
    assert torch.equal(mine.sums_4[:2], reference.sums_4[:2])
    torch.testing.assert_close(mine.sums_4, reference.sums_4, rtol=1e-6, atol=0)
    assert torch.equal(mine.extremes_3, reference.extremes_3)
    return reference

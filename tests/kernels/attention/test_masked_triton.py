"""Attention over runs of keys against the reference, forward and backward, by Triton's interpreter; on a GPU
test_every_op.py does it, in bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.attention import masked_triton
from moefold.kernels.attention.attention import attention, attention_mask, random_document_begins
from moefold.kernels.attention.masked import first_visible_key, visible_until_query
from moefold.kernels.catalog import pick_implementation
from moefold.kernels.facts import AttentionShape, Facts
from moefold.kernels.registry import KernelCase, seeded_randn

CHUNK = AttentionShape(4096, 32, 4, 128, 128)
GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(GPU, reason="products of fp32 are rounded on a GPU")
CASES = [case for case in attention.cases("cpu", torch.float32) if case.name.startswith(("2x16 ", "2x24 "))]


def outcome(way: str, inputs: tuple) -> list[torch.Tensor]:
    """The result and all gradients."""
    leaves = [x.clone().requires_grad_() if is_float(x) else x for x in inputs]
    y = attention.implementations[way](*leaves)
    dy = seeded_randn(y.device.type, y.dtype, *y.shape, seed=9)
    return [y.detach(), *torch.autograd.grad(y, [x for x in leaves if is_float(x)], dy)]


def is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def agree(inputs: tuple) -> None:
    for number, (a, b) in enumerate(zip(outcome("varlen", inputs), outcome("reference", inputs), strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, n=number: f"number {n}: {text}")


@pytest.fixture(params=[(16, 16), (32, 16), (16, 64)], ids=str)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders of documents within a tile, at one, and tiles that no query of another sees anything of."""
    options = masked_triton.TileOptions(*request.param, 4, 2)
    monkeypatch.setattr(masked_triton, "NARROW", [options] * 3)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result_and_gradients_equal_those_of_the_reference(case: KernelCase, tiles: None):
    agree(case.inputs)


@interpreted
@pytest.mark.parametrize("borders", [(0,), (0, 1, 2, 3), (0, 32, 64), (0, 69), (0, 16, 17, 48)], ids=str)
def test_documents_may_begin_anywhere(borders: tuple[int, ...]):
    starts = torch.zeros(70, dtype=torch.int32)
    starts[list(borders)] = torch.tensor(borders, dtype=torch.int32)
    q, k, v = (seeded_randn("cpu", torch.float32, 1, 70, heads, 16, seed=heads) for heads in (2, 1, 1))
    agree((q, k, v, None, 0, None, starts.cummax(0).values[None]))


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("queries", [1, 7, 33])
def test_the_first_key_of_queries_and_the_last_query_of_keys_are_those_of_the_mask(queries: int, window: int):
    length, begins = 33, random_document_begins("cpu", 3, 33)[:, -queries:]
    mask = attention_mask(queries, length, length - queries, window, torch.device("cpu"), begins)[:, 0]
    first = first_visible_key(torch.empty(3, queries, 1, 1), length - queries, window, begins)
    assert torch.equal(first.long(), mask.int().argmax(-1))
    until = visible_until_query(first, length)
    for b, key in mask.any(1).nonzero().tolist():
        assert until[b, key] == mask[b, :, key].nonzero().max() + 1


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_on_a_gpu_ten_passes_agree_to_the_bit():
    q, k, v = (seeded_randn("cuda", torch.bfloat16, 2, 1000, heads, 128, seed=heads) for heads in (8, 2, 2))
    begins, sink = random_document_begins("cuda", 2, 1000), seeded_randn("cuda", torch.bfloat16, 8)
    first, *others = (outcome("varlen", (q, k, v, None, 300, sink, begins)) for _ in range(10))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_on_a_gpu_a_chunk_of_queries_on_all_keys_agrees_with_itself_to_the_bit():
    """Context parallelism by all_gather. The gradient of the queries by torch's attention differs from run to run."""
    q = seeded_randn("cuda", torch.bfloat16, 1, 2048, 32, 128)
    k, v = (seeded_randn("cuda", torch.bfloat16, 1, 4096, 4, 128, seed=seed) for seed in (1, 2))
    facts = Facts("cuda", "bf16", torch.cuda.get_device_capability(), attention=CHUNK, square=False)
    name, _ = pick_implementation("attention", facts)
    first, *others = (outcome(name, (q, k, v)) for _ in range(10))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("documents", [True, False])
def test_on_a_gpu_a_sequence_of_more_than_two_billion_elements_has_the_numbers_of_its_last_heads(documents: bool):
    """Heads make it as large as positions would, with less to compute. 2,100 positions of 8,448 heads of 128: offsets
    of the last 5 % of the positions need more than 31 bits."""
    group, kv_heads = 128, 66
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(1, 2100, heads, 128, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, dy = draw(group * kv_heads), draw(kv_heads), draw(kv_heads), draw(group * kv_heads)
    assert q.numel() > 1 << 31
    masking = (None, 0, None, random_document_begins("cuda", 1, 2100)) if documents else ()
    attend = attention.implementations["varlen" if documents else "deterministic"]

    def outcome_of_heads(some: slice, some_kv: slice) -> list[torch.Tensor]:
        leaves = [q[:, :, some].requires_grad_(), k[:, :, some_kv].requires_grad_(), v[:, :, some_kv].requires_grad_()]
        y = attend(*leaves, *masking)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy[:, :, some])]

    last, last_kv = slice(-group, None), slice(-1, None)
    together = outcome_of_heads(slice(None), slice(None))
    alone = outcome_of_heads(last, last_kv)
    for a, b, some in zip(together, alone, (last, last, last_kv, last_kv), strict=True):
        assert (a[:, :, some] - b).float().norm() <= 1e-3 * b.float().norm()

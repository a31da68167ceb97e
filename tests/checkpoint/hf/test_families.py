"""Each family as `transformers` makes it: the same logits, the same gradients, and every byte back."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moefold.checkpoint.format.boxes import box_slices
from moefold.checkpoint.hf.config_json import (
    config_json_for,
    describe_model,
    essential_values,
    family_for_model,
    read_model_config,
)
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.export import export_hf_weights, iterate_hf_tensors
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.name_table import MappedPiece
from moefold.checkpoint.hf.published_defaults import family_keys
from moefold.checkpoint.hf.read_weights import local_tensors
from moefold.layout.axes import single_rank_world
from moefold.train.from_hf import from_hf
from tests.support.hf_models import CASES, DENSE, hf, make, save, tokens

ALL = {**CASES, **{f"dense {name}": case for name, case in DENSE.items()}}


@lru_cache(maxsize=1)
def made(case: str) -> Any:
    kind, options = ALL[case]
    return make(kind, **options)


@pytest.fixture
def folder(case: str, tmp_path: Path) -> Path:
    return save(made(case), tmp_path / "hf")


@pytest.mark.parametrize("case", ALL)
def test_logits_and_gradients_are_theirs(case: str, folder: Path, tmp_path: Path):
    """Logits within 1e-5, the gradient of every tensor within 1e-4 of its largest."""
    theirs, ours = made(case), from_hf(folder, seq_len=32)
    ids = tokens()
    weights = torch.randn(*ids.shape, theirs.config.vocab_size, generator=torch.Generator().manual_seed(1))
    expected, found = theirs(ids).logits, ours.logits(ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    theirs.zero_grad()
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    expected = gradients_of(theirs, tmp_path / "gradients")
    table = describe_model(open_model_folder(folder)).family.name_table(ours.model)
    grads = {p: t.grad for p, t in ours.named_parameters()}
    biases = {n: torch.zeros_like(b) for n, b in ours.named_buffers() if n.endswith("bias_E")}
    found = dict(iterate_hf_tensors(table, lambda name, box: (grads | biases)[name][box_slices(box)]))
    for name, gradient in expected.items():
        if not name.endswith("e_score_correction_bias"):
            scale = float(gradient.abs().max())
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-4 * max(scale, 1.0), msg=name)


def gradients_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """A model's gradients under the names that its weights have in files: saved in the place of the weights."""
    before = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.grad if p.grad is not None else torch.zeros_like(p)
    save(model, folder)
    for name, p in model.named_parameters():
        p.data = before[name]
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_read_is_written_again_to_the_byte(case: str, dtype: torch.dtype, tmp_path: Path):
    kind, options = CASES[case]
    folder = save(make(kind, **options).to(dtype), tmp_path / "hf")
    before = load_file(folder / "model.safetensors")
    model = from_hf(folder, dtype=dtype, seq_len=32)
    family = describe_model(open_model_folder(folder)).family
    after = dict(export_hf_weights(model, model.model, single_rank_world(), family.kind))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if not name.endswith("e_score_correction_bias"):  # fp32 in our files, whatever theirs have
            assert after[name].dtype == tensor.dtype
        torch.testing.assert_close(after[name].to(tensor.dtype), tensor, rtol=0, atol=0, msg=name)
        assert torch.equal(
            after[name].to(tensor.dtype).contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        )


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_comes_back_and_transformers_reads_it(case: str, folder: Path):
    model = describe_model(open_model_folder(folder)).model
    family = family_for_model(model)
    written = config_json_for(family, model)
    options = ConfigOptions(written, "config.json", family_keys(family.kind))
    assert essential_values(read_model_config(family, options)) == essential_values(model)
    kind = CASES[case][0]
    again = getattr(hf(), f"{kind}Config")(**{k: v for k, v in written.items() if k != "architectures"})
    before = made(case).config
    same = "hidden_size num_hidden_layers num_attention_heads rms_norm_eps tie_word_embeddings num_experts_per_tok"
    for name in same.split():
        assert getattr(again, name) == getattr(before, name), name
    for name, value in before.rope_parameters.items():
        assert again.rope_parameters[name] == pytest.approx(value), name


@pytest.mark.parametrize("case", CASES)
def test_the_table_covers_every_tensor_of_the_model_once(case: str, folder: Path):
    described = describe_model(open_model_folder(folder))
    table = described.family.name_table(described.model)
    covered: dict[str, torch.Tensor] = {}
    for name, held in local_tensors(from_hf(folder, seq_len=32)).items():
        if name in table.pieces_by_ours or not name.endswith("bias_E"):
            (part,) = held
            covered[name] = torch.zeros(part.tensor.shape, dtype=torch.int)
    for piece in table.pieces:
        covered[piece.ours][box_slices(piece.box_in_ours)] += 1
    assert all(bool((count == 1).all()) for count in covered.values())


def test_pieces_move_boxes_both_ways():
    """A box that cuts heads, of a tensor whose turning dims are in pairs on the other side."""
    from moefold.checkpoint.hf.piece_values import read_piece_values, write_piece_values

    sizes = {"h": 4, "x": 6, "r": 3}
    pieces = [
        MappedPiece("q", "query", "(h x) r -> h x r", sizes, {"x": (0, 2)}, (0, 0, 0)),
        MappedPiece("q", "query", "(h x) r -> h x r", sizes, {"x": (2, 4)}, (0, 2, 0), "x"),
    ]
    theirs = torch.arange(72.0).view(24, 3)
    asked: list[Any] = []

    def fetch(name: str, box: Any) -> torch.Tensor:
        asked.append(box)
        return theirs[box_slices(box)]

    box = ((1, 2), (0, 6), (1, 2))
    found = torch.full((4, 6, 3), torch.nan)
    for piece in pieces:
        shared, values = read_piece_values(piece, box, fetch)  # pyright: ignore[reportGeneralTypeIssues]
        found[box_slices(shared)] = values
    assert asked == [((6, 12), (1, 2))] * 2, "no more than two heads and two columns are read"
    by_head = theirs.view(4, 6, 3)[:, [0, 1, 2, 4, 3, 5]]
    assert torch.equal(found[box_slices(box)], by_head[box_slices(box)])
    back = torch.zeros(24, 3)
    for piece in pieces:
        write_piece_values(piece, by_head[box_slices(piece.box_in_ours)], back)
    assert torch.equal(back, theirs)

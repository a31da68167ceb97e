"""Shards: masks of trained tokens are read as they were written, and damage to them is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moefold.config.errors import UserError
from moefold.data.document_split import DocumentTokens
from moefold.data.shards import BLOCK_BYTES, Shard, ShardFacts, write_shard

BYTES = np.dtype(np.uint8)


def masked_documents(lengths: list[int]) -> list[DocumentTokens]:
    chance = np.random.default_rng(3)
    return [DocumentTokens(chance.integers(1, 256, n, dtype=np.uint8), chance.random(n + 1) < 0.4) for n in lengths]


def flip_bit(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def write(folder: Path, documents: list[DocumentTokens]) -> ShardFacts:
    return write_shard(folder, "x", documents, BYTES, 0)


def test_any_range_of_a_mask_is_read_as_written(tmp_path: Path):
    documents = masked_documents([0, 1, 7, 8, 9, 30, 2])
    facts = write(tmp_path, documents)
    shard = Shard(tmp_path, facts, BYTES, has_mask=True)
    whole = np.concatenate([document.mask for document in documents if document.mask is not None])
    assert len(whole) == facts.tokens == 57 + 7
    assert (tmp_path / "x.mask").stat().st_size == 8
    for start in range(facts.tokens):
        for stop in range(start + 1, facts.tokens + 1):
            assert (shard.read_mask(start, stop) == whole[start:stop]).all()


def test_a_shard_of_text_has_no_mask_file_and_trains_every_token(tmp_path: Path):
    documents = [DocumentTokens(each.ids) for each in masked_documents([5, 6])]
    shard = Shard(tmp_path, write(tmp_path, documents), BYTES)
    assert not (tmp_path / "x.mask").exists()
    assert shard.read_mask(2, 9).tolist() == [True] * 7


def test_damage_to_a_mask_is_found_where_it_is_read(tmp_path: Path):
    facts = write(tmp_path, masked_documents([9 * BLOCK_BYTES]))
    path = tmp_path / "x.mask"
    flip_bit(path, BLOCK_BYTES + 5)
    shard = Shard(tmp_path, facts, BYTES, has_mask=True)
    shard.read_mask(0, 8 * BLOCK_BYTES)
    with pytest.raises(UserError, match=rf"x\.mask: bytes {BLOCK_BYTES} to \d+ differ"):
        shard.read_mask(8 * BLOCK_BYTES - 1, 8 * BLOCK_BYTES + 1)
    with pytest.raises(UserError, match=r"x\.mask: bytes"):
        shard.check_all()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"x\.mask has \d+ bytes"):
        Shard(tmp_path, facts, BYTES, has_mask=True)

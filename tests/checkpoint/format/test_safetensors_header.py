"""Headers of safetensors files: written as the library reads them, read within bounds."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.format.safetensors_header import (
    LENGTH_BYTES,
    HeaderEntry,
    encode_safetensors_header,
    read_raw_header,
    tensors_in_file,
)
from moefold.config.errors import UserError


def write_file(path: Path, entries: dict[str, HeaderEntry], data: bytes) -> Path:
    header = {name: entry.as_json() for name, entry in entries.items()}
    path.write_bytes(encode_safetensors_header(header) + data)
    return path


def test_the_library_reads_what_is_written_here(tmp_path: Path):
    values = torch.arange(6, dtype=torch.float32)
    entries = {"a": HeaderEntry("F32", (2, 2), 0, 16), "b": HeaderEntry("F32", (2,), 16, 24)}
    path = write_file(tmp_path / "x.safetensors", entries, values.numpy().tobytes())
    tensors = load_file(path)
    assert torch.equal(tensors["a"], values[:4].view(2, 2))
    assert torch.equal(tensors["b"], values[4:])


def test_what_the_library_writes_is_read_here(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    tensor = torch.arange(12, dtype=torch.int64).view(3, 4)
    save_file({"a": tensor}, path, metadata={"format": "pt"})
    (stored,) = tensors_in_file(path).values()
    assert (stored.dtype, stored.shape) == ("I64", (3, 4))
    raw = path.read_bytes()[stored.offset :]
    assert raw == tensor.numpy().tobytes()


def test_tensors_begin_at_multiples_of_eight(tmp_path: Path):
    for name in ("a", "ab", "abc", "abcdefgh"):
        raw = encode_safetensors_header({name: HeaderEntry("U8", (1,), 0, 1).as_json()})
        assert len(raw) % 8 == 0
        path = tmp_path / name
        path.write_bytes(raw)
        assert json.loads(read_raw_header(path)) == json.loads(raw[LENGTH_BYTES:])


@pytest.mark.parametrize(
    ("entries", "size", "problem"),
    [
        ({"a": HeaderEntry("F32", (2,), 0, 8)}, 7, "has 79 bytes; its tensors need 80"),
        ({"a": HeaderEntry("F32", (2,), 4, 12)}, 12, "overlap or leave gaps at byte 0"),
        ({"a": HeaderEntry("F32", (3,), 0, 8)}, 8, "shape and place do not agree"),
        ({"a": HeaderEntry("F3", (2,), 0, 8)}, 8, "shape and place do not agree"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    entries: dict[str, HeaderEntry], size: int, problem: str, tmp_path: Path
):
    path = write_file(tmp_path / "x.safetensors", entries, bytes(size))
    with pytest.raises(UserError, match=problem):
        tensors_in_file(path)


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_an_implausible_length_is_refused_before_the_header_is_read(length: int, tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(UserError, match="no safetensors file: its header claims"):
        read_raw_header(path)

"""The writer of kept files, and their checksums: the same however a file was written, another one after any change."""

from __future__ import annotations

import os
import random

import pytest

from moefold.checkpoint.keeper.checksums import PIECE_BYTES, file_checksum
from moefold.checkpoint.keeper.piece_writer import PieceWriter


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_a_file_written_in_any_parts_has_its_bytes_and_the_checksum_that_reading_gives(size: int):
    draw = random.Random(size)
    raw = draw.randbytes(size)
    file = os.memfd_create("test")
    os.pwrite(file, bytes(range(256)) * 40, PIECE_BYTES)  # it had another content, and another size
    writer = PieceWriter(file)
    begin = 0
    while begin < size:
        end = begin + draw.choice([1, 1000, PIECE_BYTES, PIECE_BYTES + 3])
        writer.write(raw[begin:end])
        begin = end
    checksum = writer.finish()
    assert os.pread(file, size + 1, 0) == raw
    assert file_checksum(file) == checksum
    if size:
        place = draw.randrange(size)
        os.pwrite(file, bytes([raw[place] ^ 1]), place)
        assert file_checksum(file) != checksum
    os.close(file)


def test_a_part_that_cannot_be_written_is_an_error_of_the_file():
    file = os.open(os.devnull, os.O_RDONLY)
    writer = PieceWriter(file)
    writer.write(b"bytes")
    with pytest.raises(OSError):
        writer.finish()
    os.close(file)

"""Every format gives the same documents, and what is damaged is named with its place."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import ipc, parquet

from moefold.config.errors import UserError
from moefold.data import readers
from moefold.data.entries import BadEntries, cut_behind, entry_documents
from moefold.data.megatron import read_megatron_index, write_megatron
from moefold.data.readers import Piece, cut_file, read_piece
from moefold.data.tokenizer import ByteTokenizer
from tests.data.test_documents import read, refusal

TEXTS = ["one\ntwo", "été 🐍", "", "four", "x" * 300] * 40
BYTES = ByteTokenizer()


def lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def write_table(path: Path, kind: str, texts: Any = TEXTS) -> None:
    table = pyarrow.table({"text": texts})
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=30)
        return
    make = ipc.new_file if kind == "file" else ipc.new_stream
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)


def write_zstd(path: Path, content: bytes) -> None:
    """Two frames, as concatenated files have."""
    half = len(content) // 2
    codec = pyarrow.Codec("zstd")
    frames = [codec.compress(part, asbytes=True) for part in (content[:half], content[half:])]
    path.write_bytes(b"".join(frames))


def write_format(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_bytes(lines())
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines()))
    elif name.endswith(".zst"):
        write_zstd(path, lines())
    elif name.endswith(".parquet"):
        write_table(path, "parquet")
    elif name.endswith(".arrow"):
        write_table(path, name.split("-")[0])
    else:
        write_megatron(path.with_suffix(""), [np.append(BYTES.encode(text), 0) for text in TEXTS], 256)
    return path


NAMES = ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.parquet", "file-x.arrow", "stream-x.arrow", "x.bin"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_documents_whole_and_in_pieces(name: str, tmp_path: Path):
    path = write_format(tmp_path, name)
    assert read(path) == TEXTS
    pieces = cut_file(path, 100)
    assert len(pieces) > 1 or name not in ("x.jsonl", "x.parquet")
    entries = [entry for piece in pieces for entry in read_piece(piece, "text")]
    bad = BadEntries(skips=False)
    found = [BYTES.decode(each.ids.tolist()) for entry in entries for each in entry_documents(entry, BYTES, bad)]
    assert found == TEXTS


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_pieces_of_lines_of_any_size_have_every_line_once(size: int, tmp_path: Path):
    path = tmp_path / "x.jsonl"
    texts = ["a", "bb", "", "dddddd" * 20]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert [entry for piece in cut_file(path, size) for entry in read_piece(piece, "text")] == texts


def test_a_saved_dataset_is_read_in_its_own_order_and_splits_are_named(tmp_path: Path):
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    write_table(folder / "data-1.arrow", "stream", ["first"])
    write_table(folder / "data-0.arrow", "stream", ["second"])
    write_table(folder / "cache-0.arrow", "stream", ["not part of it"])
    state = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    assert read(folder) == ["first", "second"]
    splits = tmp_path / "saved" / "dataset_dict.json"
    splits.write_text('{"splits": ["train"]}')
    assert read(folder.parent) == ["first", "second"]
    splits.write_text('{"splits": ["train", "test"]}')
    assert "holds the splits train, test; name one of them" in refusal(folder.parent)
    state["_data_files"] = [{"filename": "../../x.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    assert "names no Arrow files in its folder" in refusal(folder)


def test_token_ids_come_from_arrays_and_lists_and_are_cut_behind_end_tokens(tmp_path: Path):
    np.save(tmp_path / "row.npy", np.array([65, 66, 0, 67, 0, 0, 68], dtype=np.int32))
    assert read(tmp_path / "row.npy") == ["AB", "C", "", "D"]
    np.save(tmp_path / "rows.npy", np.array([[65, 66], [67, 68]], dtype=np.uint16))
    assert read(tmp_path / "rows.npy") == ["AB", "CD"]
    write_table(tmp_path / "ids.parquet", "parquet", [[65, 66], [67]])
    assert read(tmp_path / "ids.parquet") == ["AB", "C"]
    assert [part.tolist() for part in cut_behind(np.array([1, 9, 2, 9]), 9)] == [[1], [2]]


def test_objects_in_an_array_are_not_unpickled(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.array([object()], dtype=object), allow_pickle=True)
    assert "is no array of numbers" in refusal(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.ones(3))
    assert "float64" in refusal(tmp_path / "x.npy")


NUMPY_HEADER = b"\x93NUMPY\x01\x00\x76\x00"
DAMAGES: dict[str, tuple[bytes, str]] = {
    "x.npy": (NUMPY_HEADER + b"[" * 118, "x.npy is no array of numbers"),
    "y.npy": (b"", "y.npy is no array of numbers"),
    "x.jsonl": (b'{"text": "a"}\n{"text": 5}\n{"text": "c"}\nno\n\xff\n', "line 2 has the fields text"),
    "x.jsonl.gz": (gzip.compress(lines())[:-60], "x.jsonl.gz breaks off behind line"),
    "x.parquet": (b"PAR1 nonsense PAR1", "x.parquet cannot be read as Parquet"),
    "x.arrow": (b"ARROW1\0\0 nonsense", "x.arrow cannot be read as Arrow"),
    "x.txt": (b"caf\xe9", "offset 3"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_its_place_or_skipped_and_listed(name: str, tmp_path: Path):
    content, problem = DAMAGES[name]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert problem in message
    assert "--data.skip_bad true" in message
    skipped = BadEntries(skips=True)
    found = read(tmp_path / name, skipped=skipped)
    assert problem in skipped.problems[0]
    if name == "x.jsonl":
        assert found == ["a", "c"]
        assert [text.split(", ")[1].split(" ")[:2] for text in skipped.problems] == [["line", n] for n in "245"]


def test_a_bad_line_far_in_a_file_has_its_number_though_its_piece_begins_behind_many_lines(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n' * 500 + "bad\n")
    entries = list(read_piece(cut_file(path, 1000)[-1], "text"))
    assert "line 501 is not JSON" in str(entries[-1])


@pytest.mark.parametrize(("ids", "problem"), [([65, 300], "id 300 (at offset 1"), ([-1, 65], "id -1 (at offset 0")])
def test_ids_that_are_no_tokens_are_refused_with_their_place(ids: list[int], problem: str, tmp_path: Path):
    np.save(tmp_path / "x.npy", np.array([[65, 66], ids]))
    message = refusal(tmp_path / "x.npy")
    assert problem in message
    assert "x.npy, row 1" in message


def test_columns_and_rows_without_text_are_named(tmp_path: Path):
    write_table(tmp_path / "x.parquet", "parquet", ["a", None])
    assert "row 2 holds no value" in refusal(tmp_path / "x.parquet")
    assert 'has the columns text; expected a text in "body"' in refusal(tmp_path / "x.parquet", text_key="body")


def test_megatron_files_have_the_published_layout(tmp_path: Path):
    """Written by hand from the description of the format, and read back byte for byte."""
    write_megatron(tmp_path / "x", [np.array([1, 2, 3]), np.array([4])], 50_000)
    raw = (tmp_path / "x.idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    assert raw[9:18] == bytes([1, 0, 0, 0, 0, 0, 0, 0, 8])
    assert np.frombuffer(raw, "<u8", 2, 18).tolist() == [2, 3]
    assert np.frombuffer(raw, "<i4", 2, 34).tolist() == [3, 1]
    assert np.frombuffer(raw, "<i8", 5, 42).tolist() == [0, 6, 0, 1, 2]
    assert np.fromfile(tmp_path / "x.bin", "<u2").tolist() == [1, 2, 3, 4]
    (tmp_path / "x.idx").write_bytes(raw[:-4])
    with pytest.raises(UserError, match="breaks off at offset"):
        read_megatron_index(tmp_path / "x.idx")


def test_a_megatron_index_whose_numbers_lead_elsewhere_is_refused(tmp_path: Path):
    """Of two documents: the length and place of the second sequence, and where the second document begins."""
    write_megatron(tmp_path / "x", [np.array([65, 66]), np.array([67, 68])], 256)
    raw = (tmp_path / "x.idx").read_bytes()
    for place, kind, number, says in ((38, "<i4", -1, "has -1 tokens"), (50, "<i8", -4, "at offset -4")):
        value = np.array(number, kind).tobytes()
        (tmp_path / "x.idx").write_bytes(raw[:place] + value + raw[place + len(value) :])
        assert says in refusal(tmp_path / "x.bin")
    for number in (-1, 9, 1 << 60):
        (tmp_path / "x.idx").write_bytes(raw[:66] + np.array(number, "<i8").tobytes() + raw[74:])
        assert "documents that do not follow one another" in refusal(tmp_path / "x.bin")
    (tmp_path / "x.idx").write_bytes(raw)
    (tmp_path / "x.bin").write_bytes(b"")
    assert "expected at most 0" in refusal(tmp_path / "x.bin")


def test_an_arrow_file_whose_offsets_lead_out_of_it_is_a_bad_entry(tmp_path: Path):
    """Pyarrow would end the process, or read what is not of the file."""
    write_table(tmp_path / "x.arrow", "stream", ["abcdefgh"] * 4)
    raw = (tmp_path / "x.arrow").read_bytes()
    offsets = np.arange(0, 40, 8, dtype="<i4")
    place = raw.index(offsets.tobytes())
    offsets[3] = 50331648
    (tmp_path / "x.arrow").write_bytes(raw[:place] + offsets.tobytes() + raw[place + offsets.nbytes :])
    assert "x.arrow cannot be read behind row 0" in refusal(tmp_path / "x.arrow")


@pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz"])
def test_a_small_file_that_holds_much_in_one_text_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(readers, "LARGEST_TEXT", 1 << 20)
    (tmp_path / name).write_bytes(gzip.compress(b"x" * (2 << 20)))
    assert "more than 1 MiB" in refusal(tmp_path / name)


def test_a_megatron_document_beyond_its_data_is_a_bad_entry(tmp_path: Path):
    write_megatron(tmp_path / "x", [np.array([65, 66]), np.array([67, 68])], 256)
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:6])
    skipped = BadEntries(skips=True)
    assert read(tmp_path / "x.bin", skipped=skipped) == ["AB"]
    assert "document 1 ends at offset 8; expected at most 6" in skipped.problems[0]
    assert list(read_piece(Piece(tmp_path / "x.idx"), "text"))

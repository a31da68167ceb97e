"""Text from files, and refusals that name file, place and remedy."""

import bz2
import gzip
import json
import lzma
import sysconfig
from itertools import islice
from pathlib import Path

import pytest

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.documents import source_entries
from moefold.data.entries import BadEntries, entry_documents
from moefold.data.tokenizer import ByteTokenizer


def read(*files: Path | str, text_key: str = "text", skipped: BadEntries | None = None) -> list[str]:
    """The texts of files, through the tokens of bytes."""
    tokenizer = ByteTokenizer()
    bad = skipped or BadEntries(skips=False, prefix="data.files: ")
    data = DataConfig(source="files", files=tuple(map(str, files)), text_key=text_key)
    documents = [found.ids for entry in source_entries(data) for found in entry_documents(entry, tokenizer, bad)]
    return [tokenizer.decode(tokens.tolist()) for tokens in documents]


def refusal(*files: Path | str, text_key: str = "text") -> str:
    with pytest.raises(UserError) as refused:
        read(*files, text_key=text_key)
    return str(refused.value)


def test_text_files_are_documents_in_the_order_named(tmp_path: Path):
    for name, text in {"b.txt": "bee\n", "a.txt": "été 🐍", "c": "no suffix"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    named = [tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "c"]
    assert read(*named) == ["bee\n", "été 🐍", "no suffix"]


def test_a_folder_gives_its_text_files_sorted_and_passes_over_the_rest(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    for name in ("z.md", "a.py", "deep/m.txt", "image.png", "weights.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "l.jsonl").write_text('{"text": "line"}\n')
    assert read(tmp_path) == ["a.py", "deep/m.txt", "line", "z.md"]


def test_each_line_of_jsonl_is_a_document(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "one\\ntwo"}\r\n\n  \n{"other": 1, "text": "日本"}', encoding="utf-8")
    assert read(file) == ["one\ntwo", "日本"]
    file.write_text('{"body": "b"}\n')
    assert read(file, text_key="body") == ["b"]


def test_a_missing_file_is_refused_by_name_with_what_was_expected(tmp_path: Path):
    message = refusal(tmp_path / "absent.txt")
    assert "data.files: no file" in message
    assert "absent.txt" in message
    assert "expected a text or .jsonl file or a folder" in message


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_an_empty_file_is_refused_by_name(content: bytes, tmp_path: Path):
    (tmp_path / "empty.txt").write_bytes(content)
    assert "empty.txt is empty; expected text" in refusal(tmp_path / "empty.txt")
    assert "is empty; expected text" in refusal(tmp_path), "a folder of nothing else"


def test_an_empty_file_beside_others_in_a_folder_is_left_out(tmp_path: Path):
    (tmp_path / "__init__.py").write_text("\n")
    (tmp_path / "text.py").write_text("print(1)")
    assert read(tmp_path) == ["print(1)"]


def test_a_folder_without_text_is_refused_with_the_endings_looked_for(tmp_path: Path):
    assert all(ending in refusal(tmp_path) for ending in (".txt", ".md", ".py", ".jsonl", str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("x.txt", gzip.compress(b"some text", mtime=0), ("a gzip archive", "gzip -dk")),
        ("x.jsonl", bz2.compress(b"some text"), ("a bzip2 archive", "bzip2 -dk")),
        ("x.txt", lzma.compress(b"some text"), ("an xz archive", "xz -dk")),
        ("x", b"\x28\xb5\x2f\xfd more", ("a zstd archive", "zstd -d")),
        ("x.txt", b"PK\x03\x04 more", ("a zip archive", "unzip")),
        ("x.txt", b"PAR1 more PAR1", ("a Parquet file", ".parquet")),
        ("x.txt", b"ARROW1 more", ("an Arrow file", ".arrow")),
        ("x.pdf", b"%PDF-1.7", ("a PDF", "pdftotext")),
        ("x.txt", "text".encode("utf-16"), ("UTF-16", "iconv -f utf-16")),
        ("x.CSV", b"a,b\n1,2\n", ("a table with commas", ".jsonl")),
        ("x.tsv", b"a\tb\n1\t2\n", ("a table with tabs", ".jsonl")),
        ("x.bin", b"text\x00text", ("binary: byte 0x00 at offset 4",)),
    ],
)
def test_a_file_that_is_no_text_is_recognised_and_the_message_says_what_to_do(
    name: str, content: bytes, parts: tuple[str, ...], tmp_path: Path
):
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert all(part in message for part in (*parts, name, "expected UTF-8 text or .jsonl"))
    assert ("iconv" in message) == ("UTF-16" in message)


def test_a_file_that_is_not_utf8_is_refused_with_the_byte_and_its_place(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    message = refusal(tmp_path / "latin.txt")
    assert all(part in message for part in ("latin.txt", "0xe9", "offset 3", "iconv"))


@pytest.mark.parametrize("line", ["{", "[1,", "text", '{"text": }', "[" * 100_000])
def test_a_bad_json_line_is_refused_with_its_number(line: str, tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    message = refusal(file)
    assert f"{file}, line 3 is not JSON" in message
    assert "expected one object a line" in message


@pytest.mark.parametrize("record", [{"body": "b", "n": 1}, {"text": 5}, {"text": None}, {}, [], "text", 5, None])
def test_a_line_without_text_is_refused_with_its_number_and_the_key_to_set(record: object, tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "fine"}\n' + json.dumps(record) + "\n")
    message = refusal(file)
    assert f"{file}, line 2" in message
    assert 'expected a text in "text" (set data.text_key' in message
    if isinstance(record, dict):
        assert all(name in message for name in record)


UNREADABLE = {
    "a name too long": "a" * 5000,
    "the home of nobody": "~nobody-has-this-name/x.txt",
    "a NUL": "a\x00b.txt",
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_path_no_system_accepts_is_refused(what: str):
    assert "data.files" in refusal(UNREADABLE[what])


def test_the_standard_library_is_text_in_a_fixed_order():
    first, second = (islice(source_entries(DataConfig()), 50) for _ in range(2))
    texts = list(first)
    assert texts == list(second)
    assert any("import" in text for text in texts)
    assert texts[0] == Path(sysconfig.get_path("stdlib"), "__future__.py").read_text(), "by name; none comes before it"

"""`moefold data` as a person uses it: prepare, look, verify, export; refusals have exit code 2."""

from pathlib import Path

import pytest

from moefold.cli.main import run_command_line
from tests.support.prepared import varied_texts, write_jsonl


def say(capsys: pytest.CaptureFixture[str], *words: Path | str) -> tuple[int, str]:
    code = run_command_line(["data", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_text_is_prepared_described_verified_and_exported_and_comes_back_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_jsonl(tmp_path / "a.jsonl", varied_texts(400))
    out = tmp_path / "out"
    code, shown = say(capsys, "prepare", file, "--out", out, "--workers", "1", "--data.held_out", "0.1")
    assert code == 0
    assert f"--data.source prepared --data.files {out}" in shown
    code, described = say(capsys, "ls", out)
    assert described in shown
    assert say(capsys, "verify", out) == (0, f"sound: {out}\n{described}")
    code, shown = say(capsys, "export", out, "--out", tmp_path / "m")
    assert "documents to" in shown
    again = tmp_path / "again"
    say(capsys, "prepare", tmp_path / "m.bin", "--out", again, "--workers", "1", "--data.held_out", "0.1")
    say(capsys, "export", out, "--out", tmp_path / "held", "--side", "held_out")
    total = (tmp_path / "m.bin").stat().st_size + (tmp_path / "held.bin").stat().st_size
    assert total == 2 * sum(len(text) + 1 for text in varied_texts(400))
    assert say(capsys, "verify", again)[0] == 0


def test_a_document_is_shown_by_its_number_with_control_characters_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    texts = [*(f"text {number}" for number in range(80)), "2 lines\nand \x1b[2J"]
    file = write_jsonl(tmp_path / "a.jsonl", texts)
    say(capsys, "prepare", file, "--out", tmp_path / "out", "--workers", "1", "--data.held_out", "0.1")
    shown: list[str] = []
    for side in ("train", "held_out"):
        for number in range(90):
            options = ("--side", side, "--document", str(number), "--count", "1")
            code, text = say(capsys, "show", tmp_path / "out", *options)
            if code:
                assert f"has {number} documents; expected 0 to {number - 1}" in text
                break
            head, _, body = text.partition("\n")
            assert head.startswith(f"document {number}: ")
            shown.append(body)
    assert sorted(shown) == sorted(f"[[{text}NUL]]\n\n".replace("\x1b", "\\x1b") for text in texts)


def test_samples_are_shown_with_brackets_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join('{"prompt": "two and two: ", "response": "four"}' for _ in range(30)))
    code, shown = say(capsys, "show", file, "--data.format", "pairs", "--count", "1")
    assert (code, shown) == (0, "document 0: 18 tokens, 5 trained\ntwo and two: [[fourNUL]]\n\n")
    code, counted = say(capsys, "show", file, "--data.format", "pairs", "--count", "1", "--data.seq_len", "17")
    assert (code, counted) == (0, f"{shown}data.seq_len = 17 cuts 0 of 30 samples\n")
    say(capsys, "prepare", file, "--out", tmp_path / "out", "--workers", "1", "--data.format", "pairs")
    assert say(capsys, "show", tmp_path / "out", "--count", "1") == (0, shown)
    assert say(capsys, "verify", tmp_path / "out")[0] == 0
    code, shown = say(capsys, "export", tmp_path / "out", "--out", tmp_path / "m")
    assert code == 2
    assert "has masks of trained tokens, which Megatron's files do not hold" in shown


def test_damage_is_named_by_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_jsonl(tmp_path / "a.jsonl", varied_texts(100))
    say(capsys, "prepare", file, "--out", tmp_path / "out", "--workers", "1")
    shard = next((tmp_path / "out" / "train").glob("*.tokens"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    code, shown = say(capsys, "verify", tmp_path / "out")
    assert code == 2
    assert f"{shard}: bytes 0 to" in shown


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["prepare", "a.txt"], "needs --out"),
        (["prepare", "absent.txt", "--out", "o"], "no file absent.txt"),
        (["prepare", "a.txt", "--out", "o", "--data.tokeniser", "byte"], 'did you mean "data.tokenizer"'),
        (["prepare", "a.txt", "--out", "o", "--workers", "-1"], "--workers -1 is not legal"),
        (["show", "a.txt", "--document", "-1"], "--document -1 is not legal"),
        (["ls", "absent"], "holds no prepared data"),
        (["show", "absent.jsonl"], "no file absent.jsonl"),
        (["show", "a.txt", "--count", "0"], "--count 0 is not legal"),
        (["export", "a", "b", "--out", "o"], "takes one folder, found 2"),
        (["prepare", "--out", "o"], "names nothing"),
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]):
    code, shown = say(capsys, *words)
    assert code == 2
    assert problem in shown

"""Prepared folders: the same whatever the workers and interruptions; damage is found and named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moefold.config.errors import UserError
from moefold.data import prepare
from moefold.data.prepared_folder import PreparedIndex, content_digest, read_index
from moefold.data.shards import BLOCK_BYTES, Shard
from moefold.data.tokenizer import load_tokenizer
from tests.support.prepared import opened, prepared, small_sizes, varied_texts, write_jsonl


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_sizes(monkeypatch)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def documents(folder: Path, side: str) -> list[str]:
    index = read_index(folder)
    shards = [Shard(folder / side, facts, index.token_type) for facts in index.shards[side]]
    return [bytes(ids).decode().removesuffix("\0") for shard in shards for ids in shard.documents()]


def test_every_document_is_on_one_side_and_the_share_is_held_out(tmp_path: Path):
    texts = varied_texts(600)
    first = write_jsonl(tmp_path / "a.jsonl", texts[:500])
    second = write_jsonl(tmp_path / "b.jsonl", texts[500:])
    index = prepared(tmp_path / "out", first, second, held_out=0.2)
    train, held_out = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "held_out")
    assert sorted(train + held_out) == sorted(texts)
    assert index.tokens("held_out") / (index.tokens("train") + index.tokens("held_out")) == pytest.approx(0.2, abs=0.02)
    assert len(index.shards["train"]) > 10
    assert index.documents("train") == len(train)


def test_parallel_and_interrupted_preparations_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_jsonl(tmp_path / "a.jsonl", varied_texts(700))
    prepared(tmp_path / "once", file)
    finished = prepare.prepare_part
    done: list[int] = []

    def stop_in_the_third(job, number, part, tokenizer) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        finished(job, number, part, tokenizer)
        done.append(number)

    monkeypatch.setattr(prepare, "prepare_part", stop_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "twice", file)
    assert not (tmp_path / "twice" / "index.json").exists()
    (tmp_path / "twice" / "train" / "00002-000.tokens.partial").write_bytes(b"half")
    done[:] = [-1]
    monkeypatch.setattr(prepare, "prepare_part", finished)
    lines: list[str] = []
    job = prepare.PrepareJob(tmp_path / "twice", opened_data(file), 256)
    prepare.prepare_data(job, 1, lines.append)
    assert any("continuing: 2 of" in line for line in lines)
    (tmp_path / "twice" / "train" / "00002-000.tokens.partial").unlink(missing_ok=True)
    assert content(tmp_path / "twice") == content(tmp_path / "once")
    assert prepared(tmp_path / "once", file) == read_index(tmp_path / "once"), "a prepared folder stays as it is"


def opened_data(file: Path):
    from moefold.config.run import DataConfig

    return DataConfig(source="files", files=(str(file),), tokenizer="byte")


def test_two_workers_give_what_one_gives(tmp_path: Path):
    """Workers are processes of their own, which have the sizes of the package: parts are cut by the parent."""
    files = [write_jsonl(tmp_path / f"{name}.jsonl", varied_texts(150, name)) for name in "ab"]
    one = prepared(tmp_path / "one", *files)
    two = prepared(tmp_path / "two", *files, workers=2)
    assert one.plan == two.plan
    texts = [
        sorted(documents(tmp_path / name, "train") + documents(tmp_path / name, "held_out")) for name in ("one", "two")
    ]
    assert texts[0] == texts[1] == sorted(varied_texts(150, "a") + varied_texts(150, "b"))


def test_a_folder_of_something_else_is_not_written_to(tmp_path: Path):
    file = write_jsonl(tmp_path / "a.jsonl", varied_texts(50))
    prepared(tmp_path / "out", file)
    with pytest.raises(UserError, match="holds data of other sources"):
        prepared(tmp_path / "out", file, held_out=0.3)
    with pytest.raises(UserError, match="is not empty and holds no prepared data"):
        prepared(tmp_path, file)


def test_bad_lines_are_refused_by_name_or_listed(tmp_path: Path):
    file = write_jsonl(tmp_path / "a.jsonl", varied_texts(300))
    file.write_text(file.read_text() + "not json\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 301 is not JSON"):
        prepared(tmp_path / "out", file)
    shutil.rmtree(tmp_path / "out")
    index = prepared(tmp_path / "out", file, skip_bad=True)
    assert index.skipped == 1
    assert "line 301 is not JSON" in (tmp_path / "out" / "skipped.txt").read_text()
    assert index.documents("train") + index.documents("held_out") == 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepared(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", varied_texts(300)))
    return tmp_path / "out"


def read_everything(folder: Path) -> PreparedIndex:
    corpus, data = opened(folder)
    sequences = corpus.train_sequences(data, 1, 8)
    for number in range(sequences.windows):
        sequences.window(number)
    return corpus.sources[0].index


def test_a_flipped_bit_is_found_when_it_is_read_and_its_shard_named(folder: Path):
    read_everything(folder)
    shard = sorted((folder / "train").glob("*.tokens"))[3]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(UserError, match=rf"{shard.name}: bytes 0 to {min(len(raw), BLOCK_BYTES)} differ"):
        read_everything(folder)


@pytest.mark.parametrize("ending", ["tokens", "index"])
def test_absent_cut_and_changed_files_are_named(ending: str, folder: Path):
    file = sorted((folder / "train").glob(f"*.{ending}"))[1]
    raw = file.read_bytes()
    for content in (raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1]), None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UserError, match=file.name):
            read_everything(folder)


def test_a_changed_index_is_refused(folder: Path):
    index = folder / "index.json"
    sound = json.loads(index.read_text())
    del sound["sha256"]
    index.write_text(index.read_text().replace('"end": 0', '"end": 1'))
    with pytest.raises(UserError, match=r"index\.json differs from what was written"):
        read_index(folder)
    index.write_text("[]")
    with pytest.raises(UserError, match=r"differs from what was written"):
        read_index(folder)
    for change in (
        {"more": 1},
        {"dtype": "O"},
        {"end": "0"},
        {"shards": []},
        {"shards": {"train": [["../x", 1, 1, 1]], "held_out": []}},
    ):
        changed = {**sound, **change}
        index.write_text(json.dumps({**changed, "sha256": content_digest(changed)}))
        with pytest.raises(UserError, match=r"is no index of prepared data"):
            read_index(folder)
    index.unlink()
    with pytest.raises(UserError, match="holds no prepared data"):
        read_index(folder)


def test_data_of_another_tokenizer_or_share_is_refused_with_what_to_set(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"set data\.held_out to 0\.05"):
        opened(folder, held_out=0.1)
    with pytest.raises(UserError, match=r"hold \d+ tokens of side train; expected more than data\.seq_len"):
        opened(folder, seq_len=100_000)
    file = write_jsonl(tmp_path / "b.jsonl", varied_texts(50))
    data = opened_data(file)
    index = prepare.prepare_data(
        prepare.PrepareJob(tmp_path / "pairs", type(data)(**(data.__dict__ | {"tokenizer": "stdlib"})), 2000), 1, print
    )
    assert index.dtype == "<u2"
    assert json.loads((tmp_path / "pairs" / "tokenizer_config.json").read_text())["eos_token"]
    with pytest.raises(UserError, match="is not the tokenizer of"):
        opened(tmp_path / "pairs")
    own = load_tokenizer(str(tmp_path / "pairs" / "tokenizer.json"), 2000)
    shard = Shard(tmp_path / "pairs" / "train", index.shards["train"][0], np.dtype("<u2"))
    first = next(shard.documents())
    assert any(text.startswith(own.decode(first[:-1].tolist())) for text in varied_texts(50))
    assert first[-1] == own.end.id

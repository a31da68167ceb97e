"""Odd files of data and odd model folders for tests/support/fuzz_inputs.py: each case is a sound file with something
changed, read as a user has it read. A pickle in a file would leave a mark if it were opened."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moefold.cli.main import run_command_line
from moefold.data.megatron import write_megatron
from moefold.data.prepared_folder import content_digest
from tests.support.odd_bytes import change_somewhere, changed_bytes
from tests.support.prepared import prepared, varied_texts, write_jsonl

MARK = "code-was-run"
ODD_LINES = ["{", "[" * 5000, '{"text": 1}', '{"text": "\\ud800"}', '{"text": "\\u001b[2J"}', "9" * 5000, "null", '"x"']
ODD_LINES += [
    '{"text": "x", "text": "y"}',
    "NaN",
    '{"te\\u0000xt": "x"}',
    "\x00",
    '{"": {}}',
    '{"text": "' + "x" * 5000,
]
BOMB = bytes(64 << 20)  # of zeros, which compress to a thousandth


class Mark:
    """Makes a file when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.folder / MARK),)


def problem_of(words: Sequence[str], folder: Path) -> str:
    """What is wrong with how a command ends; empty for an answer or a refusal."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = run_command_line(words)
        except SystemExit as leaving:
            code = leaving.code
        except BaseException:
            return f"{words!r:.300}: {traceback.format_exc(limit=-3)}"
    if (folder / MARK).exists():
        return f"{words!r:.300}: code of a file was run"
    if code not in (0, 2) or not all(line.isprintable() for line in said.getvalue().splitlines()):
        return f"{words!r:.300}: code {code}: {said.getvalue()!r:.500}"
    return ""


# ---- data


def write_sound_data(folder: Path) -> None:
    """One file of each kind, and a prepared folder."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    texts = varied_texts(20)
    (folder / "a.txt").write_text("\n".join(texts))
    lines = write_jsonl(folder / "a.jsonl", texts).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.txt.gz").write_bytes(gzip.compress("\n".join(texts).encode()))
    for name in ("d.jsonl.zst", "e.txt.zst"):
        with pyarrow.output_stream(str(folder / name), compression="zstd") as stream:
            stream.write(lines)
    table = pyarrow.table({"text": texts, "ids": [[1, 2, number] for number in range(20)]})
    parquet.write_table(table, folder / "f.parquet", row_group_size=7)
    with pyarrow.OSFile(str(folder / "g.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pyarrow.OSFile(str(folder / "h.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    np.save(folder / "i.npy", np.arange(100, dtype="<u2"))
    np.save(folder / "j.npy", np.arange(100, dtype="<i4").reshape(10, 10))
    documents = [np.arange(number + 1) for number in range(9)]
    write_megatron(folder / "k", documents, 256)
    (folder / "parts").mkdir()
    web = folder / "parts" / "web"
    prepared(web, folder / "a.jsonl")
    shown = [*sorted(path for path in folder.iterdir() if path.is_file()), web]
    for path in shown:
        with contextlib.redirect_stdout(io.StringIO()):
            assert run_command_line(["data", "show", str(path)]) == 0, f"the sound {path.name} is refused"


def fuzz_data(folder: Path, chance: random.Random) -> str:
    sound = folder / "sound"
    if not sound.exists():
        write_sound_data(sound)
    shutil.rmtree(folder / "out", ignore_errors=True)
    kind = chance.randrange(12)
    if kind == 0:
        return fuzz_prepared(folder, sound / "parts" / "web", chance)
    if kind == 1:
        return problem_of(reading(odd_file(folder, chance), folder, chance), folder)
    files = sorted(path for path in sound.iterdir() if path.is_file())
    source = chance.choice(files)
    changed = folder / f"changed{''.join(source.suffixes)}"
    for pair in (changed.with_suffix(".bin"), changed.with_suffix(".idx")):
        pair.unlink(missing_ok=True)
    if source.suffix in (".bin", ".idx"):
        shutil.copy(source.with_suffix(".bin"), changed.with_suffix(".bin"))
        shutil.copy(source.with_suffix(".idx"), changed.with_suffix(".idx"))
    other = chance.choice(files) if chance.random() < 0.1 else source  # a name that does not fit
    changed.write_bytes(changed_bytes(other.read_bytes(), chance))
    return problem_of(reading(changed, folder, chance), folder)


def reading(path: Path, folder: Path, chance: random.Random) -> list[str]:
    keys = chance.choice([[], [], ["--data.text_key", "ids"], ["--data.format", "chat"]])
    if chance.random() < 0.3:
        return ["data", "show", str(path), *keys]
    skips = chance.choice([[], ["--data.skip_bad", "true"]])
    return ["data", "prepare", str(path), "--out", str(folder / "out"), "--workers", "1", *keys, *skips]


def odd_file(folder: Path, chance: random.Random) -> Path:
    """A file that is odd in what it means."""
    kind = chance.randrange(5)
    if kind == 0:
        path = folder / "odd.npy"
        np.save(path, np.array([Mark(folder)], dtype=object), allow_pickle=True)
    elif kind == 1:
        path = folder / "odd.txt.gz"
        path.write_bytes(gzip.compress(BOMB, 1))
    elif kind == 2:
        path = folder / chance.choice(
            ["odd.npy", "odd.parquet", "odd.arrow", "odd.jsonl", "odd.txt", "odd.gz", "odd.zst"]
        )
        path.write_bytes(pickle.dumps(Mark(folder)))
    else:
        path = folder / "odd.jsonl"
        lines = [*chance.choices(ODD_LINES, k=3), '{"text": "sound"}']
        path.write_text("\n".join(lines), errors="surrogatepass")
    return path


def fuzz_prepared(folder: Path, sound: Path, chance: random.Random) -> str:
    """A prepared folder with a changed file; its index is sealed again, so that what it says is read."""
    changed = folder / "prepared"
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(sound, changed)
    index = changed / "index.json"
    if chance.random() < 0.5:
        content = json.loads(index.read_text())
        del content["sha256"]
        change_somewhere(content, chance)
        content["sha256"] = content_digest(content)
        index.write_text(json.dumps(content))
    else:
        path = chance.choice(sorted(path for path in changed.rglob("*") if path.is_file()))
        path.write_bytes(changed_bytes(path.read_bytes(), chance))
    export = ["data", "export", str(changed), "--out", str(folder / "exported")]
    ways = [["data", "ls", str(changed)], ["data", "verify", str(changed)], ["data", "show", str(changed)], export]
    return problem_of(chance.choice(ways), folder)


# ---- folders of Hugging Face models


def write_sound_model(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from moefold.checkpoint.hf.config_json import config_json_for, family_for_model
    from moefold.presets.recipe import resolve_recipe

    small = ["--model.layers=2", "--model.hidden=32", "--model.moe.ffn=32", "--model.moe.experts=4"]
    model = resolve_recipe("tiny", small).model
    family = family_for_model(model)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json_for(family, model)))
    tensors = {name: torch.zeros(shape) for name, shape in family.name_table(model).written.items()}
    names = sorted(tensors)
    files = {name: f"model-{1 + (number % 2)}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "modeling.py").write_text(f"import os; os.mkdir({str(folder.parent / MARK)!r})")


def fuzz_model(folder: Path, chance: random.Random) -> str:
    """A model folder with a changed file, converted, which reads all of it."""
    sound = folder / "model"
    if not sound.exists():
        write_sound_model(sound)
        problem = problem_of(["convert", str(sound), str(folder / "same")], folder)
        assert not problem
        assert (folder / "same").is_dir(), "the sound model is refused"
    changed = folder / "changed-model"
    for path in (changed, folder / "converted"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sound, changed)
    path = chance.choice(sorted(changed.glob("*.json")) + sorted(changed.glob("*.safetensors")))
    change_model_file(path, folder, chance)
    dtype = chance.choice(["as_saved", "bf16", "fp8_block"])
    return problem_of(["convert", str(changed), str(folder / "converted"), "--dtype", dtype], folder)


def change_model_file(path: Path, folder: Path, chance: random.Random) -> None:
    """Change what a file says, or its bytes; a header of tensors gets its right length."""
    raw = path.read_bytes()
    kind = chance.randrange(3)
    if kind == 0:
        path.write_bytes(changed_bytes(raw, chance))
    elif kind == 1 and chance.random() < 0.1:
        path.write_bytes(pickle.dumps(Mark(folder)))
    elif path.suffix == ".json":
        content = json.loads(raw)
        if chance.random() < 0.2:
            content["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
        change_somewhere(content, chance)
        path.write_text(json.dumps(content))
    else:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change_somewhere(header, chance)
        written = json.dumps(header).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + raw[8 + length :])

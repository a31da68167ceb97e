"""Files arrive as they are, whatever their size and place in memory; checkpoints on anything that fsspec reaches are
committed by the manifest alone, found, verified, pruned, resumed."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.load import find, load, require
from moefold.checkpoint.manifest import MANIFEST, Damaged
from moefold.checkpoint.place import AT_ONCE, BLOCK, Place, make_folder, place_of, write_file
from moefold.checkpoint.save import save
from moefold.checkpoint.shelf import Keep, committed, newest, set_aside_after
from moefold.checkpoint.verify import verify
from moefold.cli.main import run
from moefold.config.refused import Refused
from moefold.layout.axes import alone
from tests.support.runs import SMALL, command, corpus


@pytest.fixture(params=["memory", "file"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(f"memory://{uuid.uuid4()}/run" if request.param == "memory" else f"file://{tmp_path}/run")


@pytest.mark.parametrize("shift", [0, 8], ids=["begins with a block", "begins within a block"])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5, AT_ONCE, 2 * AT_ONCE + BLOCK + 9])
def test_a_file_has_the_bytes_that_lay_in_memory(shelf: Place, tmp_path: Path, size: int, shift: int):
    room = torch.randint(256, (size + 2 * BLOCK,), dtype=torch.uint8)
    begin = -room.data_ptr() % BLOCK + shift
    raw = room[begin : begin + size].numpy().data
    (tmp_path / "file").write_bytes(b"x" * (size + 1))  # one that is there goes, also where it is longer
    write_file(tmp_path / "file", raw)
    assert (tmp_path / "file").read_bytes() == raw
    make_folder(shelf)
    write_file(shelf / "file", raw)
    assert (shelf / "file").read_bytes() == raw


def put(shelf: Place, step: int, keep: Keep | None = None) -> Place:
    tensors = {"weight": torch.full((7, 5), float(step)), "scalar": torch.tensor(step)}
    return save(shelf, step, tensors, {"step": step}, keep or Keep(9), alone())


def test_what_is_saved_there_is_found_verified_and_loaded(shelf: Place):
    assert find(shelf, alone(), str) is None
    for step in (1, 2, 10):
        put(shelf, step)
    assert [p.name for p in committed(shelf)] == ["step-00000010", "step-00000002", "step-00000001"]
    found = require(shelf, alone(), str)
    assert found.state == {"step": 10}
    target = {"weight": torch.zeros(7, 5), "scalar": torch.tensor(0)}
    load(found, target, set(), alone())
    assert (target["weight"] == 10).all()
    assert target["scalar"] == 10
    assert newest(shelf) == found.path
    assert str(found.path).endswith("run/step-00000010")
    assert "://" in str(found.path)


def test_the_last_ones_and_every_nth_are_kept(shelf: Place):
    for step in range(1, 8):
        put(shelf, step, Keep(2, 3))
    assert [p.name[-1] for p in committed(shelf)] == ["7", "6", "3"]
    set_aside_after(shelf, 3)
    assert [p.name[-1] for p in committed(shelf)] == ["3"]


def test_without_its_manifest_a_checkpoint_was_never_committed_and_is_written_anew(shelf: Place):
    put(shelf, 1)
    path = put(shelf, 2)
    path.files.rm(str((path / MANIFEST).path))  # pyright: ignore[reportAttributeAccessIssue]
    said: list[str] = []
    assert require(shelf, alone(), said.append).state["step"] == 1
    assert said == [], "it is not even damaged"
    put(shelf, 2)
    assert require(shelf, alone(), str).state["step"] == 2


def test_damage_is_noticed_and_the_one_before_is_taken(shelf: Place):
    put(shelf, 1)
    file = put(shelf, 2) / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    with file.open("wb") as opened:
        opened.write(raw)
    with pytest.raises(Damaged, match='"weight" has other values'):
        verify(file.parent)
    said: list[str] = []
    assert require(shelf, alone(), said.append).state["step"] == 1
    assert '"weight" has other values' in said[0]


@pytest.mark.parametrize("name", ["nosuch://x/y", "s3://bucket/run"])
def test_a_protocol_that_cannot_be_reached_is_refused_with_what_to_install(name: str):
    try:
        import s3fs  # noqa: F401  # pyright: ignore[reportMissingImports]

        pytest.skip("s3 can be reached here") if name.startswith("s3") else None
    except ImportError:
        pass
    with pytest.raises(Refused, match="cannot be reached") as refused:
        place_of(name)
    assert "\n" not in str(refused.value)
    assert run(["ckpt", "ls", name]) == 2


def test_a_run_saves_there_and_resumes_from_there(tmp_path: Path):
    where = f"file://{tmp_path}/bucket/run"
    argv = ["train", "tiny", *SMALL, *corpus(tmp_path), "--out", str(tmp_path / "run"), "--checkpoint.path", where]
    argv += ["--checkpoint.every", "2", "--train.sample_tokens", "0"]
    code, output = command([*argv, "--train.steps", "4"], tmp_path / "log")
    assert code == 0, output
    assert not (tmp_path / "run" / "checkpoints").exists()
    code, output = command([*argv, "--train.steps", "5", "--resume", "auto"], tmp_path / "log")
    assert code == 0, output
    assert f"resumed from {where}/step-00000004 at step 4" in output
    assert newest(place_of(where)).name == "step-00000005"

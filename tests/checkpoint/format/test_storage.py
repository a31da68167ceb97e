"""Files arrive as they are, whatever their size and place in memory; checkpoints on anything that fsspec reaches are
committed by the manifest alone, found, verified, pruned, resumed."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from moefold.checkpoint.format.manifest import MANIFEST_FILE, DamagedCheckpoint
from moefold.checkpoint.format.retention import (
    RetentionPolicy,
    committed_checkpoints,
    newest_checkpoint,
    retire_later_checkpoints,
)
from moefold.checkpoint.format.storage import (
    DISK_BLOCK,
    WRITE_BYTES,
    StoragePath,
    create_folder,
    parse_storage_path,
    write_synced_file,
)
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.live.load import find_checkpoint, load_checkpoint, require_checkpoint
from moefold.checkpoint.live.save import save_checkpoint
from moefold.cli.main import run_command_line
from moefold.config.errors import UserError
from moefold.layout.axes import single_rank_world
from tests.support.runs import SMALL, command, corpus


@pytest.fixture(params=["memory", "file"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    return parse_storage_path(f"memory://{uuid.uuid4()}/run" if request.param == "memory" else f"file://{tmp_path}/run")


@pytest.mark.parametrize("shift", [0, 8], ids=["begins with a block", "begins within a block"])
@pytest.mark.parametrize(
    "size", [0, 1, DISK_BLOCK - 1, DISK_BLOCK, 3 * DISK_BLOCK + 5, WRITE_BYTES, 2 * WRITE_BYTES + DISK_BLOCK + 9]
)
def test_a_file_has_the_bytes_that_lay_in_memory(shelf: StoragePath, tmp_path: Path, size: int, shift: int):
    room = torch.randint(256, (size + 2 * DISK_BLOCK,), dtype=torch.uint8)
    begin = -room.data_ptr() % DISK_BLOCK + shift
    raw = room[begin : begin + size].numpy().data
    (tmp_path / "file").write_bytes(b"x" * (size + 1))  # one that is there goes, also where it is longer
    write_synced_file(tmp_path / "file", raw)
    assert (tmp_path / "file").read_bytes() == raw
    create_folder(shelf)
    write_synced_file(shelf / "file", raw)
    assert (shelf / "file").read_bytes() == raw


def put(shelf: StoragePath, step: int, keep: RetentionPolicy | None = None) -> StoragePath:
    tensors = {"weight": torch.full((7, 5), float(step)), "scalar": torch.tensor(step)}
    return save_checkpoint(shelf, step, tensors, {"step": step}, keep or RetentionPolicy(9), single_rank_world())


def test_what_is_saved_there_is_found_verified_and_loaded(shelf: StoragePath):
    assert find_checkpoint(shelf, single_rank_world(), str) is None
    for step in (1, 2, 10):
        put(shelf, step)
    assert [p.name for p in committed_checkpoints(shelf)] == ["step-00000010", "step-00000002", "step-00000001"]
    found = require_checkpoint(shelf, single_rank_world(), str)
    assert found.state == {"step": 10}
    target = {"weight": torch.zeros(7, 5), "scalar": torch.tensor(0)}
    load_checkpoint(found, target, set(), single_rank_world())
    assert (target["weight"] == 10).all()
    assert target["scalar"] == 10
    assert newest_checkpoint(shelf) == found.path
    assert str(found.path).endswith("run/step-00000010")
    assert "://" in str(found.path)


def test_the_last_ones_and_every_nth_are_kept(shelf: StoragePath):
    for step in range(1, 8):
        put(shelf, step, RetentionPolicy(2, 3))
    assert [p.name[-1] for p in committed_checkpoints(shelf)] == ["7", "6", "3"]
    retire_later_checkpoints(shelf, 3)
    assert [p.name[-1] for p in committed_checkpoints(shelf)] == ["3"]


def test_without_its_manifest_a_checkpoint_was_never_committed_and_is_written_anew(shelf: StoragePath):
    put(shelf, 1)
    path = put(shelf, 2)
    path.files.rm(str((path / MANIFEST_FILE).path))  # pyright: ignore[reportAttributeAccessIssue]
    said: list[str] = []
    assert require_checkpoint(shelf, single_rank_world(), said.append).state["step"] == 1
    assert said == [], "it is not even damaged"
    put(shelf, 2)
    assert require_checkpoint(shelf, single_rank_world(), str).state["step"] == 2


def test_damage_is_noticed_and_the_one_before_is_taken(shelf: StoragePath):
    put(shelf, 1)
    file = put(shelf, 2) / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    with file.open("wb") as opened:
        opened.write(raw)
    with pytest.raises(DamagedCheckpoint, match='"weight" has other values'):
        verify_checkpoint(file.parent)
    said: list[str] = []
    assert require_checkpoint(shelf, single_rank_world(), said.append).state["step"] == 1
    assert '"weight" has other values' in said[0]


@pytest.mark.parametrize("name", ["nosuch://x/y", "s3://bucket/run"])
def test_a_protocol_that_cannot_be_reached_is_refused_with_what_to_install(name: str):
    try:
        import s3fs  # noqa: F401  # pyright: ignore[reportMissingImports]

        pytest.skip("s3 can be reached here") if name.startswith("s3") else None
    except ImportError:
        pass
    with pytest.raises(UserError, match="cannot be reached") as refused:
        parse_storage_path(name)
    assert "\n" not in str(refused.value)
    assert run_command_line(["ckpt", "ls", name]) == 2


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
    assert newest_checkpoint(parse_storage_path(where)).name == "step-00000005"


def test_a_link_among_checkpoints_is_left_alone_and_denies_none_that_is_written(tmp_path: Path):
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere" / "step-00000001"
    elsewhere.mkdir(parents=True)
    (elsewhere / "kept").write_text("by another run")
    run.mkdir()
    (run / "step-00000001").symlink_to(elsewhere)
    for step in (2, 3, 4):
        put(run, step, RetentionPolicy(1))
    assert sorted(path.name for path in run.iterdir()) == ["latest", "step-00000001", "step-00000004"]
    assert (elsewhere / "kept").exists()


def test_what_stands_in_the_place_of_the_latest_link_denies_no_checkpoint(tmp_path: Path):
    for name in ("latest", "latest.tmp"):
        (tmp_path / name / "inside").mkdir(parents=True)
    assert (Path(str(put(tmp_path, 2))) / "manifest.json").exists()

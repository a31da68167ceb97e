"""A changed byte is always noticed, and nothing in a checkpoint can run code."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import moefold
from moefold.checkpoint.format.ledger import compare_ledgers
from moefold.checkpoint.format.manifest import (
    CHECKPOINT_FORMAT,
    LEDGER_FILE,
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    canonical_json,
    seal_manifest,
    unseal_manifest,
)
from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.verify import verify_checkpoint
from moefold.checkpoint.live.load import find_checkpoint, load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import TensorPart, as_tensor_part, collect_tensors
from moefold.checkpoint.live.save import save_checkpoint
from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig
from moefold.layout.axes import create_world
from moefold.optim.optimizer import build_optimizer
from moefold.presets.recipe import resolve_recipe
from moefold.shard.buckets import fill_buckets
from moefold.train.assemble import build_model, choose_kernels, resolve_auto_values

ALONE = create_world(0, 1, torch.device("cpu"), ParallelConfig())
SMALL = [
    "--model.layers=2",
    "--model.hidden=16",
    "--model.attention.heads=2",
    "--model.attention.kv_heads=1",
    "--model.attention.head_dim=8",
    "--model.moe.experts=4",
    "--model.moe.ffn=16",
    "--train.precision=bf16",
    "--train.device=cpu",
]


def model_tensors(seed: int = 1) -> dict[str, torch.Tensor | TensorPart]:
    """The state of a real, small model in bf16 with its optimizer."""
    config = resolve_auto_values(resolve_recipe("tiny", [*SMALL, f"--train.seed={seed}"]), ALONE)
    kernels = choose_kernels(config, ALONE)
    model = build_model(config, ALONE, kernels)
    return collect_tensors(model, build_optimizer(fill_buckets(model, ALONE), config.optim, kernels))


def same(a: torch.Tensor | TensorPart, b: torch.Tensor | TensorPart) -> bool:
    pairs = zip(as_tensor_part(a).held, as_tensor_part(b).held, strict=True)
    return all(mine.box == other.box and torch.equal(mine.read(), other.read()) for mine, other in pairs)


def ignore(_: str) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoints", step, model_tensors(step), {"step": step}, RetentionPolicy(5), ALONE)
    return tmp_path / "checkpoints"


def is_passed_over(folder: Path) -> None:
    """Step 2 is damaged, is said to be, and step 1 is found and loads."""
    with pytest.raises(DamagedCheckpoint):
        verify_checkpoint(folder / "step-00000002")
    said: list[str] = []
    found = find_checkpoint(folder, ALONE, said.append)
    assert found is not None
    assert found.path.name == "step-00000001"
    assert len(said) == 1
    assert str(folder / "step-00000002") in said[0]
    assert "damaged" in said[0]


def test_fifty_flipped_bits_are_noticed_fifty_times_and_the_checkpoint_before_is_taken(folder: Path):
    files = sorted((folder / "step-00000002").iterdir())
    assert [f.name for f in files] == ["ledger.json", "manifest.json", "rank-00000.safetensors", "state.json"]
    chance = random.Random(50)
    for _ in range(50):
        file = chance.choice(files)
        before = file.read_bytes()
        place, bit = chance.randrange(len(before)), chance.randrange(8)
        changed = bytearray(before)
        changed[place] ^= 1 << bit
        file.write_bytes(changed)
        is_passed_over(folder)
        file.write_bytes(before)
    assert verify_checkpoint(folder / "step-00000002").manifest["step"] == 2


def test_every_single_bit_of_a_manifest_matters():
    raw = seal_manifest({"format": CHECKPOINT_FORMAT, "step": 2, "files": {"a": {"bytes": 12, "sha256": "0a1b"}}})
    assert unseal_manifest(raw)["step"] == 2
    for place in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[place] ^= 1 << bit
            with pytest.raises(DamagedCheckpoint):
                unseal_manifest(bytes(changed))


def damages() -> dict[str, Callable[[Path], Any]]:
    data, ledger, state, manifest = "rank-00000.safetensors", "ledger.json", "state.json", "manifest.json"

    def truncate(name: str, to: Callable[[int], int]) -> Callable[[Path], Any]:
        return lambda path: os.truncate(path / name, to((path / name).stat().st_size))

    def write(name: str, text: str) -> Callable[[Path], Any]:
        return lambda path: (path / name).write_text(text)

    def folder_instead(path: Path) -> None:
        (path / data).unlink()
        (path / data).mkdir()

    def swap(path: Path) -> None:
        shutil.copy(path.parent / "step-00000001" / data, path / data)

    everything = (data, ledger, state, manifest)
    return {
        **{f"{n} is gone": lambda path, n=n: (path / n).unlink() for n in everything},
        **{f"{n} is empty": truncate(n, lambda _: 0) for n in everything},
        **{f"{n} lacks its last byte": truncate(n, lambda size: size - 1) for n in everything},
        **{f"{n} is half": truncate(n, lambda size: size // 2) for n in everything},
        **{f"{n} has a byte more": lambda path, n=n: (path / n).open("ab").write(b" ") for n in everything},
        **{
            f"the manifest is {text[:9]}": write(manifest, text)
            for text in ("[]", "null", "{}", "17", '"text"', "[" * 10**5)
        },
        "the manifest is not UTF-8": lambda path: (path / manifest).write_bytes(b"\xff\xfe\x00"),
        "a folder stands for a file": folder_instead,
        "the data are those of another checkpoint": swap,
    }


@pytest.mark.parametrize("damage", damages())
def test_any_damage_is_noticed_and_the_checkpoint_before_is_taken(damage: str, folder: Path):
    damages()[damage](folder / "step-00000002")
    is_passed_over(folder)


def test_if_all_are_damaged_each_is_named_and_nothing_is_loaded(folder: Path):
    for step in (1, 2):
        os.truncate(folder / f"step-0000000{step}" / "state.json", 3)
    with pytest.raises(UserError) as refused:
        find_checkpoint(folder, ALONE, ignore)
    assert len(str(refused.value).splitlines()) == 3
    assert all(f"step-0000000{step}" in str(refused.value) for step in (1, 2))


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest as somebody would who knows how it is sealed."""
    content = unseal_manifest((path / MANIFEST_FILE).read_bytes())
    change(content)
    (path / MANIFEST_FILE).write_bytes(seal_manifest(content))


def header(raw: bytes) -> bytes:
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


def reseal(path: Path, *names: str) -> None:
    """Make the manifest agree with files that were replaced."""

    def renew(content: dict[str, Any]) -> None:
        for name in names:
            raw = (path / name).read_bytes()
            vouched = header(raw) if name.endswith(".safetensors") else raw
            content["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(vouched).hexdigest()}

    rewrite_manifest(path, renew)


@pytest.mark.parametrize("size", [float("inf"), -float("inf"), float("nan"), 1e400, "1e999", None, [], 10**400])
def test_a_resealed_manifest_with_an_impossible_size_is_damaged(size: Any, folder: Path):
    path = folder / "step-00000002"
    rewrite_manifest(path, lambda content: content["files"]["rank-00000.safetensors"].update(bytes=size))
    with pytest.raises(DamagedCheckpoint):
        verify_checkpoint(path)


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb", "\x1b[2J", "a\nb"])
def test_a_resealed_manifest_with_a_name_that_no_terminal_shows_is_damaged_and_printable(name: str, folder: Path):
    path = folder / "step-00000002"
    rewrite_manifest(path, lambda content: content["files"].update({name: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(DamagedCheckpoint) as damage:
        verify_checkpoint(path)
    assert str(damage.value).isprintable()


@pytest.mark.parametrize("name", ["../x", "../../x", "a/../../x", "/etc/passwd", "..", ".", "", "x\0y", "sub/x"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, folder: Path):
    path = folder / "step-00000002"
    outside = folder / "x"
    outside.write_text("outside")
    (folder.parent / "x").write_text("outside")
    (path / "sub").mkdir()
    (path / "sub" / "x").write_text("outside")
    entry = {"bytes": 7, "sha256": hashlib.sha256(b"outside").hexdigest()}
    rewrite_manifest(path, lambda content: content["files"].update({name: entry}))
    is_passed_over(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("files"),
        lambda content: content["files"].clear(),
        lambda content: content["files"].pop(LEDGER_FILE),
        lambda content: content["files"].pop(STATE_FILE),
        lambda content: content["files"]["state.json"].pop("bytes"),
    ],
    ids=["no files", "empty files", "no ledger", "no state", "no size"],
)
def test_a_sealed_manifest_that_lacks_what_a_checkpoint_needs_is_damaged(change, folder: Path):
    rewrite_manifest(folder / "step-00000002", change)
    with pytest.raises(DamagedCheckpoint):
        verify_checkpoint(folder / "step-00000002")


def test_another_format_is_named(folder: Path):
    rewrite_manifest(folder / "step-00000002", lambda content: content.update(format="moefold checkpoint 9"))
    with pytest.raises(DamagedCheckpoint, match="moefold checkpoint 9"):
        verify_checkpoint(folder / "step-00000002")


class Payload:
    """Unpickling this makes a folder."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """Where the payload would leave its mark. First that it would at all, in the end that it did not."""
    place = tmp_path / "the payload ran"
    pickle.loads(pickle.dumps(Payload(place)))
    assert place.exists()
    place.rmdir()
    yield place
    assert not place.exists(), "code from a checkpoint ran"


def test_a_malicious_metadata_beside_a_good_checkpoint_is_not_opened(folder: Path, marker: Path):
    path = folder / "step-00000002"
    (path / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    found = require_checkpoint(folder, ALONE, ignore)
    assert found.path == path
    target = model_tensors(seed=9)
    load_checkpoint(found, target, set(), ALONE)
    expected = model_tensors(seed=2)
    assert all(same(target[name], expected[name]) for name in expected)


def foreign(place: Path, marker: Path) -> None:
    """A checkpoint that torch itself wrote, with a table that attacks whoever reads it."""
    dcp.save({"weight": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    assert (place / ".metadata").exists()
    (place / ".metadata").write_bytes(pickle.dumps(Payload(marker)))


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_torchs_own_reader_would_have_run_the_payload(tmp_path: Path):
    mark = tmp_path / "mark"
    foreign(tmp_path / "foreign", mark)
    with pytest.raises(CheckpointException):
        dcp.load({"weight": torch.ones(3)}, storage_reader=dcp.FileSystemReader(tmp_path / "foreign"), no_dist=True)
    assert mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_foreign_checkpoint_is_refused_without_being_opened(tmp_path: Path, marker: Path):
    foreign(tmp_path / "foreign", marker)
    assert find_checkpoint(tmp_path / "foreign", ALONE, ignore) is None
    with pytest.raises(UserError, match="pickled files, which moefold never opens"):
        require_checkpoint(tmp_path / "foreign", ALONE, ignore)


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_foreign_checkpoint_among_good_ones_is_passed_over(folder: Path, marker: Path):
    shutil.rmtree(folder / "step-00000002")
    foreign(folder / "step-00000002", marker)
    is_passed_over(folder)


def write_pickle(file: Path, marker: Path) -> None:
    file.write_bytes(pickle.dumps(Payload(marker)))


def write_torch_save(file: Path, marker: Path) -> None:
    torch.save({"weights": Payload(marker)}, file)


PICKLES = {"pickle": write_pickle, "torch.save": write_torch_save}


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "ledger.json", "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_in_place_of_a_file_is_damage(kind: str, name: str, folder: Path, marker: Path):
    PICKLES[kind](folder / "step-00000002" / name, marker)
    is_passed_over(folder)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "ledger.json", "state.json"])
@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_whose_digest_was_put_into_the_manifest_runs_nothing_either(kind, name, folder: Path, marker: Path):
    path = folder / "step-00000002"
    PICKLES[kind](path / name, marker)
    reseal(path, name)
    with pytest.raises(UserError):
        load_checkpoint(require_checkpoint(path, ALONE, ignore), model_tensors(), set(), ALONE)


def test_tensors_that_cannot_be_read_are_refused_in_a_line(folder: Path, marker: Path):
    path = folder / "step-00000002"
    write_pickle(path / "rank-00000.safetensors", marker)
    reseal(path, "rank-00000.safetensors")
    with pytest.raises(UserError, match="is no safetensors file"):
        load_checkpoint(require_checkpoint(path, ALONE, ignore), model_tensors(), set(), ALONE)


def edit_ledger(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the ledger, and the manifest with it."""
    content = json.loads((path / LEDGER_FILE).read_text())
    change(content["tensors"])
    (path / LEDGER_FILE).write_text(json.dumps(content))
    reseal(path, LEDGER_FILE)


FIRST = "model.embedding.weight"
ABSURD = {
    "a dtype that is no number": {"dtype": "bytes"},
    "a function for a dtype": {"dtype": "load"},
    "a shape beyond all memory": {"shape": [1 << 50, 1 << 50]},
    "a negative shape": {"shape": [-1, 4]},
    "a shape of text": {"shape": ["4", "4"]},
    "true for a size": {"shape": [True]},
    "a shape that is a number": {"shape": 4},
    "experts for a tensor of another size": {"experts": ["00", "00"], "shape": [3, 4]},
    "a number for a name of experts": {"experts": 7},
}


@pytest.mark.parametrize("absurdity", ABSURD)
def test_a_ledger_that_makes_no_sense_is_refused_in_a_line(absurdity: str, folder: Path, marker: Path):
    """torch's format knows byte items, which are pickles; this one has no way to say so."""
    edit_ledger(folder / "step-00000002", lambda tensors: tensors[FIRST].update(ABSURD[absurdity]))
    with pytest.raises(DamagedCheckpoint) as damaged:
        verify_checkpoint(folder / "step-00000002")
    assert "\n" not in str(damaged.value)
    is_passed_over(folder)


def rewrite(path: Path, change: Callable[[dict[str, Any], bytearray], Any]) -> None:
    """Change the file of tensors, header and values, and the manifest with it."""
    file = path / "rank-00000.safetensors"
    raw = file.read_bytes()
    entries, data = json.loads(header(raw)), bytearray(raw[8 + len(header(raw)) :])
    change(entries, data)
    new = json.dumps(entries).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + data)
    reseal(path, file.name)


def bytes_at(entries: dict[str, Any], name: str) -> tuple[int, int]:
    return tuple(entries[name]["data_offsets"])


def swap_experts(entries: dict[str, Any], data: bytearray) -> None:
    """Experts 1 and 3 of four, in one tensor."""
    first, last = bytes_at(entries, f"{DOWN}@0,0,0")
    size = (last - first) // 4
    one, three = (slice(first + e * size, first + (e + 1) * size) for e in (1, 3))
    data[one], data[three] = data[three], data[one]


def drop_expert(entries: dict[str, Any], data: bytearray) -> None:
    """The last of four, and its bytes."""
    first, last = bytes_at(entries, f"{DOWN}@0,0,0")
    size = (last - first) // 4
    del data[last - size : last]
    entries[f"{DOWN}@0,0,0"]["shape"][0] = 3
    entries[f"{DOWN}@0,0,0"]["data_offsets"][1] -= size
    for entry in entries.values():
        if entry["data_offsets"][0] >= last:
            entry["data_offsets"] = [n - size for n in entry["data_offsets"]]


def rename(entries: dict[str, Any], data: bytearray) -> None:
    entries[f"{FIRST}s@0,0"] = entries.pop(f"{FIRST}@0,0")


def flip(entries: dict[str, Any], data: bytearray) -> None:
    first, last = bytes_at(entries, f"{DOWN}@0,0,0")
    data[first + 2 * (last - first) // 4] ^= 1


def retype(entries: dict[str, Any], data: bytearray) -> None:
    entries[f"{FIRST}@0,0"]["dtype"] = "F16"


DOWN = "model.blocks.0.moe.experts.down"
EDITS = {
    "swapped experts": (swap_experts, f'"{DOWN}": experts 1 and 3 are swapped'),
    "a dropped expert": (drop_expert, f'"{DOWN}": expert 3 is missing'),
    "a renamed key": (rename, f'"{FIRST}" is now called "{FIRST}s"'),
    "a flipped bit": (flip, f'"{DOWN}": expert 2 has other values'),
    "another dtype": (retype, f'"{FIRST}" is float16; expected bfloat16'),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_was_done_to_the_tensors_is_told_by_name(edit: str, folder: Path):
    """Whoever did it made the manifest agree; the ledger does not."""
    change, told = EDITS[edit]
    path = folder / "step-00000002"
    rewrite(path, change)
    with pytest.raises(DamagedCheckpoint) as damaged:
        verify_checkpoint(path)
    assert damaged.value.problems == (told,)
    said: list[str] = []
    found = find_checkpoint(folder, ALONE, said.append)
    assert found is not None
    assert found.path.name == "step-00000001"
    assert told in said[0]
    with pytest.raises(UserError, match="is damaged") as refused:
        require_checkpoint(path, ALONE, ignore)
    assert told in str(refused.value)


def resave(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A checkpoint that some tool wrote anew, with a ledger that agrees with what it holds."""
    tensors = {name: torch.cat([h.read().flatten() for h in as_tensor_part(t).held]).view(as_tensor_part(t).shape)
               for name, t in model_tensors(2).items()}  # fmt: skip
    change(tensors)
    stacked = {
        name: TensorPart(tuple(t.shape), t.dtype, as_tensor_part(t).held, ".experts." in name)
        for name, t in tensors.items()
    }
    return Path(str(save_checkpoint(path, 2, stacked, {"step": 2}, RetentionPolicy(5), ALONE)))


def without_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN][[0, 2, 3]]


def with_swapped_experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN][[0, 3, 2, 1]]


def with_another_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST + "s"] = tensors.pop(FIRST)


TOOLS = {
    "drops an expert": (without_expert, f'"{DOWN}": expert 1 is missing', f'"{DOWN}" is bfloat16 [3, 16, 16]'),
    "swaps experts": (with_swapped_experts, f'"{DOWN}": experts 1 and 3 are swapped', None),
    "renames a key": (with_another_name, f'"{FIRST}" is now called "{FIRST}s"', f'(did you mean "{FIRST}s"?)'),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_changed_in_a_sound_checkpoint_is_told_by_comparing_and_by_loading(tool, folder, tmp_path: Path):
    change, told, refused_with = TOOLS[tool]
    made = resave(tmp_path / "tool", change)
    texts = [
        each.text
        for each in compare_ledgers(verify_checkpoint(folder / "step-00000002").ledger, verify_checkpoint(made).ledger)
    ]
    assert told in texts
    assert all(DOWN in text or FIRST in text for text in texts)
    if refused_with:
        with pytest.raises(UserError) as refused:
            load_checkpoint(require_checkpoint(made, ALONE, ignore), model_tensors(), set(), ALONE)
        assert refused_with in str(refused.value)


def move_far(entries: dict[str, Any], data: bytearray) -> None:
    entries[f"{FIRST}@{1 << 60},0"] = entries.pop(f"{FIRST}@0,0")


def lose_a_dim(entries: dict[str, Any], data: bytearray) -> None:
    entry = entries.pop(f"{FIRST}@0,0")
    entries[f"{FIRST}@0"] = entry | {"shape": [entry["shape"][0] * entry["shape"][1]]}


def clash(entries: dict[str, Any], data: bytearray) -> None:
    entries[f"{FIRST}@0,0,0"] = entries.pop(f"{DOWN}@0,0,0")


def lose_its_place(entries: dict[str, Any], data: bytearray) -> None:
    entries[FIRST] = entries.pop(f"{FIRST}@0,0")


def have_a_strange_place(entries: dict[str, Any], data: bytearray) -> None:
    entries[f"{FIRST}@a,b"] = entries.pop(f"{FIRST}@0,0")


def be_of_a_strange_dtype(entries: dict[str, Any], data: bytearray) -> None:
    entries[f"{FIRST}@0,0"]["dtype"] = "U16"


@pytest.mark.parametrize(
    "edit", [move_far, lose_a_dim, clash, lose_its_place, have_a_strange_place, be_of_a_strange_dtype]
)
def test_chunks_that_make_no_sense_are_refused_at_once_with_their_name(edit, folder: Path):
    rewrite(folder / "step-00000002", edit)
    with pytest.raises(DamagedCheckpoint) as damaged:
        verify_checkpoint(folder / "step-00000002")
    assert FIRST in str(damaged.value) or "U16" in str(damaged.value)
    is_passed_over(folder)


def test_a_ledger_that_claims_far_more_than_there_is_is_refused_at_once(folder: Path):
    edit_ledger(folder / "step-00000002", lambda tensors: tensors[FIRST].update({"shape": [1 << 39, 16]}))
    with pytest.raises(DamagedCheckpoint, match=f'"{FIRST}" has shape'):
        verify_checkpoint(folder / "step-00000002")


def test_a_link_in_place_of_a_file_is_refused(folder: Path, tmp_path: Path):
    path = folder / "step-00000002"
    for name in ("rank-00000.safetensors", "ledger.json", "state.json", "manifest.json"):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        is_passed_over(folder)
        (path / name).unlink()
        (tmp_path / name).rename(path / name)
    assert verify_checkpoint(path)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, (1 << 63) + 5])
def test_an_absurd_length_of_a_header_is_refused_in_a_line(length: int, folder: Path):
    file = folder / "step-00000002" / "rank-00000.safetensors"
    raw = file.read_bytes()
    file.write_bytes(length.to_bytes(8, "little") + raw[8:])
    is_passed_over(folder)


def test_a_link_where_a_checkpoint_is_to_be_written_is_not_followed(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000002.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot write"):
        save_checkpoint(tmp_path / "run", 2, model_tensors(), {"step": 2}, RetentionPolicy(1), ALONE)
    assert [f.name for f in (tmp_path / "elsewhere").iterdir()] == ["mine"]


FORBIDDEN_IMPORTS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"torch.load", "torch.package", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN_NAMES = {"eval", "exec"}
FORBIDDEN_KEYWORDS = {"allow_pickle"}


def unsafe(root: Path) -> Iterator[str]:
    """Every place in the source that could run what it reads."""
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            found = None
            if isinstance(node, ast.Import):
                found = next((a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_IMPORTS), None)
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{a.name}" for a in node.names} & FORBIDDEN_CALLS
                found = (
                    node.module if (node.module or "").split(".")[0] in FORBIDDEN_IMPORTS else next(iter(names), None)
                )
            elif isinstance(node, ast.Attribute):
                found = next((c for c in FORBIDDEN_CALLS if ast.unparse(node) == c), None)
            elif isinstance(node, ast.Call):
                found = next((k.arg for k in node.keywords if k.arg in FORBIDDEN_KEYWORDS), None)
                if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_NAMES:
                    found = node.func.id
            if found:
                yield f"{file.relative_to(root)}:{node.lineno}: {found}"  # pyright: ignore[reportAttributeAccessIssue]


def test_no_module_reads_pickles():
    root = Path(moefold.__file__).parent
    assert len(list(root.rglob("*.py"))) > 50
    assert not list(unsafe(root))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import yaml\nyaml.load('x', yaml.Loader)",
        "exec(open('x').read())",
    ],
)
def test_a_planted_reader_of_pickles_is_found(text: str, tmp_path: Path):
    (tmp_path / "planted.py").write_text(text)
    assert len(list(unsafe(tmp_path))) == 1


def test_the_seal_is_over_everything_but_itself():
    content = {"format": CHECKPOINT_FORMAT, "files": {}, "b": 1, "a": [1, 2]}
    assert unseal_manifest(seal_manifest(content)) == content
    forged = json.loads(seal_manifest(content)) | {"b": 2}
    with pytest.raises(DamagedCheckpoint, match="its own digest"):
        unseal_manifest(canonical_json(forged))


def test_a_manifest_written_in_another_way_is_not_the_one_that_was_sealed():
    content = {"format": CHECKPOINT_FORMAT, "files": {}, "step": 2}
    sealed = seal_manifest(content)
    for other in (
        json.dumps(json.loads(sealed)).encode(),
        sealed + b"\n",
        sealed.replace(b'"step": 2', b'"step": 9, "step": 2'),
        sealed.replace(b'"step": 2', b'"step":  2'),
    ):
        assert json.loads(other) == json.loads(sealed)
        with pytest.raises(DamagedCheckpoint, match="its own digest"):
            unseal_manifest(other)


def test_what_is_wrong_is_said(folder: Path):
    path = folder / "step-00000002"
    size = (path / "state.json").stat().st_size
    before = (path / "state.json").read_bytes()
    os.truncate(path / "state.json", 3)
    with pytest.raises(DamagedCheckpoint, match=rf"state\.json has 3 bytes; expected {size}"):
        verify_checkpoint(path)
    (path / "state.json").write_bytes(before.replace(b"2", b"3"))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json does not match its digest"):
        verify_checkpoint(path)
    (path / "state.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"state\.json is missing"):
        verify_checkpoint(path)

"""The manifest: what makes a folder a checkpoint. It lists every file with its size and digest. Torch-free.

The manifest carries a digest of its own content and is written last: a folder without a valid manifest was never
committed. Of a file of tensors the manifest has the digest of the header. The ledger has the digests of the values, and
is itself a file that the manifest lists.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from moefold.checkpoint.format.storage import StoragePath
from moefold.printable import printable_text

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
LEDGER_FILE = "ledger.json"
METADATA_FILES = (LEDGER_FILE, STATE_FILE)
CHECKPOINT_FORMAT = "moefold checkpoint 2"
LARGEST_MANIFEST = 256 << 20  # bytes; a line of some 130 for each rank
PICKLE_SUFFIXES = (".pt", ".bin", ".pkl")

Manifest = dict[str, Any]
FileList = dict[str, tuple[int, str]]  # of every file: its size and sha256


class DamagedCheckpoint(Exception):
    """A folder that is not a complete, unchanged checkpoint. `problems` says what is wrong with it."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("; ".join(problems))


def sha256_hex(raw: Any) -> str:
    return hashlib.sha256(raw).hexdigest()


def canonical_json(content: Manifest) -> bytes:
    text = json.dumps(content, sort_keys=True, indent=1)
    return text.encode()


def content_digest(content: Manifest) -> str:
    return sha256_hex(canonical_json(content))


def seal_manifest(content: Manifest) -> bytes:
    """The bytes of a manifest: the content and a digest of it."""
    seal = {"sha256": content_digest(content)}
    return canonical_json(content | seal)


def unseal_manifest(raw: bytes) -> Manifest:
    try:
        content = json.loads(raw)
        claimed = content.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is not readable") from None
    # The second test refuses another spelling of the same content, such as other spaces.
    if claimed != content_digest(content) or seal_manifest(content) != raw:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} does not match its own digest")
    if content.get("format") != CHECKPOINT_FORMAT:
        found = printable_text(repr(content.get("format")))
        raise DamagedCheckpoint(f"its format is {found}; this version reads {CHECKPOINT_FORMAT!r}")
    return content


def read_manifest(folder: StoragePath) -> Manifest:
    path = folder / MANIFEST_FILE
    if path.is_file() and not path.is_symlink():
        if path.stat().st_size > LARGEST_MANIFEST:
            raise DamagedCheckpoint(f"{MANIFEST_FILE} has more than {LARGEST_MANIFEST >> 20} MiB")
        return unseal_manifest(path.read_bytes())
    hint = ""
    if holds_pickled_files(folder):
        hint = "; it holds pickled files, which moefold never opens"
    raise DamagedCheckpoint(f"it has no {MANIFEST_FILE}{hint}")


def holds_pickled_files(folder: StoragePath) -> bool:
    if not folder.is_dir():
        return False
    names = [path.name for path in folder.iterdir()]
    pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    return bool(pickled) or ".metadata" in names


def listed_files(content: Manifest) -> FileList:
    """Size and digest of every file of a checkpoint, from its manifest."""
    files: FileList = {}
    try:
        for name, entry in content["files"].items():
            size = int(entry["bytes"])
            files[name] = (size, str(entry["sha256"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise DamagedCheckpoint(f"{MANIFEST_FILE} does not list files with sizes and digests") from None
    for name in METADATA_FILES:
        if name not in files:
            raise DamagedCheckpoint(f"{MANIFEST_FILE} does not list {name}")
    return files


def tensor_data_files(files: FileList) -> list[str]:
    return [name for name in files if name not in METADATA_FILES]

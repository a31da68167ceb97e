"""What makes a folder a checkpoint: a manifest that lists every file with its size and digest, and its own. Torch-free.

The manifest is written last. A folder without a valid one was never committed. Of a file of tensors it has the digest
of the header; the values are vouched for by the ledger, which is itself a file that the manifest lists.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from moefold.checkpoint.format.storage import StoragePath

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
LEDGER_FILE = "ledger.json"
CHECKPOINT_FORMAT = "moefold checkpoint 2"


class DamagedCheckpoint(Exception):
    """A folder that is not a whole, unchanged checkpoint; says what is wrong with it."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("; ".join(problems))


def canonical_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def seal_manifest(content: dict[str, Any]) -> bytes:
    """The manifest's bytes, with a digest over the rest of it."""
    return canonical_json({**content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()})


def unseal_manifest(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
        claimed = content.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is not readable") from None
    if claimed != hashlib.sha256(canonical_json(content)).hexdigest() or seal_manifest(content) != raw:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} does not match its own digest")
    if content.get("format") != CHECKPOINT_FORMAT:
        raise DamagedCheckpoint(f"its format is {content.get('format')!r}; this version reads {CHECKPOINT_FORMAT!r}")
    return content


def read_manifest(folder: StoragePath) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    if not path.is_file() or path.is_symlink():
        names = [found.name for found in folder.iterdir()] if folder.is_dir() else []
        pickled = any(name == ".metadata" or name.endswith((".pt", ".bin", ".pkl")) for name in names)
        hint = "; it holds pickled files, which moefold never opens" if pickled else ""
        raise DamagedCheckpoint(f"it has no {MANIFEST_FILE}{hint}")
    return unseal_manifest(path.read_bytes())


def listed_files(content: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of a checkpoint, from its manifest."""
    try:
        files = {name: (int(e["bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedCheckpoint(f"{MANIFEST_FILE} does not list files with sizes and digests") from None
    for name in (LEDGER_FILE, STATE_FILE):
        if name not in files:
            raise DamagedCheckpoint(f"{MANIFEST_FILE} does not list {name}")
    return files


def tensor_data_files(files: dict[str, tuple[int, str]]) -> list[str]:
    return [name for name in files if name not in (LEDGER_FILE, STATE_FILE)]

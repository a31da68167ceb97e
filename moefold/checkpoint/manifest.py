"""What makes a folder a checkpoint: a manifest that lists every file with its size and digest, and its own. Torch-free.

The manifest is written last. A folder without a valid one was never committed. Of a file of tensors it has the digest
of the header; the values are vouched for by the ledger, which is itself a file that the manifest lists.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from moefold.checkpoint.place import Place

MANIFEST = "manifest.json"
STATE = "state.json"
LEDGER = "ledger.json"
FORMAT = "moefold checkpoint 2"


class Damaged(Exception):
    """A folder that is not a whole, unchanged checkpoint; says what is wrong with it."""

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("; ".join(problems))


def canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def seal(content: dict[str, Any]) -> bytes:
    """The manifest's bytes, with a digest over the rest of it."""
    return canonical({**content, "sha256": hashlib.sha256(canonical(content)).hexdigest()})


def unseal(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
        claimed = content.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(f"{MANIFEST} is not readable") from None
    if claimed != hashlib.sha256(canonical(content)).hexdigest() or seal(content) != raw:
        raise Damaged(f"{MANIFEST} does not match its own digest")
    if content.get("format") != FORMAT:
        raise Damaged(f"its format is {content.get('format')!r}; this version reads {FORMAT!r}")
    return content


def read_manifest(folder: Place) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file() or path.is_symlink():
        names = [found.name for found in folder.iterdir()] if folder.is_dir() else []
        pickled = any(name == ".metadata" or name.endswith((".pt", ".bin", ".pkl")) for name in names)
        hint = "; it holds pickled files, which moefold never opens" if pickled else ""
        raise Damaged(f"it has no {MANIFEST}{hint}")
    return unseal(path.read_bytes())


def listed_files(content: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of a checkpoint, from its manifest."""
    try:
        files = {name: (int(e["bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Damaged(f"{MANIFEST} does not list files with sizes and digests") from None
    for name in (LEDGER, STATE):
        if name not in files:
            raise Damaged(f"{MANIFEST} does not list {name}")
    return files


def data_files(files: dict[str, tuple[int, str]]) -> list[str]:
    return [name for name in files if name not in (LEDGER, STATE)]

"""What makes a folder a checkpoint: a manifest that lists every file with its digest, and its own.

The manifest is written last, before the folder gets its final name. A folder without a valid one was never committed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from moefold.checkpoint.storage import TABLE, digest_of, read_table

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = "moefold checkpoint 1"


class Damaged(Exception):
    """A folder that is not a whole, unchanged checkpoint; says what is wrong with it."""


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


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written, or Damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        pickled = (folder / ".metadata").exists() or any(folder.glob("*.pt")) or any(folder.glob("*.bin"))
        hint = "; it holds pickled files, which moefold never opens" if pickled else ""
        raise Damaged(f"it has no {MANIFEST}{hint}")
    content = unseal(path.read_bytes())
    files = listed_files(content)
    for name, (size, sha256) in files.items():
        file = folder / name
        if "/" in name or not file.is_file():
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{name} has {file.stat().st_size} bytes; expected {size}")
        if digest_of(file) != sha256:
            raise Damaged(f"{name} does not match its digest: its content changed after it was written")
    if strangers := sorted(files_in_table(folder) - files.keys()):
        raise Damaged(f"{TABLE} names {strangers[0]}, which {MANIFEST} does not list")
    return content


def listed_files(content: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of a checkpoint, from its manifest."""
    try:
        files = {name: (int(e["bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Damaged(f"{MANIFEST} does not list files with sizes and digests") from None
    for name in (TABLE, STATE):
        if name not in files:
            raise Damaged(f"{MANIFEST} does not list {name}")
    return files


def files_in_table(folder: Path) -> set[str]:
    """The files that the tensors are said to lie in."""
    try:
        return {chunk["file"] for entry in read_table(folder).values() for chunk in entry["chunks"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{TABLE} is not readable") from None

"""What makes a folder a checkpoint: a manifest that lists every file with its digest, and its own.

The manifest is written last, before the folder gets its final name. A folder without a valid one was never committed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from moefold.checkpoint.storage import digest_of

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
    for name, entry in content["files"].items():
        file = folder / name
        if "/" in name or not file.is_file():
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise Damaged(f"{name} has {file.stat().st_size} bytes; expected {entry['bytes']}")
        if digest_of(file) != entry["sha256"]:
            raise Damaged(f"{name} does not match its digest: its content changed after it was written")
    return content

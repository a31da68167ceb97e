"""A large text without a download: all UTF-8 texts of installed Debian and Python packages, no content twice.

python -m tests.support.package_corpus OUT [BYTES [FOLDER ...]]    # .jsonl files of 64 MB, by default 1 GB together

Folders are searched too, such as those of `pip install --target FOLDER --no-deps ansible botocore plotly`: few machines
have 1 GB of text.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

DEBIAN = ("/usr/include", "/usr/lib", "/usr/share", "/usr/src")
FILE_BYTES = 64_000_000
LARGEST = 30_000_000  # of one text: larger ones are data


def roots(further: Sequence[str]) -> list[Path]:
    found = [*site.getsitepackages(), sysconfig.get_path("stdlib"), *DEBIAN, *further]
    return [Path(root) for root in found if Path(root).is_dir()]


def texts(further: Sequence[str]) -> Iterator[str]:
    """Each text once: files reached twice, copies and links are left out by their content."""
    seen: set[bytes] = set()
    for root in roots(further):
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if path.is_symlink() or not path.is_file() or not 200 < path.stat().st_size < LARGEST:
                    continue
                raw = path.read_bytes()
                if b"\0" in raw:
                    continue
                digest = hashlib.sha256(raw).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                try:
                    yield raw.decode("utf-8")
                except UnicodeDecodeError:
                    continue


def write_corpus(out: Path, size: int, further: Sequence[str] = ()) -> tuple[int, int]:
    """Write texts until they have so many bytes. Returns texts and bytes."""
    out.mkdir(parents=True)
    count = written = files = 0
    room = 0
    with ExitStack() as opened:
        for text in texts(further):
            if room <= 0:
                file = opened.enter_context((out / f"{files:03d}.jsonl").open("w"))
                files += 1
                room = FILE_BYTES
            room -= file.write(json.dumps({"text": text}) + "\n")
            count += 1
            written += len(text.encode())
            if written >= size:
                break
    return count, written


if __name__ == "__main__":
    limit = int(float(sys.argv[2])) if len(sys.argv) > 2 else 10**9
    number, size = write_corpus(Path(sys.argv[1]), limit, sys.argv[3:])
    print(f"{number:,} texts, {size:,} bytes in {sys.argv[1]}")

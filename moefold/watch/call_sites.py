"""Call sites: where in the package a thread is, without the frames of moefold/comm and torch that it waits in."""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent
COMM_FOLDER = f"{PACKAGE}/comm/"
TORCH_FOLDER = str(Path(find_spec("torch").origin).parent)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
WAITING_FILES = (f"{TORCH_FOLDER}/distributed/", COMM_FOLDER, threading.__file__)
INNER_FILES = (f"{TORCH_FOLDER}/", COMM_FOLDER, f"{PACKAGE}/watch/", threading.__file__, contextlib.__file__)


class CallSite(NamedTuple):
    """A line of a function; no code where Python has no caller, as in the backward pass."""

    code: CodeType | None
    line: int = 0

    def __str__(self) -> str:
        if self.code is None:
            return "the backward pass"
        path = Path(self.code.co_filename)
        inside_package = PACKAGE in path.parents
        shown = path.relative_to(PACKAGE.parent) if inside_package else path.name
        return f"{shown}:{self.line}"


@cache
def is_inner_file(name: str) -> bool:
    return name.startswith(INNER_FILES)


def nearest_site(frame: FrameType | None) -> CallSite:
    """The nearest line at or above a frame that is in neither moefold/comm nor torch."""
    while frame is not None and is_inner_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return CallSite(None)
    return CallSite(frame.f_code, frame.f_lineno)


def main_thread_site() -> str:
    """Where the main thread is now."""
    main = threading.main_thread().ident
    frames = sys._current_frames()
    site = nearest_site(frames.get(main or 0))
    return str(site)


def waits_for_others() -> bool:
    """Whether some thread but the watch's own is inside a call that waits for other ranks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        is_watch = names.get(ident, "") in ("guard", "heartbeat")
        file = frame.f_code.co_filename
        if not is_watch and file.startswith(WAITING_FILES):
            return True
    return False

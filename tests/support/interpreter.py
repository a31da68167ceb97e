"""Triton's interpreter without a look through all of `triton.language` at every call of a device function.

The interpreter replaces the functions of `triton.language` for a launch. It does so again at each call of a function
inside the kernel, where nothing is left to be replaced: a look at some thousand names, half the time of a test.
Launches are one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


class LaunchScope:
    """What a launch has replaced. `restore` is called at its end, not at that of a device function."""

    def __init__(self, restore: Callable[[], None]):
        self.restore = restore


class PatchOncePerLaunch:
    """In the place of the interpreter's `_patch_lang`. `patched`: modules whose functions are replaced by now."""

    def __init__(self, patch: Callable[[Any], Any], languages: tuple[ModuleType, ...]):
        self.patch = patch
        self.languages = languages
        self.patched: set[str] = set()

    def __call__(self, fn: Any) -> LaunchScope:
        values = fn.__globals__.values()
        seen = {module.__name__ for module in self.languages if any(value is module for value in values)}
        if self.patched and seen <= self.patched:
            return LaunchScope(lambda: None)
        begins = not self.patched
        scope = self.patch(fn)
        self.patched |= seen
        return LaunchScope(lambda: self.end(scope, set(self.patched) if begins else seen))

    def end(self, scope: Any, restored: set[str]) -> None:
        scope.restore()
        self.patched -= restored


def patch_once_per_launch() -> None:
    """For tests under the interpreter; nothing where Triton is missing or compiles."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as language
        from triton.runtime import interpreter
    except ImportError:
        return
    if not isinstance(interpreter._patch_lang, PatchOncePerLaunch):
        interpreter._patch_lang = PatchOncePerLaunch(interpreter._patch_lang, (language, language.core))

"""The form of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class CommandForm(Generic[T]):
    """The form of a command line: the words of the command, its options, and whether configuration keys follow: those
    of `section`, if one is named, else of all sections."""

    name: str
    options: type[T]
    config_keys: bool = False
    section: str = ""

    def takes_key(self, path: str) -> bool:
        begin = f"{self.section}." if self.section else ""
        return self.config_keys and path.startswith(begin)

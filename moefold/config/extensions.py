"""Extensions: dispatchers, router scores, attentions, optimizer rules and data sources that other packages add.
Torch-free.

An installed package declares them as entry points of the group `moefold.extensions`; each one names an `Extension` in a
module that does not import torch, so that config, --help, explain and the planner can read it in milliseconds:

    [project.entry-points."moefold.extensions"]
    my_dispatcher = "my_package.names:MY_DISPATCHER"

    MY_DISPATCHER = Extension("dispatcher", "mine", "sends tokens my way", "my_package.dispatcher:build", price=seconds)

The implementation is imported when a run needs it. `register_extension` adds one for the running process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from moefold.config.errors import UserError, one_of
from moefold.config.open_names import (
    ATTENTION_NAMES,
    DATA_SOURCE_NAMES,
    DISPATCHER_NAMES,
    OPTIMIZER_NAMES,
    ROUTER_SCORE_NAMES,
    OpenNames,
)

ENTRY_POINT_GROUP = "moefold.extensions"
EXTENSION_KINDS: dict[str, OpenNames] = {
    "attention": ATTENTION_NAMES,
    "data_source": DATA_SOURCE_NAMES,
    "dispatcher": DISPATCHER_NAMES,
    "optimizer_rule": OPTIMIZER_NAMES,
    "router_score": ROUTER_SCORE_NAMES,
}
EXTENSIONS: dict[tuple[str, str], Extension] = {}  # by kind and name, those registered in this process


@dataclass(frozen=True)
class Extension:
    """A name that configurations accept, and its implementation. The arguments of the implementation depend on the kind
    (docs/python.md). `price` is torch-free and predicts seconds, for kinds that are chosen by time."""

    kind: str
    name: str
    says: str  # the line in --help
    implementation: str | Callable[..., Any]  # "package.module:object", or the object itself
    price: Callable[..., float] | None = None

    def load(self) -> Callable[..., Any]:
        if not isinstance(self.implementation, str):
            return self.implementation
        module, _, path = self.implementation.partition(":")
        found: Any = import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
        return found


def register_extension(extension: Extension) -> None:
    """Register an extension: from now on the configurations of this process accept its name."""
    names = EXTENSION_KINDS[one_of("kind of extension", extension.kind, EXTENSION_KINDS)]
    if extension.name in names.builtin:
        raise UserError(f'"{extension.name}" is a built-in {names.kind}; choose another name for the extension')
    names.add(extension.name, extension.says)
    EXTENSIONS[extension.kind, extension.name] = extension


def find_extension(kind: str, name: str) -> Extension | None:
    """The extension of a name; None for a built-in name."""
    read_entry_points()
    return EXTENSIONS.get((kind, name))


@cache
def read_entry_points() -> None:
    """Register the extensions of installed packages, once per process. An extension that cannot be read is reported and
    left out."""
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register_extension(read_extension(entry_point))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(
                f"note: moefold extension {entry_point.name} ({entry_point.value}) is left out: {reason}",
                file=sys.stderr,
            )


def read_extension(entry_point: EntryPoint) -> Extension:
    found = entry_point.load()
    if not isinstance(found, Extension):
        raise UserError(f"expected a moefold.Extension, found {type(found).__name__}")
    return found

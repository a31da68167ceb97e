"""Registration of extensions for the running process, as a decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from moefold.config.extensions import Extension, register_extension

Implementation = TypeVar("Implementation", bound=Callable[..., Any])


def register(
    kind: str, name: str, says: str, price: Callable[..., float] | None = None
) -> Callable[[Implementation], Implementation]:
    """`@register("router_score", "relu", "ReLU of the logits")` above a function or class: configurations of this
    process accept the name. docs/python.md says what each kind is called with."""

    def register_implementation(implementation: Implementation) -> Implementation:
        extension = Extension(kind, name, says, implementation, price)
        register_extension(extension)
        return implementation

    return register_implementation

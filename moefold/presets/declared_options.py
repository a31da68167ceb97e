"""Declared options of a command: the fields of its dataclass, with flag, kind of value, default and meaning."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

_, POSITIONAL = get_args(tyro.conf.Positional[str])
_, SUPPRESSED = get_args(tyro.conf.Suppress[str])
VALUE_WORDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


class ValueType(NamedTuple):
    """The type of an option's value: without None, and without tuple where it takes several."""

    base: Any
    optional: bool
    several: bool


class DeclaredOption(NamedTuple):
    name: str
    type: ValueType
    markers: tuple[Any, ...]
    default: Any

    @property
    def positional(self) -> bool:
        return POSITIONAL in self.markers

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def is_switch(self) -> bool:
        return self.type.base is bool

    @property
    def flag(self) -> str:
        """`--from-hf`; of a switch that is on, the flag that turns it off."""
        dashed = self.name.replace("_", "-")
        return f"--no-{dashed}" if self.default is True else f"--{dashed}"

    @property
    def choices(self) -> tuple[str, ...]:
        base = self.type.base
        return get_args(base) if get_origin(base) is Literal else ()

    @property
    def value_word(self) -> str:
        """The value as --help names it: N, PATH, {a,b}; nothing for a switch."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return VALUE_WORDS.get(self.type.base, "")


def declared_options(options: type[Any]) -> list[DeclaredOption]:
    """The options that --help shows. Those of the class itself come before inherited ones."""
    hints = get_type_hints(options, include_extras=True)
    own = vars(options).get("__annotations__", {})
    ordered = sorted(fields(options), key=lambda field: field.name not in own)
    declared = [declared_option(field, hints[field.name]) for field in ordered]
    return [option for option in declared if SUPPRESSED not in option.markers]


def declared_option(field: Field[Any], hint: Any) -> DeclaredOption:
    markers: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *found = get_args(hint)
        markers = tuple(found)
    kind = value_type(hint)
    return DeclaredOption(field.name, kind, markers, field.default)


def value_type(hint: Any) -> ValueType:
    """`Path | None` -> Path, optional; `tuple[str, ...]` -> str, several."""
    members = (hint,)
    if get_origin(hint) in (Union, UnionType):
        members = get_args(hint)
    (base,) = [member for member in members if member is not NoneType]
    several = get_origin(base) is tuple
    if several:
        base, _ = get_args(base)
    return ValueType(base, NoneType in members, several)


def option_meanings(options: type[Any]) -> dict[str, str]:
    """The text below each field in the source, by name; also of inherited fields."""
    meanings: dict[str, str] = {}
    for kind in reversed(options.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(kind))
        (declared,) = ast.parse(source).body
        assert isinstance(declared, ast.ClassDef)
        for declaration, text in pairwise(declared.body):
            match declaration, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    meanings[name] = " ".join(meaning.split())
                case _:
                    pass
    return meanings

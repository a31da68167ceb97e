"""Odd bytes and odd JSON values: what damage, bad luck and ill will make of a sound file."""

from __future__ import annotations

import random
from typing import Any

ODD_JSON: list[Any] = [None, -1, 10**30, 1e308, float("inf"), float("nan"), True, "", "\ud800", [], {}, [[]], "a" * 999]
ODD_NUMBERS = [b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 8, b"\x01" + b"\0" * 7, b"\0\0\0\x80" * 2]


def change_somewhere(content: Any, chance: random.Random) -> None:
    """Replace, add or remove something at a random depth of a JSON value."""
    while isinstance(content, dict) and content:
        key = chance.choice(list(content))
        if chance.random() < 0.5 and isinstance(content[key], dict):
            content = content[key]
            continue
        kind = chance.randrange(3)
        if kind == 0:
            del content[key]
        else:
            content[key if kind == 1 else chance.choice(["\ud800", "", "\x1b", "sha256"])] = chance.choice(ODD_JSON)
        return


def changed_bytes(raw: bytes, chance: random.Random) -> bytes:
    """The bytes with something flipped, cut off, taken out, put in, repeated or overwritten."""
    first = chance.randrange(min(len(raw), 256) or 1)  # headers are at the beginning
    place = chance.choice([first, chance.randrange(len(raw) or 1)])
    length = chance.choice([1, 8, 64, len(raw)])
    rest = raw[place + length :]
    ways = [
        raw[:place] + bytes([(raw + b"\0")[place] ^ 1 << chance.randrange(8)]) + raw[place + 1 :],
        raw[:place],
        raw[:place] + rest,
        raw[:place] + chance.randbytes(length % 1000) + raw[place:],
        raw[:place] + raw[place : place + length] * 2 + rest,
        raw[:place] + chance.choice(ODD_NUMBERS) + raw[place + 8 :],
        raw[:place] + b"[" * 5000 + rest,
        chance.randbytes(chance.randrange(200)),
        b"",
    ]
    return chance.choice(ways)

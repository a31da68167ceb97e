"""Random orders that are the same on every machine and with every version of numpy: a sort by mixed numbers."""

from __future__ import annotations

import numpy as np

INCREMENT = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 1)
SHIFTS = (30, 27, 31)
ROUNDS = [(np.uint64(shift), np.uint64(factor)) for shift, factor in zip(SHIFTS, FACTORS, strict=True)]
LARGEST_WORD = 0xFFFFFFFFFFFFFFFF


def mix_words(words: np.ndarray) -> np.ndarray:
    """Each 64-bit word replaced by a mixed one, no two by the same (the output step of splitmix64)."""
    mixed = words
    for shift, factor in ROUNDS:
        upper = mixed >> shift
        mixed = mixed ^ upper
        mixed = mixed * factor
    return mixed


def mix_keys(*keys: int) -> int:
    """One word that depends on all keys and on their order."""
    state = 0
    for key in keys:
        state += INCREMENT + key
        state &= LARGEST_WORD
        word = np.array([state], dtype=np.uint64)
        mixed = mix_words(word)
        state = int(mixed[0])
    return state


def shuffled_order(count: int, *keys: int) -> np.ndarray:
    """The numbers from 0 to before `count` in an order that depends on the keys alone."""
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    steps = numbers * np.uint64(INCREMENT)
    start = mix_keys(*keys)
    words = steps + np.uint64(start)
    mixed = mix_words(words)
    return np.argsort(mixed, kind="stable")

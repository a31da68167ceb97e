"""Numbers of the tokens that this thread computes with, for recipes that round stochastically and adapters that drop
inputs, both by token.

The model's steps say which tokens of the run a rank holds (`computing_tokens`); a product of rows asks for their
numbers (`numbers_of_rows`). Outside of a step, rows are numbered from 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

NumbersOfRows = Callable[[int], Tensor]  # from how many rows there are to their numbers


class CurrentTokens(threading.local):
    numbers: NumbersOfRows | None = None


CURRENT = CurrentTokens()


@contextmanager
def computing_tokens(numbers: NumbersOfRows | None) -> Iterator[None]:
    """Products inside have rows with these numbers; None: numbered from 0."""
    outer = CURRENT.numbers
    CURRENT.numbers = numbers
    try:
        yield
    finally:
        CURRENT.numbers = outer


def numbers_of_rows(rows: int, device: torch.device) -> Tensor:
    if CURRENT.numbers is None:
        return torch.arange(rows, device=device)
    return CURRENT.numbers(rows)

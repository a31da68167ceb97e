"""Recent values: made when first needed, and forgotten when enough others were made since. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values of the keys that were used last, at most `most`."""

    def __init__(
        self,
        make: Callable[[K], V],
        most: int,
    ):
        self.make = make
        self.most = most
        self.kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V:
        kept = self.kept
        if key not in kept:
            kept[key] = self.make(key)
        kept.move_to_end(key)
        if len(kept) > self.most:
            kept.popitem(last=False)
        return kept[key]


def keep_newest(values: dict[K, V], key: K, value: V, most: int) -> None:
    """Add a value; beyond `most` of them, forget those that were added first."""
    values.pop(key, None)
    values[key] = value
    for oldest in list(values)[:-most]:
        del values[oldest]

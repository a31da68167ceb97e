"""What `parallel.context_sending` says: what it costs to send keys and values, by the size of a group. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from moefold.config.errors import UserError

MOST_KEYS = 1e12


def read_keys(text: str) -> float | None:
    """The number of keys that an entry says; None where it says none."""
    try:
        keys = float(text)
    except ValueError:
        return None
    return keys if 0 <= keys <= MOST_KEYS else None


def keys_by_size(sending: Sequence[str], sizes: Sequence[int]) -> dict[int, float]:
    """Keys that a token attends to while its own are sent, by the size of its group; `sizes`: 1, 2, 4, ... Without
    entries, and in groups of one, sending takes no time; one entry is of all sizes."""
    larger = sizes[1:]
    if len(sending) == 1:
        sending = [*sending] * len(larger)
    if not sending:
        return dict.fromkeys(sizes, 0.0)
    if len(sending) != len(larger):
        raise UserError(
            f"parallel.context_sending has {len(sending)} entries; expected {len(larger)}, for groups of "
            f"{', '.join(map(str, larger))} ranks, one for all of them, or none, to measure"
        )
    return {1: 0.0} | {size: read_keys(text) or 0.0 for size, text in zip(larger, sending, strict=True)}

"""The ignore index of labels: a position with this label has no loss."""

from __future__ import annotations

IGNORE_INDEX = -100

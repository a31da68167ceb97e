"""Floating-point operations of Newton-Schulz, by which matrices are given to ranks and updates are planned."""

from __future__ import annotations


def newton_schulz_flops(rows: int, columns: int, steps: int) -> float:
    """Floating-point operations of one matrix: X X^T, A A and their product with X in each step."""
    short = min(rows, columns)
    long = max(rows, columns)
    with_long = 4 * short**2 * long
    square = 2 * short**3
    products = with_long + square
    return float(steps * products)

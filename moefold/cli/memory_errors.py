"""Errors of exhausted memory: how they are recognised, and the line that every command prints for them."""

from __future__ import annotations

OUT_OF_MEMORY = 4  # exit code
MEMORY_ERRORS = ("out of memory", "can't allocate memory", "DefaultCPUAllocator", "not enough memory")


def memory_problem(error: BaseException) -> str:
    lines = str(error).strip().split("\n")
    return f"out of memory: {lines[0][:200]}; try a smaller --train.micro_batch, --data.seq_len or model"


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return any(sign in text for sign in MEMORY_ERRORS)

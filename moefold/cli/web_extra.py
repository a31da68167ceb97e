"""Commands that need the extra `web`: without it, one line says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moefold.config.errors import UserError

WEB_PACKAGES = ("starlette", "uvicorn")


@contextmanager
def web_packages(command: str) -> Iterator[None]:
    """Inside, modules of the extra are imported."""
    try:
        yield
    except ModuleNotFoundError as missing:
        name = str(missing.name)
        package, *_ = name.split(".")
        if package not in WEB_PACKAGES:
            raise
        problem = f"moefold {command} needs {package}, which is not installed; run: pip install 'moefold[web]'"
        raise UserError(problem) from None

"""Settings of every test run: Triton's interpreter where there is no GPU, one thread a process where tests run in
parallel, and the markers `alone` and `extended`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.extended import mark_extended
from tests.support.interpreter import patch_once_per_launch

if not torch.cuda.is_available():  # before any test imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
    patch_once_per_launch()
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

TESTS = Path(__file__).parent
ALONE = ("bench",)  # folders whose tests measure time


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where the tests that run alone are asked for, files without one need not be imported: that takes 20 s."""
    wants_alone = config.getoption("markexpr").startswith("alone")
    if not wants_alone or collection_path.suffix != ".py" or is_of_bench(collection_path):
        return None
    has_none = "mark.alone" not in collection_path.read_text(encoding="utf-8")
    return has_none or None


def is_of_bench(path: Path) -> bool:
    return path.relative_to(TESTS).parts[0] in ALONE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_extended(items)
    for item in items:
        if is_of_bench(item.path):
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def document_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands and Python blocks of the documents are run on; tests copy it before they change it."""
    from tests.support.document_folder import document_folder_at

    return document_folder_at(tmp_path_factory.getbasetemp() / "documents")

"""The suites of tests that need a GPU or a browser: what they say without one, and how they read a result."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.compare_trees import comparison, speeds_of_report, turns
from tests.support.marked_suite import ROOT, UNUSABLE, PartResult, read_verdicts, result_page

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure/></testcase>
<testcase classname="a" name="bad"><error/></testcase>
<testcase classname="a" name="left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_and_each_test_counts_once(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert read_verdicts(report) == {"a.good": "passed", "a.bad": "failed", "a.left": "skipped"}
    assert set(read_verdicts(tmp_path / "none").values()) == {"failed"}


def test_a_part_without_a_passed_test_is_not_sound():
    assert PartResult("all", Counter(passed=2, skipped=1), [], 1.0).sound
    assert not PartResult("none", Counter(skipped=3), [], 1.0).sound
    assert not PartResult("some", Counter(passed=2, failed=1), ["a.bad"], 1.0).sound


def test_the_page_tells_counts_and_names_what_failed():
    part = PartResult("alone", Counter(passed=2, failed=1), ["a.bad"], 3.2)
    page = result_page("Title", "tests.support.x_suite", {"commit": "abc"}, [part])
    assert "- commit: abc" in page
    assert "| alone | 2 | 1 | 0 | 3 |" in page
    assert "- `a.bad`" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_suite_says_so():
    assert "no CUDA device here" in said_without("gpu_suite")


def test_without_a_browser_the_suite_says_so():
    assert "no Chromium here" in said_without("page_suite")


def said_without(module: str) -> str:
    """What a suite says where nothing is on the path."""
    command = [sys.executable, "-m", f"tests.support.{module}"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == UNUSABLE, done.stderr
    return done.stderr


def test_results_have_date_commit_and_device_or_say_that_there_is_none():
    for name in ("gpu-suite.md", "page-suite.md"):
        page = (ROOT / "docs" / "benchmarks" / name).read_text()
        facts = re.findall(r"^- (\w+): \S", page, re.M)
        assert facts == ["date", "commit", "device"] or "No result yet" in page


def test_trees_take_turns_and_medians_are_compared():
    assert turns(2) == ["old", "new", "new", "old"]
    report = {"results": [{"layer": "small", "ours": {"tflops": 500.0}, "transformers": {"tflops": 400.0}}]}
    figures = speeds_of_report(report)
    assert figures == {"small, ours, tflops": 500.0}
    faster = {name: 2 * value for name, value in figures.items()}
    lines = comparison({"old": [figures], "new": [faster]})
    assert lines == ["small, ours, tflops: old 500, new 1,000, new over old 2.0000"]

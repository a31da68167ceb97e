"""A marked suite: tests with one mark, run in one call, and a page in docs/benchmarks with the last result.

CI has no GPU and not always a browser, so that what these tests showed, and when, would be known to nobody.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
UNUSABLE = 2  # exit code: what the tests need is not here


class PartResult(NamedTuple):
    """What one call of pytest found."""

    name: str
    counts: Counter[str]  # passed, failed, skipped
    failed: list[str]
    seconds: float

    @property
    def sound(self) -> bool:
        return not self.failed and self.counts["passed"] > 0


def run_part(name: str, *options: str) -> PartResult:
    """One call of pytest. A call that ends without a report counts as one failure."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options]
        subprocess.run(command, cwd=ROOT, check=False)
        verdicts = read_verdicts(report)
    seconds = time.monotonic() - begin
    failed = [test for test, verdict in verdicts.items() if verdict == "failed"]
    return PartResult(name, Counter(verdicts.values()), failed, seconds)


def read_verdicts(report: Path) -> dict[str, str]:
    """`passed`, `failed` or `skipped` for each test of a JUnit report."""
    if not report.exists():
        return {"no report of pytest": "failed"}
    verdicts: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname')}.{case.get('name')}"
        signs = {child.tag for child in case}
        verdict = "skipped" if "skipped" in signs else "passed"
        if signs & {"failure", "error"}:
            verdict = "failed"
        if verdicts.get(test) != "failed":  # a test that fails, and then its fixture, is listed twice
            verdicts[test] = verdict
    return verdicts


def result_page(title: str, module: str, facts: dict[str, str], parts: Sequence[PartResult]) -> str:
    lines = [f"# {title}", "", f"The last result of `python -m {module}`, which writes this page.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| part | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for part in parts:
        cells = [str(part.counts[verdict]) for verdict in ("passed", "failed", "skipped")]
        lines.append(f"| {part.name} | {' | '.join(cells)} | {part.seconds:.0f} |")
    failed = [test for part in parts for test in part.failed]
    if failed:
        lines += ["", "Failed:", "", *(f"- `{test}`" for test in failed)]
    return "\n".join(lines) + "\n"


def conclude(title: str, module: str, device: str, options: SuiteOptions, parts: Sequence[PartResult]) -> int:
    """Write the page; the exit code is 0 if every part is sound."""
    facts = {"date": time.strftime("%Y-%m-%d"), "commit": options.commit, "device": device}
    options.out.write_text(result_page(title, module, facts, parts), encoding="utf-8")
    print(f"wrote {options.out}")
    return 0 if all(part.sound for part in parts) else 1


def tell_missing(what: str) -> int:
    print(what, file=sys.stderr)
    return UNUSABLE


class SuiteOptions(NamedTuple):
    out: Path
    commit: str


def read_suite_options(doc: str | None, page: str) -> SuiteOptions:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / page, help="where the result goes")
    parser.add_argument("--commit", help="what is tested, where the tree is a copy without its history")
    found = parser.parse_args()
    return SuiteOptions(found.out, found.commit or tested_commit())


def tested_commit() -> str:
    """The commit of the tree, and whether files differ from it."""
    commit = git_says("rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    changed = git_says("status", "--porcelain", "--untracked-files=no", "--", "moefold", "tests")
    return f"{commit} with changes" if changed else commit


def git_says(*words: str) -> str:
    if not shutil.which("git"):
        return ""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()

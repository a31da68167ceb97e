"""Benchmarks of two trees in turns: the same command in each, again and again, and the ratio of the medians.

    python -m tests.support.compare_trees OLD_TREE [--rounds 3] -- bench layer --layer olmoe-7b --repeat 20

OLD_TREE is a folder that holds another version of the package. The trees take turns (old, new, new, old, ...), so that
a card that warms up slows both. The command prints JSON (`--json` is added); rows of both trees are compared by place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parents[2]
SPEEDS = ("tokens_per_s", "tflops")  # of a row's contenders, the first that is there
Figures = dict[str, float]  # by row and contender


def main(argv: list[str]) -> None:
    own, command = split_at_dashes(argv)
    parser = ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(own)
    trees = {"old": options.old.resolve(), "new": HERE}
    found: dict[str, list[Figures]] = {"old": [], "new": []}
    for name in turns(options.rounds):
        print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
        figures = speeds_of_tree(trees[name], command)
        found[name].append(figures)
    for line in comparison(found):
        print(line)


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        raise SystemExit("no command; expected: OLD_TREE -- bench layer ...")
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def turns(rounds: int) -> list[str]:
    """Old and new in turns; every second pair the other way round."""
    names: list[str] = []
    for number in range(rounds):
        names += ["old", "new"] if number % 2 == 0 else ["new", "old"]
    return names


def speeds_of_tree(tree: Path, command: list[str]) -> Figures:
    others = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(tree), *filter(None, [others])])
    words = [sys.executable, "-P", "-m", "moefold", *command, "--json"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, cwd=tree, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the command ended with {done.returncode} in {tree}")
    report = json.loads(done.stdout)
    return speeds_of_report(report)


def speeds_of_report(report: dict[str, Any]) -> Figures:
    figures: Figures = {}
    for number, row in enumerate(report["results"]):
        name = row.get("layer") or row.get("model") or str(number)
        for contender, values in row.items():
            if contender.startswith("ours") and isinstance(values, dict):
                key = next(key for key in SPEEDS if key in values)
                figures[f"{name}, {contender}, {key}"] = values[key]
    return figures


def comparison(found: dict[str, list[Figures]]) -> list[str]:
    lines: list[str] = []
    for name in found["old"][0]:
        old = median(figures[name] for figures in found["old"])
        new = median(figures[name] for figures in found["new"])
        lines.append(f"{name}: old {old:,.6g}, new {new:,.6g}, new over old {new / old:.4f}")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])

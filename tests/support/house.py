"""Figures of the source tree: sizes, names, density, imports. Mirrors of its order, not its masters.

    python -m tests.support.house [FOLDER]      # by default this repository's moefold/

`files on a layer's way` runs one training step of a one-layer model on a CPU and records which files of the package are
entered during the forward pass of its MoE layer.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent / "moefold"
LAYOUT_TOKENS = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}  # count as tokens, make no line
IGNORED_TOKENS = {tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


class SourceFile(NamedTuple):
    path: Path
    text: str
    tree: ast.Module


class Density(NamedTuple):
    """Of one file: tokens of code, lines that hold any, and lines that are a comment and nothing else."""

    tokens: int
    code_lines: int
    comment_lines: int


def source_files(root: Path) -> list[SourceFile]:
    paths = sorted(path for path in root.rglob("*.py") if path.stat().st_size)
    texts = [path.read_text() for path in paths]
    return [SourceFile(path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def functions_of(files: Iterable[SourceFile]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, FUNCTIONS):
                yield node


def docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, DOCUMENTED) or ast.get_docstring(node) is None:
            continue
        first = node.body[0]
        lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def density_of(file: SourceFile) -> Density:
    documentation = docstring_lines(file.tree)
    tokens, code_lines, comment_lines = 0, set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            comment_lines.add(line)
        if token.type in IGNORED_TOKENS or line in documentation:
            continue
        tokens += 1
        if token.type not in LAYOUT_TOKENS:
            code_lines.add(line)
    return Density(tokens, len(code_lines), len(comment_lines - code_lines))


def imported_modules(tree: ast.Module, name: str) -> set[str]:
    """Modules of the package that a file imports anywhere, functions included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {module for module in found if module.split(".")[0] == name}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(files: list[SourceFile], root: Path) -> dict[str, set[str]]:
    modules = {module_name(file.path, root): file for file in files}
    return {
        module: imported_modules(file.tree, root.name) & set(modules) - {module} for module, file in modules.items()
    }


def largest_knot(graph: dict[str, set[str]]) -> int:
    """The size of the largest set of modules that all reach each other by imports; 0 if there is none."""
    reached = {module: reachable(graph, module) for module in graph}
    knots = [sum(module in reached[other] for other in reached[module] if other in reached) for module in graph]
    return max(knots, default=0)


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set[str](), [start]
    while waiting:
        for module in graph.get(waiting.pop(), ()):
            if module not in found:
                found.add(module)
                waiting.append(module)
    return found


def identity_tests(root: Path) -> int:
    """Places under model/ that compare an implementation with an op's reference."""
    pattern = re.compile(r"\bis (?:not )?\w+\.reference\b|\.reference is\b")
    return sum(len(pattern.findall(path.read_text())) for path in (root / "model").rglob("*.py"))


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def spread(values: list[int]) -> str:
    return f"{statistics.median(values):.0f} / {percentile(values, 0.9)} / {max(values)}"


def share_documented(nodes: list[ast.AST]) -> float:
    documented = sum(ast.get_docstring(node) is not None for node in nodes)  # pyright: ignore[reportArgumentType]
    return 100 * documented / max(1, len(nodes))


def files_on_a_layers_way() -> str:
    """Counted in a process of its own, since it imports torch and runs a step."""
    done = subprocess.run([sys.executable, "-m", "tests.support.token_way"], capture_output=True, text=True)
    return done.stdout.strip() or "not measured"


def figures(root: Path) -> dict[str, str]:
    files = source_files(root)
    functions = list(functions_of(files))
    densities = [density_of(file) for file in files]
    nodes = [node for file in files for node in ast.walk(file.tree)]
    lines = [file.text.count("\n") for file in files]
    bodies = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    tokens, code_lines = sum(d.tokens for d in densities), sum(d.code_lines for d in densities)
    every_line = [line for file in files for line in file.text.splitlines()]
    lambdas = sum(isinstance(node, ast.Lambda) for node in nodes)
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    class_names = [node.name for node in classes]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    graph = import_graph(files, root)
    fan_out = [len(imported) for imported in graph.values()]
    return {
        "lines": f"{sum(lines)}",
        "file median / p90 / longest": spread(lines),
        "function median / p90 / longest, lines": spread(bodies),
        "AST nodes a function, median / p90 / max": spread([sum(1 for _ in ast.walk(node)) for node in functions]),
        "AST nodes a statement": f"{len(nodes) / statements:.2f}",
        "tokens a line of code": f"{tokens / code_lines:.2f}",
        "lines over 100 columns": f"{100 * sum(len(line) > 100 for line in every_line) / len(every_line):.1f} %",
        "lambdas per 1000 lines": f"{1000 * lambdas / len(every_line):.1f}",
        "functions": f"{len(functions)}",
        "mean length of a function's name": f"{statistics.mean(len(node.name) for node in functions):.2f}",
        "functions called _": f"{sum(node.name == '_' for node in functions)}",
        "class names with two meanings": f"{len({name for name in class_names if class_names.count(name) > 1})}",
        "largest import knot": f"{largest_knot(graph)}",
        "imports a module, mean / max": f"{statistics.mean(fan_out):.1f} / {max(fan_out)}",
        "comment lines": f"{100 * sum(d.comment_lines for d in densities) / len(every_line):.1f} %",
        "docstrings: modules / classes / functions": " / ".join(
            f"{share_documented(group):.0f} %" for group in ([file.tree for file in files], classes, functions)
        ),
        "identity tests on kernels in model/": f"{identity_tests(root)}",
    }


def main(folder: str = "") -> None:
    root = Path(folder) if folder else ROOT
    found = figures(root)
    if not folder:
        found["files entered on one MoE layer's forward"] = files_on_a_layers_way()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main(*sys.argv[1:])

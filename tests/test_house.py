"""Figures of the tree that have goals (docs/floors.md) keep to them."""

from __future__ import annotations

import ast
import statistics
from collections import Counter

from tests.support.house import ROOT, density_of, functions_of, identity_tests, source_files

MOST_TOKENS = 10.0  # a line of code, on average
LEAST_LETTERS = 11.0  # of a function's name, on average


def test_statements_are_short_and_names_say_something():
    files = source_files(ROOT)
    densities = [density_of(file) for file in files]
    tokens = sum(density.tokens for density in densities)
    lines = sum(density.code_lines for density in densities)
    assert tokens / lines <= MOST_TOKENS
    names = [len(function.name) for function in functions_of(files)]
    assert statistics.mean(names) >= LEAST_LETTERS


def test_the_model_does_not_ask_which_implementation_an_op_has():
    assert identity_tests(ROOT) == 0


def test_a_class_has_a_name_of_its_own():
    classes = [node for file in source_files(ROOT) for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in classes)
    assert [name for name, count in names.items() if count > 1] == []

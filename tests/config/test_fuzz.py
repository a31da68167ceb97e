"""Whatever is written for a configuration, the answer is a configuration or a refusal that helps, and nothing else.

Cases are drawn by seeded generators, so that case 417 is the same tomorrow.
"""

import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.config.errors import UserError, printable_text
from moefold.config.keys import ConfigKey, format_value, iterate_keys
from moefold.config.read import convert_value, flatten_sections, printable_value
from moefold.config.renamed_keys import with_new_names
from moefold.config.run import Config
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS

KEYS = {key.path: key for key in iterate_keys(Config())}
SECTIONS = sorted({path[: i.start()] for path in KEYS for i in re.finditer(r"\.", path)})
WORDS = ["", " ", "0", "-1", "1", "2", "3", "7", "16", "64", "255", "4096", "1.5", "1e-3", "1e400", "-0", "nan", "inf"]
WORDS += ["true", "False", "none", "null", "cosine", "llama3", "yarn", "files", "a.txt", "a,b", "[]", "{}", "0x10"]
WORDS += ["é", "日本", "🐍", "\u202e", "\ufeff", "\x00", "\x1b[31m", "a\nb", "\t", "\udcff", "--", "--train.steps", "="]
WORDS += ["9" * 30, "1" + "0" * 400, "9" * 5000, "-" + "9" * 30, "x" * 10_000, "٣", "1_0", "1__0", "_1", "$(x)", '"']
WORLDS = [1, 1, 1, 2, 3, 4, 8, 12, 64, 1000, 999_983]


def misspelt(rng: random.Random, path: str) -> str:
    at = rng.randrange(len(path))
    return rng.choice(
        [path[:at] + path[at + 1 :], path[:at] + rng.choice("xyz._é\x07") + path[at:], path.upper(), path + "s"]
    )


def random_key(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.7:
        return rng.choice(list(KEYS))
    if kind < 0.85:
        return misspelt(rng, rng.choice(list(KEYS)))
    return rng.choice([*SECTIONS, "", ".", "zzz", "日本", "model..layers", "k" * 5000, "preset", "help", "\x1b"])


def random_word(rng: random.Random, path: str) -> str:
    key = KEYS.get(path)
    if key and rng.random() < 0.3:
        return rng.choice(key.choices or (format_value(key.default),))
    if rng.random() < 0.3:
        return str(rng.choice([rng.randint(-5, 300), round(rng.uniform(-1, 2), 3), 2 ** rng.randint(0, 12)]))
    word = rng.choice(WORDS)
    return word


def random_words(rng: random.Random) -> list[str]:
    words: list[str] = []
    for _ in range(rng.randint(1, 4)):
        path = random_key(rng)
        word = random_word(rng, path)
        words += [f"--{path}={word}"] if rng.random() < 0.6 else [f"--{path}", word]
    if rng.random() < 0.04:
        words.insert(rng.randrange(len(words) + 1), rng.choice(["stray", "--", "-x", ""]))
    return words


def legal_values(key: ConfigKey, expected: str) -> list[str]:
    """The legal values that a message ends with."""
    if key.choices:
        return expected.removeprefix("one of ").split(", ")
    return [expected.rpartition("such as ")[2].replace('""', "")]


def judge(line: str, given: dict[str, Any]) -> str | None:
    """What is wrong with a line of a refusal, or None. It must name the key, the value and a legal value."""
    if found := re.match(r"(\S+) = (.*) is not legal(?: \(did you mean .*\))?; expected (.*)$", line, re.DOTALL):
        key = KEYS.get(found[1])
        if key is None or found[1] not in given:
            return "names no key that was given"
        if found[2] != printable_value(given[found[1]]):
            return "does not show the value"
        for value in legal_values(key, found[3]):
            convert_value(key, value)
        return None if line.isprintable() else "is not printable"
    if found := re.match(r'no key "(.*)"( \(did you mean "(.*)"\?\))?; .* such as (\S+)$', line):
        named = {path for path in KEYS if path == found[3] or path.split(".")[-1] == found[3]}
        if found[3] and not named:
            return "suggests a key that does not exist"
        return None if found[4] in KEYS and found[1] in map(printable_value, given) else "names no key"
    if found := re.match(r"(\S+) is a section, not a key; its keys are (.*)$", line):
        inside = found[2].split(", ")
        return None if found[1] in SECTIONS and all(path in KEYS for path in inside) else "names no section"
    if found := re.match(r"(\S+) and (\S+) are both given", line):
        return None if found[1] in given and found[2] in given else "names no key that was given"
    if re.match(r'(cannot read ".*"|--.* has no value); expected --', line, re.DOTALL):
        return None
    return judge_rule(line, given)


def judge_rule(line: str, given: dict[str, Any]) -> str | None:
    says, _, fix = line.rpartition("; ")
    if not says.startswith(tuple(KEYS)):
        says, _, fix = line.partition("; ")
    if not says.startswith(tuple(KEYS)) or " = " not in says:
        return "does not begin with a key and its value"
    for path in given:
        if path in KEYS and f"{path} = " in says and not says_value(says, path, given[path]):
            return f"does not show the value of {path}"
    advice = re.search(r"(set ([^\s,]+),? .*|start a multiple of \d+ ranks)", line)
    if not advice or (advice[2] and advice[2] not in KEYS):
        return f"gives no advice ({fix})"
    return None


def says_value(says: str, path: str, raw: Any) -> bool:
    """Of a list, its entries may be shown one by one."""
    value = convert_value(KEYS[path], raw)
    shown = f"{value:g}" if isinstance(value, float) else format_value(value)
    if f"{path} = {printable_text(shown)}" in says:
        return True
    return isinstance(value, tuple) and all(f"{path} = {printable_text(entry)}" in says for entry in value)


def given_by(words: list[str]) -> dict[str, str]:
    """What overrides say, read here once more and more simply."""
    given: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word[2:].partition("=")
        given[name] = value if equals else next(rest, "")
    return given


def outcome(recipe: str, words: list[str], world: int, given: dict[str, Any]) -> tuple[Config | None, list[str]]:
    """The configuration, or what is wrong with the lines of the refusal. Any other exception goes through."""
    try:
        return resolve_recipe(recipe, words, world), []
    except UserError as refused:
        given = given | with_new_names(given)[0]
        wrong = [(judge(line, given), line) for line in refused.problems or ("",)]
        return None, [f"{complaint}: {line[:300]!r}" for complaint, line in wrong if complaint]


def test_a_thousand_random_overrides_each_give_a_configuration_or_a_helpful_refusal():
    accepted = 0
    for number in range(1000):
        rng = random.Random(number)
        words, world, recipe = random_words(rng), rng.choice(WORLDS), rng.choice(list(PRESETS))
        try:
            config, complaints = outcome(recipe, words, world, given_by(words))
        except Exception as error:
            raise AssertionError(f"case {number}: {recipe} {words} on {world} ranks") from error
        assert not complaints, f"case {number}: {recipe} {words} on {world} ranks: {complaints}"
        accepted += config is not None
    assert 50 < accepted < 500, f"{accepted} of 1,000 were accepted: the generator misses one side"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*KEYS, *SECTIONS]) | st.text(), st.text() | st.integers().map(str))))
def test_any_text_for_any_key_gives_a_configuration_or_a_helpful_refusal(pairs: list[tuple[str, str]]):
    pairs = [(path, word) for path, word in pairs if "=" not in path]
    _, complaints = outcome("tiny", [f"--{path}={word}" for path, word in pairs], 1, dict(pairs))
    assert not complaints


LEAVES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    10**400,
    -(10**30),
    1.5,
    float("nan"),
    float("inf"),
    -0.0,
    1e300,
    {},
    [],
    [[]],
]
LEAVES += [
    "",
    "x",
    "1e-3",
    "日本🐍",
    "\x1b\x00",
    "a" * 2000,
    [1, 2],
    ["a", "b"],
    ["a", None],
    [{"a": 1}],
    b"\xff\x00",
    {"a"},
]


def random_leaf(rng: random.Random, path: str) -> Any:
    if path in KEYS and rng.random() < 0.6:
        default = KEYS[path].default
        return list(default) if isinstance(default, tuple) else default
    return rng.choice(LEAVES)


def random_tree(rng: random.Random, depth: int = 0) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for _ in range(rng.randint(1, 3)):
        path = random_key(rng)
        parts: list[Any] = path.split(".") if rng.random() < 0.7 else [path]
        if rng.random() < 0.15:
            parts = [rng.choice([1, 0, -7, 1.5, None, True, float("nan"), 10**50])]
        value = random_leaf(rng, path) if rng.random() < 0.8 or depth > 3 else random_tree(rng, depth + 1)
        node = tree
        for part in parts[:-1]:
            below = node.get(part)
            node[part] = below if isinstance(below, dict) else {}
            node = node[part]
        node[parts[-1]] = value
    if rng.random() < 0.1:
        tree["preset"] = rng.choice([*PRESETS, "tny", 5, None, ["tiny"], {"tiny": 1}])
    return tree


def test_two_hundred_random_yaml_trees_each_give_a_configuration_or_a_helpful_refusal(tmp_path: Path):
    file = tmp_path / "fuzz.yaml"
    accepted = 0
    for number in range(200):
        rng = random.Random(10_000 + number)
        file.write_text(yaml.safe_dump(random_tree(rng), allow_unicode=rng.random() < 0.5), encoding="utf-8")
        given = flatten_sections(yaml.safe_load(file.read_text(encoding="utf-8")))
        try:
            config, complaints = outcome(str(file), [], rng.choice(WORLDS), given)
        except Exception as error:
            raise AssertionError(f"case {number}: {file.read_text()[:1000]}") from error
        complaints = [each for each in complaints if "there are: " not in each]  # no such preset
        assert not complaints, f"case {number}: {complaints}"
        accepted += config is not None
    assert 10 < accepted < 150, f"{accepted} of 200 were accepted: the generator misses one side"


def test_yaml_files_of_random_characters_are_read_or_refused_by_name(tmp_path: Path):
    file = tmp_path / "junk.yaml"
    for number in range(200):
        rng = random.Random(20_000 + number)
        alphabet = "ab: -\n{}[],'\"|>&*!%@`#?=<01.e~\t\\é日\x07"
        file.write_text("".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40))), encoding="utf-8")
        try:
            resolve_recipe(str(file))
        except UserError as refused:
            for line in refused.problems:
                assert "junk.yaml" in line or "key" in line or "preset" in line, line


def explain(words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moefold", "explain", "tiny", *words]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, errors="replace")


def test_twenty_refusals_reach_a_person_without_a_traceback_and_with_exit_code_2():
    refused: list[list[str]] = []
    for number in range(1000):
        words = random_words(random.Random(30_000 + number))
        # what cannot be an argument of a process, is longer than one may be, or is read by tyro
        if any("\x00" in w or len(w) > 20_000 or not w.startswith("--") for w in words) or "--help" in " ".join(words):
            continue
        try:
            resolve_recipe("tiny", words)
        except UserError:
            refused.append(words)
        if len(refused) == 20:
            break
    with ThreadPoolExecutor(2) as threads:
        for words, done in zip(refused, threads.map(explain, refused), strict=True):
            assert done.returncode == 2, f"{words}: {done.stderr}"
            assert "Traceback" not in done.stderr, f"{words}: {done.stderr}"
            lines = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]  # of renamed keys
            assert lines[0].startswith("moefold: "), f"{words}: {done.stderr}"

"""`moefold simulate` as a person meets it."""

import json
from pathlib import Path
from typing import Any

import pytest

from moefold.cli.main import run_command_line
from moefold.schedule.schedule_catalog import SCHEDULES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def simulated(capsys: pytest.CaptureFixture[str]):
    def simulate(*words: str) -> dict[str, Any]:
        assert run_command_line(["simulate", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return simulate


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    def refuse(*words: str) -> str:
        assert run_command_line(["simulate", *words]) == 2
        return capsys.readouterr().err

    return refuse


def test_json_has_the_closed_forms(simulated: Any):
    found = simulated("--schedule", "1f1b", "--pp", "4", "--vpp", "2", "--microbatches", "16")
    assert found["makespan"] == pytest.approx((16 + 3 / 2) * 3)
    assert found["bubble"] == pytest.approx([1.5 / 17.5] * 4)
    assert found["live"] == [2 * (4 - r - 1) + 4 + 1 for r in range(4)]
    assert found["stages"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    plain = simulated("--schedule", "1f1b", "--pp", "4", "--microbatches", "8")
    assert plain["makespan"] == pytest.approx((8 + 3) * 3)
    assert simulated("--schedule", "zb_h1", "--microbatches", "8")["makespan"] == pytest.approx(3 * 8 + 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_shown_as_a_table(name: str, capsys: pytest.CaptureFixture[str]):
    assert run_command_line(["simulate", "--schedule", name, "--pp", "3", "--microbatches", "7"]) == 0
    shown = capsys.readouterr().out
    assert f"{name}, pp 3, vpp {SCHEDULES[name].least_vpp}, 7 microbatches: makespan" in shown
    assert shown.count("│") == 3 * (5 + ("dualpipe" in name))


def test_help_names_every_schedule(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run_command_line(["simulate", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in SCHEDULES)


def test_costs_change_the_clock_and_pairing_hides_what_they_send(simulated: Any, tmp_path: Path):
    (tmp_path / "costs.yaml").write_text("F: 2\ncomm: {F: 0.5, D: 0.5}\nsend: 0.1\nbytes: {saved: 2e9}\n")
    words = ["--pp", "4", "--microbatches", "16", "--costs", str(tmp_path / "costs.yaml")]
    alone, paired = simulated(*words), simulated(*words, "--passes", "pair")
    assert alone["bytes"] == [8e9, 6e9, 4e9, 2e9]
    assert alone["exposed"] == pytest.approx([16.0] * 4)
    assert paired["exposed"] == pytest.approx([7.0, 5.0, 3.0, 1.0])
    assert paired["makespan"] < alone["makespan"]
    assert paired["paired"] == [9, 11, 13, 15]


def test_costs_by_piece_follow_the_layout(simulated: Any, tmp_path: Path):
    (tmp_path / "costs.yaml").write_text("F: {d: 1, t: 2}\nD: {d: 1, t: 2}\nW: {d: 1, t: 2}\n")
    words = ["--pp", "2", "--microbatches", "1", "--costs", str(tmp_path / "costs.yaml")]
    assert simulated(*words, "--layout", "Eddd|ttL")["makespan"] == pytest.approx(3 * (3 + 4))


def test_a_program_written_as_text_is_clocked_like_its_schedule(simulated: Any, tmp_path: Path):
    path = str(tmp_path / "program.txt")
    first = simulated("--schedule", "dualpipe_v", "--pp", "3", "--microbatches", "7", "--text", path)
    again = simulated("--program", path)
    assert {**again, "title": first["title"]} == first


def test_the_trace_holds_every_op_on_its_rank_and_lane(simulated: Any, tmp_path: Path):
    (tmp_path / "costs.yaml").write_text("comm: {F: 0.5, D: 0.5}")
    files = ["--costs", str(tmp_path / "costs.yaml"), "--trace", str(tmp_path / "t.json")]
    found = simulated("--pp", "2", "--microbatches", "3", *files)
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len([e for e in events if e["cat"] == "compute"]) == 3 * 3 * 2
    assert len([e for e in events if e["cat"] == "comm"]) == 2 * 3 * 2
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found["makespan"] * 1e6)
    assert all(e["args"] == {"kind": e["name"][0], "stage": e["pid"], "microbatch": int(e["name"][3:])} for e in events)


def test_the_drawings_in_the_docs_are_what_the_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each drawing is made by the command that docs/schedules.md shows for it."""
    commands = [line.strip()[2:] for line in (DOCS / "schedules.md").read_text().splitlines() if "--svg docs/" in line]
    assert len(commands) >= len(SCHEDULES)
    monkeypatch.chdir(DOCS.parent)
    for command in commands:
        words = command.split()[1:]
        path = Path(words[-1])
        assert run_command_line([*words[:-1], str(tmp_path / path.name)]) == 0
        assert (tmp_path / path.name).read_text() == (DOCS.parent / path).read_text(), command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--schedule 1f1", 'no schedule "1f1" (did you mean "1f1b"?)'),
        ("--schedule zb_v --vpp 3", "schedule zb_v with vpp = 3: expected vpp 2;"),
        ("--pp 0 --microbatches -1", "--pp 0 is not legal; expected a whole number at least 1\n--microbatches -1"),
        ("--vpp 0", "--vpp 0 is not legal"),
        ("--pp 1000 --microbatches 1000", "are 3000000 ops; expected at most 1000000"),
        ("--passes pear", 'no pass "pear" (did you mean "pair"?)'),
        ("--layout Et|tL", "has 2 stages; expected pp x vpp = 4"),
        ("--layout Et|x", "has 'x' as character 4"),
        ("--program absent.txt", "no file absent.txt; expected a program"),
        ("--program x.txt --schedule 1f1b", "expected one of the two"),
        ("--costs absent.yaml", "no file absent.yaml"),
        ("--svg absent/x.svg", "no folder absent to write x.svg into"),
    ],
)
def test_what_cannot_be_clocked_is_refused_with_what_could(words: str, says: str, refused: Any):
    assert says in refused(*words.split())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("rank 0: F0.0 D0.0", "rank 0 drops W0.0"),
        ("rank 0: F0.0 D0.0+W0.0 W0.0", "W0.0 runs 2 times"),
        ("rank 0: D0.0+W0.0 F0.0", "deadlock: rank 0 waits at D0.0+W0.0 for F0.0"),
        ("rank 0: F0.0 X", "line 1: cannot read 'X'"),
        ("", "the program has no op"),
        ("rank 0: F1.0 D1.0+W1.0", "no rank runs stage 0 of 2"),
    ],
)
def test_a_program_that_cannot_run_is_refused_saying_where(program: str, says: str, refused: Any, tmp_path: Path):
    (tmp_path / "p.txt").write_text(program)
    for passes in ("", "pair", "defer"):
        assert says in refused("--program", str(tmp_path / "p.txt"), "--passes", passes)


def test_costs_that_make_no_sense_are_refused_all_at_once(refused: Any, tmp_path: Path):
    (tmp_path / "c.yaml").write_text("F: -1\nD: [1, 2]\nfoo: 3\n")
    assert len(refused("--costs", str(tmp_path / "c.yaml")).splitlines()) == 3

"""`moefold bench kernels`: the rows of one operation, as JSON and as a table, and refusals."""

from __future__ import annotations

import json

import pytest

from moefold.cli.bench import run_command
from moefold.config.errors import UserError

ONE_OP = ["--op", "swiglu", "--device", "cpu", "--repeat", "1"]


@pytest.mark.parametrize("subject", [["kernels"], []], ids=["named", "by default"])
def test_json_has_every_case_with_its_reference(subject: list[str], capsys: pytest.CaptureFixture[str]):
    assert run_command([*subject, *ONE_OP, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["dtype"]) == ("cpu", "fp32")
    cases = {row["case"] for row in report["results"]}
    references = [row["case"] for row in report["results"] if row["implementation"] == "reference"]
    assert sorted(references) == sorted(cases)
    assert all(row["op"] == "swiglu" for row in report["results"])
    assert all(row["forward_us"] > 0 and row["both_us"] > 0 for row in report["results"])


def test_the_table_names_the_operation_once(capsys: pytest.CaptureFixture[str]):
    assert run_command(ONE_OP) == 0
    table = capsys.readouterr().out
    assert "kernels on cpu in fp32" in table
    assert table.count("swiglu") == 1


def test_an_unknown_operation_and_no_repetition_are_refused():
    with pytest.raises(UserError, match="swiglu"):
        run_command(["kernels", "--op", "swiglo"])
    with pytest.raises(UserError, match="--repeat 0 is not legal"):
        run_command(["--repeat", "0"])

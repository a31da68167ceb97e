"""What a report knows of a run is what the run's files say."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold.web.load_series import CODE_NONE, CODE_UNKNOWN, LoadSeries, encode_log_bytes
from moefold.web.page_numbers import round_significant
from moefold.web.run_summary import summarize_run
from tests.support.run_folders import fp8_line, load_at, run_folder, write_lines


def decoded(load: dict[str, Any]) -> np.ndarray:
    """As the page does it: ratios_CLE out of bytes."""
    columns: list[np.ndarray] = []
    for text, low, high in zip(load["codes"], load["low"], load["high"], strict=True):
        codes = np.frombuffer(base64.b64decode(text), np.uint8)
        ratios = 2.0 ** (low + (codes - 1.0) / 253 * (high - low))
        ratios = np.where(codes == CODE_NONE, 0, np.where(codes == CODE_UNKNOWN, np.nan, ratios))
        columns.append(ratios.reshape(len(load["layers"]), load["experts"]))
    return np.stack(columns)


def test_curves_and_maps_hold_every_step_of_a_short_run(tmp_path: Path):
    told = summarize_run(run_folder(tmp_path / "a"), "a", 1)
    assert told["curves"]["loss"]["first"] == list(range(1, 11))
    assert told["curves"]["loss"]["mean"] == [round(5 - 0.1 * step, 4) for step in range(1, 11)]
    assert told["curves"]["val_loss"] == {"from": 0, "first": [0], "last": [0], "mean": [5.5]}
    assert "low" not in told["curves"]["loss"], "nothing was joined"
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()][1:]
    for name in ("max_violation", "load_entropy", "dead_experts", "drop_rate", "moved_bytes"):
        np.testing.assert_allclose(told["maps"][name]["values"], [line[name] for line in lines], rtol=1e-4)
    worst = [max(line["max_violation"]) for line in lines]
    np.testing.assert_allclose(told["curves"]["worst_violation"]["mean"], worst, rtol=1e-4)
    assert told["layers"] == [1, 2, 3], "the first layer is dense"
    (tmp_path / "a" / "router.jsonl").unlink()
    assert summarize_run(tmp_path / "a", "a", 1)["layers"] == [1, 2, 3], "the configuration knows it too"


def test_the_load_is_told_as_multiples_of_the_even_share_to_one_per_cent_and_the_dead_exactly(tmp_path: Path):
    load = summarize_run(run_folder(tmp_path / "a"), "a", 1)["load"]
    assert load["first"] == [2, 4, 6, 8, 10]
    assert load["layers"] == [1, 2, 3]
    counts = np.array([[load_at(step, layer, 4) for layer in (1, 2, 3)] for step in load["first"]])
    ratios = counts / counts.mean(axis=2, keepdims=True)
    found = decoded(load)
    np.testing.assert_allclose(found, ratios, rtol=0.01)
    assert ((found == 0) == (counts == 0)).all()
    assert (counts == 0).any()


def test_where_steps_are_joined_violations_and_deaths_tell_the_worst_and_the_rest_the_mean(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    names = ("max_violation", "load_entropy", "dead_experts", "drop_rate", "moved_bytes")
    write_lines(folder / "metrics.jsonl", [{"step": s, **{name: [s] for name in names}} for s in range(1, 801)])
    maps = summarize_run(folder, "a", 1)["maps"]
    assert maps["load_entropy"]["first"][:3] == [1, 3, 5]
    assert maps["load_entropy"]["last"][:3] == [2, 4, 6]
    first = {name: told["values"][0] for name, told in maps.items()}
    assert first == {name: [2] if name in ("max_violation", "dead_experts") else [1.5] for name in names}


def test_rows_of_the_largest_rank_are_told_of_the_worst_layer_where_experts_are_cloned(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    assert "rank_rows" not in summarize_run(folder, "a", 1)["curves"]
    line = {"step": 1, "rank_rows": [1.0, 1.1], "rank_rows_without": [2.5, 1.2]}
    write_lines(folder / "metrics.jsonl", [line])
    curves = summarize_run(folder, "a", 1)["curves"]
    assert curves["rank_rows"]["mean"] == [1.1]
    assert curves["rank_rows_without"]["mean"] == [2.5]


def test_loads_are_joined_until_they_fit():
    series = LoadSeries(cells=19)
    for step in range(1, 9):
        series.add_record({"step": step, "load": [[step, 10 - step], [5, 5]]})
    load = series.load_data(-1)
    assert load is not None
    assert (load["first"], load["last"]) == ([1, 3, 5, 7], [2, 4, 6, 8]), "four columns of four cells fit into 19"
    np.testing.assert_allclose(decoded(load)[:, 0, 0], [0.3, 0.7, 1.1, 1.5], rtol=0.01)


def test_codes_span_what_there_is_and_keep_none_and_unknown_apart():
    ratios = np.array([0.0, 1 / 32, 1.0, 8.0, np.nan])
    low, high, codes = encode_log_bytes(ratios)
    assert (low, high) == (-5.0, 3.0)
    assert codes.tolist() == [CODE_NONE, 1, 159, 254, CODE_UNKNOWN]
    assert encode_log_bytes(np.array([1.0, 1.0]))[2].tolist() == [1, 1]
    assert encode_log_bytes(np.array([0.0, np.nan]))[2].tolist() == [CODE_NONE, CODE_UNKNOWN]


JUNK = [
    b'{"step": 3, "loss": "<b>", "max_violation": [1, "x"]}\n',
    b'{"step": 3, "loss": [1], "max_violation": 5}\n',
    b'{"step": 3, "loss": null, "max_violation": []}\n',
    b'{"step": 3, "loss": NaN, "max_violation": [NaN, Infinity, 1]}\n',
    b'{"step": -4, "loss": 1e9}\n',
    b'{"step": 1' + b"0" * 400 + b', "loss": 1e9}\n',
    b'{"step": 3, "loss": 1' + b"0" * 400 + b"}\n",
    b"\xff\xfe not even text",
    b"[" * 100_000,
]


@pytest.mark.parametrize("junk", JUNK)
def test_lines_with_nonsense_are_passed_over_and_the_rest_is_told(junk: bytes, tmp_path: Path):
    folder = run_folder(tmp_path / "a", steps=2)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(junk)
    with (folder / "router.jsonl").open("ab") as file:
        file.write(junk + b'\n{"step": 4, "load": [[1, 2], [3]]}\n{"step": 5, "load": [1]}\n{"step": 6, "load": {}}')
    told = summarize_run(folder, "a", 1)
    assert told["curves"]["loss"]["mean"] == [4.9, 4.8]
    assert told["load"]["first"] == [2]
    json.dumps(told, allow_nan=False)


def test_a_run_without_experts_or_without_a_router_log_has_no_load(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    (folder / "router.jsonl").unlink()
    assert summarize_run(folder, "a", 1)["load"] is None
    write_lines(folder / "router.jsonl", [{"step": 2, "layers": [], "load": [], "dropped": [], "moved": []}])
    assert summarize_run(folder, "a", 1)["load"] is None


def test_a_layer_that_got_nothing_at_all_is_unknown_not_dead(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    write_lines(folder / "router.jsonl", [{"step": 2, "load": [[0, 0], [1, 3]]}])
    load = summarize_run(folder, "a", 1)["load"]
    assert load["layers"] == [0, 1], "counted, where the line does not say"
    np.testing.assert_allclose(decoded(load)[0], [[np.nan, np.nan], [0.5, 1.5]], rtol=0.01)


def test_a_configuration_of_another_version_is_told_with_what_is_strange_in_it(tmp_path: Path):
    folder = run_folder(tmp_path / "a")
    (folder / "config.yaml").write_text("name: older\nmodel:\n  moe:\n    experts: 4\n    gone: 3\n")
    told = summarize_run(folder, "a", 1)
    assert told["strange"] == ["model.moe.gone"]
    assert dict(told["facts"])["model"] == "older"


def test_facts_say_what_the_run_is(tmp_path: Path):
    facts = dict(
        summarize_run(run_folder(tmp_path / "a", 10, 3, 4, "--model.moe.balance.bias_rate", "0.02"), "a", 1)["facts"]
    )
    assert facts["steps"] == "10 of 10"
    assert facts["experts"] == "4, 2 per token, in 3 of 4 layers"
    assert facts["balance"] == "bias rate 0.02; dropless"
    assert facts["layout"] == "tp 1, cp 1, pp 1, ep 1, etp 1"


@pytest.mark.parametrize(
    ("value", "told"), [(1.2345678, 1.2346), (3.0, 3), (123456789.0, 123460000), (float("nan"), None)]
)
def test_numbers_are_told_to_five_digits(value: float, told: float | None):
    assert round_significant(value) == told


def test_figures_of_fp8_operands_are_told_by_layer_with_the_worst_product_and_nonsense_is_passed_over(tmp_path: Path):
    folder = run_folder(tmp_path / "a", 10, 3, 4, "--precision.recipe", "fp8_block")
    assert summarize_run(folder, "a", 1)["fp8"] is None
    lines = [fp8_line(step, layers=2) for step in (5, 10)]
    lines[1]["gradient"]["error"] = [None, 0.125, None, None]
    broken = [
        lines[0] | {"step": 15, "weight": {}},
        {"step": 20, "layers": ["x"]},
        {"step": 25},
        {"step": 30, "layers": []},
    ]
    broken.append(lines[0] | {"step": 35, "layers": [0, 1]})
    broken.append(lines[0] | {"step": 40, "gradient": lines[0]["gradient"] | {"error": ["a", 10**400, 1, 1]}})
    write_lines(folder / "fp8.jsonl", [*lines, *broken])
    told = summarize_run(folder, "a", 1)
    fp8 = told["fp8"]
    assert fp8["first"] == [5, 10]
    assert fp8["layers"] == [0, 1]
    assert fp8["warnings"] == []
    assert [column["activation"]["error"] for column in fp8["values"]] == [[0.052, 0.052]] * 2
    assert [column["gradient"]["error"] for column in fp8["values"]] == [[0.052, 0.052], [0.125, None]]
    assert [column["weight"]["amax"] for column in fp8["values"]] == [[8, 8], [13, 13]]
    assert [column["weight"]["scale_low"] for column in fp8["values"]] == [[0.125, 0.125]] * 2
    assert [column["weight"]["scale_high"] for column in fp8["values"]] == [[1, 1]] * 2
    assert dict(told["facts"])["precision"].endswith("; products in fp8_block")
    json.dumps(told, allow_nan=False)

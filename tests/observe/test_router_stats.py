"""Balance as numbers, as a file and as a warning."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.observe.metrics import read_records
from moefold.observe.router_stats import DeadExpertWatch, RouterCounts, RouterLog, balance_summary, listed_layers


def counted(*load: list[int], dropped: list[int] | None = None, moved: list[int] | None = None) -> RouterCounts:
    none = [0] * len(load)
    return RouterCounts(list(range(1, len(load) + 1)), list(load), dropped or none, moved or none)


def test_every_number_is_what_a_plain_loop_says():
    dice = random.Random(1)
    load = [[dice.choice([0, dice.randrange(1000)]) for _ in range(16)] for _ in range(40)]
    dropped, moved = [dice.randrange(sum(each) + 1) for each in load], [dice.randrange(10**12) for _ in load]
    found = balance_summary(counted(*load, dropped=dropped, moved=moved))
    for layer, each in enumerate(load):
        most = total = dead = 0
        for n in each:
            most, total, dead = max(most, n), total + n, dead + (n == 0)
        entropy = 0.0
        for n in each:
            entropy += n / total * math.log(total / n) if n else 0.0
        assert found["max_violation"][layer] == pytest.approx(most / (total / 16) - 1, abs=1e-6)
        assert found["load_entropy"][layer] == pytest.approx(entropy / math.log(16), abs=1e-6)
        assert found["dead_experts"][layer] == dead
        assert found["drop_rate"][layer] == pytest.approx(dropped[layer] / total, abs=1e-6)
    assert found["moved_bytes"] == moved


def test_even_load_is_zero_violation_and_entropy_one_and_a_single_expert_the_worst():
    found = balance_summary(counted([5, 5, 5, 5], [20, 0, 0, 0]))
    assert found["max_violation"] == [0.0, 3.0]
    assert found["load_entropy"] == [1.0, 0.0]
    assert found["dead_experts"] == [0, 3]


@pytest.mark.parametrize("load", [[7], [0, 0, 0, 0]])
def test_a_layer_that_cannot_be_uneven_is_even(load: list[int]):
    found = balance_summary(counted(load))
    assert (found["max_violation"], found["load_entropy"], found["drop_rate"]) == ([0.0], [1.0], [0.0])


def test_a_model_without_experts_has_empty_lists_and_no_warning():
    assert set(map(tuple, balance_summary(counted()).values())) == {()}
    assert DeadExpertWatch(1).look(counted()) is None


def log_steps(path: Path, steps: range, keep_through: int, every: int = 2) -> None:
    log = RouterLog(path, every, keep_through)
    for step in steps:
        log.write(step, counted([step, 1], dropped=[3], moved=[4]))
    log.close()


def test_the_log_has_a_line_every_so_many_steps_with_all_that_was_counted(tmp_path: Path):
    log_steps(tmp_path / "router.jsonl", range(1, 8), keep_through=-1)
    lines = read_records(tmp_path / "router.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[1] == {"step": 4, "layers": [1], "load": [[4, 1]], "dropped": [3], "moved": [4]}


def test_a_continued_log_drops_the_lines_after_the_resumed_step(tmp_path: Path):
    path = tmp_path / "router.jsonl"
    log_steps(path, range(1, 11), keep_through=-1)
    path.write_text(path.read_text()[:-3])  # the last line was cut off by a crash
    log_steps(path, range(6, 9), keep_through=5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 4, 6, 8]


def test_every_line_of_the_log_is_on_disk_at_once(tmp_path: Path):
    log = RouterLog(tmp_path / "router.jsonl", 1, -1)
    log.write(1, counted([1, 2]))
    assert len(read_records(tmp_path / "router.jsonl")) == 1
    log.close()


def warnings(watcher: DeadExpertWatch, *steps: list[int]) -> list[str | None]:
    return [watcher.look(counted([1] * len(load), load)) for load in steps]


def test_an_expert_is_warned_about_once_when_it_got_nothing_for_all_of_its_patience():
    watcher = DeadExpertWatch(patience=3)
    said = warnings(watcher, *[[1, 0, 2]] * 10)
    assert [step for step, text in enumerate(said, 1) if text] == [3]
    assert said[2] is not None
    assert "expert 1 of layer 2 got no token for 3 steps" in said[2]
    assert "raise --model.moe.balance.bias_rate or --model.moe.balance.aux_loss" in said[2]


def test_an_expert_that_lives_again_may_die_again():
    watcher = DeadExpertWatch(patience=2)
    said = warnings(watcher, [0, 1], [0, 1], [0, 1], [1, 1], [0, 1], [0, 1], [0, 1])
    assert [step for step, text in enumerate(said, 1) if text] == [2, 6]


def test_a_pause_shorter_than_the_patience_is_no_death():
    watcher = DeadExpertWatch(patience=3)
    assert not any(warnings(watcher, *([[0, 1], [0, 1], [1, 1]] * 5)))


def test_a_later_death_is_told_without_repeating_the_earlier_and_not_at_once():
    said = warnings(DeadExpertWatch(patience=2), [0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1])
    assert said[1] is not None
    assert "expert 0 of" in said[1]
    assert said[3] is not None
    assert "expert 1 of" in said[3]
    assert [said[0], said[2], said[4]] == [None] * 3


def test_a_death_that_ended_before_it_could_be_told_is_not_told():
    said = warnings(DeadExpertWatch(patience=2), [0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 1])
    assert said[1] is not None
    assert said[2:] == [None] * 3


def test_of_many_layers_three_are_listed():
    dead = {layer: [layer, layer + 1] for layer in range(1, 49)}
    assert listed_layers(dead).endswith("experts 3, 4 of layer 3; 90 more in 45 other layers")


def test_many_deaths_in_many_layers_are_one_line_of_bearable_length():
    text = DeadExpertWatch(patience=1).look(counted([1] + [0] * 63, [0, 5, 0] + [1] * 61))
    assert text is not None
    assert "experts 1, 2, 3, 4, 5, 6, 7, 8 and 55 more of layer 1; experts 0, 2 of layer 2" in text
    assert "\n" not in text


def test_the_default_patience_is_twenty_steps():
    watcher = DeadExpertWatch()
    said = warnings(watcher, *[[0, 1]] * 25)
    assert [step for step, text in enumerate(said, 1) if text] == [20]


def test_clones_are_told_as_the_largest_ranks_rows_over_the_mean_where_there_are_any(tmp_path: Path):
    none = counted([1, 2], [3, 4])
    counts = replace(none, clones=[[120, 200, 100, 64], [0, 0, 0, 0]])
    found = balance_summary(counts)
    assert found["rank_rows"] == [1.2, 1.0]
    assert found["rank_rows_without"] == [2.0, 1.0]
    assert found["clone_bytes"] == [64, 0]
    assert "rank_rows" not in balance_summary(none)
    log = RouterLog(tmp_path / "router.jsonl", 1, 0)
    log.write(1, none)
    log.write(2, counts)
    log.close()
    written = [record.get("clones") for record in read_records(tmp_path / "router.jsonl")]
    assert written == [None, counts.clones]

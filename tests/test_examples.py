"""Examples do what they say, with few steps, in this process. The notebook's cells run in order."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices are so small that threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_text_is_pretrained_on(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("The cat sat on the mat. The dog lay on the log.\n" * 400)
    smaller = {"model__layers": 1, "train__validate_sequences": 4, "train__micro_batch": 8}
    before, after, sample = load_example("pretrain_own_text").pretrain([str(text)], steps=16, **smaller)
    assert after < 0.8 * before
    assert sample.startswith("The ")


def test_a_loop_of_ones_own_learns_and_counts_every_choice():
    losses, load = load_example("own_loop").train(steps=20, batch=8)
    assert losses[-1] < 0.8 * losses[0]
    assert load.shape == (2, 8)
    assert load.sum(1).tolist() == [8 * 64 * 2] * 2


@pytest.mark.extended
def test_a_balance_bias_evens_out_the_load():
    example = load_example("study_routing")
    text = "def area(width):\n"
    plain, _ = example.study(0.0, 60, text)
    biased, counts = example.study(0.005, 60, text)
    assert biased[0] == plain[0]
    # the package's own source is the data, so that any edit changes the ratio: 0.15 to 0.37 with six seeds
    assert sum(biased[-20:]) < 0.8 * sum(plain[-20:])
    assert sum(count.total() for count in counts) == 2 * len(text)


def test_an_upcycled_model_computes_the_same_and_is_trained_on(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    load_example("upcycle").main(steps=3)
    said = capsys.readouterr().out
    difference = said.partition("largest difference of logits: ")[2].split()[0]
    assert float(difference) < 1e-5
    assert "step 3/3" in said


def test_losses_inside_transformers_are_those_of_transformers():
    pytest.importorskip("transformers")
    own, ours = load_example("inside_transformers").compare(steps=5)
    assert ours == pytest.approx(own, rel=1e-4)


def test_the_cells_of_the_notebook_run(capsys: pytest.CaptureFixture[str]):
    notebook = json.loads((FOLDER / "tour.ipynb").read_text(encoding="utf-8"))
    namespace: dict[str, object] = {}
    for number, cell in enumerate(notebook["cells"]):
        assert not cell.get("outputs"), "outputs would grow old"
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("STEPS = 60", "STEPS = 8")
            exec(compile(source, f"cell {number}", "exec"), namespace)
    said = capsys.readouterr().out
    assert "validation loss" in said
    assert "16 x H100" in said


def test_every_example_is_in_the_list():
    files = {path.name for path in FOLDER.iterdir() if path.suffix in {".py", ".ipynb"}}
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {name for name in files if f"]({name})" not in listed} == set()

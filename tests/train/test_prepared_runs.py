"""Runs on prepared data: the same numbers on any number of ranks and after a resume, epochs told, mixtures kept."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moefold.config.run import Config, DataConfig
from moefold.data.corpus import Corpus
from moefold.layout.axes import single_rank_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from tests.support.generated_tokens import write_generated
from tests.support.machine_speed import least_seconds
from tests.support.prepared import prepared, small_sizes, varied_texts, write_jsonl
from tests.support.runs import SMALL, command, metrics, numbers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        small_sizes(patch)
        for name in ("web", "code"):
            prepared(root / name, write_jsonl(root / f"{name}.jsonl", varied_texts(300, name)))
    return f"{root / 'web'},{root / 'code'}"


def train(folders: str, out: Path, steps: int, *words: str, weights: str = "3/1,4:1/1") -> tuple[int | None, str]:
    keys = ["--data.source", "prepared", "--data.files", folders, "--data.weights", weights]
    argv = [
        "train",
        "tiny",
        *SMALL,
        *keys,
        "--train.steps",
        str(steps),
        "--optim.warmup",
        "1",
        "--optim.decay",
        "constant",
    ]
    argv += ["--train.validate_every", "3", "--train.sample_tokens", "0", "--checkpoint.every", "3", "--out", str(out)]
    return command([*argv, *words], out.with_suffix(".log"))


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped_and_a_changed_mixture_is_refused(
    folders: str, tmp_path: Path
):
    code, log = train(folders, tmp_path / "whole", 6)
    assert code == 0, log
    assert "source web:" in log
    assert "epochs by step 6" in log
    last = metrics(tmp_path / "whole")[-1]
    web, own = last["epochs/web"], last["epochs/code"]
    assert web > own > 0
    assert train(folders, tmp_path / "parts", 3)[0] == 0
    code, log = train(folders, tmp_path / "parts", 6, "--resume", "auto", weights="1/1")
    assert code == 2
    assert "give other sequences up to step 3" in log
    code, log = train(folders, tmp_path / "parts", 6, "--resume", "auto")
    assert code == 0, log
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.extended
def test_a_packed_run_goes_on_with_the_same_documents_on_two_ranks(folders: str, tmp_path: Path):
    packed = ["--data.packing", "best_fit", "--data.attend", "document"]
    code, log = train(folders, tmp_path / "whole", 5, *packed)
    assert code == 0, log
    assert train(folders, tmp_path / "parts", 3, *packed)[0] == 0
    code, log = train(folders, tmp_path / "parts", 5, "--resume", "auto")
    assert code == 2
    assert "data.packing = windows, but" in log
    code, log = train(folders, tmp_path / "parts", 5, *packed, "--resume", "auto", "--nproc", "2")
    assert code == 0, log
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    for name in ("loss", "waste"):
        expected = [line[name] for line in whole if name in line]
        assert [line[name] for line in parts if name in line] == pytest.approx(expected, rel=1e-4)
        assert len(expected) == 5


def seconds_to_first_batch(config: Config, corpus: Corpus | None = None) -> float:
    begun = time.perf_counter()
    assemble_run(config, single_rank_world(), Path("."), corpus).loader.next_batch()
    return time.perf_counter() - begun


@pytest.mark.alone
def test_opening_prepared_data_and_the_first_batch_take_two_seconds_beyond_a_start_at_most(tmp_path: Path):
    """Of 100 MB of tokens. A start has its text in memory already."""
    write_generated(tmp_path, 100_000_000)
    data = DataConfig(source="prepared", files=(str(tmp_path),), seq_len=256, tokenizer="byte")
    config = replace(PRESETS["tiny"](), data=data)
    text = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    in_memory = replace(config, data=replace(data, source="stdlib", files=()))
    corpus = Corpus(text, text)
    seconds_to_first_batch(in_memory, corpus)  # first of all kernels are chosen, and modules imported
    start = seconds_to_first_batch(in_memory, corpus)
    assert least_seconds(lambda: seconds_to_first_batch(config) - start, 2.0) < 2

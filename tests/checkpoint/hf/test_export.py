"""The same folder read on any layout gives the same logits, and every layout gives the same tensors back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.export import export_hf_weights
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.read_weights import FolderWeights, load_folder_weights
from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.run import Config, DataConfig, ParallelConfig, PipelineConfig, TrainConfig
from moefold.data.loader import Batch
from moefold.layout.axes import World
from moefold.model.steps import Carry
from moefold.observe.trace import SpanRecorder
from moefold.pipeline.executor import Executor
from moefold.shard.buckets import fill_buckets
from moefold.shard.gradients import Gradients
from moefold.train.assemble import build_model, choose_kernels
from moefold.train.from_hf import from_hf
from moefold.train.share_out import pipeline_shared_weights
from tests.support.hf_models import CASES, make, save, tokens
from tests.support.ranks import run_ranks

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "ep4": {"ep": 4},
    "pp2": {"pp": 2},
    "tp2 ep2 pp2": {"tp": 2, "ep": 2, "pp": 2},
    "etp2 ep2": {"ep": 2, "etp": 2},
    "tp2 etp2 pp2, two stages a rank": {"tp": 2, "etp": 2, "pp": 2, "vpp": 2},
}
MODELS = {
    "qwen3": ("Qwen3Moe", {**CASES["qwen3 tied, biased, not normalised"][1], "num_hidden_layers": 4}),
    "deepseek": ("DeepseekV3", {**CASES["deepseek v3"][1], "num_hidden_layers": 4}),
    "gpt-oss": ("GptOss", {**CASES["gpt-oss"][1], "num_hidden_layers": 4}),
}


def read_and_write(
    world: World, path: str, ids: torch.Tensor, vpp: int
) -> tuple[torch.Tensor, dict[str, Any], list[int]]:
    """Logits of a model read on this layout, everything it exports, and how many values this rank read each time."""
    folder = open_model_folder(Path(path))
    described = describe_model(folder)
    degrees = {name: world.axis(name).size for name in ("tp", "cp", "ep", "etp", "pp")}
    config = Config(
        model=described.model,
        data=DataConfig(seq_len=ids.shape[1]),
        train=TrainConfig(precision="fp32", device="cpu", global_batch=4, micro_batch=4),
        parallel=ParallelConfig(**degrees),
        pipeline=PipelineConfig(vpp=vpp, schedule="interleaved" if vpp > 1 else "1f1b"),
    )
    model = build_model(config, world, choose_kernels(config, world))
    weights = FolderWeights(folder)
    read: list[int] = []

    def counted(name: str, box: Any) -> torch.Tensor:
        read.append((values := fetch(name, box)).numel())
        return values

    fetch, weights.fetch_box = weights.fetch_box, counted
    load_folder_weights(weights, described.family.name_table(described.model), model, world)
    gradients = Gradients(fill_buckets(model, world, held=pipeline_shared_weights(config)), world, "fp32")
    executor = Executor(config, model, gradients, world, SpanRecorder(world.rank, False))
    found = torch.zeros(*ids.shape, described.model.vocab)

    def keep(carry: Carry) -> None:
        found.copy_(model.logits_from_carry(carry))

    with torch.no_grad():
        model.eval()
        executor.forward_only([Batch(ids, ids)], keep)
        exported = {
            name: tensor.clone()
            for name, tensor in export_hf_weights(model, described.model, world, described.family.kind)
        }
    return all_reduce_no_grad(found, world.axis("pp")), exported if world.rank == 0 else {}, read


PAIRS = [(which, layout) for which in MODELS for layout in LAYOUTS if which == "deepseek" or "2 " in layout]


@pytest.mark.parametrize(("which", "layout"), PAIRS)
def test_logits_and_exports_are_the_same_on_any_layout(which: str, layout: str, tmp_path: Path):
    kind, options = MODELS[which]
    folder = save(make(kind, **options), tmp_path / "hf")
    ids = tokens(sequences=4, length=16)
    parallel = dict(LAYOUTS[layout])
    vpp = parallel.pop("vpp", 1)
    size = max(parallel.get("tp", 1), parallel.get("ep", 1) * parallel.get("etp", 1)) * parallel.get("pp", 1)
    results = run_ranks(read_and_write, size, str(folder), ids, vpp, **parallel)
    with torch.no_grad():
        expected = from_hf(folder, seq_len=16).logits(ids)
    before = load_file(folder / "model.safetensors")
    whole = sum(t.numel() for t in before.values())
    largest = max(t.numel() // (len(t) if t.dim() == 3 else 1) for t in before.values())  # of a stack, one expert
    for logits, _, read in results:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        assert sum(read) < whole, "a rank read all of the files"
        assert max(read) <= largest, "more than one tensor, or one expert, was in memory"
    exported = results[0][1]
    assert exported.keys() == before.keys()
    assert all(torch.equal(exported[name], before[name]) for name in before)

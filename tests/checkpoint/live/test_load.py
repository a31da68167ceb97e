"""What is saved comes back to the bit, whoever saved it and whoever loads it; what does not fit is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.verify import open_checkpoint, verify_checkpoint
from moefold.checkpoint.live.load import FoundCheckpoint, load_checkpoint, require_checkpoint
from moefold.checkpoint.live.save import save_checkpoint
from moefold.config.errors import UserError
from moefold.config.run import ParallelConfig
from moefold.layout.axes import World, create_world
from tests.support.ranks import run_ranks

ALONE = create_world(0, 1, torch.device("cpu"), ParallelConfig())


def ignore(_: str) -> None: ...


def tensors(rank: int = 0) -> dict[str, torch.Tensor]:
    """Every dtype and every odd shape a run may have; `random.N` belongs to one rank."""
    g = torch.Generator().manual_seed(1)
    flat = torch.randn(300, generator=g)
    return {
        "fp32": torch.randn(5, 3, generator=g),
        "fp64": torch.randn(4, generator=g, dtype=torch.float64),
        "bf16": torch.randn(3, 2, 4, generator=g).bfloat16(),
        "fp16": torch.randn(7, generator=g).half(),
        "int64": torch.tensor([2**62, -5]),
        "int32": torch.tensor([[1], [2]], dtype=torch.int32),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.25),
        "scalar int": torch.tensor(-7),
        "scalar bool": torch.tensor(True),
        "one": torch.tensor([1.5]),
        "empty": torch.empty(0, 4),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "view a": flat[:100].view(10, 10),
        "view b": flat[128:228],
        "transposed": torch.randn(4, 6, generator=g).T,
        "strange/name.with@signs, and ümlaut": torch.ones(2),
        f"random.{rank}.cpu": torch.full((9,), rank, dtype=torch.uint8),
    }


def blank(rank: int = 0) -> dict[str, torch.Tensor]:
    """The same tensors with other content, in the same kind of memory."""
    found = {}
    for name, t in tensors(rank).items():
        found[name] = t.logical_not() if t.dtype == torch.bool else t.sub(t).add(1)
    return found


def bits(t: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(t.dtype), tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def all_bits(found: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: bits(t) for name, t in found.items()}


def write(world: World, folder: str) -> str:
    state = {"step": 3, "text": "ü", "list": [1, None]}
    return str(save_checkpoint(Path(folder), 3, tensors(world.rank), state, RetentionPolicy(2), world))


def read(world: World, folder: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = require_checkpoint(Path(folder), world, ignore)
    assert found.state == {"step": 3, "text": "ü", "list": [1, None]}
    target = blank(world.rank)
    load_checkpoint(found, target, optional={f"random.{world.rank}.cpu"}, world=world)
    return all_bits(target)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_saved_comes_back_to_the_bit_in_every_dtype_and_shape(size: int, tmp_path: Path):
    run_ranks(write, size, str(tmp_path))
    for rank, found in enumerate(run_ranks(read, size, str(tmp_path))):
        assert found == all_bits(tensors(rank)), f"rank {rank}"


@pytest.mark.parametrize("readers", [1, 2])
def test_four_ranks_save_and_fewer_load(readers: int, tmp_path: Path):
    run_ranks(write, 4, str(tmp_path))
    for rank, found in enumerate(run_ranks(read, readers, str(tmp_path))):
        assert found == all_bits(tensors(rank))


def test_one_rank_saves_and_four_load_what_is_there_and_keep_the_rest(tmp_path: Path):
    write(ALONE, str(tmp_path))
    for rank, found in enumerate(run_ranks(read, 4, str(tmp_path))):
        expected = all_bits(tensors(rank))
        name = f"random.{rank}.cpu"
        if rank:  # nobody saved the generator of this rank
            expected[name] = bits(blank(rank)[name])
        assert found == expected


def test_several_ranks_share_the_writing_and_write_everything_once(tmp_path: Path):
    path = Path(run_ranks(write, 4, str(tmp_path))[0])
    opened = open_checkpoint(path)
    files = {chunk.file for chunks in opened.index.values() for chunk in chunks}
    assert len(files) > 1
    assert all(len(chunks) == 1 for chunks in opened.index.values())
    assert opened.ledger.keys() - opened.index.keys() == {"empty"}
    assert {f.name for f in path.iterdir()} == {*files, "ledger.json", "state.json", "manifest.json"}
    assert verify_checkpoint(path).manifest["files"].keys() == {*files, "ledger.json", "state.json"}


def found_after_saving(tmp_path: Path, content: dict[str, torch.Tensor]) -> FoundCheckpoint:
    save_checkpoint(tmp_path, 1, content, {"step": 1}, RetentionPolicy(1), ALONE)
    return require_checkpoint(tmp_path, ALONE, ignore)


def refusal(
    found: FoundCheckpoint, wanted: dict[str, torch.Tensor], optional: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    with pytest.raises(UserError) as refused:
        load_checkpoint(found, wanted, optional=set(optional), world=ALONE)
    return refused.value.problems


def test_a_missing_an_extra_a_misshapen_and_a_mistyped_tensor_are_all_named_together(tmp_path: Path):
    found = found_after_saving(tmp_path, {n: torch.zeros(2, 3) for n in ("same", "layer.weight", "shape", "dtype")})
    wanted = {
        "same": torch.ones(2, 3),
        "layer.weigth": torch.ones(2, 3),
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    title, *problems = refusal(found, wanted)
    assert str(found.path) in title
    assert problems == [
        '"layer.weigth" is not in the checkpoint (did you mean "layer.weight"?)',
        '"layer.weight" is in the checkpoint, but the model has no such tensor',
        '"dtype" is float32 [2, 3] in the checkpoint; the model expects bfloat16 [2, 3]',
        '"shape" is float32 [2, 3] in the checkpoint; the model expects float32 [3, 2]',
    ]
    assert all((t == 1).all() for t in wanted.values()), "nothing was loaded"


@pytest.mark.parametrize(
    "wanted", [{"a": torch.ones(()), "b": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(())}]
)
def test_a_scalar_is_not_a_tensor_of_one(wanted: dict[str, torch.Tensor], tmp_path: Path):
    found = found_after_saving(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(())})
    if wanted["a"].dim() == 1:
        load_checkpoint(found, wanted, optional=set(), world=ALONE)
        assert all(t == 0 for t in wanted.values())
    else:
        assert len(refusal(found, wanted)) == 3


def test_many_differences_are_counted_and_not_all_listed(tmp_path: Path):
    found = found_after_saving(tmp_path, {f"old {i}": torch.zeros(1) for i in range(50)})
    problems = refusal(found, {f"new {i}": torch.zeros(1) for i in range(50)})
    assert len(problems) == 22
    assert problems[-1] == "and 80 more"


def test_an_optional_tensor_may_be_missing_and_must_fit_if_it_is_there(tmp_path: Path):
    found = found_after_saving(tmp_path, {"a": torch.zeros(2), "maybe": torch.zeros(2)})
    load_checkpoint(
        found, {"a": torch.ones(2), "maybe": torch.ones(2), "other": torch.ones(2)}, {"maybe", "other"}, ALONE
    )
    assert len(refusal(found, {"a": torch.ones(2), "maybe": torch.ones(3)}, frozenset({"maybe"}))) == 2


def test_what_is_no_tensor_is_refused_when_saving(tmp_path: Path):
    with pytest.raises(Exception, match=r"has no attribute"):
        save_checkpoint(tmp_path, 1, {"a": torch.zeros(1), "text": "hello"}, {}, RetentionPolicy(1), ALONE)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "step-00000001").exists()

"""Ring attention where no kernel runs its blocks: whole blocks of scores in fp32, in the real op and in the plan."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moefold.config.run import Config, KernelsConfig
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward
from moefold.plan.layer.ring_blocks import (
    BACKWARD_BLOCKS,
    FORWARD_BLOCKS,
    block_gradient_bytes,
    block_rows,
    builds_ring_scores,
    chunk_length,
    stores_block_gradients,
)
from moefold.plan.memory.peak_memory import GIB, build_run_setting, fullest_rank, plan_memory
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import resolve_recipe

SIZES = B, S, H, G, D = 1, 64, 4, 2, 8
ON_H200 = PlanChoices(device="cuda", capability=90, spread=0.0)


class LiveStorages(TorchDispatchMode):
    """The most storages of at least so many bytes that exist at once."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.live, self.most = size, 0, 0
        self.seen: set[int] = set()

    def freed(self, key: int) -> None:
        self.live -= 1
        self.seen.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if storage.nbytes() < self.size or key in self.seen:
                continue
            self.seen.add(key)
            self.live += 1
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self.freed, key)
        return result


def most_blocks(call) -> int:
    with LiveStorages(4 * B * H * S * S) as counted:
        call()
    return counted.most


def test_copies_of_a_block_are_those_that_the_real_op_has_at_once():
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, heads, D, dtype=torch.bfloat16) for heads in (H, G, G))
    setting = D**-0.5, 0, 0, None, True
    out, lse = torch.empty(B, S, H, D), torch.full((B, H, S), -torch.inf)
    assert most_blocks(lambda: attention_block.reference(out, lse, q, k, v, *setting)) == FORWARD_BLOCKS
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    y = out.bfloat16()
    backward = attention_block_backward.reference
    assert most_blocks(lambda: backward(dq, dk, dv, delta, y, q, k, v, y, lse, *setting)) == BACKWARD_BLOCKS


def long_run(context: str = "ring", cp: int = 8) -> Config:
    words = [
        "--data.seq_len=131072",
        "--train.global_batch=8",
        "--train.micro_batch=1",
        f"--parallel.cp={cp}",
        "--parallel.ep=8",
        f"--parallel.context={context}",
        "--optim.moments=bf16",
    ]
    return resolve_recipe("qwen3-30b-a3b", words, world=8)


def without_kernel(config: Config) -> Config:
    return replace(config, kernels=KernelsConfig(force=("attention_block=reference",)))


def shapes(config: Config, choices: PlanChoices = ON_H200):
    return build_run_setting(config, 8, choices).layer_shapes(0)


def test_a_block_of_the_long_run_is_eight_gib():
    s = shapes(without_kernel(long_run()))
    assert builds_ring_scores(s)
    assert chunk_length(s) == 8192
    assert 4 * block_rows(s) * chunk_length(s) == 8 * GIB


def test_the_plan_counts_the_blocks_where_plain_torch_builds_them():
    """One H200 of eight holds the run by kernels, and does not without."""
    plain = fullest_rank(plan_memory(without_kernel(long_run()), 8, ON_H200))
    kernel = fullest_rank(plan_memory(long_run(), 8, ON_H200))
    assert plain.working - kernel.working > (BACKWARD_BLOCKS - 1) * 8 * GIB
    assert kernel.total + kernel.outside < 139.8 * GIB < plain.total + plain.outside


def test_blocks_on_hopper_store_the_gradients_of_their_scores():
    """Wholly visible blocks of 8,192 positions, as many heads as fit at once; nothing elsewhere."""
    s = shapes(long_run())
    assert stores_block_gradients(s)
    assert 2 * GIB < block_gradient_bytes(s) <= 4.5 * GIB
    assert not stores_block_gradients(shapes(long_run(), replace(ON_H200, capability=80)))
    assert not stores_block_gradients(shapes(long_run("all_gather")))


def test_old_cards_and_unusual_heads_have_no_kernel():
    """The catalog of kernels decides."""
    assert not builds_ring_scores(shapes(long_run()))
    assert builds_ring_scores(shapes(long_run(), replace(ON_H200, capability=70)))
    assert builds_ring_scores(shapes(long_run(), replace(ON_H200, precision="fp32")))


@pytest.mark.parametrize(("context", "cp"), [("all_gather", 8), ("all_to_all", 4), ("ring", 1)])
def test_other_mechanisms_and_one_rank_build_no_blocks(context: str, cp: int):
    assert not builds_ring_scores(shapes(long_run(context, cp)))


def test_a_ring_over_nodes_has_longer_chunks_of_fewer_heads():
    config = without_kernel(long_run("hierarchical"))
    nodes = replace(ON_H200, node=4)
    s = shapes(config, nodes)
    assert chunk_length(s) == 131_072 / 4
    assert block_rows(s) == 32 / 4 * chunk_length(s)
    assert builds_ring_scores(s)
    assert not builds_ring_scores(shapes(config)), "one node of eight has no ring"


def test_the_trainer_of_the_published_tables_has_a_kernel():
    megatron = replace(ON_H200, stack="megatron")
    assert fullest_rank(plan_memory(without_kernel(long_run()), 8, megatron)).working < 8 * GIB

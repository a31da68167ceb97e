"""Multi-token prediction: what the layers that look ahead see, predict and weigh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from moefold.config.run import (
    AttentionConfig,
    BalanceConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from moefold.data.loader import Batch
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.initialise import initialise_parameters
from moefold.model.mtp import labels_shifted_by
from moefold.model.norm import ResidualStream
from moefold.model.steps import run_step_sequence
from moefold.model.transformer import Transformer
from moefold.train.assemble import Run, assemble_run, default_dtype
from moefold.train.evaluate import validation_loss
from moefold.train.parity import TraceEntry, first_mismatch, local_gradients, random_corpus
from moefold.train.step import train_step
from tests.support.models import share, transformer
from tests.support.ranks import run_ranks

SEQUENCES, LENGTH, VOCAB = 4, 8, 256
MODEL = ModelConfig(
    layers=2,
    hidden=8,
    vocab=VOCAB,
    dense_ffn=8,
    init_std=0.4,
    mtp=2,
    mtp_loss=0.7,
    attention=AttentionConfig(heads=2, kv_heads=2, head_dim=4),
    moe=MoeConfig(experts=4, top_k=2, ffn=8, balance=BalanceConfig(aux_loss=0.1)),
)
DENSE = replace(MODEL, moe=replace(MODEL.moe, dense_layers=2, every=3))  # only the first layer ahead has experts


def make(model: ModelConfig = MODEL) -> Transformer:
    with default_dtype(torch.float64):
        made = transformer(model, LENGTH, BoundKernels(Facts("cpu", "fp64", hidden=8, ffn=8)))
    initialise_parameters(made, seed=1)
    return made


def batch(holes: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
    if holes:  # one sequence without labels, one with half of them, one with a gap
        labels[0], labels[1, 5:], labels[2, 3] = IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX
    return tokens, labels


def label_by_loop(labels: list[int], i: int, depth: int) -> int:
    """The token `depth` places behind the next, if it has a loss: those before it need none."""
    wanted = labels[i : i + depth + 1]
    return wanted[-1] if len(wanted) == depth + 1 else IGNORE_INDEX


@pytest.mark.parametrize("depth", [0, 1, 2, 7, 8, 11])
def test_a_label_ahead_is_the_one_so_many_places_on(depth: int):
    _, labels = batch(holes=True)
    expected = [[label_by_loop(row, i, depth) for i in range(LENGTH)] for row in labels.tolist()]
    assert labels_shifted_by(labels, depth).tolist() == expected


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + MODEL.norm_eps).sqrt() * weight


def ahead_by_loop(made: Transformer, tokens: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """The loss of each layer that looks ahead, position by position, from the model's last residual stream on."""
    p, rows, known = dict(made.named_parameters()), labels.tolist(), tokens.tolist()
    made.eval()  # without the layers that look ahead
    x_TD = run_step_sequence(made.body(made.stages[0]), made.begin(tokens))["stream"].settled()
    made.train()
    h_TD = torch.stack([normed(x, p["head.norm.weight"]) for x in x_TD])  # what the head reads
    losses = []
    for depth, layer in enumerate(made.ahead, start=1):
        joined = []
        for t, h in enumerate(h_TD):
            past = t % LENGTH + depth
            token = known[t // LENGTH][past] if past < LENGTH else 0  # where there is none, nothing is predicted either
            vector = p["embedding.weight"][token]
            at = f"ahead.{depth - 1}."
            both = (normed(h, p[at + "stream_norm.weight"]), normed(vector, p[at + "token_norm.weight"]))
            joined.append(p[at + "join.weight"] @ torch.cat(both))
        stream = ResidualStream(torch.stack(joined))
        carry = {"stream": stream, "token_shard": share(SEQUENCES, LENGTH), "aux": torch.zeros(())}
        h_TD = torch.stack(
            [normed(x, p[f"ahead.{depth - 1}.norm.weight"]) for x in layer.block(carry)["stream"].settled()]
        )
        loss = torch.zeros((), dtype=torch.float64)
        for t, h in enumerate(h_TD):
            label = label_by_loop(rows[t // LENGTH], t % LENGTH, depth)
            if label != IGNORE_INDEX:
                logits = p["head.weight"] @ h
                loss = loss - logits.log_softmax(0)[label]
        losses.append(loss)
    return losses


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("model", [MODEL, DENSE], ids=["experts", "dense in part"])
def test_layers_ahead_equal_a_loop_over_positions_with_their_gradients(model: ModelConfig, holes: bool):
    made = make(model)
    mine, plain = made(*batch(holes)).ahead_M, torch.stack(ahead_by_loop(made, *batch(holes)))
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=0)
    names, parameters = zip(*made.named_parameters(), strict=True)
    direction = torch.tensor([1.0, -0.6], dtype=torch.float64)
    found = [torch.autograd.grad(y, parameters, direction, materialize_grads=True) for y in (mine, plain)]
    for name, a, b in zip(names, *found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"gradient of {n}: {m}")
        assert b.abs().sum() > 0, f"{name} has a part in what lies ahead"


def test_gradients_of_layers_ahead_pass_gradcheck():
    made = make()
    names = ["embedding.weight", "head.weight", "ahead.0.join.weight", "ahead.1.join.weight", "ahead.0.norm.weight"]
    names += ["ahead.1.stream_norm.weight", "ahead.0.token_norm.weight", "blocks.1.moe.experts.down"]

    def ahead(*values: torch.Tensor) -> torch.Tensor:
        return functional_call(made, dict(zip(names, values, strict=True)), batch(holes=True)).ahead_M

    leaves = [made.get_parameter(name).detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(ahead, leaves, fast_mode=True)


def predictions(made: Transformer, tokens: torch.Tensor, labels: torch.Tensor):
    """For each depth, the logits and the losses of every position: (B, S, V) and (B, S)."""
    uses: list[Any] = []
    hook = made.head.register_forward_pre_hook(lambda _, args: uses.append(args))
    made(tokens, labels)
    hook.remove()
    found = []
    for h_TD, labels_C in uses:
        logits = made.head(h_TD)
        losses = F.cross_entropy(logits, labels_C, reduction="none", ignore_index=IGNORE_INDEX)
        found.append((logits.view(SEQUENCES, LENGTH, -1), losses.view(SEQUENCES, LENGTH)))
    return found


@pytest.mark.parametrize("changed", range(1, LENGTH + 1))
def test_a_token_changes_no_prediction_further_back_than_the_depth(changed: int):
    made, (tokens, labels) = make(), batch()
    before = predictions(made, tokens, labels)
    other = (labels[:, changed - 1] + 1) % VOCAB
    labels[:, changed - 1] = other
    if changed < LENGTH:
        tokens[:, changed] = other
    after = predictions(made, tokens, labels)
    assert len(before) == 3
    for depth, ((logits, losses), (new_logits, new_losses)) in enumerate(zip(before, after, strict=True)):
        sees = max(0, changed - depth)  # the first position whose layer has seen the token
        torch.testing.assert_close(logits[:, :sees], new_logits[:, :sees], rtol=0, atol=1e-12)
        torch.testing.assert_close(losses[:, : max(0, sees - 1)], new_losses[:, : max(0, sees - 1)], rtol=0, atol=1e-12)
        if sees < LENGTH and depth <= changed < LENGTH:  # the token behind the last is a label only
            assert ((logits - new_logits)[:, sees].abs().amax(-1) > 1e-9).all(), f"depth {depth} sees its token"


def test_there_is_one_embedding_and_one_head_and_both_get_the_gradients_of_all_depths():
    made = make()
    own = {name.split(".")[2] for name, _ in made.named_parameters() if name.startswith("ahead")}
    assert own == {"stream_norm", "token_norm", "join", "block", "norm"}
    losses = made(*batch())
    shared = [made.embedding.weight, made.head.weight]
    whole = torch.autograd.grad(losses.cross_entropy + losses.ahead_M.sum(), shared, retain_graph=True)
    parts = [torch.autograd.grad(one, shared, retain_graph=True) for one in (losses.cross_entropy, *losses.ahead_M)]
    for all_of_it, *each in zip(whole, *parts, strict=True):
        torch.testing.assert_close(all_of_it, sum(each), rtol=1e-12, atol=1e-12)
        assert all(part.norm() > 1e-3 for part in each)


def test_further_tokens_are_predicted_in_training_only():
    made = make()
    trained = made(*batch())
    made.eval()
    losses = made(*batch())
    assert len(trained.ahead_M) == 2
    assert len(losses.ahead_M) == 0
    assert torch.equal(losses.cross_entropy, trained.cross_entropy)


def config(parallel: dict[str, int] | None = None, micro_batch: int = 4, **model: Any) -> Config:
    return Config(
        model=replace(MODEL, **model),
        data=DataConfig(seq_len=LENGTH),
        train=TrainConfig(global_batch=SEQUENCES, micro_batch=micro_batch, precision="fp64", device="cpu"),
        optim=OptimConfig(warmup=0, max_norm=1e9),
        parallel=ParallelConfig(**(parallel or {})),
    )


def start(how: Config, world: World | None = None) -> Run:
    return assemble_run(how, world or single_rank_world(), Path("."), corpus=random_corpus(how))


def step(run: Run) -> tuple[list[TraceEntry], float]:
    """The gradients of one step on a batch with holes, and the loss it reports for further tokens."""
    dp = run.world.axis("dp")
    tokens, labels = (x.tensor_split(dp.size)[dp.index] for x in batch(holes=True))
    report = train_step(run, Batch(tokens, labels, dp.index * len(tokens)))
    return local_gradients(run, ""), report.mtp_loss


def plain_step(how: Config) -> tuple[list[TraceEntry], float]:
    """The same by its formula: each depth is a mean over its own labels, and further ones weigh `mtp_loss` together."""
    model, labels = start(how).model, batch(holes=True)[1]
    losses = model(*batch(holes=True))
    counts = [(labels_shifted_by(labels, depth) != IGNORE_INDEX).sum() for depth in range(1 + how.model.mtp)]
    means = [losses.ahead_M[m] / counts[m + 1] for m in range(how.model.mtp)]
    ahead = sum(means) / how.model.mtp
    total = losses.cross_entropy / counts[0] + losses.balance / labels.numel() + how.model.mtp_loss * ahead
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = zip(names, torch.autograd.grad(total, parameters), strict=True)
    return [TraceEntry(f"gradient {name}", (0,) * g.dim(), g) for name, g in found], ahead.item()


def on_layouts(world: World, cases: list[tuple[dict[str, int], int]]) -> list[tuple[list[TraceEntry], float]]:
    found = []
    for parallel, micro_batch in cases:
        how = config(parallel, micro_batch)
        found.append(step(start(how, create_world(world.rank, world.size, world.device, how.parallel))))
    return found


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_each_depth_is_a_mean_over_its_own_labels_however_a_batch_is_split(micro_batch: int):
    plain, ahead = plain_step(config())
    found, reported = step(start(config(micro_batch=micro_batch)))
    assert first_mismatch(plain, [found], 1e-12) is None
    assert reported == pytest.approx(ahead, rel=1e-12)


def test_each_depth_is_a_mean_over_its_own_labels_on_any_layout():
    plain, ahead = plain_step(config())
    cases = [({}, 1), ({"cp": 2}, 2), ({"tp": 2}, 1), ({"cp": 2, "tp": 2, "ep": 2}, 4), ({"cp": 4}, 2)]
    by_rank = run_ranks(on_layouts, 4, cases)
    for i, case in enumerate(cases):
        assert first_mismatch(plain, [rank[i][0] for rank in by_rank], 1e-12) is None, case
        assert [rank[i][1] for rank in by_rank] == pytest.approx([ahead] * 4, rel=1e-12), case


def test_a_weight_of_zero_gives_the_gradients_of_no_layer_ahead_to_the_bit():
    moe = replace(MODEL.moe, balance=replace(MODEL.moe.balance, aux_loss=0.0))  # of the routers ahead
    none, _ = step(start(config(mtp=0, moe=moe)))
    weightless, _ = step(start(config(mtp_loss=0.0, moe=moe)))
    found = {seen.what: seen.values for seen in weightless}
    assert all(torch.equal(found.pop(seen.what), seen.values) for seen in none)
    assert found
    assert all((values == 0).all() for values in found.values()), "and those layers get none"


def test_a_batch_without_a_label_further_ahead_counts_for_nothing_there():
    run, (tokens, labels) = start(config()), batch()
    labels[:, 1:] = IGNORE_INDEX
    report = train_step(run, Batch(tokens, labels))
    assert report.tokens == SEQUENCES
    assert report.mtp_loss == 0
    assert all(seen.values.isfinite().all() for seen in local_gradients(run, ""))


def test_the_validation_loss_is_that_of_the_model_alone():
    with_layers, without = (start(config(mtp=mtp)) for mtp in (2, 0))
    assert validation_loss(with_layers) == validation_loss(without)

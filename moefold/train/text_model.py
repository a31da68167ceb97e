"""A text model: the model and the tokenizer of a run, a checkpoint or a Hugging Face folder, on one rank or cut over
several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from moefold.checkpoint.format.boxes import box_slices, relative_box
from moefold.checkpoint.hf.read_weights import expert_boxes, local_tensors
from moefold.config.errors import UserError
from moefold.config.run import TRAINED, Config, ParallelConfig
from moefold.data.tokenizer import HuggingFaceTokenizer, Tokenizer, choose_tokenizer, load_tokenizer
from moefold.generate.likelihood import Continuation, Likelihood, score_continuations
from moefold.generate.next_logits import TokenIds
from moefold.generate.rank_batches import ALONE
from moefold.layout.axes import Axis, World, single_rank_world
from moefold.model.transformer import Transformer
from moefold.observe.printer import Printer, print_nothing
from moefold.pipeline.executor import Executor
from moefold.train.convert import (
    DEFAULT_LENGTH,
    WeightSource,
    longest_sequence,
    source_from_checkpoint,
    source_from_folder,
)
from moefold.train.evaluation_config import evaluation_config, without_capacity
from moefold.train.from_hf import WeightFiller, build_to_evaluate, starting_weights
from moefold.train.row_scores import score_rows
from moefold.train.run_vocabulary import VOCABULARY_FILE

WHOLE_ON_A_RANK = ParallelConfig()


@dataclass(frozen=True)
class TextModel:
    """`executor` runs this rank's part of the model forward. `longest`: tokens of the longest sequence. `is_published`:
    from a Hugging Face folder. `step`: of the checkpoint."""

    executor: Executor
    tokenizer: Tokenizer
    longest: int
    is_published: bool
    step: int | None = None

    @property
    def model(self) -> Transformer:
        return self.executor.model

    @property
    def ranks_with_other_prompts(self) -> Axis:
        """Those that may generate text behind prompts of their own: they send each other no tokens."""
        world = self.executor.world
        return ALONE if world.ep_etp.size > 1 else world.dp

    def encode(self, text: str) -> TokenIds:
        """As published tokenizers encode a text, with the token that begins it; as training encoded texts for a run."""
        tokenizer = self.tokenizer
        if self.is_published and isinstance(tokenizer, HuggingFaceTokenizer):
            return tokenizer.encode_whole(text).tolist()
        return tokenizer.encode(text).tolist()

    def score(self, continuations: Sequence[Continuation], batch: int) -> list[Likelihood]:
        """`batch`: sequences that a data-parallel rank computes at once. Every rank calls this, and has all results."""
        world = self.executor.world
        rows = batch * world.dp.size
        score = partial(score_rows, self.executor)
        return score_continuations(score, continuations, self.longest, rows)


def load_text_model(
    path: str | Path,
    device: str = "auto",
    precision: str = "auto",
    seq_len: int = DEFAULT_LENGTH,
    say: Printer = print_nothing,
    world: World | None = None,
    parallel: ParallelConfig = WHOLE_ON_A_RANK,
) -> TextModel:
    """`path` is a run, one of its checkpoints or a Hugging Face folder. `precision` auto: bf16 on a GPU, fp32 on a CPU.
    `seq_len`: the longest sequence, at most the model's own. `world`: the ranks that load it together, each its part by
    the layout `parallel`, in place of one rank on `device`."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    world = world or single_rank_world(device)
    folder = Path(path)
    is_published = (folder / "config.json").is_file()
    source = source_from_folder(folder) if is_published else source_from_checkpoint(folder, say, world)
    tokenizer = open_tokenizer(folder, source)
    longest = min(seq_len, longest_sequence(source))

    def make_filler(config: Config, world: World) -> WeightFiller:
        if is_published:
            return starting_weights(folder, config, world, say)
        return checkpoint_filler(source)

    described = without_capacity(source.model)
    config = evaluation_config(described, parallel, longest, world.size)
    executor = build_to_evaluate(config, precision, world, make_filler)
    return TextModel(executor, tokenizer, longest, is_published, source.step)


def checkpoint_filler(source: WeightSource) -> WeightFiller:
    @torch.no_grad()
    def fill_from_checkpoint(model: Transformer) -> None:
        for name, parts in local_tensors(model).items():
            for held in parts:
                for box in expert_boxes(held):
                    place = relative_box(box, held.part)
                    values = source.fetch_box(name, box)
                    held.tensor[box_slices(place)].copy_(values)

    return fill_from_checkpoint


def open_tokenizer(folder: Path, source: WeightSource) -> Tokenizer:
    """The tokenizer with which a run was trained, or that of a Hugging Face folder."""
    vocab = source.model.vocab
    data = source.data
    if data is not None:
        name = choose_tokenizer(data, vocab)
        if name == TRAINED and source.tokenizer is not None:
            name = str(source.tokenizer / VOCABULARY_FILE)
        return load_tokenizer(name, vocab, data.end_token)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json; expected the model's own beside its weights; put it there")
    return load_tokenizer(str(path), vocab)

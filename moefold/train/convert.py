"""Conversion of weights, tensor by tensor: from a checkpoint or a Hugging Face folder to a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moefold.checkpoint.format.boxes import whole_box
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.hf.config_json import FAMILIES, config_json_for, describe_model, family_for_model
from moefold.checkpoint.hf.dequantise import FP8_SCALE_SUFFIX
from moefold.checkpoint.hf.export import WrittenDtypes, iterate_hf_tensors, written_dtypes
from moefold.checkpoint.hf.family import ModelFamily
from moefold.checkpoint.hf.merged_weights import MergedWeights, WeightAdapters, weight_adapters
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.name_table import NameTable
from moefold.checkpoint.hf.peft_by_expert import peft_adapter_by_expert
from moefold.checkpoint.hf.peft_folder import peft_adapter, write_adapter
from moefold.checkpoint.hf.piece_values import FetchBox
from moefold.checkpoint.hf.quantise import FP8_DTYPE, block_scales_shape, plain_modules
from moefold.checkpoint.hf.quantization_config import fp8_quantisation
from moefold.checkpoint.hf.read_weights import (
    FolderWeights,
    check_aliases,
    check_names_and_shapes,
    is_selection_bias,
    our_box_fetcher,
)
from moefold.checkpoint.hf.upcycle import UpcycledWeights, parse_upcycle_plan, upcycled_model
from moefold.checkpoint.hf.write_weights import (
    DTYPE_CODES,
    PlannedTensor,
    check_output_folder,
    total_bytes,
    write_model_folder,
)
from moefold.checkpoint.live.load import find_checkpoint
from moefold.checkpoint.live.logical_tensors import torch_dtype_text
from moefold.checkpoint.live.saved_model import SavedModel
from moefold.config.errors import RunFailure, UserError
from moefold.config.read import with_values
from moefold.config.run import TRAINED, Config, DataConfig, LoraConfig, ModelConfig
from moefold.data.tokenizer import STDLIB_ENTRIES, STDLIB_TOKENIZER
from moefold.layout.axes import World, single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.observe.printer import Printer
from moefold.train.layerwise_logits import logits_by_layer
from moefold.train.run_vocabulary import VOCABULARY_FILE, vocabulary_of_checkpoint

LOGITS_TOLERANCE = 1e-5  # of an upcycled model's fp32 logits, relative to the largest of the dense model's
COMPARED_TOKENS = 64
DEFAULT_LENGTH = 4096  # of a sequence, where config.json has none
WRITTEN_DTYPES = {**DTYPES, "fp8_block": FP8_DTYPE}  # by the values of --dtype


@dataclass(frozen=True)
class ConvertRequest:
    """The options of `moefold convert`."""

    family: str | None
    dtype: str
    upcycle: str | None
    seed: int
    overwrite: bool


@dataclass(frozen=True)
class SavedAdapters:
    """The adapters of a run. `fetch_box` gives boxes of their tensors."""

    by_weight: WeightAdapters
    lora: LoraConfig
    fetch_box: FetchBox


@dataclass(frozen=True)
class WeightSource:
    """A model whose weights can be fetched by boxes, under our names."""

    model: ModelConfig
    fetch_box: FetchBox
    saved_dtype: Callable[[str], torch.dtype]
    tokenizer: Path | None  # the folder of its files
    longest: int  # sequence that the model was trained for
    biases: tuple[str, ...] = ()  # names of the selection biases that are not zero
    adapters: SavedAdapters | None = None  # merged into what `fetch_box` gives
    data: DataConfig | None = None  # of a run
    step: int | None = None  # of a checkpoint


def convert_weights(source: Path, out: Path, request: ConvertRequest, say: Printer) -> None:
    check_output_folder(out, request.overwrite)
    weights = open_weight_source(source, request, say)
    if weights.adapters is not None:
        say(f"merging {len(weights.adapters.by_weight)} adapters into the weights; --to peft writes adapters alone")
    # Everything that can be refused is refused before the first byte is written.
    family = family_for_model(weights.model, request.family)
    options = config_json_for(family, weights.model)
    table = family.name_table(weights.model)
    refuse_unplaced_biases(weights.biases, table)
    dtypes = requested_dtypes(family, table, weights, request)
    options["max_position_embeddings"] = longest_sequence(weights)
    options["dtype"] = torch_dtype_text(dtype_of_computation(dtypes))
    if FP8_DTYPE in dtypes.values():
        options["quantization_config"] = fp8_quantisation(plain_modules(family, table))
    plan = plan_written_tensors(table, dtypes)
    tensors = iterate_hf_tensors(table, weights.fetch_box, dtypes)
    write_model_folder(out, options, plan, tensors, weights.tokenizer, request.overwrite)
    size = total_bytes(plan) / 1e9
    dtype_texts = {torch_dtype_text(tensor.dtype) for tensor in plan}
    written = sorted(dtype_texts)
    say(f"wrote {out}: {family.kind}, {len(plan)} tensors, {size:.3g} GB as {', '.join(written)}")
    if request.upcycle:
        say(compare_with_dense(source, out))


def convert_adapters(source: Path, out: Path, request: ConvertRequest, by_expert: bool, say: Printer) -> None:
    """Write the adapters of a run alone, in PEFT's format: those of all experts as one, or `by_expert`."""
    check_output_folder(out, request.overwrite)
    if request.upcycle or request.dtype == "fp8_block":
        raise UserError(
            "--to peft takes neither --upcycle nor --dtype fp8_block; expected a LoRA run and a float dtype"
        )
    weights = open_weight_source(source, request, say)
    adapters = weights.adapters
    if adapters is None:
        raise UserError(f"{source} has no adapters; expected a run with lora.rank above 0; write weights with --to hf")
    family = family_for_model(weights.model, request.family)
    config_json_for(family, weights.model)  # refuses what the family has no option for
    table = family.name_table(weights.model)
    if by_expert:
        adapter = peft_adapter_by_expert(table, adapters.by_weight, adapters.fetch_box)
    else:
        adapter = peft_adapter(table, adapters.by_weight, adapters.lora, adapters.fetch_box)
    if request.dtype != "as_saved":
        dtype = DTYPES[request.dtype]
        adapter.tensors = {name: tensor.to(dtype) for name, tensor in adapter.tensors.items()}
    plan = write_adapter(out, adapter, request.overwrite)
    size = total_bytes(plan) / 1e6
    readers = "vLLM and SGLang load" if by_expert else "PEFT loads"
    say(f"wrote {out}: adapters for {family.kind}, {len(plan)} tensors, {size:.3g} MB, as {readers} them")


def open_weight_source(source: Path, request: ConvertRequest, say: Printer) -> WeightSource:
    is_folder = (source / "config.json").exists()
    if request.upcycle and request.dtype == "fp8_block":
        raise UserError(
            "--upcycle with --dtype fp8_block would not compute what the dense model does; "
            "upcycle to bf16, then convert that folder with --dtype fp8_block"
        )
    if request.upcycle and not is_folder:
        raise UserError(f"--upcycle starts from a folder with config.json and safetensors; {source} has no config.json")
    if not is_folder:
        return source_from_checkpoint(source, say)
    weights = source_from_folder(source)
    if request.upcycle:
        return upcycled_source(weights, request)
    return weights


def longest_sequence(source: WeightSource) -> int:
    rope = source.model.attention.rope
    if rope.scaling not in ("yarn", "llama3"):
        return source.longest
    extended = int(rope.factor * rope.original_length)
    return max(extended, source.longest)


def requested_dtypes(
    family: ModelFamily, table: NameTable, source: WeightSource, request: ConvertRequest
) -> WrittenDtypes:  # fmt: skip
    """The dtype of every tensor of the export: as saved, or as requested."""
    if request.dtype != "as_saved":
        dtype = WRITTEN_DTYPES[request.dtype]
        return written_dtypes(family, table, source.model, dtype)
    dtypes: dict[str, torch.dtype] = {}
    for name in table.written:
        pieces = table.source_pieces(name)
        first = pieces[0].ours if pieces else "embedding.weight"
        dtypes[name] = source.saved_dtype(first)
    return dtypes


def dtype_of_computation(dtypes: WrittenDtypes) -> torch.dtype:
    """The dtype that config.json names: the most frequent, FP8 aside."""
    unquantised = [dtype for dtype in dtypes.values() if dtype != FP8_DTYPE]
    return max(set(unquantised), key=unquantised.count)


def plan_written_tensors(table: NameTable, dtypes: WrittenDtypes) -> list[PlannedTensor]:
    """Every tensor of the export, in order. The scales of a tensor in FP8 follow it."""
    plan: list[PlannedTensor] = []
    for name, shape in table.written.items():
        dtype = dtypes[name]
        plan.append(PlannedTensor(name, shape, dtype))
        if dtype == FP8_DTYPE:
            scales_shape = block_scales_shape(shape)
            scales = PlannedTensor(name + FP8_SCALE_SUFFIX, scales_shape, torch.float32)
            plan.append(scales)
    return plan


def refuse_unplaced_biases(biases: Iterable[str], table: NameTable) -> None:
    """Refuse to drop non-zero selection biases: a family without them would route otherwise."""
    lost = [name for name in biases if name not in table.pieces_by_ours]
    if lost:
        raise UserError(
            f"{lost[0]} is not zero ({len(lost)} such), and this family has no place for selection biases; "
            "choose one that has with --family, or train with --model.moe.balance.bias_rate 0"
        )


def source_from_folder(path: Path) -> WeightSource:
    folder = open_model_folder(path)
    described = describe_model(folder)
    weights = FolderWeights(folder)
    table = described.family.name_table(described.model)
    check_names_and_shapes(weights, table)
    check_aliases(weights, table)
    torch_dtypes = {code: dtype for dtype, code in DTYPE_CODES.items() if dtype != FP8_DTYPE}

    def saved_dtype(name: str) -> torch.dtype:
        piece = table.pieces_by_ours[name][0]
        stored = folder.tensors.get(piece.theirs)
        if stored is None:  # mxfp4: stored as blocks and scales
            return torch.bfloat16
        return torch_dtypes.get(stored.dtype, torch.bfloat16)  # fp8 becomes bf16

    length = folder.options.get("max_position_embeddings", DEFAULT_LENGTH)
    fetch_box = our_box_fetcher(weights, table)
    return WeightSource(described.model, fetch_box, saved_dtype, path, length)


def source_from_checkpoint(path: Path, say: Printer, world: World | None = None) -> WeightSource:
    """`world`: the ranks that read it together, one if not said."""
    found = find_checkpoint(path, world or single_rank_world(), say)
    if found is None:
        raise UserError(f"{path} is neither a run, nor a checkpoint, nor a folder with config.json and safetensors")
    problems: dict[str, str] = {}
    saved_settings = found.state["config"]
    config = with_values(Config(), saved_settings, problems)
    if problems:
        raise UserError(f"{found.path} was written with other settings than this version has:", *problems.values())
    say(f"reading {found.path}, step {found.state['step']}")
    saved = SavedModel(found)
    biases = nonzero_biases(saved, config.model.moe.experts)
    data = config.data
    tokenizer = tokenizer_folder(data.tokenizer, config.model.vocab, found.path)
    source = WeightSource(config.model, saved.fetch_box, saved.saved_dtype, tokenizer, data.seq_len, biases)
    source = replace(source, data=data, step=found.state["step"])
    if not config.lora.rank:
        return source
    by_weight = weight_adapters(config)
    merged = MergedWeights(saved.fetch_box, by_weight)
    adapters = SavedAdapters(by_weight, config.lora, saved.fetch_box)
    return replace(source, fetch_box=merged.fetch_box, adapters=adapters)


def nonzero_biases(saved: SavedModel, experts: int) -> tuple[str, ...]:
    """The names of the selection biases that are not zero."""
    biases = filter(is_selection_bias, saved.names)
    box = whole_box([experts])
    nonzero: list[str] = []
    for name in biases:
        biases_E = saved.fetch_box(name, box)
        if biases_E.count_nonzero():
            nonzero.append(name)
    return tuple(nonzero)


def tokenizer_folder(tokenizer: str, vocab: int, checkpoint: StoragePath) -> Path | None:
    """The folder of a tokenizer's files; None for bytes, and for the packaged vocabulary cut to a smaller one."""
    if tokenizer == TRAINED:
        return trained_tokenizer(checkpoint).parent
    if tokenizer == "stdlib":
        return STDLIB_TOKENIZER.parent if vocab >= STDLIB_ENTRIES else None
    path = Path(tokenizer).expanduser()
    if tokenizer == "byte" or not path.is_file():
        return None
    return path.parent


def trained_tokenizer(checkpoint: StoragePath) -> Path:
    found = vocabulary_of_checkpoint(checkpoint)
    if not isinstance(found, Path):  # a folder to convert is a local one
        raise UserError(
            f"{checkpoint} was trained with data.tokenizer = trained, and there is no {VOCABULARY_FILE} in the folder "
            "of its run; put the one of this run there"
        )
    return found


def upcycled_source(dense: WeightSource, request: ConvertRequest) -> WeightSource:
    if dense.model.moe.dense_layers < dense.model.layers:
        dense_kinds = [name for name, family in FAMILIES.items() if family.dense]
        kinds = ", ".join(dense_kinds)
        raise UserError(f"--upcycle starts from a dense model, and this one has experts; expected one of {kinds}")
    plan = parse_upcycle_plan(request.upcycle or "", dense.model)
    weights = UpcycledWeights(plan, dense.model, dense.fetch_box, request.seed)

    def saved_dtype(name: str) -> torch.dtype:
        return dense.saved_dtype(weights.dense_source_name(name))

    model = upcycled_model(dense.model, plan)
    return replace(dense, model=model, fetch_box=weights.fetch_box, saved_dtype=saved_dtype)


def compare_with_dense(dense: Path, upcycled: Path) -> str:
    """The check at step 0: logits of random tokens from both folders as written, with one layer in memory at a time."""
    dense_folder = open_model_folder(dense)
    upcycled_folder = open_model_folder(upcycled)
    vocab = describe_model(dense_folder).model.vocab
    generator = torch.Generator().manual_seed(0)
    shape = (1, COMPARED_TOKENS)
    ids_BS = torch.randint(0, vocab, shape, generator=generator)
    expected = logits_by_layer(dense_folder, ids_BS)
    actual = logits_by_layer(upcycled_folder, ids_BS)
    difference = actual - expected
    error = float(difference.abs().max())
    largest = float(expected.abs().max())
    if not error <= LOGITS_TOLERANCE * max(1.0, largest):
        raise RunFailure(
            f"{upcycled} does not compute what {dense} does: logits differ by up to {error:.2g}; "
            "where down x G is not exact (G no power of two), write it with --dtype fp32"
        )
    return f"the same as the dense model: logits of {COMPARED_TOKENS} random tokens differ by at most {error:.2g}"

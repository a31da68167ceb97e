"""Products that a folder of adapters adapts, under our names, and where each one's tensors lie. Torch-free.

Where a matrix of theirs holds several of ours, each has the whole A and its rows of B. Where ours holds several of
theirs (gate and up), their ranks add up: A has the rows of each and B zeros elsewhere, unless all have one A.

The stack of all experts is one pair in files of transformers 5. Some versions of PEFT took outputs for inputs there;
shapes tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from moefold.anatomy.products import ProductSpec, adaptable_weights, product_of_weight
from moefold.checkpoint.hf.adapter_folder import AdapterFolder, AdapterPair, have_equal_bytes
from moefold.checkpoint.hf.config_json import family_for_model
from moefold.checkpoint.hf.model_folder import first_few_lines
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.config.errors import UserError, printable_text
from moefold.config.run import LoraConfig, ModelConfig

PairShapes = tuple[tuple[int, ...], tuple[int, ...]]  # of A and B
ONE_RANK = {"tp": 1, "ep": 1, "etp": 1}
INNER = ".base_layer"  # the wrapper of the first of two parameters of a module
SINCE_TRANSFORMERS_5 = {".block_sparse_moe.": ".mlp."}  # modules that have another name in files


@dataclass(frozen=True)
class PieceSource:
    """A piece of our weight with the pair that adapts it; `first` is the first row of A in ours."""

    piece: MappedPiece
    pair: AdapterPair
    first: int
    scale: float


@dataclass(frozen=True)
class StackSource:
    """One pair for all experts. `swapped`: its A has the outputs, its B the inputs."""

    piece: MappedPiece
    pair: AdapterPair
    swapped: bool


@dataclass(frozen=True)
class AdaptedProduct:
    """A product of ours with an adapter, of `rank` and `scale`."""

    product: ProductSpec
    rank: int
    scale: float
    pieces: tuple[PieceSource, ...] = ()
    stack: StackSource | None = None


@dataclass(frozen=True)
class OurWeight:
    name: str
    product: ProductSpec
    experts: int  # 0: no stack


class LoraSetting(NamedTuple):
    rank: int
    alpha: float


NO_ADAPTER = LoraSetting(0, 0.0)
SlotPairs = list[AdapterPair | None]  # of all experts' modules with one place in our weight
WeightAndPiece = tuple[OurWeight, MappedPiece]


def adapted_products(folder: AdapterFolder, model: ModelConfig) -> list[AdaptedProduct]:
    """Every product that the folder has an adapter for. Modules that no product of the model is, shapes and ranks that
    do not fit, are refused all at once."""
    table = family_for_model(model).name_table(model)
    weights = list(our_weights(model))
    problems: list[str] = []
    swapped = swapped_modules(folder, weights, table)
    left = set(folder.pairs)
    found: list[AdaptedProduct] = []
    for weight in weights:
        pieces = table.pieces_by_ours.get(weight.name, [])
        pairs = [pair_of(folder, module_of(piece)) for piece in pieces]
        used = [pair.module for pair in pairs if pair]
        if used:
            product = product_from_pieces(folder, weight, pieces, problems)
            found.append(product)
        elif weight.experts and pieces:
            is_swapped = experts_module(pieces[0].theirs) in swapped
            product = product_from_stack(folder, weight, pieces[0], is_swapped)
            if product is not None and product.stack is not None:
                found.append(product)
                used = [product.stack.pair.module]
        left -= set(used)
    for module in sorted(left):
        pair = folder.pairs[module]
        problem = unplaced_problem(pair, table)
        problems.append(problem)
    if problems:
        raise UserError(f"{folder.path} has adapters that do not fit the model:", *first_few_lines(problems))
    return found


def our_weights(model: ModelConfig) -> Iterable[OurWeight]:
    for prefix, weight in adaptable_weights(model):
        product = product_of_weight(prefix, weight, ONE_RANK)
        experts = model.moe.experts if product.place.startswith("moe.experts.") else 0
        yield OurWeight(prefix + weight.name, product, experts)


def module_of(piece: MappedPiece) -> str:
    return piece.theirs.removesuffix(".weight")


def pair_of(folder: AdapterFolder, module: str) -> AdapterPair | None:
    of_module = folder.pairs.get
    return of_module(module) or of_module(present_name(module))


def present_name(module: str) -> str:
    """The name that a module has in transformers 5."""
    for old, new in SINCE_TRANSFORMERS_5.items():
        module = module.replace(old, new)
    return module


def unplaced_problem(pair: AdapterPair, table: NameTable) -> str:
    shown = printable_text(pair.module)
    shapes = shapes_text(pair)
    if f"{pair.module}.weight" in table.pieces_by_theirs:
        return f'"{shown}" has an adapter; embedding, head and norms have none here'
    if pair.module.removesuffix(INNER).endswith(".experts"):
        return f'"{shown}" has {shapes}, which fit no parameter of its experts'
    return f'"{shown}" has {shapes}, but the model has no such linear layer'


def shapes_text(pair: AdapterPair) -> str:
    return f"lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}"


def product_from_pieces(
    folder: AdapterFolder, weight: OurWeight, pieces: list[MappedPiece], problems: list[str]
) -> AdaptedProduct:
    """A product whose matrices of theirs have a pair each, those of experts too."""
    slots = matrices_by_slot(weight, pieces)
    pairs_of: list[SlotPairs] = []
    for modules in slots:
        pairs = [pair_of(folder, module) for module in modules]
        pairs_of.append(pairs)
    is_shared = is_one_a(pairs_of)
    first_of: dict[str, int] = {}
    first = rank = 0
    for modules, pairs in zip(slots, pairs_of, strict=True):
        for module in modules:
            first_of[module] = first
        slot_rank = largest_rank(pairs)
        rank = max(rank, first + slot_rank)
        if not is_shared:
            first += slot_rank
    sources: list[PieceSource] = []
    for piece in pieces:
        module = module_of(piece)
        pair = pair_of(folder, module)
        if pair is None:
            continue
        problems += pair_problems(folder, pair, piece)
        scale = folder.scale_of(module)
        source = PieceSource(piece, pair, first_of[module], scale)
        sources.append(source)
    scale = sources[0].scale
    return AdaptedProduct(weight.product, rank, scale, tuple(sources))


def largest_rank(pairs: SlotPairs) -> int:
    ranks = [pair.a.shape[0] for pair in pairs if pair]
    return max(ranks, default=0)


def matrices_by_slot(weight: OurWeight, pieces: list[MappedPiece]) -> list[list[str]]:
    """Modules of theirs by their place in our weight, such as gate and up: of all experts together."""
    by_expert: dict[int, list[str]] = {}
    for piece in pieces:
        expert = piece.corner[0] if weight.experts else 0
        modules = by_expert.setdefault(expert, [])
        module = module_of(piece)
        if module not in modules:
            modules.append(module)
    slots = zip(*by_expert.values(), strict=True)
    return [list(modules) for modules in slots]


def is_one_a(pairs_of: list[SlotPairs]) -> bool:
    """Whether the pairs of every expert have one A, as those that moefold wrote."""
    if len(pairs_of) == 1:
        return True
    for pairs in zip(*pairs_of, strict=True):
        present = [pair for pair in pairs if pair]
        if len(present) < len(pairs) or not have_equal_bytes(present):
            return False
    return True


def pair_problems(folder: AdapterFolder, pair: AdapterPair, piece: MappedPiece) -> list[str]:
    outputs, inputs = piece.their_shape
    rank = folder.rank_of(pair.module)
    expected = (rank, inputs), (outputs, rank)
    if (pair.a.shape, pair.b.shape) == expected:
        return []
    shapes = shapes_text(pair)
    wanted = " and ".join(str(list(shape)) for shape in expected)
    return [f'"{printable_text(pair.module)}" has {shapes}; expected {wanted}']


def experts_module(theirs: str) -> str:
    """The module that holds the parameters of all experts."""
    module, _, _ = theirs.partition(".experts.")
    return present_name(f"{module}.experts")


def product_from_stack(
    folder: AdapterFolder, weight: OurWeight, piece: MappedPiece, is_swapped: bool
) -> AdaptedProduct | None:  # fmt: skip
    """A product of all experts from one pair, the one of their module whose shapes fit; None: there is none."""
    target = stack_target(weight, piece)
    expected = stack_shapes(folder, weight, piece, is_swapped)
    for pair in stack_pairs(folder, piece):
        if (pair.a.shape, pair.b.shape) == expected:
            source = StackSource(piece, pair, is_swapped)
            rank = folder.rank_of(target)
            scale = folder.scale_of(target)
            return AdaptedProduct(weight.product, rank, scale, stack=source)
    return None


def stack_pairs(folder: AdapterFolder, piece: MappedPiece) -> list[AdapterPair]:
    """The pairs of the module that has all experts' parameters."""
    outer = experts_module(piece.theirs)
    names = (outer, outer + INNER)
    return [folder.pairs[name] for name in names if name in folder.pairs]


def stack_target(weight: OurWeight, piece: MappedPiece) -> str:
    parameter = "down_proj" if weight.product.place.endswith("down_product") else "gate_up_proj"
    return f"{experts_module(piece.theirs)}.{parameter}"


def stack_shapes(folder: AdapterFolder, weight: OurWeight, piece: MappedPiece, is_swapped: bool) -> PairShapes:
    target = stack_target(weight, piece)
    ranks = weight.experts * folder.rank_of(target)  # of all experts together
    inputs = weight.product.inputs
    outputs = weight.product.outputs
    if is_swapped:
        inputs, outputs = outputs, inputs
    return (ranks, inputs), (outputs, ranks)


def swapped_modules(folder: AdapterFolder, weights: Iterable[OurWeight], table: NameTable) -> set[str]:
    """Modules of experts whose pairs fit only with inputs and outputs swapped. One pair alone may fit both ways."""
    by_module: dict[str, list[WeightAndPiece]] = {}
    for weight in weights:
        pieces = table.pieces_by_ours.get(weight.name)
        if not weight.experts or not pieces:
            continue
        first = pieces[0]
        if len(first.their_shape) == 2:
            module = experts_module(first.theirs)
            members = by_module.setdefault(module, [])
            members.append((weight, first))
    swapped: set[str] = set()
    for module, members in by_module.items():
        plain = {stack_shapes(folder, *member, is_swapped=False) for member in members}
        _, first = members[0]
        for pair in stack_pairs(folder, first):
            shapes = (pair.a.shape, pair.b.shape)
            if shapes not in plain:
                swapped.add(module)
    return swapped


def lora_of_folder(folder: AdapterFolder, model: ModelConfig) -> LoraConfig:
    """The section `lora` of a run that goes on with the folder's adapters."""
    products = adapted_products(folder, model)
    settings: dict[str, LoraSetting] = {}
    for each in products:
        alpha = alpha_of(each, folder.rs)
        settings[each.product.name] = LoraSetting(each.rank, alpha)
    counted = Counter(settings.values())
    ((usual, _),) = counted.most_common(1)
    by_place: dict[str, dict[str, LoraSetting]] = {}
    for weight in our_weights(model):
        product = weight.product
        name = product.name
        if name in settings or product.layer is not None:
            by_name = by_place.setdefault(product.place, {})
            by_name[name] = settings.get(name, NO_ADAPTER)
    targets: list[str] = []
    for place, by_name in by_place.items():
        kinds = set(by_name.values())
        if len(kinds) == 1:
            by_name = {f"blocks.*.{place}": kinds.pop()}
        for name, setting in by_name.items():
            if setting.rank:
                target = name + options_text(setting, usual)
                targets.append(target)
    return LoraConfig(
        rank=usual.rank,
        alpha=usual.alpha,
        rs=folder.rs,
        targets=tuple(targets),
    )


def alpha_of(adapted: AdaptedProduct, rs: bool) -> float:
    rank = adapted.rank
    return adapted.scale * (rank**0.5 if rs else rank)


def options_text(setting: LoraSetting, usual: LoraSetting) -> str:
    if setting == usual:
        return ""
    return f": rank={setting.rank} alpha={setting.alpha!r}"

"""The low-rank adapters of a model (LoRA): which products have one, of which rank and scale. Torch-free.

y = W x + s B A x       A: rank x inputs, B: outputs x rank; s = alpha / rank, or alpha / sqrt(rank) (rsLoRA)
y = m (W + s B A) x / |W + s B A|      DoRA, in attention: m and |.|, the length, for each row
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moefold.anatomy.model_totals import model_steps, mtp_steps, train_flops_per_token
from moefold.anatomy.products import ProductSpec, adaptable_weights, product_of_weight, unmatched_pattern
from moefold.config.errors import UserError
from moefold.config.lora_targets import LoraTarget, parse_targets
from moefold.config.run import Config, ParallelConfig

EXPERTS = "moe.experts."
ROUTER = "moe.router"
FUSED_RANK_MULTIPLE = 8
FUSED_RANK_MOST = 256  # a tile of the narrow product has the whole rank
ATTENTION = "attention."


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter of a product. A grouped product has one for each of `experts` experts on a rank."""

    product: ProductSpec
    rank: int
    alpha: float
    scale: float
    experts: int = 1
    dropout: float = 0.0
    has_magnitude: bool = False  # of each row of W + s B A, trained

    @property
    def parameters(self) -> int:
        """On one rank."""
        widths = self.product.inputs + self.product.outputs
        magnitudes = self.product.outputs if self.has_magnitude else 0
        return self.experts * self.rank * widths + magnitudes


def adapter_specs(config: Config) -> list[AdapterSpec]:
    """Every adapter of the model, in the order of its products. Patterns that match no product are refused, and targets
    that leave no adapter."""
    lora = config.lora
    if not lora.rank:
        return []
    products = adaptable_products(config)
    targets = parse_targets(lora.targets)
    unmatched = [target.pattern for target in targets if not matches_some(target, products)]
    problems = [unmatched_pattern("lora.targets", pattern, products) for pattern in unmatched]
    if problems:
        raise UserError(*problems)
    experts_here = config.model.moe.experts // config.parallel.ep
    specs: list[AdapterSpec] = []
    for product in products:
        target = target_of(product, targets)
        if target is None or target.excluded:
            continue
        rank = target.rank or lora.rank
        alpha = target.alpha or lora.alpha
        scale = alpha / (rank**0.5 if lora.rs else rank)
        experts = experts_here if is_grouped(product) else 1
        has_magnitude = lora.dora and product.place.startswith(ATTENTION)
        dropout = 0.0 if is_router(product) else lora.dropout
        specs.append(AdapterSpec(product, rank, alpha, scale, experts, dropout, has_magnitude))
    if not specs:
        raise UserError("lora.targets excludes every product; expected at least one that has an adapter")
    if config.model.moe.router.jitter and any(is_router(spec.product) for spec in specs):
        raise UserError("lora.targets names routers, whose adapters read no jitter; set model.moe.router.jitter to 0")
    if lora.dora and not any(spec.has_magnitude for spec in specs):
        raise UserError("lora.dora = true, but lora.targets names no product of attention, which alone has magnitudes")
    return specs


def target_of(product: ProductSpec, targets: list[LoraTarget]) -> LoraTarget | None:
    """The last target that matches. Where only exclusions are named, and by default, the scope of `precision.recipe` in
    the model's own layers has adapters."""
    matching = [target for target in targets if matches(target, product)]
    if matching:
        return matching[-1]
    names_some = any(not target.excluded for target in targets)
    if names_some or product.layer is None or not product.is_in_scope:
        return None
    return LoraTarget(product.name)


def adaptable_products(config: Config) -> list[ProductSpec]:
    """Linear products, and routers, with the widths of one rank."""
    parallel = config.parallel
    degrees = {"tp": parallel.tp, "ep": parallel.ep, "etp": parallel.etp}
    weights = adaptable_weights(config.model)
    return [product_of_weight(prefix, weight, degrees) for prefix, weight in weights]


def matches(target: LoraTarget, product: ProductSpec) -> bool:
    """A router only where its pattern says so: `blocks.0.*` means products."""
    names_routers = "router" in target.pattern
    return target.matches(product.name) and (names_routers or not is_router(product))


def matches_some(target: LoraTarget, products: list[ProductSpec]) -> bool:
    return any(matches(target, product) for product in products)


def is_router(product: ProductSpec) -> bool:
    return product.place == ROUTER


def is_grouped(product: ProductSpec) -> bool:
    return product.place.startswith(EXPERTS)


def adapters_of_all_ranks(config: Config) -> list[AdapterSpec]:
    """Adapters with the sizes of the whole model."""
    return adapter_specs(replace(config, parallel=ParallelConfig()))


def adapter_parameters(config: Config) -> int:
    """Number of parameters of all adapters."""
    return sum(spec.parameters for spec in adapters_of_all_ranks(config))


def run_flops_per_token(config: Config) -> float:
    """FLOPs per token of forward and backward in a run, recompute not. Beside adapters, frozen weights have no gradient
    product; adapters have all three products."""
    model = config.model
    total = train_flops_per_token(model, config.data.seq_len)
    specs = adapters_of_all_ranks(config)
    if not specs:
        return total
    steps = model_steps(model) + mtp_steps(model)
    total -= sum(2 * step.matmul for step in steps)
    for spec in specs:
        used = model.moe.top_k / spec.experts if is_grouped(spec.product) else 1
        total += 6 * used * spec.parameters
    return total


def adapted_experts(config: Config) -> str:
    """The key that gives routed experts adapters; empty: they have none."""
    return f"lora.rank = {config.lora.rank}" if expert_adapters(config) else ""


def expert_adapters(config: Config) -> list[AdapterSpec]:
    return [spec for spec in adapter_specs(config) if is_grouped(spec.product)]


def unfused_adapters(config: Config) -> str:
    """The key that keeps adapters of routed experts off the fused kernel, or nothing."""
    for spec in expert_adapters(config):
        key = unfused_adapter(spec.rank, spec.dropout > 0)
        if key:
            return key
    return ""


def unfused_adapter(rank: int, drops_inputs: bool) -> str:
    """Fused kernels read rows of the rank, which begin at multiples of 16 bytes, and inputs as they are."""
    if drops_inputs:
        return "lora.dropout"
    is_fused = rank % FUSED_RANK_MULTIPLE == 0 and rank <= FUSED_RANK_MOST
    return "" if is_fused else f"lora.rank = {rank}"

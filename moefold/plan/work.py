"""What one rank does in each step of a layer: products, attention, bytes of pointwise work, kernels launched.

Sizes are those of one microbatch on one rank under its tp, cp, ep and etp. Shapes come from the weights that
`anatomy` declares, so a step that gains a weight is priced without a change here. Letters: T tokens of a rank (cut over
tp by sequence parallelism), A tokens that tensor-parallel products see (whole over tp), R rows of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moefold.anatomy.steps import StepSpec, Weight, travelling_width
from moefold.config.run import Config, ModelConfig
from moefold.plan.choices import Choices

CUT_INSIDE = ("attention.out.weight", "dense.down.weight", "moe.shared.down.weight")  # over tp along what is summed
WHOLE = ("attention.query_down", "attention.latent", "attention.turning", "moe.router", "moe.narrow", "moe.widen", "join")
LAUNCHES = {"attend": 16, "mlp": 8, "route": 30, "narrow": 1, "widen": 1, "dispatch": 14, "shared": 6, "experts": 6,
            "combine": 10, "embed": 3, "predict": 14, "look_ahead": 6, "set_aside": 2}  # fmt: skip


@dataclass(frozen=True)
class Product:
    """`groups` matrix products with `rows` in all, each (rows / groups, k) by (k, n)."""

    rows: float
    n: float
    k: float
    groups: float = 1
    low: bool = True  # in the recipe's low precision

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.n * self.k

    @property
    def weight(self) -> float:
        return self.groups * self.n * self.k


@dataclass(frozen=True)
class Work:
    """A step of one microbatch. `moved` and `quantised` are bytes of a forward's pointwise passes, `context` the
    multiply-adds of attention, `launches` kernels of a forward; a backward has twice as many of each."""

    name: str
    static: bool
    products: tuple[Product, ...] = ()
    context: float = 0.0
    moved: float = 0.0
    quantised: float = 0.0
    launches: float = 0.0
    looped: float = 0.0  # more launches, of a loop over experts whose kernels run side by side
    gathered: float = 0.0  # bytes of one tensor-parallel gather and one scatter, as a whole
    ring: float = 0.0  # bytes of keys and values that a context-parallel rank passes on
    sees: int = 0  # tokens that attention looks back over, and how wide a head is: its rate depends on both
    width: float = 0.0


@dataclass(frozen=True)
class Share:
    """What of a microbatch lies on a rank."""

    tokens: float  # T
    attended: float  # A
    rows: float  # R
    config: Config
    choices: Choices

    @property
    def low(self) -> bool:
        return self.choices.recipe.quantizes


def share_of(config: Config, choices: Choices) -> Share:
    p = config.parallel
    attended = config.train.micro_batch * config.data.seq_len / p.cp
    tokens = attended / p.tp
    return Share(tokens, attended, tokens * config.model.moe.top_k * p.etp, config, choices)


def products_of(step: StepSpec, s: Share) -> tuple[Product, ...]:
    """The products of a step's forward, from its weights."""
    p = s.config.parallel
    found: list[Product] = []
    for w in step.weights:
        if len(w.shape) < 2 or w.name.endswith("bias"):
            continue
        if w.active != 1.0:
            found.append(of_experts(w, s))
            continue
        n, k = prod(w.shape[:-1]), w.shape[-1]
        low = not w.name.startswith(("head", "moe.router", "moe.shared.gate.", "embedding"))
        if w.name.startswith("embedding"):
            continue
        if w.name.startswith(WHOLE):
            found.append(Product(s.tokens, n, k, low=low))
        elif w.name in CUT_INSIDE:
            found.append(Product(s.attended, n, k / p.tp, low=low))
        else:
            found.append(Product(s.attended, n / p.tp, k, low=low))
    return tuple(found)


def of_experts(w: Weight, s: Share) -> Product:
    """One grouped product: the rows of all experts this rank holds. gate_up is cut over etp along n, down along k."""
    p = s.config.parallel
    experts, n, k = w.shape[0], prod(w.shape[1:-1]), w.shape[-1]
    inside = w.name.endswith("down")
    return Product(s.rows, n if inside else n / p.etp, k / p.etp if inside else k, experts / p.ep)


def work_of(step: StepSpec, s: Share) -> Work:
    """Everything a rank does in the forward of one step."""
    products = products_of(step, s)
    if step.name == "predict":
        products = tuple(Product(q.rows, q.n, q.k, low=False) for q in predictions(step, s))
    moved, quantised = traffic(step, s, products)
    launches = LAUNCHES[step.name] + (6 if step.name == "attend" and s.config.model.attention.kind == "mla" else 0)
    launches += 2 * sum(q.low for q in products) if s.low else 0
    looped = 0.0
    if s.choices.stack == "megatron" and step.name == "experts":  # each expert its own product, each operand quantised
        looped = sum(q.groups for q in products) * (5 if s.low else 1)
    a, p = s.config.model.attention, s.config.parallel
    gathers = step.name in ("attend", "mlp", "shared", "predict") and p.tp > 1
    context = step.context * step.seen(s.config.data.seq_len) * s.attended / p.tp
    kv = (a.heads * 2 if a.kind == "mla" else a.kv_heads * 2) * a.head_dim / p.tp
    return Work(
        step.name,
        step.static,
        products,
        context,
        moved,
        quantised,
        launches,
        looped,
        gathered=2.0 * s.attended * s.config.model.hidden if gathers else 0.0,
        ring=2.0 * s.attended * kv if step.name == "attend" and p.cp > 1 else 0.0,
        sees=min(step.window or s.config.data.seq_len, s.config.data.seq_len // p.cp),
        width=step.context / a.heads / 2,
    )


def predictions(step: StepSpec, s: Share) -> tuple[Product, ...]:
    """The head once for every token predicted; the matrix may be the embedding's."""
    m = s.config.model
    return tuple(Product(s.attended, m.vocab / s.config.parallel.tp, m.hidden) for _ in range(1 + m.mtp))


def traffic(step: StepSpec, s: Share, products: tuple[Product, ...]) -> tuple[float, float]:
    """Bytes that pointwise passes of a forward read and write, and those of quantising operands for the products.

    A pass over x elements costs 2 bytes to read and 2 to write each; quantising reads 2 and writes the element twice,
    along rows for this product and along columns for the weight gradient's.
    """
    m, tp = s.config.model, s.config.parallel.tp
    h = m.hidden * s.tokens
    passes = {
        "attend": lambda: 5 * h + attention_passes(m) * s.attended / tp,
        "route": lambda: 3 * h + 12 * m.moe.experts * s.tokens,
        "mlp": lambda: 5 * h + 3 * m.dense_ffn * s.attended / tp,
        "shared": lambda: 2 * h + 3 * m.moe.shared_ffn * s.attended / tp,
        "dispatch": lambda: 2 * travelling_width(m) * s.rows,
        "experts": lambda: expert_passes(m, s.config.parallel.etp) * s.rows,
        "combine": lambda: travelling_width(m) * s.rows + 3 * h,
        "predict": lambda: 2 * h + 6 * m.vocab * (1 + m.mtp) * s.attended / tp,
        "embed": lambda: 2 * h,
        "look_ahead": lambda: 8 * h,
        "set_aside": lambda: 2 * h,
    }
    moved = 2.0 * passes[step.name]() if step.name in passes else 0.0
    low = [q for q in products if q.low] if s.low else []
    inputs = {(q.rows, q.k): q for q in low}  # products of one input share its quantised form
    return moved, sum((2 + 2 * s.choices.recipe.linear) * q.rows * q.k for q in inputs.values())


def expert_passes(m: ModelConfig, etp: int) -> float:
    """Elements of a row that the activation reads and writes, and that biases are added to."""
    biases = 4 * m.moe.ffn / etp + 2 * travelling_width(m) if m.moe.biases else 0
    return 3 * m.moe.ffn / etp + biases


def attention_passes(m: ModelConfig) -> float:
    """Elements a token's queries, keys and values are read and written: turned, normed, and joined for MLA."""
    a = m.attention
    value = (a.kind == "mla" and a.value_dim) or a.head_dim
    if a.kind == "mla":
        return 2 * a.heads * (2 * a.head_dim + value) + 2 * (a.q_rank + a.kv_rank)
    qk = (a.heads + a.kv_heads) * a.head_dim
    return 2 * qk * (2 if a.qk_norm != "none" else 1) + 2 * a.kv_heads * value

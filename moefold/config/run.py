"""The configuration of a run: one frozen tree of keys. Presets make such trees; YAML and the command line change them.

Each key's text is its line in `moefold train --help all`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moefold.config.keys import key, section
from moefold.config.open_names import (
    ATTENTION_NAMES,
    DATA_SOURCE_NAMES,
    DISPATCHER_NAMES,
    OPTIMIZER_NAMES,
    ROUTER_SCORE_NAMES,
)
from moefold.config.tile_names import tiles_in_words

DenseActivation = Literal[
    "swiglu", "geglu", "geglu_tanh", "reglu", "silu", "gelu", "gelu_tanh", "relu", "relu2"
]  # anatomy/activations.py
ExpertActivation = Literal[DenseActivation, "clamped_swiglu"]

StateType = Literal["fp32", "bf16", "fp16", "fp8", "int8"]
BLOCK_TYPES = {"fp16", "fp8", "int8"}  # of optimizer states, with a scale for 128 elements


@dataclass(frozen=True)
class RopeConfig:
    theta: float = key(10_000.0, "base of the rotary frequencies", above=0)
    scaling: Literal["none", "linear", "llama3", "yarn"] = key(
        "none", "scaling of the rotary frequencies for longer contexts"
    )
    factor: float = key(1.0, "context extension factor", at_least=1)
    original_length: int = key(8192, "context length before the extension", at_least=1)
    low_frequency: float = key(
        1.0, "llama3 low_freq_factor: frequencies of fewer periods per original length are scaled in full", above=0
    )
    high_frequency: float = key(
        4.0, "llama3 high_freq_factor: frequencies of more periods per original length are not scaled", above=0
    )
    beta_fast: float = key(
        32.0, "YaRN beta_fast: frequencies of more rotations per original length are not scaled", above=0
    )
    beta_slow: float = key(
        1.0, "YaRN beta_slow: frequencies of fewer rotations per original length are scaled in full", above=0
    )
    round_dims: bool = key(True, "YaRN: round the two correction limits to whole dims")
    mscale: float = key(1.0, "YaRN mscale m: rotary tables are scaled by 0.1 m ln(factor) + 1", at_least=0)
    mscale_all: float = key(
        0.0,
        "YaRN mscale_all_dim: scales attention logits by (0.1 m ln(factor) + 1)^2, rotary tables by the ratio",
        at_least=0,
    )


@dataclass(frozen=True)
class AttentionConfig:
    heads: int = key(4, "number of query heads", at_least=1, at_most=4096)
    kv_heads: int = key(2, "number of key/value heads, each shared by a group of query heads", at_least=1, at_most=4096)
    head_dim: int = key(32, "width of a query and key head", at_least=2, at_most=4096)
    rope_dim: int = key(0, "rotary dims of a head; 0: all", at_least=0, at_most=4096)
    kind: str = key("gqa", "attention mechanism", names=ATTENTION_NAMES)
    q_rank: int = key(0, "MLA: width of the query latent; 0: queries are projected from the stream", at_least=0)
    kv_rank: int = key(64, "MLA: width of the key/value latent", at_least=1)
    value_dim: int = key(0, "MLA: width of a value head; 0: as head_dim", at_least=0, at_most=4096)
    window: int = key(0, "sliding window: tokens that a token attends to, itself included; 0: no window", at_least=0)
    full_every: int = key(1, "with a window: every n-th layer has full attention", at_least=1)
    sinks: bool = key(False, "attention sinks: one learned logit per head joins the softmax and has no value (GPT-OSS)")
    qk_norm: Literal["none", "head", "full"] = key("none", "RMSNorm on queries and keys: per head, or over all heads")
    qkv_bias: bool = key(False, "biases on the query, key and value projections")
    out_bias: bool = key(False, "bias on the output projection")
    rope: RopeConfig = section(RopeConfig)


@dataclass(frozen=True)
class RouterConfig:
    kind: Literal["token_choice", "expert_choice", "sinkhorn"] = key(
        "token_choice",
        "top-k experts of each token, top tokens of each expert and sequence, or optimal transport (Sinkhorn)",
    )
    looks_ahead: bool = key(False, "accept that expert_choice and sinkhorn depend on later tokens of a sequence")
    score: str = key("softmax", "expert scores from router logits", names=ROUTER_SCORE_NAMES)
    normalize: Literal["chosen", "all", "none"] = key(
        "chosen", "router weights sum to one over the chosen experts, over all experts, or are not normalised"
    )
    scale: float = key(1.0, "factor on the router weights (routed_scaling_factor)", above=0)
    groups: int = key(1, "number of expert groups, for group-limited routing", at_least=1)
    groups_chosen: int = key(1, "groups that a token may choose experts from", at_least=1)
    group_score: Literal["best", "best_two"] = key(
        "best_two", "score of a group: its best expert's, or the sum of its two best"
    )
    jitter: float = key(
        0.0,
        "in training, router inputs are multiplied by uniform noise in [1 - jitter, 1 + jitter)",
        at_least=0,
        below=1,
    )
    force_balance: bool = key(False, "benchmarks: round-robin routing, independent of the router's scores")


@dataclass(frozen=True)
class CapacityConfig:
    factor: float = key(
        0.0,
        "capacity of an expert as a multiple of its even share; choices beyond it are dropped; 0: dropless",
        at_least=0,
    )
    drop: Literal["probability", "position"] = key(
        "probability", "which choices a full expert keeps: the largest weights, or the earliest positions"
    )
    over: Literal["sub_sequence", "full_sequence"] = key(
        "sub_sequence", "capacity is counted over the tokens of a rank, or over each whole sequence"
    )
    per_device: bool = key(False, "capacity of a group of experts (balance.devices) instead of each expert's")
    pad: bool = key(False, "pad every expert's rows to its capacity: static shapes")
    pad_rows: int = key(1, "pad each expert's rows to a multiple of this", at_least=1, at_most=4096)


@dataclass(frozen=True)
class BalanceConfig:
    bias_rate: float = key(0.0, "step size of the selection bias that balances expert load; 0: off", at_least=0)
    bias_step: Literal["sign", "proportional"] = key(
        "sign", "step of the bias: a fixed size, or proportional to the load deficit"
    )
    bias_pace: Literal["constant", "learning_rate"] = key(
        "constant", "step size over the run: constant, or decayed with the learning rate"
    )
    aux_loss: float = key(0.0, "weight of the load-balancing loss; 0: off", at_least=0)
    aux_over: Literal["sequence", "microbatch", "global_batch", "previous_batch"] = key(
        "sequence",
        "tokens over which that loss counts load; global_batch adds a forward pass, previous_batch lags by a step",
    )
    device_loss: float = key(0.0, "weight of the loss that balances groups of experts (devices); 0: off", at_least=0)
    devices: int = key(1, "number of such groups, for device_loss and capacity.per_device", at_least=1)
    z_loss: float = key(0.0, "weight of the squared log-sum-exp of router logits; 0: off", at_least=0)


@dataclass(frozen=True)
class MoeConfig:
    experts: int = key(8, "routed experts of a layer", at_least=1, at_most=65_536)
    top_k: int = key(2, "experts per token", at_least=1, at_most=65_536)
    ffn: int = key(256, "inner width of a routed expert", at_least=1, at_most=1_048_576)
    shared_ffn: int = key(0, "inner width of the shared experts together; 0: none", at_least=0, at_most=1_048_576)
    shared_gate: bool = key(False, "learned sigmoid gate, one scalar per token, on the shared experts' output")
    latent: int = key(0, "width that tokens are projected to before the all-to-all (latent MoE); 0: none", at_least=0)
    activation: ExpertActivation = key(
        "swiglu",
        "activation of experts; silu to relu2 have no gate; clamped as in GPT-OSS (shared experts then have swiglu)",
    )
    clamp: float = key(7.0, "clamped_swiglu: limit of gate and up", above=0)
    biases: bool = key(False, "biases in routed experts and router")
    dense_layers: int = key(0, "leading layers with a dense MLP instead of experts", at_least=0)
    every: int = key(1, "after the leading dense layers, every n-th layer has experts", at_least=1)
    gate: Literal["activation", "output"] = key(
        "activation",
        "place of the multiplication by the router weight: in the activation (saves memory), or at the output",
    )
    router: RouterConfig = section(RouterConfig)
    capacity: CapacityConfig = section(CapacityConfig)
    balance: BalanceConfig = section(BalanceConfig)


@dataclass(frozen=True)
class ModelConfig:
    layers: int = key(4, "transformer blocks", at_least=1, at_most=10_000)
    hidden: int = key(128, "width of the residual stream", at_least=1, at_most=1_048_576)
    vocab: int = key(256, "vocabulary size", at_least=2, at_most=16_777_216)
    dense_ffn: int = key(512, "inner width of a dense MLP", at_least=1, at_most=1_048_576)
    dense_activation: DenseActivation = key("swiglu", "activation of a dense MLP; silu to relu2 have no gate")
    norm_eps: float = key(1e-6, "epsilon of RMSNorm, added to the mean square", above=0, below=1)
    tied_head: bool = key(False, "the output head shares the embedding's weights")
    mtp: int = key(0, "multi-token prediction layers, one per further token", at_least=0, at_most=16)
    mtp_loss: float = key(0.1, "weight of the mean multi-token prediction loss", at_least=0)
    init_std: float = key(0.02, "standard deviation of the initial weights", above=0, at_most=10)
    attention: AttentionConfig = section(AttentionConfig)
    moe: MoeConfig = section(MoeConfig)


TRAINED = "trained"  # data.tokenizer: the run trains one at its start


@dataclass(frozen=True)
class DataConfig:
    source: str = key("stdlib", "origin of the training text", names=DATA_SOURCE_NAMES)
    files: tuple[str, ...] = key(
        (), "source files: files or folders of text, .jsonl, Parquet and others; source prepared: prepared folders"
    )
    weights: tuple[str, ...] = key(
        (),
        "source prepared: weights of the folders, such as 0.7/0.3, and from a step on, such as 1000:0.5/0.5; none: by "
        "their tokens",
    )
    format: Literal["text", "chat", "pairs", "preferences"] = key(
        "text",
        "what files hold: text; chat, messages for the tokenizer's chat template; pairs, prompt and response; "
        "preferences, prompt, chosen and rejected; of all but text answers alone are trained",
    )
    text_key: str = key("text", "field of a .jsonl line, or column of a table, that holds the text")
    skip_bad: bool = key(False, "leave out lines, rows and files that cannot be read, and list them")
    tokenizer: str = key(
        "auto",
        "byte; stdlib, 32,000 byte pairs of Python source; trained, model.vocab byte pairs of the run's own text; or "
        "the path of a Hugging Face tokenizer.json; auto: stdlib for source stdlib and a vocabulary above 1000, else "
        "byte",
    )
    end_token: str = key("", "token that ends a document, by its text; empty: that of the tokenizer's files")
    seq_len: int = key(256, "tokens of one training sequence", at_least=1, at_most=16_777_216)
    held_out: float = key(0.05, "share of the text held out for validation, by document", above=0, below=1)
    attend: Literal["sequence", "document"] = key(
        "sequence", "causal attention over the whole sequence, or within each document only"
    )
    packing: Literal["windows", "first_fit", "best_fit"] = key(
        "windows", "sequences are windows of the joined text, or whole documents packed into bins of seq_len"
    )
    batch_of: Literal["sequences", "samples"] = key(
        "sequences",
        "what train.global_batch counts: sequences, or samples, which are packed into as many microbatches of at most "
        "seq_len tokens as they need",
    )


@dataclass(frozen=True)
class TrainConfig:
    steps: int = key(400, "optimizer steps", at_least=1)
    global_batch: int = key(16, "sequences of one step, or samples (data.batch_of), over all ranks", at_least=1)
    micro_batch: int = key(4, "sequences of one microbatch of a rank, at most", at_least=1)
    objective: Literal["next_token", "dpo"] = key(
        "next_token",
        "what is learnt: the next token, or chosen responses over rejected ones (direct preference optimisation)",
    )
    dpo_beta: float = key(0.1, "dpo: how closely the model stays with the weights that the run began with", above=0)
    seed: int = key(1, "seed of initialisation and data order", at_least=0, at_most=2**62)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "training device; auto: cuda where available")
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = key(
        "auto",
        "dtype of weights and activations; auto: bf16 on cuda, else fp32; fp16 has a loss scale; fp64 is for checking",
    )
    validate_every: int = key(100, "steps between validations; the first is at step 0", at_least=1)
    validate_sequences: int = key(64, "sequences of one validation", at_least=1)
    record_routing: str = key("", "file to write the experts of every token to, for replay on any layout")
    replay_routing: str = key("", "file of such a record, whose experts replace the routers' choices")
    step_timeout: float = key(
        0.0,
        "seconds after which a run whose step does not end is ended; 0: 20 longest steps, at least 60",
        at_least=0,
    )
    slow_timeout: float = key(1800.0, "likewise of the start, a checkpoint, an evaluation, the end", above=0)
    skip_spikes: bool = key(False, "steps that observe.spike finds update nothing, at most 5 in a row")
    collect_every: int = key(1, "steps between collections of Python's garbage", at_least=1)
    bind_numa: bool = key(True, "run a rank on the CPU cores of its GPU's NUMA node")
    sample_tokens: int = key(200, "tokens of the sample printed at the end; 0: none", at_least=0)


@dataclass(frozen=True)
class MuonConfig:
    momentum: float = key(0.95, "decay rate of the momentum", at_least=0, below=1)
    nesterov: bool = key(True, "Nesterov momentum: the gradient counts once more in the direction of a step")
    newton_schulz: Literal["quintic", "polar_express"] = key(
        "quintic", "coefficients of Newton-Schulz: one polynomial for all steps, or the best of each step in turn"
    )
    steps: int = key(5, "steps of Newton-Schulz", at_least=1, at_most=20)
    scale: Literal["moonlight", "original", "none"] = key(
        "moonlight",
        "factor on the orthogonal matrix: 0.2 sqrt(max(rows, columns)), as large as AdamW's steps; sqrt(max(1, rows / "
        "columns)); or 1",
    )
    heads: Literal["whole", "each"] = key(
        "whole", "query, key and value projections as one matrix each, or one matrix for each head"
    )


@dataclass(frozen=True)
class OptimConfig:
    rule: str = key(
        "adamw",
        "update rule; a rule for matrices leaves norms, biases, embedding and head to AdamW",
        names=OPTIMIZER_NAMES,
    )
    lr: float = key(3e-3, "peak learning rate", above=0, at_most=100)
    warmup: int = key(40, "steps of linear warm-up", at_least=0)
    decay: Literal["cosine", "wsd", "constant"] = key("cosine", "learning-rate schedule after warm-up")
    decay_share: float = key(0.2, "wsd: share of the steps, at the end, in which the rate decays", above=0, at_most=1)
    final_lr: float = key(0.1, "final learning rate as a share of the peak", at_least=0, at_most=1)
    beta1: float = key(0.9, "AdamW: decay rate of the first moment", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW: decay rate of the second moment", at_least=0, below=1)
    eps: float = key(1e-8, "AdamW: epsilon, added to the root of the second moment", above=0)
    weight_decay: float = key(0.1, "weight decay of matrices (not of norms and biases)", at_least=0)
    max_norm: float = key(1.0, "gradient clipping: largest global norm", above=0)
    clip_by: Literal["global", "previous", "unit"] = key(
        "global",
        "norm that clips: of all gradients of the step, of all of the step before, or of each unit (a layer) by itself",
    )
    when: Literal["step", "backward"] = key(
        "step",
        "time of updates: after backward, or of each unit (a layer) as soon as its gradients are complete, which are "
        "then freed",
    )
    main: Literal["fp32", "split", "bf16", "fp16", "fp8", "int8", "none"] = key(
        "fp32",
        "main weights of a bf16 model: an fp32 copy, or only the lower 16 bits of each weight (numerically identical), "
        "or in fewer bits: bf16 (the model's own, or beside weights stored in FP8), or with a scale for 128 elements, "
        "for AdamW only; or none beside bf16 weights",
    )
    main_rounding: Literal["stochastic", "nearest"] = key(
        "stochastic", "rounding of updated main weights that are coarser than fp32"
    )
    moments: StateType = key(
        "fp32",
        "type of AdamW's moments and Muon's momentum; fp16, fp8 and int8 have a scale for 128 elements, for AdamW only",
    )
    second_moment: Literal["as_first", StateType] = key(
        "as_first", "type of AdamW's second moment, if not optim.moments"
    )
    rounding: Literal["nearest", "stochastic"] = key("nearest", "rounding of bf16 moments")
    states: Literal["device", "host"] = key(
        "device", "memory of moments, momentum and main weights: in host memory they visit the device for the update"
    )
    states_window_gib: float = key(
        8.0,
        "device memory that states in host memory pass through: those of the next update wait there, copied while "
        "forward and backward run",
        at_least=0,
    )
    update: Literal["device", "host"] = key(
        "device", "where AdamW updates: on the host it needs optim.states host and fp32 states"
    )
    gradients: StateType = key(
        "fp32",
        "type of a bf16 model's gradients; bf16 for steps of one microbatch, which need no accumulation; fp16, fp8 and "
        "int8 have a scale for 128 elements, for AdamW only",
    )
    gradient_reduce: Literal["fp32", "bf16", "fp8"] = key(
        "fp32",
        "what gradients are sent as in the reduce-scatter; fp8: e4m3 with a scale for 128 values; sums are always fp32",
    )
    groups: tuple[str, ...] = key(
        (),
        "options by parameter name, first match wins: `*.router.weight: lr=0.5 decay=0 betas=0.9,0.99 rule=adamw`, "
        "`embedding.*: frozen`",
    )
    qk_clip: float = key(
        0.0,
        "largest attention logit of a head: above it query and key projections are rescaled (MuonClip); 0: off",
        at_least=0,
    )
    muon: MuonConfig = section(MuonConfig)


@dataclass(frozen=True)
class LoraConfig:
    rank: int = key(
        0,
        "rank of low-rank adapters (LoRA), which are trained in place of all weights; 0: none",
        at_least=0,
        at_most=4096,
    )
    alpha: float = key(16.0, "scale of an adapter is alpha / rank", above=0)
    rs: bool = key(False, "scale of an adapter is alpha / sqrt(rank) (rsLoRA)")
    dropout: float = key(
        0.0, "in training, this share of an adapter's inputs is zero, by token; the others grow", at_least=0, below=1
    )
    dora: bool = key(
        False, "rows of attention's adapted weights have a trained magnitude, adapters change their direction (DoRA)"
    )
    targets: tuple[str, ...] = key(
        (),
        "products with adapters by name, the last match counts: `*.attention.*`, `*.moe.experts.*: rank=8 alpha=32`, "
        "`blocks.0.*: none`; by default attention, dense MLPs, shared and routed experts of all layers",
    )
    base: Literal["plain", "fp8", "nf4", "nf4_double", "mxfp4"] = key(
        "plain",
        "frozen weights of attention, dense MLPs, shared and routed experts: in the model's precision (plain), or in "
        "blocks of fewer bits, dequantised where they are multiplied (QLoRA); nf4_double: with scales in 8 bits too",
    )


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = key(1, "tensor-parallel ranks: attention and dense layers are sharded over them", at_least=1)
    cp: int = key(1, "context-parallel ranks: sequences are sharded over them", at_least=1)
    pp: int = key(1, "pipeline-parallel ranks: layers are sharded over them", at_least=1)
    ep: int = key(1, "expert-parallel ranks: experts are distributed over them", at_least=1)
    etp: int = key(1, "expert-tensor-parallel ranks: each expert is sharded over them", at_least=1)
    context: Literal["auto", "all_gather", "all_to_all", "ring", "hierarchical"] = key(
        "auto",
        "context parallelism: mechanism that gives queries the keys and values of other cp ranks; auto: that of least "
        "predicted time",
    )
    context_sizes: Literal["fixed", "dynamic"] = key(
        "fixed",
        "ranks that share a sequence: parallel.cp; or 1, 2, 4, ... of the dp x cp ranks, chosen for every microbatch, "
        "the fewest that fit its samples (dynamic context parallelism)",
    )
    context_sending: tuple[str, ...] = key(
        (),
        "dynamic sizes: keys that a token attends to while its own keys and values are sent, for groups of 2, 4, ... "
        "ranks, or one number for all; by default measured at the start; 0: attention hides what is sent",
    )
    dispatcher: str = key("auto", "dispatcher: sends tokens to the experts of other ranks", names=DISPATCHER_NAMES)
    room: float = key(
        0.0,
        "symmetric: rows of its experts that a rank has room for, over the mean; a step with more is run again by "
        "dedup; 0: all that can come",
        at_least=0,
        at_most=65_536,
    )
    kept_rooms: int = key(
        2,
        "symmetric: microbatches of a layer whose arrived tokens stay where ranks wrote them until backward has used "
        "them; those of further ones are copied; each takes the memory of a room",
        at_least=0,
        at_most=65_536,
    )
    row_chunks: int = key(
        1,
        "parts of a microbatch's tokens that are dispatched, computed and combined one by one in training, so that the "
        "exchange of one part overlaps the experts of another",
        at_least=1,
        at_most=64,
    )
    clone_slots: int = key(
        0,
        "spare slots of an ep rank, for clones of hot experts of other ranks during one microbatch; 0: none",
        at_least=0,
        at_most=64,
    )
    clone_decision: Literal["now", "previous"] = key(
        "now", "experts to clone: by the counts of this microbatch, or by those of the layer's microbatch before"
    )
    tiles: tuple[str, ...] = key(
        (), f"products multiplied tile by tile while rows travel between ranks: {tiles_in_words()}"
    )
    tile_senders: int = key(
        8, "tiles, on a GPU: programs of a kernel that send, while all others multiply", at_least=1, at_most=64
    )


@dataclass(frozen=True)
class ShardConfig:
    mode: Literal["zero1", "zero3"] = key(
        "zero1",
        "what replicas share out: gradients and optimizer state (zero1), or weights too, gathered where steps use them",
    )
    replicas: int = key(
        1, "copies of all shares: shares lie in groups of dp x cp / replicas ranks (HSDP)", at_least=1, at_most=65_536
    )
    sync: Literal["flat", "hierarchical"] = key(
        "flat",
        "how gradients are summed and weights gathered: over all replicas at once, or inside a node and across nodes",
    )


@dataclass(frozen=True)
class PipelineConfig:
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"] = key(
        "1f1b", "pipeline schedule; `moefold simulate` draws it"
    )
    vpp: int = key(1, "stages of a pipeline rank (virtual pipeline)", at_least=1, at_most=1024)
    layout: str = key("", "pieces of each stage, as Et*3|(tt|)*29m|L; by default the most even cut")
    pair: bool = key(
        False,
        "run passes of two microbatches in one slot, so that the all-to-all of one overlaps the compute of the other",
    )
    pairs: Literal["opposite", "alike"] = key(
        "opposite", "with pair: opposite has a forward and a backward in a slot, alike two forwards or two backwards"
    )
    fill: bool = key(True, "with pair: weight gradients are split off and fill the gaps of a slot")
    defer: bool = key(False, "weight gradients are deferred, so that the inputs of other ranks are computed first")


@dataclass(frozen=True)
class PrecisionConfig:
    recipe: Literal["plain", "fp8_block", "fp8_tensor", "fp8_row", "fp8_hybrid", "mxfp8", "nvfp4"] = key(
        "plain",
        "number format of the products of attention, dense MLPs, shared and routed experts; plain: train.precision",
    )
    recipes: tuple[str, ...] = key((), "recipes by product name, the last match counts: `*.attention.*: plain`")
    exclude_first: int = key(0, "first layers that stay plain", at_least=0)
    exclude_last: int = key(
        -1,
        "last layers that stay plain, without those of multi-token prediction; -1: 15 % of all with nvfp4, else none",
        at_least=-1,
    )
    power_of_two_scales: bool = key(False, "FP8 scales are rounded up to powers of two")
    gradient_format: Literal["e4m3", "e5m2"] = key("e4m3", "FP8 format of gradients; all else is e4m3")
    scale_rounding: Literal["up", "down"] = key("up", "mxfp8: powers of two above, or below as in OCP's text")
    weight_blocks: Literal["auto", "rows", "squares"] = key(
        "auto", "mxfp8, nvfp4: scales of weights along rows, or of squares; auto: rows in mxfp8, squares in nvfp4"
    )
    hadamard: bool = key(True, "nvfp4: random Hadamard transform of both operands of weight gradients")
    stochastic: bool = key(True, "nvfp4: stochastic rounding of gradients")
    rounding_seed: int = key(0, "nvfp4: seed of stochastic rounding")
    accumulate: Literal["promoted", "fast"] = key(
        "promoted",
        "fp8_tensor, fp8_row: forward and data gradients are summed in fp32 every 128 values, or in the tensor core",
    )
    storage: Literal["plain", "fp8"] = key(
        "plain",
        "weights that products read in FP8: beside a copy in train.precision, or without one (main weights are fp32)",
    )
    scaling: Literal["current", "delayed"] = key(
        "current", "fp8_tensor and fp8_row: scales from the values themselves, or from those of earlier steps"
    )
    history: int = key(16, "delayed scaling: steps whose largest magnitude counts", at_least=1, at_most=1024)
    margin: int = key(0, "delayed scaling: scales are larger by so many powers of two", at_least=0, at_most=8)
    dispatch: Literal["plain", "fp8"] = key(
        "plain", "tokens on their way to experts of other ranks: train.precision, or e4m3 with a scale for 128 values"
    )
    combine_gradient: Literal["plain", "e4m3", "e5m2"] = key(
        "plain", "gradients of experts' sums on their way to other ranks: train.precision, or FP8 as tokens are"
    )
    tp_sums: Literal["plain", "fp8"] = key(
        "plain", "summands of attention and dense MLPs between tp ranks: a reduce-scatter, or e4m3 with a scale a token"
    )
    tp_sum_gradients: Literal["plain", "fp8"] = key(
        "plain", "gradients of those sums between tp ranks: train.precision, or e4m3 with a scale for 128 tokens"
    )
    loss_scale: float = key(
        65536.0, "fp16: first loss scale; a step that overflows is skipped and halves it", at_least=1, at_most=2.0**32
    )
    loss_scale_growth: int = key(2000, "fp16: steps without overflow after which the loss scale doubles", at_least=1)


@dataclass(frozen=True)
class MemoryConfig:
    recompute: tuple[str, ...] = key(
        (),
        "regions that are rebuilt in backward instead of kept: norm, activation, up, core, swap, mlp, shared, "
        "dispatch, experts, moe, layer, or sar for norm, swap, dispatch and activation; for some layers: `moe@0-7`, "
        "`layer@3`, `moe@0-14/2` for every second one; `explain` has what each saves",
    )
    offload: tuple[str, ...] = key(
        (),
        "regions whose saved tensors lie on the host between forward and backward: those of recompute but swap and "
        "dispatch, and out; the last layer stays; or expert_weights: frozen experts lie there and are fetched ahead",
    )
    offload_gib: float = key(64.0, "most pinned host memory of a rank for offloaded tensors, in GiB", above=0)
    expert_chunk: int = key(
        0,
        "most rows that a layer's experts compute at once; further rows follow in chunks, which backward computes "
        "again; 0: all at once",
        at_least=0,
    )
    offload_least: int = key(1_048_576, "bytes of the smallest tensor that is offloaded", at_least=1)
    stash: Literal["none", "stack", "pages"] = key(
        "none",
        "what experts save for backward lies in one pool, as many rows as there are; stack: freed in the reverse "
        "order; pages: in any order, for pipelines; none: in tensors of their own",
    )
    stash_gib: float = key(8.0, "size of the pool of stashed rows, in GiB of device memory", above=0)
    graphs: Literal["none", "static", "whole"] = key(
        "none",
        "whole: the step is one CUDA graph, captured once and replayed; static: attention, router, dense MLP and "
        "shared experts are graphs, the rest is launched anew, on any number of ranks; none: every kernel is",
    )
    tape: bool = key(
        False,
        "on a CPU, record the ops of a step once and replay them, where nothing stands in the way; bits stay the same",
    )
    tape_processes: int = key(
        1,
        "processes that share the replays of a tape; 2: each op of a step on one thread, two ops at once, where a "
        "machine has two cores",
        at_least=1,
        at_most=2,
    )


@dataclass(frozen=True)
class KernelsConfig:
    force: tuple[str, ...] = key((), "implementations to use regardless, as op=name, such as attention=reference")
    repeatable: bool = key(
        True,
        "bitwise equal runs of one seed on a GPU too (exceptions: `explain`); false allows faster sums in any order",
    )
    invariant: bool = key(
        False, "a token's bits in forward do not depend on the rest of its batch, on micro_batch, dp or ep; slow"
    )


@dataclass(frozen=True)
class ObserveConfig:
    log_every: int = key(10, "steps between log lines when output is not a terminal", at_least=1)
    check_collectives: bool = key(
        False, "debug: every collective is compared across ranks before it starts; a difference names the rank"
    )
    profile: bool = key(False, "print time and memory of the tenth step by part; write trace.json for Perfetto")
    tensorboard: bool = key(True, "write TensorBoard events into the run's folder")
    wandb: str = key("", "project of Weights & Biases to write metrics to (moefold[wandb]); empty: none")
    mlflow: str = key("", "experiment of MLflow to write metrics to (moefold[mlflow]); empty: none")
    router_every: int = key(10, "steps between lines of router.jsonl, the load of every expert", at_least=1)
    fp8_every: int = key(100, "steps between lines of fp8.jsonl, figures of every FP8 operand", at_least=1)
    compare_every: int = key(
        0, "steps between comparisons of replicas by checksums of their weights in every step; 0: none", at_least=0
    )
    spike: float = key(
        0.0,
        "spikes of loss or gradient norm to report: so many median deviations above the median of 64 steps; 0: none",
        at_least=0,
    )
    times_every: int = key(
        10, "steps between exchanges of ranks' times of compute, communication and waiting; 0: none", at_least=0
    )
    slow_rank: float = key(
        2.0,
        "compute time of a rank, in medians of the others', from which it is named as slow when it persists; 0: never",
        at_least=0,
    )
    fault: str = key("", "fault to inject, to see it found: `nan weight=head.norm.weight rank=1 step=3`")


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(100, "steps between checkpoints; one more is written at the end; 0: none at all", at_least=0)
    keep: int = key(2, "number of latest checkpoints to keep", at_least=1)
    keep_every: int = key(0, "checkpoints at multiples of this step are never deleted; 0: none", at_least=0)
    path: str = key("", "checkpoint folder, or an fsspec path (s3://...); by default checkpoints/ in the run's folder")
    host_gib: float = key(
        0.0,
        "most host memory of a node for writing one, in GiB, through which larger files pass in pieces; 0: whole files "
        "where they fit, else 2",
        at_least=0,
    )
    memory_every: int = key(
        0, "steps between checkpoints in the memory of keepers, for restarts without the disk; 0: none", at_least=0
    )
    memory_gib: float = key(64.0, "most memory of a node for checkpoints in memory, in GiB", above=0)


@dataclass(frozen=True)
class Config:
    name: str = key("custom", "name of the run")
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    train: TrainConfig = section(TrainConfig)
    optim: OptimConfig = section(OptimConfig)
    lora: LoraConfig = section(LoraConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    shard: ShardConfig = section(ShardConfig)
    pipeline: PipelineConfig = section(PipelineConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    memory: MemoryConfig = section(MemoryConfig)
    kernels: KernelsConfig = section(KernelsConfig)
    observe: ObserveConfig = section(ObserveConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

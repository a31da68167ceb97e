"""What a run is: one frozen tree of keys. Presets make such trees; YAML and the command line change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moefold.config.keys import key, section


@dataclass(frozen=True)
class RopeConfig:
    theta: float = key(10_000.0, "base of the rotary frequencies", above=0)
    scaling: Literal["none", "linear", "llama3", "yarn"] = key("none", "how frequencies stretch for longer contexts")
    factor: float = key(1.0, "by how much the context is stretched", at_least=1)
    original_length: int = key(8192, "context length before stretching", at_least=1)
    low_frequency: float = key(1.0, "llama3: waves per original length below which all is stretched", above=0)
    high_frequency: float = key(4.0, "llama3: waves per original length above which nothing is", above=0)
    beta_fast: float = key(32.0, "yarn: turns per original length above which nothing is stretched", above=0)
    beta_slow: float = key(1.0, "yarn: turns per original length below which all is", above=0)
    round_dims: bool = key(True, "yarn: the two limits are rounded to whole dims")
    mscale: float = key(1.0, "YaRN mscale m: rotary tables are scaled by 0.1 m ln(factor) + 1", at_least=0)
    mscale_all: float = key(
        0.0,
        "YaRN mscale_all_dim: scales attention logits by (0.1 m ln(factor) + 1)^2, rotary tables by the ratio",
        at_least=0,
    )


@dataclass(frozen=True)
class AttentionConfig:
    heads: int = key(4, "query heads", at_least=1, at_most=4096)
    kv_heads: int = key(2, "key and value heads, shared by groups of query heads", at_least=1, at_most=4096)
    head_dim: int = key(32, "width of a query and key head", at_least=2, at_most=4096)
    rope_dim: int = key(0, "how many dims of a head turn by position; 0: all", at_least=0, at_most=4096)
    kind: Literal["gqa", "mla"] = key("gqa", "grouped queries, or keys and values from one narrow latent (MLA)")
    q_rank: int = key(0, "mla: width of the latent that queries come from; 0: straight from the stream", at_least=0)
    kv_rank: int = key(64, "mla: width of the latent that keys and values come from", at_least=1)
    value_dim: int = key(0, "mla: width of a value head; 0: as head_dim", at_least=0, at_most=4096)
    window: int = key(0, "a token sees this many tokens, itself included; 0: all before it", at_least=0)
    full_every: int = key(1, "with a window: every so many layers one sees all", at_least=1)
    sinks: bool = key(False, "each head has a learned score that no token has, to look at nothing")
    qk_norm: Literal["none", "head", "full"] = key("none", "RMSNorm on queries and keys: per head, or over all heads")
    qkv_bias: bool = key(False, "biases on the query, key and value projections")
    out_bias: bool = key(False, "bias on the output projection")
    rope: RopeConfig = section(RopeConfig)


@dataclass(frozen=True)
class RouterConfig:
    kind: Literal["token_choice", "expert_choice", "sinkhorn"] = key(
        "token_choice", "tokens choose experts, experts choose tokens of each sequence, or both by optimal transport"
    )
    looks_ahead: bool = key(False, "accept that expert_choice and sinkhorn see later tokens of a sequence")
    score: Literal["softmax", "softmax_chosen", "sigmoid"] = key(
        "softmax", "scores from router logits: over all experts, over the chosen ones, or each by itself"
    )
    normalize: Literal["chosen", "all", "none"] = key(
        "chosen", "weights sum to one over the chosen experts, over all, or not"
    )
    scale: float = key(1.0, "factor on the weights (routed_scaling_factor)", above=0)
    groups: int = key(1, "experts are in so many groups, of which a token may choose a few", at_least=1)
    groups_chosen: int = key(1, "how many groups a token may choose from", at_least=1)
    group_score: Literal["best", "best_two"] = key("best_two", "score of a group: its best expert, or its two best")
    jitter: float = key(0.0, "router inputs are multiplied by noise within 1 +- this in training", at_least=0, below=1)
    force_balance: bool = key(False, "benchmarks: round-robin routing, whatever the router's scores are")


@dataclass(frozen=True)
class CapacityConfig:
    factor: float = key(
        0.0, "an expert takes at most this times its even share of tokens, the rest is dropped; 0: dropless", at_least=0
    )
    drop: Literal["probability", "position"] = key("probability", "which tokens stay when an expert is full")
    over: Literal["sub_sequence", "full_sequence"] = key(
        "sub_sequence", "an expert's share is counted over a rank's tokens, or over whole sequences"
    )
    per_device: bool = key(False, "the capacity is that of a group of experts (balance.devices), not of each expert")
    pad: bool = key(False, "pad every expert's rows to its capacity: static shapes")
    pad_rows: int = key(1, "pad each expert's rows to a multiple of this", at_least=1, at_most=4096)


@dataclass(frozen=True)
class BalanceConfig:
    bias_rate: float = key(0.0, "step of the selection bias that evens out expert load; 0: off", at_least=0)
    bias_step: Literal["sign", "proportional"] = key("sign", "the bias moves by a fixed step, or by the lack of load")
    bias_pace: Literal["constant", "learning_rate"] = key(
        "constant", "that step is constant, or falls with the learning rate"
    )
    aux_loss: float = key(0.0, "weight of the load-balancing loss; 0: off", at_least=0)
    aux_over: Literal["sequence", "microbatch", "global_batch", "previous_batch"] = key(
        "sequence",
        "what that loss evens out; global_batch counts in a forward pass of its own, previous_batch lags by a step",
    )
    device_loss: float = key(0.0, "weight of the loss that evens out groups of experts (devices); 0: off", at_least=0)
    devices: int = key(1, "number of such groups, for device_loss and capacity.per_device", at_least=1)
    z_loss: float = key(0.0, "weight of the squared log-sum-exp of router logits; 0: off", at_least=0)


@dataclass(frozen=True)
class MoeConfig:
    experts: int = key(8, "routed experts of a layer", at_least=1, at_most=65_536)
    top_k: int = key(2, "experts a token visits", at_least=1, at_most=65_536)
    ffn: int = key(256, "inner width of a routed expert", at_least=1, at_most=1_048_576)
    shared_ffn: int = key(0, "inner width of the shared experts together; 0: none", at_least=0, at_most=1_048_576)
    shared_gate: bool = key(False, "a learned sigmoid gate, one number a token, on the shared experts' output")
    latent: int = key(0, "width that tokens are projected to before the all-to-all (latent MoE); 0: none", at_least=0)
    activation: Literal["swiglu", "clamped_swiglu"] = key("swiglu", "of routed experts; clamped as in GPT-OSS")
    clamp: float = key(7.0, "clamped_swiglu: limit of gate and up", above=0)
    biases: bool = key(False, "routed experts and the router have biases")
    dense_layers: int = key(0, "how many of the first layers have a dense MLP instead of experts", at_least=0)
    every: int = key(1, "behind those, every so many layers one has experts", at_least=1)
    gate: Literal["activation", "output"] = key(
        "activation", "where a row meets its router weight: inside the activation (saves memory), or after the expert"
    )
    router: RouterConfig = section(RouterConfig)
    capacity: CapacityConfig = section(CapacityConfig)
    balance: BalanceConfig = section(BalanceConfig)


@dataclass(frozen=True)
class ModelConfig:
    layers: int = key(4, "transformer blocks", at_least=1, at_most=10_000)
    hidden: int = key(128, "width of the residual stream", at_least=1, at_most=1_048_576)
    vocab: int = key(256, "tokens the model knows", at_least=2, at_most=16_777_216)
    dense_ffn: int = key(512, "inner width of a dense MLP", at_least=1, at_most=1_048_576)
    norm_eps: float = key(1e-6, "added to the mean square inside RMSNorm", above=0, below=1)
    tied_head: bool = key(False, "the output head is the embedding")
    mtp: int = key(0, "layers that predict further tokens ahead (multi-token prediction)", at_least=0, at_most=16)
    mtp_loss: float = key(0.1, "weight of their mean loss", at_least=0)
    init_std: float = key(0.02, "standard deviation of the initial weights", above=0, at_most=10)
    attention: AttentionConfig = section(AttentionConfig)
    moe: MoeConfig = section(MoeConfig)


@dataclass(frozen=True)
class DataConfig:
    source: Literal["stdlib", "files", "zipf"] = key(
        "stdlib", "Python's own library source, the files you name, or random tokens, skewed by Zipf's law"
    )
    files: tuple[str, ...] = key((), "text or .jsonl files (or folders of them), for source files")
    text_key: str = key("text", "the field of a .jsonl line that holds the text")
    tokenizer: str = key("byte", "byte, or the path of a Hugging Face tokenizer.json")
    seq_len: int = key(256, "tokens of one training sequence", at_least=1, at_most=16_777_216)
    held_out: float = key(0.05, "share of the text kept for validation", above=0, below=1)
    attend: Literal["sequence", "document"] = key(
        "sequence", "what a token may see before it: all of its sequence, or its own document alone"
    )


@dataclass(frozen=True)
class TrainConfig:
    steps: int = key(400, "optimizer steps", at_least=1)
    global_batch: int = key(16, "sequences of one step, over all ranks", at_least=1)
    micro_batch: int = key(4, "sequences one rank takes at a time, at most", at_least=1)
    seed: int = key(1, "of initialisation and data order", at_least=0, at_most=2**62)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "where to train; auto: cuda if there is one")
    precision: Literal["auto", "fp32", "bf16", "fp64"] = key(
        "auto", "of weights and activations; auto: bf16 on cuda, else fp32; fp64 is for checking"
    )
    validate_every: int = key(100, "steps between validations; the first is at step 0", at_least=1)
    validate_sequences: int = key(64, "sequences of one validation", at_least=1)
    sample_tokens: int = key(200, "tokens of the sample printed at the end; 0: none", at_least=0)


@dataclass(frozen=True)
class OptimConfig:
    lr: float = key(3e-3, "highest learning rate", above=0, at_most=100)
    warmup: int = key(40, "steps of linear warm-up", at_least=0)
    decay: Literal["cosine", "wsd", "constant"] = key("cosine", "shape after warm-up")
    decay_share: float = key(0.2, "wsd: the last share of the steps, in which the rate falls", above=0, at_most=1)
    final_lr: float = key(0.1, "last learning rate, as a share of the highest", at_least=0, at_most=1)
    beta1: float = key(0.9, "AdamW: memory of the mean", at_least=0, below=1)
    beta2: float = key(0.95, "AdamW: memory of the mean square", at_least=0, below=1)
    eps: float = key(1e-8, "AdamW: added to the root mean square", above=0)
    weight_decay: float = key(0.1, "AdamW: decay of matrices (not of norms, biases)", at_least=0)
    max_norm: float = key(1.0, "gradient norm above which gradients are scaled down", above=0)
    main: Literal["fp32", "split"] = key(
        "fp32", "main weights of a bf16 model: a copy, or only the 16 bits that its weights lack; the same numbers"
    )
    moments: Literal["fp32", "bf16"] = key("fp32", "AdamW: how the two means are kept")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "AdamW: of means kept as bf16")
    gradients: Literal["fp32", "bf16"] = key(
        "fp32", "what gradients of a bf16 model are kept in; bf16 for steps of one microbatch, which need no sum"
    )
    gradient_reduce: Literal["fp32", "bf16"] = key(
        "fp32", "what gradients are sent as in the reduce-scatter between ranks; sums are fp32 always"
    )
    groups: tuple[str, ...] = key(
        (),
        "options by parameter name, first match wins: `*.router.weight: lr=0.5 decay=0 betas=0.9,0.99 rule=adamw`",
    )


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = key(1, "tensor parallel: attention and dense layers cut over so many ranks", at_least=1)
    cp: int = key(1, "context parallel: sequences cut over so many ranks", at_least=1)
    pp: int = key(1, "pipeline parallel: layers cut over so many ranks", at_least=1)
    ep: int = key(1, "expert parallel: experts spread over so many ranks", at_least=1)
    etp: int = key(1, "expert tensor parallel: each expert cut over so many ranks", at_least=1)
    context: Literal["all_gather", "all_to_all", "ring", "hierarchical"] = key(
        "ring", "how queries meet keys of other cp ranks"
    )
    dispatcher: Literal["auto", "all_gather", "all_to_all", "dedup", "hierarchical", "deepep"] = key(
        "auto", "how tokens travel to experts of other ranks; auto: by predicted time; deepep: if it is installed"
    )


@dataclass(frozen=True)
class PipelineConfig:
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"] = key(
        "1f1b", "the order in which microbatches pass the stages; moefold simulate draws them"
    )
    vpp: int = key(1, "stages a pipeline rank holds", at_least=1, at_most=1024)
    layout: str = key("", "which piece lies on which stage, as Et*3|(tt|)*29m|L; by default the most even cut")
    pair: bool = key(False, "a forward and a backward share a slot, so that one's travel hides behind the other's work")
    fill: bool = key(True, "with pair: weight gradients are split off and fill what gaps are left in a slot")
    defer: bool = key(False, "weight gradients wait, so that what other ranks need comes first")


@dataclass(frozen=True)
class KernelsConfig:
    force: tuple[str, ...] = key((), "implementations to use regardless, as op=name, such as attention=reference")
    repeatable: bool = key(
        True, "runs of one seed agree to the bit on a GPU too; false allows quicker sums in any order"
    )


@dataclass(frozen=True)
class ObserveConfig:
    log_every: int = key(10, "steps between lines where there is no terminal", at_least=1)
    check_collectives: bool = key(False, "debug: ranks compare notes before every collective, and name who differs")
    profile: bool = key(False, "print where the tenth step's time and memory went; write trace.json, for Perfetto")
    tensorboard: bool = key(True, "write TensorBoard events beside the run")
    router_every: int = key(10, "steps between lines of router.jsonl, the load of every expert", at_least=1)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(100, "steps between checkpoints; one more is written at the end", at_least=1)
    keep: int = key(2, "how many checkpoints to keep, the last ones", at_least=1)
    keep_every: int = key(0, "checkpoints of steps that this divides are kept for good; 0: none", at_least=0)
    path: str = key("", "where they go: a folder or what fsspec reaches (s3://...); by default checkpoints/ of the run")


@dataclass(frozen=True)
class Config:
    name: str = key("custom", "what the run is called")
    model: ModelConfig = section(ModelConfig)
    data: DataConfig = section(DataConfig)
    train: TrainConfig = section(TrainConfig)
    optim: OptimConfig = section(OptimConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    pipeline: PipelineConfig = section(PipelineConfig)
    kernels: KernelsConfig = section(KernelsConfig)
    observe: ObserveConfig = section(ObserveConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)

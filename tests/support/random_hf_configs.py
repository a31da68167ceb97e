"""Random odd models of every Hugging Face family against `transformers`: the same logits, or refused by name.

    python -m tests.support.random_hf_configs --seed 1 --count 200

Odd sizes and settings, dropped keys, nulls, old spellings, and values that only a refusal is right for. Exit code 1 if
one is silently different, if moefold accepts what transformers cannot run, if transformers reads another model from the
config.json that moefold writes, or if more than a quarter is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch

from moefold.checkpoint.hf.config_options import HARMLESS_KEYS
from moefold.checkpoint.hf.published_defaults import NULLABLE, SECOND_NAMES
from tests.support.hf_comparison import CLASSES, WRONG, Comparison, compare_with_transformers
from tests.support.hf_models import SIZES, hf

Options = dict[str, Any]
MOST_REFUSED = 0.25
FULL, SLIDING = "full_attention", "sliding_attention"

HARMLESS: Options = {
    "architectures": ["SomethingForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "output_router_logits": False,
    "torch_dtype": "float32",
    "transformers_version": "4.40.1",
    "use_cache": False,
}
SELDOM: list[Options] = [  # what is refused, or has an odd meaning
    {"attention_dropout": 0.1},
    {"clip_qkv": 0.5},
    {"head_dim": 6},
    {"hidden_act": "relu2"},
    {"layer_types": [SLIDING, FULL, FULL]},
    {"mlp_only_layers": [1]},
    {"n_group": 0},
    {"norm_topk_prob": "yes"},
    {"num_key_value_heads": 3},
    {"original_max_position_embeddings": 32},
    {"partial_rotary_factor": 0.0},
    {"rms_norm_eps": 1e-3},
    {"rope_interleave": False},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "linear"}},
    {"rope_theta": None},
    {"sliding_window": 0},
    {"swiglu_alpha": 1.5},
]
HAVE_LAYER_TYPES = ("gpt_oss", "qwen2_moe", "qwen2", "qwen3")
# Keys whose default is too large for a tiny model to have, or does not go with its other sizes.
NEVER_DROPPED = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"}


def random_config(random: Random) -> tuple[str, Options]:
    """A family, and config.json without model_type."""
    kind = random.choice(list(BUILDERS))
    options = {**random_sizes(random), **BUILDERS[kind](random)}
    options |= random_rope(random, kind, options)
    if kind in HAVE_LAYER_TYPES and random.random() < 0.3:
        options["layer_types"] = random_layer_types(random, options)
    if random.random() < 0.25:
        options = as_saved(kind, options)
    if random.random() < 0.4:
        rename_keys(random, kind, options)
    untouched = {"head_dim"} if kind == "mixtral" and is_yarn(options) else set[str]()  # transformers fails without it
    drop_keys(random, options, NEVER_DROPPED | untouched)
    if random.random() < 0.4:
        options[random.choice(sorted(NULLABLE[kind] - untouched))] = None
    if random.random() < 0.03:
        options[random.choice(sorted(set(options) - HARMLESS_KEYS))] = None
    if random.random() < 0.05:
        options |= random.choice(SELDOM)
    if random.random() < 0.5:
        names = random.sample(sorted(HARMLESS), 3)
        options |= {name: HARMLESS[name] for name in names}
    shuffled = random.sample(sorted(options), len(options))
    return kind, {name: options[name] for name in shuffled}


def random_sizes(random: Random) -> Options:
    heads = random.choice([2, 3, 4, 6])
    sizes = {
        "vocab_size": SIZES["vocab_size"] + random.choice([0, 1, 7]),
        "hidden_size": heads * random.choice([4, 8, 12]),
        "intermediate_size": random.choice([8, 20, 24, 36]),
        "num_hidden_layers": random.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "max_position_embeddings": random.choice([40, 100, 256, 1000]),
        "tie_word_embeddings": random.random() < 0.3,
    }
    if random.random() < 0.2:
        sizes["hidden_act"] = random.choice(["gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "silu", "swish"])
    if random.random() < 0.7:
        sizes["rms_norm_eps"] = random.choice([1e-6, 1e-5, 1e-3])
    return sizes


def random_head_dim(random: Random) -> Options:
    """Often none: the heads divide the hidden size."""
    return {"head_dim": random.choice([4, 6, 16])} if random.random() < 0.5 else {}


def random_experts(random: Random, name: str) -> Options:
    experts = random.choice([2, 3, 4, 8, 10])
    return {name: experts, "num_experts_per_tok": random.randint(1, experts)}


def random_groups(random: Random, smallest: int) -> Options:
    """Experts in groups of at least `smallest`."""
    per_group, groups = random.choice([smallest, 3, 4]), random.choice([1, 2, 4])
    chosen = random.randint(1, groups)
    return {
        "n_routed_experts": per_group * groups,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": random.randint(1, per_group * chosen),
    }


def published_groups(random: Random) -> Options:
    """Experts that suit the groups of DeepSeek-V3, which are often left to the defaults."""
    options: Options = {
        "n_routed_experts": random.choice([16, 24]),
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": random.randint(1, 8),
    }
    for name in random.choice([[], ["n_group", "topk_group"], ["num_experts_per_tok", "n_group"]]):
        del options[name]
    return options


def random_flags(random: Random, *names: str) -> Options:
    return {name: random.random() < 0.5 for name in names}


def random_window(random: Random) -> int:
    return random.choice([1, 2, 5, 9, 23, 24, 100])


def mixtral(random: Random) -> Options:
    options = random_experts(random, "num_local_experts") | random_head_dim(random)
    if random.random() < 0.5:
        options["sliding_window"] = random_window(random)
    return options


def olmoe(random: Random) -> Options:
    return random_experts(random, "num_experts") | random_flags(random, "norm_topk_prob", "attention_bias")


def qwen(random: Random) -> Options:
    """What both Qwen families with experts have."""
    return {
        **random_experts(random, "num_experts"),
        **random_head_dim(random),
        **random_flags(random, "norm_topk_prob", "use_sliding_window"),
        "moe_intermediate_size": random.choice([4, 12, 16]),
        "decoder_sparse_step": random.choice([1, 1, 2]),
        "mlp_only_layers": random.choice([[], [], [0]]),
        "sliding_window": random_window(random),
    }


def qwen3_moe(random: Random) -> Options:
    return qwen(random) | random_flags(random, "attention_bias")


def qwen2_moe(random: Random) -> Options:
    shared = {"shared_expert_intermediate_size": random.choice([0, 8, 20])}
    return {
        **qwen(random),
        **shared,
        **random_flags(random, "qkv_bias"),
        "max_window_layers": random.choice([0, 9, 28]),
    }


def latent(random: Random) -> Options:
    """What DeepSeek-V2 and V3 have."""
    return {
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": random.choice([8, 12]),
        "q_lora_rank": random.choice([None, 8, 12]),
        "qk_rope_head_dim": random.choice([4, 8]),
        "qk_nope_head_dim": random.choice([4, 10]),
        "v_head_dim": random.choice([4, 12]),
        "moe_intermediate_size": random.choice([4, 12, 16]),
        "first_k_dense_replace": random.choice([0, 1, 1, 5]),
        "n_shared_experts": random.choice([0, 1, 2]),
        "routed_scaling_factor": random.choice([0.5, 1.0, 2.827]),
        **random_flags(random, "attention_bias"),
    }


def deepseek_v3(random: Random) -> Options:
    groups = published_groups(random) if random.random() < 0.5 else random_groups(random, 2)
    options = latent(random) | groups | random_flags(random, "norm_topk_prob")
    if random.random() < 0.3:
        options["head_dim"] = options["qk_rope_head_dim"]
    return {**options, "num_nextn_predict_layers": random.choice([0, 1, 2])}


def deepseek_v2(random: Random) -> Options:
    method = random.choice(["greedy", "group_limited_greedy"])
    return {**latent(random), **random_groups(random, 1), "topk_method": method}


def gpt_oss(random: Random) -> Options:
    return {
        **random_experts(random, "num_local_experts"),
        **random_flags(random, "attention_bias"),
        "head_dim": random.choice([4, 6, 16]),
        "sliding_window": random_window(random),
        "swiglu_limit": random.choice([0.5, 7.0]),
        "hidden_act": "silu",
    }


def glm4_moe(random: Random) -> Options:
    return {
        **random_groups(random, 2),
        **random_flags(random, "norm_topk_prob", "use_qk_norm", "attention_bias"),
        "head_dim": random.choice([8, 16]),
        "moe_intermediate_size": random.choice([4, 12, 16]),
        "first_k_dense_replace": random.choice([0, 1, 1, 5]),
        "n_shared_experts": random.choice([0, 1, 2]),
        "routed_scaling_factor": random.choice([0.5, 1.0]),
        "partial_rotary_factor": random.choice([0.25, 0.5, 0.75, 1.0]),
    }


def llama(random: Random) -> Options:
    return random_head_dim(random) | random_flags(random, "attention_bias")


def mistral(random: Random) -> Options:
    return random_head_dim(random) | {"sliding_window": random_window(random)}


def qwen2(random: Random) -> Options:
    return {
        **random_head_dim(random),
        **random_flags(random, "use_sliding_window"),
        "sliding_window": random_window(random),
        "max_window_layers": random.choice([0, 28]),
    }


def qwen3(random: Random) -> Options:
    return {**qwen2(random), **random_flags(random, "attention_bias"), "head_dim": random.choice([4, 6, 16])}


BUILDERS: dict[str, Callable[[Random], Options]] = {
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen3_moe": qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "deepseek_v2": deepseek_v2,
    "gpt_oss": gpt_oss,
    "glm4_moe": glm4_moe,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def random_layer_types(random: Random, options: Options) -> list[str]:
    """Every n-th layer has full attention, or all layers have the same."""
    layers = options["num_hidden_layers"]
    may_slide = options.get("use_sliding_window", True)
    every = random.choice([2, 3, layers + 1]) if may_slide else 1
    return [SLIDING if number % every else FULL for number in range(1, layers + 1)]


def random_rope(random: Random, kind: str, options: Options) -> Options:
    """Positions in one of the spellings, or in none."""
    theta = random.choice([10.0, 500.0, 10_000.0, 1e6])
    parameters = random.choice([{}, linear_rope, llama3_rope, yarn_rope, yarn_rope])
    if callable(parameters):
        parameters = parameters(random, kind)
    if parameters.get("rope_type") == "yarn" and kind == "mixtral":
        options.setdefault("head_dim", 16)  # transformers fails without
    if random.random() < 0.5:
        parameters["type"] = parameters.pop("rope_type", "default")
    spelling = random.choice(["old", "new", "new, theta outside", "both", "none"])
    if spelling == "old":
        return {"rope_theta": theta, "rope_scaling": parameters or None}
    if spelling == "new":
        return {"rope_parameters": {**parameters, "rope_theta": theta}}
    if spelling == "new, theta outside":
        return {"rope_parameters": parameters or None, "rope_theta": theta}
    if spelling == "both":
        other = {"rope_type": "linear", "factor": 5.0, "rope_theta": 77.0}
        return {"rope_parameters": other, "rope_scaling": parameters, "rope_theta": theta}
    return {}


def linear_rope(random: Random, kind: str) -> Options:
    return {"rope_type": "linear", "factor": random.choice([1.0, 2.5, 8])}


def llama3_rope(random: Random, kind: str) -> Options:
    options: Options = {
        "rope_type": "llama3",
        "factor": random.choice([2.0, 8.0]),
        "low_freq_factor": random.choice([0.5, 1.0]),
        "high_freq_factor": random.choice([2.0, 4.0]),
    }
    if random.random() < 0.7:
        options["original_max_position_embeddings"] = random.choice([8, 32, 64])
    return options


def yarn_rope(random: Random, kind: str) -> Options:
    options: Options = {"rope_type": "yarn", "factor": random.choice([1.0, 2.0, 4.0, 40.0, None])}
    maybe: Options = {
        "original_max_position_embeddings": random.choice([4, 16, 32, 40]),
        "beta_fast": random.choice([None, 0, 2.0, 16.0, 32]),
        "beta_slow": random.choice([None, 0.5, 1, 24.0]),
        "truncate": random.choice([True, False, None]),
        "attention_factor": random.choice([None, 1.0, 1.3]) if options["factor"] != 1 else None,
        "mscale": random.choice([None, 0.707, 1.0]),
    }
    options |= {name: value for name, value in maybe.items() if random.random() < 0.4}
    if random.random() < 0.3:
        options |= {"mscale": 1.0, "mscale_all_dim": random.choice([0.5, 1.0])}
        if "deepseek" in kind or kind == "kimi_k2":
            options.pop("attention_factor", None)
            options["factor"] = options["factor"] or 3.0  # transformers fails with null here
    return options


def rename_keys(random: Random, kind: str, options: Options) -> None:
    """Give some keys their other name."""
    for second, first in SECOND_NAMES.get(kind, {}).items():
        if first in options and random.random() < 0.5:
            options[second] = options.pop(first)


def as_saved(kind: str, options: Options) -> Options:
    """With every key that transformers writes."""
    config = getattr(hf(), CLASSES[kind] + "Config")
    try:
        saved = config(**deepcopy(options)).to_json_string()
    except Exception:
        return options  # that it refuses
    return {name: value for name, value in json.loads(saved).items() if name != "model_type"}


def drop_keys(random: Random, options: Options, kept: set[str]) -> None:
    """Drop a few keys, whose published defaults count then."""
    for name in sorted(options):
        if name not in kept and random.random() < 0.06:
            del options[name]


def is_yarn(options: Options) -> bool:
    chosen = options.get("rope_scaling") or options.get("rope_parameters") or {}
    return "yarn" in (chosen.get("type"), chosen.get("rope_type"))


def compare_all(seed: int, numbers: range, verbose: bool = False) -> dict[int, tuple[str, Comparison]]:
    """The comparison of each config. Those that are wrong are printed; with `verbose`, refusals too."""
    found: dict[int, tuple[str, Comparison]] = {}
    for number in numbers:
        kind, options = random_config(Random(f"{seed} {number}"))  # any of them can be drawn alone
        with tempfile.TemporaryDirectory() as folder:
            comparison = compare_with_transformers(kind, options, Path(folder))
        found[number] = (kind, comparison)
        wrong = comparison.verdict in WRONG
        if wrong or (verbose and comparison.verdict != "equal"):
            print(f"{number} {kind}: {comparison.verdict} {comparison.difference:.1e} {comparison.text}")
            if wrong:
                print(json.dumps(options))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first config")
    parser.add_argument("--verbose", action="store_true", help="print refusals too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(arguments.first, arguments.first + arguments.count)
    found = compare_all(arguments.seed, numbers, arguments.verbose)
    print(summary(found))
    return 0 if is_sound(found) else 1


def summary(found: dict[int, tuple[str, Comparison]]) -> str:
    verdicts = Counter(comparison.verdict for _, comparison in found.values())
    lines = [f"{len(found)} configs: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())]
    equal = [comparison.difference for _, comparison in found.values() if comparison.verdict == "equal"]
    if equal:
        lines.append(f"largest difference of an equal one: {max(equal):.1e} of the largest logit")
    lines.append(f"refused: {refused_share(found):.0%} (at most {MOST_REFUSED:.0%})")
    for kind in BUILDERS:
        of_kind = Counter(comparison.verdict for other, comparison in found.values() if other == kind)
        lines.append(f"  {kind:12} " + ", ".join(f"{count} {verdict}" for verdict, count in of_kind.most_common()))
    return "\n".join(lines)


def refused_share(found: dict[int, tuple[str, Comparison]]) -> float:
    refused = [comparison for _, comparison in found.values() if comparison.verdict.startswith("refused")]
    return len(refused) / len(found)


def is_sound(found: dict[int, tuple[str, Comparison]]) -> bool:
    wrong = [comparison for _, comparison in found.values() if comparison.verdict in WRONG]
    return not wrong and refused_share(found) <= MOST_REFUSED


if __name__ == "__main__":
    sys.exit(main())

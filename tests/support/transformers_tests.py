"""transformers' own test that compares implementations of experts, from its files, with moefold's behind the name
grouped_mm: `_test_eager_matches_batched_and_grouped_inference` of tests/test_modeling_common.py. Needs the package
`parameterized`.

    python -m tests.support.transformers_tests FOLDER [FAMILY ...] [--dtypes fp32 bf16 fp16] [--tokens 2 7]

FOLDER is an unpacked source distribution of the transformers that is installed. It has the common tests but none of
its families' files: models of these sizes take their place, one for each family: a language model or, where it has
none of its own, its text model. A family whose
model cannot be made of them, or fails the test by transformers' own experts already, is named as not run. The test
runs on a GPU where there is one. There few tokens take moefold's products of few rows, 192 its products of tiles.

In a checkout of transformers, which has them, this file is a plug-in of pytest:

    PYTHONPATH=MOEFOLD:MOEFOLD/tests/support pytest -p transformers_tests tests/models -k eager_matches_batched
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import unittest
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.testing_utils import torch_device

import moefold.transformers
from moefold.transformers.plugin import experts_forward

PACKAGE = "transformers_own_tests"
COMMON = "test_modeling_common"
ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
PASSED = "passed"
DTYPES = ["fp32", "bf16", "fp16"]
TOKENS = [2, 7]  # sequences, positions
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "first_k_dense_replace": 1,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
FAMILY_SIZES: dict[str, dict[str, Any]] = {  # where a configuration needs more, or less
    "bailing_hybrid": {"layer_group_size": 2},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "diffusion_gemma": {"top_k_experts": 2},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [24, 24], "rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}},
    "gemma4": {"enable_moe_block": True, "top_k_experts": 2},
    "glm4v_moe": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0]}},
    "glm5_next": {"qk_rope_head_dim": 0},
    "granitemoehybrid": {"layer_types": LINEAR_AND_FULL, "mamba_n_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"layer_types": LINEAR_AND_FULL, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mistral4": {"head_dim": 16},
    "qwen4_exp": {
        "layer_types": LINEAR_AND_FULL,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}
MODEL_ENDINGS = ("ForCausalLM", "TextModel", "DecoderModel", "Model")  # the first that a family has
EXPERTS = re.compile(r"^@use_experts_implementation", re.MULTILINE)


def pytest_collection_finish() -> None:
    """Of pytest: all test files are imported, and have the common tests with them."""
    for name, module in list(sys.modules.items()):
        if name.endswith(COMMON):
            put_moefold_inside(module)


def put_moefold_inside(common: Any) -> None:
    moefold.transformers.enable()
    common.grouped_mm_experts_forward = experts_forward


def load_common_tests(folder: Path) -> Any:
    """The file of a source distribution, which lacks two of its neighbours: empty classes stand for them."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder / "tests")]
    sys.modules[PACKAGE] = package
    for path, mixin in ABSENT.items():
        parent = path.split(".")[0]
        sys.modules[f"{PACKAGE}.{parent}"] = ModuleType(parent)
        module = ModuleType(path)
        setattr(module, mixin, type(mixin, (), {}))
        sys.modules[f"{PACKAGE}.{path}"] = module
    common = importlib.import_module(f"{PACKAGE}.{COMMON}")
    put_moefold_inside(common)
    return common


def model_classes(families: Collection[str]) -> dict[str, Any]:
    """Language models of the modeling files whose experts take an implementation, by family; of all without a name."""
    import transformers

    found: dict[str, Any] = {}
    for path in sorted(Path(transformers.__path__[0]).glob("models/*/modeling_*.py")):
        is_asked = not families or path.parent.name in families
        if is_asked and EXPERTS.search(path.read_text()):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            found[path.parent.name] = language_model(module)
    return found


def language_model(module: Any) -> Any:
    """The class of a modeling file that has experts and reads tokens alone; None where there is none."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    for ending in MODEL_ENDINGS:
        for value in own:
            is_base = value.__name__.endswith("PreTrainedModel")
            if value.__name__.endswith(ending) and hasattr(value, "config_class") and not is_base:
                return with_own_config(value)
    return None


def with_own_config(model_class: Any) -> Any:
    """The model with the configuration of its argument: a text model inside another may name the other's."""
    stated = model_class.__init__.__annotations__.get("config")
    if not isinstance(stated, type) or stated is model_class.config_class:
        return model_class
    names = {"__module__": model_class.__module__, "config_class": stated}
    return type(model_class.__name__, (model_class,), names)


class TinyModels:
    """Takes the place of a family's tester."""

    def __init__(self, model_class: Any, tokens: Sequence[int]):
        self.tokens = tuple(tokens)
        self.config_class = model_class.config_class
        family = model_class.__module__.split(".")[-2]
        self.own_sizes = FAMILY_SIZES.get(family, {})

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        is_latent = "kv_lora_rank" in self.config_class().to_dict()
        sizes = SIZES | (LATENT if is_latent else {}) | self.own_sizes
        return self.config_class(**sizes), {"input_ids": torch.randint(1, 96, self.tokens, device=torch_device)}


def run_family(common: Any, model_class: Any, dtype: str, tokens: Sequence[int]) -> str:
    """What became of the test: passed, or why not."""

    class Family(common.ModelTesterMixin, unittest.TestCase):
        all_model_classes = (model_class,)
        model_tester = TinyModels(model_class, tokens)

    case = Family("test_save_load")  # any: the test is called below
    try:
        common._test_eager_matches_batched_and_grouped_inference(case, dtype, dtype)
    except unittest.SkipTest as reason:
        return f"skipped: {reason}"
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:3])}"[:200]
    return PASSED


def run_both(common: Any, model_class: Any, dtype: str, tokens: Sequence[int]) -> str:
    """Without moefold first: what fails then says nothing of it."""
    common.grouped_mm_experts_forward = grouped_mm_experts_forward
    own = run_family(common, model_class, dtype, tokens)
    if own != PASSED:
        return f"not run ({own})"
    put_moefold_inside(common)
    return run_family(common, model_class, dtype, tokens)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.support.transformers_tests")
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--tokens", nargs=2, type=int, default=TOKENS, help="sequences and positions")
    return parser.parse_args()


def main() -> int:
    asked = parse_arguments()
    common = load_common_tests(asked.folder)
    outcomes: list[str] = []
    for family, model_class in model_classes(asked.families).items():
        for dtype in asked.dtypes:
            outcome = "not run (no language model of its own)"
            if model_class is not None:
                outcome = run_both(common, model_class, dtype, asked.tokens)
            outcomes.append(outcome)
            print(f"{family} {dtype}: {outcome}", flush=True)
    passed = outcomes.count(PASSED)
    without = sum(outcome.startswith("not run") for outcome in outcomes)
    failed = len(outcomes) - passed - without
    print(f"{passed} passed, {failed} failed, {without} not run, of {len(outcomes)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

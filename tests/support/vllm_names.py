"""vLLM's own reading of our adapters, by functions taken out of its source distribution. vLLM is not imported.

    python -m tests.support.vllm_names SOURCE

SOURCE is the distribution, packed or unpacked (`TMPDIR=FOLDER pip download --no-clean --no-deps --no-build-isolation
--no-binary :all: vllm` leaves it in FOLDER, though pip then fails to build it). For tiny models of every family the
adapters of both forms are written; vLLM's code reads the settings, parses the names, refuses modules that its models do
not have, and stacks the experts. What it has then, scale x B x A of every module, is compared with the change of merged
weights.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.hf.export import GatheredBoxes, iterate_hf_tensors
from moefold.checkpoint.hf.merged_weights import MergedWeights, weight_adapters
from moefold.checkpoint.hf.peft_by_expert import peft_adapter_by_expert
from moefold.checkpoint.hf.peft_folder import peft_adapter, write_adapter
from moefold.checkpoint.hf.read_weights import local_tensors
from moefold.config.errors import UserError
from moefold.config.run import LoraConfig
from moefold.layout.axes import single_rank_world
from tests.checkpoint.hf.test_peft_folder import adapted_model
from tests.support.hf_models import CASES, make, save

TAKEN = {
    "vllm/model_executor/models/utils.py": ("WeightsMapper",),
    "vllm/lora/utils.py": ("parse_fine_tuned_lora_name", "is_base_embedding_weights"),
    "vllm/lora/peft_helper.py": ("PEFTHelper",),
    "vllm/lora/lora_weights.py": ("LoRALayerWeights", "PackedLoRALayerWeights"),
    "vllm/lora/lora_model.py": ("LoRAModel",),
    "vllm/lora/model_manager.py": ("_stack_moe_lora_weights", "_convert_3d_to_2d_moe_lora"),
}
MODELS = {  # our tiny models, and vLLM's files of theirs
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
    "qwen3 dense layers, window": "qwen3_moe",
    "deepseek v2": "deepseek_v2",
    "deepseek v3": "deepseek_v2",
    "deepseek v3 yarn, no query latent, biased": "deepseek_v2",
    "glm": "glm4_moe",
    "gpt-oss": "gpt_oss",
}
REFUSED = {("mixtral", "--to peft")}  # vLLM has Mixtral's experts under another name than transformers 5
EXPERTS = ".experts"
GATE_DOWN_UP = ("gate_proj", "down_proj", "up_proj")
LORA = LoraConfig(rank=3, alpha=7.0, rs=True)
Names = dict[str, Any]
Tensors = dict[str, Tensor]


def take_definitions(folder: Path) -> Names:
    """vLLM's functions and classes, with the imports of their files that are not of vLLM."""
    taken: Names = {"PIN_MEMORY": False, "logger": SimpleNamespace(info_once=logging.info)}
    for path, names in TAKEN.items():
        tree = ast.parse((folder / path).read_text())
        imports = [node for node in tree.body if is_foreign_import(node)]
        definitions = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
        assert len(definitions) == len(names), f"{path} has other names"
        run_nodes([*imports, *definitions], taken)
    return taken


def is_foreign_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not (node.module or "").startswith("vllm")
    return isinstance(node, ast.Import)


def run_nodes(nodes: list[Any], names: Names) -> None:
    """Annotations are not evaluated: they name what is not taken."""
    later = ast.parse("from __future__ import annotations").body
    module = ast.Module([*later, *nodes], type_ignores=[])
    exec(compile(module, "vllm", "exec"), names)


class TheirModel:
    """What a modeling file of vLLM says of a model, without making one."""

    def __init__(self, path: Path, names: Names):
        self.tree = ast.parse(path.read_text())
        self.is_stacked = "is_3d_moe_weight" in path.read_text()
        self.is_interleaved = path.stem == "gpt_oss"
        self.mapper = self.rename_mapper(names)

    def rename_mapper(self, names: Names) -> Any:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "WeightsMapper":
                mapper = eval(ast.unparse(node), dict(names))
                return mapper.get_rename_mapper()
        return None

    def assigned(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                yield node.targets[0], node.value

    def attributes(self) -> Iterator[tuple[str, str]]:
        """Attributes of modules, and the name of what makes each."""
        for target, value in self.assigned():
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Call):
                yield target.attr, ast.unparse(value.func)
            elif isinstance(target, ast.Tuple):
                yield from ((each.attr, "") for each in target.elts if isinstance(each, ast.Attribute))

    def packed(self) -> dict[str, list[str]]:
        """The products that vLLM joins, and the names of their parts."""
        found: dict[str, list[str]] = {}
        for target, value in self.assigned():
            if ast.unparse(target) == "packed_modules_mapping":
                found |= ast.literal_eval(value)
            elif isinstance(target, ast.Subscript) and "packed_modules_mapping" in ast.unparse(target.value):
                found[ast.literal_eval(target.slice)] = ast.literal_eval(value)
        return found

    def expert_parts(self) -> tuple[str, ...]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.keyword) and node.arg == "ckpt_names":
                return ast.literal_eval(node.value)
        return GATE_DOWN_UP

    def expected_modules(self, experts: int) -> set[str]:
        """As vLLM's worker collects them: ends of linear layers' names, parts in place of joined ones, experts."""
        linear = {name for name, maker in self.attributes() if maker.endswith("Linear")}
        packed = self.packed()
        names = {part for name in linear for part in packed.get(name, [name])}
        if not self.is_stacked:
            names |= {f"experts.{expert}.{part}" for expert in range(experts) for part in self.expert_parts()}
        return names | {"experts"}

    def has_path(self, module: str) -> bool:
        """Whether all parts of a name are attributes of its modules, or parts of joined ones."""
        known = {name for name, _ in self.attributes()} | {*GATE_DOWN_UP, *self.expert_parts(), "base_layer"}
        known |= {part for parts in self.packed().values() for part in parts}
        return all(part in known or part.isdigit() for part in module.split("."))


@dataclass
class Written:
    """An adapter that moefold wrote, and what it changes in each matrix of the files of weights."""

    folder: Path
    experts: int
    changes: Tensors


def write_forms(case: str, folder: Path) -> Iterator[tuple[str, Written]]:
    kind, options = CASES[case]
    ours, config, described = adapted_model(save(make(kind, **options), folder / "hf"), LORA)
    fetch = GatheredBoxes(local_tensors(ours), single_rank_world()).fetch_box
    table = described.family.name_table(config.model)
    adapters = weight_adapters(config)
    merged = dict(iterate_hf_tensors(table, MergedWeights(fetch, adapters).fetch_box))
    base = dict(iterate_hf_tensors(table, fetch))
    changes = {name.removesuffix(".weight"): merged[name] - base[name] for name in base}
    changed = {name: change for name, change in changes.items() if change.any()}
    stacked = peft_adapter(table, adapters, LORA, fetch)
    write_adapter(folder / "stacked", stacked, overwrite=False)
    yield "--to peft", Written(folder / "stacked", config.model.moe.experts, changed)
    try:
        by_expert = peft_adapter_by_expert(table, adapters, fetch)
    except UserError:
        return
    write_adapter(folder / "by_expert", by_expert, overwrite=False)
    yield "--to peft_by_expert", Written(folder / "by_expert", config.model.moe.experts, changed)


def read_as_vllm(names: Names, model: TheirModel, written: Written) -> Any:
    """The adapter as vLLM's LoRAModel, scales inside of B."""
    helper = names["PEFTHelper"].from_local_dir(str(written.folder), None)
    helper.validate_legal(SimpleNamespace(max_lora_rank=64))
    expected = model.expected_modules(written.experts)
    options = {"peft_helper": helper, "lora_model_id": 1, "device": "cpu", "weights_mapper": model.mapper}
    read = names["LoRAModel"].from_local_checkpoint(str(written.folder), expected, **options)
    absent = [module for module in read.loras if not model.has_path(module)]
    if absent:
        raise ValueError(f"its model has no module {absent[0]}")
    for each in read.loras.values():
        each.optimize()
    return read


def expert_stacks(names: Names, model: TheirModel, read: Any, module: str, experts: int) -> list[tuple[Tensor, Tensor]]:
    """A and B of all experts, as vLLM's kernels get them: gates, downs, ups; or gates with ups, downs."""
    if module in read.loras:
        stack = "_stack_moe_lora_weights" if model.is_stacked else "_convert_3d_to_2d_moe_lora"
        host = SimpleNamespace(local_num_experts=experts, global_num_experts=experts, ep_rank=0)
        host.w13_lora_a_stacked = [torch.empty(1, experts)]
        names[stack](manager_of(model), read, host, module)
        stacked = read.loras[module]
    else:
        parts = [f"{module}.{expert}.{part}" for expert in range(experts) for part in model.expert_parts()]
        stacked = names["PackedLoRALayerWeights"].pack_moe([read.loras[part] for part in parts], module)
    return list(zip(stacked.lora_a, stacked.lora_b, strict=True))


def manager_of(model: TheirModel) -> Any:
    """What the taken methods of vLLM's manager ask it for."""
    architecture = "GptOssForCausalLM" if model.is_interleaved else "another"
    config = SimpleNamespace(architectures=[architecture])
    return SimpleNamespace(
        _is_3d_moe_model=model.is_stacked,
        _get_lora_layer_weights=lambda read, name: read.loras.get(name),
        _pop_lora_weights=lambda read, names: None,
        model=SimpleNamespace(config=config),
    )


def stacked_changes(written: Written, model: TheirModel, prefix: str) -> list[Tensor]:
    """What merged weights have, in the order of `expert_stacks`."""
    whole = [written.changes.get(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj")]
    if whole[0] is not None:
        return [change.mT for change in whole if change is not None]  # (experts, inputs, outputs) in GPT-OSS's files
    parts = model.expert_parts()
    return [torch.stack([written.changes[f"{prefix}.{e}.{part}"] for e in range(written.experts)]) for part in parts]


def compare(names: Names, model: TheirModel, written: Written) -> str:
    read = read_as_vllm(names, model, written)
    rename = model.mapper._map_name if model.mapper is not None else str
    layers = {name: each for name, each in read.loras.items() if EXPERTS not in name}
    changes = {rename(name): change for name, change in written.changes.items() if EXPERTS not in name}
    if changes.keys() != layers.keys():
        raise ValueError(f"{sorted(changes.keys() ^ layers.keys())[:3]} are on one side alone")
    for name, each in layers.items():
        close(each.lora_b @ each.lora_a, changes[name])
    modules = {name.partition(EXPERTS)[0] + EXPERTS for name in written.changes if EXPERTS in name}
    for module in modules:
        expected = stacked_changes(written, model, module)
        stacks = expert_stacks(names, model, read, rename(module), written.experts)
        for (a, b), change in zip(stacks, expected, strict=True):
            close(b @ a, change)
    return f"equal, {len(layers)} layers and {len(modules)} modules of {written.experts} experts"


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def try_forms(names: Names, model: TheirModel, case: str, folder: Path) -> int:
    """How many forms vLLM's code does not read as meant, and a line for each form."""
    failed = 0
    for form, written in write_forms(case, folder):
        try:
            outcome = compare(names, model, written)
        except (ValueError, KeyError, AssertionError) as error:
            outcome = f"refused, {str(error)[:300]}"
            failed += (case, form) not in REFUSED
        print(f"{case}, {form}: {outcome}", flush=True)
    return failed


def unpacked(source: Path, folder: Path) -> Path:
    if source.is_dir():
        return source
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (inner,) = folder.iterdir()
    return inner


def main(given: str) -> int:
    with TemporaryDirectory() as room:
        source = unpacked(Path(given), Path(room))
        (version,) = re.findall(r"^Version: (.*)$", (source / "PKG-INFO").read_text(), re.MULTILINE)
        print(f"vLLM {version}")
        names = take_definitions(source)
        failed = 0
        for case, file in MODELS.items():
            model = TheirModel(source / f"vllm/model_executor/models/{file}.py", names)
            with TemporaryDirectory() as folder:
                failed += try_forms(names, model, case, Path(folder))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The architecture, as a test: a package imports only from floors below its own, and the starred ones never torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.house import import_graph, largest_knot, source_files

ROOT = Path(__file__).parent.parent / "moefold"
FLOORS = [
    ["schedule", "observe"],
    ["config"],
    ["layout", "presets"],
    ["anatomy", "watch"],
    ["kernels", "comm"],
    ["precision", "dispatch", "data"],
    ["model"],
    ["memory", "shard"],
    ["pipeline", "optim", "generate"],
    ["checkpoint"],
    ["plan"],
    ["train"],
    ["api", "transformers"],
    ["web", "bench"],
    ["cli"],
]
TORCH_FREE = {
    "config",
    "schedule",
    "presets",
    "anatomy",
    "plan",
    "web",
    "version.py",
    "observe/trace.py",
    "layout/fold.py",
    "layout/labels.py",
    "layout/placement.py",
    "layout/environment.py",
    "layout/spawn.py",
    "layout/warm_ranks.py",
    "watch/call_sites.py",
    "watch/guard.py",
    "watch/hang_report.py",
    "watch/position.py",
    "watch/time_limits.py",
    "watch/stop_requests.py",
    "watch/surroundings.py",
    "kernels/facts.py",
    "kernels/choice.py",
    "kernels/catalog.py",
    "kernels/attention/choices.py",
    "kernels/experts/choices.py",
    "kernels/linear/choices.py",
    "kernels/norm/choices.py",
    "kernels/optimizer/choices.py",
    "kernels/routing/choices.py",
    "kernels/vocabulary/choices.py",
    "kernels/attention/workspace.py",
    "kernels/attention/timings.py",
    "printable.py",
    "data/arrow_files.py",
    "data/corpus.py",
    "data/document_split.py",
    "data/document_stream.py",
    "data/documents.py",
    "data/entries.py",
    "data/file_kinds.py",
    "data/folder_actions.py",
    "data/look_ahead.py",
    "data/megatron.py",
    "data/mixture.py",
    "data/packing.py",
    "data/prepare.py",
    "data/prepared_corpus.py",
    "data/prepared_folder.py",
    "data/readers.py",
    "data/recent.py",
    "data/sample_batches.py",
    "data/sequences.py",
    "data/shards.py",
    "data/shuffle.py",
    "data/tokenizer.py",
    "dispatch/catalog.py",
    "dispatch/price.py",
    "dispatch/room_sizes.py",
    "comm/part_sizes.py",
    "checkpoint/format",
    "checkpoint/keeper",
    "checkpoint/hf/config_json.py",
    "checkpoint/hf/model_folder.py",
    "checkpoint/hf/adapter_folder.py",
    "checkpoint/hf/adapted_products.py",
}
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno


def climbs(package: str, other: str) -> bool:
    return other != package and FLOOR.get(other, -1) >= FLOOR[package]


def violations(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root)
        package = here.parts[0]
        if len(here.parts) == 1:
            continue
        if package not in FLOOR:
            yield f"{here}: {package} has no floor; give it one in {Path(__file__).name} and in docs/floors.md"
            continue
        free = any(parent.as_posix() in TORCH_FREE for parent in (here, *here.parents))
        for name, line in imports(path):
            parts = name.split(".")
            if name.startswith("."):
                yield f"{here}:{line} uses a relative import `{name}`; write the full name"
            elif free and parts[0] == "torch":
                yield f"{here}:{line} imports torch, but it is shared with the planner and stays torch-free"
            elif parts[0] == root.name and len(parts) > 1 and climbs(package, parts[1]):
                yield (
                    f"{here}:{line} ({package}, floor {FLOOR[package]}) imports {name} "
                    f"(floor {FLOOR[parts[1]]}); move the shared part below both"
                )


def test_imports_go_down_only_and_starred_floors_stay_torch_free():
    found = list(violations(ROOT))
    assert not found, "\n".join(found)


def test_a_planted_violation_is_found(tmp_path: Path):
    planted = {
        "dispatch/base.py": "from moefold.model.steps import Step\n",
        "plan/cost.py": "import torch\n",
        "data/loader.py": "from ..config import run\n",
        "precision/linear.py": "from moefold.dispatch.base import Rows\n",
        "attic/old.py": "",
    }
    for name, text in planted.items():
        (tmp_path / "moefold" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "moefold" / name).write_text(text)
    found = "\n".join(violations(tmp_path / "moefold"))
    assert all(name in found for name in planted), found


def test_torch_is_not_imported_by_torch_free_modules_at_run_time():
    """Indirect imports count too: importing every starred module must leave torch out of the process."""
    files = [p for name in TORCH_FREE for p in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))]
    names = ["moefold." + p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for p in files if p.exists()]
    names += [
        f"moefold.cli.{name}"
        for name in ("command_forms", "completion")  # the first imports every command
    ]
    code = f"import sys, {', '.join(names)}\nassert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_two_modules_import_each_other_anywhere_not_even_inside_functions():
    files = source_files(ROOT)
    assert largest_knot(import_graph(files, ROOT)) == 0

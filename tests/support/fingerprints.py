"""Digests of what short training runs compute: losses, gradients and weights, for configurations that together use
every mechanism. A change that is not meant to change numbers leaves every digest as it is.

    python -m tests.support.fingerprints write FILE      # on the tree before the change
    python -m tests.support.fingerprints compare FILE    # on the tree after it, on the same machine

Runs go through the command line in processes of their own, so nothing here depends on names inside the package. With
`optim.beta1 0` the first moment is the gradient itself, so the checkpoint's ledger has a digest of each gradient.
Digests depend on the CPU and on torch's build: compare on the machine that wrote the file.

`fingerprints-e140df4.json` was compared while names, rooms and contracts changed: 33 of 33 runs equal to the bit. It
holds for trees in which a text was still held out piece by piece; documents are held out whole since.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.runs import corpus, numbers

COMMON = (
    "--train.device cpu --train.steps 3 --train.validate_sequences 8 --train.sample_tokens 0 "
    "--observe.tensorboard false --optim.warmup 2 --optim.beta1 0"
)
SHORT = "--data.seq_len 64 --train.global_batch 8 --train.micro_batch 2"
BF16 = "--train.precision bf16"
DEDUP = "--parallel.dispatcher dedup"  # auto measures links, and may choose another one at another time

RUNS = {
    "tiny": f"tiny {SHORT}",
    "tiny with both moments": f"tiny {SHORT} --optim.beta1 0.9",
    "tiny in fp64": f"tiny {SHORT} --train.precision fp64",
    "tiny in bf16": f"tiny {SHORT} {BF16}",
    "bf16, split main weights, stochastic rounding": f"tiny {SHORT} {BF16} --optim.main split --optim.moments bf16 "
    "--optim.rounding stochastic --optim.gradients bf16 --train.micro_batch 8",
    "mixtral": f"mixtral-8x7b-tiny {SHORT}",
    "olmoe": f"olmoe-1b-7b-tiny {SHORT}",
    "qwen3": f"qwen3-30b-a3b-tiny {SHORT}",
    "qwen2": f"qwen2-57b-a14b-tiny {SHORT}",
    "deepseek-v2-lite": f"deepseek-v2-lite-tiny {SHORT}",
    "deepseek-v3": f"deepseek-v3-tiny {SHORT}",
    "deepseek-v3 with mtp 2": f"deepseek-v3-tiny {SHORT} --model.mtp 2",
    "kimi-k2": f"kimi-k2-tiny {SHORT}",
    "gpt-oss": f"gpt-oss-20b-tiny {SHORT}",
    "gpt-oss in bf16": f"gpt-oss-20b-tiny {SHORT} {BF16}",
    "glm-4.5": f"glm-4.5-air-tiny {SHORT}",
    "latent": f"latent-30b-a3b-tiny {SHORT}",
    "sinkhorn, z-loss": f"tiny {SHORT} --model.moe.router sinkhorn --model.moe.looks_ahead true "
    "--model.moe.z_loss 0.001 --model.moe.bias_rate 0",
    "expert choice": f"tiny {SHORT} --model.moe.router expert_choice --model.moe.looks_ahead true "
    "--model.moe.bias_rate 0",
    "capacity, padded": f"tiny {SHORT} --model.moe.capacity_factor 1.0 --model.moe.drop position "
    "--model.moe.pad_to_capacity true",
    "padded rows, gate behind, jitter": f"tiny {SHORT} --model.moe.pad_rows 16 --model.moe.gate output "
    "--model.moe.jitter 0.01",
    "documents, tied head": f"tiny {SHORT} --data.attend document --model.tied_head true",
    "balance over the global batch": f"tiny {SHORT} --model.moe.aux_loss 0.01 --model.moe.aux_over global_batch "
    "--model.moe.device_loss 0.01 --model.moe.devices 2",
    "dp 2, bf16 gradients": f"tiny {SHORT} {BF16} --nproc 2 --optim.gradient_travel bf16",
    "ep 2, dedup": f"tiny {SHORT} {DEDUP} --nproc 2 --parallel.ep 2",
    "tp 2, ep 4": f"qwen3-30b-a3b-tiny {SHORT} {DEDUP} --nproc 4 --parallel.tp 2 --parallel.ep 4",
    "cp 2 ring, ep 2": f"tiny {SHORT} {DEDUP} --nproc 4 --parallel.cp 2 --parallel.ep 2",
    "etp 2, ep 2, all_to_all": f"tiny {SHORT} --nproc 4 --parallel.ep 2 --parallel.etp 2 "
    "--parallel.dispatcher all_to_all",
    "ep 4, all_gather, bf16": f"tiny {SHORT} {BF16} --nproc 4 --parallel.ep 4 --parallel.dispatcher all_gather",
    "pp 2, vpp 2, ep 2, paired": f"tiny {SHORT} {DEDUP} --nproc 4 --parallel.pp 2 --parallel.ep 2 --pipeline.vpp 2 "
    "--pipeline.pair true --train.micro_batch 1",
    "pp 2, zero bubble, mtp": f"deepseek-v3-tiny {SHORT} --nproc 2 --parallel.pp 2 --pipeline.schedule zb_h1 "
    "--model.layers 3 --model.mtp 1",
    "pp 2, dualpipe": f"tiny {SHORT} --nproc 2 --parallel.pp 2 --pipeline.schedule dualpipe_v --pipeline.vpp 2 "
    "--train.micro_batch 1",
    "pp 2, tied head": f"tiny {SHORT} --nproc 2 --parallel.pp 2 --model.tied_head true",
}


def fingerprint(arguments: str, folder: Path) -> dict[str, str]:
    """A digest of the metrics and one of every tensor in the checkpoint, or of the error."""
    out = folder / "run"
    words = [*shlex.split(f"{arguments} {COMMON if '--optim.beta1' not in arguments else without_beta()}")]
    command = [sys.executable, "-m", "moefold", "train", *words, *corpus(folder), "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stdout + done.stderr}
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    tensors = json.loads((checkpoint / "ledger.json").read_text())["tensors"]
    lines = json.dumps(numbers(out), sort_keys=True)
    digests = {name: tensor["sha256"][:16] for name, tensor in tensors.items()}
    return {"metrics": hashlib.sha256(lines.encode()).hexdigest()[:16], **digests}


def without_beta() -> str:
    return COMMON.replace("--optim.beta1 0", "")


def fingerprints(names: list[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = fingerprint(RUNS[name], Path(folder))
        print(f"{name}: {len(found[name])} digests", *found[name].get("error", "").splitlines()[-4:], flush=True)
    return found


def compare(expected: dict[str, dict[str, str]]) -> int:
    """How many runs differ; each is named with the first tensors that do."""
    wrong = 0
    for name, digests in fingerprints(list(expected)).items():
        keys = sorted({*digests, *expected[name]})
        differing = [key for key in keys if digests.get(key) != expected[name].get(key)]
        wrong += bool(differing)
        if differing:
            print(f"  {name}: {len(differing)} of {len(keys)} differ: {', '.join(differing[:4])}", flush=True)
    print(f"{len(expected) - wrong} of {len(expected)} runs are equal to the bit")
    return wrong


def main(action: str, file: str, *only: str) -> int:
    path = Path(file)
    if action == "write":
        before = json.loads(path.read_text())["runs"] if path.exists() else {}
        runs = before | fingerprints(list(only or RUNS))
        path.write_text(json.dumps({"machine": platform.machine(), "runs": runs}, indent=1) + "\n")
        return 0
    expected = json.loads(path.read_text())["runs"]
    return compare({name: digests for name, digests in expected.items() if not only or name in only})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

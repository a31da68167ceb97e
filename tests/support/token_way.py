"""Which files of the package a token enters on its way through one MoE layer: forward, on one CPU rank.

python -m tests.support.token_way        # "files (calls)"
python -m tests.support.token_way -v     # and their names
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parent.parent.parent / "moefold") + "/"
SIZES = ["--model.layers", "1", "--train.steps", "1", "--train.device", "cpu", "--train.sample_tokens", "0"]
SIZES += ["--train.validate_sequences", "1", "--observe.tensorboard", "false", "--data.source", "zipf"]


class Way:
    """Counts calls by file from the layer's first step until the loss, once, while gradients are on."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.inside, self.done = False, False

    def watch(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self.done:
            return
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if not file.startswith(PACKAGE):
            return
        file = file.removeprefix(PACKAGE)
        if name == "attend" and file.startswith("model/") and training():
            self.inside = True
        if name == "predict" and self.inside:
            self.done = True
        elif self.inside:
            self.calls[file] += 1


def training() -> bool:
    import torch

    return torch.is_grad_enabled()


def main() -> None:
    from moefold.cli.main import run_command_line

    way = Way()
    with tempfile.TemporaryDirectory() as folder:
        output, sys.stdout = sys.stdout, sys.stderr
        sys.setprofile(way.watch)
        run_command_line(["train", "qwen3-30b-a3b-tiny", *SIZES, "--out", f"{folder}/run"])
        sys.setprofile(None)
        sys.stdout = output
    print(f"{len(way.calls)} ({way.calls.total()} calls)")
    if "-v" in sys.argv:
        print("\n".join(f"{count:5} {file}" for file, count in way.calls.items()))


if __name__ == "__main__":
    main()

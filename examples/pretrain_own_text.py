"""Pretrain a small MoE model on texts of your own, and let it continue a prompt.

    python examples/pretrain_own_text.py notes.txt books/      # files and folders; without any: this repository's docs

The loop is yours, the step is the trainer's. The same with checkpoints, metrics, resuming and several ranks:

    moefold train tiny --data.source files --data.files notes.txt,books/
"""

from __future__ import annotations

import sys
from pathlib import Path

import moefold

DOCS = Path(__file__).parent.parent / "docs"


def pretrain(texts: list[str], steps: int = 200, **keys: object) -> tuple[float, float, str]:
    """Validation loss in nats per byte before and after, and a sample."""
    config = moefold.preset(
        "tiny",
        data__source="files",
        data__files=tuple(texts),
        data__seq_len=128,
        train__steps=steps,
        train__sample_tokens=100,
        optim__warmup=min(20, steps // 4),
        **keys,
    )
    with moefold.run(config) as run:
        before = run.validate()
        for number, batch in enumerate(run, start=1):
            report = run.step(batch)
            if number % 20 == 0:
                print(f"step {number}: loss {report.loss:.3f}, gradient norm {report.grad_norm:.2f}")
        return before, run.validate(), run.sample("The ")


def main(texts: list[str]) -> None:
    before, after, sample = pretrain(texts or [str(DOCS)])
    print(f"validation loss: {before:.3f} nats a byte before, {after:.3f} after")
    print(sample)


if __name__ == "__main__":
    main(sys.argv[1:])

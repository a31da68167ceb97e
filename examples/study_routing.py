"""Study routing: how evenly experts are loaded with and without a balance bias, and which bytes each of them gets.

    python examples/study_routing.py

`moefold report RUN` draws the same for runs of the command line, as heat-maps over layers and steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

import moefold

SIZES = {"model__layers": 2, "data__seq_len": 64, "train__micro_batch": 8, "optim__warmup": 5, "optim__lr": 1e-3}
TEXT = {"data__source": "files", "data__files": tuple(moefold.__path__)}  # the source of this package


def imbalances(run: Any) -> list[float]:
    """For each step: the load of the fullest expert of any layer, over the mean, less one."""
    found: list[float] = []
    for batch in run:
        report = run.step(batch)
        load_LE = report.loads.counts_LE.double()
        fullest_L = load_LE.max(1).values / load_LE.mean(1)
        found.append(fullest_L.max().item() - 1)
    return found


def bytes_of_experts(run: Any, text: str, layer: int = 0) -> list[Counter[str]]:
    """For each expert of a layer: the characters that the router sends to it, with the number of their choices."""
    chosen: list[Tensor] = []

    def keep_choice(module: Any, arguments: Any, output: Any) -> None:
        routing, _ = output
        chosen.append(routing.ids_TK)

    router = run.model.blocks[layer].moe.router
    ids = torch.tensor([list(text.encode())])
    hook = router.register_forward_hook(keep_choice)
    with torch.no_grad():
        run.model.logits(ids)
    hook.remove()
    counts: list[Counter[str]] = [Counter() for _ in range(run.config.model.moe.experts)]
    for character, experts in zip(text, chosen[0].tolist(), strict=True):
        for expert in experts:
            counts[expert][character] += 1
    return counts


def study(bias_rate: float, steps: int, text: str) -> tuple[list[float], list[Counter[str]]]:
    keys = {"model__moe__balance__bias_rate": bias_rate, "train__steps": steps}
    config = moefold.preset("tiny", **keys, **SIZES, **TEXT)
    with moefold.run(config) as run:
        return imbalances(run), bytes_of_experts(run, text)


def main(steps: int = 60) -> None:
    text = "def area(width, height):\n    return width * height\n"
    for bias_rate in (0.0, 0.005):
        found, counts = study(bias_rate, steps, text)
        print(f"bias_rate {bias_rate}: imbalance {found[0]:.2f} in the first step, {found[-1]:.2f} in the last")
        for expert, characters in enumerate(counts):
            print(f"  expert {expert}: {''.join(character for character, _ in characters.most_common(8))!r}")


if __name__ == "__main__":
    main()

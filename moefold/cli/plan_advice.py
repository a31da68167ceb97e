"""What `moefold plan` prints beside its figures: the error band of the speed, and the advice."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape


def print_beside_figures(answer: dict[str, Any], console: Console) -> None:
    band = answer["error_band"]
    speeds = f"{band['low']:,.0f} to {band['high']:,.0f} tokens/s a GPU"
    console.print(f"expect [bold]{speeds}[/bold]: {escape(band['text'])}", highlight=False)
    if band["warning"]:
        console.print(f"[bold red]warning[/bold red]: {escape(band['warning'])}", highlight=False)
    for advice in answer["advice"]:
        line = f"- {advice['about']}: {advice['text']} ({advice['source']})"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

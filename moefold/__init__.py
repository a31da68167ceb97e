"""moefold trains Mixture-of-Experts language models, from a laptop CPU to a cluster. Start reading at train/step.py."""

from typing import TYPE_CHECKING, Any

from moefold.version import __version__ as __version__

if TYPE_CHECKING:
    from moefold.train.from_hf import from_hf as from_hf


def __getattr__(name: str) -> Any:
    """`moefold.from_hf` is found when it is first asked for, so that importing the package does not import torch."""
    if name == "from_hf":
        from moefold.train.from_hf import from_hf

        return from_hf
    raise AttributeError(f"module moefold has no attribute {name}")

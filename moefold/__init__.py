"""moefold trains Mixture-of-Experts language models, from a laptop CPU to a cluster. Start reading at train/step.py.

From Python: docs/python.md. The names below are imported when they are first used, so that importing the package does
not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moefold.version import __version__ as __version__

if TYPE_CHECKING:
    from moefold.api.model import Model as Model
    from moefold.api.moe_layer import MoeLayer as MoeLayer
    from moefold.api.ops import ops as ops
    from moefold.api.presets import preset as preset
    from moefold.api.register import register as register
    from moefold.api.run import run as run
    from moefold.config.extensions import Extension as Extension
    from moefold.config.run import Config as Config
    from moefold.train.from_hf import from_hf as from_hf
    from moefold.train.text_generator import TextGenerator as TextGenerator

EXPORTS = {
    "Config": "moefold.config.run",
    "Extension": "moefold.config.extensions",
    "Model": "moefold.api.model",
    "MoeLayer": "moefold.api.moe_layer",
    "TextGenerator": "moefold.train.text_generator",
    "from_hf": "moefold.train.from_hf",
    "ops": "moefold.api.ops",
    "preset": "moefold.api.presets",
    "register": "moefold.api.register",
    "run": "moefold.api.run",
}
__all__ = ["Config", "Extension", "Model", "MoeLayer", "TextGenerator", "from_hf", "ops", "preset", "register", "run"]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module moefold has no attribute {name}; it has {', '.join(__all__)}")
    return getattr(import_module(EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""A Mixture-of-Experts layer for any torch model: `moefold.MoeLayer`.

It is the layer that moefold's own blocks hold, with kernels chosen as a run would choose them. Norm and residual
connection are the caller's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moefold.anatomy.products import product_recipes
from moefold.api.choices import Device, describe_kernels, module_config
from moefold.api.presets import preset, with_keys
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.layout.axes import World
from moefold.layout.dtypes import DTYPES
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.balance import LayerLoads, update_selection_biases
from moefold.model.moe.layer import MoeSublayer
from moefold.precision.recipes import attach_recipes
from moefold.train.assemble import choose_kernels, default_dtype, make_model_parts


class MoeLayer(nn.Module):
    """`output, aux = layer(x)` for x of shape (..., hidden); the last dim but one counts positions of a sequence.

    `aux` is one scalar, the balance losses with their weights (`balance__aux_loss`, `balance__z_loss`), a mean over
    tokens: add it to the loss. Further keys are those of `model.moe` with `__` for a dot: `router__scale=2.5`. With
    `world`, experts are spread over its ep ranks. Weights are drawn by `seed`, the same on any layout; with
    `initialise=False` they stay as allocated. `recipe`: number format of the experts' products, such as "fp8_block"."""

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        ffn: int,
        score: str = "softmax",
        shared_ffn: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        seed: int = 1,
        world: World | None = None,
        initialise: bool = True,
        recipe: str = "plain",
        **keys: Any,
    ):
        one_layer = {"hidden": hidden, "layers": 1}
        sizes = {
            "experts": experts,
            "top_k": top_k,
            "ffn": ffn,
            "shared_ffn": shared_ffn,
            "router__score": score,
        }
        config = with_keys(Config(), one_layer, "model.")
        config = with_keys(config, sizes | keys, "model.moe.")
        config = with_keys(config, {"recipe": recipe}, "precision.")
        super().__init__()
        drawn_from = seed if initialise else None
        self.build(config, device, dtype, drawn_from, world)

    @classmethod
    def like(
        cls,
        name: str,
        device: Device = None,
        dtype: torch.dtype | None = None,
        seed: int = 1,
        world: World | None = None,
        recipe: str = "plain",
        **keys: Any,
    ) -> MoeLayer:
        """The MoE layer of a preset, such as "qwen3-30b-a3b", with keys of `model.moe` changed."""
        config = with_keys(preset(name), keys, "model.moe.")
        config = with_keys(config, {"recipe": recipe}, "precision.")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.build(config, device, dtype, seed, world)
        return made

    def build(
        self,
        config: Config,
        device: Device,
        dtype: torch.dtype | None,
        seed: int | None,
        world: World | None,
    ) -> None:
        config = with_keys(config, {"dense_layers": 0}, "model.moe.")
        config, self.world = module_config(config, device, dtype, world)
        self.config = check_config(config, self.world.size)
        kernels = choose_kernels(self.config, self.world)
        parts = make_model_parts(self.config, self.world, kernels)
        precision = DTYPES[self.config.train.precision]
        with self.world.device, default_dtype(precision):
            model = self.config.model
            self.layer = MoeSublayer(model, 0, parts)
        recipes = layer_recipes(self.config)
        attach_recipes(self.layer, recipes, kernels, self.config.precision)
        if seed is not None:
            initialise_parameters(self.layer, seed)

    def forward(self, x: Tensor, expert_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`expert_ids` (..., top_k) replace the router's choice; weights and their gradients still come from its
        scores."""
        output, aux = self.layer(x, expert_ids)
        tokens = x.numel() // x.shape[-1]
        return output, aux / max(1, tokens)

    def step_balance(self, pace: float = 1.0) -> LayerLoads:
        """After the optimizer's step: moves the selection bias (`balance__bias_rate`) and returns the tokens of each
        expert since the last call."""
        everyone = self.world.dp_cp_tp
        load = self.layer.router.load
        moe = self.config.model.moe
        return update_selection_biases([load], moe, everyone, pace=pace)

    def explain(self) -> str:
        """One line for each operation: the implementation in use, and why."""
        outside = ("add_rmsnorm",)
        specs = self.layer.specs
        return describe_kernels(specs, self.config, self.world, without=outside)

    def extra_repr(self) -> str:
        moe = self.config.model.moe
        return f"hidden={self.config.model.hidden}, experts={moe.experts}, top_k={moe.top_k}, ffn={moe.ffn}"


def layer_recipes(config: Config) -> dict[str, str]:
    """The recipes of the products of one layer, by their names inside it."""
    inside = "blocks.0.moe."
    recipes: dict[str, str] = {}
    for choice in product_recipes(config):
        name = choice.product.name
        if name.startswith(inside):
            recipes[name.removeprefix(inside)] = choice.recipe
    return recipes

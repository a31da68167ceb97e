"""Registration in transformers: experts and attention under the name "moefold"; norms, rotary positions and the loss in
place of transformers' own where these compute the same.

A class or function of transformers is replaced only if its code reads as Llama's or Mixtral's, comments and annotations
aside: what other families do differently stays with them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moefold.anatomy.activations import ActivationKind
from moefold.config.errors import UserError
from moefold.transformers.attention import attend
from moefold.transformers.experts import HostedExperts, product_dtype, run_experts
from moefold.transformers.layers import head_loss, normalise, rotate, shifted_labels

NAME = "moefold"
FAMILIES = "transformers.models."
FUNCTIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
HALVES_REPEAT = "torch.cat((freqs, freqs), dim=-1)"

Forward = Callable[..., Any]


class Replaced(NamedTuple):
    """An attribute of transformers, and what it was."""

    owner: Any
    name: str
    original: Any


REPLACED: list[Replaced] = []
WANTED: set[str] = set()  # of norms, rope, head
FITTED: set[tuple[str, str]] = set()  # modeling module, what


def enable(norms: bool = False, rope: bool = False, head: bool = False) -> None:
    """Register experts and attention as "moefold"; with `norms`, `rope` and `head` also replace the RMSNorms, rotary
    positions, and the head with its loss of MoE families, of models that exist and of those made later."""
    require_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    type(ALL_EXPERTS_FUNCTIONS).register(NAME, experts_forward)
    AttentionInterface.register(NAME, partial(attend, sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    asked = {"norms": norms, "rope": rope, "head": head}
    WANTED.update(name for name, wanted in asked.items() if wanted)
    if not WANTED:
        return
    if not REPLACED:
        made = PreTrainedModel.post_init
        replace_attribute(PreTrainedModel, "post_init", fitting_when_made(made))
    for name in list(sys.modules):
        if name.startswith(FAMILIES):
            fit_module(sys.modules[name])


def disable() -> None:
    """Take back what `enable` did. Models that still ask for "moefold" are refused by transformers from then on."""
    require_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for interface in (type(ALL_EXPERTS_FUNCTIONS), AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)
    while REPLACED:
        replaced = REPLACED.pop()
        setattr(replaced.owner, replaced.name, replaced.original)
    WANTED.clear()
    FITTED.clear()


def require_transformers() -> None:
    try:
        import transformers.integrations.moe  # noqa: F401
    except ImportError as missing:
        raise UserError(
            f"moefold.transformers needs transformers 5 or newer ({missing}); install it with `pip install "
            "'transformers>=5'`"
        ) from missing


# Experts.


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Inside a compiled graph transformers' own experts run: moefold's kernels cannot be traced."""
    if torch.compiler.is_compiling():
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    dtype = product_dtype(module, hidden_states.device)
    experts = HostedExperts(module, known_activation(module), dtype)
    return run_experts(experts, hidden_states, top_k_index, top_k_weights)


def known_activation(module: Any) -> ActivationKind | None:
    """The activation as moefold's ops know it, or None."""
    from transformers.integrations.moe import _default_apply_gate

    gated = module.has_gate
    has_own_gate = type(module)._apply_gate is not _default_apply_gate
    if gated and (has_own_gate or not module.is_concatenated):
        return None
    function = known_functions().get(type(module.act_fn))
    if function is None:
        return None
    return ActivationKind(function, gated)


@cache
def known_functions() -> dict[type, str]:
    """moefold's names of functions, by the class of transformers' activation."""
    from transformers.activations import ACT2FN

    return {type(ACT2FN[theirs]): ours for theirs, ours in FUNCTIONS.items()}


# Norms, rotary positions, head.


def fitting_when_made(post_init: Forward) -> Forward:
    @wraps(post_init)
    def fit_and_post_init(model: Any) -> None:
        post_init(model)
        name = type(model).__module__
        if name.startswith(FAMILIES):
            fit_module(sys.modules[name])

    return fit_and_post_init


def fit_module(module: ModuleType) -> None:
    """Replace what is wanted in a modeling file of a MoE family."""
    if "use_experts_implementation" not in vars(module):
        return
    name = module.__name__
    fits = {"norms": fit_norms, "rope": fit_rope, "head": fit_heads}
    for what in WANTED:
        if (name, what) not in FITTED:
            FITTED.add((name, what))
            fits[what](module)


def fit_norms(module: ModuleType) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for norm in own_classes(module, "RMSNorm"):
        if reads_as(norm.forward, LlamaRMSNorm.forward, GptOssRMSNorm.forward):
            replace_attribute(norm, "forward", normalise)


def fit_rope(module: ModuleType) -> None:
    from transformers.models.llama import modeling_llama as llama

    own = vars(module)
    if "apply_rotary_pos_emb" not in own or "rotate_half" not in own:
        return
    is_llama = reads_as(own["apply_rotary_pos_emb"], llama.apply_rotary_pos_emb)
    is_half = reads_as(own["rotate_half"], llama.rotate_half)
    if is_llama and is_half and HALVES_REPEAT in inspect.getsource(module):
        replace_attribute(module, "apply_rotary_pos_emb", rotate)


def fit_heads(module: ModuleType) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
    from transformers.models.llama.modeling_llama import LlamaForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    known = (LlamaForCausalLM, MixtralForCausalLM, DeepseekV3ForCausalLM)
    forwards = [model.forward for model in known]
    for model in own_classes(module, "ForCausalLM"):
        if reads_as(model.forward, *forwards):
            replace_attribute(model, "forward", with_fused_loss(model.forward))


def own_classes(module: ModuleType, ending: str) -> list[Any]:
    found: list[Any] = []
    for name, value in vars(module).items():
        if name.endswith(ending) and inspect.isclass(value) and value.__module__ == module.__name__:
            found.append(value)
    return found


def replace_attribute(owner: Any, name: str, new: Any) -> None:
    original = getattr(owner, name)
    REPLACED.append(Replaced(owner, name, original))
    setattr(owner, name, new)


def reads_as(function: Forward, *known: Forward) -> bool:
    code = code_of(function)
    return code in map(code_of, known)


@cache
def code_of(function: Forward) -> str:
    """Names of arguments and the body, without docstring, comments and annotations."""
    plain = inspect.unwrap(function)
    source = inspect.getsource(plain)
    (definition,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(definition, ast.FunctionDef), f"{function} is no function"
    body = definition.body
    if ast.get_docstring(definition) is not None:
        body = body[1:]
    names = [argument.arg for argument in definition.args.args]
    lines = [ast.unparse(without_annotation(statement)) for statement in body]
    return "\n".join(names + lines)


def without_annotation(statement: ast.stmt) -> ast.stmt:
    if not isinstance(statement, ast.AnnAssign) or statement.value is None:
        return statement
    plain = ast.Assign([statement.target], statement.value)
    return ast.copy_location(plain, statement)


def with_fused_loss(forward: Forward) -> Forward:
    """The forward method of a causal language model: with labels, in training, the loss comes from the head's op, which
    never holds the logits of all tokens; the output has no logits then."""

    @wraps(forward)
    def forward_with_loss(model: Any, *inputs: Any, **options: Any) -> Any:
        if not fuses_loss(model, options):
            return forward(model, *inputs, **options)
        decoded: list[Any] = []
        keep_output = model.model.register_forward_hook(lambda _, __, output: decoded.append(output))
        few_logits = {"labels": None, "logits_to_keep": 1}
        try:
            outputs = forward(model, *inputs, **(options | few_logits))
        finally:
            keep_output.remove()
        labels = options.get("shift_labels")
        if labels is None:
            labels = shifted_labels(options["labels"])
        hidden_BSD = decoded[0].last_hidden_state
        loss = head_loss(hidden_BSD, model.lm_head, labels, options.get("num_items_in_batch"))
        aux_loss = outputs.get("aux_loss")
        if aux_loss is not None:
            loss = loss + model.router_aux_loss_coef * aux_loss
        fields = dict(outputs) | {"loss": loss, "logits": None}
        return type(outputs)(**fields)

    return forward_with_loss


def fuses_loss(model: Any, options: dict[str, Any]) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if options.get("labels") is None or not model.training or torch.compiler.is_compiling():
        return False
    returns_dict = options.get("return_dict", model.config.return_dict)
    if options.get("logits_to_keep", 0) != 0 or returns_dict is False or "ignore_index" in options:
        return False
    head = model.lm_head
    if not is_plain_head(head) or model.loss_function is not ForCausalLMLoss:
        return False
    return not torch.is_autocast_enabled(head.weight.device.type)


def is_plain_head(head: nn.Module) -> bool:
    """Whether the weight is the whole head. Where others act around its forward method, as offloading and sharding do,
    the weight may be elsewhere until that method is called."""
    acts_around = "forward" in vars(head) or head._forward_pre_hooks or head._forward_hooks
    return type(head) is nn.Linear and head.bias is None and not acts_around

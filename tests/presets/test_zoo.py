"""The presets are the published models."""

from dataclasses import replace

import pytest

from moefold.anatomy.model_totals import active_parameters, mtp_parameters, total_parameters, train_flops_per_token
from moefold.anatomy.step_specs import is_moe_layer, sliding_window_of
from moefold.config.run import ModelConfig, MoeConfig
from moefold.kernels.routing.router_spec import RouterSpec
from moefold.model.moe.router import router_spec_of
from moefold.presets.recipe import resolve_recipe
from moefold.presets.zoo import PRESETS, is_published_model

LARGE = list(filter(is_published_model, PRESETS))

# Billions of parameters as their authors print them: all, and those of a token. Some do not count the embedding, or
# neither it nor the head, among those of a token.
PUBLISHED = {
    "mixtral-8x7b": ("46.7", "12.9", "all"),
    "mixtral-8x22b": ("140.6", "39.1", "all"),
    "olmoe-1b-7b": ("6.92", "1.28", "all"),
    "qwen3-30b-a3b": ("30.5", "3.3", "all"),
    "qwen3-235b-a22b": ("235", "22", "all"),
    "qwen2-57b-a14b": ("57.4", "14.2", "all"),
    "deepseek-v2-lite": ("15.7", "2.4", "no embedding"),
    "deepseek-v2": ("235.7", "21", "all"),
    "deepseek-v3": ("671.03", "37.55", "all"),
    "kimi-k2": ("1026.4", "32", "all"),
    "gpt-oss-20b": ("20.91", "3.61", "no embedding"),
    "gpt-oss-120b": ("116.83", "5.13", "no embedding"),
    "glm-4.5-air": ("106.85", "12", "neither"),
    "deepseek-moe-16b": ("16.4", "2.8", "all"),
    "hunyuan-large": ("389", "52", "all"),
    "phi-3.5-moe": ("41.9", "6.6", "all"),
}
TOTAL_ONLY = {"internal-352b": 352, "mixtral-8x22b-g8t8": 140.6}  # the second is a first one, cut finer
NOT_PUBLISHED = {"latent-30b-a3b", "llama3-8x70b"}
MATRICES = {"all": 0, "no embedding": 1, "neither": 2}


def last_digit(printed: str) -> float:
    """One unit of the last printed digit: 0.1 of 46.7."""
    return 10.0 ** -len(printed.partition(".")[2])


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_and_active_parameters_are_the_published_ones(name: str):
    model = PRESETS[name]().model
    total, active, what = PUBLISHED[name]
    used = active_parameters(model) - MATRICES[what] * model.vocab * model.hidden
    for printed, count in ((total, total_parameters(model)), (active, used)):
        assert abs(count / 1e9 - float(printed)) < last_digit(printed), f"{count / 1e9:.3f} is not {printed}"


def test_every_large_preset_is_held_against_its_publication():
    assert {*PUBLISHED, *TOTAL_ONLY, *NOT_PUBLISHED} == {*LARGE}


@pytest.mark.parametrize("name", TOTAL_ONLY)
def test_total_parameters_are_the_published_ones_where_no_others_are(name: str):
    model = PRESETS[name]().model
    assert total_parameters(model) / 1e9 == pytest.approx(TOTAL_ONLY[name], rel=1e-3)


def test_the_published_mfu_of_internal_352b_follows_from_its_flops():
    """MegaScale-MoE prints tokens per second and MFU on 240 and 1,440 H800 (989 TFLOP/s): 32.48 and 27.89 %."""
    flops = train_flops_per_token(PRESETS["internal-352b"]().model, 8192)
    for gpus, tokens, mfu in ((240, 272.9e3, 0.3248), (1440, 1407.7e3, 0.2789)):
        assert tokens / gpus * flops / 989e12 == pytest.approx(mfu, rel=2e-3)


def test_upcycled_models_are_as_large_as_their_names_say():
    """Eight MLPs of Llama3-70B and one attention; a finer cut of Mixtral has all its parameters, but half of those of
    a token: 8 of 64 experts are one of the old ones."""
    llama = PRESETS["llama3-8x70b"]().model
    one = replace(llama, moe=replace(llama.moe, experts=1, top_k=1))
    assert total_parameters(one) / 1e9 == pytest.approx(70.6, abs=0.1)
    coarse, fine = (PRESETS[name]().model for name in ("mixtral-8x22b", "mixtral-8x22b-g8t8"))
    routers = fine.layers * fine.hidden * (fine.moe.experts - coarse.moe.experts)
    assert total_parameters(fine) == total_parameters(coarse) + routers
    assert fine.moe.top_k * fine.moe.ffn == coarse.moe.ffn


def test_layers_of_multi_token_prediction_are_not_among_the_published_parameters():
    """DeepSeek-V3's checkpoint holds 685 B: 671 B of the model and, with its embedding and head repeated, 14 B."""
    model = PRESETS["deepseek-v3"]().model
    repeated = 2 * model.vocab * model.hidden
    assert (total_parameters(model) + mtp_parameters(model) + repeated) / 1e9 == pytest.approx(684.5, abs=0.05)
    assert {name for name in LARGE if PRESETS[name]().model.mtp} == {"deepseek-v3", "glm-4.5-air"}


@pytest.mark.parametrize("name", LARGE)
def test_every_large_preset_has_a_tiny_form_beside_it_that_is_small_and_legal(name: str):
    tiny = resolve_recipe(f"{name}-tiny")
    assert total_parameters(tiny.model) < 1e6
    assert resolve_recipe(name).model != tiny.model
    assert tiny.name == f"{name}-tiny"


def mechanisms(model: ModelConfig) -> dict[str, object]:
    """What a model does, whatever its sizes."""
    a, moe = model.attention, model.moe
    kinds = {(is_moe_layer(model, layer), sliding_window_of(model, layer) > 0) for layer in range(model.layers)}
    on_or_off = {
        "few key heads": a.kv_heads < a.heads,
        "some dims stand still": bool(a.rope_dim),
        "query latent": bool(a.q_rank),
        "other values": bool(a.value_dim),
        "shared": bool(moe.shared_ffn),
        "latent": bool(moe.latent),
        "groups": moe.router.groups > 1,
        "groups hide": moe.router.groups_chosen < moe.router.groups,
        "devices": moe.balance.devices > 1,
    }
    sized = {"experts", "top_k", "ffn", "shared_ffn", "latent", "dense_layers", "groups", "groups_chosen", "devices"}
    sized |= {"router", "balance", "capacity"}  # sections: their keys are compared one by one
    parts = (moe, moe.router, moe.capacity, moe.balance)
    same_moe = {key: value for part in parts for key, value in vars(part).items() if key not in sized}
    same_attention = (a.kind, a.sinks, a.qk_norm, a.qkv_bias, a.out_bias, a.rope.scaling, a.rope.round_dims)
    same_rope = (a.rope.factor, a.rope.beta_fast, a.rope.mscale, a.rope.mscale_all, a.rope.theta)
    return {
        "kinds of layers": kinds,
        **on_or_off,
        **same_moe,
        "attention": same_attention,
        "rope": same_rope,
        "model": (model.mtp, model.tied_head, model.norm_eps),
    }


@pytest.mark.parametrize("name", LARGE)
def test_the_tiny_form_has_every_mechanism_of_the_large_one(name: str):
    assert mechanisms(PRESETS[f"{name}-tiny"]().model) == mechanisms(PRESETS[name]().model)


def test_the_presets_route_as_their_authors_say():
    found = {name: router_spec_of(PRESETS[name]().model.moe) for name in LARGE}
    assert found["mixtral-8x7b"] == RouterSpec(2)
    assert found["olmoe-1b-7b"] == RouterSpec(8, normalize="none")
    assert found["qwen2-57b-a14b"] == RouterSpec(8, normalize="none")
    assert found["deepseek-v2"] == RouterSpec(6, "softmax", "none", 16.0, 8, 3, "best")
    assert found["deepseek-v3"] == RouterSpec(8, "sigmoid", "chosen", 2.5, 8, 4, "best_two")
    assert found["kimi-k2"] == RouterSpec(8, "sigmoid", "chosen", 2.827)
    assert found["gpt-oss-20b"] == RouterSpec(4, "softmax_chosen")
    assert found["glm-4.5-air"] == RouterSpec(8, "sigmoid")
    assert all(isinstance(PRESETS[name]().model.moe, MoeConfig) for name in LARGE)


def test_gpt_oss_sees_128_tokens_in_every_other_layer_beginning_with_the_first():
    model = PRESETS["gpt-oss-20b"]().model
    assert [sliding_window_of(model, layer) for layer in range(4)] == [128, 0, 128, 0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_carries_its_own_name(name: str):
    assert PRESETS[name]().name == name
    assert PRESETS[name]() == PRESETS[name](), "it is a plain value, made anew each time"


def test_tiny_has_every_mechanism_and_is_small():
    tiny = PRESETS["tiny"]()
    assert tiny.model.moe.top_k < tiny.model.moe.experts
    assert tiny.model.moe.balance.bias_rate > 0
    assert tiny.model.attention.kv_heads < tiny.model.attention.heads
    assert total_parameters(tiny.model) < 5e6

"""`router_aux_loss_coef` weighs what transformers weighs by it, as far as the two losses agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moefold.checkpoint.hf.config_json import FAMILIES, config_json_for, describe_model
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.train.from_hf import from_hf
from tests.support.hf_models import make, save, tokens

FAMILIES_WITH_COEFFICIENT = {"Mixtral": 0.02, "Olmoe": 0.01, "Qwen3Moe": 0.3, "Qwen2Moe": 0.001, "GptOss": 0.9}


def saved_model(kind: str, layers: int, folder: Path) -> Any:
    coefficient = FAMILIES_WITH_COEFFICIENT[kind]
    model = make(kind, num_hidden_layers=layers, router_aux_loss_coef=coefficient, output_router_logits=True)
    save(model, folder)
    return model


@pytest.mark.parametrize("kind", FAMILIES_WITH_COEFFICIENT)
def test_the_balance_loss_of_one_layer_is_that_of_transformers(kind: str, tmp_path: Path):
    model = saved_model(kind, 1, tmp_path)
    ids = tokens()
    theirs = model(ids).aux_loss * FAMILIES_WITH_COEFFICIENT[kind]
    ours = from_hf(tmp_path)(ids, ids).balance / ids.numel()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("kind", FAMILIES_WITH_COEFFICIENT)
def test_the_coefficient_is_shared_out_to_layers_and_written_as_it_was_read(kind: str, tmp_path: Path):
    """transformers has one loss for all layers, K at perfect balance; ours is one in each layer."""
    model = saved_model(kind, 4, tmp_path)
    described = describe_model(open_model_folder(tmp_path))
    coefficient, moe = FAMILIES_WITH_COEFFICIENT[kind], described.model.moe
    assert moe.balance.aux_loss == pytest.approx(coefficient * moe.top_k / 4, rel=1e-11)
    assert moe.balance.aux_over == "microbatch"
    written = config_json_for(FAMILIES[model.config.model_type], described.model)
    assert written["router_aux_loss_coef"] == coefficient

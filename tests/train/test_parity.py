"""What layouts are compared with: a run of one rank that is legal whatever the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moefold.config.rules import ConfigOnRanks, broken_rules
from moefold.config.run import ParallelConfig
from moefold.presets.zoo import PRESETS
from moefold.train.parity import shrink_config, single_rank_config


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_run_of_one_rank_is_legal_for_any_batch(stages: int, replicas: int):
    ranks = 2 * stages * replicas
    layout = replace(PRESETS["tiny"](), parallel=ParallelConfig(tp=2, pp=stages))
    alone = single_rank_config(shrink_config(layout, ranks))
    assert not broken_rules(ConfigOnRanks(alone, 1))

"""The extended tests: cases of which `make test` runs a sample, and `make test-all` every one.

Of each parametrized function every n-th case stays in the sample, in the order of collection; the others are marked
`extended`. n is 5 where nothing else is listed. Of long grids n is coprime to the length of the inner parameters, so
that every value of each parameter is sampled. Long tests beside which a shorter one shows the like are marked
`extended` where they stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

SAMPLED_GRIDS = {  # seconds are CPU time of the whole grid, measured once
    "tests/test_layouts_agree.py": {
        "test_every_layout_on_eight_ranks_agrees_with_one_rank_in_fp64_and_every_third_in_fp32": 11,  # 610 s
        "test_every_preset_agrees_with_one_rank": 5,  # 130 s
        "test_every_router_balance_and_expert_variant_agrees_with_one_rank": 5,  # 110 s
        "test_every_way_of_handling_tokens_agrees_with_on_one_rank": 5,  # 100 s
        "test_attention_within_documents_agrees_with_one_rank": 2,  # 30 s
    },
    "tests/test_document_commands.py": {
        "test_the_commands_of_a_page_run": 1,  # marked where it stands
    },
    "tests/test_pipelines_agree.py": {
        "test_every_schedule_and_vpp_has_the_bits_of_one_rank_and_the_simulated_order": 2,  # 40 s
    },
    "tests/test_sharding_agrees.py": {
        "test_shares_on_four_ranks_agree_with_one_rank_and_two_units_are_whole_at_most": 5,  # 150 s
    },
    "tests/memory/test_recompute.py": {
        "test_a_recomputing_run_is_equal_to_the_bit": 7,  # 65 s
        "test_regions_that_communicate_are_equal_to_the_bit_on_every_rank": 7,  # 200 s
    },
    "tests/memory/test_offload.py": {
        "test_an_offloading_run_is_equal_to_the_bit": 7,  # 35 s
        "test_what_leaves_the_device_is_what_the_planner_says": 7,  # 30 s
        "test_copies_back_begin_in_time_in_any_schedule": 2,  # 30 s
    },
    "tests/memory/test_recompute_bytes.py": {
        "test_a_recomputing_model_holds_what_the_table_says": 11,  # 60 s
        "test_a_recomputing_model_in_fp8_holds_what_the_table_says": 19,  # 90 s
    },
    "tests/plan/memory/test_machine_fit.py": {
        "test_a_recomputing_run_takes_the_memory_planned_as_one_that_keeps_all": 5,  # 20 s
    },
    "tests/dispatch/test_dispatchers.py": {
        "test_a_dispatcher_equals_the_local_one_forward_and_backward": 9,  # 470 s
    },
    "tests/model/test_context.py": {
        "test_a_mechanism_equals_whole_attention_with_its_gradients_and_largest_logits": 7,  # 180 s
    },
    "tests/kernels/attention/test_masked_triton.py": {
        "test_result_and_gradients_equal_those_of_the_reference": 7,  # 40 s
    },
    "tests/checkpoint/hf/test_defaults.py": {
        "test_a_key_means_what_it_means_to_transformers_or_is_refused_by_name": 23,  # 140 s
        "test_an_absent_window_is_the_published_one": 5,  # 15 s
    },
    "tests/checkpoint/hf/test_random_configs.py": {
        "test_a_random_model_has_the_logits_of_transformers_or_is_refused": 8,  # 30 s
    },
    "tests/checkpoint/hf/test_export.py": {
        "test_logits_and_exports_are_the_same_on_any_layout": 9,  # 30 s
    },
    "tests/kernels/routing/test_router_triton.py": {
        "test_sums_are_those_of_sequences_whole_cut_and_absent": 3,  # 25 s
    },
    "tests/kernels/test_every_op.py": {
        "test_an_implementation_agrees_with_the_reference_in_fp64_forward_and_backward": 7,  # 150 s
    },
    "tests/train/test_routing_replay.py": {
        "test_what_one_rank_recorded_is_replayed_on_any_layout_and_the_reverse": 5,  # 80 s
    },
    "tests/train/test_runs.py": {
        "test_a_signal_saves_and_leaves_cleanly_and_the_run_goes_on_as_if_nothing_happened": 3,  # 45 s
    },
    "tests/train/test_packed_runs.py": {
        "test_a_packed_step_with_masks_on_any_layout_is_the_step_on_each_document_by_itself": 5,  # 50 s
    },
    "tests/train/test_microscaling_runs.py": {
        "test_every_mechanism_trains_near_plain_and_repeats_to_the_bit": 7,  # 50 s
    },
    "tests/train/test_fp8_runs.py": {
        "test_a_model_learns_with_every_recipe_as_it_does_without": 8,  # 40 s
    },
    "tests/train/test_fp8_storage.py": {
        "test_data_and_pipeline_parallel_ranks_equal_one_rank_with_copies_to_the_bit": 2,  # 30 s
        "test_every_layout_has_the_losses_of_the_same_layout_with_copies": 3,  # 30 s
        "test_a_run_without_copies_has_the_losses_of_one_that_keeps_them_to_the_bit": 4,  # 20 s
    },
    "tests/train/test_resume.py": {
        "test_any_sharding_takes_up_what_another_saved": 2,  # 40 s
    },
    "tests/train/test_dry_run.py": {
        "test_a_rank_of_thousands_starts_and_records_within_seconds": 3,  # 40 s
    },
    "tests/train/test_update_in_backward.py": {
        "test_updates_inside_backward_are_those_after_it_to_the_bit": 3,  # 25 s
    },
    "tests/model/test_host_waits.py": {
        "test_with_experts_on_several_ranks_a_layer_waits_at_most_once": 5,  # 35 s
    },
    "tests/memory/test_graphs.py": {
        "test_replays_give_the_bits_of_ordinary_steps": 3,  # 30 s
    },
}

SAMPLED_FILES = {  # files of many short cases, for functions that are not listed above
    "tests/anatomy/test_model_totals.py": 5,
    "tests/checkpoint/hf/test_defaults.py": 11,
    "tests/dispatch/test_dispatchers.py": 5,
    "tests/dispatch/test_fp8_dispatcher.py": 5,
    "tests/kernels/attention/test_masked_triton.py": 5,
    "tests/kernels/experts/test_expert_mlp_fp8.py": 5,
    "tests/kernels/experts/test_mlp_activation_triton.py": 5,
    "tests/kernels/quantise/test_fp8.py": 5,
    "tests/kernels/test_every_op.py": 5,
    "tests/memory/test_offload.py": 5,
    "tests/model/test_context.py": 5,
    "tests/plan/layer/test_moefold_layers.py": 5,
    "tests/train/test_fp8_runs.py": 5,
    "tests/train/test_fp8_storage.py": 5,
}

COMMON_NTH = 5


def mark_extended(items: Iterable[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        file, _, name = function.partition("::")
        nth = SAMPLED_GRIDS.get(file, {}).get(name, SAMPLED_FILES.get(file, COMMON_NTH))
        if seen[function] % nth:
            item.add_marker(pytest.mark.extended)
        seen[function] += 1

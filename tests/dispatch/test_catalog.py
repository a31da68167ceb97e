"""The catalog of dispatchers: prices belong to legal names, and one that is attached takes part in auto's choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moefold.config.clone_rules import COUNTING_DISPATCHERS
from moefold.config.extensions import EXTENSIONS, Extension, register_extension
from moefold.config.open_names import DISPATCHER_NAMES
from moefold.config.run import ParallelConfig
from moefold.dispatch.base import Dispatcher
from moefold.dispatch.build import DispatchSetting, find_builder
from moefold.dispatch.catalog import (
    DISPATCHER_ENTRIES,
    DispatchTrip,
    LinkSpeeds,
    attach_price,
    dispatch_seconds,
    dispatcher_entry,
)
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.price import cheapest_dispatcher, predicted_one_way, seconds_by_dispatcher
from moefold.presets.zoo import PRESETS

EIGHT_RANKS = replace(PRESETS["qwen3-30b-a3b"](), parallel=ParallelConfig(ep=8))


def build_wormhole(setting: DispatchSetting) -> Dispatcher:
    return LocalDispatcher(setting.row_policy, setting.kernels)


def teleport_seconds(trip: DispatchTrip, links: LinkSpeeds) -> float:
    return 1e-9


@pytest.fixture
def teleport() -> Iterator[str]:
    DISPATCHER_NAMES.add("teleport", "tokens are there at once")
    yield "teleport"
    DISPATCHER_NAMES.remove("teleport")
    DISPATCHER_ENTRIES.pop("teleport", None)


def test_every_entry_is_of_a_legal_name_and_says_what_config_says():
    assert set(DISPATCHER_ENTRIES) == set(DISPATCHER_NAMES.builtin) - {"auto"}
    for name, entry in DISPATCHER_ENTRIES.items():
        assert entry.says == DISPATCHER_NAMES.says(name)


def test_where_ranks_have_different_numbers_of_tokens_auto_takes_a_dispatcher_that_counts_rows():
    dynamic = replace(EIGHT_RANKS, parallel=ParallelConfig(ep=8, context_sizes="dynamic"))
    assert set(seconds_by_dispatcher(EIGHT_RANKS, 4, 2, LinkSpeeds())) - {"all_gather"} == set(COUNTING_DISPATCHERS)
    assert set(seconds_by_dispatcher(dynamic, 4, 2, LinkSpeeds())) == set(COUNTING_DISPATCHERS)


def test_what_a_dispatcher_needs_is_said():
    assert "deep_ep" in dispatcher_entry("deepep").needs
    assert dispatcher_entry("dedup").needs == ""


def test_a_name_without_a_price_is_used_when_asked_for_but_never_chosen(teleport: str):
    asked = replace(EIGHT_RANKS, parallel=ParallelConfig(ep=8, dispatcher=teleport))
    assert cheapest_dispatcher(asked, 8, 2) == (teleport, "asked for")
    assert cheapest_dispatcher(EIGHT_RANKS, 8, 2)[0] == "dedup"
    assert dispatcher_entry(teleport).seconds is None
    name, seconds = predicted_one_way(asked, 8, 2, LinkSpeeds())
    assert (name, seconds > 0) == ("dedup", True)
    with pytest.raises(KeyError, match="no price"):
        dispatch_seconds(teleport, DispatchTrip(1, 1, 1, 8, 8), LinkSpeeds())


def test_a_price_that_is_attached_takes_part_in_the_choice(teleport: str):
    attach_price(teleport, teleport_seconds)
    name, why = cheapest_dispatcher(EIGHT_RANKS, 8, 2)
    assert name == teleport
    assert "teleport 0.00, dedup 0.26" in why
    assert predicted_one_way(EIGHT_RANKS, 8, 2, LinkSpeeds()) == (teleport, 1e-9)


def test_a_price_needs_a_legal_name():
    with pytest.raises(Exception, match='no dispatcher "nobody"'):
        attach_price("nobody", teleport_seconds)


def test_an_extension_brings_its_price_and_its_builder():
    extension = Extension("dispatcher", "wormhole", "tokens take a short cut", build_wormhole, teleport_seconds)
    register_extension(extension)
    try:
        assert cheapest_dispatcher(EIGHT_RANKS, 8, 2)[0] == "wormhole"
        assert find_builder("wormhole") is build_wormhole
    finally:
        DISPATCHER_NAMES.remove("wormhole")
        EXTENSIONS.pop(("dispatcher", "wormhole"))
    assert cheapest_dispatcher(EIGHT_RANKS, 8, 2)[0] == "dedup"

"""Copies of a weight hold until the weight moves, however it is moved."""

from __future__ import annotations

import pytest
import torch

from moefold.layout.weight_copies import (
    CopyUses,
    cached_copy,
    copies_of,
    copy_to_rewrite,
    count_change,
    noting_copies,
    store_copy,
    take_rewritten,
)


def test_a_copy_is_made_once_for_each_format_until_torch_or_the_trainer_counts_a_change():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    flat = weight.data.view(-1)  # as an optimizer has it
    made: list[str] = []

    def copy(format: str) -> float:
        def make(w: torch.Tensor) -> float:
            made.append(format)
            return w.sum().item()

        return cached_copy(weight.flatten(), format, make)

    assert [copy("a"), copy("b"), copy("a")] == [12, 12, 12]
    assert made == ["a", "b"]
    with torch.no_grad():
        weight.zero_()
    assert copy("a") == 0
    flat.fill_(2)
    assert copy("a") == 0, "nobody has told"
    count_change([weight])
    assert [copy("a"), copy("b")] == [24, 24]
    assert made == ["a", "b", "a", "a", "b"]


def test_a_view_and_its_parameter_share_their_copies_and_a_weight_without_copies_needs_no_count():
    weight, other = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(2))
    assert copies_of(weight.flatten()) is copies_of(weight)
    count_change([other])
    assert not hasattr(other, "copies")


def test_a_copy_that_is_rewritten_goes_on_holding_and_others_are_made_anew():
    weight = torch.nn.Parameter(torch.ones(4))
    sums = {format: cached_copy(weight, format, lambda w: [w.sum().item()]) for format in ("a", "b")}
    found = copy_to_rewrite(weight, "a".__eq__)
    assert found is not None
    assert found == ("a", sums["a"])
    weight.data.fill_(2)
    found[1][0] = 8.0
    count_change([weight])
    assert cached_copy(weight, "a", lambda w: []) is sums["a"]
    assert cached_copy(weight, "b", lambda w: [w.sum().item()]) == [8.0]
    count_change([weight])
    assert copy_to_rewrite(weight, "a".__eq__) is None, "a copy of earlier values"
    assert cached_copy(weight, "a", lambda w: []) == []


def test_a_stored_copy_is_all_there_is_of_a_weight():
    weight = torch.nn.Parameter(torch.ones(4))
    store_copy(weight, "a", "bytes")
    count_change([weight])
    assert cached_copy(weight.flatten(), "a", lambda w: "made") == "bytes"
    with pytest.raises(AssertionError, match="a weight stored as a has no copy as b"):
        cached_copy(weight, "b", lambda w: "made")
    assert not take_rewritten(weight)
    assert copy_to_rewrite(weight, "a".__eq__) == ("a", "bytes")
    assert take_rewritten(weight)
    assert not take_rewritten(weight)


def test_copies_that_work_asks_for_can_be_renewed_in_their_places():
    weight = torch.nn.Parameter(torch.ones(4))
    uses: CopyUses = {}
    with noting_copies(uses):
        copy = cached_copy(weight, "double", double)
    cached_copy(weight, "asked for outside", double)
    (use,) = uses.values()
    use.hold_in_place()
    weight.data.fill_(3)
    count_change([weight])
    use.renew()
    assert copy.tolist() == [6.0] * 4
    assert cached_copy(weight, "double", double) is copy


def double(weight: torch.Tensor) -> torch.Tensor:
    return 2 * weight.detach()

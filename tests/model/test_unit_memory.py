"""Memory of units: any two lie in one buffer, views stay views, and bytes are written when nobody reads them."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from moefold.model.unit_memory import (
    AllocatedMemory,
    UnitBuffers,
    UnitMemory,
    aligned,
    bytes_of_unit,
    can_give_memory,
    make_unit_memory,
)

SIZES = {  # elements of each tensor
    "embedding": (700,),
    "layer 0": (64, 65),
    "layer 1": (64, 300),
    "head": (700, 3),
}
needs_swaps = pytest.mark.skipif(not can_give_memory(), reason="torch 2.11 has memory of the allocator's")


def unit_tensors() -> dict[str, list[Tensor]]:
    units = {unit: [torch.empty(size) for size in sizes] for unit, sizes in SIZES.items()}
    for tensors in units.values():
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
    return units


def make_memory(units: dict[str, list[Tensor]]) -> UnitMemory:
    return make_unit_memory(map(bytes_of_unit, units.values()))


@needs_swaps
def test_any_two_units_lie_in_one_buffer_of_the_two_largest():
    units = unit_tensors()
    memory = make_memory(units)
    assert isinstance(memory, UnitBuffers)
    largest = 2 * aligned(700 * 4) + aligned(3 * 4)
    addresses: dict[str, set[int]] = {}
    for first, second, third in permutations(units, 3):  # the first leaves before the third comes
        for unit in (first, second):
            memory.lend(unit, units[unit])
        fill_and_compare(units, first, second)
        memory.take_back(first, units[first], ())
        memory.lend(third, units[third])
        fill_and_compare(units, second, third)
        for unit in (second, third):
            address = units[unit][0].data_ptr()
            addresses.setdefault(unit, set()).add(address)
            assert address % 256 == memory.ends[0].buffer.data_ptr() % 256
            memory.take_back(unit, units[unit], ())
    assert memory.nbytes == largest
    assert all(len(each) == 2 for each in addresses.values())


def fill_and_compare(units: dict[str, list[Tensor]], *here: str) -> None:
    """Fill units with numbers of their own: none overwrites another."""
    tensors = [tensor for unit in here for tensor in units[unit]]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number).all()


@needs_swaps
def test_a_further_unit_has_a_further_buffer_which_stays():
    units = unit_tensors()
    memory = make_memory(units)
    assert isinstance(memory, UnitBuffers)
    for _ in range(2):
        for unit, tensors in units.items():
            memory.lend(unit, tensors)
        fill_and_compare(units, *units)
        assert memory.nbytes == 2 * memory.size
        for unit, tensors in units.items():
            memory.take_back(unit, tensors, ())


@pytest.mark.parametrize("kind", ["buffers", "allocated"])
def test_a_view_that_autograd_has_saved_is_right_when_its_unit_is_here_again(kind: str):
    units = unit_tensors()
    memory = make_memory(units) if kind == "buffers" else AllocatedMemory()
    weight, _ = units["layer 0"]
    memory.lend("layer 0", units["layer 0"])
    weight.fill_(3.0)
    x = torch.ones(2, 8, requires_grad=True)
    y = x @ weight.view(8, 8).T
    memory.take_back("layer 0", units["layer 0"], ())
    assert weight.untyped_storage().nbytes() == 0
    memory.lend("layer 1", units["layer 1"])  # where the other was
    units["layer 1"][0].fill_(5.0)
    memory.lend("layer 0", units["layer 0"])
    weight.data.fill_(3.0)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.eq(24.0).all()


@needs_swaps
def test_who_writes_waits_for_the_last_readers_of_both_ends():
    """A unit may reach over bytes that one of the other end had: their sizes differ."""
    units = unit_tensors()
    memory = make_memory(units)
    assert memory.outlives_units
    assert list(memory.lend("embedding", units["embedding"])) == []
    assert list(memory.lend("layer 0", units["layer 0"])) == []
    memory.take_back("embedding", units["embedding"], ["embedding is read"])
    assert memory.lend("layer 1", units["layer 1"]) == ["embedding is read"]
    memory.take_back("layer 0", units["layer 0"], ["layer 0 is read"])
    assert memory.lend("head", units["head"]) == ["embedding is read", "layer 0 is read"]
    memory.take_back("layer 1", units["layer 1"], ["layer 1 is read"])
    assert memory.lend("embedding", units["embedding"]) == ["layer 1 is read", "layer 0 is read"]

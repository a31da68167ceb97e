"""The tail of an exchange: what the last program of a kernel needs to signal to all ranks and to wait for them, so that
an exchange is no launch of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class ExchangeTail:
    """`addresses`: of the words of all ranks, on the device. `fault_2`: memory of the host, for a rank that is lost.
    `finished`: programs that have ended, zero between kernels. `lost`: a word that is not zero once a rank is lost.
    `me`: this rank. `patience`: seconds; without a device's clock, looks. `is_given`: a kernel has given the signals of
    this exchange."""

    addresses: Tensor
    fault_2: Tensor
    finished: Tensor
    lost: Tensor
    me: int
    patience: float
    is_given: bool = False

"""The sizes of every exchange of a layer, on the host: counted on the device, gathered, and read by one wait.

Every rank counts its choices, and its tokens, for each rank and each node of ep. From the table of all ranks each rank
derives the sizes of all its hops, and how many choices arrive: no hop waits for the device again.

T tokens, K choices of a token, n ranks of ep, m nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather_no_grad
from moefold.dispatch.expert_placement import ExpertPlacement
from moefold.layout.axes import World

Table = list[list[list[int]]]  # by etp rank, by sending rank of ep, by receiving rank or node


class Traffic(NamedTuple):
    """`choices`: chosen experts of each rank; `tokens`: tokens with at least one of them; `nodes`: the same of the
    ranks of a node together. `etp`, `ep`: the indices of this rank. `noted`: whole numbers of this rank that came
    along."""

    choices: Table
    tokens: Table
    nodes: Table
    etp: int
    ep: int
    noted: list[int]

    def choices_arriving(self) -> int:
        """Choices of experts on this rank, from all ranks, those of other etp ranks included."""
        arriving = sums_of_column(self.choices, self.ep)
        return sum(arriving)


class ExchangeSizes(NamedTuple):
    """Parcels that this rank sends to and receives from each rank of an axis."""

    send: list[int]
    receive: list[int]


class TrafficCounter:
    def __init__(self, experts: ExpertPlacement, world: World):
        self.experts = experts
        self.ep = world.ep
        self.etp = world.etp
        self.ranks_per_node = world.ep_inside.size  # ranks of ep

    def count(self, ids_TK: Tensor, noted: Tensor | None = None) -> Traffic:
        """The traffic of one routing. Waits for the device, once; the numbers in `noted` come with the same wait."""
        counts = self.count_own(ids_TK)
        counted = len(counts)
        if noted is not None:
            counts = torch.cat((counts, noted))
        table = self.gather_table(counts)
        return self.traffic_of(table, counted)

    def count_parts(self, parts: Sequence[Tensor]) -> list[Traffic]:
        """The traffic of each of several routings, by the same wait."""
        counts = list(map(self.count_own, parts))
        counted = len(counts[0])
        together = torch.cat(counts)
        table = self.gather_table(together)
        traffics: list[Traffic] = []
        for number in range(len(parts)):
            begin = number * counted
            end = begin + counted
            of_part = columns_of(table, begin, end)
            traffic = self.traffic_of(of_part, counted)
            traffics.append(traffic)
        return traffics

    def gather_table(self, counts: Tensor) -> Table:
        of_ep = all_gather_no_grad(counts[None], self.ep)
        of_all = all_gather_no_grad(of_ep[None], self.etp)
        return of_all.tolist()

    def traffic_of(self, table: Table, counted: int) -> Traffic:
        """The traffic by a table whose rows begin with the columns of `count_own`."""
        ranks = self.ep.size
        return Traffic(
            choices=columns_of(table, 0, ranks),
            tokens=columns_of(table, ranks, 2 * ranks),
            nodes=columns_of(table, 2 * ranks, counted),
            etp=self.etp.index,
            ep=self.ep.index,
            noted=table[self.etp.index][self.ep.index][counted:],
        )

    def count_own(self, ids_TK: Tensor) -> Tensor:
        """Choices and tokens of this rank for each rank, and tokens for each node."""
        ranks = self.ep.size
        rank_TK = self.experts.rank_of(ids_TK)
        rank_TK = torch.where(ids_TK >= 0, rank_TK, ranks)  # column `ranks` takes missing choices
        rank = rank_TK.flatten()
        one = torch.ones_like(rank)
        choices = rank.new_zeros(ranks + 1)
        choices.scatter_add_(0, rank, one)
        choices_n = choices[:ranks]
        tokens = len(ids_TK)
        goes = rank.new_zeros(tokens, ranks + 1, dtype=torch.bool)
        goes.scatter_(1, rank_TK, True)
        goes_Tn = goes[:, :ranks]
        by_node = goes_Tn.unflatten(1, (-1, self.ranks_per_node))
        goes_Tm = by_node.any(-1)
        tokens_n = goes_Tn.sum(0)
        tokens_m = goes_Tm.sum(0)
        return torch.cat((choices_n, tokens_n, tokens_m))


def sums_of_column(tables: Table, column: int) -> list[int]:
    """For each table, the sum of one column."""
    sums: list[int] = []
    for rows in tables:
        entries = [row[column] for row in rows]
        sums.append(sum(entries))
    return sums


def columns_of(table: Table, begin: int, end: int) -> Table:
    columns = slice(begin, end)
    cut: Table = []
    for senders in table:
        rows = [row[columns] for row in senders]
        cut.append(rows)
    return cut


def per_choice_sizes(traffic: Traffic) -> ExchangeSizes:
    """A parcel for each choice, over ep."""
    return exchange_over_ep(traffic, traffic.choices)


def per_rank_sizes(traffic: Traffic) -> ExchangeSizes:
    """A parcel for each rank of a token, over ep."""
    return exchange_over_ep(traffic, traffic.tokens)


def exchange_over_ep(traffic: Traffic, table: Table) -> ExchangeSizes:
    mine = table[traffic.etp]
    send = mine[traffic.ep]
    receive = [row[traffic.ep] for row in mine]
    return ExchangeSizes(send, receive)


class NodeSizes(NamedTuple):
    """Sizes of the two hops of the hierarchical dispatcher: a token goes to the rank at the same place of each of its
    nodes, and from there to its ranks of that node."""

    ranks_per_node: int

    def between_nodes(self, traffic: Traffic) -> ExchangeSizes:
        table = traffic.nodes[traffic.etp]
        size = self.ranks_per_node
        node, place = divmod(traffic.ep, size)
        same_place = table[place::size]
        send = table[traffic.ep]
        receive = [row[node] for row in same_place]
        return ExchangeSizes(send, receive)

    def within_node(self, traffic: Traffic) -> ExchangeSizes:
        """Through this rank go the tokens of the ranks at its place of every node."""
        table = traffic.tokens[traffic.etp]
        size = self.ranks_per_node
        node, place = divmod(traffic.ep, size)
        first = node * size
        of_node = slice(first, first + size)
        same_place = table[place::size]
        here = [row[of_node] for row in same_place]
        columns = zip(*here, strict=True)
        send = list(map(sum, columns))
        by_place = [table[other::size] for other in range(size)]
        receive = sums_of_column(by_place, traffic.ep)
        return ExchangeSizes(send, receive)


def for_everyone_sizes(traffic: Traffic, arrivals: Table) -> ExchangeSizes:
    """All that arrived on this rank goes to every etp rank. `arrivals`: the table that the hops over ep followed."""
    arrived = sums_of_column(arrivals, traffic.ep)
    mine = arrived[traffic.etp]
    send = [mine for _ in arrived]
    return ExchangeSizes(send, arrived)


def choices_for_everyone(traffic: Traffic) -> ExchangeSizes:
    return for_everyone_sizes(traffic, traffic.choices)


def tokens_for_everyone(traffic: Traffic) -> ExchangeSizes:
    return for_everyone_sizes(traffic, traffic.tokens)

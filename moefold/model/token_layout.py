"""Which tokens of a microbatch this rank holds.

B sequences of S positions are cut twice. Context parallelism cuts every sequence into 2 cp chunks and gives rank r the
chunks r and 2 cp - 1 - r (zig-zag): early tokens attend to little and late ones to much, so each rank gets both.
Sequence parallelism then cuts the rank's tokens, joined over its sequences, evenly over tp.

    S = 8, cp 2:    0 1 | 2 3 | 4 5 | 6 7         cp rank 0: 0 1 6 7        cp rank 1: 2 3 4 5

C tokens of a cp rank (B x S / cp), T tokens of this rank (C / tp).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather_no_grad
from moefold.kernels.routing.router_spec import TokenSpan
from moefold.layout.axes import Axis, World
from moefold.layout.past_keys import PastKeys

ALONE = Axis("cp")  # one rank, which has all positions of its sequences


@dataclass(frozen=True)
class TokenShard:
    sequences: int
    length: int
    cp: Axis
    tp: Axis
    device: torch.device
    first: int | Tensor = 0  # the number of the first sequence in the run's order, the same on any layout
    begins_BS: Tensor | None = None  # where the document of each position begins, if tokens see no other
    filled_B: Tensor | None = None  # the tokens of each packed sequence before its padding; None: nothing is packed
    past: PastKeys | None = None  # of earlier positions, while text is generated
    own_numbers_BS: Tensor | None = None  # of tokens in the run, if not those of whole sequences behind the first
    before_swap: TokenShard | None = None  # positions of this rank, where it now has a share of the heads of all
    head_axis: Axis = ALONE  # the ranks that share the heads which this rank would have alone
    span: TokenSpan = field(init=False)  # which tokens of its cp rank's sequences this rank has
    is_packed: bool = field(init=False)

    def __post_init__(self):
        length = self.length // self.cp.size
        tokens = self.sequences * length // self.tp.size
        first = self.tp.index * tokens
        span = TokenSpan(self.sequences, length, first)
        object.__setattr__(self, "span", span)
        is_packed = self.filled_B is not None
        object.__setattr__(self, "is_packed", is_packed)

    @property
    def local_positions(self) -> Tensor:
        """The positions of every sequence that this cp rank holds, in the order in which it holds them."""
        cp_rank = self.cp.index
        return self.joined[cp_rank]

    @property
    def joined(self) -> Tensor:
        """(cp, S / cp): the positions that each cp rank holds."""
        ranks = self.cp.size
        return zigzag_positions(self.length, ranks, self.device)

    @property
    def sequence_order(self) -> Tensor:
        """For each position 0..S-1, where it stands when the cp ranks' positions are joined."""
        return order_by_position(self.joined)

    def slice_for_cp_rank(self, x_BS: Tensor) -> Tensor:
        """What belongs to this cp rank's tokens: (C,)."""
        held = self.positions_held(x_BS)
        return held.flatten()

    def positions_held(self, x_BS: Tensor) -> Tensor:
        """What belongs to the positions of this cp rank: (B, S / cp, ...)."""
        if self.cp.size == 1:
            return x_BS
        return x_BS[:, self.local_positions]

    def slice_for_rank(self, x_BS: Tensor) -> Tensor:
        """What belongs to this rank's own tokens: (T, ...), of something known for all tokens: (B, S, ...)."""
        held = self.positions_held(x_BS)
        x_C = held.flatten(0, 1)
        tp = self.tp
        parts = x_C.chunk(tp.size)
        return parts[tp.index]

    def gather_all_tokens(self, x_T: Tensor, over: Axis) -> Tensor:
        """The reverse, without gradients: (B, S, ...) of what each rank has for its tokens; `over` is cp x tp."""
        values = x_T.detach()
        gathered = all_gather_no_grad(values, over)
        (in_order,) = self.in_sequence_order(gathered)
        return in_order

    def in_sequence_order(self, *joined: Tensor) -> list[Tensor]:
        """(B, S, ...) of each of what all cp ranks have for their positions, joined: (cp x C, ...)."""
        ranks = self.cp.size
        shape = (ranks, self.sequences, -1)
        order = self.sequence_order
        in_order: list[Tensor] = []
        for x in joined:
            by_cp_rank = x.unflatten(0, shape)
            by_sequence = by_cp_rank.transpose(0, 1)
            as_held = by_sequence.flatten(1, 2)
            in_order.append(as_held[:, order])
        return in_order

    def in_rank_order(self, x_BS: Tensor) -> Tensor:
        """The reverse: (cp x C, ...) of (B, S, ...)."""
        places = self.joined.flatten()
        as_held = x_BS[:, places]
        shape = (self.cp.size, -1)
        by_sequence = as_held.unflatten(1, shape)
        by_cp_rank = by_sequence.transpose(0, 1)
        return by_cp_rank.flatten(0, 2)

    def swapped_for_heads(self) -> TokenShard:
        """All positions of the cp ranks, of which this rank has its share of the heads."""
        return replace(self, cp=ALONE, before_swap=self, head_axis=self.cp)

    @property
    def token_number_T(self) -> Tensor:
        """For each token of this rank, its number among all tokens of the run, the same on any layout."""
        return self.slice_for_rank(self.number_BS)

    @property
    def number_BS(self) -> Tensor:
        if self.own_numbers_BS is not None:
            return self.own_numbers_BS
        first = self.first * self.length
        return self.place_BS + first

    @property
    def place_BS(self) -> Tensor:
        """The numbers of all positions of the microbatch, sequence after sequence."""
        count = self.sequences * self.length
        numbers = torch.arange(count, device=self.device)
        return numbers.view(self.sequences, -1)

    @property
    def is_padding_T(self) -> Tensor:
        """For each token of this rank, whether it is behind the samples of a packed sequence."""
        return self.slice_for_rank(self.padding_BS)

    @property
    def padding_BS(self) -> Tensor:
        """Of packed sequences, which positions are behind their samples."""
        assert self.filled_B is not None
        position_S = torch.arange(self.length, device=self.device)
        filled_B1 = self.filled_B[:, None]
        return position_S >= filled_B1

    @property
    def sample_place_T(self) -> Tensor:
        """For each token of this rank, where its sample begins among all positions of the microbatch."""
        assert self.begins_BS is not None
        first_B1 = self.place_BS[:, :1]
        return self.slice_for_rank(first_B1 + self.begins_BS)

    @property
    def single_tokens(self) -> TokenSpan:
        """This rank's tokens, each a sequence of its own."""
        count = self.sequences * self.span.length // self.tp.size
        return TokenSpan(count, 1)

    def numbers_of_rows(self, rows: int) -> Tensor:
        """Numbers of this rank's own tokens, or of all tokens of its cp rank, whichever are so many."""
        number_C = self.slice_for_cp_rank(self.number_BS)
        if len(number_C) == rows:
            return number_C
        return self.token_number_T

    @property
    def sequence_index_T(self) -> Tensor:
        """For each token of this rank, which sequence it belongs to."""
        span = self.span
        count = self.sequences * span.length // self.tp.size
        places = torch.arange(count, device=self.device)
        tokens = span.first + places
        return tokens // span.length

    @property
    def position_rank_T(self) -> Tensor:
        """For each token of this rank, its place when all tokens of the sequences stand in order of position, the first
        positions of all sequences first."""
        sequence_T = self.sequence_index_T
        tokens = len(sequence_T)
        first = self.tp.index * tokens
        places = torch.arange(tokens, device=self.device)
        within = first + places
        per_sequence = self.length // self.cp.size
        position_T = self.local_positions[within % per_sequence]
        return position_T * self.sequences + sequence_T


def make_token_shard(
    tokens_BS: Tensor,
    world: World,
    first: int | Tensor = 0,
    begins_BS: Tensor | None = None,
    filled_B: Tensor | None = None,
    past: PastKeys | None = None,
    cp_size: int | None = None,
    numbers_BS: Tensor | None = None,
) -> TokenShard:
    """The part of a microbatch that this rank holds. `cp_size`: the ranks that share its sequences, by default those
    of the grid. `numbers_BS`: of tokens in the run, by default those of whole sequences behind the first."""
    sequences, length = tokens_BS.shape
    cp = world.context(cp_size).cp
    tp = world.axis("tp")
    device = tokens_BS.device
    return TokenShard(sequences, length, cp, tp, device, first, begins_BS, filled_B, past, numbers_BS)


def zigzag_positions(length: int, cp: int, device: torch.device) -> Tensor:
    """(cp, S / cp): the positions each cp rank holds."""
    every = torch.arange(length, device=device)
    if cp == 1:
        return every[None]
    count = 2 * cp
    chunks = every.view(count, -1)
    from_end = chunks.flip(0)
    early = chunks[:cp]
    late = from_end[:cp]
    both = (early, late)
    return torch.cat(both, dim=1)


def order_by_position(positions: Tensor) -> Tensor:
    """For each of these positions, from the lowest on, where it stands when all of them are joined."""
    joined = positions.flatten()
    return joined.argsort()

"""The plan of dynamic context parallelism: which ranks share which samples of a global batch. Torch-free.

    rank         0     1     2     3     4     5     6     7
    microbatch 0 [ long sample, cp 4   ] [ cp 2   ] [s s] [s]
    microbatch 1 [ longer sample, cp 8                      ]

The dp x cp ranks of a step are cut anew for every microbatch, into aligned groups of 1, 2, 4, ... ranks. A sample goes
to a group of the least size that fits: its tokens within the limit of a rank, and its seconds within a quota, where
that shortens the step. Microbatches are filled from the costliest sample on, so that ranks which wait for each other
have about the same work; the quota follows from the number of microbatches, which is searched.

The plan depends on lengths, limit, ranks and prices alone: every rank makes the same one, also after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, inf
from typing import NamedTuple, Protocol

from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.layout.fold import powers_of_two_in

COUNTS = (1.0, 1.25, 1.5, 2.0, 3.0)  # of microbatches, over the fewest, that are tried
KNEE = 1.01  # fewer microbatches are taken where they cost no more than this, over the least
QUOTA_FACTORS = (inf, 4.0, 2.0)  # of even seconds, above which a sample gets a larger group


class SampleSeconds(NamedTuple):
    """Seconds of a sample on each rank of a group: of its tokens, of attention between them, and of sending keys and
    values, which attention hides."""

    tokens: float
    attention: float
    sending: float


class ContextPrice(Protocol):
    @property
    def fixed(self) -> float:
        """Seconds of a microbatch without tokens."""
        ...

    def of_sample(self, length: int, size: int) -> SampleSeconds: ...


class ContextShape(NamedTuple):
    """The dp x cp ranks of a step, the tokens of a rank in a microbatch, and the stages of the pipeline."""

    ranks: int
    limit: int
    stages: int = 1

    @property
    def sizes(self) -> list[int]:
        return powers_of_two_in(self.ranks)


def tokens_of_rank(config: Config) -> int:
    """Tokens of a rank in a microbatch: as many as with fixed sizes."""
    return config.train.micro_batch * config.data.seq_len // config.parallel.cp


def context_shape(config: Config, ranks: int) -> ContextShape:
    """`ranks`: dp x cp."""
    return ContextShape(ranks, tokens_of_rank(config), config.parallel.pp)


class ContextGroup(NamedTuple):
    """Neighbouring ranks that share samples, by their numbers in the batch; none where nothing was left."""

    first: int
    size: int
    samples: tuple[int, ...] = ()


class ContextMicrobatch(NamedTuple):
    """Groups of all ranks, in their order, and the seconds of the slowest."""

    groups: tuple[ContextGroup, ...]
    seconds: float


class ContextPlan(NamedTuple):
    microbatches: tuple[ContextMicrobatch, ...]
    seconds: float


class SizedSample(NamedTuple):
    """A sample by its number in the batch, the size of its group, and its seconds on every rank of it."""

    number: int
    length: int
    size: int
    seconds: SampleSeconds
    alone: float


class OpenGroup:
    """A group of a microbatch that is being filled."""

    def __init__(self, first: int, size: int, price: ContextPrice):
        self.first = first
        self.size = size
        self.fixed = price.fixed
        self.samples: list[int] = []
        self.length = 0
        self.sums = SampleSeconds(0.0, 0.0, 0.0)
        self.seconds = price.fixed

    def seconds_with(self, sample: SizedSample) -> float:
        sums = add_seconds(self.sums, sample.seconds)
        return group_seconds(sums, self.fixed)

    def add(self, sample: SizedSample) -> None:
        self.samples.append(sample.number)
        self.length += sample.length
        self.sums = add_seconds(self.sums, sample.seconds)
        self.seconds = group_seconds(self.sums, self.fixed)

    def close(self) -> ContextGroup:
        samples = sorted(self.samples)
        return ContextGroup(self.first, self.size, tuple(samples))


def add_seconds(one: SampleSeconds, other: SampleSeconds) -> SampleSeconds:
    tokens = one.tokens + other.tokens
    attention = one.attention + other.attention
    sending = one.sending + other.sending
    return SampleSeconds(tokens, attention, sending)


def group_seconds(sums: SampleSeconds, fixed: float) -> float:
    """Seconds of each rank of a group."""
    shown = max(sums.attention, sums.sending)
    return fixed + sums.tokens + shown


class SizeClass:
    """The groups of one size in a microbatch that is being filled. `room`: tokens that one of them can still take, at
    most; `least`: seconds of the least loaded."""

    def __init__(self):
        self.groups: list[OpenGroup] = []
        self.room = 0
        self.least = inf

    def note_change(self, limit: int) -> None:
        longest = min(group.length - limit * group.size for group in self.groups)
        self.room = -longest
        self.least = min(group.seconds for group in self.groups)


class OpenMicrobatch:
    """A microbatch that is being filled up to a level of seconds. Ranks are taken by aligned blocks."""

    def __init__(self, shape: ContextShape, price: ContextPrice, level: float):
        self.limit = shape.limit
        self.price = price
        self.level = level
        sizes = shape.sizes
        firsts = range(0, shape.ranks, sizes[-1])
        self.free: dict[int, list[int]] = {size: [] for size in sizes}  # first ranks of blocks
        self.free[sizes[-1]] = list(firsts)
        self.largest = sizes[-1]
        self.classes = {size: SizeClass() for size in sizes}

    def place(self, sample: SizedSample) -> bool:
        """Put a sample into a group of its own, with others of its size, or into what is left of a larger group.
        Returns whether there was room."""
        if sample.alone > self.level:
            return False
        first = self.take_block(sample.size)
        if first is None:
            return self.place_with_others(sample) or self.fill_larger(sample)
        group = OpenGroup(first, sample.size, self.price)
        of_size = self.classes[sample.size]
        of_size.groups.append(group)
        self.add(sample, group)
        return True

    def add(self, sample: SizedSample, group: OpenGroup) -> None:
        group.add(sample)
        self.classes[group.size].note_change(self.limit)

    def take_block(self, size: int) -> int | None:
        """The first rank of a free block, of the least that are large enough; its rest stays free."""
        block = size
        while not self.free.get(block):
            block *= 2
            if block > self.largest:
                return None
        first = self.free[block].pop(0)
        while block > size:
            block //= 2
            self.free[block].append(first + block)
        return first

    def place_with_others(self, sample: SizedSample) -> bool:
        """Put a sample into the least loaded group of its size that has room for it."""
        of_size = self.classes[sample.size]
        if sample.length > of_size.room or of_size.least + sample.seconds.tokens > self.level:
            return False
        needed = sample.length - self.limit * sample.size
        having_room = [group for group in of_size.groups if group.length + needed <= 0]
        group = min(having_room, key=loading_rank)
        if group.seconds_with(sample) > self.level:
            return False
        self.add(sample, group)
        return True

    def fill_larger(self, sample: SizedSample) -> bool:
        work = sample.seconds.tokens * sample.size
        for size, of_size in self.classes.items():
            is_full = sample.length > of_size.room or of_size.least + work / size > self.level
            if size <= sample.size or is_full:
                continue
            seconds = self.price.of_sample(sample.length, size)
            filler = sample._replace(size=size, seconds=seconds)
            if self.place_with_others(filler):
                return True
        return False

    def close(self) -> ContextMicrobatch:
        found: list[ContextGroup] = []
        seconds = 0.0
        for of_size in self.classes.values():
            for group in of_size.groups:
                found.append(group.close())
                seconds = max(seconds, group.seconds)
        for size, firsts in self.free.items():
            for block in firsts:
                idle = range(block, block + size)
                found += [ContextGroup(rank, 1) for rank in idle]
        found.sort()
        return ContextMicrobatch(tuple(found), seconds)


def loading_rank(group: OpenGroup) -> tuple[float, int]:
    return group.seconds, group.first


def plan_context(lengths: Sequence[int], shape: ContextShape, price: ContextPrice) -> ContextPlan:
    """The plan of least seconds, by a search over the number of microbatches up to the knee, behind which more of them
    only take longer: of plans that take about the same time, the one with the fewest."""
    check_lengths(lengths, shape)
    found: list[ContextPlan] = []
    least = inf
    for even in even_seconds(lengths, shape, price):
        plans = [fill_plan(lengths, shape, price, even, factor) for factor in QUOTA_FACTORS]
        found += plans
        best = min(plan.seconds for plan in plans)
        if best > least:
            break
        least = best
    near = [plan for plan in found if plan.seconds <= KNEE * least]
    return min(near, key=knee_rank)


def fill_plan(
    lengths: Sequence[int],
    shape: ContextShape,
    price: ContextPrice,
    even: float,
    factor: float,
) -> ContextPlan:
    quota = factor * even
    samples = size_samples(lengths, shape, price, quota)
    microbatches = fill_microbatches(samples, shape, price, even)
    return ordered_plan(microbatches, shape)


def knee_rank(plan: ContextPlan) -> tuple[int, float]:
    return len(plan.microbatches), plan.seconds


def check_lengths(lengths: Sequence[int], shape: ContextShape) -> None:
    most = shape.limit * shape.sizes[-1]
    for number, length in enumerate(lengths):
        if not 0 < length <= most:
            raise UserError(
                f"sample {number} of the batch has {length} tokens; expected 1 to {most}, {shape.limit} for each of "
                f"{shape.sizes[-1]} ranks: cut it, or raise the limit of a rank"
            )


def even_seconds(lengths: Sequence[int], shape: ContextShape, price: ContextPrice) -> Iterator[float]:
    """Seconds of a rank in a microbatch, were all work even, for each searched number of microbatches: from the fewest
    that hold all tokens, and at least one for each stage."""
    samples = size_samples(lengths, shape, price, inf)
    work = sum((sample.alone - price.fixed) * sample.size for sample in samples)
    tokens = sum(lengths)
    fewest = ceil(tokens / (shape.ranks * shape.limit))
    fewest = max(1, fewest, shape.stages)
    counts = {ceil(fewest * factor) for factor in COUNTS}
    for count in sorted(counts):
        yield price.fixed + work / (shape.ranks * count)


def size_samples(lengths: Sequence[int], shape: ContextShape, price: ContextPrice, quota: float) -> list[SizedSample]:
    """Every sample with the least size of a group that fits, the costliest first."""
    samples = [size_sample(number, length, shape, price, quota) for number, length in enumerate(lengths)]
    samples.sort(key=filling_rank)
    return samples


def size_sample(number: int, length: int, shape: ContextShape, price: ContextPrice, quota: float) -> SizedSample:
    """A sample whose seconds no size brings below the quota gets the least size of least seconds."""
    found: list[SizedSample] = []
    for size in shape.sizes:
        if length > shape.limit * size:
            continue
        seconds = price.of_sample(length, size)
        alone = group_seconds(seconds, price.fixed)
        sample = SizedSample(number, length, size, seconds, alone)
        if alone <= quota:
            return sample
        found.append(sample)
    return min(found, key=sizing_rank)


def sizing_rank(sample: SizedSample) -> tuple[float, int]:
    return sample.alone, sample.size


def filling_rank(sample: SizedSample) -> tuple[float, int, int]:
    return -sample.alone, -sample.size, sample.number


def fill_microbatches(
    samples: list[SizedSample],
    shape: ContextShape,
    price: ContextPrice,
    even: float,
) -> list[ContextMicrobatch]:
    """Microbatches until no sample is left. The level of each is that of the costliest sample left, and at least such
    that as many more microbatches as are needed anyway have the same."""
    filled: list[ContextMicrobatch] = []
    while samples:
        level = filling_level(samples, shape, price, even)
        microbatch = OpenMicrobatch(shape, price, level)
        samples = [sample for sample in samples if not microbatch.place(sample)]
        filled.append(microbatch.close())
    return filled


def filling_level(samples: list[SizedSample], shape: ContextShape, price: ContextPrice, even: float) -> float:
    work = 0.0
    tokens = 0
    for sample in samples:
        work += (sample.alone - price.fixed) * sample.size
        tokens += sample.length
    by_seconds = work / (shape.ranks * (even - price.fixed))
    by_tokens = tokens / (shape.ranks * shape.limit)
    needed = max(by_seconds, by_tokens)
    share = work / (shape.ranks * ceil(needed))
    costliest = samples[0].alone
    return max(costliest, price.fixed + share)


def ordered_plan(microbatches: list[ContextMicrobatch], shape: ContextShape) -> ContextPlan:
    """The microbatches, small ones first and last: those with which a pipeline fills and drains. A rank waits in every
    microbatch for the slowest, and the pipeline's other stages for the longest microbatch."""
    ordered = small_large_small(microbatches)
    seconds = [microbatch.seconds for microbatch in ordered]
    passing = (shape.stages - 1) * max(seconds)
    return ContextPlan(tuple(ordered), sum(seconds) + passing)


def small_large_small(microbatches: list[ContextMicrobatch]) -> list[ContextMicrobatch]:
    ascending = sorted(microbatches, key=small_rank)
    rising = ascending[::2]
    falling = ascending[1::2]
    return rising + falling[::-1]


def small_rank(microbatch: ContextMicrobatch) -> tuple[float, tuple[ContextGroup, ...]]:
    return microbatch.seconds, microbatch.groups

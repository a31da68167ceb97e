"""Seconds of one microbatch in each step of the model on one rank: forward, data gradient, weight gradient.

    products, attention   GEMMs and attention on a smooth roofline, with FLOPs and bytes of `plan/layer/layer_costs.py`
    passes                pointwise kernels, by memory bandwidth
    host                  exposed latency of launches and synchronisation; none where a CUDA graph replays the step
    joined                collectives of tensor and context parallelism, which delay the next kernel
    memory                repeated forwards of recompute, and exposed copies to and from the host
    travel                dispatch and combine between ranks: the comm lane, which paired microbatches overlap

The time of a piece of a layout (E, t, m, L) is the sum over its steps, that of a stage the sum over its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from operator import add
from typing import NamedTuple

from moefold.anatomy.captured_steps import CAPTURED_READS
from moefold.anatomy.row_chunks import CHUNKED_STEPS
from moefold.config.memory_regions import MOE_STEPS
from moefold.plan.layer.layer_costs import Gemm, StepCount
from moefold.plan.layer.moefold_layers import swaps_heads, writes_score_gradients
from moefold.plan.layer.pointwise import (
    LOW_PRECISION_GEMMS,
    activation_elements,
    attention_elements,
    count_launches,
    gradient_quantization_bytes,
    input_quantization_bytes,
    pointwise_bytes,
)
from moefold.plan.layer.quantise_passes import backward_quantise_bytes, forward_quantise_bytes
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.length_histogram import mean_over_tokens
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.efficiency_fit import EXPERT_TILE_ROWS, attention_efficiency
from moefold.plan.machine.fp8_rates import BF16_TFLOPS, MEASURED_RATES, PassName
from moefold.plan.machine.gpu import Gpu, roofline_seconds
from moefold.plan.memory.base_bytes import weight_bytes
from moefold.plan.memory.host_weights import bytes_by_layer
from moefold.plan.memory.peak_memory import STATE_ELEMENT_BYTES, RunSetting
from moefold.plan.memory.rank_stages import StagePieces
from moefold.plan.time.chunk_overlap import ChunkedPass
from moefold.plan.time.update_seconds import trained_part

BACKWARD_LAUNCH_RATIO = 1.5  # launches of a backward, over those of a forward; autograd launches from C++
BACKWARD_ATTENTION_RATIO = 2.5  # FLOPs of attention's backward, over those of its forward: five GEMMs instead of two
ADDED_GRADIENT_BYTES = 8  # a weight gradient is added to an fp32 sum, which is read and written
HOPPER_BACKWARD_SHARE = 0.86  # of the peak, for moefold's attention backward; for others see `plan/machine/gpu.py`
HOPPER_BACKWARD_HALF = 200.0  # both by `moefold bench attention`
UP_PROJECTIONS = ("query", "key", "value")
FIRST_PRODUCTS = ("gate_up", "up")  # of experts
NORMED_STEPS = ("attend", "route", "mlp")


class OpSeconds(NamedTuple):
    """Seconds of one op of one microbatch. `ideal`: its FLOPs at the peak, contained in `products` and `attention`."""

    ideal: float = 0.0
    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    host: float = 0.0
    joined: float = 0.0
    memory: float = 0.0
    travel: float = 0.0

    @property
    def device(self) -> float:
        return self.products + self.attention + self.passes

    @property
    def compute(self) -> float:
        """Seconds of the compute lane."""
        return self.device + self.host + self.joined + self.memory

    @property
    def total(self) -> float:
        return self.compute + self.travel


class PassSeconds(NamedTuple):
    """Seconds of the three ops of one microbatch in a step, a piece or a stage."""

    F: OpSeconds = OpSeconds()
    D: OpSeconds = OpSeconds()
    W: OpSeconds = OpSeconds()


class ForwardOfStep(NamedTuple):
    """A step on a rank, and the seconds of its forward."""

    step: StepCount
    shapes: RankShapes
    seconds: OpSeconds


class GemmRate(NamedTuple):
    """FLOP/s of a large GEMM in its precision, and bytes of an element that it reads."""

    flops: float
    element: float


def add_op_seconds(first: OpSeconds, second: OpSeconds) -> OpSeconds:
    sums = map(add, first, second)
    return OpSeconds(*sums)


def sum_pass_seconds(passes: Iterable[PassSeconds]) -> PassSeconds:
    total = PassSeconds()
    for seconds in passes:
        sums = map(add_op_seconds, total, seconds)
        total = PassSeconds(*sums)
    return total


class StepClock:
    """Times of the steps, pieces and stages of a rank on one GPU. Pieces and stages are cached."""

    def __init__(self, setting: RunSetting, gpu: Gpu):
        self.setting = setting
        self.choices = setting.choices
        self.gpu = gpu
        self.kernels = gpu.kernels
        self.piece_seconds: dict[tuple[str, int], PassSeconds] = {}
        self.stage_seconds: dict[StagePieces, PassSeconds] = {}

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster(self.gpu, self.setting.world)

    @cached_property
    def pointwise_bandwidth(self) -> float:
        return self.cluster.pointwise_bandwidth

    @cached_property
    def quantise_bandwidth(self) -> float:
        return self.cluster.quantise_bandwidth

    @cached_property
    def one_way_seconds(self) -> float:
        """Seconds of one dispatch or one combine, of one row chunk."""
        config = self.setting.config
        return self.cluster.dispatch_seconds(config, self.choices)

    def time_stage(self, pieces: StagePieces) -> PassSeconds:
        if pieces not in self.stage_seconds:
            seconds: list[PassSeconds] = []
            for piece, layer in pieces:
                of_piece = self.time_piece(piece, layer)
                seconds.append(of_piece)
            self.stage_seconds[pieces] = sum_pass_seconds(seconds)
        return self.stage_seconds[pieces]

    def time_piece(self, piece: str, layer: int) -> PassSeconds:
        key = (piece, layer)
        if key not in self.piece_seconds:
            steps = self.time_steps(piece, layer)
            seconds = sum_pass_seconds(steps.values())
            seconds = self.add_fsdp_exchange(piece, layer, seconds)
            seconds = self.add_expert_fetch(piece, layer, seconds)
            self.piece_seconds[key] = seconds
        return self.piece_seconds[key]

    def time_steps(self, piece: str, layer: int) -> dict[str, PassSeconds]:
        """Times of a piece's steps, by name."""
        shapes = self.setting.layer_shapes(layer)
        count = self.setting.count_piece(piece, layer)
        seconds: dict[str, PassSeconds] = {}
        for step in count.steps:
            chunked = self.in_row_chunks(step)
            seconds[step.name] = self.time_step(chunked, shapes)
        return self.hide_row_chunks(seconds)

    def in_row_chunks(self, step: StepCount) -> StepCount:
        """The step with the products of its row chunks, each of which has fewer rows of every expert."""
        chunks = self.setting.parallel.row_chunks
        if chunks == 1 or step.name != "experts":
            return step
        gemms: list[Gemm] = []
        for gemm in step.gemms:
            rows = gemm.rows / chunks
            times = gemm.times * chunks
            of_chunks = replace(gemm, rows=rows, times=times)
            gemms.append(of_chunks)
        return replace(step, gemms=tuple(gemms))

    def hide_row_chunks(self, steps: dict[str, PassSeconds]) -> dict[str, PassSeconds]:
        """The steps of a layer, with the exchanges of row chunks as far as the layer's own compute does not hide them.
        Where passes are paired, all of the exchanges are left to be hidden behind the other pass."""
        chunks = self.setting.parallel.row_chunks
        if chunks == 1 or self.is_paired or "experts" not in steps:
            return steps
        F, D, W = steps["experts"]
        shared = steps.get("shared", PassSeconds())
        forward = self.time_chunks(F.compute, shared.F.compute)
        # Weight gradients are computed with the others, unless they are deferred.
        experts = D.compute + W.compute
        beside = shared.D.compute + shared.W.compute
        backward = self.time_chunks(experts, beside)
        hidden = steps.copy()
        for name in ("dispatch", "combine"):
            passes = steps[name]
            sent_again = passes.D.travel - self.exchange_seconds
            out = forward.exposed / 2
            back = backward.exposed / 2 + sent_again
            hidden[name] = with_travel(passes, out, back)
        return hidden

    def time_chunks(self, experts: float, beside: float) -> ChunkedPass:
        chunks = self.setting.parallel.row_chunks
        return ChunkedPass(self.one_way_seconds, experts, beside, chunks)

    @property
    def is_paired(self) -> bool:
        pipeline = self.setting.pipeline
        return pipeline.pair or pipeline.schedule == "dualpipe_v"

    @cached_property
    def exchange_seconds(self) -> float:
        """Seconds of one way of all tokens of a microbatch: of every row chunk."""
        return self.setting.parallel.row_chunks * self.one_way_seconds

    def time_step(self, step: StepCount, s: RankShapes) -> PassSeconds:
        forward = self.time_forward(step, s)
        data_gradient, weight_gradient = self.time_backward(step, s)
        timed = ForwardOfStep(step, s, forward)
        restoring = self.restore_seconds(timed)
        forward = self.add_largest_logits(timed)
        travel = data_gradient.travel + self.sent_again_seconds(step, s)
        data_gradient = data_gradient._replace(memory=restoring, travel=travel)
        return PassSeconds(forward, data_gradient, weight_gradient)

    def time_forward(self, step: StepCount, s: RankShapes) -> OpSeconds:
        name = step.name
        gemms = step.gemms
        launches, looped = self.count_launches(step, s)
        products = self.forward_gemm_seconds(gemms, s)
        share = self.kernels.attention_forward
        half = self.kernels.forward_half
        attention = self.attention_seconds(step, s, step.attention, share, half)
        quantized = input_quantization_bytes(gemms, s)
        moved = pointwise_bytes(name, s) + quantized
        in_fp8 = forward_quantise_bytes(name, gemms, s)
        moving = self.moving_seconds(moved, in_fp8)
        starting = launches * self.kernels.start
        passes = moving + starting
        device = products + attention + passes
        launching = self.launch_wait_seconds(step, device, launches + looped)
        return OpSeconds(
            ideal=self.ideal_seconds(step),
            products=products,
            attention=attention,
            passes=passes,
            host=launching + self.sync_seconds(step),
            joined=self.collective_seconds(step, "forward", attention),
            travel=self.travel_seconds(step),
        )

    def add_largest_logits(self, timed: ForwardOfStep) -> OpSeconds:
        """A forward with the products of queries and keys once more, by the rate of attention's forward. Recompute does
        not repeat them."""
        step, s, forward = timed
        flops = self.logit_flops(step, s)
        share = self.kernels.attention_forward
        half = self.kernels.forward_half
        seconds = self.attention_seconds(step, s, flops, share, half)
        attention = forward.attention + seconds
        return forward._replace(attention=attention)

    def logit_flops(self, step: StepCount, s: RankShapes) -> float:
        """FLOPs of the op `largest_logit`. Attention's are those of queries with keys, and of scores with values."""
        is_watched = self.setting.optim.qk_clip > 0 and self.choices.stack == "moefold"
        if not is_watched:
            return 0.0
        return step.attention * s.Q / (s.Q + s.V)

    def count_launches(self, step: StepCount, s: RankShapes) -> tuple[float, float]:
        """Kernels of a forward, in sequence and in a loop, with those of every row chunk."""
        launches, looped = count_launches(step.name, step.gemms, s)
        if step.name not in CHUNKED_STEPS:
            return launches, looped
        chunks = self.setting.parallel.row_chunks
        return chunks * launches, chunks * looped

    def moving_seconds(self, pointwise: float, quantising: float) -> float:
        """Seconds of the bytes of pointwise and of quantising passes."""
        return pointwise / self.pointwise_bandwidth + quantising / self.quantise_bandwidth

    def time_backward(self, step: StepCount, s: RankShapes) -> tuple[OpSeconds, OpSeconds]:
        """Times of data gradient and weight gradient."""
        name = step.name
        gemms = step.gemms
        launches, looped = self.count_launches(step, s)
        products = 0.0
        weights = 0.0
        for gemm in gemms:
            products += self.data_gradient_seconds(gemm, s)
            weights += self.weight_gradient_seconds(gemm, s)
        share, half = self.backward_efficiency(s)
        attention_flops = BACKWARD_ATTENTION_RATIO * step.attention
        attention = self.attention_seconds(step, s, attention_flops, share, half)
        quantized = gradient_quantization_bytes(gemms, s)
        moved = 2 * pointwise_bytes(name, s) + quantized
        in_fp8 = backward_quantise_bytes(name, gemms, s)
        moving = self.moving_seconds(moved, in_fp8)
        starting = BACKWARD_LAUNCH_RATIO * launches * self.kernels.start
        passes = moving + starting
        device = products + attention + passes + weights

        # The ideal time of a backward is twice the forward's; the weights' part is that of the GEMMs.
        ideal = self.ideal_seconds(step)
        gemm_flops = sum(gemm.flops for gemm in gemms)
        all_flops = max(1.0, gemm_flops + step.attention)
        weights_ideal = ideal * gemm_flops / all_flops
        backward_launches = BACKWARD_LAUNCH_RATIO * (launches + looped)
        data_gradient = OpSeconds(
            ideal=2 * ideal - weights_ideal,
            products=products,
            attention=attention,
            passes=passes,
            host=self.launch_wait_seconds(step, device, backward_launches),
            joined=self.collective_seconds(step, "backward", attention),
            travel=self.travel_seconds(step),
        )
        return data_gradient, OpSeconds(ideal=weights_ideal, products=weights)

    def backward_efficiency(self, s: RankShapes) -> tuple[float, float]:
        """Share of the peak that attention's backward reaches, and the length at which it reaches half of that."""
        is_moefold = s.choices.stack == "moefold"
        if is_moefold and writes_score_gradients(s):
            return HOPPER_BACKWARD_SHARE, HOPPER_BACKWARD_HALF
        return self.kernels.attention_backward, self.kernels.backward_half

    def forward_gemm_seconds(self, gemms: Iterable[Gemm], s: RankShapes) -> float:
        seconds = 0.0
        for gemm in gemms:
            inputs = gemm.rows * gemm.k
            weights = gemm.n * gemm.k
            read = inputs + weights
            written = 2 * gemm.rows * gemm.n
            seconds += self.gemm_seconds(gemm, s, "forward", read, written)
        return seconds

    def data_gradient_seconds(self, gemm: Gemm, s: RankShapes) -> float:
        gradients = gemm.rows * gemm.n
        weights = gemm.n * gemm.k
        read = gradients + weights
        written = 2 * gemm.rows * gemm.k
        return self.gemm_seconds(gemm, s, "data", read, written)

    def weight_gradient_seconds(self, gemm: Gemm, s: RankShapes) -> float:
        widths = gemm.n + gemm.k
        read = gemm.rows * widths
        written = ADDED_GRADIENT_BYTES * gemm.n * gemm.k
        return self.gemm_seconds(gemm, s, "weight", read, written)

    def gemm_seconds(self, gemm: Gemm, s: RankShapes, pass_name: PassName, read: float, written: float) -> float:
        """Seconds of `groups` GEMMs; each reads `read` elements of operands and writes `written` bytes."""
        rate, element = self.rate_and_element(gemm, s, pass_name)
        rows = gemm.rows
        # Grouped GEMMs compute whole tiles: on average half a tile of rows per group is padding.
        if gemm.groups > 1:
            rate *= self.kernels.grouped
            rows += EXPERT_TILE_ROWS / 2
        flops = 2 * rows * gemm.n * gemm.k * gemm.groups
        computing = flops / rate
        moved = (read * element + written) * gemm.groups
        moving = moved / self.gpu.hbm
        seconds = roofline_seconds(computing, moving, self.kernels.blend)
        return seconds * gemm.times

    def rate_and_element(self, gemm: Gemm, s: RankShapes, pass_name: PassName) -> GemmRate:
        if gemm.recipe.quantises:
            return self.fp8_rate_and_element(gemm, s, pass_name)
        if gemm.kind not in LOW_PRECISION_GEMMS:
            return self.wide_rate()
        choices = self.choices
        rate = self.gpu.achieved_rate(choices.precision)
        return GemmRate(rate, choices.recipe.linear)

    def wide_rate(self) -> GemmRate:
        rate = self.gpu.achieved_rate("bf16")
        return GemmRate(rate, self.choices.recipe.wide)

    def fp8_rate_and_element(self, gemm: Gemm, s: RankShapes, pass_name: PassName) -> GemmRate:
        """Of a product by a recipe of this trainer: a measured ratio of the bf16 rate, and a byte."""
        recipe = gemm.recipe
        wide = self.wide_rate()
        accumulate = s.portion.precision.accumulate
        sums = recipe.row_sums(accumulate)
        if pass_name == "weight":
            sums = recipe.weight_sums
        if sums == "plain":
            return wide
        measured = MEASURED_RATES[sums]
        if gemm.kind == "grouped" and s.fuses_experts:
            is_first = gemm.name in FIRST_PRODUCTS
            flops = measured.of_expert_product(is_first, pass_name)
        else:
            flops = measured.of_plain_product(pass_name)
        rate = wide.flops * flops / BF16_TFLOPS
        return GemmRate(rate, element=1.0)

    def attention_seconds(self, step: StepCount, s: RankShapes, flops: float, share: float, half: float) -> float:
        """Seconds of attention, of the busiest rank where documents differ in length. With cp, the length is that of
        one chunk of keys, as in a ring."""
        if not flops:
            return 0.0
        chunk = s.S / s.portion.cp
        longest = min(step.spec.window or chunk, chunk)
        width = (s.Q + s.V) / 2

        def slowed(length: int) -> float:
            """Keys that a token of a document sees, each counted as often as it could be seen at the full rate."""
            efficiency = attention_efficiency(min(length, longest), width, half)
            return step.spec.seen(length) / efficiency

        documents = s.choices.documents
        seen = mean_over_tokens(step.spec.seen, documents, s.S)
        slowness = mean_over_tokens(slowed, documents, s.S) / seen
        peak = self.gpu.peak["bf16"]
        return flops * slowness / (peak * share) * self.setting.attention_imbalance

    def ideal_seconds(self, step: StepCount) -> float:
        """Seconds of a forward's FLOPs at the peak of the precision."""
        precision = self.setting.product_precision
        peak = self.gpu.peak_flops(precision)
        return step.flops / peak

    def launch_wait_seconds(self, step: StepCount, device: float, launches: float) -> float:
        """Exposed launch latency in seconds: host and device run in parallel, with imperfect overlap."""
        graphs = self.choices.graphs
        in_graph = graphs == "static" and step.name in CAPTURED_READS
        if in_graph or graphs == "whole":
            return 0.0
        host = launches * self.gpu.host.launch
        return math.hypot(device, host) - device

    def sync_seconds(self, step: StepCount) -> float:
        """Seconds in which the host reads the number of arriving rows from the device: once per dispatch, unless the
        whole layer is one CUDA graph."""
        is_captured = self.choices.graphs == "whole"
        if step.name != "dispatch" or is_captured:
            return 0.0
        if self.one_way_seconds == 0:
            return 0.0
        return self.gpu.host.sync

    def travel_seconds(self, step: StepCount) -> float:
        if step.name in ("dispatch", "combine"):
            return self.exchange_seconds
        return 0.0

    def sent_again_seconds(self, step: StepCount, s: RankShapes) -> float:
        """Seconds of the comm lane in which tokens are dispatched again, ahead of the backward of `combine`."""
        sends_again = step.name == "combine" and "dispatch" in s.choices.recomputed
        return self.exchange_seconds if sends_again else 0.0

    def collective_seconds(self, step: StepCount, pass_name: str, attention: float) -> float:
        """Seconds of exposed collectives of tp and cp. A ring sends keys and values during attention over earlier
        ones."""
        p = self.setting.parallel
        seconds = 0.0
        for traffic in step.sent:
            size = getattr(traffic, pass_name)
            # Collectives over tp are exposed; a ring over cp overlaps with attention.
            if traffic.axis == "tp":
                seconds += self.cluster.ring_seconds(size, 1, p.tp)
            elif traffic.axis.startswith("cp"):
                hidden = attention if traffic.what == "ring" else 0.0
                sending = self.context_seconds(traffic.axis, size)
                seconds += max(0.0, sending - hidden)
        return seconds

    def context_seconds(self, axis: str, size: float) -> float:
        """Seconds of what a rank sends over cp, or over its ranks of a node alone."""
        p = self.setting.parallel
        ranks = p.tp * p.cp
        if axis == "cp inside":
            ranks = min(ranks, self.cluster.domain)
        return self.cluster.neighbour_seconds(size, ranks)

    def restore_seconds(self, forward: ForwardOfStep) -> float:
        """Seconds that recompute, exposed offloading and copies of a stash add to the backward of a step."""
        step, s, seconds = forward
        recomputing = 0.0
        # Regions may overlap: all of them together repeat the forward at most once.
        for region in s.choices.recomputed:
            recompute_seconds = RECOMPUTE_COSTS[region]
            recomputing += recompute_seconds(self, forward)
        recomputing = min(recomputing, seconds.total)
        offloaded = 0.0
        for tensor in step.saved:
            if tensor.fate == "offloaded":
                offloaded += tensor.bytes
        copying = offloaded / self.gpu.host_link
        exposed_copy = max(0.0, copying - seconds.device)
        moved = 4 * step.stashed  # read and written, to the stash and from it
        return recomputing + 2 * exposed_copy + moved / self.pointwise_bandwidth

    def recompute_norm(self, forward: ForwardOfStep) -> float:
        if forward.step.name not in NORMED_STEPS:
            return 0.0
        s = forward.shapes
        moved = 4.0 * s.T * s.D
        return moved / self.pointwise_bandwidth

    def recompute_up(self, forward: ForwardOfStep) -> float:
        """Seconds of the projections from latents to queries, keys and values."""
        step, s, seconds = forward
        if step.name != "attend" or not s.mla:
            return 0.0
        projections: list[Gemm] = []
        for gemm in step.gemms:
            if gemm.name in UP_PROJECTIONS:
                projections.append(gemm)
        products = self.forward_gemm_seconds(projections, s)
        moved = 2.0 * attention_elements(s)
        passes = moved / self.pointwise_bandwidth
        return products + passes + seconds.host / 2

    def recompute_activation(self, forward: ForwardOfStep) -> float:
        if forward.step.name != "experts":
            return 0.0
        moved = 2.0 * activation_elements(forward.shapes)
        return moved / self.pointwise_bandwidth

    def recompute_core(self, forward: ForwardOfStep) -> float:
        return forward.seconds.attention

    def recompute_swap(self, forward: ForwardOfStep) -> float:
        """Seconds of the all-to-all of attention's result, a part of what attention sends over cp."""
        step, s, _ = forward
        if step.name != "attend" or not swaps_heads(s):
            return 0.0
        query_and_key_heads = s.H + s.G * s.kv_copies
        share = s.H * s.V / (query_and_key_heads * (s.Q + s.V))
        swaps = [traffic for traffic in step.sent if traffic.what in ("all_to_all", "heads")]
        return sum(self.context_seconds(traffic.axis, share * traffic.forward) for traffic in swaps)

    def recompute_dispatch(self, forward: ForwardOfStep) -> float:
        """Seconds of arranging rows; those of sending are counted in `sent_again_seconds`, and sizes are known."""
        step, _, seconds = forward
        if step.name != "dispatch":
            return 0.0
        launching = seconds.host - self.sync_seconds(step)
        return seconds.device + launching

    def recompute_out(self, forward: ForwardOfStep) -> float:
        """Zero: backward of the output projection needs only its input, which is saved."""
        return 0.0

    def recompute_layer(self, forward: ForwardOfStep) -> float:
        if forward.step.name in ("embed", "predict"):
            return 0.0
        return forward.seconds.total

    def add_fsdp_exchange(self, piece: str, layer: int, passes: PassSeconds) -> PassSeconds:
        """Times with the exposed collectives of FSDP: weights are gathered before forward and before backward,
        gradients are reduce-scattered after backward, each during the compute of the neighbouring layer."""
        s = self.setting
        if s.choices.sharding != "fsdp":
            return passes
        count = s.count_piece(piece, layer)
        trained = trained_part(s)
        gradient = trained * STATE_ELEMENT_BYTES[s.optim.gradient_reduce]
        cluster = self.cluster
        sizes = weight_bytes(s, piece, layer)
        gather = cluster.exchange_seconds(sizes, s, 1.0)
        scatter = cluster.exchange_seconds(count.parameters, s, gradient)
        F, D, W = passes
        exposed_forward = max(0.0, gather - F.compute)
        exchange = gather + scatter
        exposed_backward = max(0.0, exchange - D.compute - W.compute)
        forward = joined_with(F, exposed_forward)
        data_gradient = joined_with(D, exposed_backward)
        return PassSeconds(forward, data_gradient, W)

    def add_expert_fetch(self, piece: str, layer: int, passes: PassSeconds) -> PassSeconds:
        """Times with the exposed copies of experts from the host, before forward and before backward, each during the
        compute of the neighbouring layer. That a pass finds two layers of the one before it is left out."""
        if piece not in "tm":
            return passes
        fetch = bytes_by_layer(self.setting).get(layer, 0.0) / self.gpu.host_link
        F, D, W = passes
        exposed_forward = max(0.0, fetch - F.total)
        exposed_backward = max(0.0, fetch - D.total - W.total)
        forward = F._replace(memory=F.memory + exposed_forward)
        data_gradient = D._replace(memory=D.memory + exposed_backward)
        return PassSeconds(forward, data_gradient, W)


def with_travel(passes: PassSeconds, forward: float, backward: float) -> PassSeconds:
    F, D, W = passes
    sent = F._replace(travel=forward)
    sent_back = D._replace(travel=backward)
    return PassSeconds(sent, sent_back, W)


def joined_with(op: OpSeconds, exposed: float) -> OpSeconds:
    joined = op.joined + exposed
    return op._replace(joined=joined)


RecomputeCost = Callable[[StepClock, ForwardOfStep], float]


def repeated_forward(*names: str) -> RecomputeCost:
    """The cost of repeating the whole forward of these steps."""

    def forward_seconds(clock: StepClock, forward: ForwardOfStep) -> float:
        if forward.step.name not in names:
            return 0.0
        return forward.seconds.total

    return forward_seconds


RECOMPUTE_COSTS: dict[str, RecomputeCost] = {
    "norm": StepClock.recompute_norm,
    "up": StepClock.recompute_up,
    "core": StepClock.recompute_core,
    "swap": StepClock.recompute_swap,
    "out": StepClock.recompute_out,
    "mlp": repeated_forward("mlp"),
    "shared": repeated_forward("shared"),
    "dispatch": StepClock.recompute_dispatch,
    "activation": StepClock.recompute_activation,
    "experts": repeated_forward("experts"),
    "moe": repeated_forward(*MOE_STEPS),
    "layer": StepClock.recompute_layer,
}

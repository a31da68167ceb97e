"""`moefold bench dispatch`: the symmetric dispatcher on one device, with all ranks played by one process.

Bytes are those that have to move: each token read once and each of its rows written once, or for combine read and
written the other way round, and of a plan the choices, which are read, and the maps of rows, which are written; they
and the bytes of a copy are counted as read plus written. Time is that of the kernels of all ranks, one behind the
other.

    dispatch     plan and dispatch: choices and router weights of all ranks, maps of rows, tokens
    row sums     of experts' rows by arrived token, on their rank, the first part of combine
    combine      its rest: these sums, read and summed in fp32 by the ranks of the tokens
"""

from __future__ import annotations

from functools import partial
from statistics import mean, median

from rich.console import Console
from torch import Tensor

from moefold.bench.clock import copy_bandwidth
from moefold.bench.dispatched_layer import layer_row, layer_table
from moefold.bench.machine import (
    free_device_memory,
    machine_facts,
    resolve_device,
    synchronize_device,
)
from moefold.bench.options import DispatchOptions
from moefold.bench.played_layer import DispatchCase, PlayedLayer, measure_phase
from moefold.bench.played_ranks import stay_on_first_core
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.dispatch.base import Receipt
from moefold.kernels.routing.expert_rows import sum_rows

COLD_FORWARDS = 4  # of a thread, before its time is taken
BYTES_OF_A_CHOICE = 8 + 4 + 3 * 4  # read: its expert and weight; written: source, slot and weight of its row


def run_benchmark(options: DispatchOptions) -> int:
    device = resolve_device(options.device)
    bandwidth = copy_bandwidth(device, options.repeat)
    report: Report = machine_facts(device)
    report["copy_gb_s"] = bandwidth / 1e9
    report["results"] = []
    report["layers"] = []
    for ranks in options.ranks:
        for hidden in options.hidden:
            for zipf in options.zipf:
                case = DispatchCase(ranks, hidden, zipf)
                row = measure_case(options, case, device, bandwidth)
                report["results"].append(row)
                free_device_memory(device)
            if device == "cuda":  # a CPU would take hours for these sizes
                layer = layer_row(options, ranks, hidden, device)
                report["layers"].append(layer)
                free_device_memory(device)
    return show_report(report, options.json, print_dispatch_table)


def measure_case(options: DispatchOptions, case: DispatchCase, device: str, bandwidth: float) -> Row:
    layer = PlayedLayer(options, case, device)
    rows = require_right_results(layer)
    sent = layer.play(layer.dispatch)
    receipts: list[Receipt] = [receipt for receipt, _ in sent]
    dispatch = measure_phase(layer, layer.dispatch, options.repeat)
    both = measure_phase(layer, partial(layer.combine, receipts), options.repeat)
    summing = measure_phase(layer, partial(sum_expert_rows, layer, receipts), options.repeat)
    combine_seconds = max(both.seconds - summing.seconds, 1e-9)
    row_bytes = case.hidden * layer.dtype.itemsize
    moved = (options.tokens + rows) * row_bytes
    maps = options.tokens * options.top_k * BYTES_OF_A_CHOICE
    row: Row = case._asdict()
    row["tokens"] = options.tokens
    row["rows"] = rows
    row["mb"] = moved / 1e6
    row["dispatch_ms"] = dispatch.seconds * 1e3
    row["dispatch_share"] = (moved + maps) / dispatch.seconds / bandwidth
    row["combine_ms"] = combine_seconds * 1e3
    row["combine_share"] = moved / combine_seconds / bandwidth
    row["row_sums_ms"] = summing.seconds * 1e3
    row["launches"] = dispatch.launches + both.launches
    row["host_us"] = host_seconds(layer, receipts, options.repeat) * 1e6
    tell_progress(f"{case.ranks} ranks, width {case.hidden}, Zipf {case.zipf:g}: {row['dispatch_ms']:.3f} ms")
    return row


def require_right_results(layer: PlayedLayer) -> float:
    """Check tokens that are sent and come back; the rows that a rank sends, on average."""
    rows = 0
    results = layer.play(layer.there_and_back)
    counts = layer.rows_of_tokens()
    pairs = zip(results, counts, strict=True)
    for rank, (result, counts_T) in enumerate(pairs):
        expected = layer.h_TD.double() * counts_T[:, None]
        off = (result.double() - expected).abs().max()
        limit = 0.01 * expected.abs().max()
        assert bool(off <= limit), f"tokens of rank {rank} came back wrong, off by {float(off):g}"
        rows += int(counts_T.sum())
    return rows / layer.case.ranks


def sum_expert_rows(layer: PlayedLayer, receipts: list[Receipt], rank: int) -> Tensor:
    order = receipts[rank].order
    y_RD = layer.expert_rows(len(order.index_R))
    return layer.kernels[sum_rows](y_RD, order.index_R, order.slots_NK, order.holes)


def host_seconds(layer: PlayedLayer, receipts: list[Receipt], repeat: int) -> float:
    """Of one rank: plan, dispatch and combine, on a thread that has run them before, in its own turns alone. The device
    has nothing to do when a forward begins, so that no launch waits for room in its queue. All threads are on one core:
    a rank of its own finds in its caches what its last forward has left there."""
    order = layer.order

    def forwards(rank: int) -> list[float]:
        seconds: list[float] = []
        stay_on_first_core()
        for _ in range(COLD_FORWARDS + repeat):
            synchronize_device(layer.device.type)
            begun = order.seconds_so_far(rank)
            layer.dispatch(rank)
            layer.combine(receipts, rank)
            seconds.append(order.seconds_so_far(rank) - begun)
        return seconds[COLD_FORWARDS:]

    of_ranks = layer.play(forwards)
    return median([mean(each) for each in zip(*of_ranks, strict=True)])


def print_dispatch_table(report: Report) -> None:
    title = f"the symmetric dispatcher, ranks played: {report_heading(report)}"
    caption = f"shares are of the bandwidth of a copy, {report['copy_gb_s']:.0f} GB/s read plus written"
    table = report_table(title, caption=caption)
    add_number_columns(table, "ranks", "width", "Zipf", "MB", "dispatch ms", "share", "combine ms", "share")
    add_number_columns(table, "row sums ms", "launches", "host us")
    for row in report["results"]:
        case = [
            str(row["ranks"]),
            str(row["hidden"]),
            f"{row['zipf']:g}",
            f"{row['mb']:.1f}",
        ]
        dispatch = [f"{row['dispatch_ms']:.3f}", f"{row['dispatch_share']:.1%}"]
        combine = [f"{row['combine_ms']:.3f}", f"{row['combine_share']:.1%}"]
        rest = [f"{row['row_sums_ms']:.3f}", f"{row['launches']:.0f}", f"{row['host_us']:.0f}"]
        table.add_row(*case, *dispatch, *combine, *rest)
    console = Console()
    console.print(table)
    if report["layers"]:
        console.print(layer_table(report["layers"]))

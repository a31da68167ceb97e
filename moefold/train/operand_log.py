"""Recording of FP8 operands: figures of all pipeline stages, joined on the first rank and written to fp8.jsonl."""

from __future__ import annotations

from operator import attrgetter

from moefold.anatomy.products import product_recipes
from moefold.comm.host_objects import gather_objects
from moefold.config.precision_recipes import is_fp8
from moefold.config.run import Config
from moefold.observe.fp8_stats import OPERAND_KINDS, Fp8Log, OperandSums, ProductOperands
from moefold.observe.metrics import MetricsSink
from moefold.precision.operand_statistics import StageOperands
from moefold.train.assemble import Run
from moefold.train.step import StepReport


class OperandRecorder:
    """Of a run with FP8 products. Every rank has one; `log` is that of the first rank."""

    def __init__(self, run: Run, log: Fp8Log | None):
        self.run = run
        self.log = log

    def record(self, report: StepReport) -> list[str]:
        """Write the figures of a finished step, if it recorded them. Returns its warnings. Every rank calls this."""
        if report.number % self.run.config.observe.fp8_every:
            return []
        model = self.run.config.model
        own = [] if report.operands is None else read_operands(report.operands, model.layers)
        stages = gather_objects(own, self.run.world.pp)
        if stages is None or self.log is None:
            return []
        products = [product for stage in stages for product in stage]
        products.sort(key=attrgetter("layer"))  # of one layer in their order
        return self.log.write(report.number, products)

    def close(self) -> None:
        if self.log:
            self.log.close()


def read_operands(operands: StageOperands, layers: int) -> list[ProductOperands]:
    """The figures of a stage, on the host."""
    sums_O5 = operands.sums_O5.read().tolist()
    extremes_O3 = operands.extremes_O3.read().tolist()
    rows = [OperandSums(*sums, *extremes) for sums, extremes in zip(sums_O5, extremes_O3, strict=True)]
    found: list[ProductOperands] = []
    kinds = len(OPERAND_KINDS)
    for number, name in enumerate(operands.products):
        of_product = rows[number * kinds : (number + 1) * kinds]
        found.append(ProductOperands(name, layer_number(name, layers), *of_product))
    return found


def layer_number(product: str, layers: int) -> int:
    """Layers of multi-token prediction follow the model's own."""
    part, number, *_ = product.split(".")
    return int(number) + (layers if part == "ahead" else 0)


def open_operand_recorder(
    run: Run, keep_through: int, curves: MetricsSink | None
) -> OperandRecorder | None:  # fmt: skip
    """None for a run without FP8 products."""
    if not has_fp8_products(run.config):
        return None
    is_first = run.world.rank == 0
    log = Fp8Log(run.out / "fp8.jsonl", keep_through, curves) if is_first else None
    return OperandRecorder(run, log)


def has_fp8_products(config: Config) -> bool:
    return any(is_fp8(chosen.recipe) for chosen in product_recipes(config))

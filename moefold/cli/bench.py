"""`moefold bench SUBJECT`: the table of subjects. Each is a module of moefold/bench, imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from moefold.bench import options as bench_options
from moefold.config.errors import one_of
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options

DEFAULT_SUBJECT = "kernels"


class BenchSubject(NamedTuple):
    options: type[Any]
    summary: str
    takes_config_keys: bool = False


SUBJECTS = {
    "kernels": BenchSubject(bench_options.KernelsOptions, "every implementation of every operation"),
    "layer": BenchSubject(bench_options.LayerOptions, "MoE layers of known models"),
    "step": BenchSubject(bench_options.StepOptions, "whole training steps of known models"),
    "projections": BenchSubject(bench_options.ProjectionsOptions, "dense products of quantised operands"),
    "lora": BenchSubject(bench_options.LoraOptions, "adapters beside a frozen base", takes_config_keys=True),
    "transformers": BenchSubject(bench_options.TransformersOptions, "transformers' steps with moefold inside"),
    "packing": BenchSubject(bench_options.PackingOptions, "steps on packed documents, whole sequences, padded rows"),
    "turns": BenchSubject(bench_options.TurnsOptions, "steps on a CPU beside transformers', in turns"),
    "generate": BenchSubject(
        bench_options.GenerateBenchOptions, "steps of generation, beside the bytes they must read"
    ),
    "optimizer": BenchSubject(bench_options.OptimizerOptions, "Newton-Schulz and updates of AdamW"),
    "graphs": BenchSubject(bench_options.GraphsOptions, "steps as one CUDA graph, eager steps, busy time"),
    "schedules": BenchSubject(bench_options.SchedulesOptions, "pipeline schedules on one device"),
    "attention": BenchSubject(bench_options.AttentionOptions, "attention kernels, and which repeat to the bit"),
    "curves": BenchSubject(bench_options.CurvesOptions, "losses of fast kernels and of references"),
    "recipes": BenchSubject(bench_options.RecipesOptions, "losses of precision recipes", takes_config_keys=True),
    "formats": BenchSubject(bench_options.FormatsOptions, "errors, bytes and time of a layer by precision recipe"),
    "overlap": BenchSubject(bench_options.OverlapOptions, "expert communication hidden behind compute"),
    "dispatch": BenchSubject(bench_options.DispatchOptions, "tokens written into other ranks' memory, ranks played"),
    "echo": BenchSubject(bench_options.EchoOptions, "rows of the largest rank with clones of hot experts, planned"),
    "context": BenchSubject(bench_options.ContextOptions, "static and dynamic context parallelism, planned"),
    "memory": BenchSubject(bench_options.MemoryOptions, "recompute and offload: step time, bytes, peak"),
    "save": BenchSubject(bench_options.SaveOptions, "checkpoints: bandwidth, delay of a step", takes_config_keys=True),
    "calibrate": BenchSubject(bench_options.CalibrateOptions, "this machine, as a file for `moefold plan --gpu`"),
    "plan": BenchSubject(bench_options.PlanBenchOptions, "the planner's figures against measured steps"),
}


def forms_of_subjects() -> dict[str, CommandForm[Any]]:
    forms: dict[str, CommandForm[Any]] = {}
    for name, subject in SUBJECTS.items():
        forms[name] = CommandForm(f"bench {name}", subject.options, subject.takes_config_keys)
    return forms


FORMS = forms_of_subjects()


def run_command(argv: Sequence[str]) -> int:
    words = list(argv)
    if words[:1] in (["--help"], ["-h"]):
        print(subject_overview())
        return 0
    named = bool(words) and not words[0].startswith("-")
    name = words.pop(0) if named else DEFAULT_SUBJECT
    subject = SUBJECTS[one_of("benchmark", name, SUBJECTS)]
    options, overrides = read_options(FORMS[name], words)
    options.check_values()
    if subject.takes_config_keys:
        options = replace(options, overrides=tuple(overrides))
    benchmark = importlib.import_module(f"moefold.bench.{name}")  # torch, from here on
    return benchmark.run_benchmark(options)


def subject_overview() -> str:
    lines = ["moefold bench SUBJECT times this machine. Subjects:", ""]
    for name, subject in SUBJECTS.items():
        lines.append(f"  moefold bench {name:<12} {subject.summary}")
    lines += ["", f"Without a subject it times {DEFAULT_SUBJECT}. moefold bench SUBJECT --help lists the options."]
    return "\n".join(lines)

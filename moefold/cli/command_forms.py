"""Forms of all command lines, for completion and for tests. Torch-free."""

from __future__ import annotations

from typing import Any

from moefold.cli import (
    bench,
    chaos,
    ckpt,
    convert,
    data,
    doctor,
    eval,
    explain,
    generate,
    parity,
    plan,
    presets,
    report,
    simulate,
    train,
    watch,
    web,
)
from moefold.presets.command_form import CommandForm

COMMAND_FORMS: tuple[CommandForm[Any], ...] = (
    train.FORM,
    data.FORM,
    presets.FORM,
    explain.FORM,
    plan.FORM,
    web.FORM,
    simulate.FORM,
    generate.FORM,
    eval.FORM,
    convert.FORM,
    ckpt.FORM,
    report.FORM,
    watch.FORM,
    *bench.FORMS.values(),
    doctor.FORM,
    parity.FORM,
    chaos.FORM,
)

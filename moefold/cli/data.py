"""`moefold data`: text tokenized once into a prepared folder; samples, soundness, export. Needs no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from moefold.config.errors import UserError
from moefold.config.read import parse_overrides, with_values
from moefold.config.run import Config
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class DataOptions:
    """Prepare data for training. `prepare` tokenizes files and folders into --out, in parallel; the same command
    continues an interrupted preparation. `ls` tells what prepared folders hold, `verify` reads all their bytes and
    names damaged shards, `show` prints documents with what is trained in colour, and with --data.seq_len how many
    samples that length cuts; `export` writes one side as Megatron's .bin and .idx. Keys of the section data apply,
    such as --data.tokenizer and --data.skip_bad."""

    what: tyro.conf.Positional[Literal["prepare", "show", "ls", "verify", "export"]]
    src: tyro.conf.Positional[tuple[str, ...]]
    """prepare: files and folders to read. show: such, or prepared folders. Else: prepared folders."""
    out: Path | None = None
    """prepare: the folder to write. export: the files to write, without .bin and .idx."""
    workers: int = 0
    """prepare: processes that tokenize; 0: one for each CPU core."""
    side: Literal["train", "held_out"] = "train"
    """show, export: the documents to train on, or those held out."""
    document: int = 0
    """show: the first document, by its number in its side, as the log of spikes has it."""
    count: int = 3
    """show: documents of each folder or file."""


FORM = CommandForm("data", DataOptions, config_keys=True)


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(FORM, argv)
    if not options.src:
        raise UserError(f"moefold data {options.what} names nothing; expected files or folders")
    if options.what == "prepare":
        prepare_as_asked(options, overrides)
        return 0
    if options.what == "show":
        show_as_asked(options, overrides)
        return 0
    for name in options.src:
        act_on_folder(options, Path(name).expanduser())
    return 0


def prepare_as_asked(options: DataOptions, overrides: Sequence[str]) -> None:
    out = require_out(options)
    config = read_config(options, overrides)

    from moefold.data.folder_actions import prepare_sources  # numpy, from here on

    prepare_sources(config, options.src, out, options.workers, print)


def read_config(options: DataOptions, overrides: Sequence[str]) -> Config:
    problems: dict[str, str] = {}
    values = parse_overrides(overrides)
    config = with_values(Config(), values, problems)
    if options.workers < 0:
        problems["workers"] = f"--workers {options.workers} is not legal; expected at least 0, such as 4"
    if options.count < 1:
        problems["count"] = f"--count {options.count} is not legal; expected at least 1, such as 3"
    if options.document < 0:
        problems["document"] = f"--document {options.document} is not legal; expected at least 0"
    if problems:
        raise UserError(*problems.values())
    return config


def show_as_asked(options: DataOptions, overrides: Sequence[str]) -> None:
    config = read_config(options, overrides)

    from moefold.data.show_samples import SampleView, is_prepared, paint_green, put_in_brackets

    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    paint = paint_green if has_colours else put_in_brackets
    asked = "data.seq_len" in parse_overrides(overrides)
    seq_len = config.data.seq_len if asked else None
    view = SampleView(options.document, options.count, paint, print, seq_len)
    for name in options.src:
        path = Path(name).expanduser()
        if is_prepared(path):
            view.show_folder(path, options.side)
        else:
            data = replace(config.data, source="files", files=(name,))
            view.show_file(data, config.model.vocab)


def act_on_folder(options: DataOptions, folder: Path) -> None:
    from moefold.data.folder_actions import describe_folder, export_side, verify_folder

    if options.what == "verify":
        verify_folder(folder, print)
    if options.what != "export":
        describe_folder(folder, print)
        return
    if len(options.src) > 1:
        raise UserError(f"moefold data export takes one folder, found {len(options.src)}")
    prefix = require_out(options)
    export_side(folder, options.side, prefix, print)


def require_out(options: DataOptions) -> Path:
    if options.out is None:
        raise UserError(f"moefold data {options.what} needs --out: where to write")
    return options.out

"""The command line. Commands are found here and loaded when used, so that help and refusals appear without torch."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from moefold.config.errors import RunFailure, UserError, one_of
from moefold.version import __version__

COMMANDS = {
    "train": "train a model: moefold train tiny",
    "explain": "show a model step by step, without running it: moefold explain qwen3-30b-a3b",
    "plan": "know memory, time and the best layout before: moefold plan qwen3-30b-a3b --gpus 16 --gpu h100",
    "web": "plan with sliders, on a page for this machine alone: moefold web",
    "simulate": "clock a pipeline schedule and draw it: moefold simulate --schedule 1f1b --pp 4 --microbatches 16",
    "convert": "write weights as transformers loads them: moefold convert runs/tiny OUT --to hf",
    "ckpt": "look at checkpoints: moefold ckpt ls RUN, moefold ckpt verify RUN, moefold ckpt diff A B",
    "report": "show how a run went, as one HTML file: moefold report runs/tiny",
    "bench": "time this machine: moefold bench kernels, layer, step, attention, save, calibrate and others",
    "doctor": "check this machine, or prove a layout equal to one rank: moefold doctor parity tiny --world 4",
}


def main() -> None:
    code = run_command_line(sys.argv[1:])
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        # A rank's work is done and its groups are closed. Leaving at once spares it the interpreter's last destructors,
        # in which a communication thread of torch was once seen to abort a finished run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command_line(argv: Sequence[str]) -> int:
    """Run a command; the exit code is 0, 1 for a failure while running, 2 for something to mend."""
    try:
        return dispatch_command(list(argv))
    except UserError as refused:
        return report_problem(str(refused), 2)
    except RunFailure as failed:
        return report_problem(str(failed), 1)
    except KeyboardInterrupt:
        return report_problem("interrupted", 130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR):
            raise
        where = f" at {error.filename}" if error.filename else ""
        return report_problem(
            f"{error.strerror}{where}; expected a place that can be written; free space or change --out", 2
        )
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).strip().split("\n")[0][:200]
        return report_problem(f"out of memory: {first}; try a smaller --train.micro_batch, --data.seq_len or model", 2)


def dispatch_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(command_overview())
        return 0
    if argv[0] == "--version":
        print(f"moefold {__version__}")
        return 0
    command = one_of("command", argv[0], COMMANDS)
    return importlib.import_module(f"moefold.cli.{command}").run_command(argv[1:])


def command_overview() -> str:
    lines = [f"moefold {__version__} trains Mixture-of-Experts language models.", ""]
    lines += [f"  moefold {name:<9} {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", "moefold COMMAND --help tells more."])


def report_problem(message: str, code: int) -> int:
    """Print a message for people. Of several ranks that all refuse the same thing, the first speaks."""
    if os.environ.get("RANK", "0") == "0" or code == 1:
        print(f"moefold: {message}", file=sys.stderr)
    return code


def is_out_of_memory(error: BaseException) -> bool:
    signs = ("out of memory", "can't allocate memory", "DefaultCPUAllocator", "not enough memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)

"""The command line. Commands are imported when used, so that help and refusals appear without torch."""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
from collections.abc import Sequence

from moefold.cli.command_list import COMMANDS
from moefold.cli.memory_errors import OUT_OF_MEMORY, is_out_of_memory, memory_problem
from moefold.config.errors import RunFailure, UserError, one_of
from moefold.printable import escape_character, printable_text
from moefold.version import __version__

OUTPUT_ERRORS = (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR)


def main() -> None:
    code = run_command_line(sys.argv[1:])
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        # A rank is finished and its process groups are closed. os._exit skips the interpreter's last destructors, in
        # which a communication thread of torch was once seen to abort a finished run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_command_line(argv: Sequence[str]) -> int:
    """Run a command; its exit code (docs/faults.md): 0, 1 for a failure while running, 2 for input that must change, 3
    for a plan that does not fit, 4 for a run out of memory, 5 for a hang, 128 + n for a run ended by signal n."""
    try:
        code = dispatch_command(list(argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not is_output_closed():
            raise
        drop_output()
        return closed_output_code()
    except SystemExit as leaving:
        # rich exits with code 1 where its output is closed.
        if isinstance(leaving.__context__, BrokenPipeError):
            return closed_output_code()
        raise
    except UserError as refused:
        return report_problem(str(refused), refused.exit_code)
    except RunFailure as failed:
        return report_problem(str(failed), 1)
    except KeyboardInterrupt:
        return report_problem("interrupted", 130)
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS and error.filename is None:
            raise
        return report_problem(file_problem(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return report_problem(memory_problem(error), OUT_OF_MEMORY)


def dispatch_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(command_overview())
        return 0
    if argv[0] == "--version":
        print(f"moefold {__version__}")
        return 0
    if argv[0] == "--print-completion":
        from moefold.cli.completion import completion_script

        print(completion_script(*argv[1:2]), end="")
        return 0
    command = one_of("command", argv[0], COMMANDS)
    module = importlib.import_module(f"moefold.cli.{command}")
    return module.run_command(argv[1:])


def is_output_closed() -> bool:
    """Whether standard output is a pipe whose reader has ended, as in `moefold explain tiny | head`."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
    closed = select.POLLERR | select.POLLHUP
    return any(event & closed for _, event in pipe.poll(0))


def closed_output_code() -> int:
    """0: the reader has seen enough. A rank of several ends with 1, so that its launcher stops the others."""
    return 1 if "RANK" in os.environ else 0


def drop_output() -> None:
    """Send what is left to print to the null device: the interpreter flushes standard output once more at its end."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, sys.stdout.fileno())


def command_overview() -> str:
    lines = [f"moefold {__version__} trains Mixture-of-Experts language models.", ""]
    for name, summary in COMMANDS.items():
        lines.append(f"  moefold {name:<9} {summary}")
    lines += ["", "moefold COMMAND --help lists the options of a command."]
    lines += ["moefold --print-completion bash (or zsh, fish) prints a completion script."]
    return "\n".join(lines)


def report_problem(message: str, code: int) -> int:
    """Print the message and return the code. Of several ranks that refuse the same input, only rank 0 prints."""
    rank = os.environ.get("RANK", "0")
    if rank == "0" or code == 1:
        lines = message.split("\n")
        safe = ["".join(map(escape_character, line)) for line in lines]  # names of files may hold anything
        print("moefold: " + "\n".join(safe), file=sys.stderr)
    return code


def file_problem(error: OSError) -> str:
    where = f" at {printable_text(str(error.filename))}" if error.filename else ""
    expected = "expected a file or folder that can be read and written; free space, or name another"
    return f"{error.strerror}{where}; {expected}"

"""`moefold --print-completion SHELL`: a script that completes commands, options, keys, their values and presets.

The script is a table of the words before the cursor: it starts no process while a line is typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from moefold.cli.command_forms import COMMAND_FORMS
from moefold.cli.command_list import COMMANDS
from moefold.config.errors import one_of
from moefold.config.keys import ConfigKey, iterate_keys
from moefold.presets.command_form import CommandForm
from moefold.presets.declared_options import declared_options
from moefold.presets.zoo import PRESETS


class Completion(NamedTuple):
    """The words that may follow a line. `line` is a pattern: the words before the cursor, each with a space behind."""

    line: str
    words: tuple[str, ...]


def completion_script(shell: str = "") -> str:
    write = SHELLS[one_of("shell for --print-completion", shell, SHELLS)]
    return write(all_completions())


def all_completions() -> list[Completion]:
    """Completions; of those whose line matches, the first counts."""
    keys = list(iterate_keys(PRESETS["tiny"]()))
    # Values of options and keys first: they follow any words.
    found: list[Completion] = []
    for key in keys:
        if key.choices:
            found.append(Completion(f"* --{key.path} ", key.choices))
    for form in COMMAND_FORMS:
        found += option_values(form)
    # `bench kernels` before `bench`, which completes the second word alone.
    for form in sorted(COMMAND_FORMS, key=word_count, reverse=True):
        words = form_words(form, keys)
        found.append(Completion(f"{form.name} *", words))
    subcommands = subcommands_of("bench")
    found.append(Completion("bench *", (*subcommands, "--help")))
    found.append(Completion("--print-completion ", tuple(SHELLS)))
    everywhere = ("--help", "--version", "--print-completion")
    found.append(Completion("", (*COMMANDS, *everywhere)))
    return found


def option_values(form: CommandForm[Any]) -> list[Completion]:
    return [
        Completion(f"{form.name} *{option.flag} ", option.choices)
        for option in declared_options(form.options)
        if option.choices and not option.positional
    ]


def word_count(form: CommandForm[Any]) -> int:
    return len(form.name.split())


def subcommands_of(name: str) -> list[str]:
    prefix = f"{name} "
    below = [form.name for form in COMMAND_FORMS if form.name.startswith(prefix)]
    return [name.split()[1] for name in below]


def form_words(form: CommandForm[Any], keys: Iterable[ConfigKey]) -> tuple[str, ...]:
    """Options of a command, subcommands, legal first words, and where it takes them keys and presets."""
    words: list[str] = []
    for option in declared_options(form.options):
        words += option.choices if option.positional else [option.flag]
    words.append("--help")
    words += subcommands_of(form.name)
    words += [f"--{key.path}" for key in keys if form.takes_key(key.path)]
    if form.config_keys and not form.section:
        words += PRESETS
    return tuple(words)


# ---- one function a shell


def case_lines(completions: Iterable[Completion]) -> str:
    """The cases of bash and zsh; the fixed part of a pattern is quoted."""
    lines: list[str] = []
    for line, words in completions:
        parts = [f'"{part}"' if part else "" for part in line.split("*")]
        pattern = "*".join(parts) or '""'
        lines.append(f"        {pattern}) offered='{' '.join(words)}' ;;")
    return "\n".join(lines)


def bash_script(completions: Iterable[Completion]) -> str:
    return f"""\
# moefold --print-completion bash > ~/.local/share/bash-completion/completions/moefold
_moefold() {{
    local offered='' line=''
    local before=("${{COMP_WORDS[@]:1:COMP_CWORD-1}}")
    (( COMP_CWORD > 1 )) && line="${{before[*]}} "
    case "$line" in
{case_lines(completions)}
    esac
    COMPREPLY=($(compgen -W "$offered" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _moefold moefold
"""


def zsh_script(completions: Iterable[Completion]) -> str:
    return f"""\
#compdef moefold
# moefold --print-completion zsh > _moefold, in a folder of $fpath
_moefold() {{
    local offered='' line=''
    (( CURRENT > 2 )) && line="${{(j: :)words[2,CURRENT-1]}} "
    case "$line" in
{case_lines(completions)}
    esac
    compadd -- ${{=offered}} || _files
}}
# Read as a function of $fpath, the file completes at once; sourced, it is registered.
if [ "$funcstack[1]" = _moefold ]; then _moefold; else compdef _moefold moefold; fi
"""


def fish_script(completions: Iterable[Completion]) -> str:
    cases: list[str] = []
    for line, words in completions:
        cases += [f"        case '{line}'", f"            string split ' ' '{' '.join(words)}'"]
    body = "\n".join(cases)
    return f"""\
# moefold --print-completion fish > ~/.config/fish/completions/moefold.fish
function __moefold_words
    set -l before (commandline -opc)
    set -e before[1]
    set -l line (string join ' ' -- $before)
    test -n "$line"; and set line "$line "
    switch "$line"
{body}
    end
end
complete -c moefold -a '(__moefold_words)'
"""


SHELLS: dict[str, Callable[[Iterable[Completion]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}

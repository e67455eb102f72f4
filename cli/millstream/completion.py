"""Scripts by which bash, zsh and fish complete commands, flags and the values of flags. Pure: parser -> text.

    add_config_flags(parser), ...  ->  CommandWords  ->  the script of a shell

The scripts hold all words, so that completing starts no Python. A flag whose value is a path completes file names, and
so does everything that is no flag.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHOICES = re.compile(r"[\w.-]+(?:\|[\w.-]+)+")  # a metavar such as true|false
_PATHS = re.compile(r"\b(FILE|FOLDER|DIR)\b|\.\w+$")  # one such as FILE.jsonl


@dataclass(frozen=True, slots=True)
class FlagWords:
    """`values`: those that it takes, where they are few. `takes_path`: file names; `is_switch`: it takes no value."""

    name: str
    help: str
    values: tuple[str, ...] = ()
    takes_path: bool = False
    is_switch: bool = False


@dataclass(frozen=True, slots=True)
class CommandWords:
    """`modes`: words that may follow the command, as in `bench serve`."""

    name: str
    help: str
    flags: tuple[FlagWords, ...]
    modes: tuple[str, ...] = ()


def command_words(name: str, help_text: str, parser: argparse.ArgumentParser) -> CommandWords:
    """Return the words of one command; the flags of its modes count as its own."""
    flags = {flag.name: flag for flag in _flags(parser)}
    return CommandWords(name, help_text, tuple(sorted(flags.values(), key=lambda flag: flag.name)), _modes(parser))


def _flags(parser: argparse.ArgumentParser) -> Iterator[FlagWords]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for mode in action.choices.values():
                yield from _flags(mode)
        for name in action.option_strings:
            if name.startswith("--"):
                yield _flag(name, action)


def _flag(name: str, action: argparse.Action) -> FlagWords:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    values = tuple(map(str, action.choices or ())) or tuple(metavar.split("|") if _CHOICES.fullmatch(metavar) else ())
    # The first sentence: `%` begins a conversion in the help of argparse.
    said = "" if action.help in (None, argparse.SUPPRESS) else str(action.help).partition(";")[0].replace("%%", "%")
    is_path = action.type is Path or bool(_PATHS.search(metavar))
    return FlagWords(name, said, values, is_path and not values, action.nargs == 0)


def _modes(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    found = [action for action in parser._actions if action.choices and not action.option_strings]
    return tuple(str(name) for action in found for name in action.choices or ())


# bash

_BASH = """\
# bash completion for millstream. Use: source <(millstream completion bash)
_millstream() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}} words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} help --help --version"
  else
    # bash makes a word of its own of each "=": --flag = value
    if [ "$word" = "=" ]; then word=""; elif [ "$before" = "=" ]; then before=${{COMP_WORDS[COMP_CWORD - 2]}}; fi
    case "$command $before" in
      "help help") words="{commands}" ;;
{values}
      {paths}) return ;;
      *)
        if [[ $word == -* ]]; then
          case "$command" in
{flags}
          esac
        elif [ "$COMP_CWORD" -eq 2 ]; then
          case "$command" in
{modes}
          esac
        fi
        ;;
    esac
  fi
  while IFS= read -r match; do COMPREPLY+=("$match"); done < <(compgen -W "$words" -- "$word")
}}
complete -o default -F _millstream millstream
"""


def bash_script(commands: Sequence[CommandWords]) -> str:
    """Return the script for bash. Where no word matches, bash completes file names (`-o default`)."""
    values = [
        f'      "{command.name} {flag.name}") words="{" ".join(flag.values)}" ;;'
        for command in commands
        for flag in command.flags
        if flag.values
    ]
    paths = [f'"{command.name} {flag.name}"' for command in commands for flag in command.flags if flag.takes_path]
    flags = [
        f'            {command.name}) words="{" ".join(flag.name for flag in command.flags)}" ;;'
        for command in commands
    ]
    modes = [f'            {one.name}) words="{" ".join(one.modes)}" ;;' for one in commands if one.modes]
    names = " ".join(command.name for command in commands)
    lines = {"values": values, "flags": flags, "modes": modes}
    return _BASH.format(commands=names, paths="|".join(paths), **{name: "\n".join(one) for name, one in lines.items()})


# zsh

_ZSH = """\
#compdef millstream
# zsh completion for millstream. Use: source <(millstream completion zsh)
_millstream() {{
  local -a commands flags
  commands=(
{commands}
  )
  if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then
    _describe command commands
    return
  fi
  case "$words[2] $words[CURRENT-1]" in
{values}
  esac
  case $words[2] in
{flags}
  esac
  if [[ $PREFIX == -* ]]; then _describe -o flag flags; else _files; fi
}}
compdef _millstream millstream
"""


def zsh_script(commands: Sequence[CommandWords]) -> str:
    """Return the script for zsh."""
    values = [
        f"    '{command.name} {flag.name}') compadd {' '.join(flag.values)}; return ;;"
        for command in commands
        for flag in command.flags
        if flag.values
    ]
    values += [
        f"    '{command.name} {command.name}') compadd {' '.join(command.modes)} ;;"
        for command in commands
        if command.modes
    ]
    flags = []
    for command in commands:
        described = " ".join(_zsh_entry(flag.name, flag.help) for flag in command.flags)
        flags.append(f"    {command.name}) flags=({described}) ;;")
    names = "\n".join(f"    {_zsh_entry(command.name, command.help)}" for command in commands)
    return _ZSH.format(commands=names, values="\n".join(values), flags="\n".join(flags))


def _zsh_entry(word: str, said: str) -> str:
    """`'word:what it does'`, for _describe: a colon of the word would begin its description."""
    return _quoted(f"{word}:{said}" if said else word)


# fish


def fish_script(commands: Sequence[CommandWords]) -> str:
    """Return the script for fish."""
    lines = ["# fish completion for millstream. Use: millstream completion fish | source"]
    names = " ".join(command.name for command in commands)
    lines.append("complete -c millstream -n __fish_use_subcommand -f -l version -d 'print the version'")
    lines.append("complete -c millstream -n __fish_use_subcommand -f -a help -d 'flags of a command'")
    lines.append(f"complete -c millstream -n '__fish_seen_subcommand_from help' -f -a {_quoted(names)}")
    for command in commands:
        lines.append(f"complete -c millstream -n __fish_use_subcommand -f -a {command.name} -d {_quoted(command.help)}")
        seen = f"complete -c millstream -n '__fish_seen_subcommand_from {command.name}'"
        if command.modes:
            lines.append(f"{seen} -f -a {_quoted(' '.join(command.modes))}")
        for flag in command.flags:
            takes = "" if flag.is_switch else f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r"
            said = f" -d {_quoted(flag.help)}" if flag.help else ""
            lines.append(f"{seen} -l {flag.name.removeprefix('--')}{takes}{said}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """In single quotes, for zsh and fish. An apostrophe is written as a typographic one, which needs no quoting."""
    return "'" + " ".join(text.split()).replace("\\", "/").replace("'", "’") + "'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}

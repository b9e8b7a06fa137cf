"""The flags of `holdfast run` are all of torchrun's, and ours, made from the schema of settings.

Three rules. The first word that is no flag is the script, and all that follows is the script's,
`--help` and `--` too. A flag wins over a variable and over `holdfast.toml`. An error is one line
(`UsageError`).

A flag may be abbreviated as far as it is unambiguous. Where torchrun has one flag that begins so and
we have more, torchrun's is meant. argparse would find nearly every abbreviation ambiguous between the
two spellings of a flag, so abbreviations are names of their own here.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from holdfast.config.schema import (
    WITH_FLAGS,
    MostUsed,
    OfViewers,
    Said,
    Setting,
    Settings,
    settings_of,
)
from holdfast.config.sources import collect, nearest
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.config.settings import RunSettings

DESCRIPTION = """\
Train with SCRIPT on one or more nodes and keep going through faults.
Takes torchrun's flags: use `holdfast run` in place of `torchrun`."""

EPILOG = """\
examples:
  holdfast run --nproc-per-node 2 train.py --epochs 3
      two ranks on this machine; a standby replaces one that dies
  holdfast run --nnodes 2:4 --nproc-per-node gpu --rdzv-backend c10d \\
      --rdzv-endpoint node0:29400 --job llm -m my.train
      the same on each node: between two and four nodes, one rank per GPU

Flags may be written with underscores (--nproc_per_node). Each can also be a HOLDFAST_* variable
(HOLDFAST_NPROC_PER_NODE=2), torchrun's also a PET_* variable, or a line of holdfast.toml
(nproc-per-node = 2); `holdfast config` shows which one counts. All after SCRIPT is the script's."""


def parse_run(argv: Sequence[str]) -> RunSettings:
    """Read `holdfast run ARGV`. Raises UsageError; `--help` prints and exits with 0."""
    parser = run_parser(
        "holdfast run",
        usage="holdfast run [flags] SCRIPT [the script's own arguments]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    given, command, _ = parse_settings(parser, argv)

    from holdfast.config.settings import run_settings

    return run_settings(with_slurm(given), command)


def with_slurm(given: Settings) -> Settings:
    """Settings with what Slurm's environment says of those that nobody set."""
    if not os.environ.get("SLURM_JOB_ID"):
        return given

    from holdfast.platforms import slurm_environment

    said = slurm_environment.settings(os.environ, given.said, given.spares)
    warning = slurm_environment.warning(os.environ, given.said)
    return Settings({**said, **given.said}, (*given.warnings, *filter(None, [warning])))


def parse_settings(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[Settings, list[str], argparse.Namespace]:
    """Settings from flags, variables and file; the script with its arguments; all that was parsed."""
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UsageError(_unknown(unknown[0]))
    command = list(map(str, getattr(parsed, "command", ())))
    return given_settings(parsed), command[1:] if command[:1] == ["--"] else command, parsed


def given_settings(parsed: argparse.Namespace) -> Settings:
    """Settings from flags that were parsed, from variables and from the file."""
    return collect(_from_flags(vars(parsed)), os.environ)


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report what argparse found in one line, with the spelling that the help shows."""
        match = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
        if match is None:
            raise UsageError(message)
        name = max(match[1].split("/"), key=len)  # Long enough to be unambiguous.
        setting = next((s for s in flagged() if _begins(name, s)), None)
        spelling = setting.flag if setting is not None else name
        missing = setting.takes if setting is not None else "a value"
        lacks = match[2].startswith("expected")
        why = f"{missing} is missing after it" if lacks else "takes no value"
        raise UsageError(f"{spelling}: {why}")


def run_parser(prog: str, *, usage: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser of all flags of `holdfast run`, and of a script with its arguments."""
    parser = _OneLineParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    short_forms = abbreviations(flagged())
    for title, group in WITH_FLAGS.items():
        section = parser.add_argument_group(title)
        if group is MostUsed:
            section.add_argument("-h", "--help", action="help", help="show this and exit")
        for setting in settings_of(group):
            add_flag(section, setting, short_forms[setting.name])
    # "A...": one word and all that follows it. Not REMAINDER after a positional, as torchrun has
    # it: that loses a "--" that is meant for the script.
    script = parser.add_argument("command", nargs="A...", help=argparse.SUPPRESS)
    script.required = False  # an unknown flag is reported before a missing script
    return parser


def add_flag(
    section: argparse._ActionsContainer, setting: Setting[object], abbreviations: Sequence[str] = ()
) -> None:
    """Add a setting's flag; the help shows neither its spelling with underscores nor short forms."""
    help = f"{setting.help}; default: {setting.otherwise}" if setting.takes else setting.help
    shown = (setting.short, setting.flag) if setting.short else (setting.flag,)
    hidden = () if setting.key == setting.name else (f"--{setting.name}",)
    for names, text in ((shown, help), ((*hidden, *abbreviations), argparse.SUPPRESS)):
        if names and setting.takes:
            action = "append" if setting.repeatable else "store"
            section.add_argument(
                *names, dest=setting.name, action=action, metavar=setting.takes, help=text
            )
        elif names:
            section.add_argument(*names, dest=setting.name, action="store_true", help=text)


def abbreviations(settings: Iterable[Setting[object]]) -> dict[str, list[str]]:
    """By setting, the beginnings of its flag, longest first, that mean no other."""
    settings = list(settings)
    meanings: dict[str, list[Setting[object]]] = {}
    for setting in settings:
        for flag in {setting.flag, f"--{setting.name}"}:
            for end in range(len(flag) - 1, 2, -1):
                meanings.setdefault(flag[:end], []).append(setting)
    found: dict[str, list[str]] = {setting.name: [] for setting in settings}
    for word, begun in meanings.items():
        theirs = {setting.name for setting in begun if setting.torchrun}
        meant = theirs if len(theirs) == 1 else {setting.name for setting in begun}
        if len(meant) == 1:
            found[meant.pop()].append(word)
    full = {flag for setting in settings for flag in (setting.flag, f"--{setting.name}")}
    return {name: sorted(set(words) - full, key=len)[::-1] for name, words in found.items()}


def _begins(word: str, setting: Setting[object]) -> bool:
    return f"--{setting.key}".startswith(word) or f"--{setting.name}".startswith(word)


def flagged() -> Iterator[Setting[object]]:
    """All settings that have a flag."""
    return settings_of(*WITH_FLAGS.values())


def _from_flags(parsed: Mapping[str, object]) -> dict[str, Said]:
    said: dict[str, Said] = {}
    for setting in (*flagged(), *settings_of(OfViewers)):
        value = parsed.get(setting.name)
        if isinstance(value, list):
            value = setting.separator.join(map(str, value))
        if value is True:
            value = "true"
        if isinstance(value, str):
            said[setting.name] = Said(value, setting.flag)
    return said


def given_flags(parsed: argparse.Namespace, without: Collection[str]) -> list[str]:
    """The flags that were given, as words that mean the same, without those of these settings."""
    said = _from_flags(vars(parsed))
    words = []
    for setting in flagged():
        if setting.name in said and setting.name not in without:
            value = f"={said[setting.name].text}" if setting.takes else ""
            words.append(f"{setting.flag}{value}")
    return words


def _unknown(word: str) -> str:
    """One line for an unknown flag, with the flag that was probably meant."""
    spelt = word.partition("=")[0]
    begins = [setting.flag for setting in flagged() if _begins(spelt, setting)]
    if len(begins) > 1:
        return f"{spelt} is ambiguous: {', '.join(begins)}"
    meant = nearest(spelt.lstrip("-").replace("_", "-"), [setting.key for setting in flagged()])
    hint = f"did you mean --{meant}?" if meant else "`holdfast run --help` lists them"
    return f"unknown flag {spelt}; {hint}"

"""`holdfast config` shows every setting, its value and where the value came from."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.cli.flags import parse_settings, run_parser, with_slurm
from holdfast.config.schema import GROUPS, WITH_FLAGS, Setting, Settings, all_settings, settings_of
from holdfast.errors import UsageError

ABOUT = """\
Show every setting: its value, where the value came from, and what it means. Give the flags that you
would give to `holdfast run`, to see what they change; with SCRIPT, what does not fit together or does
not fit this machine is reported too. Ends with 2 if a value is wrong.

The strongest source of a setting counts:
  1. flag               --nproc-per-node 2
  2. variable           HOLDFAST_NPROC_PER_NODE=2
  3. torchrun's         PET_NPROC_PER_NODE=2
  4. settings file      nproc-per-node = 2
  5. default

The settings file is holdfast.toml in the working directory, or the one that --config or
HOLDFAST_CONFIG names. It is TOML, and its keys are the flags without the dashes in front:

  job = "llm"
  nnodes = "2:4"                        # a text, as after the flag
  nproc-per-node = 8                    # or a number
  node-check = true                     # a switch; HOLDFAST_NODE_CHECK=0 turns it off for one run
  preload = ["transformers", "my.data"] # a list, where the flag takes several values

  [rank-section-timeouts]               # a table, where the flag takes NAME:VALUE or KEY=VALUE
  checkpointing = 600"""

EPILOG = """\
examples:
  holdfast config                       what holds in this directory and environment
  holdfast config --nnodes 2 train.py   what would hold for `holdfast run --nnodes 2 train.py`
  holdfast config --json                the same for programs"""


def main(argv: Sequence[str]) -> int:
    parser = run_parser(
        "holdfast config",
        usage="holdfast config [--json] [flags of holdfast run] [SCRIPT]",
        description=ABOUT,
        epilog=EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    split = argv.index("--") if "--" in argv else len(argv)  # `holdfast config -- --nnodes 2`
    given, command, parsed = parse_settings(parser, [*argv[:split], *argv[split + 1 :]])
    given = with_slurm(given)
    _show(given, "json" in parsed)
    problems = _problems(given, command)
    for line in (*given.warnings, *problems):
        print(f"holdfast config: {line}", file=sys.stderr)
    return 2 if problems else 0


def _show(given: Settings, as_json: bool) -> None:
    from holdfast.cli.view import print_json
    from holdfast.view.terminal import print_table

    if as_json:
        groups = GROUPS.items()
        print_json(
            [_described(given, title, s) for title, group in groups for s in settings_of(group)]
        )
        return
    from rich.markup import escape

    shown = escape if sys.stdout.isatty() else str
    columns = ("setting", "value", "source", "meaning")
    cells = [(s.key, *map(shown, (*value_and_source(given, s), s.help))) for s in all_settings()]
    print_table("settings of Holdfast", columns, cells)


def value_and_source(given: Settings, setting: Setting[object]) -> tuple[str, str]:
    """A setting's value as the user wrote it, and its source; secrets are not shown."""
    said = given.said.get(setting.name)
    if said is None:
        return setting.otherwise, "default"
    return "***" if setting.secret else said.text, said.source


def _described(given: Settings, group: str, setting: Setting[object]) -> dict[str, object]:
    value, source = value_and_source(given, setting)
    return {
        "setting": setting.key,
        "value": value,
        "source": source,
        "default": setting.otherwise,
        "flag": setting.flag if group in WITH_FLAGS else None,
        "variables": setting.variables,
        "in_file": setting.in_file,
        "group": group,
        "help": setting.help,
    }


def _problems(given: Settings, command: Sequence[str]) -> list[str]:
    """What is wrong with each value, or else with all of them together."""
    problems = []
    for name in given.said:
        try:
            getattr(given, name)
        except UsageError as error:
            problems.append(str(error))
    if command and not problems:
        from holdfast.config.settings import run_settings
        from holdfast.launch.machine import check_machine

        try:
            check_machine(run_settings(given, command), waits=False)
        except UsageError as error:
            problems.append(str(error))
    return problems

"""The flags of `holdfast run`: all of torchrun's, and ours.

One table says how each is spelt, what it takes and what the help tells about it; parser, help,
`PET_*` variables and hints for typing errors are made from it. What values mean is `config.py`'s
matter, which is imported only after the parser is done, so that `--help` costs nothing.

Three rules. The first word that is no flag is the script, and all that follows is the script's,
`--help` and `--` too. A flag wins over its `PET_*` variable. An error is one line (`UsageError`).

Flags are not abbreviated. torchrun's parser allows it in principle, but there nearly every
abbreviation is ambiguous between its two spellings, so nobody can rely on it; a short form gets a
hint with the full one instead.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.config.settings import RunSettings, Said


class Flag(NamedTuple):
    name: str
    takes: str | None  # what the help calls its value; None: it takes none
    help: str
    short: str | None = None
    pet: bool = True  # torchrun reads PET_<NAME> for it
    variable: str | None = None  # another variable that torchrun reads for it
    many: bool = False

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """As the help shows it, first; then with underscores, where that differs."""
        shown = (self.short, self.name) if self.short else (self.name,)
        underscored = "--" + self.key
        return shown if underscored == self.name else (*shown, underscored)

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that stand in for it, the weightiest first."""
        names = ("PET_" + self.key.upper() if self.pet else None, self.variable)
        return tuple(name for name in names if name)


def _own(name: str, takes: str | None, help: str, *, many: bool = False) -> Flag:
    return Flag(name, takes, help, pet=False, many=many)


MOST_USED = (
    Flag("--nproc-per-node", "N", "ranks on each node: a number, gpu, cpu, or auto (GPUs if there "
         "are any, else CPUs); default 1"),
    Flag("--nnodes", "N|MIN:MAX", "nodes, or the fewest and the most to train with; default 1"),
    _own("--job", "NAME", "name of the job, for status, incidents, goodput; default: made up"),
    Flag("--max-restarts", "N", "give up after this many restarts; default: go on as long as "
         "training advances"),
    _own("--standby", "auto|N", "processes that have torch loaded and wait for a rank to die; "
         "default auto: one a rank, fewer where memory is short, 0 with --no-python"),
    _own("--preload", "MODULE", "also load this into standbys (repeat it, or use commas)",
         many=True),
    _own("--coordinator", "HOST:PORT", "the job's coordinator; default: one inside this process, "
         "on loopback"),
    _own("--spares", "N", "nodes beyond --nnodes that join and wait for a place; default 0"),
    _own("--rank-heartbeat-timeout", "SECONDS", "how long a rank may show no progress between two "
         "marks of a step; default: learnt"),
    _own("--initial-rank-heartbeat-timeout", "SECONDS", "the same, until its first step"),
    _own("--rank-out-of-section-timeout", "SECONDS", "the same, outside of holdfast.section()s"),
    _own("--rank-section-timeouts", "NAME:SECONDS,...", "the same, within these sections"),
    _own("--safety-factor", "X", "how many times the longest time seen is too long; default 3, for "
         "sections 5"),
    _own("--no-hang-detection", None, "never end a rank because it stands still"),
    _own("--exclude-stragglers", None, "replace the node of a rank that slows the others down by a "
         "spare"),
    _own("--copies", "N", "other nodes that keep a copy of each snapshot in memory; default 1"),
    _own("--save-deadline", "SECONDS", "when told to stop, how long the newest snapshot may take to "
         "storage; default 25"),
    _own("--node-unit", "N", "train with multiples of this many nodes; default 1"),
    _own("--segment", "N", "take nodes only in groups of N that share a fast interconnect; "
         "default 1"),
    _own("--token-file", "FILE", "the job's token, where its home is on another machine; default: "
         "HOLDFAST_TOKEN, or the job's job.json"),
    _own("--tls-cert", "FILE", "with --tls-key and --tls-ca: TLS between the nodes and the "
         "coordinator, both sides checked"),
    _own("--tls-key", "FILE", "see --tls-cert"),
    _own("--tls-ca", "FILE", "see --tls-cert"),
    _own("--node-check", None, "check each node's health before it gets ranks"),
    Flag("--chaos", "FAULTS", "faults to inject into the job, as in kill@step=50,rank=1; see "
         "holdfast chaos --help; default: HOLDFAST_CHAOS", pet=False, variable="HOLDFAST_CHAOS"),
    _own("--quiet", None, "nothing of holdfast's own on the terminal but errors"),
    Flag("--module", None, "SCRIPT is a module, as in python -m", short="-m"),
    Flag("--standalone", None, "one node, nothing shared with others (so is the default)"),
)  # fmt: skip

COMPATIBLE = (
    Flag("--no-python", None, "SCRIPT is a command, not Python"),
    Flag("--run-path", None, "run SCRIPT with runpy.run_path; wins over -m and --no-python"),
    Flag("--role", "NAME", "ROLE_NAME of the ranks; default: default"),
    Flag("--log-dir", "DIR", "where rank logs go; default: logs/ in the job's home"),
    Flag("--redirects", "MASK", "streams to keep off the terminal (1 stdout, 2 stderr, 3 both), "
         "for all ranks or by local rank, as in 0:1,1:2; logs have all; default 0", short="-r"),
    Flag("--tee", "MASK", "streams to show although redirected; default 0", short="-t"),
    Flag("--local-ranks-filter", "RANKS", "show only these local ranks, as in 0,1; default all"),
    Flag("--duplicate-stdout-filters", "TEXTS", "copy stdout lines with one of these texts to a "
         "file of their own (commas between; ,, is a comma)"),
    Flag("--duplicate-stderr-filters", "TEXTS", "the same for stderr"),
    Flag("--log-line-prefix-template", "TEXT", "what stands before a line on the terminal; knows "
         "${role_name} ${rank} ${local_rank}; default [${role_name}${local_rank}]:",
         pet=False, variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    Flag("--node-rank", "N", "place of this node among the nodes; default: as they join"),
    Flag("--master-addr", "HOST", "MASTER_ADDR for the ranks; default: picked"),
    Flag("--master-port", "PORT", "MASTER_PORT for the ranks; default: a free one, 29500 with more "
         "than one node"),
    Flag("--local-addr", "HOST", "address of this node as others reach it; default: found out"),
    Flag("--rdzv-backend", "NAME", "c10d: --rdzv-endpoint is where the coordinator is; static "
         "(default): it is MASTER_ADDR:MASTER_PORT; others have no counterpart here"),
    Flag("--rdzv-endpoint", "HOST:PORT", "see --rdzv-backend; the port is 29400 (c10d) or 29500 "
         "(static) unless given"),
    Flag("--rdzv-id", "ID", "TORCHELASTIC_RUN_ID for the ranks; default: made up"),
    Flag("--rdzv-conf", "KEY=VALUE,...", "join_timeout, last_call_timeout (seconds) and is_host; "
         "torchrun's other keys have no effect"),
    Flag("--shutdown-timeout", "SECONDS", "from SIGTERM to SIGKILL for a rank; default: learnt",
         variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    Flag("--signals-to-handle", "NAMES", "signals passed on to the ranks; default "
         "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    Flag("--virtual-local-rank", None, "each rank sees LOCAL_RANK 0 and one GPU"),
)  # fmt: skip

NO_EFFECT = (
    Flag("--monitor-interval", "SECONDS", "a dead rank is noticed at once, without an interval"),
    Flag("--start-method", "NAME", "ranks are always fresh processes or standbys"),
    Flag("--event-log-handler", "NAME", "see holdfast incidents and trace.json"),
    Flag("--logs-specs", "NAME", "see --log-dir", pet=False),
    Flag("--numa-binding", "MODE", "ranks are not bound to CPUs", pet=False),
)

GROUPS = (
    ("most used", MOST_USED),
    ("as in torchrun", COMPATIBLE),
    ("taken for torchrun's sake, without effect", NO_EFFECT),
)

DESCRIPTION = """\
Train with SCRIPT on one or more nodes and keep going through faults.
Takes torchrun's flags: put `holdfast run` where you had `torchrun`."""

EPILOG = """\
examples:
  holdfast run --nproc-per-node 2 train.py --epochs 3
      two ranks on this machine; one that dies is handed to a standby
  holdfast run --nnodes 2:4 --nproc-per-node gpu --rdzv-backend c10d \\
      --rdzv-endpoint node0:29400 --job llm -m my.train
      the same on each node: between two and four nodes, one rank a GPU

Flags may be written with underscores (--nproc_per_node), and torchrun's may be given as PET_*
variables (PET_NPROC_PER_NODE=2); a flag wins. All after SCRIPT is the script's own."""


def parse_run(argv: Sequence[str]) -> RunSettings:
    """What `holdfast run ARGV` means. Raises UsageError; `--help` prints and exits with 0."""
    parsed, unknown = _parser().parse_known_args(argv)
    if unknown:
        raise UsageError(_unknown(unknown[0]))
    spoken: dict[str, object] = vars(parsed)

    from holdfast.config import settings as config

    command = [str(word) for word in _listed(spoken.get("command"))]
    given = config.Given({**_from_environment(os.environ), **_from_flags(spoken)})
    return config.run_settings(given, command[1:] if command[:1] == ["--"] else command)


def flags() -> Iterator[Flag]:
    for _, group in GROUPS:
        yield from group


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what argparse found in one line, with the spelling that the help shows."""
        match = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
        if match is None:
            raise UsageError(message)
        spelling = next((name for name in match[1].split("/") if name[:2] == "--"), match[1])
        takes = {flag.name: flag.takes for flag in flags()}.get(spelling.replace("_", "-"))
        why = f"{takes} is missing after it" if takes else "takes no value"
        raise UsageError(f"{spelling}: {why}")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="holdfast run",
        usage="holdfast run [flags] SCRIPT [the script's own arguments]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    for title, group in GROUPS:
        section = parser.add_argument_group(title)
        if group is MOST_USED:
            section.add_argument("-h", "--help", action="help", help="show this and exit")
        for flag in group:
            _add(section, flag)
    # "A...": one word and all that follows it. Not REMAINDER after a positional, as torchrun has
    # it: that loses a "--" that is meant for the script.
    script = parser.add_argument("command", nargs="A...", help=argparse.SUPPRESS)
    script.required = False  # a missing script is told after an unknown flag
    return parser


def _add(section: argparse._ArgumentGroup, flag: Flag) -> None:
    """Add a flag; the spelling with underscores is a twin that the help does not show."""
    shown = tuple(name for name in flag.spellings if "_" not in name)
    for names, text in ((shown, flag.help), (flag.spellings[len(shown) :], argparse.SUPPRESS)):
        if not names:
            continue
        if flag.takes is None:
            section.add_argument(*names, dest=flag.key, action="store_true", help=text)
        else:
            action = "append" if flag.many else "store"
            section.add_argument(
                *names, dest=flag.key, action=action, metavar=flag.takes, help=text
            )


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def _from_flags(spoken: Mapping[str, object]) -> dict[str, Said]:
    from holdfast.config.settings import Said

    said: dict[str, Said] = {}
    for flag in flags():
        value = spoken.get(flag.key)
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            said[flag.key] = Said(text, flag.name)
    return said


def _from_environment(environ: Mapping[str, str]) -> dict[str, Said]:
    """torchrun's variables. An empty one counts as not set, and 0 switches nothing on."""
    from holdfast.config.settings import Said
    from holdfast.config.values import yes_or_no

    said: dict[str, Said] = {}
    for flag in flags():
        variable = next((name for name in flag.variables if environ.get(name)), None)
        if variable is None:
            continue
        text = environ[variable]
        if flag.takes is not None or yes_or_no(text, variable):
            said[flag.key] = Said(text, variable)
    return said


def _unknown(word: str) -> str:
    """One line for a flag that is none, with the one that was probably meant."""
    from difflib import get_close_matches

    spelt = word.partition("=")[0]
    name = spelt.lstrip("-").replace("_", "-")
    known = [flag.name.lstrip("-") for flag in flags()]
    begins = [flag for flag in known if name and flag.startswith(name)]
    near = begins or get_close_matches(name, known, n=1)
    hint = f"did you mean --{near[0]}?" if near else "`holdfast run --help` lists them"
    return f"unknown flag {spelt}; {hint}"

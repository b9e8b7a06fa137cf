"""`holdfast COMMAND ...`: finds the command's module and turns errors into lines and exit codes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from holdfast.errors import HoldfastError

COMMANDS = {
    "run": "start a training script, in place of torchrun, and keep it going",
    "coordinator": "run a job's coordinator alone, for nodes that join with --coordinator",
    "status": "where a job stands: state, round, step, speed, nodes",
    "incidents": "each fault of a job: what, where, what was done, seconds lost by phase",
    "goodput": "where every second of every rank went",
    "check": "is this node fit to train: processors, memory, disks, GPUs, network",
    "ckpt": "checkpoints: which there are, whether they are good, one file out of one",
    "why": "where every rank stands now, and who waits for whom",
    "chaos": "inject a fault into a running job, to see how it recovers",
    "sim": "a simulated cluster over the real core: faults, invariants, goodput",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "--version":
        from holdfast import __version__

        print(f"holdfast {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"holdfast: no command {command!r}; see `holdfast --help`", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"holdfast.cli.{command}")
        code: int = module.main(rest)
        return code
    except HoldfastError as error:
        print(f"holdfast {command}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"""usage: holdfast COMMAND ...

Training that does not stop: a dead process, a hung rank or a killed coordinator
costs tenths of a second, and the report says where every lost second went.

{commands}

Try:
  holdfast run --nproc-per-node 2 train.py --lr 0.1   where you typed torchrun
  holdfast goodput                                    the newest job's seconds by cause

`holdfast COMMAND --help` tells more about each."""

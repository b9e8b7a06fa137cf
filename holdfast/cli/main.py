"""`holdfast COMMAND` runs the command's module and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from holdfast.errors import HoldfastError

COMMANDS = {
    "run": "start a training script, in place of torchrun, and keep it going",
    "up": "run a job whose nodes come and go: on this machine, or on a cluster",
    "submit": "submit a job to a cluster, where it runs by itself",
    "coordinator": "run a job's coordinator alone, for nodes that join with --coordinator",
    "operator": "run jobs on Kubernetes that are described by HoldfastJob resources",
    "config": "every setting, its value and which flag, variable or file it came from",
    "status": "state of a job: round, step, speed, nodes",
    "top": "a running job on the screen: ranks, goodput, incidents, as they change",
    "incidents": "each fault of a job: what, where, what was done, seconds lost by phase",
    "web": "show jobs in a browser: timeline, goodput, incidents, checkpoints, nodes",
    "goodput": "seconds of every rank by cause",
    "report": "a job on one page: HTML, Markdown or JSON, to be mailed or attached to a ticket",
    "metrics": "a job's numbers for Prometheus and OpenTelemetry",
    "trace": "a job as a file that Perfetto opens: what every rank did, incidents, saves",
    "check": "health checks of this node: processors, memory, disks, GPUs, network",
    "data": "which records of its data sets a job has used, and whether each was used once",
    "ckpt": "list, verify and export checkpoints",
    "why": "where every rank is now, and which ranks wait for which",
    "hang": "decide about a rank that others wait for: end it now, or never",
    "tune": "show or change settings of data loaders: micro-batch, workers, prefetch",
    "scale": "change the number of nodes of a running job",
    "chaos": "inject a fault into a running job",
    "sim": "simulate a cluster over the real core: faults, invariants, goodput",
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
costs tenths of a second, and the report names the cause of every lost second.

{commands}

Try:
  holdfast run --nproc-per-node 2 train.py --lr 0.1   in place of torchrun
  holdfast goodput                                    the newest job's seconds by cause

`holdfast COMMAND --help` explains each."""

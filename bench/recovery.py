"""How fast, and how surely, training is back after a rank died: holdfast beside its peers.

One plain torchrun script (scripts/ddp.py: DDP over gloo on CPU) runs under each launcher; the
script itself writes down each finished step, so every launcher is measured the same way. Launchers
take turns, because machines are noisy, and what is to be believed are the ratios of one run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from harness import command, launchers, peers
from harness.report import Report
from harness.setting import Setting, say
from modes import frameworks, goodput, many_kills, nodes, one_kill, steady

OWN: dict[str, Callable[[], launchers.Launcher]] = {
    "plain": launchers.plain,
    "torchrun": launchers.torchrun,
    "holdfast": launchers.holdfast,
}
CACHE = Path(__file__).resolve().parent.parent / ".bench"
SHORT_STEP = ["--pause-ms=0", "--batch=256", "--width=256"]
"""About 5 ms of work a step on two cores of 2024, none of it idle."""

EXAMPLES = """\
modes (default: one kill a job, --tries jobs a launcher):
  recovery.py                          torchrun and holdfast, 5 tries each
  recovery.py --peers --json out.json  DLRover and NVRx too, installed into .bench/ the first time
  recovery.py --only torchrun,nvrx     just these (of plain, torchrun, holdfast, dlrover, nvrx)
  recovery.py --every 10 --for 60      a kill every 10 s for a minute: goodput against a calm minute
  recovery.py --kills 100              one job, 100 kills in a row: times, and what is left behind
  recovery.py --kills 100 --settle 5   the same with 5 s of training before each kill
  recovery.py --nodes 2                2 nodes of 2 ranks: a worker, a node, the coordinator dies
  recovery.py --cuda gloo              the model on GPUs; also nccl, which needs a GPU for each rank
  recovery.py --frameworks             transformers' Trainer, accelerate and Lightning, a kill each
  recovery.py --steady                 nothing killed: the cost of being watched on a 5 ms step

recovery is from the SIGKILL of one rank to the moment every rank has finished a step in a new life
of the script. --kills exits with 1 if a kill was not survived or anything was left behind; the
other modes only measure. Ctrl-C ends the bench and every process it started.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--every", type=float, metavar="S", help="goodput: kill a rank every S seconds"
    )
    mode.add_argument(
        "--kills", type=int, metavar="N", help="one job, N kills in a row (holdfast; see --only)"
    )
    mode.add_argument(
        "--frameworks",
        nargs="?",
        const=",".join(frameworks.PROGRAMS),
        metavar="NAMES",
        help="one kill a job, in scripts of these frameworks (transformers,accelerate,lightning)",
    )
    mode.add_argument("--steady", action="store_true", help="cost per step with nothing killed")
    mode.add_argument(
        "--nodes",
        type=int,
        choices=[nodes.NODES],
        help="several nodes: a worker, a node, the coordinator is killed (holdfast)",
    )
    add(
        "--for",
        dest="length",
        type=float,
        default=60.0,
        metavar="S",
        help="with --every: how long (60)",
    )
    add("--steps", type=int, default=600, metavar="N", help="with --steady: steps a run (600)")
    add("--peers", action="store_true", help="take DLRover and NVRx in")
    add("--only", metavar="NAMES", help="just these launchers, separated by commas")
    add("--tries", type=int, metavar="N", help="for each launcher (5; --steady 10; --every 1)")
    add("--ranks", type=int, default=2, metavar="N", help="processes to train with (2)")
    add(
        "--cuda",
        choices=("gloo", "nccl"),
        metavar="BACKEND",
        help="train on GPUs, with gloo or nccl between the ranks",
    )
    add(
        "--settle",
        type=float,
        metavar="S",
        help="train so long before a kill or measurement (5; --kills 0; --frameworks 20)",
    )
    add(
        "--limit",
        type=float,
        default=60.0,
        metavar="S",
        help="what takes longer counts as hung (60)",
    )
    add(
        "--script-args",
        default="",
        metavar="ARGS",
        help="for scripts/ddp.py: --script-args=--pause-ms=50",
    )
    add(
        "--cache",
        type=Path,
        default=CACHE,
        metavar="DIR",
        help="where peers are installed (.bench)",
    )
    add("--keep", type=Path, metavar="DIR", help="keep each job's folder with its logs here")
    add(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to a file, or to standard output"
    )
    return _checked(parser, parser.parse_args())


def _checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Refuse what makes no sense and fill in the defaults that depend on the mode."""
    for name in ("every", "kills", "tries", "length", "steps", "limit"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{'for' if name == 'length' else name} must be more than 0")
    fewest = 1 if args.cuda else 2
    if args.ranks < fewest:
        parser.error(f"--ranks must be at least {fewest}")
    if args.keep and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} is not empty")
    if args.tries is None:
        args.tries = 10 if args.steady else 1 if args.every else 5
    if args.settle is None:
        args.settle = 0.0 if args.kills else 20.0 if args.frameworks else 5.0
    if unknown := sorted(set((args.frameworks or "").split(",")) - {"", *frameworks.PROGRAMS}):
        parser.error(f"--frameworks does not know {', '.join(unknown)}")
    args.names = _names(args)
    known = [*OWN, *peers.PEERS]
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"--only does not know {', '.join(unknown)}; it knows {', '.join(known)}")
    if "plain" in args.names and not args.steady:
        parser.error("plain brings nothing back; it only takes part in --steady")
    return args


def _names(args: argparse.Namespace) -> list[str]:
    if args.only:
        chosen = [name.strip() for name in args.only.split(",")]
    elif args.kills or args.nodes:
        chosen = ["holdfast"]
    else:
        chosen = ["torchrun", "holdfast", *(peers.PEERS if args.peers else ())]
    return ["plain", *(name for name in chosen if name != "plain")] if args.steady else chosen


def _launcher(name: str, args: argparse.Namespace) -> launchers.Launcher:
    return OWN[name]() if name in OWN else peers.peer(name, args.cache, say)


def _script(args: argparse.Namespace) -> list[str]:
    """Arguments of scripts/ddp.py for this mode."""
    device = ["--device=cuda", f"--backend={args.cuda}"] if args.cuda else []
    return [*(SHORT_STEP if args.steady else ()), *device]


def _report(args: argparse.Namespace, folder: Path) -> Report:
    setting = Setting(
        launchers=[_launcher(name, args) for name in args.names],
        ranks=args.ranks * (args.nodes or 1),
        tries=args.tries,
        limit=args.limit,
        settle=args.settle,
        script=[*_script(args), *args.script_args.split()],
        folder=folder,
        keep_logs=args.keep is not None,
    )
    if args.every:
        return goodput.run(setting, args.every, args.length)
    if args.kills:
        return many_kills.run(setting, args.kills)
    if args.nodes:
        return nodes.run(setting)
    if args.frameworks:
        return frameworks.run(setting, args.frameworks.split(","))
    return steady.run(setting, args.steps) if args.steady else one_kill.run(setting)


def main() -> int:
    args = arguments()
    return command.run(args, lambda folder: _report(args, folder))


if __name__ == "__main__":
    sys.exit(main())

"""What a checkpoint costs, held against what the machine can do at best and against torch's own.

Every line is a ratio or a difference of times from one run, in which the contestants took turns, and
has the goal that it is held against. Nothing is carried over from other runs or machines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH.parent)]  # Also where holdfast is not installed.

from checkpoints import fresh  # noqa: E402
from checkpoints.cores import Cores  # noqa: E402
from checkpoints.leftovers import remove_leftovers  # noqa: E402
from checkpoints.lines import COLUMNS, Line  # noqa: E402
from checkpoints.setting import Setting  # noqa: E402
from harness import processes  # noqa: E402
from harness.lines import report  # noqa: E402
from harness.report import Report, publish  # noqa: E402
from harness.setting import say  # noqa: E402

from holdfast.checkpoint.memory.image_home import ImageHome, clear_abandoned  # noqa: E402

MEASURES = {
    "save": "checkpoints.saving:repeat",
    "overlap": "checkpoints.overlapping:measure",
    "offload": "checkpoints.offloading:measure",
    "first": "checkpoints.saving:first",
    "small": "checkpoints.saving:small",
    "stall": "checkpoints.stalling:measure",
    "persist": "checkpoints.persisting:measure",
    "restore": "checkpoints.restoring:own",
    "peer": "checkpoints.restoring:peer",
    "kill": "checkpoints.killing:measure",
    "cuda": "checkpoints.cuda:measure",
    "dlrover": "checkpoints.dlrover:measure",
}
EXTRA = ("cuda", "dlrover")
COPIES = 7
"""So many times the state has to fit into memory, for the contestant that needs most."""
GB = 10**9
SIZE_GB, CUDA_GB = 2.0, 8 * 2**30 / GB

EXAMPLES = """\
  checkpoint.py                      all but cuda and dlrover, with 2 GB of state
  checkpoint.py --quick              the same with 0.5 GB and fewer tries: is anything far off?
  checkpoint.py --only save,restore  just these
  checkpoint.py --peers              DLRover too, installed into .bench/ the first time
  checkpoint.py --cuda --json out    only what wants a GPU: 8 GiB of state on the device

Exits with 1 if a goal is missed. Ctrl-C ends the bench, every process it started, and leaves nothing
in /dev/shm.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", metavar="NAMES", help=f"of {', '.join(MEASURES)}; separated by commas")
    add("--size", type=float, metavar="GB", help="of a state (2; --quick 0.5; --cuda 8.59)")
    add("--tries", type=int, metavar="N", help="for each contestant (7; --quick 3)")
    add("--quick", action="store_true", help="small and seldom; for a first look")
    add("--cuda", action="store_true", help="what wants a GPU, and nothing else")
    add("--peers", action="store_true", help="take DLRover in")
    add(
        "--cache",
        type=Path,
        default=BENCH.parent / ".bench",
        metavar="DIR",
        help="where peers are installed (.bench)",
    )
    add("--disk", type=Path, metavar="DIR", help="storage to write to (the temporary folder)")
    add("--keep-logs", type=Path, metavar="DIR", help="keep what the measures print here")
    add(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to a file, or to standard output"
    )
    return _checked(parser, parser.parse_args())


def _checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Refuse what makes no sense, and fill in the defaults that depend on other options."""
    if args.only:
        args.names = [name.strip() for name in args.only.split(",")]
    elif args.cuda:
        args.names = ["cuda"]
    else:
        args.names = [name for name in MEASURES if name not in EXTRA]
        args.names += ["dlrover"] if args.peers else []
    if unknown := sorted(set(args.names) - set(MEASURES)):
        parser.error(f"--only does not know {', '.join(unknown)}; it knows {', '.join(MEASURES)}")
    if args.size is not None and args.size < 0.05:
        parser.error("--size must be at least 0.05")
    if args.tries is None:
        args.tries = 3 if args.quick else 7
    if args.tries < 1:
        parser.error("--tries must be at least 1")
    for name in args.names:
        wanted = 0 if name == "cuda" else COPIES * _size(args, name)
        if wanted > _memory_free():
            parser.error(
                f"{name} takes up to {wanted / GB:.1f} GB of memory, and {_memory_free() / GB:.1f}"
                " are free; give a smaller --size"
            )
    return args


def _size(args: argparse.Namespace, name: str) -> int:
    usual = CUDA_GB if name == "cuda" else SIZE_GB
    chosen = args.size or (usual / 4 if args.quick else usual)
    return int(chosen * GB)


def _memory_free() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _measure(name: str, args: argparse.Namespace, scratch: Path, shm: Path) -> list[Line]:
    folders = [scratch / name, shm / name]
    for folder in folders:
        folder.mkdir()
    setting = Setting(
        size=_size(args, name),
        tries=args.tries,
        quick=args.quick,
        disk=str(folders[0]),
        shm=str(folders[1]),
        cache=str(args.cache.resolve()),
    )
    log = (args.keep_logs or scratch) / f"{name}.log"
    cores = Cores()
    try:
        with log.open("wb") as output:
            found = fresh.call(MEASURES[name], setting.plain(), log=output)
        lines = [Line(**line) for line in found]
    except fresh.TaskError as error:
        tail = log.read_text(errors="replace").strip().splitlines()[-12:]
        say("\n".join(f"  {line}" for line in tail))
        lines = [Line(name, None, why=str(error))]
    finally:
        processes.end_descendants([])
        clear_abandoned()
        remove_leftovers(shm)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    lines = [replace(line, others=cores.used_by_others()) for line in lines]
    for line in lines:
        say(f"{name}: {'  '.join(line.row())}  ({line.told()})")
    return lines


def _report(args: argparse.Namespace, scratch: Path, shm: Path) -> Report:
    load = os.getloadavg()[0]
    found = {name: _measure(name, args, scratch, shm) for name in args.names}
    others = (
        "torch's: the same figure for torch.distributed.checkpoint; others: the share of the cores that"
        " went to processes that are not the bench's"
    )
    return report("checkpoint", found, load, COLUMNS, [others])


def main() -> int:
    args = arguments()
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.keep_logs:
        args.keep_logs.mkdir(parents=True, exist_ok=True)
    home = ImageHome("bench")
    try:
        with tempfile.TemporaryDirectory(
            prefix="hfc-", dir=args.disk, ignore_cleanup_errors=True
        ) as scratch:
            report = _report(args, Path(scratch), home.path)
    except KeyboardInterrupt:
        say("checkpoint.py: interrupted; every process it started has been ended")
        return 130
    finally:
        home.remove()
    options = {key: value for key, value in vars(args).items() if key != "json"}
    publish(report, options, args.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())

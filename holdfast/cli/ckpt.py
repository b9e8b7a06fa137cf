"""`holdfast ckpt`: what checkpoints there are, whether they are good, and one file out of one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.view import Parser, print_json
from holdfast.errors import NotThere, UsageError
from holdfast.view.terminal import print_table

if TYPE_CHECKING:
    from holdfast.checkpoint.storage.backends import Readable
    from holdfast.checkpoint.storage.manifest import StepFound
    from holdfast.checkpoint.storage.verify import Refusal

ABOUT = """\
usage: holdfast ckpt ls|verify|export DIR ...

Looks after checkpoints: DIR is what a script gives to holdfast.Checkpointer, a directory
or a URL such as s3://bucket/prefix; or one checkpoint alone, of a step or of AsyncWriter. No
job needs to run.

  ls       which steps there are, when they were saved, by how many ranks, how large
  verify   read every byte and check it against its digest; exit 1 if one is wrong
  export   put one step into one file, for torch.load or safetensors

A step is *complete* when its manifest (holdfast.json) is there, and with it everything; *partial*
when a save is under way or never came to its end; *refused* when it did not verify, so that a
restore takes an older one. Each is a plain directory that torch.distributed.checkpoint can load.

Try:
  holdfast ckpt ls checkpoints
  holdfast ckpt verify checkpoints --step 5000
  holdfast ckpt export checkpoints --step 5000 --only model --to model.safetensors

`holdfast ckpt ls --help` and so on tell more about each."""


def main(argv: Sequence[str]) -> int:
    commands = {"ls": _ls, "verify": _verify, "export": _export}
    if not argv or argv[0] in ("-h", "--help"):
        print(ABOUT)
        return 0 if argv else 2
    if argv[0] not in commands:
        raise UsageError(f"no command {argv[0]!r}; see `holdfast ckpt --help`")
    return commands[argv[0]](argv[1:])


def _parser(command: str, about: str) -> Parser:
    parser = Parser(prog=f"holdfast ckpt {command}", description=about, raw=True)
    parser.add_argument("dir", metavar="DIR", help="a directory or URL that has checkpoints in it")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def _open(where: str) -> Readable:
    from holdfast.checkpoint.async_save.directory import open_either

    return open_either(where)


# ---- ls -----------------------------------------------------------------------------------------


def _ls(argv: Sequence[str]) -> int:
    arguments = _parser("ls", "Which checkpoints there are, newest first.").parse_args(argv)
    from holdfast.checkpoint.storage.manifest import steps

    rows = [_row(one) for one in steps(_open(arguments.dir))]
    if arguments.json:
        print_json(rows)
    elif not rows:
        print(f"no checkpoints in {arguments.dir}")
    else:
        total = _bytes(sum(row["bytes"] or 0 for row in rows))
        columns = ("step", "state", "saved", "ranks", "size", "round", "job", "")
        print_table(
            f"{arguments.dir}: {len(rows)} steps, {total}", columns, [_texts(row) for row in rows]
        )
    return 0


def _row(found: StepFound) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "step": found.step,
        "state": found.state,
        "why": found.why,
        "saved_at": manifest and manifest.saved_at.isoformat(),
        "world_size": manifest and manifest.world_size,
        "round": manifest and manifest.round,
        "job": manifest and manifest.job,
        "bytes": manifest and manifest.total_bytes,
    }


def _texts(row: dict[str, Any]) -> list[str]:
    known = row["saved_at"] is not None
    saved = row["saved_at"][:19].replace("T", " ") + " UTC" if known else "-"
    size = _bytes(row["bytes"]) if known else "-"
    numbers = [str(row[key]) if known else "-" for key in ("world_size", "round", "job")]
    return [str(row["step"]), row["state"], saved, numbers[0], size, *numbers[1:], row["why"]]


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


# ---- verify -------------------------------------------------------------------------------------


def _verify(argv: Sequence[str]) -> int:
    parser = _parser(
        "verify",
        "Read checkpoints whole and check every byte against its digest. Says which file and which\n"
        "block is wrong, and exits with 1 if any is. What is not committed is not looked at.",
    )
    parser.add_argument("--step", type=int, metavar="N", help="this step alone; else all")
    arguments = parser.parse_args(argv)
    from holdfast.checkpoint.storage.manifest import find_step, steps

    storage = _open(arguments.dir)
    found = steps(storage) if arguments.step is None else [find_step(storage, arguments.step)]
    chosen = [one for one in found if one.state != "partial"]
    if not chosen:
        what = "" if arguments.step is None else f" of step {arguments.step}"
        raise NotThere(f"{arguments.dir}: there is no checkpoint{what}; see `holdfast ckpt ls`")
    results = [_verified(storage, one, quiet=arguments.json) for one in chosen]
    if arguments.json:
        print_json(results)
    return 1 if any(result["refusals"] for result in results) else 0


def _verified(storage: Readable, found: StepFound, quiet: bool) -> dict[str, Any]:
    from holdfast.checkpoint.storage.verify import Refusal, verify

    size = found.manifest.total_bytes if found.manifest else 0
    if found.state == "refused" and found.manifest is None:
        refusals = [Refusal("holdfast.json", found.why)]
    else:
        with _progress(f"step {found.step}", size, quiet) as went_on:
            refusals = verify(storage, found.step, went_on)
    if not quiet:
        print("\n".join(_told(found.step, size, refusals)), flush=True)
    told = [{"file": r.file, "block": r.block, "why": r.why} for r in refusals]
    return {"step": found.step, "bytes": size, "refusals": told}


def _told(step: int, size: int, refusals: list[Refusal]) -> Iterator[str]:
    if not refusals:
        yield f"step {step}: verified, {_bytes(size)}"
    for one in refusals:
        where = one.file if one.block is None else f"{one.file}, block {one.block}"
        yield f"step {step}: refused: {where}: {one.why}"


# ---- export -------------------------------------------------------------------------------------


def _export(argv: Sequence[str]) -> int:
    parser = _parser(
        "export",
        "Put the state of one step into one file. Shards become whole tensors; every byte is\n"
        "verified as it is read. What ranks had each for themselves is rank 0's.",
    )
    parser.add_argument("--step", type=int, metavar="N", help="which one; else the newest complete")
    parser.add_argument(
        "--to",
        required=True,
        metavar="FILE",
        help="FILE.pt: the state as it was, for torch.load;"
        " FILE.safetensors: its tensors, by dotted names",
    )
    parser.add_argument("--only", metavar="NAME", help="one entry of the state, such as model")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    parser.add_argument(
        "--pickle",
        action="store_true",
        help="unpickle objects that the script saved with pickling=True; they may run any code",
    )
    arguments = parser.parse_args(argv)
    from holdfast.checkpoint.storage.export import check_target, export

    target = Path(arguments.to)
    check_target(target, arguments.force)
    storage = _open(arguments.dir)
    found = _complete(storage, arguments.dir, arguments.step)
    size = found.manifest.total_bytes if found.manifest else 0
    with _progress(f"step {found.step}", size, arguments.json) as went_on:
        done = export(
            storage,
            found.step,
            target,
            only=arguments.only,
            force=arguments.force,
            pickling=arguments.pickle,
            went_on=went_on,
        )
    if arguments.json:
        told = {"step": found.step, "file": done.path, "bytes": done.size}
        print_json({**told, "tensors": done.tensors, "left_out": done.left_out})
        return 0
    print(f"step {found.step}: {done.tensors} tensors, {_bytes(done.size)}, in {done.path}")
    if done.left_out:
        print(f"{done.left_out} values are no tensors and are left out; FILE.pt would have them")
    return 0


def _complete(storage: Readable, where: str, step: int | None) -> StepFound:
    from holdfast.checkpoint.storage.manifest import find_step, steps

    found = steps(storage) if step is None else [find_step(storage, step)]
    complete = [one for one in found if one.state == "complete"]
    if not complete:
        why = f" of step {step}: {found[0].why}" if step is not None else ""
        raise NotThere(f"{where}: there is no complete checkpoint{why}; see `holdfast ckpt ls`")
    return complete[0]


# ---- progress -----------------------------------------------------------------------------------


@contextmanager
def _progress(what: str, size: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """How far long work is: a bar on a terminal, elsewhere a line now and then."""
    if quiet:
        yield lambda more: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=size)
            yield lambda more: bar.advance(task, more)
    else:
        yield _Lines(what, size)


class _Lines:
    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._done = 0
        self._told_at = time.monotonic()

    def __call__(self, more: int) -> None:
        self._done += more
        if time.monotonic() - self._told_at > 10:
            self._told_at = time.monotonic()
            done = f"{_bytes(self._done)} of {_bytes(self._size)}"
            print(f"{self._what}: {done}", file=sys.stderr, flush=True)

"""`holdfast ckpt`: lists checkpoints, verifies them, and exports one into a single file."""

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
    from holdfast.checkpoint.dcp.foreign import PlainCheckpoint
    from holdfast.checkpoint.storage.backends import Readable
    from holdfast.checkpoint.storage.commit import Refusal
    from holdfast.checkpoint.storage.manifest import Manifest, StepFound

ABOUT = """\
usage: holdfast ckpt ls|verify|export DIR ...

Looks after checkpoints: DIR is what a script gives to holdfast.Checkpointer, a directory
or a URL such as s3://bucket/prefix; or one checkpoint alone, of a step or of AsyncWriter. No
job needs to run.

  ls       list the steps: when they were saved, by how many ranks, how large they are
  verify   read every byte and check it against its digest; exit 1 if one is wrong
  export   put one step into one file, for torch.load or safetensors

A step is *complete* when its manifest (holdfast.json) is there, and with it everything; *partial*
while a save is under way, or if it never finished; *refused* if it did not verify, so that a restore
takes an older one. Each is a plain directory that torch.distributed.checkpoint can load.

What plain torch.distributed.checkpoint saved is listed and exported too. It is *unverified*: it has
no digests. Checkpointer.restore(start_from=DIR) starts a job from it.

Try:
  holdfast ckpt ls checkpoints
  holdfast ckpt verify checkpoints --step 5000
  holdfast ckpt export checkpoints --step 5000 --only model --to model.safetensors

`holdfast ckpt ls --help` and so on tell more about each."""

_NO_DIGESTS = "saved by plain torch.distributed.checkpoint, it has no digests"


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
    from holdfast.checkpoint.storage.plain_directory import open_either

    return open_either(where)


def _found(storage: Readable, step: int | None) -> tuple[list[StepFound], list[PlainCheckpoint]]:
    """Look for one step, or for all; what Holdfast saved, and what plain DCP saved."""
    from holdfast.checkpoint.dcp.foreign import find_plain
    from holdfast.checkpoint.storage.manifest import find_step, steps

    ours = steps(storage) if step is None else [find_step(storage, step)]
    return ours, [one for one in find_plain(storage) if step in (None, one.step)]


# ---- ls -----------------------------------------------------------------------------------------


def _ls(argv: Sequence[str]) -> int:
    arguments = _parser("ls", "List the checkpoints, newest first.").parse_args(argv)
    ours, plain = _found(_open(arguments.dir), None)
    rows = [_row(one) for one in ours] + [_plain_row(one) for one in plain]
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


def _plain_row(found: PlainCheckpoint) -> dict[str, Any]:
    unknown = dict.fromkeys(("saved_at", "world_size", "round", "job"))
    why = f"{found.directory or found.where}: {_NO_DIGESTS}"
    known = {"step": found.step, "state": "unverified", "why": why, "bytes": found.size()}
    return {**unknown, **known}


def _texts(row: dict[str, Any]) -> list[str]:
    keys = ("step", "world_size", "round", "job")
    step, *others = ("-" if row[key] is None else str(row[key]) for key in keys)
    saved = row["saved_at"][:19].replace("T", " ") + " UTC" if row["saved_at"] else "-"
    size = "-" if row["bytes"] is None else _bytes(row["bytes"])
    return [step, row["state"], saved, others[0], size, *others[1:], row["why"]]


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
        "block is wrong, and exits with 1 if any is. Steps that are not committed are left out.",
    )
    parser.add_argument("--step", type=int, metavar="N", help="this step alone; else all")
    arguments = parser.parse_args(argv)
    storage = _open(arguments.dir)
    ours, plain = _found(storage, arguments.step)
    committed = [one for one in ours if one.state != "partial"]
    if not committed and not plain:
        what = "" if arguments.step is None else f" of step {arguments.step}"
        raise NotThere(f"{arguments.dir}: there is no checkpoint{what}; see `holdfast ckpt ls`")
    results = [_verified(storage, one, quiet=arguments.json) for one in committed]
    results += [_unverifiable(one, quiet=arguments.json) for one in plain]
    if arguments.json:
        print_json(results)
    return 1 if any(result["refusals"] for result in results) else 0


def _verified(storage: Readable, found: StepFound, quiet: bool) -> dict[str, Any]:
    from holdfast.checkpoint.storage.commit import Refusal, verify

    size = found.manifest.total_bytes if found.manifest else 0
    if found.state == "refused" and found.manifest is None:
        refusals = [Refusal("holdfast.json", found.why)]
    else:
        with _progress(f"step {found.step}", size, quiet) as on_progress:
            refusals = verify(storage, found.step, on_progress)
    if not quiet:
        print("\n".join(_lines(found.step, size, refusals)), flush=True)
    listed = [{"file": r.file, "block": r.block, "why": r.why} for r in refusals]
    return {"step": found.step, "bytes": size, "refusals": listed}


def _unverifiable(found: PlainCheckpoint, quiet: bool) -> dict[str, Any]:
    if not quiet:
        print(f"{found.where}: cannot be verified: {_NO_DIGESTS}", flush=True)
    refusal = {"file": ".metadata", "block": None, "why": _NO_DIGESTS}
    return {"step": found.step, "bytes": found.size(), "refusals": [refusal]}


def _lines(step: int, size: int, refusals: list[Refusal]) -> Iterator[str]:
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
        "verified as it is read. Of what ranks had each for themselves, rank 0's is taken.",
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
    from holdfast.checkpoint.storage.export import ExportTarget, export, export_plain
    from holdfast.checkpoint.storage.manifest import Manifest

    target = ExportTarget(Path(arguments.to), arguments.only, arguments.force)
    target.check()
    storage = _open(arguments.dir)
    found = _to_export(storage, arguments.dir, arguments.step)
    if isinstance(found, Manifest):
        what = f"step {found.step}"
        with _progress(what, found.total_bytes, arguments.json) as on_progress:
            done = export(storage, found.step, target, arguments.pickle, on_progress)
    else:
        what = f"{found.where} (not verified: {_NO_DIGESTS})"
        done = export_plain(found, target, arguments.pickle)
    if arguments.json:
        counts = {"tensors": done.tensors, "left_out": done.left_out}
        print_json({"step": found.step, "file": done.path, "bytes": done.size, **counts})
        return 0
    print(f"{what}: {done.tensors} tensors, {_bytes(done.size)}, in {done.path}")
    if done.left_out:
        print(f"{done.left_out} values are no tensors and are left out; FILE.pt would have them")
    return 0


def _to_export(storage: Readable, where: str, step: int | None) -> Manifest | PlainCheckpoint:
    """Choose a complete step, or else a plain checkpoint."""
    ours, plain = _found(storage, step)
    for one in ours:
        if one.state == "complete" and one.manifest is not None:
            return one.manifest
    if plain:
        return plain[0]
    why = f" of step {step}: {ours[0].why}" if step is not None else ""
    raise NotThere(f"{where}: there is no complete checkpoint{why}; see `holdfast ckpt ls`")


# ---- progress -----------------------------------------------------------------------------------


@contextmanager
def _progress(what: str, size: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of long work: a bar on a terminal, elsewhere a line every ten seconds."""
    if quiet:
        yield lambda more: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=size)
            yield lambda more: bar.advance(task, more)
    else:
        yield _ProgressLines(what, size)


class _ProgressLines:
    def __init__(self, what: str, size: int) -> None:
        self._what = what
        self._size = size
        self._done = 0
        self._printed_at = time.monotonic()

    def __call__(self, more: int) -> None:
        self._done += more
        if time.monotonic() - self._printed_at > 10:
            self._printed_at = time.monotonic()
            done = f"{_bytes(self._done)} of {_bytes(self._size)}"
            print(f"{self._what}: {done}", file=sys.stderr, flush=True)

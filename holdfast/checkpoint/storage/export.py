"""One file out of a checkpoint, for whoever has no use for directories.

The state is put together as a restore would do it: shards become whole tensors again, every block is
verified as it is read, and nothing is unpickled unless that was allowed. What each rank had for itself
(small tensors, random generators, plain values) is rank 0's.

The file appears under its name only when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.state.layout import Contents
from holdfast.checkpoint.storage import names
from holdfast.checkpoint.storage.backends import Readable
from holdfast.checkpoint.storage.manifest import load_manifest
from holdfast.checkpoint.storage.names import step_directory
from holdfast.checkpoint.storage.rank_file import RankFile, open_file
from holdfast.errors import Refused, UsageError

ENDINGS = (".pt", ".safetensors")


class Exported(Struct, frozen=True):
    path: str
    size: int
    tensors: int
    left_out: int
    """Values that are no tensors, for which a file of tensors has no place."""


def export(
    storage: Readable,
    step: int,
    target: Path,
    *,
    only: str | None = None,
    force: bool = False,
    pickling: bool = False,
    went_on: Callable[[int], None] = lambda size: None,
) -> Exported:
    """Write a step's state, or one entry of it, into a file of the kind that its name says."""
    check_target(target, force)
    state = _state(storage, step, pickling, went_on)
    if only is not None:
        if only not in state:
            raise UsageError(f"step {step} has no {only!r}; it has {', '.join(map(repr, state))}")
        state = state[only]
    with _whole(target, force) as partial:
        save = _save_tensors if target.suffix == ".safetensors" else _save_all
        tensors, left_out = save(state, partial, step)
    return Exported(str(target), target.stat().st_size, tensors, left_out)


def check_target(target: Path, force: bool) -> None:
    """Say at once what would fail after long work."""
    if target.suffix not in ENDINGS:
        raise UsageError(f"{target}: a file to export to ends in {' or '.join(ENDINGS)}")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no directory {target.parent}")
    if target.exists() and not force:
        raise UsageError(f"{target}: is there already; --force replaces it")
    if target.suffix == ".safetensors":
        try:
            import safetensors  # noqa: F401
        except ImportError:
            raise UsageError(f"{target}: needs safetensors; `pip install safetensors`") from None


@contextmanager
def _whole(target: Path, force: bool) -> Iterator[Path]:
    """A temporary name, which becomes the target's when all is written."""
    partial = target.with_name(names.partial(target.name))
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        check_target(target, force)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


# ---- the state ----------------------------------------------------------------------------------


class _Counted:
    """A rank's file that tells how much of it was read."""

    def __init__(self, file: RankFile, went_on: Callable[[int], None]) -> None:
        self.name = file.name
        self.size = file.size
        self.digests = file.digests
        self._file = file
        self._went_on = went_on

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        self._file.read_into(at, views)
        self._went_on(sum(map(len, views)))


def _state(
    storage: Readable, step: int, pickling: bool, went_on: Callable[[int], None]
) -> dict[str, Any]:
    from holdfast.checkpoint.restore.load import load, open_stored

    manifest = load_manifest(storage, step)
    stored = []
    with ExitStack() as files:
        for record in manifest.files:
            path = f"{step_directory(step)}/{record.name}"
            file = files.enter_context(open_file(storage, path))
            if file.trailer_digest != record.trailer:
                raise Refused(f"{file.name}: is another file than the one that was committed")
            trailer = file.trailer
            stored.append(open_stored(_Counted(file, went_on), trailer.contents, trailer.extents))
        state: dict[str, Any] = dict.fromkeys(_entries(stored[0].contents))
        load(state, stored, 0, pickling=pickling)
    return state


def _entries(contents: Contents) -> list[str]:
    """The names that a state has at its top."""
    paths = dict(contents.paths)
    tensors = [name for item in contents.items for name in (item.name, *item.also)]
    every = [*tensors, *(value.name for value in contents.values)]
    return sorted({str((paths.get(name) or name.split("."))[0]) for name in every})


# ---- the file -----------------------------------------------------------------------------------


def _tensors(state: Any) -> tuple[dict[str, Any], int]:
    """All tensors by their dotted names, and how many values are none."""
    import torch

    from holdfast.checkpoint.state.capture import flattened, unique_names

    every = list(flattened(state))
    found = [(path, value) for path, value in every if isinstance(value, torch.Tensor)]
    names = unique_names([path for path, _ in found])
    tensors = dict(zip(names, (value for _, value in found), strict=True))
    return tensors, len(every) - len(tensors)


def _save_all(state: Any, path: Path, step: int) -> tuple[int, int]:
    import torch

    torch.save(state, path)
    return len(_tensors(state)[0]), 0


def _save_tensors(state: Any, path: Path, step: int) -> tuple[int, int]:
    from safetensors.torch import save_file

    tensors, others = _tensors(state)
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # The format knows no tied tensors: each name gets its own copy.
        tied = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        tensors[name] = tensor.clone() if tied else tensor.contiguous()
    save_file(tensors, path, metadata={"format": "pt", "step": str(step)})
    return len(tensors), others

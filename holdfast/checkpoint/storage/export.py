"""Exports a checkpoint into one file.

The state is put together as a restore would do it: shards become whole tensors, every block is verified
as it is read, and nothing is unpickled unless that was allowed. Of what each rank had for itself (small
tensors, random generators, plain values), rank 0's is taken. The keys of modules are those that they
have when nothing wraps them (DDP, torch.compile).

The file appears under its name only when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.dcp.foreign import PlainCheckpoint
from holdfast.checkpoint.state.layout import Contents
from holdfast.checkpoint.storage.backends import Readable, partial_name, step_directory
from holdfast.checkpoint.storage.manifest import load_manifest
from holdfast.checkpoint.storage.rank_file import RankFile, open_listed
from holdfast.errors import UsageError

ENDINGS = (".pt", ".safetensors")


class Exported(Struct, frozen=True):
    """A file that was written."""

    path: str
    size: int
    tensors: int
    left_out: int
    """Number of values that are no tensors, for which a file of tensors has no place."""


class ExportTarget(Struct, frozen=True):
    """The file to write: all of a state, or one entry (`only`) of it."""

    path: Path
    only: str | None = None
    force: bool = False
    """Whether a file of that name is replaced."""

    def check(self) -> None:
        """Raise at once what would fail after long work."""
        path = self.path
        if path.suffix not in ENDINGS:
            raise UsageError(f"{path}: a file to export to ends in {' or '.join(ENDINGS)}")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no directory {path.parent}")
        if path.exists() and not self.force:
            raise UsageError(f"{path}: is there already; --force replaces it")
        if path.suffix == ".safetensors":
            try:
                import safetensors  # noqa: F401
            except ImportError:
                raise UsageError(f"{path}: needs safetensors; `pip install safetensors`") from None

    def write(self, state: dict[str, Any], step: int) -> Exported:
        from holdfast.checkpoint.state.parameter_names import without_wrappers

        chosen: Any = {name: without_wrappers(entry) for name, entry in state.items()}
        if self.only is not None:
            if self.only not in state:
                has = ", ".join(map(repr, state))
                raise UsageError(f"step {step} has no {self.only!r}; it has {has}")
            chosen = chosen[self.only]
        with self._whole() as partial:
            save = _save_tensors if self.path.suffix == ".safetensors" else _save_all
            tensors, left_out = save(chosen, partial, step)
        return Exported(str(self.path), self.path.stat().st_size, tensors, left_out)

    @contextmanager
    def _whole(self) -> Iterator[Path]:
        """Provide a temporary name, which becomes the target's when all is written."""
        partial = self.path.with_name(partial_name(self.path.name))
        try:
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            self.check()
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


def export(
    storage: Readable,
    step: int,
    target: ExportTarget,
    pickling: bool = False,
    on_progress: Callable[[int], None] = lambda size: None,
) -> Exported:
    """Write a step's state into a file."""
    target.check()
    return target.write(_state(storage, step, pickling, on_progress), step)


def export_plain(
    checkpoint: PlainCheckpoint, target: ExportTarget, pickling: bool = False
) -> Exported:
    """Write into a file what plain `torch.distributed.checkpoint` saved; nothing is verified."""
    from holdfast.checkpoint.restore.plain_dcp import plain_state

    target.check()
    return target.write(plain_state(checkpoint, pickling), checkpoint.step or 0)


# ---- the state ----------------------------------------------------------------------------------


class _CountedFile:
    """A rank file that reports how much of it was read."""

    def __init__(self, file: RankFile, on_progress: Callable[[int], None]) -> None:
        self.name = file.name
        self.size = file.size
        self.digests = file.digests
        self._file = file
        self._on_progress = on_progress

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        self._file.read_into(at, views)
        self._on_progress(sum(map(len, views)))


def _state(
    storage: Readable, step: int, pickling: bool, on_progress: Callable[[int], None]
) -> dict[str, Any]:
    from holdfast.checkpoint.restore.load import load
    from holdfast.checkpoint.restore.stored import open_stored

    manifest = load_manifest(storage, step)
    stored = []
    with ExitStack() as files:
        for record in manifest.files:
            file = files.enter_context(open_listed(storage, step_directory(step), record))
            counted, trailer = _CountedFile(file, on_progress), file.trailer
            stored.append(open_stored(counted, trailer.contents, trailer.extents))
        state: dict[str, Any] = dict.fromkeys(_entries(stored[0].contents))
        load(state, stored, 0, pickling=pickling)
    return state


def _entries(contents: Contents) -> list[str]:
    """Return the names at the top of a state."""
    paths = dict(contents.paths)
    tensors = [name for item in contents.items for name in (item.name, *item.also)]
    every = [*tensors, *(value.name for value in contents.values)]
    return sorted({str((paths.get(name) or name.split("."))[0]) for name in every})


# ---- the file -----------------------------------------------------------------------------------


def _tensors(state: Any) -> tuple[dict[str, Any], int]:
    """Return all tensors by their dotted names, and the number of other values."""
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

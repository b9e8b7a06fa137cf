"""Decides which checkpoints are kept, and deletes the others.

A policy chooses among the complete steps: `KeepLatest(3) | KeepEvery(1000)`. It is data, so that it
can be sent to the keeper, which deletes. A user's own policy is any function from the list of steps
to those to keep; it is called in the user's process.

`plan` decides and changes nothing. `prune` deletes and decides nothing, with two exceptions: the newest
complete step always stays, and so does the newest that was verified.

No crash during a deletion leaves a step that looks whole. First the manifest is renamed, durably:
from then on the step is no checkpoint. Then its files and leftovers are removed, then the renamed
manifest, then the directory if it is empty. A renamed manifest marks a deletion that the next prune
resumes. Files that Holdfast did not write stay, and so does their directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from msgspec import Struct

from holdfast.checkpoint.state.layout import FileRecord
from holdfast.checkpoint.storage.backends import (
    DELETED,
    MANIFEST,
    METADATA,
    REFUSED,
    Storage,
    is_aside,
    step_directory,
)
from holdfast.checkpoint.storage.commit import leftovers, metadata_refusals, tidy
from holdfast.checkpoint.storage.manifest import Manifest, StepFound, load_manifest, steps
from holdfast.checkpoint.storage.rank_file import open_file
from holdfast.errors import NotThere, StorageError, Unusable, UsageError

# ---- policies -----------------------------------------------------------------------------------


class _Policy(Struct, frozen=True, tag_field="keep"):
    def __call__(self, steps: list[int]) -> set[int]:
        """Return the steps to keep, of those that are complete."""
        raise NotImplementedError

    def __or__(self, other: _Policy) -> KeepAny:
        return KeepAny((*_alternatives(self), *_alternatives(other)))


class KeepAll(_Policy, frozen=True, tag="all"):
    """Keeps every checkpoint."""

    def __call__(self, steps: list[int]) -> set[int]:
        return set(steps)


class KeepLatest(_Policy, frozen=True, tag="latest"):
    """Keeps the newest `count` checkpoints."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"KeepLatest({self.count}): at least one checkpoint must be kept")

    def __call__(self, steps: list[int]) -> set[int]:
        return set(sorted(steps)[-self.count :])


class KeepEvery(_Policy, frozen=True, tag="every"):
    """Keeps each checkpoint whose step is a multiple of `interval`, for ever."""

    interval: int

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise UsageError(f"KeepEvery({self.interval}): the interval must be at least one step")

    def __call__(self, steps: list[int]) -> set[int]:
        return {step for step in steps if step % self.interval == 0}


class KeepAny(_Policy, frozen=True, tag="any"):
    """Keep the checkpoints that any of several policies keeps."""

    policies: tuple[Policy, ...]

    def __call__(self, steps: list[int]) -> set[int]:
        return set().union(*(policy(steps) for policy in self.policies))


Policy = KeepAll | KeepLatest | KeepEvery | KeepAny
Keep = Callable[[list[int]], Collection[int]]
"""A policy, or a user's own function."""


def _alternatives(policy: _Policy) -> tuple[Policy, ...]:
    if isinstance(policy, KeepAny):
        return policy.policies
    assert isinstance(policy, Policy)
    return (policy,)


# ---- deletion -----------------------------------------------------------------------------------


def plan(
    keep: Keep,
    found: Sequence[StepFound],
    verified: int | None = None,
    busy: Collection[int] = (),
) -> list[int]:
    """Return the steps to delete, oldest first.

    Beside what the policy gives up, these are partial steps older than a complete one, unless they are
    being written now (`busy`). A refused step stays as long as any older complete one, for inspection.
    """
    complete = sorted(one.step for one in found if one.state == "complete")
    if not complete:
        return []
    kept = {*keep(complete), complete[-1], *([] if verified is None else [verified])}
    oldest_kept = min(kept.intersection(complete))

    def goes(one: StepFound) -> bool:
        if one.state == "complete":
            return one.step not in kept
        limit = oldest_kept if one.state == "refused" else complete[-1]
        return one.step < limit and one.step not in kept

    return sorted(one.step for one in found if goes(one) and one.step not in busy)


class Pruned(Struct, frozen=True):
    """What a prune did."""

    steps: tuple[int, ...]
    """Steps that were deleted."""
    shared: tuple[str, ...]
    """Directories that stay because they contain files that Holdfast did not write."""


def prune(storage: Storage, delete: Iterable[int], verified: int | None = None) -> Pruned:
    """Delete these steps, resume deletions that were interrupted, and tidy up the newest step.

    A step that cannot be deleted does not keep the others; its error is raised at the end.
    """
    found = steps(storage)
    newest = next((one for one in found if one.state == "complete"), None)
    wanted = set(delete) - {verified, newest and newest.step}
    doomed = [one for one in reversed(found) if one.step in wanted or one.half_deleted]
    gone, shared, errors = [], [], []
    for one in doomed:
        try:
            emptied = (_delete if one.step in wanted else _resume)(storage, one.step)
        except StorageError as error:
            errors.append(error)
            continue
        gone.append(one.step)
        if not emptied:
            shared.append(storage.where(step_directory(one.step)))
    if newest is not None and newest.manifest is not None:
        tidy(storage, newest.manifest)
    if errors:
        raise errors[0]
    return Pruned(tuple(gone), tuple(shared))


def _delete(storage: Storage, step: int) -> bool:
    """Delete a step; return whether its directory is gone."""
    directory = step_directory(step)
    with suppress(NotThere):
        storage.set_aside(f"{directory}/{MANIFEST}", DELETED)
    present = _files(storage, directory)
    manifests = _set_aside(storage, step, present)
    listed = {file.name for manifest in manifests for file in manifest.files}
    asides = {n for n in present if is_aside(n, DELETED) or is_aside(n, REFUSED)}
    ours = {*leftovers(storage, directory, listed), *listed.intersection(present)}
    ours |= _metadata_of(storage, manifests)
    storage.remove(directory, sorted(ours - asides))
    storage.remove(directory, sorted(asides))
    return storage.remove_directory(directory)


def _resume(storage: Storage, step: int) -> bool:
    """Resume a deletion. The step may be being saved anew: only files that still match the manifest
    that was set aside are removed."""
    directory = step_directory(step)
    present = _files(storage, directory)
    manifests = _set_aside(storage, step, present)
    files = [file for manifest in manifests for file in manifest.files]
    unchanged = {file.name for file in files if _unchanged(storage, directory, file)}
    storage.remove(directory, sorted(unchanged | _metadata_of(storage, manifests)))
    storage.remove(directory, [name for name in present if is_aside(name, DELETED)])
    return storage.remove_directory(directory)


def _files(storage: Storage, directory: str) -> list[str]:
    return [entry.name for entry in storage.entries(directory) if entry.kind == "file"]


def _set_aside(storage: Storage, step: int, present: list[str]) -> list[Manifest]:
    """Load the manifests whose deletion has begun."""
    found = []
    for name in present:
        if is_aside(name, DELETED):
            with suppress(Unusable):  # Then rank files are recognised by name and footer.
                found.append(load_manifest(storage, step, name))
    return found


def _unchanged(storage: Storage, directory: str, record: FileRecord) -> bool:
    try:
        with open_file(storage, f"{directory}/{record.name}") as file:
            return file.trailer_digest == record.trailer
    except (NotThere, Unusable):
        return False


def _metadata_of(storage: Storage, manifests: list[Manifest]) -> set[str]:
    """Return `.metadata`, if it belongs to one of these manifests."""
    matching = (one for one in manifests if not metadata_refusals(storage, one))
    return {METADATA for _ in matching}

"""Which checkpoints are kept, and how the others go.

A policy says what to keep of the steps that are complete: `KeepLatest(3) | KeepEvery(1000)`. It is
data, so that it can be sent to the process that deletes. A user's own policy is any function from the
list of steps to those to keep; it is called where it was written, and only its answer is sent.

`plan` decides and changes nothing; `prune` deletes and decides nothing, but for two refusals: whatever
it is told, the newest complete step stays, and so does the newest that was verified.

A step is deleted so that no death on the way leaves half of one that looks whole. First the manifest
gets another name, durably: from here on it is no checkpoint. Then go the files that it lists and what
saves left behind, then the manifest under its other name, then the directory if nothing else is in
it. A step that has that other name in it was being deleted, and the next prune goes on with it. What
is not ours stays, and so does the directory around it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

from msgspec import Struct

from holdfast.checkpoint.storage import names
from holdfast.checkpoint.storage.backends import Storage
from holdfast.checkpoint.storage.commit import leftovers, tidy
from holdfast.checkpoint.storage.manifest import Manifest, StepFound, load_manifest, steps
from holdfast.checkpoint.storage.names import DELETED, MANIFEST, METADATA, REFUSED, step_directory
from holdfast.checkpoint.storage.rank_file import FileRecord, open_file
from holdfast.checkpoint.storage.verify import metadata_refusals
from holdfast.errors import NotThere, Refused, StorageError, UsageError

# ---- policies -----------------------------------------------------------------------------------


class _Policy(Struct, frozen=True, tag_field="keep"):
    def __call__(self, steps: list[int]) -> set[int]:
        """The steps to keep, of those that are complete."""
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
            raise UsageError(f"KeepEvery({self.interval}): an interval has at least one step")

    def __call__(self, steps: list[int]) -> set[int]:
        return {step for step in steps if step % self.interval == 0}


class KeepAny(_Policy, frozen=True, tag="any"):
    """Those that any of several policies keeps."""

    policies: tuple[Policy, ...]

    def __call__(self, steps: list[int]) -> set[int]:
        return set().union(*(policy(steps) for policy in self.policies))


Policy = KeepAll | KeepLatest | KeepEvery | KeepAny
Keep = Callable[[list[int]], Collection[int]]
"""A policy, or a user's own."""


def _alternatives(policy: _Policy) -> tuple[Policy, ...]:
    if isinstance(policy, KeepAny):
        return policy.policies
    assert isinstance(policy, Policy)
    return (policy,)


# ---- what is to go ------------------------------------------------------------------------------


def plan(
    keep: Keep,
    found: Sequence[StepFound],
    verified: int | None = None,
    busy: Collection[int] = (),
) -> list[int]:
    """The steps to delete, oldest first.

    Beside what the policy lets go, that is what saves left behind that never came to their end, if a
    newer step is complete and they are not being written now (`busy`). One that was refused stays as
    long as any complete one that is older does: somebody may want to look at it.
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
    steps: tuple[int, ...]
    """What was deleted."""
    shared: tuple[str, ...]
    """Directories that stay because somebody else has files in them."""


def prune(storage: Storage, delete: Iterable[int], verified: int | None = None) -> Pruned:
    """Delete these steps, and what is left of those whose deletion did not come to its end; and tidy
    up the newest one, if the save that made it could not.

    One step that cannot be deleted does not keep the others; then the error comes at the end.
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
    """Delete a step; whether nothing of its directory is left."""
    directory = step_directory(step)
    with suppress(NotThere):
        storage.set_aside(f"{directory}/{MANIFEST}", DELETED)
    present = _files(storage, directory)
    manifests = _set_aside(storage, step, present)
    listed = {file.name for manifest in manifests for file in manifest.files}
    asides = {n for n in present if names.is_aside(n, DELETED) or names.is_aside(n, REFUSED)}
    ours = {*leftovers(storage, directory, listed), *listed.intersection(present)}
    ours |= _metadata_of(storage, manifests)
    storage.remove(directory, sorted(ours - asides))
    storage.remove(directory, sorted(asides))
    return storage.remove_directory(directory)


def _resume(storage: Storage, step: int) -> bool:
    """Go on with a deletion. The step may be being saved anew: only what is still as the manifest
    that was set aside has it goes."""
    directory = step_directory(step)
    present = _files(storage, directory)
    manifests = _set_aside(storage, step, present)
    files = [file for manifest in manifests for file in manifest.files]
    unchanged = {file.name for file in files if _unchanged(storage, directory, file)}
    storage.remove(directory, sorted(unchanged | _metadata_of(storage, manifests)))
    storage.remove(directory, [name for name in present if names.is_aside(name, DELETED)])
    return storage.remove_directory(directory)


def _files(storage: Storage, directory: str) -> list[str]:
    return [entry.name for entry in storage.entries(directory) if entry.kind == "file"]


def _set_aside(storage: Storage, step: int, present: list[str]) -> list[Manifest]:
    """Manifests whose files' deletion has begun."""
    found = []
    for name in present:
        if names.is_aside(name, DELETED):
            with suppress(Refused):  # Then what is ours must be told by its name and its end.
                found.append(load_manifest(storage, step, name))
    return found


def _unchanged(storage: Storage, directory: str, record: FileRecord) -> bool:
    try:
        with open_file(storage, f"{directory}/{record.name}") as file:
            return file.trailer_digest == record.trailer
    except (NotThere, Refused):
        return False


def _metadata_of(storage: Storage, manifests: list[Manifest]) -> set[str]:
    """`.metadata`, if it is of one of these."""
    matching = (one for one in manifests if not metadata_refusals(storage, one))
    return {METADATA for _ in matching}

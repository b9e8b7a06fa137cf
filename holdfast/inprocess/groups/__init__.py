"""Ends the waits of process groups, and clears them away so that they can be made anew.

When a function must be left, its thread may wait in a collective for a peer that is gone, or in the
making of a group. `abort_groups`, called by another thread, ends all such waits: NCCL's with its own
abort, gloo's and the stores' by shutting down their connections, and no others'. When the function is
gone, `forget_groups` destroys what it made.

A group lives as long as something holds it: DDP modules, meshes, tensors. The frames of the exception
with which the function ended hold all of it, so `forget_groups` clears them. What the script keeps in
objects that outlive the function stays: its connections are shut down, but its thread and descriptors
remain until the script lets go of it.

DDP's modules go with their last reference, those of FSDP2 hold themselves in cycles and wait for the
garbage collector. With all of torch imported a collection takes some 0.3 s, so that what exists before
the function is first called is taken out of it (`gc.freeze`).
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

from holdfast.inprocess.groups import gloo, records
from holdfast.inprocess.groups.stores import Stores

_log = logging.getLogger(__name__)

ABORT_LIMIT_S = 0.1
"""How long an abort is waited for. NCCL's frees whoever waits at once, and then takes a second to clear
its own threads away, which can be done while others are made."""
_LOOKS, _LOOK_EVERY_S = 5, 0.001


class _Watched:
    """What is known of this process's groups beyond what torch knows."""

    stores = Stores()
    frozen = False
    aborted = False
    aborting: ClassVar[dict[tuple[str, str], threading.Thread]] = {}
    """Threads that abort what is not gloo's, by group and device."""
    kept: ClassVar[set[int]] = set()
    """Threads of groups that the script holds on to."""


def watch() -> None:
    """Prepare, before the function is first called."""
    import torch.distributed as dist

    if dist.is_available():
        # The attribute of this name is a function.
        _Watched.stores.watch(import_module("torch.distributed.rendezvous"))
    if not gc.get_freeze_count():  # The script may freeze and unfreeze by itself.
        gc.freeze()
        _Watched.frozen = True


def unwatch() -> None:
    """Put all as it was, once the function will not be called again."""
    _Watched.stores.unwatch()
    if _Watched.frozen:
        gc.unfreeze()
        _Watched.frozen = False


def abort_groups() -> bool:
    """End all waits for other ranks in this process; return whether that was done within the limit, or
    goes on in the background.

    The groups are unusable afterwards. May be called again: a function that has not been left may have
    made others.
    """
    _Watched.aborted = True
    gloo.abort(_pairs())
    _Watched.stores.abort()
    return _abort_others()


def forget_groups(*errors: BaseException | None) -> None:
    """Destroy all groups, in the thread that ran the function, once this is gone.

    The frames of the exceptions are cleared (see `drop_frames`).
    """
    if not _Watched.aborted:
        abort_groups()
    else:  # What was made since.
        gloo.abort(0)
        _abort_others()
    records.release_works()  # While the frames hold their tensors.
    for error in errors:
        drop_frames(error)
    alive = _destroy()
    if not _gone_soon(alive):
        gc.collect()  # Held by a cycle of references, perhaps.
        _Watched.kept = set(gloo.threads())
    _Watched.stores.forget()
    _Watched.aborting.clear()
    _Watched.aborted = False


def drop_frames(error: BaseException | None) -> None:
    """Let go of all that the frames of an exception hold, and of those that it was raised from.

    Its text remains; a traceback must be formatted before.
    """
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _pairs() -> int:
    """Return how many peers a rank has at most."""
    sizes: list[int] = [group.size() for group in records.groups()]
    world = os.environ.get("WORLD_SIZE", "")
    return max([*sizes, int(world) if world.isdigit() else 1]) - 1


def _destroy() -> list[weakref.ref[Any]]:
    """Make torch forget the groups; return references to them.

    They are not shut down in order: that would wait for the peers of an operation that was aborted.
    """
    alive = [weakref.ref(group) for group in records.groups()]
    records.clear()
    return alive


def _gone_soon(groups: list[weakref.ref[Any]]) -> bool:
    """Return whether nothing is left of the groups. The kernel shows a thread a little longer than it
    runs."""
    for _ in range(_LOOKS):
        if any(group() is not None for group in groups):
            return False
        if not set(gloo.threads()) - _Watched.kept:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _abort_others() -> bool:
    """Abort what is not gloo's, each in a thread of its own: it waits for the device, which may be
    stuck, or for an operation of another communicator that is yet to be aborted."""
    for key, backend in _other_backends():
        if key not in _Watched.aborting:
            thread = threading.Thread(
                target=_abort, args=(backend,), name="holdfast-abort", daemon=True
            )
            _Watched.aborting[key] = thread
            thread.start()
    aborting = list(_Watched.aborting.values())
    deadline = time.monotonic() + ABORT_LIMIT_S
    for thread in aborting:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in aborting)


def _other_backends() -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield the backends that have an abort of their own; gloo's frees nobody."""
    for group in records.groups():
        for device in group._device_types:
            try:
                backend = group._get_backend(device)
            except RuntimeError:
                continue  # Made by the first collective, which has not come.
            while hasattr(backend, "wrapped_pg"):  # With TORCH_DISTRIBUTED_DEBUG=DETAIL.
                backend = backend.wrapped_pg
            if backend.name() != "gloo":
                yield (group.group_name, device.type), backend


def _abort(backend: Any) -> None:
    # Whatever a backend raises, the others are dealt with; a process that does not leave is replaced.
    try:
        backend.abort()
    except Exception as error:
        _log.warning("the %s backend of a process group failed to abort: %s", backend.name(), error)

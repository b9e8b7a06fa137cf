"""Forks the workers of a node from one process that has imported everything.

A fork takes milliseconds where a start with imports takes seconds, all children share the memory of the
imports, and however many ranks a node has, it imports once. The first round starts from it as well. A
child must be the agent's and not the nursery's, so that the agent can wait for it and it outlives a
nursery that dies. So each is forked twice, and the agent, a subreaper, becomes its parent. `serve`
returns in the child: nothing of the nursery is on the stack when the user's script runs.

Importing torch is not enough: the first optimizer step imports more. So the nursery rehearses one, see
`holdfast.worker.rehearsal`. No accelerator may be touched: a process forked from one that has as much
as counted its GPUs cannot use them, which `_can_fork` verifies. Only standbys touch them, and only when
they are told to (`holdfast.worker.standing`).

What the script will import from Holdfast is imported next (`holdfast.worker.own_imports`), and what
else it is known to import last (`holdfast.worker.preloading`).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.messages.local import (
    NOT_FORKABLE,
    UNFIT,
    Forked,
    ImportPlan,
    ToNursery,
    UnfitImports,
    Warm,
)
from holdfast.worker import rehearsal
from holdfast.worker.channel import Channel
from holdfast.worker.deferred_compiler import COMPILER
from holdfast.worker.loaded_modules import NAMES_PER_MESSAGE
from holdfast.worker.own_imports import own_modules
from holdfast.worker.preloading import preload as preload_plan
from holdfast.worker.preloading import resident_bytes

log = logging.getLogger("holdfast.worker")

_decoder = msgspec.msgpack.Decoder(ToNursery)


class ForkedProcess(NamedTuple):
    """What a forked process starts with."""

    control_fd: int
    page_fd: int
    rehearse: bool
    preloaded: frozenset[str]
    """Modules that the nursery has imported for the script."""


def serve(
    channel: Channel, preload: Sequence[str], plan: ImportPlan, eager: bool
) -> ForkedProcess | None:
    """Fork for the agent until it is gone, then return None; in each child, return its start.

    An eager nursery imports first, because the first ranks need it all anyway. One that is not (the
    script does not seem to use torch) starts the first ranks, then prepares for their successors.
    """
    warm = False
    preloaded: frozenset[str] = frozenset()
    if eager:
        preloaded = _warm_up(channel, preload, plan)
        warm = True
    while True:
        packet, fds = channel.receive(max_fds=2)
        if not packet:
            return None
        request = _decoder.decode(packet)
        control_fd, page_fd = fds
        pid = _fork_twice()
        if pid == 0:
            channel.close()
            return ForkedProcess(control_fd, page_fd, request.rehearse, preloaded)
        channel.send(Forked(pid=pid))
        os.close(control_fd)
        os.close(page_fd)
        if not warm and request.rehearse:
            preloaded = _warm_up(channel, preload, plan)
            warm = True


def _fork_twice() -> int:
    """Fork a process that is not a child of this one; return its pid, or 0 in it."""
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(read_end)
        pid = os.fork()
        if pid:
            os.write(write_end, pid.to_bytes(4, "little"))
            os._exit(0)
        os.close(write_end)
        return 0
    os.close(write_end)
    pid = int.from_bytes(os.read(read_end, 4), "little")
    os.close(read_end)
    os.waitpid(middle, 0)
    return pid


# ---- warming up --------------------------------------------------------------------------------


def _warm_up(channel: Channel, preload: Sequence[str], plan: ImportPlan) -> frozenset[str]:
    """Import and rehearse; return the modules that were imported for the script."""
    began = time.monotonic()
    if importlib.util.find_spec("torch") is not None:
        try:
            rehearsal.import_and_rehearse(_script(), compiles=COMPILER in plan.modules)
        except Exception:  # Any version of torch: a standby is only a head start.
            log.exception("torch cannot be rehearsed; standbys start without it")
    before = frozenset(sys.modules)
    _import_own()
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception:  # The user's own module: the rank will show the error where it belongs.
            log.exception("--preload %s cannot be imported; standbys start without it", name)
    _preload(channel, plan)
    if not _can_fork():
        log.error("an imported module (--preload?) has initialized the GPUs: no standbys")
        sys.exit(NOT_FORKABLE)
    gc.collect()
    gc.freeze()
    channel.send(Warm(seconds=time.monotonic() - began, resident_bytes=resident_bytes()))
    return frozenset(sys.modules) - before


def _script() -> str:
    """Return the script's name, which is our first argument."""
    return sys.argv[1] if len(sys.argv) > 1 else ""


def _import_own() -> None:
    """Import what the script will import from Holdfast."""
    for name in own_modules(_script()) if _script() else ():
        try:
            importlib.import_module(name)
        except ImportError:  # Of torch, or of another package that is not installed.
            log.debug("%s cannot be imported; standbys start without it", name, exc_info=True)


def _preload(channel: Channel, plan: ImportPlan) -> None:
    """Import what the script will; if that makes this process unfit, say so and end it."""
    at_fault = preload_plan(plan, channel.send)
    if plan.modules and not at_fault and not _can_fork():
        at_fault = dict.fromkeys(plan.modules, "one of them initializes the GPUs")
    if at_fault:
        names = list(at_fault)
        for first in range(0, len(names), NAMES_PER_MESSAGE):
            some = names[first : first + NAMES_PER_MESSAGE]
            channel.send(UnfitImports(modules={name: at_fault[name] for name in some}))
        os._exit(UNFIT)


def _can_fork() -> bool:
    """Return whether forked processes can use accelerators; only such a process can tell."""
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0

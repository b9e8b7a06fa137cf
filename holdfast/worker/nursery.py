"""Where standbys come from.

The nursery is a process that has imported everything, runs no thread, and forks when asked. A fork
takes milliseconds where a start with imports takes seconds, all its children share the memory of the
imports, and however many ranks a node has, it imports once. It is also how the very first round
starts, so that the imports are on the path to the first step only once.

A new process must be the agent's child, not the nursery's: then the agent can wait for it and it
outlives a nursery that dies. So each is forked twice, and the agent, which adopts orphans, becomes
its parent.

The processes fork out of `serve`, which returns in the child, so that nothing of the nursery is on
the stack when the user's script runs.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from holdfast.messages.local import NOT_FORKABLE, Forked, ToNursery, Warm
from holdfast.worker import rehearsal
from holdfast.worker.channel import Channel

log = logging.getLogger("holdfast.worker")

_decoder = msgspec.msgpack.Decoder(ToNursery)


class Born(msgspec.Struct, frozen=True):
    """What a forked process starts out with."""

    control_fd: int
    page_fd: int
    rehearse: bool


def serve(channel: Channel, preload: Sequence[str], eager: bool) -> Born | None:
    """Fork for the agent until it is gone. Returns None then; in each forked child, its birth.

    An eager nursery imports first, because the ranks need it all anyway. One that is not (a script
    that does not seem to use torch) first starts the ranks, then prepares for their successors.
    """
    warm = False
    if eager:
        _warm_up(channel, preload)
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
            return Born(control_fd, page_fd, request.rehearse)
        channel.send(Forked(pid=pid))
        os.close(control_fd)
        os.close(page_fd)
        if not warm and request.rehearse:
            _warm_up(channel, preload)
            warm = True


def _warm_up(channel: Channel, preload: Sequence[str]) -> None:
    began = time.monotonic()
    rehearsal.preload(preload)
    if not rehearsal.can_fork():
        log.error("something that was imported (--preload?) has touched the GPUs: no standbys")
        sys.exit(NOT_FORKABLE)
    gc.collect()
    gc.freeze()
    channel.send(Warm(seconds=time.monotonic() - began, resident_bytes=_resident_bytes()))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _fork_twice() -> int:
    """Fork a process that is not our child. Its pid, or 0 in it."""
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

"""Turns a bare process into a rank.

A worker waits on its control socket until the agent assigns it a rank; then it takes over the rank's
environment and standard streams, and runs the script. Whether it was forked from the nursery or started
afresh makes no difference from here on.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection

from holdfast.config.values import with_local_rank
from holdfast.data import link
from holdfast.diagnosis import faulthandling, flight
from holdfast.inprocess import link as rounds
from holdfast.kernel import PR_SET_PDEATHSIG, prctl
from holdfast.messages import local
from holdfast.messages.local import Assign
from holdfast.messages.records import Raised
from holdfast.shm.rank_page import RankPage
from holdfast.shm.vital_signs import Times, Vitals
from holdfast.worker import node_test, rehearsal, runtime, script, standing
from holdfast.worker.channel import Channel, move_up
from holdfast.worker.data_link import AgentDataLink
from holdfast.worker.device_use import DeviceReport
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.loaded_modules import LoadedModules
from holdfast.worker.round_link import AgentRoundLink
from holdfast.worker.runtime import Runtime
from holdfast.worker.torch_hooks import patches
from holdfast.worker.torch_hooks.framework_losses import hear_losses
from holdfast.worker.torch_hooks.imports import replacing_captured, when_imported
from holdfast.worker.torch_hooks.pairs import PairCalls
from holdfast.worker.torch_hooks.phases import Phases

_NEVER = Times(0, 0.0, ())


def become_worker(
    control_fd: int, page_fd: int, rehearse: bool, preloaded: Collection[str] = ()
) -> int:
    """Wait for a rank, run the script as that rank, and return its exit status."""
    channel = Channel(control_fd)
    page = RankPage(page_fd)
    os.close(page_fd)
    if rehearse:
        rehearsal.rehearse()
        channel.send(local.Standing())
    assign, fds = standing.await_order(channel)
    if isinstance(assign, local.Test):
        channel.send(node_test.run(assign, fds, channel.send))
        os._exit(0)
    _take_over(assign, fds)
    calls, store = PairCalls(), patches.StoreSocket()
    recorder = FlightFile(assign, page.vitals, calls)
    with replacing_captured(preloaded):
        worker = _install(assign, channel, page, calls, recorder)
    _offer(store, assign, fds)

    def renew(assign: Assign, fds: list[int]) -> None:
        """Take another place, in a process whose script goes on."""
        # Not before: all ranks have left the round by now. One that is still about to connect to the
        # store would be refused, and torch lets it sleep for a second then.
        store.withdraw()
        _take_place(assign, fds)
        recorder.rename(assign)
        worker.renew(assign.round)
        flight.begin_again(sys.modules.get("torch.distributed.distributed_c10d"))
        link.install(AgentDataLink(worker))
        _offer(store, assign, fds)
        worker.parked = False
        channel.send(local.Began(at=time.monotonic()))

    rounds.install(AgentRoundLink(worker, store, recorder.write, renew))
    channel.send(local.Began(at=time.monotonic()))

    def died(raised: Raised) -> None:
        at = time.monotonic()
        recorder.write(raised.where)
        channel.send(local.Died(raised=raised, at=at))

    try:
        name, *arguments = sys.argv[1:]
        argv = [name, *with_local_rank(arguments, assign.local_rank)]
        code = script.run(assign.entry, argv, died)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            _finish(worker, recorder)
        else:
            recorder.write()
        raise
    if code == 0:
        _finish(worker, recorder)
    return code


def _install(
    assign: Assign, channel: Channel, page: RankPage, calls: PairCalls, recorder: FlightFile
) -> Runtime:
    """Install the runtime, its hooks and its heartbeat."""
    worker = Runtime(channel, page, assign.round, assign.images, assign.opened_at)
    runtime.install(worker)
    link.install(AgentDataLink(worker))
    loaded = LoadedModules(channel, page.vitals) if assign.tell_imports else None
    if loaded is not None:
        worker.at_first_step.append(loaded.stepped)
    if assign.tell_device:
        worker.at_first_step.append(DeviceReport(channel).stepped)
    os.register_at_fork(after_in_child=page.detach)
    phases = Phases(page.vitals)
    phases.install()
    patches.book_saves(worker)
    patches.note_loads(worker)
    worker.resumption.observe()
    patches.count_steps(worker)
    hear_losses(worker)
    when_imported("torch", flight.turn_on)
    when_imported("torch.distributed.distributed_c10d", flight.count_worlds)
    calls.install()
    look_for_traps = _trap_finder(worker, page, phases)
    look_for_traps()

    worker.when_renewed.append(look_for_traps)

    def each_beat() -> None:
        phases.wake()
        if not worker.parked:
            look_for_traps()
        if loaded is not None:
            loaded.beat()

    Heartbeat(page.vitals, recorder.write, each_beat).start()
    return worker


def _finish(worker: Runtime, recorder: FlightFile) -> None:
    """Report that the script has ended.

    If its main thread has not trained, another thread may still do so, and Python would let it: then
    the script ends with that thread.
    """
    vitals = worker.vitals
    if not vitals.read().steps or vitals.trainer != threading.get_ident():
        threading._shutdown()  # type: ignore[attr-defined]
    recorder.write()
    worker.channel.send(local.ScriptFinished())


def _offer(store: patches.StoreSocket, assign: Assign, fds: list[int]) -> None:
    if len(fds) > 4:
        store.offer(move_up(fds[4]), int(assign.env["MASTER_PORT"]))


def _take_over(assign: Assign, fds: list[int]) -> None:
    if os.getpgrp() != os.getpid():  # A fresh process has its own session already.
        os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != assign.agent_pid:
        os._exit(0)
    _take_place(assign, fds)
    faulthandling.allow_tracing(assign.agent_pid)
    _open_streams()
    rehearsal.reseed()
    gc.unfreeze()


def _take_place(assign: Assign, fds: list[int]) -> None:
    """Take over a rank's streams and environment."""
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
        os.close(fd)
    faulthandling.arm(move_up(fds[3]))
    os.environ.update(assign.env)


def _trap_finder(worker: Runtime, page: RankPage, phases: Phases) -> Callable[[], None]:
    """Return a function that takes in new traps; until there are any, it costs a read of one word."""

    def look() -> None:
        entries = page.traps.read()
        if entries and worker.traps is None:
            from holdfast.worker.injected_faults import Traps

            worker.traps = Traps(
                page.sprung.append,
                lambda: worker.channel.send(local.TrapSprung()),
                lambda: page.vitals.times().get("step", _NEVER).latest_s,
            )
            phases.drag = worker.traps.drag.in_forward
        if entries and worker.traps is not None:
            worker.traps.add(entries)

    return look


class FlightFile:
    """The file of a rank's flight recorder: the heartbeat writes it on request, and the rank itself
    when its script ends, so that it is known which collectives a rank that is gone had entered."""

    def __init__(self, assign: Assign, vitals: Vitals, calls: PairCalls) -> None:
        self._calls = calls
        self._vitals = vitals
        self.rename(assign)

    def rename(self, assign: Assign) -> None:
        """Write another file, for another rank."""
        self._path = assign.flight
        self._rank_and_size = int(assign.env["RANK"]), int(assign.env["WORLD_SIZE"])

    def write(self, failed_at: str = "") -> None:
        """Write it, atomically, with the line at which the script failed or is; if that fails, no old
        one stays."""
        part, trainer = f"{self._path}.{threading.get_ident()}", self._vitals.trainer
        try:
            dump = flight.dump(trainer, self._rank_and_size, self._calls, failed_at)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
                file.write(dump)
            os.rename(part, self._path)
        except Exception:
            # The disk may be full, and torch's recorder may fail in its own ways: the diagnosis does
            # without the dump, and neither a heartbeat nor the end of a script may fail of it.
            for path in (part, self._path):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _open_streams() -> None:
    """Reopen the standard streams as `python -u` does: their behaviour depends on the file."""
    for fd, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        old = getattr(sys, name)
        raw = io.FileIO(fd, mode, closefd=False)
        raw.name = f"<{name}>"
        new = io.TextIOWrapper(
            io.BufferedReader(raw) if mode == "r" else raw,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            write_through=True,
        )
        new.mode = mode  # type: ignore[misc]
        old.flush()
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)

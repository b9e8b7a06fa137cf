"""The launcher of `holdfast up`: a job's coordinator and the supplier of its platform.

The nodes are the platform's (see `platforms/opening.py`); this launcher has no agent, and imports
neither agent nor torch.

    coordinator died    it is restarted on the same listening socket, which never closed
    supplier died       it is restarted; its nodes go on, and the new one finds them
    a signal came       the coordinator is asked to end the job; a second signal ends it at once
    launcher died       coordinator and supplier die with it; the lifeline tells the nodes

A coordinator that ended in order has ended the job, and its exit code is the one in the journal. Nodes
are given a moment to end by themselves: they remove what they have in shared memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast import kernel
from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings
from holdfast.config.values import joined
from holdfast.errors import JobError
from holdfast.jobhome import JobHome, make_private_directory
from holdfast.launch.beside import terminal_of, viewers_of
from holdfast.launch.child import Child, send
from holdfast.launch.machine import make_directories
from holdfast.launch.orders import coordinator_orders
from holdfast.launch.parent import (
    ALWAYS_HANDLED,
    JobEnd,
    Parent,
    has_ended,
    read_end,
)
from holdfast.launch.site import Site, find_site
from holdfast.messages.exits import EXIT_FAILED, EXIT_TRY_AGAIN, EXIT_TURNED_AWAY

log = logging.getLogger("holdfast")

STOP_TRIES = 50
STOP_PAUSE_S = 0.2
"""A coordinator that is just starting again is asked once more."""
LEAVE_LIMIT_S = 30.0
"""How long nodes may take to end after their job has."""
CUT_LIMIT_S = 10.0
"""How long they may take if it was cut short."""
LEAVE_SLACK_S = 60.0
"""What a node that was told to leave gets beyond its ranks' grace and the saving of its snapshots."""
GRACE_S = 30.0
"""What ranks get if the user does not say: see `agent/shutdown.py`."""


@dataclass
class JobLauncher(Parent):
    """The parent of a job's coordinator and its supplier."""

    coordinator: Child | None
    supplier: Child | None
    """None once it has ended in order."""
    stopping: Callable[[signal.Signals], Child]
    """Makes a child that asks the coordinator to end the job."""
    read_end: Callable[[], JobEnd]
    """Reads the job's end from the journal, after the coordinator ended in order."""
    lifeline: int
    """The end of a pipe that nodes watch."""
    _stopped_by: signal.Signals | None = None
    _stopper: Child | None = None

    def _children(self) -> list[Child]:
        return [child for child in (self.coordinator, self.supplier) if child is not None]

    def _spared(self) -> list[Child]:
        return self._children()

    def _signalled(self, number: signal.Signals) -> int | None:
        if self._stopped_by is not None:
            return stop_code(self._stopped_by)
        self._stopped_by, self._stopper = number, self.stopping(number)
        self._stopper.start()
        return None

    def _ended(self, gone: Mapping[int, int]) -> int | None:
        code = None
        if self.supplier is not None and self.supplier.pid in gone:
            code = self._supplier_ended(self.supplier, gone[self.supplier.pid])
        if code is None and self.coordinator is not None and self.coordinator.pid in gone:
            code = self._coordinator_ended(self.coordinator, gone[self.coordinator.pid])
        if code is None and self._stopper is not None and gone.get(self._stopper.pid, 0) != 0:
            assert self._stopped_by is not None
            code = stop_code(self._stopped_by)
        return code

    def _supplier_ended(self, supplier: Child, code: int) -> int | None:
        if code == 0:
            self.supplier = None
            return None
        if code == EXIT_TURNED_AWAY:
            self.supplier = None
            return EXIT_FAILED
        self._restart(supplier, code)
        return None

    def _coordinator_ended(self, coordinator: Child, code: int) -> int | None:
        if code == EXIT_TURNED_AWAY:
            self.coordinator = None
            return EXIT_FAILED
        if code != 0:
            self._restart(coordinator, code)
            return None
        self.coordinator = None
        return self.read_end().code

    # ---- the end ----

    def _end_all(self) -> None:
        """Let nodes end by themselves if the job did, then kill what is left."""
        if (
            self.coordinator is None
        ):  # It has ended the job; the supplier carries out its last plan.
            self._await_end(LEAVE_LIMIT_S)
        for child in self._children():
            send(child.pid, signal.SIGKILL)
        self.coordinator = self.supplier = None
        os.close(self.lifeline)
        self._await_end(CUT_LIMIT_S)
        self._end_orphans()

    def _await_end(self, limit_s: float) -> None:
        """Wait for all that runs, within a limit; less if a signal says so."""
        deadline = time.monotonic() + limit_s
        while set(kernel.children(os.getpid())) - self.viewers.pids():
            left_s = deadline - time.monotonic()
            got = signal.sigtimedwait(self.signals | {signal.SIGCHLD}, max(0.0, left_s))
            if got is None or got.si_signo != signal.SIGCHLD:
                return
            self._gone()


def stop_code(number: signal.Signals) -> int:
    """The exit code of a job that somebody ended with a signal."""
    return EXIT_FAILED if number == signal.SIGINT else EXIT_TRY_AGAIN


def launch_job(
    settings: RunSettings, platform: str, flags: Sequence[str], since_monotonic: float
) -> tuple[int, JobHome]:
    """Run a whole job to its end; the exit code, and the job's home. `flags` are for its nodes."""
    make_directories(settings)
    site = find_site(settings)
    for secret in (Settings.token, Settings.notify):  # They are read by now; scripts are not to.
        os.environ.pop(secret.variables[0], None)
    shutil.rmtree(site.home.nodes, ignore_errors=True)  # Those of a job that was queued again.
    make_private_directory(site.home.nodes)
    lifeline, held = os.pipe()
    launcher_pid = os.getpid()

    def be_coordinator() -> int:
        from holdfast.coordinator.main import run_coordinator

        assert launcher.coordinator is not None
        requeued = settings.requeued and launcher.coordinator.pid_before == 0
        orders = coordinator_orders(
            site, settings.tls, settings.terms, since_monotonic, requeued=requeued
        )
        run_coordinator(orders)
        return 0

    def be_supplier() -> int:
        _die_with_launcher(launcher_pid)
        return _supply(settings, platform, site, flags, lifeline)

    def stopping(number: signal.Signals) -> Child:
        return Child("stop", partial(_ask_to_stop, settings, site.home, number))

    launcher = JobLauncher(
        signals=ALWAYS_HANDLED | {signal.Signals[name] for name in settings.signals_to_handle},
        coordinator=Child("coordinator", be_coordinator),
        supplier=Child("supplier", be_supplier),
        stopping=stopping,
        read_end=partial(read_end, site.home),
        lifeline=held,
    )
    with terminal_of(settings, site.home, hosts=True) as line:
        launcher.viewers = viewers_of(settings, site.home, line)
        code = launcher.run()
    launcher.listen_again()
    return code, site.home


def _die_with_launcher(launcher_pid: int) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(1)


def _supply(
    settings: RunSettings, platform: str, site: Site, flags: Sequence[str], lifeline: int
) -> int:
    """Be the supplier of the job's platform until the job is over."""
    from holdfast.platforms.opening import NodeOrders, open_platform
    from holdfast.platforms.supplier import Endpoint, Supplier
    from holdfast.wire.tls import client_context

    kernel.name_process("holdfast-supply")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Not ignored: the processes that it starts would inherit that.
        signal.signal(number, lambda *_: None)
    kernel.unblock_signals()
    grace_s = GRACE_S if settings.terms.grace_s is None else settings.terms.grace_s
    orders = NodeOrders(
        job=site.home.name,
        settings=settings,
        command=node_command(settings, site, flags),
        environ={**os.environ, Settings.token.variables[0]: site.token},
        records=site.home.nodes,
        lifeline=lifeline,
        limit_s=grace_s + settings.save_deadline_s + LEAVE_SLACK_S,
    )
    where = Endpoint(site.host, site.port, site.token, client_context(settings.tls))

    async def supply() -> None:
        await Supplier(
            open_platform(platform, orders), lambda: where, partial(has_ended, site.home)
        ).run()

    asyncio.run(supply())
    return 0


def node_command(settings: RunSettings, site: Site, flags: Sequence[str]) -> list[str]:
    """The command that starts a node of this job: the user's flags, and where the job is."""
    terms = settings.terms
    job = [
        f"--coordinator={joined(site.host, site.port)}",
        f"--job={site.home.name}",
        f"--nnodes={terms.min_nodes}:{terms.max_nodes}",
    ]
    script = [settings.script, *settings.script_args]
    return [sys.executable, "-m", "holdfast", "run", *flags, *job, *script]


def _ask_to_stop(settings: RunSettings, home: JobHome, number: signal.Signals) -> int:
    """Have the coordinator end the job; it may be starting just now."""
    from holdfast.messages.wire import AskStop, StopTaken
    from holdfast.wire.visitors import ask

    kernel.unblock_signals()
    question = AskStop(code=stop_code(number), reason=f"stopped by {number.name}", by="holdfast up")
    for tries_left in reversed(range(STOP_TRIES)):
        try:
            log.info("%s", ask(home, question, StopTaken, settings.tls).line)
            return 0
        except JobError as error:
            if not tries_left:
                log.warning("%s; ending its processes", error)
        time.sleep(STOP_PAUSE_S)
    return EXIT_FAILED

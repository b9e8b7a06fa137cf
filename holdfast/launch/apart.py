"""The parent of a coordinator that runs apart from its nodes, where notices are to be sent.

`holdfast coordinator` is one process as long as nobody watches beside it. With `--notify` it becomes
the parent of two: the coordinator, restarted on the same listening socket when it dies, and the sender
of notices. Signals do to it what they do to the coordinator, which is nothing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.jobhome import JobHome
from holdfast.launch.beside import Viewers, notice_senders
from holdfast.launch.child import Child, send
from holdfast.launch.parent import ALWAYS_HANDLED, JobEnd, Parent, read_end
from holdfast.messages.exits import EXIT_FAILED, EXIT_TURNED_AWAY


@dataclass
class CoordinatorParent(Parent):
    """The parent of a coordinator and of those who look at its job."""

    coordinator: Child
    read_end: Callable[[], JobEnd]
    """Reads the job's end from the journal, after the coordinator ended in order."""

    def _children(self) -> list[Child]:
        return [self.coordinator]

    def _spared(self) -> list[Child]:
        return [self.coordinator]

    def _signalled(self, number: signal.Signals) -> int | None:
        return None

    def _ended(self, gone: Mapping[int, int]) -> int | None:
        code = gone.get(self.coordinator.pid)
        if code is None:
            return None
        if code == EXIT_TURNED_AWAY:
            return EXIT_FAILED
        if code != 0:
            self._restart(self.coordinator, code)
            return None
        return self.read_end().code

    def _end_all(self) -> None:
        send(self.coordinator.pid, signal.SIGKILL)  # It has ended, unless it keeps dying.


def host_coordinator(home: JobHome, run: Callable[[bool], int], targets: Sequence[str]) -> int:
    """Run a coordinator to the end of its job and tell these targets of it; return the job's exit code.
    `run` is called in the coordinator's process, with True the first time."""

    def be_coordinator() -> int:
        run(parent.coordinator.pid_before == 0)
        return 0  # It ended in order; the job's exit code is in the journal.

    parent = CoordinatorParent(
        signals=ALWAYS_HANDLED,
        coordinator=Child("coordinator", be_coordinator),
        read_end=partial(read_end, home),
        viewers=Viewers(notice_senders(targets, home)),
    )
    code = parent.run()
    parent.listen_again()
    return code

"""What a fault says about the node that it struck, and what chance would do.

A fault is one of three signs, or none:

    crash     SIGSEGV, SIGBUS, SIGILL: broken memory or processors end a rank so; a few bugs do, too
    outside   other signals from outside, a lost node: not the script's doing, but maybe the node's
    script    exceptions, exit codes, the OOM killer, proven hangs, other signals: mostly the script;
              a node with a broken disk or device shows itself so, too
    none      wanted changes, broken collectives, doubtful hangs, what struck several nodes at once

Where health checks warn of a machine's GPUs (an Xid, an ECC error), what looks like the script's counts
as a crash.

If all nodes were alike, each fault would strike a machine with the probability of its share of the
ranks. The chance that k of n faults strike one and the same machine is then the binomial tail, times
the number of nodes, any of which might have been it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence

from holdfast.core.faults import Fault, signal_name
from holdfast.core.suspects.state import MachineName, Sign, Strike

CRASHES = frozenset(
    f"killed by {signal_name(number)}" for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)
)


def sign_of(fault: Fault) -> Sign | None:
    """Read what a fault says; None if nothing about a node."""
    if fault.wanted or fault.unexplained or fault.victim or fault.doubtful or not fault.node:
        return None
    if fault.signature in CRASHES:
        return "crash"
    if fault.outside and fault.kind in ("signal", "node"):
        return "outside"
    return "script"


def hits(strikes: Sequence[Strike], machine: MachineName) -> list[Strike]:
    """Return the strikes that count against a machine.

    Those that look like the script's do so unless the same failure was seen elsewhere, and unless all
    of them struck rank 0, which does what no other rank does: it saves, evaluates and logs.
    """
    elsewhere = {one.signature for one in strikes if one.machine != machine}
    own = [one for one in strikes if one.machine == machine]
    script = [one for one in own if one.sign == "script" and one.signature not in elsewhere]
    if all(one.rank == 0 for one in script):
        script = []
    return [one for one in own if one.sign != "script" or one in script]


def chance(hits: Sequence[Strike], total: int) -> float:
    """Return how likely so many of that many faults strike one and the same machine by chance.

    A round of one node has nothing to compare with: it is judged as if it had been one of two.
    """
    share = max((one.share if one.nodes > 1 else 0.5) for one in hits)
    nodes = max(2, *(one.nodes for one in hits))
    return min(1.0, nodes * _tail(total, len(hits), share))


def _tail(total: int, least: int, share: float) -> float:
    """Return the probability of at least that many successes in so many trials."""
    return sum(
        math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(least, total + 1)
    )

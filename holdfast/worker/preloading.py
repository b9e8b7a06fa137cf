"""Imports, in a nursery, what the script is known to import.

Theory of operation. Standbys have rehearsed torch; a script that trains with transformers or Lightning
imports for seconds more before its first step. So the first life of a script teaches the next:

1. After its first step, local rank 0 tells the agent which installed modules the script has imported
   (`worker.loaded_modules`).
2. The agent starts a second nursery with that list (`agent.standbys`), at the lowest priority, while
   the first one goes on to serve. It imports torch, rehearses, and imports the list under a watch
   (`worker.import_watch`).
3. If no module was at fault, it takes the first one's place, and standbys are replaced one by one: an
   old one is ended when a new one has rehearsed. The list is then kept in the job's home, for the
   nurseries of later agents.
4. If one was, the second nursery is thrown away: it says which modules must not be preloaded, and
   why, and exits. So no import can harm the nursery that serves. The agent notes them and tries again
   without, a few times. A module whose import ends the process, or hangs, is known because the nursery
   says what it imports next.

A module that is not preloaded is imported by the script, as ever: a shorter list costs time and nothing
else. That is why the watch is strict, and why a list is only used for the same script, arguments and
Python environment.

The script must not notice. Modules are imported in the order in which the script did, and what it could
tell them by is watched: random state, flags, handlers, environment and the like are unchanged, or the
module is left out. It can notice that a module is in `sys.modules` before its import statement, that
module-level warning filters are there from the start, and that what a module prints when it is imported
is in the nursery's log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from holdfast.messages.local import Importing, ImportPlan
from holdfast.worker.import_watch import ImportWatch


def preload(plan: ImportPlan, tell: Callable[[Importing], object]) -> dict[str, str]:
    """Import the modules of a plan; return those at fault: if there are any, end this process."""
    with ImportWatch(plan.refused, plan.variables) as watch:
        for name in plan.modules:
            if name in sys.modules or watch.refuses(name):
                continue
            tell(Importing(module=name))
            watch.import_module(name)
            if resident_bytes() > plan.most_bytes:
                break
    return watch.at_fault


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

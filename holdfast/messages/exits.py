"""Exit codes, and what they tell the one who started the process."""

EXIT_FAILED = 1
EXIT_TRY_AGAIN = 75
"""Preempted, or too few nodes: the same command may well succeed later."""
EXIT_DO_NOT_REQUEUE = 93
"""The same failure would repeat."""

EXIT_BROKEN = 70
"""Between an agent or a coordinator and its launcher: it fell over an error of its own."""
EXIT_REJOIN = 71
"""Between an agent and its launcher: start a new agent in this one's place."""
EXIT_TURNED_AWAY = 72
"""Between an agent and its launcher: the coordinator will not have this node."""

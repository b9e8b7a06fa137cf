"""Defines exit codes: those of `holdfast run`, and those its processes use among themselves."""

EXIT_FAILED = 1
EXIT_USAGE = 2
"""The command line does not fit, or not the job that it is to join."""
EXIT_TRY_AGAIN = 75
"""Preempted, or too few nodes: the same command may succeed later."""
EXIT_DO_NOT_REQUEUE = 93
"""The same failure would repeat."""

EXIT_BROKEN = 70
"""Agent or coordinator to launcher: crashed with an unhandled exception."""
EXIT_REJOIN = 71
"""Agent to launcher: start a new agent in its place."""
EXIT_TURNED_AWAY = 72
"""Agent or coordinator to launcher: it cannot run here, and a restarted one could not either."""
EXIT_REFUSED = 73
"""Agent to launcher: the coordinator refused this node."""

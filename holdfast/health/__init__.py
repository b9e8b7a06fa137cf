"""Checks one node: is this machine fit to train, and is it still?

    Checker          runs chosen checks, each against its own deadline      (checker.py)
    HealthSettings   what to examine, and the limits                        (settings.py)
    Baseline         what earlier looks saw, for checks that need a change  (baseline.py)
    HealthResult     verdict, reason, facts                                 (messages/health.py)

No check runs in the caller's process: a driver, a mount or a user's check may hang forever, and a
thread in the kernel cannot be ended, not even by SIGKILL. Each runs in a probe, a small process that is
asked questions and killed if it does not answer in time (probes.py, probe.py).

A check reads through a `Node`, which has a root and so can be shown a made-up machine; a pure function
judges what it read. If nothing could be seen, the verdict is "unknown".
"""

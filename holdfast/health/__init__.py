"""Checks of one node: is this machine fit to train, and is it still?

    Checker          runs chosen checks, each against its own deadline     (checker.py)
    HealthSettings   what to look at and which limits to hold it to        (settings.py)
    Baseline         what earlier looks saw, for checks that need a change (baseline.py)
    Result           verdict, reason, facts                                (messages/health.py)

No check ever runs in the caller's process: a driver, a mount or somebody's own check may hang for
good, and a thread in the kernel cannot be ended, not even by SIGKILL. Each runs in a probe, a small
process that is asked questions and killed when it does not answer in time (lanes.py, probe.py).

A check reads through a `Node`, which is given a root and so can be shown a made-up machine; what it
read is judged by a pure function. Where nothing could be seen the verdict is "unknown".
"""

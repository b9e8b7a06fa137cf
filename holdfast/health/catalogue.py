"""Which checks there are, how long each may take, and what its silence means.

A check's kind is its name, or with a subject the part before the colon: "storage:/data". Checks of
one lane are asked one after the other by one probe; lanes go side by side. So what can hang together
(a path, the GPU driver) is one lane, and whatever hangs holds up nothing but its own lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.health.settings import HealthSettings
from holdfast.messages.health import Verdict


class Kind(Struct, frozen=True):
    about: str
    lane: str
    deadline_s: float
    silent: Verdict = "unknown"
    """The verdict when no answer comes in time: a path that hangs is broken, a driver may be busy."""


KINDS: Mapping[str, Kind] = {
    "cpu-cores": Kind("cores there and usable, load, heat, frequency", "node", 5),
    "memory": Kind("memory left on the machine and under limits, memory errors", "node", 5),
    "shm": Kind("room in /dev/shm", "node", 5),
    "limits": Kind("how many files may be open, how much memory locked", "node", 5),
    "clock": Kind("whether a time service keeps the clock right", "node", 5),
    "gpu-xid": Kind("what the NVIDIA driver wrote into the kernel's log", "node", 5),
    "cpu-compute": Kind("whether each core computes a known result", "node", 10),
    "gpu-recovery": Kind("GPUs lost, or that the driver wants reset", "gpu", 30),
    "gpu-ecc": Kind("GPU memory errors, rows to remap", "gpu", 30),
    "gpu-memory": Kind("GPU memory that a dead process left behind", "gpu", 30),
    "nvlink": Kind("NVLinks off or wearing out", "gpu", 30),
    "nic": Kind("links down or flapping, nearest to the GPUs first", "nic", 10),
    "disk": Kind("free space and inodes of a path", "path", 5, "fail"),
    "storage": Kind("a file written, synced and read back in a path", "path", 5, "fail"),
    "service": Kind("what a health service of the node says", "service", 10),
    "own": Kind("a check of your own", "own", 60, "fail"),
}

WITH_SUBJECT = ("disk", "storage", "service", "own")

COSTLY = ("cpu-compute", "storage", "own")
"""Kinds that take processor time or write to disks: for before a join, not for every few seconds."""


class Check(Struct, frozen=True):
    """One thing to look at."""

    name: str
    kind: str
    subject: str
    lane: str
    about: str
    deadline_s: float
    silent: Verdict


def checks_of(settings: HealthSettings, installed: Mapping[str, str]) -> list[Check]:
    """All checks, in the order in which they are told."""
    checks = [_check(settings, kind, kind) for kind in KINDS if kind not in WITH_SUBJECT]
    homes = [settings.home] if settings.home else []
    for path in dict.fromkeys([*homes, *settings.paths]):
        checks += [_check(settings, f"{kind}:{path}", kind, path) for kind in ("disk", "storage")]
    if settings.service is not None:
        checks.append(_check(settings, "service", "service", settings.service))
    own = {**installed, **{target: target for target in settings.user_checks}}
    for name, target in own.items():
        # A name of ours must go on meaning ours.
        taken = name.partition(":")[0] in {*KINDS, *(kind.partition("-")[0] for kind in KINDS)}
        checks.append(_check(settings, f"own:{name}" if taken else name, "own", target))
    return checks


def _check(settings: HealthSettings, name: str, kind: str, subject: str = "") -> Check:
    of_kind = KINDS[kind]
    return Check(
        name=name,
        kind=kind,
        subject=subject,
        lane=f"{of_kind.lane}:{subject}" if subject else of_kind.lane,
        about=of_kind.about,
        deadline_s=settings.deadline_s or of_kind.deadline_s,
        silent=settings.service_unreachable if kind == "service" else of_kind.silent,
    )


def chosen(checks: Sequence[Check], words: Collection[str]) -> list[Check]:
    """The checks that the words name: each by its name, its kind or the kind's first word."""
    for word in words:
        if word not in _words(checks) | set(KINDS):
            known = ", ".join(dict.fromkeys(check.name for check in checks))
            raise UsageError(f"no check is called {word!r}; there are: {known}")
    return [check for check in checks if any(word in _words([check]) for word in words)]


def _words(checks: Iterable[Check]) -> set[str]:
    return {
        word for check in checks for word in (check.name, check.kind, check.kind.partition("-")[0])
    }

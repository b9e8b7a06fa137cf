"""Lists the checks, with the deadline of each and what its silence means.

A check's kind is its name, or with a subject the part before the colon: "storage:/data". Checks with
the same probe run one after the other in one process; probes run side by side. What can hang together
(a path, the GPU driver) shares a probe, so a hang delays nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from holdfast.errors import UsageError
from holdfast.health.settings import HealthSettings
from holdfast.messages.health import Verdict


class Kind(Struct, frozen=True):
    """A kind of check."""

    function: str
    """Module of this package and function; imported when needed, for some modules take long."""
    about: str
    probe: str
    deadline_s: float
    silent: Verdict = "unknown"
    """Verdict if no answer comes in time: a path that hangs is broken, a driver may be busy."""


KINDS: Mapping[str, Kind] = {
    "cpu-cores": Kind(
        "cpu:check_cpu", "cores present and usable, load, heat, frequency", "node", 5
    ),
    "memory": Kind("memory:check_memory", "memory left, memory errors", "node", 5),
    "shm": Kind("memory:check_shm", "space in /dev/shm", "node", 5),
    "limits": Kind("memory:check_limits", "limits on open files and locked memory", "node", 5),
    "clock": Kind("clock:check_clock", "whether a time service synchronises the clock", "node", 5),
    "gpu-xid": Kind("xid:check_xid", "errors of the NVIDIA driver in the kernel's log", "node", 5),
    "cpu-compute": Kind("cpu:check_compute", "whether each core computes correctly", "node", 10),
    "gpu-recovery": Kind("gpu:check_recovery", "GPUs lost, or that need a reset", "gpu", 30),
    "gpu-ecc": Kind("gpu:check_ecc", "GPU memory errors, rows to remap", "gpu", 30),
    "gpu-memory": Kind("gpu:check_gpu_memory", "GPU memory left by dead processes", "gpu", 30),
    "nvlink": Kind("nvlink:check_nvlink", "NVLinks off or wearing out", "gpu", 30),
    "nic": Kind("nic:check_nic", "links down or flapping, nearest to the GPUs first", "nic", 10),
    "disk": Kind("storage:check_disk", "free space and inodes of a path", "path", 5, "fail"),
    "storage": Kind(
        "storage:check_storage", "writing to a path and reading back", "path", 5, "fail"
    ),
    "service": Kind("service:check_service", "a health service of the node", "service", 10),
    "own": Kind("own_checks:check_own", "a check of your own", "own", 60, "fail"),
}

WITH_SUBJECT = ("disk", "storage", "service", "own")

COSTLY = ("cpu-compute", "storage", "own")
"""Kinds that take processor time or write to disks: for before a join, not for every minute."""


class HealthCheck(Struct, frozen=True):
    """One check of this node."""

    name: str
    kind: str
    subject: str
    probe: str
    about: str
    deadline_s: float
    silent: Verdict


def checks_of(settings: HealthSettings, installed: Mapping[str, str]) -> list[HealthCheck]:
    """List all checks, in the order in which they are shown."""
    checks = [_check(settings, kind, kind) for kind in KINDS if kind not in WITH_SUBJECT]
    homes = [settings.home] if settings.home else []
    for path in dict.fromkeys([*homes, *settings.paths]):
        checks += [_check(settings, f"{kind}:{path}", kind, path) for kind in ("disk", "storage")]
    if settings.service is not None:
        checks.append(_check(settings, "service", "service", settings.service))
    reserved = {*KINDS, *(kind.partition("-")[0] for kind in KINDS)}
    for name, target in {**installed, **{own: own for own in settings.user_checks}}.items():
        shown = f"own:{name}" if name.partition(":")[0] in reserved else name
        checks.append(_check(settings, shown, "own", target))
    return checks


def _check(settings: HealthSettings, name: str, kind: str, subject: str = "") -> HealthCheck:
    of_kind = KINDS[kind]
    return HealthCheck(
        name=name,
        kind=kind,
        subject=subject,
        probe=f"{of_kind.probe}:{subject}" if subject else of_kind.probe,
        about=of_kind.about,
        deadline_s=settings.deadline_s or of_kind.deadline_s,
        silent=settings.service_unreachable if kind == "service" else of_kind.silent,
    )


def chosen(checks: Sequence[HealthCheck], words: Collection[str]) -> list[HealthCheck]:
    """Select checks by words: a name, a kind, or the first word of a kind."""
    for word in words:
        if word not in _words(checks) | set(KINDS):
            names = [check.name for check in checks]
            groups = sorted(_words(checks) - set(names))
            known = ", ".join(
                [*dict.fromkeys(names), *(f"{group} (all of them)" for group in groups)]
            )
            raise UsageError(f"no check is called {word!r}; known are: {known}")
    return [check for check in checks if any(word in _words([check]) for word in words)]


def _words(checks: Iterable[HealthCheck]) -> set[str]:
    return {
        word for check in checks for word in (check.name, check.kind, check.kind.partition("-")[0])
    }

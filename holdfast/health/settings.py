"""Defines what the health checks examine, and their limits.

The defaults fit a training node: below a failing limit work breaks soon, below a warning limit a
person should look. Everything here is sent to probes, so it is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from holdfast.messages.health import Verdict
from holdfast.messages.units import Seconds

MIB = 1 << 20
GIB = 1 << 30

FAKE_NODE = "HOLDFAST_FAKE_NODE"
"""Environment variable: a directory with sys/, proc/, dev/ and nvml.json to examine as this machine."""


class HealthLimits(Struct, frozen=True, kw_only=True):
    """Limits of the checks."""

    load_per_core: float = 4.0
    frequency_share: float = 0.5  # of the processor's maximum; less is a warning
    memory_bytes: int = 256 * MIB
    memory_share: float = 0.05
    disk_bytes: int = GIB
    disk_share: float = 0.05
    inodes: int = 1000
    inode_share: float = 0.05
    shm_bytes: int = 16 * MIB
    shm_size_bytes: int = GIB  # a smaller /dev/shm is a warning: containers get 64 MiB by default
    open_files: int = 1024
    locked_bytes: int = GIB  # only checked where there is RDMA, which must pin memory
    clock_error_s: Seconds = 1.0
    clock_step_s: Seconds = 1.0
    leftover_bytes: int = GIB
    nvlink_bad_windows: int = 15  # more than that many of the last 30 looks


class HealthSettings(Struct, frozen=True, kw_only=True):
    """What to examine, and how."""

    root: str = "/"
    """Directory that contains sys, proc and dev."""
    nvml: str | None = None
    """JSON file that replaces NVML; None: NVML itself."""
    home: str | None = None
    """Directory of the jobs; its disk is checked."""
    paths: tuple[str, ...] = ()
    """Directories that the job reads and writes."""
    service: str | None = None
    """Health service of the node: http://HOST:PORT/PATH or unix:/SOCKET[:/PATH]."""
    service_unreachable: Verdict = "unknown"
    topology: str | None = None
    """Topology file in NCCL's XML, where sysfs does not show which NIC is near which GPU."""
    user_checks: tuple[str, ...] = ()
    """Checks of the user, as module:function."""
    installed_checks: bool = True
    """Whether checks of installed packages (entry points `holdfast.checks`) run too."""
    import_path: tuple[str, ...] = ()
    """Further directories to import the user's modules from."""
    deadline_s: Seconds | None = None
    """Deadline of every check; None: each check's own."""
    settle_s: Seconds = 1.0
    """How long a process that just died may take to release its GPU memory."""
    limits: HealthLimits = field(default_factory=HealthLimits)


def settings_here(environ: Mapping[str, str], home: str | None = None) -> HealthSettings:
    """Return the settings for this machine, or for the fake one that the environment names."""
    topology, fake = environ.get("NCCL_TOPO_FILE"), environ.get(FAKE_NODE)
    if not fake:
        return HealthSettings(home=home, topology=topology)
    return HealthSettings(root=fake, nvml=f"{fake}/nvml.json", home=home, topology=topology)

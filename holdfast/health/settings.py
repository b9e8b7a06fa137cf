"""What the checks look at, and the limits they hold it to.

The defaults fit a training node: a failing limit is one below which work breaks soon, a warning one
below which a person should look. Everything here can be sent to a probe, so it is plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from holdfast.messages.health import Verdict
from holdfast.messages.units import Seconds

MIB = 1 << 20
GIB = 1 << 30

FAKE_NODE = "HOLDFAST_FAKE_NODE"
"""Environment: a directory with sys/, proc/, dev/ and nvml.json that is taken for this machine."""


class Limits(Struct, frozen=True, kw_only=True):
    load_per_core: float = 4.0
    frequency_share: float = 0.5  # of what the processor could do; less is a warning
    memory_bytes: int = 256 * MIB
    memory_share: float = 0.05
    disk_bytes: int = GIB
    disk_share: float = 0.05
    inodes: int = 1000
    inode_share: float = 0.05
    shm_bytes: int = 16 * MIB
    shm_size_bytes: int = GIB  # a smaller /dev/shm is a warning: containers get 64 MiB by default
    open_files: int = 1024
    locked_bytes: int = GIB  # only asked for where there is RDMA, which must pin memory
    clock_error_s: Seconds = 1.0
    clock_step_s: Seconds = 1.0
    leftover_bytes: int = GIB
    nvlink_bad_windows: int = 15  # more than that many of the last 30 looks


class HealthSettings(Struct, frozen=True, kw_only=True):
    root: str = "/"
    """Where sys, proc and dev are found."""
    nvml: str | None = None
    """A JSON file that stands in for NVIDIA's library; None: the library."""
    home: str | None = None
    """Where jobs are kept; its disk is looked at."""
    paths: tuple[str, ...] = ()
    """Directories that the job reads and writes."""
    service: str | None = None
    """A service of the node to ask: http://HOST:PORT/PATH or unix:/SOCKET[:/PATH]."""
    service_unreachable: Verdict = "unknown"
    topology: str | None = None
    """A topology file in NCCL's XML, where sysfs does not tell which NIC is near which GPU."""
    user_checks: tuple[str, ...] = ()
    """The user's own, as module:function."""
    installed_checks: bool = True
    """Whether those of installed packages (entry points `holdfast.checks`) are run too."""
    import_path: tuple[str, ...] = ()
    """Directories in which the user's modules are also looked for."""
    deadline_s: Seconds | None = None
    """For every check; None: as each check has it."""
    settle_s: Seconds = 1.0
    """How long a process that just died may take to give its GPU's memory back."""
    limits: Limits = field(default_factory=Limits)


def settings_here(environ: Mapping[str, str], home: str | None = None) -> HealthSettings:
    """The settings for this machine, or for the fake one that the environment names."""
    topology = environ.get("NCCL_TOPO_FILE")
    fake = environ.get(FAKE_NODE)
    if not fake:
        return HealthSettings(home=home, topology=topology)
    nvml = str(Path(fake) / "nvml.json")
    return HealthSettings(root=fake, nvml=nvml, home=home, topology=topology)

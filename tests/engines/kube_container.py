"""Becomes a container: a process with namespaces and a root of its own, on this machine's files.

It is started by the node agent as `python kube_container.py SPEC`, and stays as the parent of the
container's first process. The machine's root is what an image would be: an overlay lets the container
write anywhere without changing the machine, and mounts appear at the paths that the pod names. The
first process is process 1 of a PID namespace, as on a cluster: a SIGTERM that it does not handle does
nothing, and when it ends the kernel kills all the others. The network is the machine's.

If the agent dies, this process gets SIGKILL, and so does the container: nothing can be left over.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

NOT_STARTED = 128

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWPID = 1 << 17, 1 << 26, 1 << 27, 1 << 29
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1
_KEPT_OUT = ("/proc", "/sys", "/dev", "/run")

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    words = [source.encode(), target.encode(), kind.encode() if kind else None]
    result = _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None)
    _check(result, f"cannot mount {source} on {target}")


def _die_with_parent(parent: int) -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _further_mounts() -> list[str]:
    """Mount points of the machine that an overlay of its root does not contain."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = sorted({line.split()[1] for line in lines} - {"/"})
    return [p for p in points if not p.startswith(_KEPT_OUT) and os.path.isdir(p)]


def _make_root(folder: Path, shm_bytes: int) -> str:
    """Mount the container's root under `folder`; the machine's own is read, never written."""
    for name in ("upper", "work", "root"):
        (folder / name).mkdir()
    root = str(folder / "root")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    further = _further_mounts()
    layers = f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work"
    _mount("overlay", root, "overlay", 0, layers)
    for point in ("/sys", *further):
        if os.path.isdir(root + point):
            _mount(point, root + point, None, _MS_BIND | _MS_REC)
    _mount("proc", root + "/proc", "proc")
    _make_devices(root + "/dev", shm_bytes)
    return root


def _make_devices(dev: str, shm_bytes: int) -> None:
    """Mount what a container finds under /dev; its shared memory is small unless a volume covers it."""
    _mount("none", dev, "tmpfs", 0, "mode=755")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        Path(dev, name).touch()
        _mount(f"/dev/{name}", f"{dev}/{name}", None, _MS_BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{dev}/{name}")
    os.mkdir(dev + "/shm")
    _mount("none", dev + "/shm", "tmpfs", 0, f"mode=1777,size={shm_bytes}")


def _bind(source_fd: int, target: str, read_only: bool) -> None:
    source = f"/proc/self/fd/{source_fd}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if read_only:
        _mount("none", target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _become(spec: dict[str, Any]) -> None:
    """Turn this process into the container's first one. Does not return."""
    for path in spec["cgroups"]:
        Path(path, "cgroup.procs").write_text("0")
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # Opened before chroot: sources are paths of the machine, targets are resolved in the new root.
    sources = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source, _, _ in spec["mounts"]]
    root = _make_root(Path(spec["folder"]), spec["shm_bytes"])
    os.chroot(root)
    os.chdir("/")
    for fd, (_, target, read_only) in zip(sources, spec["mounts"], strict=True):
        _bind(fd, target, read_only)
    name = spec["hostname"].encode()
    _check(_libc.sethostname(name, len(name)), "sethostname")
    os.makedirs(spec["cwd"], exist_ok=True)
    os.chdir(spec["cwd"])
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvpe(spec["command"][0], spec["command"], spec["env"])


def _first_process(spec: dict[str, Any], failed: int) -> None:
    try:
        _become(spec)
    except OSError as error:
        os.write(failed, str(error).encode())
    os._exit(NOT_STARTED)


def main() -> int:
    """Start the container, pass on SIGTERM, and exit as it exits (128 + signal)."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    _die_with_parent(spec["agent"])
    namespaces = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID
    _check(_libc.unshare(namespaces), "cannot make namespaces (not root?)")
    said, failed = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid == 0:
        os.close(said)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # The parent is outside of this PID namespace, so its number reads as 0.
        _die_with_parent(0)
        _first_process(spec, failed)
    os.close(failed)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    trouble = os.read(said, 4096)
    if trouble:
        Path(spec["folder"], "not-started").write_bytes(trouble)
    else:
        Path(spec["folder"], "pid").write_text(str(pid))
    os.write(1, b"1")  # the agent waits for this: from now on SIGTERM reaches the container
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

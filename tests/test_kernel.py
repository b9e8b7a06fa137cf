"""What only the kernel can do for us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from holdfast import kernel


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    return done.stdout.strip()


def test_a_process_is_called_what_it_was_named() -> None:
    name = python(
        "from holdfast import kernel; kernel.name_process('holdfast-coordinator')\n"
        "print(open('/proc/self/comm').read())"
    )
    assert name == "holdfast-coordi"


def test_an_option_that_the_kernel_does_not_know_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        kernel.prctl(123456, 0)


def test_orphans_of_an_adopting_process_become_its_children() -> None:
    code = """
import os, time
from holdfast import kernel
kernel.adopt_orphans()
read_end, write_end = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os._exit(0)
os.wait()
print(len(kernel.children(os.getpid())))
os.close(write_end)
os.wait()
print(len(kernel.children(os.getpid())))
"""
    assert python(code).split() == ["1", "0"]


def test_a_death_signal_ends_the_child_with_its_parent() -> None:
    code = """
import os, signal, sys
from holdfast import kernel
read_end, write_end = os.pipe()
if os.fork() == 0:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.write(write_end, b'x')
    signal.pause()
os.read(read_end, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=200, stdout=subprocess.PIPE)
    # The pipe of stdout is closed only when the child is gone too, else this would have hung.
    assert done.returncode == -signal.SIGKILL


def test_a_process_that_is_gone_has_no_children() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert kernel.children(pid) == []


def test_a_mapping_of_nothing_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.Mapping(-1, 4096)


def test_a_mapping_keeps_no_descriptor() -> None:
    fd = os.memfd_create("x")
    os.ftruncate(fd, 4096)
    before = len(os.listdir("/proc/self/fd"))
    mapping = kernel.Mapping(fd, 4096)
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before - 1
    mapping.view[0] = 7
    assert mapping.view[0] == 7
    mapping.close()


def test_the_end_of_a_process_is_waited_for_within_a_limit() -> None:
    child = subprocess.Popen(["sleep", "60"])
    kernel.await_end(child.pid, 0.01)
    assert child.poll() is None
    child.kill()
    kernel.await_end(child.pid, 60)
    assert child.poll() == -signal.SIGKILL
    kernel.await_end(child.pid, 60)  # There is no such process any more.

"""The probe: a process that looks at the node when it is asked, so that only it can hang.

It answers one question at a time and lives until its input ends, which also happens when whoever
started it dies. That is noticed by a thread, for the main one may be stuck in a check at that time.
Whatever a check prints goes to stderr: stdout carries the answers.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable

from holdfast import kernel
from holdfast.health.baseline import Seen
from holdfast.health.clock import check_clock
from holdfast.health.compute import check_compute
from holdfast.health.cpu import check_cpu
from holdfast.health.disk import check_disk
from holdfast.health.exchange import READY, Question, question_in, written
from holdfast.health.finding import Finding, unknown
from holdfast.health.gpu import check_ecc, check_recovery
from holdfast.health.gpu_memory import check_gpu_memory
from holdfast.health.limits import check_limits, check_shm
from holdfast.health.memory import check_memory
from holdfast.health.node import Node
from holdfast.health.nvlink import check_nvlink
from holdfast.health.xid import check_xid

OF_NODE: dict[str, Callable[[Node, Seen | None], Finding]] = {
    "cpu-cores": check_cpu,
    "cpu-compute": check_compute,
    "memory": check_memory,
    "shm": check_shm,
    "limits": check_limits,
    "clock": check_clock,
    "gpu-recovery": check_recovery,
    "gpu-ecc": check_ecc,
    "gpu-memory": check_gpu_memory,
    "gpu-xid": check_xid,
    "nvlink": check_nvlink,
}


def answer(question: Question, node: Node) -> Finding:
    try:
        if question.kind in OF_NODE:
            return OF_NODE[question.kind](node, question.before)
        return _of_subject(question.kind)(node, question.subject, question.before)
    except Exception as error:
        # A check of ours that breaks on a machine we have not met says nothing about the machine.
        return unknown(f"the check broke: {type(error).__name__}: {error}")


def _of_subject(kind: str) -> Callable[[Node, str, Seen | None], Finding]:
    """Those that need more modules import them when they are asked for."""
    if kind == "disk":
        return check_disk
    if kind == "storage":
        from holdfast.health.storage import check_storage

        return check_storage
    if kind == "service":
        from holdfast.health.service import check_service

        return check_service
    if kind == "nic":
        from holdfast.health.nic import check_nic

        return lambda node, _, before: check_nic(node, before)
    from holdfast.health.own_checks import check_own

    return check_own


def main() -> None:
    kernel.unblock_signals()
    kernel.name_process("holdfast-probe")
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    os.write(answers, READY + b"\n")
    look, node = -1, None
    while True:
        question = question_in(asked.get())
        if node is None or question.look != look:
            look, node = question.look, Node(question.settings)
        _write(answers, _line(answer(question, node)))


def _line(found: Finding) -> bytes:
    try:
        return written(found)
    except (TypeError, ValueError) as error:
        return written(unknown(f"its answer cannot be passed on: {error!a}"))


def _listen(asked: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        asked.put(line)
    os._exit(0)


def _write(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


if __name__ == "__main__":
    main()

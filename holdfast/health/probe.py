"""Runs checks in a process of its own, so that only that process can hang.

A probe answers one question at a time and lives until its input ends, which also happens if the
process that started it dies. A thread notices that, for the main thread may be stuck in a check.
Whatever a check prints goes to stderr: stdout carries the answers.
"""

from __future__ import annotations

import os
import queue
import sys
import threading

import msgspec

from holdfast import kernel
from holdfast.health.catalogue import KINDS, WITH_SUBJECT
from holdfast.health.judgement import READY, Judgement, Question, encode_line, unknown
from holdfast.health.node import Node
from holdfast.health.own_checks import loaded


def answer(question: Question, node: Node) -> Judgement:
    subject = [question.subject] if question.kind in WITH_SUBJECT else []
    try:
        check = loaded(f"holdfast.health.{KINDS[question.kind].function}")
        found: Judgement = check(node, *subject, question.before)
        return found
    except Exception as error:
        # A check of ours that breaks on an unusual machine says nothing about the machine.
        return unknown(f"the check broke: {type(error).__name__}: {error}")


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
        question = msgspec.json.decode(asked.get(), type=Question)
        if node is None or question.look != look:
            look, node = question.look, Node(question.settings)
        _write(answers, _line(answer(question, node)))


def _line(found: Judgement) -> bytes:
    try:
        return encode_line(found)
    except (TypeError, ValueError) as error:
        return encode_line(unknown(f"its answer cannot be passed on: {error!a}"))


def _listen(asked: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        asked.put(line)
    os._exit(0)


def _write(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]

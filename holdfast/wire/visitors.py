"""A visitor is a command that asks a running job's coordinator one question, with the job's token."""

from __future__ import annotations

import socket
import ssl
from typing import TypeVar

import msgspec

from holdfast.errors import JobError
from holdfast.jobhome import JobHome
from holdfast.messages.wire import PROTOCOL, Question, Rejected, ToVisitor, Visit
from holdfast.wire import framing
from holdfast.wire.tls import TlsFiles, client_context, explained

LIMIT_S = 10.0

T = TypeVar("T", bound=msgspec.Struct)


def ask(home: JobHome, question: Question, answer: type[T], tls: TlsFiles | None = None) -> T:
    """Get the coordinator's answer; raise JobError if the job is over or refuses."""
    if not home.alive():
        raise JobError(f"job {home.name} does not run; see `holdfast incidents {home.name}`")
    content = home.read_job_file()
    return ask_at(home.name, (content.host, content.port), content.token, question, answer, tls)


def ask_at(
    job: str,
    address: tuple[str, int],
    token: str,
    question: Question,
    answer: type[T],
    tls: TlsFiles | None = None,
) -> T:
    """Get the answer of a coordinator on any machine; raise JobError if there is none."""
    visit = Visit(protocol=PROTOCOL, token=token, question=question)
    try:
        told = _exchange(address, visit, tls)
    except OSError as error:
        reason = explained(error) if isinstance(error, ssl.SSLError) else error
        where = f"{address[0]}:{address[1]}"
        raise JobError(f"job {job}: no answer from its coordinator at {where}: {reason}") from None
    if isinstance(told, Rejected):
        raise JobError(f"job {job}: {told.reason}")
    if not isinstance(told, answer):
        hint = "; if the job uses TLS, give --tls-cert, --tls-key, --tls-ca" if tls is None else ""
        raise JobError(f"job {job}: its coordinator closed the connection{hint}")
    return told


def _exchange(address: tuple[str, int], visit: Visit, tls: TlsFiles | None) -> object:
    decoder = framing.FrameDecoder[ToVisitor](ToVisitor)  # type: ignore[arg-type]
    context = client_context(tls)
    plain = socket.create_connection(address, LIMIT_S)
    with plain if context is None else context.wrap_socket(plain) as connection:
        connection.sendall(framing.encode(visit))
        while data := connection.recv(1 << 16):
            for message in decoder.feed(data):
                return message
    return None

"""A visitor is a command that asks a running job's coordinator one question, with the job's token."""

from __future__ import annotations

import socket
import ssl
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.errors import JobError
from holdfast.jobhome import JobHome
from holdfast.messages.wire import PROTOCOL, Question, Rejected, ToVisitor, Visit
from holdfast.wire import framing
from holdfast.wire.tls import TlsFiles, client_context, explained

LIMIT_S = 10.0

T = TypeVar("T", bound=msgspec.Struct)


class Coordinates(NamedTuple):
    """Where a job's coordinator is, and what it wants to be shown."""

    job: str
    host: str
    port: int
    token: str
    tls: TlsFiles | None = None


def ask(home: JobHome, question: Question, answer: type[T], tls: TlsFiles | None = None) -> T:
    """Get the coordinator's answer; raise JobError if the job is over or refuses."""
    return ask_at(coordinates(home, tls), question, answer)


def coordinates(home: JobHome, tls: TlsFiles | None) -> Coordinates:
    """Say where a job of this machine has its coordinator; JobError if it does not run."""
    if not home.alive():
        raise JobError(f"job {home.name} does not run; see `holdfast incidents {home.name}`")
    content = home.read_job_file()
    return Coordinates(home.name, content.host, content.port, content.token, tls)


def ask_at(where: Coordinates, question: Question, answer: type[T]) -> T:
    """Get the answer of a coordinator that may be anywhere."""
    silent = f"job {where.job}: no answer from its coordinator at {where.host}:{where.port}"
    visit = Visit(protocol=PROTOCOL, token=where.token, question=question)
    try:
        told = _exchange((where.host, where.port), visit, where.tls)
    except OSError as error:
        reason = explained(error) if isinstance(error, ssl.SSLError) else error
        raise JobError(f"{silent}: {reason}") from None
    if isinstance(told, Rejected):
        raise JobError(f"job {where.job}: {told.reason}")
    if not isinstance(told, answer):
        hint = ""
        if where.tls is None:
            hint = "; if the job uses TLS, give --tls-cert, --tls-key, --tls-ca"
        raise JobError(f"{silent}: it closed the connection{hint}")
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

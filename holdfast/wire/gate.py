"""A gate is what a peer meets first on a listening socket: TLS, or the absence of it.

asyncio's own TLS keeps a failed handshake to itself: the server's side never hears of it, and the peer
is hung up on without the alert that says why. So the gate drives the handshake itself (`ssl.SSLObject`
on memory buffers) and answers every peer that expects something else:

    job      peer     what the peer gets                    what this side logs
    TLS      plain    a `Rejected` in plain text            "it does not use TLS ..."
    plain    TLS      a `Rejected`, which ends a handshake  "it uses TLS ..."
    TLS      TLS      OpenSSL's alert, if it is rejected    why, or that it broke off

The protocol behind the gate is told of a connection at once, with a transport that encrypts. So its
limits on strangers (how many, how long) hold during the handshake too, and it is the one that logs.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Protocol, cast

from holdfast.messages.wire import Rejected
from holdfast.wire import framing
from holdfast.wire.tls import SAME_AUTHORITY, explained

READ_BYTES = 1 << 16
_HANDSHAKE_RECORD = 0x16
"""First byte of every TLS connection. A frame's first byte is 0: no first frame is that large."""


class Guarded(Protocol):
    """What stands behind a gate."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def connection_lost(self, error: Exception | None) -> None: ...
    def cut_off(self, why: str) -> None:
        """Log why, and abort the connection."""


class Gate(asyncio.Protocol):
    """Passes a connection on that uses TLS exactly if `context` says so."""

    _plain: asyncio.Transport

    def __init__(self, guarded: Guarded, context: ssl.SSLContext | None) -> None:
        self._guarded = guarded
        self._context = context
        self._tls: _Secured | None = None
        self._heard = self._cut = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast(asyncio.Transport, transport)
        if self._context is not None:
            self._tls = _Secured(self._plain, self._context)
        self._guarded.connection_made(self._tls or self._plain)

    def data_received(self, data: bytes) -> None:
        if not self._heard and not self._fits(data):
            return
        self._heard = True
        if self._tls is None:
            self._plain.set_protocol(cast(asyncio.Protocol, self._guarded))
            self._guarded.data_received(data)
            return
        try:
            for part in self._tls.decrypted(data):
                self._guarded.data_received(part)
        except ssl.SSLError as error:
            self._cut_off(explained(error))

    def connection_lost(self, error: Exception | None) -> None:
        if self._heard and self._tls is not None and not self._tls.complete and not self._cut:
            # A client that is written with asyncio sends no alert when it rejects a certificate.
            self._cut_off(f"it broke off the TLS handshake; {SAME_AUTHORITY}")
        self._guarded.connection_lost(error)

    def _cut_off(self, why: str) -> None:
        self._cut = True
        self._guarded.cut_off(why)

    def _fits(self, data: bytes) -> bool:
        """Whether a peer's first bytes are as this side expects; a peer that differs is cut off."""
        theirs = data[0] == _HANDSHAKE_RECORD
        if theirs == (self._tls is not None):
            return True
        flags = "--tls-cert, --tls-key and --tls-ca"
        if theirs:
            reason, why = f"this coordinator does not use TLS; leave out {flags}", "it uses TLS"
        else:
            reason, why = f"this coordinator requires TLS; give {flags}", "it does not use TLS"
        self._plain.write(framing.encode(Rejected(reason=reason)))
        job = "does not" if theirs else "does"
        self._cut_off(f"{why}, and this job {job}; give {flags} on both sides or neither")
        return False


class _Secured(asyncio.Transport):
    """Encrypts what is written, once the handshake is complete."""

    def __init__(self, plain: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.complete = False

    def decrypted(self, data: bytes) -> list[bytes]:
        """Take what the peer sent, and answer what TLS itself answers; an alert is sent, too."""
        self._incoming.write(data)
        try:
            if not self.complete:
                self._tls.do_handshake()
                self.complete = True
            return self._read()
        except ssl.SSLWantReadError:
            return []
        finally:
            self._flush()

    def _read(self) -> list[bytes]:
        parts: list[bytes] = []
        try:
            while part := self._tls.read(READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # The peer has said that it closes.
            self._plain.close()
        return parts

    def _flush(self) -> None:
        if self._outgoing.pending and not self._plain.is_closing():
            self._plain.write(self._outgoing.read())

    # ---- what a protocol calls ----

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self.complete:
            self._tls.write(data)
            self._flush()

    def close(self) -> None:
        if self.complete:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # The peer's answer is not waited for.
            self._flush()
        self._plain.close()

    def can_write_eof(self) -> bool:
        return False

    def abort(self) -> None:
        self._plain.abort()

    def is_closing(self) -> bool:
        return self._plain.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._plain.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._plain.get_extra_info(name, default)

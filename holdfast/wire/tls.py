"""Mutual TLS protects connections between nodes and the coordinator, if the user asks for it.

Both sides present a certificate signed by the same authority. The authority is the job's own, so each
side checks the other's signature, not its host name. The token is required as well.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from msgspec import Struct

from holdfast.errors import UsageError


class TlsFiles(Struct, frozen=True, kw_only=True):
    """Paths of certificate, private key and certificate authority."""

    cert: str
    key: str
    ca: str

    @classmethod
    def of(cls, paths: tuple[str, str, str] | None) -> TlsFiles | None:
        """Convert from the tuple that messages carry."""
        return None if paths is None else cls(cert=paths[0], key=paths[1], ca=paths[2])

    @property
    def paths(self) -> tuple[str, str, str]:
        return self.cert, self.key, self.ca


def server_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    return None if files is None else _context(files, ssl.PROTOCOL_TLS_SERVER)


def client_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    return None if files is None else _context(files, ssl.PROTOCOL_TLS_CLIENT)


def _context(files: TlsFiles, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    for flag, path in (("cert", files.cert), ("key", files.key), ("ca", files.ca)):
        if not Path(path).is_file():
            raise UsageError(f"--tls-{flag} {path}: no such file")
    try:
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"--tls-cert, --tls-key, --tls-ca: not usable: {error}") from None
    return context

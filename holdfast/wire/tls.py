"""TLS between agents and the coordinator, where it is asked for.

Both sides show a certificate that the same authority signed; the authority is the job's own, so what
is checked is that the other side has one, not what its name is. The token is asked for all the same.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from msgspec import Struct

from holdfast.errors import UsageError


class TlsFiles(Struct, frozen=True, kw_only=True):
    cert: str
    key: str
    ca: str

    @classmethod
    def of(cls, paths: tuple[str, str, str] | None) -> TlsFiles | None:
        """What is in a message, as these."""
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

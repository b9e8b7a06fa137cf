"""Mutual TLS protects connections between nodes and the coordinator, if the user asks for it.

Both sides present a certificate signed by the same authority. The authority is the job's own, so each
side checks the other's signature, not its host name. The token is required as well.

A node or coordinator checks its own files before it starts, by a handshake with itself: a file that is
missing, unreadable, no certificate, expired or of another authority is an error at the command line.
What then still fails is between two sides, and `explained` says it in words.
"""

from __future__ import annotations

import os
import ssl

from msgspec import Struct

from holdfast.errors import UsageError

_NOT_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"}
"""What OpenSSL calls the answer of a peer that does not use TLS."""
SAME_AUTHORITY = "both sides need valid certificates of the same --tls-ca"
_HANDSHAKE_TURNS = 8
"""More than a handshake between two sides in memory takes."""


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


def check_files(files: TlsFiles) -> None:
    """Refuse files that no other side could accept, by a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        _context(files, ssl.PROTOCOL_TLS_CLIENT).wrap_bio(to_client, to_server),
        _context(files, ssl.PROTOCOL_TLS_SERVER).wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for _ in range(_HANDSHAKE_TURNS):
            sides = [side for side in sides if not _shakes_hands(side)]
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"--tls-cert {files.cert}: --tls-ca {files.ca} rejects it ({error.verify_message}); "
            "both sides of a connection need valid certificates of that authority"
        ) from None
    except ssl.SSLError as error:
        raise UsageError(f"--tls-cert {files.cert}: not usable ({_words(error)})") from None


def _shakes_hands(side: ssl.SSLObject) -> bool:
    """Go on with a handshake; whether it is complete on this side."""
    try:
        side.do_handshake()
        return True
    except ssl.SSLWantReadError:
        return False


def explained(error: ssl.SSLError) -> str:
    """Say in words why there is no TLS with a peer, and what to do."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is rejected ({error.verify_message}); {SAME_AUTHORITY}"
    if reason in _NOT_TLS:
        return (
            "it does not use TLS; give --tls-cert, --tls-key and --tls-ca on both sides or neither"
        )
    if "ALERT" in reason:
        return f"it refuses this side's certificate ({_words(error)}); {SAME_AUTHORITY}"
    return f"TLS failed ({_words(error)})"


def _words(error: ssl.SSLError) -> str:
    """OpenSSL's reason without capitals: TLSV1_ALERT_UNKNOWN_CA is "unknown ca"."""
    reason = error.reason or error.strerror or str(error)
    return reason.rpartition("ALERT_")[2].replace("_", " ").lower()


def _context(files: TlsFiles, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    for flag, path in (("cert", files.cert), ("key", files.key), ("ca", files.ca)):
        _refuse_unreadable(path, f"--tls-{flag} {path}")
    for flag, path in (("cert", files.cert), ("ca", files.ca)):
        try:
            (context if flag == "ca" else ssl.SSLContext(protocol)).load_verify_locations(path)
        except (ssl.SSLError, OSError):
            raise UsageError(f"--tls-{flag} {path}: is no certificate in PEM format") from None
    try:
        context.load_cert_chain(files.cert, files.key, password="")  # Never asked at a terminal.
    except (ssl.SSLError, OSError):
        raise UsageError(
            f"--tls-key {files.key}: is not the key of --tls-cert {files.cert} in PEM format "
            "without a passphrase"
        ) from None
    return context


def _refuse_unreadable(path: str, flag: str) -> None:
    if not os.path.isfile(path):
        raise UsageError(f"{flag}: no such file")
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UsageError(f"{flag}: {error.strerror}") from None

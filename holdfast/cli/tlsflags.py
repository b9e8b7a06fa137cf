"""The three flags that say which certificates to show and to trust."""

from __future__ import annotations

import argparse

from holdfast.errors import UsageError
from holdfast.wire.tls import TlsFiles


def add_tls_flags(parser: argparse.ArgumentParser, about: str = "as for `holdfast run`") -> None:
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--tls-{name}", metavar="FILE", help=about)


def tls_given(given: argparse.Namespace) -> TlsFiles | None:
    files = (given.tls_cert, given.tls_key, given.tls_ca)
    if not any(files):
        return None
    if not all(files):
        raise UsageError("--tls-cert, --tls-key and --tls-ca go together")
    return TlsFiles.of(files)

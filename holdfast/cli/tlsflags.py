"""The TLS flags name the certificates to show and to trust, for commands other than `run`."""

from __future__ import annotations

import argparse

from holdfast.cli.flags import add_flag, given_settings
from holdfast.config.schema import Settings
from holdfast.config.settings import tls_files
from holdfast.wire.tls import TlsFiles


def add_tls_flags(parser: argparse.ArgumentParser) -> None:
    for setting in (Settings.tls_cert, Settings.tls_key, Settings.tls_ca):
        add_flag(parser, setting)


def tls_given(parsed: argparse.Namespace) -> TlsFiles | None:
    """The certificates from flags, variables or holdfast.toml."""
    return tls_files(given_settings(parsed))

"""Settings for all tests, and what tests of several parts share."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from holdfast.wire.tls import TlsFiles

# A busy machine makes a test slow, not wrong.
settings.register_profile(
    "holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("holdfast")

NewAuthority = Callable[..., TlsFiles]


@pytest.fixture(scope="session")
def new_authority() -> Iterator[NewAuthority]:
    """Makes a certificate authority of its own, and a node's certificate that it has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with tempfile.TemporaryDirectory() as root:

        def make(days: int = 2) -> TlsFiles:
            folder = tempfile.mkdtemp(dir=root)

            def openssl(*words: str) -> None:
                subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

            new = ("-newkey", "rsa:2048", "-nodes", "-subj")
            name = f"/CN=authority of {Path(folder).name}"
            openssl("req", "-x509", *new, name, "-keyout", "ca.key", "-out", "ca.pem")
            openssl("req", *new, "/CN=node", "-keyout", "node.key", "-out", "node.csr")
            signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days))
            openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem")
            cert, key, ca = (str(Path(folder, name)) for name in ("node.pem", "node.key", "ca.pem"))
            return TlsFiles(cert=cert, key=key, ca=ca)

        yield make


@pytest.fixture(scope="session")
def certificates(new_authority: NewAuthority) -> TlsFiles:
    return new_authority()


@pytest.fixture(scope="session")
def other_certificates(new_authority: NewAuthority) -> TlsFiles:
    """Those of another authority."""
    return new_authority()

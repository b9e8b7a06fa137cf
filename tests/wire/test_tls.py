"""TLS on real sockets: who talks to whom, and the one line on each side when they cannot."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.messages.wire import Beat, FromCoordinator, Rejected
from holdfast.wire import framing
from holdfast.wire.gate import Gate
from holdfast.wire.tls import TlsFiles, check_files, client_context, explained, server_context

LIMIT_S = 50.0


class Echo(asyncio.Protocol):
    """Sends back what it gets, and notes what happens to it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.cut: list[str] = []
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if data == b"close":
            self.transport.close()
        else:
            self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(None)

    def cut_off(self, why: str) -> None:
        self.cut.append(why)
        self.transport.abort()


class Meeting:
    """One server behind a gate, and clients of it."""

    def __init__(self, tls: TlsFiles | None) -> None:
        self._tls = server_context(tls)
        self.echoes: list[Echo] = []

    async def __aenter__(self) -> Meeting:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self._server = await loop.create_server(self._gate, sock=listener)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    def _gate(self) -> Gate:
        self.echoes.append(Echo())
        return Gate(self.echoes[-1], self._tls)

    async def connect(
        self, tls: TlsFiles | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=client_context(tls))

    async def cut(self) -> str:
        """The one line that the server logged, once the connection is gone."""
        (echo,) = self.echoes
        await asyncio.wait_for(echo.lost, LIMIT_S)
        (line,) = echo.cut
        assert "\n" not in line
        return line


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * LIMIT_S))


def test_both_with_certificates_of_one_authority_talk(certificates: TlsFiles) -> None:
    async def test() -> None:
        async with Meeting(certificates) as meeting:
            reader, writer = await meeting.connect(certificates)
            sent = bytes(range(256)) * 4000
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent
            writer.write(b"close")
            assert await reader.read() == b""
            writer.close()
            await asyncio.wait_for(meeting.echoes[0].lost, LIMIT_S)
            assert meeting.echoes[0].cut == []

    run(test)


def test_both_without_talk() -> None:
    async def test() -> None:
        async with Meeting(None) as meeting:
            reader, writer = await meeting.connect(None)
            writer.write(b"\0\0\0\1x")
            assert await reader.readexactly(5) == b"\0\0\0\1x"
            writer.close()

    run(test)


def test_a_plain_client_is_told_that_the_job_requires_tls(certificates: TlsFiles) -> None:
    async def test() -> None:
        async with Meeting(certificates) as meeting:
            reader, writer = await meeting.connect(None)
            writer.write(framing.encode(Beat()))
            decoder = framing.FrameDecoder[Any](FromCoordinator)  # type: ignore[arg-type]
            (told,) = decoder.feed(await reader.read())
            writer.close()
            assert isinstance(told, Rejected)
            assert told.reason.startswith("this coordinator requires TLS; give --tls-cert")
            assert await meeting.cut() == (
                "it does not use TLS, and this job does; give --tls-cert, --tls-key and --tls-ca on "
                "both sides or neither"
            )

    run(test)


def test_a_client_with_tls_learns_that_the_job_has_none(certificates: TlsFiles) -> None:
    async def test() -> None:
        async with Meeting(None) as meeting:
            with pytest.raises(ssl.SSLError) as failed:
                await meeting.connect(certificates)
            assert explained(failed.value).startswith("it does not use TLS; ")
            assert (await meeting.cut()).startswith("it uses TLS, and this job does not; ")

    run(test)


def test_a_client_of_another_authority_rejects_the_server(
    certificates: TlsFiles, other_certificates: TlsFiles
) -> None:
    async def test() -> None:
        async with Meeting(certificates) as meeting:
            with pytest.raises(ssl.SSLError) as failed:
                await meeting.connect(other_certificates)
            assert "certificate is rejected (" in explained(failed.value)
            assert (await meeting.cut()).startswith("it broke off the TLS handshake; ")

    run(test)


def test_a_client_that_sends_an_alert_is_quoted(
    certificates: TlsFiles, other_certificates: TlsFiles
) -> None:
    def connect(port: int) -> None:
        context = client_context(other_certificates)
        assert context is not None
        with (
            socket.create_connection(("127.0.0.1", port), LIMIT_S) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            context.wrap_socket(plain)

    async def test() -> None:
        async with Meeting(certificates) as meeting:
            await asyncio.to_thread(connect, meeting.port)
            assert "it refuses this side's certificate (unknown ca); " in await meeting.cut()

    run(test)


def test_a_client_whose_certificate_is_rejected_gets_the_alert(
    certificates: TlsFiles, other_certificates: TlsFiles
) -> None:
    """Its own certificate is another authority's; it trusts the server's."""
    mixed = TlsFiles(cert=other_certificates.cert, key=other_certificates.key, ca=certificates.ca)

    async def test() -> None:
        async with Meeting(certificates) as meeting:
            reader, writer = await meeting.connect(mixed)  # TLS 1.3: its part is complete.
            writer.write(b"hello")
            with pytest.raises(ssl.SSLError) as failed:
                await reader.read()
            assert "it refuses this side's certificate (" in explained(failed.value)
            assert "its certificate is rejected (" in await meeting.cut()

    run(test)


def test_a_client_without_a_certificate_is_cut_off(certificates: TlsFiles) -> None:
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.load_verify_locations(certificates.ca)

    async def test() -> None:
        async with Meeting(certificates) as meeting:
            reader, _ = await asyncio.open_connection("127.0.0.1", meeting.port, ssl=anonymous)
            with pytest.raises(ssl.SSLError):
                await reader.read()
            assert "peer did not return a certificate" in await meeting.cut()

    run(test)


@pytest.mark.parametrize("garbage", [b"\x16" + b"\xff" * 100, b"\x16\x03\x01\x00\x05hello"])
def test_bytes_that_only_look_like_tls_are_cut_off(certificates: TlsFiles, garbage: bytes) -> None:
    async def test() -> None:
        async with Meeting(certificates) as meeting:
            _, writer = await meeting.connect(None)
            writer.write(garbage)
            await meeting.cut()
            writer.close()

    run(test)


# ---- files ----


def refusal(files: TlsFiles) -> str:
    with pytest.raises(UsageError) as refused:
        check_files(files)
    line = str(refused.value)
    assert "\n" not in line
    return line


def changed(files: TlsFiles, **paths: str) -> TlsFiles:
    return TlsFiles(**{"cert": files.cert, "key": files.key, "ca": files.ca, **paths})


def test_good_files_pass(certificates: TlsFiles) -> None:
    check_files(certificates)


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_file_that_is_missing_garbage_or_a_directory_is_named(
    certificates: TlsFiles, tmp_path: Path, which: str
) -> None:
    (tmp_path / "garbage").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    for name in ("gone", "garbage", "empty", "."):
        path = str(tmp_path / name)
        line = refusal(changed(certificates, **{which: path}))
        assert line.startswith(f"--tls-{which} {path}: "), line


def test_a_key_of_another_certificate_is_refused(
    certificates: TlsFiles, other_certificates: TlsFiles
) -> None:
    line = refusal(changed(certificates, key=other_certificates.key))
    assert f"is not the key of --tls-cert {certificates.cert}" in line


def test_a_key_with_a_passphrase_is_refused_without_asking(
    certificates: TlsFiles, tmp_path: Path
) -> None:
    locked = str(tmp_path / "locked.key")
    words = ["-in", certificates.key, "-aes256", "-passout", "pass:x", "-out", locked]
    subprocess.run(["openssl", "rsa", *words], check=True, capture_output=True)
    assert "without a passphrase" in refusal(changed(certificates, key=locked))


def test_a_certificate_of_another_authority_is_refused_by_name(
    certificates: TlsFiles, other_certificates: TlsFiles
) -> None:
    line = refusal(changed(certificates, ca=other_certificates.ca))
    assert f"--tls-cert {certificates.cert}: --tls-ca {other_certificates.ca} rejects it" in line


def test_an_expired_certificate_is_refused_before_the_start(
    new_authority: Callable[..., TlsFiles],
) -> None:
    assert "expired" in refusal(new_authority(days=-1))

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from fakenode import FakeNode
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.health.judgement import Judgement
from holdfast.health.service import ServiceAddress, check_service, judge_answer, service_address

HEALTHY = b'{"success": true, "fail_count": 0}'


@contextmanager
def serving(body: bytes, status: int = 200, socket: Path | None = None) -> Iterator[str]:
    """A real server, on a Unix socket or on a port of its own; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Path", self.path)
            self.end_headers()
            self.wfile.write(body if self.path == "/health" else b"[]")

        def address_string(self) -> str:
            return "test"

        def log_message(self, format: str, *args: object) -> None:
            pass

    server: socketserver.BaseServer
    if socket is None:
        server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
        url = f"http://127.0.0.1:{server.server_address[1]}/health"
    else:
        server = socketserver.UnixStreamServer(str(socket), Handler)
        url = f"unix:{socket}:/health"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(fake: FakeNode, url: str, **settings: object) -> Judgement:
    return check_service(fake.node(**settings), url, None)


@pytest.mark.parametrize("by_socket", [False, True])
@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        (HEALTHY, "pass"),
        (b'{"success": true, "fail_count": 2, "message": "fan 3"}', "fail"),
        (b'{"success": false, "fail_count": 0}', "fail"),
        (b"<html>", "unknown"),
    ],
)
def test_a_service_is_taken_at_its_word(
    fake: FakeNode, tmp_path: Path, by_socket: bool, body: bytes, verdict: str
) -> None:
    with serving(body, socket=tmp_path / "s" if by_socket else None) as url:
        found = ask(fake, url)
    assert found.verdict == verdict
    assert found.facts["answer_s"] > 0  # type: ignore[operator]


@pytest.mark.parametrize("means", ["unknown", "fail", "warn", "pass"])
@pytest.mark.parametrize("url", ["unix:/nowhere/at/all.sock", "http://127.0.0.1:1/health"])
def test_a_service_that_is_not_there_means_what_the_user_says(
    fake: FakeNode, url: str, means: str
) -> None:
    found = ask(fake, url, service_unreachable=means)
    assert found.verdict == means
    assert "cannot be reached" in found.reason


def test_a_service_that_says_no_http_is_unreachable(fake: FakeNode, tmp_path: Path) -> None:
    class Rude(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"\0\0\0\n")

    with socketserver.UnixStreamServer(str(tmp_path / "s"), Rude) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = ask(fake, f"unix:{tmp_path / 's'}")
        thread.join()
    assert found.verdict == "unknown"


@pytest.mark.parametrize(
    ("status", "body", "verdict"),
    [
        (503, b'{"success": false, "fail_count": 1}', "fail"),
        (500, HEALTHY, "unknown"),
        (302, b"", "unknown"),
        (200, b"{}", "unknown"),
        (200, b'{"success": true}', "unknown"),
        (200, b'{"fail_count": 0}', "unknown"),
        (200, b'{"success": "true", "fail_count": 0}', "unknown"),
        (200, b'{"success": true, "fail_count": "0"}', "unknown"),
        (200, b'{"success": true, "fail_count": false}', "unknown"),
        (200, b'{"success": true, "fail_count": -1}', "unknown"),
        (200, b"[1]", "unknown"),
    ],
)
def test_only_a_clear_answer_counts(status: int, body: bytes, verdict: str) -> None:
    assert judge_answer("u", status, body).verdict == verdict


def test_what_the_service_says_in_words_is_passed_on() -> None:
    body = b'{"success": true, "fail_count": 1, "message": "fan 3"}'
    assert judge_answer("u", 200, body).reason == "u reports 1 failure: fan 3"


@given(st.integers(100, 599), st.binary(max_size=40))
def test_noise_never_condemns_and_never_clears(status: int, body: bytes) -> None:
    assert judge_answer("u", status, body).verdict == "unknown"


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("unix:/run/n.sock", ServiceAddress(path="/", socket="/run/n.sock")),
        ("unix:///run/n.sock:/v1/health", ServiceAddress(path="/v1/health", socket="/run/n.sock")),
        ("/run/n.sock", ServiceAddress(path="/", socket="/run/n.sock")),
        ("http://node0:8080/h?x=1", ServiceAddress(path="/h?x=1", host="node0", port=8080)),
        ("https://node0", ServiceAddress(path="/", host="node0", tls=True)),
        ("http://[::1]:80/", ServiceAddress(path="/", host="::1", port=80)),
    ],
)
def test_the_url_says_where(url: str, where: ServiceAddress) -> None:
    assert service_address(url) == where


@pytest.mark.parametrize("url", ["", "node0:8080", "ftp://x", "unix:relative", "http://h:port"])
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        service_address(url)

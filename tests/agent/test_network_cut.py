"""A cut connection: what is sent to it is lost, nobody is told, and once healed all of it arrives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from holdfast.agent.network_cut import Cut

ECHO = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while data := connection.recv(1000):
    connection.sendall(data)
"""


@pytest.fixture
def echo() -> Iterator[tuple[int, socket.socket]]:
    """A process that sends back what it is sent, and a connection with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-S", "-c", ECHO, str(server.getsockname()[1])]
        with subprocess.Popen(command) as process:
            connection, _ = server.accept()
            connection.settimeout(20)
            try:
                yield process.pid, connection
            finally:
                connection.close()


def test_what_is_sent_to_a_cut_connection_arrives_when_it_is_healed(
    echo: tuple[int, socket.socket],
) -> None:
    pid, connection = echo
    connection.sendall(b"one")
    assert connection.recv(10) == b"one"
    cut = Cut([pid])
    if not cut:
        pytest.skip("we may not have other processes' sockets here")
    connection.sendall(b"two")
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(10)
    cut.heal()
    connection.settimeout(20)
    assert connection.recv(10) == b"two"


def test_both_ends_on_one_node_stay_connected(echo: tuple[int, socket.socket]) -> None:
    pid, connection = echo
    cut = Cut([pid, os.getpid()])
    try:
        connection.sendall(b"one")
        assert connection.recv(10) == b"one"
    finally:
        cut.heal()


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert len(Cut([process.pid])) == 0

"""The outbox: an agent never waits for a worker that does not read."""

from __future__ import annotations

import asyncio
import socket

from holdfast.agent.outbox import MAX_UNSENT_BYTES, Outbox


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def test_what_the_socket_does_not_take_is_sent_later_in_order() -> None:
    async def scene() -> None:
        ours, theirs = pair()
        outbox = Outbox(ours)
        sent = [bytes([i]) * 60_000 for i in range(30)]
        assert outbox.put(sent)
        got: list[bytes] = []
        deadline = asyncio.get_running_loop().time() + 60
        while len(got) < len(sent) and asyncio.get_running_loop().time() < deadline:
            try:
                got.append(theirs.recv(1 << 16))
            except BlockingIOError:
                await asyncio.sleep(0)
        assert got == sent
        outbox.close()
        ours.close()
        theirs.close()

    asyncio.run(scene())


def test_too_much_is_refused() -> None:
    async def scene() -> None:
        ours, theirs = pair()
        outbox = Outbox(ours)
        taken = 0
        while outbox.put([b"x" * 60_000]):
            taken += 60_000
            assert taken < 2 * MAX_UNSENT_BYTES
        outbox.close()
        ours.close()
        theirs.close()

    asyncio.run(scene())


def test_nobody_at_the_other_end_is_no_trouble() -> None:
    async def scene() -> None:
        ours, theirs = pair()
        theirs.close()
        outbox = Outbox(ours)
        assert outbox.put([b"x"])
        assert outbox.put([b"x"])
        outbox.close()
        ours.close()

    asyncio.run(scene())

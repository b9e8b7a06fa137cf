"""Messages in packets: whole again at the other end, whatever came in between."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.messages.local import PACKET_BYTES, Piece, ScriptReply
from holdfast.messages.requests import MAX_MESSAGE_BYTES, Values
from holdfast.wire.packets import Joiner, packets_of

decoder = msgspec.msgpack.Decoder(ScriptReply | Piece)


def reply(size: int) -> ScriptReply:
    return ScriptReply(channel=0, number=1, answer=Values(values=(b"x" * size,)))


def received(packets: list[bytes], joiner: Joiner) -> list[ScriptReply]:
    found = []
    for packet in packets:
        message = decoder.decode(packet)
        if isinstance(message, Piece):
            whole = joiner.add(message)
            if whole is None:
                continue
            message = decoder.decode(whole)
        found.append(message)
    return found


@given(st.integers(0, 5 * PACKET_BYTES) | st.integers(PACKET_BYTES - 100, PACKET_BYTES + 100))
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    packets = list(packets_of(reply(size)))
    assert all(len(packet) <= PACKET_BYTES for packet in packets)
    assert received(packets, Joiner()) == [reply(size)]


def test_small_messages_may_come_in_between() -> None:
    large, small = list(packets_of(reply(200_000))), list(packets_of(reply(1)))
    mixed = [large[0], *small, *large[1:]]
    assert received(mixed, Joiner()) == [reply(1), reply(200_000)]


def test_a_message_that_was_never_finished_is_forgotten_with_the_next() -> None:
    large = list(packets_of(reply(200_000)))
    assert received(large[:2] + large, Joiner()) == [reply(200_000)]


def test_pieces_without_a_beginning_are_lost_and_nothing_else() -> None:
    large = list(packets_of(reply(200_000)))
    assert received(large[1:] + large, Joiner()) == [reply(200_000)]


def test_an_endless_message_is_not_kept() -> None:
    joiner = Joiner()
    for index in range(100):
        assert joiner.add(Piece(index=index, of=1000, data=b"x" * 60_000)) is None
        assert joiner._size_bytes <= MAX_MESSAGE_BYTES

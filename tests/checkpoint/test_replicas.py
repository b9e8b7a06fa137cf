"""Copies of images on other nodes: real sockets, and real files in shared memory."""

from __future__ import annotations

import os
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from keepers import (
    BODY_AT,
    LARGE,
    QUICK,
    SMALL,
    TOKEN,
    NewNode,
    Node,
    an_image,
    between,
    body,
    until,
)

from holdfast.checkpoint.replicas.copies import Transfer, TransferLimits, pull, push
from holdfast.checkpoint.state.layout import BLOCK_BYTES, block_digests
from holdfast.errors import Cancelled, NotThere, Unusable, WireError
from holdfast.wire.tls import TlsFiles, client_context, server_context

# ---- copies ----


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES, SMALL, LARGE])
def test_what_is_pushed_is_there_byte_for_byte(here: Node, there: Node, size: int) -> None:
    held = here.store.put(an_image(), size)
    push(there.peer, TOKEN, None, held)
    copy = there.store.images[an_image()]
    assert body(copy) == body(held)
    assert copy.outline == held.outline


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES, SMALL, LARGE])
def test_what_is_pulled_is_there_byte_for_byte(here: Node, there: Node, size: int) -> None:
    held = there.store.put(an_image(), size)
    copy = pull(there.peer, TOKEN, None, an_image(), here.store)
    assert body(copy) == body(held)
    assert copy.outline == held.outline
    here.store.release(copy)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_any_number_of_connections_brings_the_same(here: Node, there: Node, streams: int) -> None:
    held = here.store.put(an_image(), 8 * BLOCK_BYTES + 1)
    push(there.peer, TOKEN, None, held, TransferLimits(streams=streams))
    assert body(there.store.images[an_image()]) == body(held)


def test_several_peers_push_at_once(here: Node, there: Node) -> None:
    images = [here.store.put(an_image(rank=rank)) for rank in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda held: push(there.peer, TOKEN, None, held), images))
    assert set(there.store.images) == {an_image(rank=rank) for rank in range(4)}
    for held in images:
        assert body(there.store.images[held.id]) == body(held)


def test_what_a_peer_does_not_have_is_said_to_be_missing(here: Node, there: Node) -> None:
    there.store.put(an_image(step=7))
    with pytest.raises(NotThere, match="does not have"):
        pull(there.peer, TOKEN, None, an_image(step=8), here.store)
    assert here.store.placed == 0


# ---- transfers that are ended ----


def test_a_transfer_can_be_cancelled_and_a_newer_one_takes_its_place(
    here: Node, there: Node
) -> None:
    older, newer = here.store.put(an_image(step=7), LARGE), here.store.put(an_image(step=8), LARGE)
    copying, under_way, go_on = Transfer(), threading.Event(), threading.Event()

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if index == 1 and before > BLOCK_BYTES:
            under_way.set()
            go_on.wait(60)
        return data

    with between(there.peer, meddle) as peer, ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(push, peer, TOKEN, None, older, TransferLimits(), copying)
        assert under_way.wait(60)
        began = time.monotonic()
        copying.cancel()
        with pytest.raises(Cancelled):
            pushing.result()
        assert time.monotonic() - began < 30
        push(there.peer, TOKEN, None, newer)
        go_on.set()
    until(lambda: there.store.dropped == 1, "the older one is dropped")
    assert set(there.store.images) == {newer.id}
    with pytest.raises(Cancelled):
        pull(there.peer, TOKEN, None, newer.id, here.store, transfer=copying)


def test_closing_ends_a_transfer_that_is_under_way(here: Node, there: Node) -> None:
    held = here.store.put(an_image(), LARGE)
    under_way, go_on = threading.Event(), threading.Event()

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if index == 1 and before > BLOCK_BYTES:
            under_way.set()
            go_on.wait(60)
        return data

    with between(there.peer, meddle) as peer, ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(push, peer, TOKEN, None, held)
        assert under_way.wait(60)
        there.server.close()
        with pytest.raises(WireError):
            pushing.result()
        go_on.set()
    assert there.store.quiet


def test_how_far_it_has_come_is_known(here: Node, there: Node) -> None:
    there.store.put(an_image(), LARGE)
    coming, seen = Transfer(), []

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if index == 1 and not up:
            seen.append(coming.done)
        return data

    with between(there.peer, meddle) as peer:
        copy = pull(peer, TOKEN, None, an_image(), here.store, TransferLimits(streams=1), coming)
    here.store.release(copy)
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert 0.5 < seen[-1] < coming.done == 1.0


# ---- TLS ----


def test_in_tls_images_go_there_and_back(new_node: NewNode, certificates: TlsFiles) -> None:
    here, there, again = new_node(), new_node(server_context(certificates)), new_node()
    client = client_context(certificates)
    held = here.store.put(an_image(), LARGE)
    push(there.peer, TOKEN, client, held)
    back = pull(there.peer, TOKEN, client, an_image(), again.store)
    assert body(back) == body(held)
    again.store.release(back)


def test_in_tls_an_image_that_changes_is_refused_by_that_name(
    new_node: NewNode, certificates: TlsFiles
) -> None:
    here, there = new_node(), new_node(server_context(certificates))
    held = here.store.put(an_image(), LARGE)
    os.pwrite(held.fd, b"the next step", BODY_AT + 2 * BLOCK_BYTES)
    with pytest.raises(Unusable, match="changed while it was sent"):
        push(there.peer, TOKEN, client_context(certificates), held)
    assert there.store.images == {}


def test_in_tls_a_cancelled_push_never_goes_on_in_plain_text(
    new_node: NewNode, certificates: TlsFiles
) -> None:
    here, there = new_node(), new_node(server_context(certificates))
    held = here.store.put(an_image(), LARGE)
    secret = body(held)[4 * BLOCK_BYTES : 4 * BLOCK_BYTES + 16]
    assert block_digests(memoryview(body(held))) == held.digests
    copying, under_way, go_on = Transfer(), threading.Event(), threading.Event()
    leaked: list[bool] = []

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        leaked.append(TOKEN.encode() in data or secret in data)
        if index == 1 and before > BLOCK_BYTES:
            under_way.set()
            go_on.wait(60)
        return data

    with between(there.peer, meddle) as peer, ThreadPoolExecutor(1) as thread:
        client = client_context(certificates)
        pushing = thread.submit(push, peer, TOKEN, client, held, TransferLimits(), copying)
        assert under_way.wait(60)
        copying.cancel()
        with pytest.raises(Cancelled):
            pushing.result()
        go_on.set()
    assert not any(leaked)


def test_without_a_certificate_nobody_gets_in(
    here: Node, new_node: NewNode, certificates: TlsFiles
) -> None:
    there = new_node(server_context(certificates))
    held = here.store.put(an_image(), 1000)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    for tls in (None, stranger):
        with pytest.raises(WireError):
            push(there.peer, TOKEN, tls, held, QUICK)
    assert there.store.placed == 0
    push(there.peer, TOKEN, client_context(certificates), held, QUICK)

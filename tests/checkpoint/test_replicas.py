"""Copies of images on other nodes: real sockets, and real files in shared memory."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
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
    a_body,
    a_key,
    between,
    body,
    keepers,
    until,
)

from holdfast.checkpoint.digests import block_digests
from holdfast.checkpoint.layout import BLOCK_BYTES
from holdfast.checkpoint.replicas import (
    Cancelled,
    Limits,
    Transfer,
    blocks_covering,
    look,
    pull,
    push,
)
from holdfast.errors import NotThere, Refused, WireError
from holdfast.tls import TlsFiles, client_context, server_context


@pytest.fixture
def new_node() -> Iterator[NewNode]:
    with keepers() as new:
        yield new


@pytest.fixture
def here(new_node: NewNode) -> Node:
    return new_node()


@pytest.fixture
def there(new_node: NewNode) -> Node:
    return new_node()


# ---- copies ----


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES, SMALL, LARGE])
def test_what_is_pushed_is_there_byte_for_byte(here: Node, there: Node, size: int) -> None:
    held = here.shelf.put(a_key(), size)
    push(there.peer, TOKEN, None, held)
    copy = there.shelf.images[a_key()]
    assert body(copy) == body(held)
    assert copy.outline == held.outline
    assert look(there.peer, TOKEN, None) == (a_key(),)


@pytest.mark.parametrize("size", [1000, BLOCK_BYTES, SMALL, LARGE])
def test_what_is_pulled_is_there_byte_for_byte(here: Node, there: Node, size: int) -> None:
    held = there.shelf.put(a_key(), size)
    copy = pull(there.peer, TOKEN, None, a_key(), here.shelf)
    assert body(copy) == body(held)
    assert copy.outline == held.outline
    here.shelf.release(copy)


def test_memory_that_is_mapped_already_is_received_into(here: Node, there: Node) -> None:
    here.shelf.mapped = there.shelf.mapped = True
    held = here.shelf.put(a_key(), LARGE)
    push(there.peer, TOKEN, None, held)
    assert body(there.shelf.images[a_key()]) == body(held)
    there.shelf.put(a_key(step=8), LARGE)
    copy = pull(there.peer, TOKEN, None, a_key(step=8), here.shelf, blocks=[2])
    assert (
        body(copy)[2 * BLOCK_BYTES :][:BLOCK_BYTES]
        == a_body(a_key(step=8), LARGE)[2 * BLOCK_BYTES : 3 * BLOCK_BYTES]
    )
    here.shelf.release(copy)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_any_number_of_connections_brings_the_same(here: Node, there: Node, streams: int) -> None:
    held = here.shelf.put(a_key(), 8 * BLOCK_BYTES + 1)
    push(there.peer, TOKEN, None, held, Limits(streams=streams))
    assert body(there.shelf.images[a_key()]) == body(held)


def test_several_peers_push_at_once(here: Node, there: Node) -> None:
    images = [here.shelf.put(a_key(rank=rank)) for rank in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda held: push(there.peer, TOKEN, None, held), images))
    assert set(look(there.peer, TOKEN, None)) == {a_key(rank=rank) for rank in range(4)}
    for held in images:
        assert body(there.shelf.images[held.key]) == body(held)


def test_what_a_peer_does_not_have_is_said_to_be_missing(here: Node, there: Node) -> None:
    there.shelf.put(a_key(step=7))
    with pytest.raises(NotThere, match="does not have"):
        pull(there.peer, TOKEN, None, a_key(step=8), here.shelf)
    assert here.shelf.placed == 0


def test_a_limit_to_the_rate_is_kept(here: Node, there: Node) -> None:
    held = here.shelf.put(a_key(), 8 << 20)
    began = time.monotonic()
    push(there.peer, TOKEN, None, held, Limits(bytes_per_s=32e6))
    assert time.monotonic() - began > 0.15


# ---- parts of an image ----


def test_a_part_of_an_image_is_fetched_into_a_file_with_holes(here: Node, there: Node) -> None:
    held = there.shelf.put(a_key(), LARGE)
    copy = pull(there.peer, TOKEN, None, a_key(), here.shelf, blocks=[1, 2])
    assert copy.blocks == frozenset({1, 2, 4}), "the contents, in the last block, always come along"
    assert copy.outline == held.outline
    for block in range(5):
        at, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, LARGE)
        expected = body(held)[at:end] if block in copy.blocks else bytes(end - at)
        assert body(copy)[at:end] == expected
    assert os.fstat(copy.fd).st_blocks * 512 < 3 * BLOCK_BYTES
    here.shelf.release(copy)


def test_blocks_that_were_not_fetched_are_never_given_on(
    here: Node, there: Node, new_node: NewNode
) -> None:
    there.shelf.put(a_key(), LARGE)
    here.shelf.release(pull(there.peer, TOKEN, None, a_key(), here.shelf, blocks=[1]))
    third = new_node()
    for blocks in (None, [0], [1, 2]):
        with pytest.raises(NotThere):
            pull(here.peer, TOKEN, None, a_key(), third.shelf, blocks)
    third.shelf.release(pull(here.peer, TOKEN, None, a_key(), third.shelf, blocks=[1]))
    assert look(here.peer, TOKEN, None) == ()
    with pytest.raises(ValueError, match="in part"):
        push(there.peer, TOKEN, None, here.shelf.images[a_key()])


def test_only_the_contents_can_be_fetched_first(here: Node, there: Node) -> None:
    held = there.shelf.put(a_key(), LARGE)
    copy = pull(there.peer, TOKEN, None, a_key(), here.shelf, blocks=())
    assert copy.blocks == blocks_covering([held.contents]) == frozenset({4})
    here.shelf.release(copy)


def test_blocks_that_no_image_has_are_a_mistake_of_the_caller(here: Node, there: Node) -> None:
    there.shelf.put(a_key())
    with pytest.raises(ValueError, match="has 2 blocks"):
        pull(there.peer, TOKEN, None, a_key(), here.shelf, blocks=[2])


# ---- transfers that are ended ----


def test_a_transfer_can_be_cancelled_and_a_newer_one_takes_its_place(
    here: Node, there: Node
) -> None:
    older, newer = here.shelf.put(a_key(step=7), LARGE), here.shelf.put(a_key(step=8), LARGE)
    copying, under_way, go_on = Transfer(), threading.Event(), threading.Event()

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        if index == 1 and before > BLOCK_BYTES:
            under_way.set()
            go_on.wait(10)
        return data

    with between(there.peer, meddle) as peer, ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(push, peer, TOKEN, None, older, Limits(), copying)
        assert under_way.wait(10)
        began = time.monotonic()
        copying.cancel()
        with pytest.raises(Cancelled):
            pushing.result()
        assert time.monotonic() - began < 0.5
        push(there.peer, TOKEN, None, newer)
        go_on.set()
    until(lambda: there.shelf.dropped == 1, "the older one is dropped")
    assert set(there.shelf.images) == {newer.key}
    with pytest.raises(Cancelled):
        pull(there.peer, TOKEN, None, newer.key, here.shelf, transfer=copying)


def test_closing_ends_a_transfer_that_is_under_way(here: Node, there: Node) -> None:
    held = here.shelf.put(a_key(), LARGE)
    slow = Limits(bytes_per_s=20e6)
    with ThreadPoolExecutor(1) as thread:
        pushing = thread.submit(push, there.peer, TOKEN, None, held, slow)
        until(lambda: there.shelf.placed == 1, "the push begins")
        there.server.close()
        with pytest.raises(WireError):
            pushing.result()
    assert there.shelf.quiet


# ---- TLS ----


@pytest.fixture(scope="module")
def certificates() -> Iterator[TlsFiles]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with tempfile.TemporaryDirectory() as folder:

        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

        new = ("-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj")
        openssl("req", "-x509", *new, "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
        openssl("req", *new, "/CN=node", "-keyout", "node.key", "-out", "node.csr")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", "node.csr", *signing, "-out", "node.pem")
        yield TlsFiles(cert=f"{folder}/node.pem", key=f"{folder}/node.key", ca=f"{folder}/ca.pem")


def test_in_tls_images_go_there_and_back(new_node: NewNode, certificates: TlsFiles) -> None:
    here, there, again = new_node(), new_node(server_context(certificates)), new_node()
    client = client_context(certificates)
    held = here.shelf.put(a_key(), LARGE)
    push(there.peer, TOKEN, client, held)
    back = pull(there.peer, TOKEN, client, a_key(), again.shelf)
    assert body(back) == body(held)
    again.shelf.release(back)


def test_in_tls_an_image_that_changes_is_refused_by_that_name(
    new_node: NewNode, certificates: TlsFiles
) -> None:
    here, there = new_node(), new_node(server_context(certificates))
    held = here.shelf.put(a_key(), LARGE)
    os.pwrite(held.fd, b"the next step", BODY_AT + 2 * BLOCK_BYTES)
    with pytest.raises(Refused, match="changed while it was sent"):
        push(there.peer, TOKEN, client_context(certificates), held)
    assert there.shelf.images == {}


def test_in_tls_a_cancelled_push_never_goes_on_in_plain_text(
    new_node: NewNode, certificates: TlsFiles
) -> None:
    here, there = new_node(), new_node(server_context(certificates))
    held = here.shelf.put(a_key(), LARGE)
    secret = body(held)[4 * BLOCK_BYTES : 4 * BLOCK_BYTES + 16]
    assert block_digests(memoryview(body(held))) == held.digests
    copying, seen = Transfer(), threading.Event()
    leaked: list[bool] = []

    def meddle(index: int, up: bool, before: int, data: bytes) -> bytes:
        leaked.append(TOKEN.encode() in data or secret in data)
        if index == 1 and before > BLOCK_BYTES:
            seen.set()
        return data

    with between(there.peer, meddle) as peer, ThreadPoolExecutor(1) as thread:
        slow = Limits(bytes_per_s=60e6)
        pushing = thread.submit(
            push, peer, TOKEN, client_context(certificates), held, slow, copying
        )
        assert seen.wait(10)
        copying.cancel()
        with pytest.raises(Cancelled):
            pushing.result()
    assert not any(leaked)


def test_without_a_certificate_nobody_gets_in(new_node: NewNode, certificates: TlsFiles) -> None:
    there = new_node(server_context(certificates))
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    for tls in (None, stranger):
        with pytest.raises(WireError):
            look(there.peer, TOKEN, tls, QUICK)
    assert look(there.peer, TOKEN, client_context(certificates)) == ()

"""Copies images to other nodes, and from them.

Each rank's newest image is copied to the node's peers, one after the other. A node that takes another's
place begins to fetch the images of its ranks as soon as it knows which those are, long before a rank
that starts from nothing can ask for them. A standby may ask at once, when most of the image is still in
transit. Such a rank reads the image from the peer directly (`PeerSource`) rather than wait for a copy
that costs fresh memory and is then read once more: a copy that is not half done is cancelled for it.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path

from holdfast.checkpoint.memory.images import Images
from holdfast.checkpoint.replicas import copies as replicas
from holdfast.checkpoint.replicas.copies import Peer, Transfer
from holdfast.errors import HoldfastError
from holdfast.messages.checkpoints import Holder, ImageId
from holdfast.wire.tls import TlsFiles, client_context

log = logging.getLogger("holdfast.keeper")

WORTH_WAITING = 0.5
"""The fraction of a copy that must have arrived for a rank to wait for the rest."""


class Exchange:
    def __init__(self, images: Images, token: str, tls: TlsFiles | None) -> None:
        self.to: tuple[Holder, ...] = ()
        """The nodes to which this node's images are copied."""
        self._images = images
        self._token = token
        self._tls = tls
        self._changed = threading.Condition()
        self._wanted: dict[tuple[str, int], ImageId] = {}
        """Each rank's newest image, until it is copied."""
        self._coming: dict[ImageId, tuple[Transfer, Future[None]]] = {}
        threading.Thread(target=self._share, name="sharing", daemon=True).start()

    # ---- out ----

    def share(self, id: ImageId) -> None:
        """Copy an image to the peers, unless a newer one replaces it before its turn."""
        with self._changed:
            self._wanted[id.snapshot.checkpointer, id.rank] = id
            self._changed.notify()

    def _share(self) -> None:
        while True:
            with self._changed:
                while not self._wanted:
                    self._changed.wait()
                id = self._wanted.pop(next(iter(self._wanted)))
            for holder in self.to:
                try:
                    self._push(id, holder)
                except (HoldfastError, OSError) as error:
                    log.warning("no copy of rank %d on %s: %s", id.rank, holder.node, error)

    def _push(self, id: ImageId, holder: Holder) -> None:
        held = self._images.find(id)
        if held is None:
            return  # A newer image took its place.
        try:
            peer, tls = Peer(holder.address, holder.port), client_context(self._tls)
            replicas.push(peer, self._token, tls, held)
        finally:
            self._images.release(held)

    # ---- in ----

    def fetch(self, id: ImageId, holder: Holder) -> None:
        """Copy an image from the node that holds it."""
        with self._changed:
            if id in self._coming or self._images.sealed(id) is not None:
                return
            transfer, here = self._coming[id] = Transfer(), Future[None]()
        try:
            peer, tls = Peer(holder.address, holder.port), client_context(self._tls)
            held = replicas.pull(peer, self._token, tls, id, self._images, transfer=transfer)
            self._images.release(held)
        finally:
            with self._changed:
                del self._coming[id]
            here.set_result(None)

    def path(self, id: ImageId) -> Path | None:
        """Return the image's file on this node; None: it has to be read from the peer."""
        with self._changed:
            transfer, here = self._coming.get(id, (None, None))
        if transfer is not None and here is not None:
            if transfer.done < WORTH_WAITING:
                transfer.cancel()
            here.result()
        found = self._images.sealed(id)
        return found[0].path if found is not None else None

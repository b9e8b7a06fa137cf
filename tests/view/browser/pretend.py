"""Serves the page with answers that no test could bring about for real.

A job of ten thousand ranks in its seventh day, with a thousand incidents, takes a cluster and a week;
ranks in every state at one moment take luck. This server answers the API of `holdfast web` for such
jobs from formulas, with the same headers, so that the page's speed, memory and looks can be judged.
What the real server says is tested against the real server.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

STATIC = Path(__file__).parents[3] / "holdfast" / "view" / "web" / "static"
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
SILENT_S = 4.0
WEEK_S = 7 * 86400.0

Json = Any


class PretendJob:
    """A job by formula: `nodes` × `slots` ranks, `incidents` evenly over `wall_s`."""

    def __init__(self, name: str, nodes: int, slots: int, wall_s: float, incidents: int) -> None:
        self.name, self.nodes, self.slots, self.wall_s = name, nodes, slots, wall_s
        self.incident_count = incidents
        self.opened_at = time.time() - wall_s
        self.ranks = nodes * slots
        self.states = "".join(self._state(rank) for rank in range(self.ranks))
        self.spares = 2
        self.elsewhere: list[Json] | None = []
        """What other jobs had like any incident of this one; None while it is read."""
        self.actions: list[str] = ["save", "exclude", "fault", "scale", "stop"]

    def _state(self, rank: int) -> str:
        if self.ranks <= 64:
            return "rrrrrrwcshif-r"[rank % 14]
        return {0: "h", 1: "s", 2: "c", 3: "w"}.get(rank * 7919 % 1999, "r")

    # ---- what the API answers ----

    def row(self) -> Json:
        return {
            "job": self.name, "state": "running", "opened_at": self.opened_at, "wall_s": self.wall_s,
            "step": int(self.wall_s * 2), "goodput": 0.973, "incidents": self.incident_count,
            "restarts": self.incident_count, "world_size": self.ranks, "exit_code": None,
            "reason": None,
        }  # fmt: skip

    def now(self) -> Json:
        now = time.time()
        sample = None
        nodes = [
            [f"n{i}", f"gpu-{i:04d}", "placed", i * self.slots, self.slots, sample, True]
            for i in range(self.nodes)
        ]
        nodes += [
            [f"s{i}", f"spare-{i}", "waiting", -1, 0, None, False] for i in range(self.spares)
        ]
        status = {
            "job": self.name, "state": "running", "round": self.incident_count + 1,
            "world_size": self.ranks, "step": int((now - self.opened_at) * 2), "steps_per_s": 2.03,
            "wall_s": now - self.opened_at, "restarts": self.incident_count,
            "checkpoints": [{"checkpointer": "checkpoints/run-7", "in_memory": 120950,
                "on_storage": 120500, "writing": 120900, "failures": 0, "skipped": 1, "failed": 0}],
            "excluded": {"gpu-0444": "lost three times in an hour"}, "last_incident": "",
            "exit_code": None, "reason": None, "opened_at": self.opened_at, "samples_per_s": 16500.0,
            "suspicion": {"line": "rank 11 has made no progress for 41.2 s (train.py:88);"
                f" {self.ranks - 1} ranks wait for it"}, "no_step_s": 41.2,
            "loss": 2.417, "loss_step": 1200,
        }  # fmt: skip
        lost = {"redo": 90.0, "rendezvous": 30.1, "init": 88.0, "detect": 12.0, "stop": 14.0}
        lost = {cause: seconds * self.ranks for cause, seconds in lost.items()}
        return {
            "status": status, "now": now, "loss": 2.417,
            "goodput": {"goodput": 0.973, "lost_s": lost, "lost_today_s": 234.0 * self.ranks},
            "map": {"nodes": nodes, "ranks": self.states},
        }  # fmt: skip

    def fault_at(self, incident: int) -> float:
        return self.opened_at + self.wall_s * (incident - 0.5) / self.incident_count

    def timeline(self, ask: dict[str, str]) -> Json:
        begin, end, width = float(ask["from"]), float(ask["to"]), int(ask["width"])
        by_node = ask.get("fold") == "node"
        total = self.nodes if by_node else self.ranks
        first = int(ask.get("first", 0)) // (self.slots if by_node else 1)
        lanes = [
            {
                "name": f"gpu-{i:04d}" if by_node else f"rank {i}",
                "first_rank": i * self.slots if by_node else i,
                "ranks": self.slots if by_node else 1,
                "spans": list(self._spans(begin, end, width, i)),
            }
            for i in range(first, min(total, first + int(ask.get("count", total))))
        ]
        times = [(n, self.fault_at(n)) for n in range(1, self.incident_count + 1)]
        shown = [(n, at) for n, at in times if begin - 60 <= at <= end]
        return {
            "from": begin, "to": end, "lanes": lanes, "ranks": self.ranks,
            "rounds": [[at + 3, n + 1] for n, at in shown[:400]],
            "incidents": [[n, at, at + 12.0, "signal"] for n, at in shown],
        }  # fmt: skip

    def _spans(self, begin: float, end: float, width: int, lane: int) -> Iterator[list[Json]]:
        bucket = (end - begin) / width
        if bucket > 10:
            for i in range(width):
                bad = 0.02 + 0.06 * abs(math.sin(i * 0.7 + lane))
                shares = {
                    "productive": 1 - bad,
                    "redo": bad / 2,
                    "init": bad / 4,
                    "checkpoint": bad / 4,
                }
                at = begin + i * bucket
                yield [
                    round(at, 3),
                    round(at + bucket, 3),
                    {k: round(v, 3) for k, v in shares.items()},
                ]
            return
        phases = [("redo", 0.4), ("detect", 0.15), ("stop", 0.6), ("rendezvous", 0.25), ("start", 1.2),
            ("init", 4.0), ("restore", 2.4), ("redo", 3.0)]  # fmt: skip
        at = self.opened_at
        for n in range(1, self.incident_count + 1):
            if self.fault_at(n) + 12 < begin:
                at = self.fault_at(n) + 12
                continue
            yield [at, self.fault_at(n), "productive"]
            at = self.fault_at(n)
            for cause, seconds in phases:
                yield [at, at + seconds, cause]
                at += seconds
            if at > end:
                return
        yield [at, self.opened_at + self.wall_s, "productive"]

    def goodput(self, buckets: int) -> Json:
        each = self.wall_s / buckets
        total = {"productive": 0.0, "redo": 0.0, "init": 0.0, "checkpoint": 0.0, "rendezvous": 0.0,
            "detect": 0.0, "unknown": 0.0}  # fmt: skip
        rows = []
        for i in range(buckets):
            bad = 0.02 + 0.05 * abs(math.sin(i * 0.31)) + (0.3 if i % 41 == 3 else 0)
            shares = {"redo": 0.4 * bad, "init": 0.3 * bad, "rendezvous": 0.2 * bad,
                "detect": 0.1 * bad, "checkpoint": 0.01, "productive": 0.99 - bad}  # fmt: skip
            seconds = {cause: share * each * self.ranks for cause, share in shares.items()}
            rows.append([self.opened_at + i * each, self.opened_at + (i + 1) * each, seconds])
            for cause, value in seconds.items():
                total[cause] += value
        wall = self.wall_s * self.ranks
        return {
            "buckets": rows, "total": total, "wall_s": self.wall_s, "ranks": self.ranks,
            "goodput": total["productive"] / wall,
            "torchrun": {"goodput": 0.74, "lost_s": self.wall_s * 0.25, "ours_s": self.wall_s * 0.03,
                "faults": self.incident_count, "assumption":
                "The same faults, each with a full restart from the newest checkpoint on storage."},
        }  # fmt: skip

    def short(self, n: int) -> Json:
        rank = n * 7919 % self.ranks
        return {
            "id": n, "kind": ["signal", "hang", "exception", "node", "straggler"][n % 5], "rank": rank,
            "node": f"n{rank // self.slots}", "at": self.fault_at(n), "open": False,
            "line": f"rank {rank} on gpu-{rank // self.slots:04d} was killed by SIGKILL at step"
            f" {n * 120}; a standby took its place, 12.0 s and 3 steps lost",
            "lost_s": 12.0, "lost_steps": 3, "seen_before": [],
        }  # fmt: skip

    def incidents(self, ask: dict[str, str]) -> Json:
        before = int(ask.get("before", self.incident_count + 1))
        ids = range(before - 1, max(0, before - 1 - int(ask.get("limit", 50))), -1)
        return {"total": self.incident_count, "incidents": [self.short(n) for n in ids]}

    def incident(self, n: int) -> Json:
        short = self.short(n)
        report = short | {
            "round": n, "step": n * 120, "signature": "killed by SIGKILL", "rung": "standby",
            "action": "gave the rank to a standby on the same node",
            "phases": {"detect": 0.15, "stop": 0.6, "rendezvous": 0.25, "start": 1.2,
                "first_step": 9.8},
            "also": ["rank 3: connection reset by peer"], "detail": "exit by signal 9\nlast step 4711",
            "cause": "812", "injected": None,
        }  # fmt: skip
        told = [("event", "WorkerExited", "rank 5 was killed by SIGKILL"),
            ("action", "StopRound", "stop round 3"),
            ("event", "RoundStopped", "all workers of round 3 are gone"),
            ("action", "StartRound", "round 4: 8 ranks on 2 nodes"),
            ("event", "StepFinished", "first good step")]  # fmt: skip
        story = [
            {"at": short["at"] + i * 0.4, "after_s": i * 0.4, "id": f"{812 + i}", "cause": f"{811 + i}",
                "kind": kind, "what": what, "node": "n0", "text": text}
            for i, (kind, what, text) in enumerate(told)
        ]  # fmt: skip
        stack = "forward  model.py:41\ntrain  train.py:88\n<module>  train.py:120"
        return {
            "incident": report, "story": story, "stacks": {"5": stack, "6": stack.replace("41", "57")},
            "log": {"5": ["step 4710 loss 2.41", "step 4711 loss 2.40"]},
            "seen_before": [n - 1] if n > 1 else [], "open": False, "left_out": {}, "verdict": None,
            "seen_elsewhere": self.elsewhere,
        }  # fmt: skip

    def checkpoints(self) -> Json:
        end = self.opened_at + self.wall_s
        steps = []
        for i in range(24):
            at = end - i * self.wall_s / 30
            tiers: Json = {
                "memory": {"at": at, "size_bytes": 3 << 32, "seconds": 0.8, "verified": True}
            }
            if i % 2 == 0:
                tiers["peer"] = {
                    "at": at + 2,
                    "size_bytes": 3 << 32,
                    "seconds": 4.1,
                    "verified": True,
                }
            if i % 4 == 0:
                tiers["storage"] = {"at": at + 30, "size_bytes": 3 << 32, "seconds": 31.0,
                    "verified": False,
                    "error": "" if i else "digest differs"}  # fmt: skip
            steps.append({"step": 121000 - i * 500, "at": at, "tiers": tiers})
        why = "every rank holds it in its own node's memory, and its digests match"
        return {
            "checkpointers": self.now()["status"]["checkpoints"], "steps": steps,
            "would_restore": {"step": 121000, "from": "memory", "why": why},
        }  # fmt: skip

    def node_list(self) -> Json:
        end, nodes = time.time(), []
        for i in range(self.nodes):
            score = 0.97 - 0.4 * (i % 311 == 5)
            times = [end - 30 * k for k in range(20, 0, -1)]
            nodes.append({
                "node": f"n{i}", "host": f"gpu-{i:04d}", "state": "placed",
                "cordoned": "3 faults in an hour" if i == 44 else None,
                "health": [{"check": "gpu-ecc", "verdict": "fail", "reason": "uncorrected errors",
                    "seconds": 0.1, "facts": {}}] if i == 44 else [],
                "score": [[at, score + 0.02 * math.sin(at)] for at in times],
                "usage": [[at, 0.6 + 0.1 * math.sin(at), 0.5, 0.97, 2.0e9] for at in times],
            })  # fmt: skip
        return {"nodes": nodes}

    def speed(self) -> Json:
        times = [self.opened_at + i * self.wall_s / 120 for i in range(120)]
        speeds = [2 + 0.2 * math.sin(i / 5) for i in range(120)]
        points = [[at, i, speeds[i], 16500.0, self.ranks] for i, at in enumerate(times)]
        return {"points": points}

    def loss(self) -> Json:
        """It falls over 100 steps, is NaN once, and goes back to step 60 in the middle."""
        steps = [*range(80), *range(60, 100)]
        losses: list[Any] = [2.4 + 8 / (1 + step) for step in steps]
        losses[30] = "NaN"
        times = [self.opened_at + i * self.wall_s / len(steps) for i in range(len(steps))]
        points = zip(times, steps, losses, strict=True)
        return {"points": [list(point) for point in points]}

    def why(self, rank: int) -> Json:
        frames = [{"function": "train", "file": "train.py", "line": 88}]
        group = {"ranks": [rank], "headline": f"rank {rank} is at train.py:88", "frames": frames}
        verdict = {"sentence": f"rank {rank} computes; nobody waits for it", "groups": [group]}
        text = "thread MainThread\n    all_reduce  distributed_c10d.py:2501\n    train  train.py:88"
        return {"verdict": verdict, "suspicion": None, "detects": True, "ranks": {str(rank): text}}


class PretendServer(ThreadingHTTPServer):
    """The API for a few pretended jobs; `tell` sends an event to every stream."""

    daemon_threads = True

    def __init__(self, *jobs: PretendJob, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Answer)
        self.jobs = {job.name: job for job in jobs}
        self.streams: list[queue.Queue[tuple[str, Json] | None]] = []
        self.acted: list[tuple[str, Json]] = []
        self.sent_bytes = 0
        self.locked_out = False
        self.price: Json = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that left before it had its answer is no error."""

    def start(self) -> PretendServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def tell(self, event: str, data: Json) -> None:
        for stream in list(self.streams):
            stream.put((event, data))

    def stop(self) -> None:
        for stream in list(self.streams):
            stream.put(None)
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: PretendServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlparse(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        ask = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/" or parts[0] == "job":
            self._file("index.html" if url.path == "/" else "job.html")
        elif parts[0] == "static":
            self._file(parts[1])
        elif self.server.locked_out:
            self._json({"error": "no token"}, 401)
        elif parts == ["api", "session"]:
            allowed = next(iter(self.server.jobs.values())).actions
            price = self.server.price
            self._json({"job": None, "may_act": bool(allowed), "actions": allowed, "price": price})
        elif parts == ["api", "jobs"]:
            self._json([job.row() for job in self.server.jobs.values()])
        elif parts[:2] == ["api", "jobs"] and parts[2] in self.server.jobs:
            self._job(self.server.jobs[parts[2]], parts[3:], ask)
        else:
            self._json({"error": f"no job {parts[-1]}"}, 404)

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size))
        self.server.acted.append((self.path.rsplit("/", 1)[1], body))
        self._json({"line": "asked for"})

    def _job(self, job: PretendJob, what: list[str], ask: dict[str, str]) -> None:
        if what == ["stream"]:
            self._stream(job)
        elif what[0] == "incidents" and len(what) == 2:
            self._json(job.incident(int(what[1])))
        else:
            self._json({
                "now": job.now, "timeline": lambda: job.timeline(ask), "nodes": job.node_list,
                "goodput": lambda: job.goodput(int(ask.get("buckets", 200))),
                "incidents": lambda: job.incidents(ask), "checkpoints": job.checkpoints,
                "speed": job.speed, "loss": job.loss,
                "logs": lambda: {"rank": 0, "round": 1, "text": "step 1\nstep 2\n", "offset": 14},
                "why": lambda: job.why(int(ask["rank"])),
            }[what[0]]())  # fmt: skip

    def _stream(self, job: PretendJob) -> None:
        stream: queue.Queue[tuple[str, Json] | None] = queue.Queue()
        self.server.streams.append(stream)
        self._head(200, "text/event-stream", None)
        try:
            self._event("now", job.now())
            while (told := self._next(stream)) is not None:
                self._event(*told)
        except OSError:
            pass
        finally:
            self.server.streams.remove(stream)

    def _next(self, stream: queue.Queue[tuple[str, Json] | None]) -> tuple[str, Json] | None:
        try:
            return stream.get(timeout=SILENT_S)
        except queue.Empty:
            return "here", {}

    def _event(self, name: str, data: Json) -> None:
        text = f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
        self.server.sent_bytes += len(text)
        self.wfile.write(text)
        self.wfile.flush()

    def _file(self, name: str) -> None:
        path = STATIC / name
        self._send(200, TYPES[path.suffix], path.read_bytes())

    def _json(self, data: Json, status: int = 200) -> None:
        self._send(status, "application/json", json.dumps(data, separators=(",", ":")).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.server.sent_bytes += len(body)
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _head(self, status: int, kind: str, size: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", CSP)
        self.send_header("Cache-Control", "no-store")
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.end_headers()

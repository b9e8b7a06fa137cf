"""Writes a look at a job as one line, for pipes: words for people, or JSON."""

from __future__ import annotations

import json
import time

import msgspec

from holdfast.view.top.state import JobNow
from holdfast.view.wording import loss, percent, plain, speed


def words(view: JobNow) -> str:
    """Describe the job in a line; all but the time is equal as long as nothing has changed."""
    status = view.status
    when = time.strftime("%H:%M:%S", time.localtime(view.now))
    parts = [f"{status.state} round {status.round}", f"{status.world_size} ranks"]
    parts.append(f"step {status.step}")
    if status.steps_per_s is not None:
        parts.append(f"{speed(status.steps_per_s)} steps/s")
    if status.loss is not None:
        parts.append(f"loss {loss(status.loss)}")
    if status.no_step_s is not None:
        parts.append(f"no step for {status.no_step_s:.0f} s")
    parts.append(f"goodput {percent(view.goodput.goodput)}")
    if status.suspicion is not None:
        parts.append(plain(status.suspicion.line))
    if view.incidents:
        last = view.incidents[-1]
        parts.append(f"incident {last.id}: {plain(last.line)}")
    if status.exit_code is not None:
        parts.append(f"exit code {status.exit_code}: {plain(status.reason or '')}")
    return f"{when} {', '.join(parts)}"


def as_json(view: JobNow) -> str:
    """Describe the job in a line of JSON."""
    status = msgspec.to_builtins(view.status)
    del status["nodes"]
    lost = {c: s for c, s in view.goodput.seconds.items() if c != "productive" and s}
    return json.dumps(
        {
            "now": view.now,
            "status": status,
            "goodput": {"goodput": view.goodput.goodput, "lost_s": lost},
            "incidents": len(view.incidents),
            "map": {
                "nodes": [
                    [one.node, one.host, one.state, one.first_rank, len(one.letters)]
                    for one in view.nodes
                ],
                "ranks": "".join(one.letters for one in view.nodes),
            },
        },
        separators=(",", ":"),
    )

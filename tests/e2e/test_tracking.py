"""What `holdfast.track` writes of a job whose ranks die."""

from __future__ import annotations

import json

import pytest

from .harness import Run, wait_for

TRACKED = """
    import json, os, time
    import holdfast

    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def write(numbers, step):
        with open("tracked.jsonl", "a") as file:
            file.write(json.dumps({**numbers, "step": step}) + "\\n")

    holdfast.track(write, every=1)
    step = 0 if restarts == 0 else 10
    while not os.path.exists("end"):
        time.sleep(0.01)
        step += 1
        holdfast.progress(step)
"""


def test_curves_go_on_through_a_restart_and_never_back(run: Run) -> None:
    def tracked() -> list[dict[str, float]]:
        file = run.folder / "tracked.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    run.train(script=TRACKED)
    run.until_stepping()
    wait_for(lambda: [one for one in tracked() if one["step"] > 10], "a point with steps")
    run.kill_rank(1)
    wait_for(lambda: [one for one in tracked() if one["holdfast/restarts"] == 1], "the restart")
    run.end()
    assert run.code() == 0
    points = tracked()
    steps = [one["step"] for one in points]
    assert steps == sorted(steps)
    assert points[0]["holdfast/incidents"] == 0
    assert points[-1]["holdfast/incidents"] == 1
    assert points[-1]["holdfast/world_size"] == 2
    assert points[-1]["holdfast/lost_rank_seconds/detect"] > 0
    assert 0 < points[-1]["holdfast/goodput"] <= 1


def test_samples_of_the_machine_are_in_the_status(run: Run) -> None:
    run.train(script=TRACKED)
    run.until_stepping()

    def usage() -> dict[str, float] | None:
        (node,) = run.ask("status")["nodes"]
        return node["usage"]

    found = wait_for(usage, "a sample of the node")
    run.end()
    assert run.code() == 0
    assert 0 <= found["cpu"] <= 1
    assert found["memory_used_bytes"] <= found["memory_bytes"]


@pytest.mark.parametrize("tracker", ["object()", "print", "None"])
def test_whatever_it_is_given_the_script_finishes(run: Run, tracker: str) -> None:
    script = f"""
    import holdfast
    holdfast.track({tracker}, every=0)
    holdfast.progress(1)
    """
    run.start(run.write(script))
    assert run.code() == 0

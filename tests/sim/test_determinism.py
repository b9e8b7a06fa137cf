"""One seed, one event log."""

import io
import os
import subprocess
import sys

from holdfast.sim.cluster import Cluster
from holdfast.sim.shapes import chaos


def log_of(seed: int) -> bytes:
    file = io.BytesIO()
    Cluster(chaos(seed), file).run()
    return file.getvalue()


def test_the_same_seed_gives_the_same_event_log_byte_for_byte():
    assert log_of(11) == log_of(11)


def test_another_seed_gives_another_event_log():
    assert log_of(11) != log_of(12)


def test_the_event_log_does_not_depend_on_the_process_or_its_hash_seed(tmp_path):
    logs = []
    for hash_seed in ("1", "2"):
        path = tmp_path / f"log-{hash_seed}"
        subprocess.run(
            [
                *(sys.executable, "-m", "holdfast", "sim", "--nodes", "12", "--slots", "2"),
                *("--hours", "0.03", "--faults", "chaos", "--seed", "5", "--log", str(path)),
            ],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
        )
        logs.append(path.read_bytes())
    assert logs[0]
    assert logs[0] == logs[1]

"""`holdfast submit ray` submits a Ray job whose entrypoint is `holdfast up --on ray`.

The job's coordinator and supplier run where Ray runs its jobs' entrypoints, on the head node; the nodes
are actors. What is submitted is one command and a runtime environment: `--dry-run` prints both.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.cli.flags import given_flags, run_parser
from holdfast.cli.submit import read_job
from holdfast.cli.up import OWN
from holdfast.config.schema import Settings
from holdfast.config.values import amount, amounts, one_of
from holdfast.errors import PlatformError, UsageError
from holdfast.platforms.ray_job import variables

DESCRIPTION = """\
Submit a job to a Ray cluster. Its coordinator runs on the head node, each of its nodes is an actor. A
node whose host is lost is replaced by a spare, or by another actor once Ray has room for it."""

EPILOG = """\
examples:
  holdfast submit ray --nodes 4 --nproc-per-node 8 --gpus 8 train.py --lr 0.1
      four nodes of eight GPUs, one rank each
  holdfast submit ray --address http://head:8265 --working-dir . --nodes 2:4 --spares 1 train.py
      trains with two to four nodes, and has one that waits; this directory is copied to the cluster
  holdfast submit ray --nodes 2 --resource spot=1 --runtime-env env.json --dry-run train.py
      prints what would be submitted

then:
  ray job logs -f ID --address http://head:8265        what the job prints
  holdfast status llm          on the head node: nodes, ranks, round, step
  holdfast scale llm 2:6       more nodes: further actors, which an autoscaler makes room for

It takes all flags of `holdfast run`, except those that say where nodes meet. All after SCRIPT is the
script's."""

LOCAL = "http://127.0.0.1:8265"
NOT_FOR_UP = frozenset({*OWN, "nnodes", "job", "local_addr"})
STRATEGIES = ("spread", "pack")


class RaySubmission(NamedTuple):
    """What Ray is told."""

    id: str
    job: str
    entrypoint: str
    runtime_env: dict[str, Any]


def main(argv: Sequence[str]) -> int:
    submission, parsed = read(argv)
    address = getattr(parsed, "address", None) or os.environ.get("RAY_ADDRESS") or LOCAL
    if "dry_run" in parsed:
        told = {"address": address, **submission._asdict()}
        print(json.dumps(told, indent=2))
        return 0
    submit(submission, address)
    tell(submission, address, "json" in parsed)
    return 0


def read(argv: Sequence[str]) -> tuple[RaySubmission, argparse.Namespace]:
    """Read `holdfast submit ray ARGV`: what to submit, and the flags that were parsed."""
    because = "the nodes are Ray's actors, which know where they meet"
    _, settings, parsed = read_job(_parser(), argv, (*OWN, "local_addr"), because)
    job = settings.job or f"{Path(settings.script).stem}-{secrets.token_hex(3)}"
    terms = settings.terms
    nodes = f"--nodes={terms.min_nodes}:{terms.max_nodes}"
    flags = [nodes, *given_flags(parsed, NOT_FOR_UP), f"--job={job}"]
    up = ["python", "-m", "holdfast", "up", "--on", "ray", *flags]
    entrypoint = shlex.join([*up, settings.script, *settings.script_args])
    ray_id = f"{job}-{secrets.token_hex(3)}"
    return RaySubmission(ray_id, job, entrypoint, _runtime_env(parsed)), parsed


def _runtime_env(parsed: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    path = getattr(parsed, "runtime_env", None)
    if path is not None:
        try:
            found = dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"--runtime-env {path}: cannot be read ({error}); a JSON object is needed, as in "
                '{"pip": ["holdfast"]}'
            ) from None
    if "working_dir" in parsed:
        found["working_dir"] = parsed.working_dir
    said = variables(_resources(parsed), _strategy(parsed))
    if said:
        found["env_vars"] = {**found.get("env_vars", {}), **said}
    return found


def _resources(parsed: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = {}
    for flag, name in (("cpus", "CPU"), ("gpus", "GPU")):
        if flag in parsed:
            found[name] = amount(getattr(parsed, flag), f"--{flag}")
    for pair in getattr(parsed, "resource", ()):
        found |= amounts(pair, "--resource")
    return found


def _strategy(parsed: argparse.Namespace) -> str:
    if "strategy" not in parsed:
        return ""
    return one_of(*STRATEGIES)(parsed.strategy, "--strategy")


def submit(submission: RaySubmission, address: str) -> None:
    """Hand a job to Ray."""
    from holdfast.platforms.ray_engine import first_line, require_ray

    require_ray()
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
        client.submit_job(
            entrypoint=submission.entrypoint,
            submission_id=submission.id,
            runtime_env=submission.runtime_env,
            metadata={"holdfast": submission.job},
        )
    except ConnectionError as error:
        raise UsageError(
            f"no Ray dashboard can be reached at {address} ({first_line(error)}); say with --address "
            "where it is, as in http://head:8265"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise PlatformError(f"Ray refused the job: {first_line(error)}") from None


def tell(submission: RaySubmission, address: str, as_json: bool) -> None:
    """Say what became of a submission, and how to look at it."""
    if as_json:
        from holdfast.cli.view import print_json

        print_json({"ray_job": submission.id, "job": submission.job, "address": address})
        return
    print(f"""Ray job {submission.id} is submitted; it is job {submission.job} of Holdfast.
  ray job status {submission.id} --address {address}
  ray job logs -f {submission.id} --address {address}
  ray job stop {submission.id} --address {address}
  holdfast status {submission.job}        on the cluster's head node""")


def _parser() -> argparse.ArgumentParser:
    parser = run_parser(
        "holdfast submit ray",
        usage="holdfast submit ray --nodes N|MIN:MAX [flags] SCRIPT [its own arguments]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    of_ray = parser.add_argument_group("of Ray")
    of_ray.add_argument(
        "--address",
        metavar="URL",
        help=f"address of the cluster's dashboard (default: RAY_ADDRESS, or {LOCAL})",
    )
    of_ray.add_argument("--cpus", metavar="N", help="CPUs of each node (default: one a rank)")
    of_ray.add_argument("--gpus", metavar="N", help="GPUs of each node (default: none)")
    of_ray.add_argument(
        "--resource",
        action="append",
        metavar="NAME=N",
        help="custom resource of each node; may be repeated",
    )
    of_ray.add_argument(
        "--strategy",
        metavar="spread|pack",
        help="spread nodes over the hosts of the cluster (default), or pack them on few",
    )
    of_ray.add_argument(
        "--working-dir", metavar="DIR", help="directory that Ray copies to the cluster"
    )
    of_ray.add_argument(
        "--runtime-env", metavar="FILE", help="runtime environment of Ray, as a JSON file"
    )
    of_ray.add_argument(
        "--nodes",
        dest=Settings.nnodes.name,
        metavar=Settings.nnodes.takes,
        help="number of nodes, or the fewest and the most to train with; the same as --nnodes",
    )
    of_ray.add_argument("--dry-run", action="store_true", help="print it and submit nothing")
    of_ray.add_argument("--json", action="store_true", help="print the ids as JSON")
    return parser

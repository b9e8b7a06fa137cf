"""`holdfast submit slurm` writes a batch script that runs `holdfast up --on slurm`, and submits it.

The script is the whole of what Slurm is told, and it is made to be read: `--dry-run` prints it. It runs
the job on its first node and does what only a batch script can do: it hears of the time limit, and puts
the job back into the queue when it ends with 75. An exit code alone would not do that.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast import __version__
from holdfast.cli.flags import given_flags, run_parser
from holdfast.cli.submit import read_job
from holdfast.cli.up import NOT_FOR_NODES, OWN
from holdfast.config.schema import Said, Settings
from holdfast.config.settings import RunSettings
from holdfast.config.values import job_name, whole_number
from holdfast.errors import PlatformError, UsageError
from holdfast.platforms.slurm import AVOIDED
from holdfast.platforms.slurm_commands import require_commands, run_now

DESCRIPTION = """\
Submit a job to Slurm. Its first node runs the coordinator; each node is a step of the allocation. A
lost node is replaced by a spare, by another node of the allocation, or by a further Slurm job of one
node. A job that is preempted or comes to its time limit is saved, queued again, and goes on."""

EPILOG = """\
examples:
  holdfast submit slurm --nodes 4 --gpus-per-node 8 --time 24:00:00 train.py --lr 0.1
      four nodes of eight GPUs, one rank each
  holdfast submit slurm --nodes 4:8 --spares 1 --partition gpu --account lab --job llm train.py
      trains with four to eight nodes, and has one that waits for a place
  holdfast submit slurm --nodes 2 --sbatch constraint=a100 --sbatch exclude=n7 --dry-run train.py
      prints the batch script, with two more options of sbatch, and submits nothing

then, from any machine that shares the job's home:
  holdfast status llm          nodes, ranks, round, step
  holdfast goodput llm         seconds by cause, over all requeues
  holdfast scale llm 4:12      more nodes: further Slurm jobs that join

It takes all flags of `holdfast run`, except those that say where nodes meet. All after SCRIPT is the
script's."""

WARN_S = 120
"""Before the time limit: what saving and going back to the queue may take."""

BODY = """
# Slurm warns this script before the time limit (USR1), and when it is about to be killed (TERM). Then
# what was trained is saved, and the job ends with 75.
up=
trap '[ -z "$up" ] || kill -TERM $up' USR1 TERM

job={job}
{python} -m holdfast up --on slurm {flags}--job "$job" ${{SLURM_RESTART_COUNT:+--requeued}} \\
    {command} &
up=$!
wait $up
while kill -0 $up 2> /dev/null; do wait $up; done
wait $up
code=$?

# 75 means: try again. A job that somebody cancelled is not RUNNING any more, and not queued again.
if [ $code -eq 75 ] && [ "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%T)" = RUNNING ]; then
    trap '' TERM # The requeue ends this script; it has to exclude hosts that the job blamed.
    scontrol requeue $SLURM_JOB_ID
    avoided={home}/jobs/$job/nodes/{avoided}
    [ -s "$avoided" ] && scontrol update jobid=$SLURM_JOB_ID excnodelist="$(cat "$avoided")"
fi
exit $code
"""


class Submission(NamedTuple):
    """A batch script, and by which names its job is known."""

    script: str
    job: str
    """The job's name; "%j" stands for Slurm's number of it."""
    output: str


def main(argv: Sequence[str]) -> int:
    submission, parsed = read(argv)
    if "dry_run" in parsed:
        print(submission.script, end="")
        return 0
    require_commands()
    try:
        answer = run_now("sbatch", "--parsable", text=submission.script)
    except PlatformError as error:
        if error.for_good:
            raise UsageError(f"Slurm refused the job: {error}; `sinfo` lists partitions") from None
        raise PlatformError(f"the job was not submitted: {error}; try again") from None
    tell(submission, answer.strip().partition(";")[0], "json" in parsed)
    return 0


def read(argv: Sequence[str]) -> tuple[Submission, argparse.Namespace]:
    """Read `holdfast submit slurm ARGV`: what to submit, and the flags that were parsed."""
    without = (*OWN, "local_addr", "requeued")
    because = "the batch script starts all nodes, and decides where they meet"
    given, settings, parsed = read_job(_parser(), argv, without, because)
    flags = given_flags(parsed, NOT_FOR_NODES - {"token_file", "drain"})
    return _submission(settings, given.said, parsed, flags), parsed


def _submission(
    settings: RunSettings, said: Mapping[str, Said], parsed: argparse.Namespace, flags: list[str]
) -> Submission:
    name = settings.job or f"{_stem(settings.script)}-%j"
    output = f"{name if settings.job is None else name + '-%j'}.out"
    gpus = getattr(parsed, "gpus_per_node", None)
    if gpus is not None and "nproc_per_node" not in said:
        flags.append("--nproc-per-node=gpu")
    terms = settings.terms
    nodes = f"--nodes={terms.min_nodes}:{terms.max_nodes}"
    job = shlex.quote(name) if settings.job else f"{_stem(settings.script)}-$SLURM_JOB_ID"
    python = shlex.quote(sys.executable)
    home = '"${HOLDFAST_HOME:-$HOME/.holdfast}"'
    body = BODY.format(
        job=job,
        python=python,
        flags="".join(f"{word} " for word in map(shlex.quote, [nodes, *flags])),
        command=shlex.join([settings.script, *settings.script_args]),
        home=home,
        avoided=AVOIDED,
    )
    options = sbatch_options(settings, parsed, output)
    lines = ["#!/bin/bash", f"# Made by `holdfast submit slurm` {__version__}."]
    lines += [f"#SBATCH {option}" for option in options]
    return Submission("\n".join(lines) + "\n" + body, name, output)


def sbatch_options(settings: RunSettings, parsed: argparse.Namespace, output: str) -> list[str]:
    """Options of the batch job. Those that the user names come last, and so win."""
    terms = settings.terms
    fewest, most = terms.min_nodes, terms.max_nodes + terms.spares
    warn_s = whole_number(getattr(parsed, "warn_before", str(WARN_S)), "--warn-before")
    options = [
        f"--job-name={settings.job or _stem(settings.script)}",
        f"--nodes={fewest}-{most}" if fewest < most else f"--nodes={most}",
        *(() if "shared" in parsed else ("--exclusive",)),
        "--no-kill",
        "--requeue",
        "--open-mode=append",
        f"--output={output}",
        f"--signal=B:USR1@{warn_s}",
    ]
    for name in ("partition", "account", "time", "gpus_per_node"):
        value = getattr(parsed, name, None)
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={_one_line(value, name)}")
    if terms.supply.memory_mib:
        options.append(f"--mem={terms.supply.memory_mib}M")
    for option in getattr(parsed, "sbatch", ()):
        options.append(f"--{_one_line(option, 'sbatch').lstrip('-')}")
    return options


def tell(submission: Submission, id: str, as_json: bool) -> None:
    """Say what became of a submission, and how to look at it."""
    job, output = submission.job.replace("%j", id), submission.output.replace("%j", id)
    if as_json:
        from holdfast.cli.view import print_json

        print_json({"slurm_job": int(id), "job": job, "output": os.path.abspath(output)})
        return
    print(f"""Slurm job {id} is submitted; it is job {job} of Holdfast.
  squeue --job {id}
  tail -F {output}
  holdfast status {job}
  scancel {id}""")


def _stem(script: str) -> str:
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in Path(script).stem)
    return job_name(
        stem.lstrip(".")[:60].encode("ascii", "replace").decode().replace("?", "-") or "job",
        "SCRIPT",
    )


def _one_line(text: str, name: str) -> str:
    if not text.isprintable() or not text.strip():
        raise UsageError(f"--{name.replace('_', '-')} {text!r}: one line of text is needed")
    return text.strip()


def _parser() -> argparse.ArgumentParser:
    parser = run_parser(
        "holdfast submit slurm",
        usage="holdfast submit slurm --nodes N|MIN:MAX [flags] SCRIPT [its own arguments]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    own = parser.add_argument_group("of the batch job")
    own.add_argument(
        "--nodes",
        dest=Settings.nnodes.name,
        metavar=Settings.nnodes.takes,
        help="number of nodes, or the fewest and the most to train with; the same as --nnodes",
    )
    for flag, takes, text in (
        ("--partition", "NAME", "partition of the job; default: Slurm's"),
        ("--time", "TIME", "time limit of one run, as in 24:00:00; default: the partition's"),
        ("--account", "NAME", "account that is charged; default: the user's"),
        ("--gpus-per-node", "N", "GPUs of a node; the default of --nproc-per-node is then gpu"),
        ("--warn-before", "SECONDS", f"how long before the time limit to save; default: {WARN_S}"),
    ):
        own.add_argument(flag, metavar=takes, help=text)
    own.add_argument("--shared", action="store_true", help="share nodes; default: take them whole")
    own.add_argument(
        "--sbatch",
        action="append",
        metavar="OPTION",
        help="another option of sbatch, as in constraint=a100; may be repeated",
    )
    own.add_argument(
        "--dry-run", action="store_true", help="print the batch script, and submit nothing"
    )
    own.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser

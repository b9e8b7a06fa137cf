"""`holdfast operator` runs jobs on Kubernetes that are described by resources of the API server."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from holdfast.cli.view import Parser

ABOUT = """\
Run jobs on Kubernetes: for each HoldfastJob, a pod for its coordinator and pods for its nodes, which
are replaced when they are lost. It runs in a pod (deploy/kubernetes) or anywhere with a kubeconfig, and
may be killed at any time: all that it knows is in the API server."""

EPILOG = """\
examples:
  holdfast operator                          jobs of all namespaces
  holdfast operator --namespace research     jobs of one
  kubectl get hfj                            the jobs: phase, round, step, goodput"""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="holdfast operator", description=ABOUT, raw=True)
    parser.epilog = EPILOG
    parser.add_argument("--namespace", default="", help="serve this namespace only; default: all")
    parser.add_argument(
        "--liveness", metavar="URL", help="answer probes there, such as http://0.0.0.0:8080/healthz"
    )
    parser.add_argument(
        "--dlrover",
        action="store_true",
        help="also run DLRover's ElasticJobs, and obey its ScalePlans; DLRover's operator must not run",
    )
    parser.add_argument("--print-crd", action="store_true", help="print the resource's definition")
    given = parser.parse_args(argv)
    if given.print_crd:
        from holdfast.cli.view import print_json
        from holdfast.platforms.kubernetes.crd import definition

        print_json(definition())
        return 0

    from holdfast.platforms.kubernetes.operator import run_operator

    logging.basicConfig(format="[holdfast] %(message)s", level=logging.INFO)
    return run_operator(given.namespace, given.liveness, given.dlrover)

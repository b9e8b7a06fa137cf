"""Kubernetes: the coordinator plans, the operator carries out.

A `HoldfastJob` is a resource of the API server. The operator (`operator`, a kopf process) holds a
`JobRun` (`job`) for each of them, which keeps a pod for the coordinator and runs a supplier with a
`KubernetesPlatform` (`platform`) for the worker pods. Everything else is pure:

    spec        what the user writes
    crd         the resource's definition, with the schema that the API server checks it by
    objects     pods, services, claims, secrets that are made from it
    pods        what a pod's status means: a sighting, an address, an end
    status      what the user reads: phase, conditions, printer columns
    dlrover     DLRover's resources, in terms of ours

Nothing is remembered in the operator. Names are the keys (request "3-2" of job llm is the pod llm-3-2),
what has to outlast it is in the API server, and a watch only says when to look again. So it may be
killed at any time. `client` is the only module that needs the packages of the extra `kubernetes`, apart
from `operator`, which needs kopf.
"""

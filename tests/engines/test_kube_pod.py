"""What the node agent makes of a pod's specification, without any engine."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from . import kube_pod
from .kube_services import host_line

POD = {
    "metadata": {"name": "w-0", "namespace": "train", "uid": "u", "labels": {"a/b": "c"}},
    "spec": {"nodeName": "n1"},
    "status": {"podIP": "127.16.1.1"},
}


def secret(**data: str) -> dict[str, Any]:
    return {"data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}}


def nothing(plural: str, name: str) -> None:
    return None


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2), ("2Gi", 2 << 30), ("128974848", 128974848), ("3k", 3000)],
)
def test_quantities_are_read_as_kubernetes_does(text: str, value: float) -> None:
    assert kube_pod.quantity(text) == value


def test_a_reference_in_an_argument_is_replaced_and_an_unknown_one_kept() -> None:
    words = {"command": ["run", "$(A)", "$$(A)", "$(B)"], "name": "c"}
    assert kube_pod.command(words, {"A": "1"}) == ["run", "1", "$(A)", "$(B)"]


def test_env_wins_over_env_from_and_may_refer_to_it() -> None:
    container = {
        "envFrom": [{"secretRef": {"name": "s"}, "prefix": "P_"}],
        "env": [{"name": "X", "value": "$(P_K)!"}, {"name": "P_K", "value": "mine"}],
    }
    env = kube_pod.environment(POD, container, {"PATH": "/bin"}, lambda *_: secret(K="v"))
    assert env == {"PATH": "/bin", "P_K": "mine", "X": "v!"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "w-0"),
        ("metadata.labels['a/b']", "c"),
        ("spec.nodeName", "n1"),
        ("status.podIP", "127.16.1.1"),
    ],
)
def test_a_pod_can_read_its_own_fields(path: str, value: str) -> None:
    assert kube_pod.field(POD, path) == value


def test_a_missing_secret_is_named() -> None:
    ref = {"name": "token", "key": "k"}
    container = {"env": [{"name": "T", "valueFrom": {"secretKeyRef": ref}}]}
    with pytest.raises(kube_pod.ConfigError, match="secret 'token' not found"):
        kube_pod.environment(POD, container, {}, nothing)


def test_a_missing_optional_secret_leaves_the_variable_unset() -> None:
    ref = {"name": "token", "key": "k", "optional": True}
    container = {"env": [{"name": "T", "valueFrom": {"secretKeyRef": ref}}]}
    assert kube_pod.environment(POD, container, {}, nothing) == {}


def test_a_volume_that_is_not_supported_is_named(tmp_path: Path) -> None:
    pod = {"spec": {"volumes": [{"name": "v", "nfs": {"server": "s"}}]}}
    with pytest.raises(kube_pod.ConfigError, match=r"volume 'v': \['nfs'\] is not supported"):
        kube_pod.make_volumes(pod, tmp_path, tmp_path, nothing)


def test_only_the_named_items_of_a_secret_are_written(tmp_path: Path) -> None:
    items = [{"key": "a", "path": "deep/x"}]
    pod = {"spec": {"volumes": [{"name": "v", "secret": {"secretName": "s", "items": items}}]}}
    places = kube_pod.make_volumes(pod, tmp_path, tmp_path, lambda *_: secret(a="1", b="2"))
    files = {str(f.relative_to(places["v"])) for f in places["v"].rglob("*") if f.is_file()}
    assert files == {"deep/x"}


def test_a_running_pod_with_hostname_and_subdomain_has_a_name() -> None:
    pod = POD | {"spec": {"hostname": "w-0", "subdomain": "s"}}
    running = pod | {"status": {"podIP": "127.16.1.1", "phase": "Running"}}
    names = "w-0.s.train.svc.cluster.local w-0.s.train.svc w-0.s.train"
    assert host_line(running) == f"127.16.1.1 {names}"
    assert host_line(pod) == ""

"""Reads a pod's specification the way a kubelet does: commands, environment, mounts.

Supported, and nothing else (anything else holds the pod back with the reason in its status):

- `command` and `args` with `$(NAME)`, `workingDir`; there are no images, so `command` is required;
- `env` with `value`, `fieldRef`, `resourceFieldRef`, `secretKeyRef` and `configMapKeyRef`; `envFrom`
  with Secrets and ConfigMaps, `prefix`, `optional`;
- volumes: `emptyDir` (also `medium: Memory`), `hostPath`, `secret`, `configMap` (with `items`),
  `persistentVolumeClaim`; mounts with `subPath` and `readOnly`.

Secrets are copied when the pod starts; a change to them does not arrive in a running pod.
"""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
# Return an object of the pod's namespace by plural and name, or None.
Read = Callable[[str, str], Json | None]

_REFERENCE = re.compile(r"\$(\$|\([A-Za-z_][A-Za-z0-9_.-]*\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9}


class ConfigError(Exception):
    """A container cannot be made as specified: a Secret is missing, a volume is not supported."""


def quantity(text: str) -> float:
    """Value of a quantity such as 500m, 2Gi or 1."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return float(text[: -len(unit)]) * factor
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def expanded(text: str, env: dict[str, str]) -> str:
    """Replace $(NAME) by its value; $$ stands for $, an unknown name stays as it is."""

    def value(match: re.Match[str]) -> str:
        word = match[1]
        return "$" if word == "$" else env.get(word[1:-1], match[0])

    return _REFERENCE.sub(value, text)


def command(container: Json, env: dict[str, str]) -> list[str]:
    """Command line of a container."""
    if not container.get("command"):
        raise ConfigError(f"container {container['name']} has no command, and there are no images")
    words = [*container["command"], *container.get("args", ())]
    return [expanded(word, env) for word in words]


def environment(pod: Json, container: Json, given: dict[str, str], read: Read) -> dict[str, str]:
    """Environment of a container: `given`, then envFrom, then env, later ones winning."""
    env = dict(given)
    for source in container.get("envFrom", ()):
        for kind, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
            if kind in source:
                ref = source[kind]
                data = _data(plural, ref["name"], read, ref.get("optional", False))
                prefix = source.get("prefix", "")
                env.update({prefix + key: value.decode() for key, value in data.items()})
    for entry in container.get("env", ()):
        value = _value(pod, container, entry, env, read)
        if value is not None:
            env[entry["name"]] = value
    return env


def _value(pod: Json, container: Json, entry: Json, env: dict[str, str], read: Read) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        return expanded(entry.get("value", ""), env)
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
        amount = container.get("resources", {}).get(kind, {}).get(name, "0")
        divisor = quantity(source["resourceFieldRef"].get("divisor", "1") or "1") or 1.0
        return str(-int(-quantity(amount) // divisor))
    kind, plural = (
        ("secretKeyRef", "secrets")
        if "secretKeyRef" in source
        else ("configMapKeyRef", "configmaps")
    )
    ref = source[kind]
    optional = ref.get("optional", False)
    data = _data(plural, ref["name"], read, optional)
    if ref["key"] in data:
        return data[ref["key"]].decode()
    if optional:
        return None
    raise ConfigError(f"{plural} {ref['name']!r} has no key {ref['key']!r}")


def field(pod: Json, path: str) -> str:
    """Value of a field that a pod may read about itself."""
    subscript = _SUBSCRIPT.fullmatch(path)
    if subscript:
        found = (pod["metadata"].get(subscript[1]) or {}).get(subscript[2], "")
    else:
        found = pod
        for word in path.split("."):
            found = found.get(word, {})
    if not isinstance(found, str):
        raise ConfigError(f"field path {path!r} is not supported")
    return found


def _data(plural: str, name: str, read: Read, optional: bool) -> dict[str, bytes]:
    found = read(plural, name)
    if found is None:
        if optional:
            return {}
        raise ConfigError(f"{plural[:-1]} {name!r} not found")
    binary = found.get("binaryData") if plural == "configmaps" else found.get("data")
    data = {key: base64.b64decode(value) for key, value in (binary or {}).items()}
    if plural == "configmaps":
        data |= {key: value.encode() for key, value in (found.get("data") or {}).items()}
    return data


def make_volumes(pod: Json, folder: Path, memory: Path, read: Read) -> dict[str, Path]:
    """Make a pod's volumes, `medium: Memory` under `memory`; return where each one is."""
    return {
        volume["name"]: _make_volume(volume, folder, memory, read)
        for volume in pod["spec"].get("volumes", ())
    }


def _make_volume(volume: Json, folder: Path, memory: Path, read: Read) -> Path:
    place = folder / "volumes" / str(volume["name"])
    if "emptyDir" in volume:
        in_memory = (volume["emptyDir"] or {}).get("medium") == "Memory"
        place = memory / str(volume["name"]) if in_memory else place
    elif "hostPath" in volume:
        place = Path(volume["hostPath"]["path"])
        if not volume["hostPath"].get("type", "").endswith("OrCreate") and not place.exists():
            raise ConfigError(f"hostPath {place} does not exist")
    elif "persistentVolumeClaim" in volume:
        place = _claimed(volume["persistentVolumeClaim"]["claimName"], read)
    elif "secret" in volume or "configMap" in volume:
        shutil.rmtree(place, ignore_errors=True)
        _write_files(volume, place, read)
    else:
        kinds = sorted(set(volume) - {"name"})
        raise ConfigError(f"volume {volume['name']!r}: {kinds} is not supported by this node agent")
    if not place.exists():
        place.mkdir(parents=True)
    return place


def _claimed(claim: str, read: Read) -> Path:
    found = read("persistentvolumeclaims", claim)
    bound = (found or {}).get("spec", {}).get("volumeName")
    if not bound:
        raise ConfigError(f"persistentvolumeclaim {claim!r} is not bound")
    volume = read("persistentvolumes", bound)
    path = (volume or {}).get("spec", {}).get("hostPath", {}).get("path")
    if not path:
        raise ConfigError(f"persistent volume {bound!r} is not a hostPath volume")
    return Path(path)


def _write_files(volume: Json, place: Path, read: Read) -> None:
    plural, source = (
        ("secrets", volume["secret"]) if "secret" in volume else ("configmaps", volume["configMap"])
    )
    name = source.get("secretName") or source["name"]
    data = _data(plural, name, read, source.get("optional", False))
    wanted = {item["key"]: item["path"] for item in source.get("items", ())}
    for key, value in data.items():
        if wanted and key not in wanted:
            continue
        target = place / wanted.get(key, key)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(value)
    place.mkdir(parents=True, exist_ok=True)


def mounts(container: Json, volumes: dict[str, Path]) -> list[tuple[str, str, bool]]:
    """Where each of a container's mounts comes from, where it appears, and if it is read-only."""
    found = []
    for mount in container.get("volumeMounts", ()):
        source = volumes[mount["name"]] / mount.get("subPath", "")
        if not source.exists():
            source.mkdir(parents=True)
        found.append((str(source), mount["mountPath"], bool(mount.get("readOnly", False))))
    return found

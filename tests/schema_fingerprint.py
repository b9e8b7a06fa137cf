"""Fingerprints the formats that outlive one process, so that a change cannot go unnoticed.

    python tests/schema_fingerprint.py     # writes tests/data/schema.json anew

The file keeps, for each format, its version and a digest of every type in it. Nothing is written while
a type has changed and its version has not: raise the version first (`docs/compatibility.md`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.checkpoint.replicas import protocol as replicas
from holdfast.coordinator import journal
from holdfast.messages import wire

FILE = Path(__file__).parent / "data" / "schema.json"


class Format(NamedTuple):
    version: int
    version_at: str
    """Where the version is defined."""
    types: tuple[Any, ...]


FORMATS = {
    "wire": Format(
        wire.PROTOCOL,
        "PROTOCOL in holdfast/messages/wire.py",
        (wire.FromAgent, wire.FromCoordinator, wire.ToVisitor),
    ),
    "journal": Format(
        journal.VERSION,
        "VERSION in holdfast/coordinator/journal.py",
        (journal.AnyEvent, journal.JobSnapshot),
    ),
    "replicas": Format(
        replicas.PROTOCOL,
        "PROTOCOL in holdfast/checkpoint/replicas/protocol.py",
        (replicas.PeerHello, replicas.Request, replicas.More, replicas.Reply, replicas.Outline),
    ),
}


def fingerprint(types: tuple[Any, ...]) -> dict[str, str]:
    """Digest of the JSON schema of each type that a value of these types can contain."""
    top, components = msgspec.json.schema_components(types)
    described = {**components, "(top level)": list(top)}
    return {name: _digest(_without_prose(schema)) for name, schema in sorted(described.items())}


def _digest(schema: Any) -> str:
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()[:16]


def _without_prose(schema: Any) -> Any:
    """The schema without docstrings, which no decoder looks at, and with sets in one order."""
    if isinstance(schema, list):
        return [_without_prose(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "description" and isinstance(value, str):
            continue
        found[key] = _without_prose(value)
        if key in ("anyOf", "enum", "required"):
            found[key] = sorted(found[key], key=lambda each: json.dumps(each, sort_keys=True))
    return found


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Names of types that differ, were added or are gone."""
    return sorted(name for name in before.keys() | now if before.get(name) != now.get(name))


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def main() -> None:
    before = read()
    content = {}
    for name, each in FORMATS.items():
        types = fingerprint(each.types)
        known = before.get(name, {"version": None, "types": {}})
        differ = changed(known["types"], types)
        if differ and known["version"] == each.version:
            sys.exit(f"{name}: {', '.join(differ)} changed; raise {each.version_at} first")
        content[name] = {"version": each.version, "types": types}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

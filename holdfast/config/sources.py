"""The sources collect what the user said, each setting from the strongest source that has it.

    flag  >  HOLDFAST_* variable  >  torchrun's PET_* variable  >  holdfast.toml  >  default

An empty variable counts as not set; only an empty HOLDFAST_TOKEN is an error (`launch/site.py`).
`holdfast.toml` is read from the working directory, or from where --config or HOLDFAST_CONFIG says. A
key in the file that is no setting is an error; a variable that looks like a misspelt setting is a
warning, because an environment is inherited.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.config.schema import SET_FOR_WORKERS, Said, Setting, Settings, all_settings
from holdfast.errors import JobHomeError, UsageError

FILE = "holdfast.toml"


def collect(flags: Mapping[str, Said], environ: Mapping[str, str]) -> Settings:
    """Collect what was said by flags (given here by name), variables and the file."""
    said = {**from_environment(environ).said, **flags}
    chosen = said.get("config")
    if chosen is not None:
        said = {**from_file(chosen.text, chosen.source), **said}
    elif os.path.exists(FILE):
        said = {**from_file(FILE, "in the working directory:"), **said}
    return Settings(said, tuple(_misspelt(environ)))


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Collect what was said by variables alone."""
    said: dict[str, Said] = {}
    for setting in all_settings():
        variable = next((name for name in setting.variables if environ.get(name)), None)
        if variable is not None:
            said[setting.name] = Said(environ[variable], variable)
    return Settings(said)


def holdfast_home() -> Path:
    """The directory of all jobs: $HOLDFAST_HOME, or ~/.holdfast."""
    try:
        return Path(from_environment(os.environ).home).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise JobHomeError(
            f"no home for jobs: {error}; set HOLDFAST_HOME to a directory"
        ) from error


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that was probably meant: one that begins with it, or is spelt alike."""
    from difflib import get_close_matches

    known = list(known)
    begins = [other for other in known if word and other.startswith(word)]
    return next(iter(begins or get_close_matches(word, known, n=1, cutoff=cutoff)), None)


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """Warn of variables that look like a setting but are none."""
    known = {setting.variables[0] for setting in all_settings()}
    names = {name for name in environ if name.startswith("HOLDFAST_")}
    for name in sorted(names - known - SET_FOR_WORKERS):
        word = name.removeprefix("HOLDFAST_")
        meant = nearest(word, (n.removeprefix("HOLDFAST_") for n in sorted(known)), cutoff=0.8)
        if meant is not None:
            yield f"{name} is not a setting and has no effect; did you mean HOLDFAST_{meant}?"


def from_file(path: str, source: str) -> dict[str, Said]:
    """Read a settings file that was chosen by `source`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{source} {path}: {error.strerror}") from None
    except ValueError as error:  # Not UTF-8, or not TOML; says the line.
        raise UsageError(f"{source} {path}: not a TOML file: {error}") from None
    known = {setting.key: setting for setting in all_settings()}
    said: dict[str, Said] = {}
    for key, value in content.items():
        place = f"{path}:{_line_of(key, text)}: {key}"
        setting = known.get(key.replace("_", "-"))
        if setting is None or not setting.in_file:
            raise UsageError(_not_for_a_file(key, place, setting, known))
        if setting.name in said:
            raise UsageError(f"{place}: the file sets it twice; leave one of them out")
        said[setting.name] = Said(_as_text(setting, value, place), place)
    return said


def _line_of(key: str, text: str) -> int:
    """The number of the line on which a top-level key is set."""
    match = re.search(rf"^\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]", text, re.MULTILINE)
    return text.count("\n", 0, match.end()) + 1 if match else 1


def _not_for_a_file(
    key: str, place: str, setting: Setting[object] | None, known: Iterable[str]
) -> str:
    if setting is not None:
        return f"{place}: cannot be set in a file; set {setting.variables[0]} instead"
    meant = nearest(key.replace("_", "-"), known)
    hint = f"did you mean {meant}?" if meant else "`holdfast config` lists them"
    return f"{place}: no such setting; {hint}"


def _as_text(setting: Setting[object], value: Any, place: str) -> str:
    """Write a TOML value the way the flag takes it."""
    if isinstance(value, list) and setting.separator:
        return setting.separator.join(_scalar(item, place, setting.separator) for item in value)
    if isinstance(value, dict) and setting.pair:
        return ",".join(
            f"{key}{setting.pair}{_scalar(item, place, ',')}" for key, item in value.items()
        )
    return _scalar(value, place)


def _scalar(value: Any, place: str, separator: str | None = None) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise UsageError(f"{place}: a text, a number or true/false is needed, not {value}")
    text = str(value)
    if "\0" in text:
        raise UsageError(f"{place}: the value contains a NUL character; take it out")
    if separator is not None and separator in text:
        raise UsageError(f"{place}: {text}: write values with {separator!r} as one string")
    return text

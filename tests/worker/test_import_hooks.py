"""Modules are changed as soon as they are imported, and nobody can tell."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.worker.torch_hooks.imports import replacing_captured, when_imported


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that nobody has imported yet."""
    (tmp_path / "fresh_module.py").write_text("value = 1\nloader = __loader__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "fresh_module"
    sys.meta_path[:] = before
    sys.modules.pop("fresh_module", None)


def test_it_is_acted_upon_when_it_is_imported_and_not_before(name: str) -> None:
    seen: list[ModuleType] = []
    when_imported(name, seen.append)
    assert seen == []
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert seen == [module]
    assert module.value == 1


def test_it_is_acted_upon_at_once_if_it_is_there(name: str) -> None:
    module = importlib.import_module(name)
    seen: list[ModuleType] = []
    when_imported(name, seen.append)
    assert seen == [module]


def test_several_may_wait_for_one_module(name: str) -> None:
    seen: list[str] = []
    when_imported(name, lambda _: seen.append("first"))
    when_imported(name, lambda _: seen.append("second"))
    importlib.import_module(name)
    assert sorted(seen) == ["first", "second"]


def test_nothing_is_left_behind(name: str) -> None:
    before = list(sys.meta_path)
    when_imported(name, lambda _: None)
    module = importlib.import_module(name)
    assert sys.meta_path == before
    assert isinstance(module.loader, SourceFileLoader), "what the module itself saw"
    assert isinstance(module.__loader__, SourceFileLoader)
    assert module.__spec__ is not None
    assert isinstance(module.__spec__.loader, SourceFileLoader)


def test_a_version_that_has_not_what_we_look_for_is_left_as_it_is(name: str) -> None:
    when_imported(name, lambda module: module.no_such_function)
    assert importlib.import_module(name).value == 1


def test_finders_of_old_do_no_harm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldFinder:
        def find_module(self, fullname: str, path: object = None) -> None:
            return None

    seen: list[ModuleType] = []
    when_imported(name, seen.append)
    sys.meta_path.insert(1, OldFinder())  # type: ignore[arg-type]
    module = importlib.import_module(name)
    assert seen == [module]


def test_a_module_that_does_not_exist_is_still_missing() -> None:
    before = list(sys.meta_path)
    when_imported("no_such_module_at_all", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    assert sys.meta_path == before


def test_a_function_that_preloaded_modules_have_taken_over_is_replaced_there_too(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "fresh_module.py").write_text("def save(): return 'real'\ndef load(): return 1\n")
    (tmp_path / "fresh_user.py").write_text("from fresh_module import load, save as keep\n")
    user = importlib.import_module("fresh_user")

    def wrap(module: ModuleType) -> None:
        real = module.save
        module.__dict__["save"] = lambda: "wrapped " + real()

    try:
        with replacing_captured(["fresh_user", "not_there"]):
            when_imported(name, wrap)
            when_imported(name, wrap)
        assert user.keep() == "wrapped wrapped real"
        assert user.load() == 1
    finally:
        del sys.modules["fresh_user"]

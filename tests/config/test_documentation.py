"""The tables in docs/configuration.md are those of the schema; run this file to write them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.config.schema import GROUPS, WITH_FLAGS, Setting, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->\n"


def tables() -> str:
    return "\n".join(line for title, group in GROUPS.items() for line in table(title, group)) + "\n"


def table(title: str, group: type) -> Iterator[str]:
    yield f"\n### {title[0].upper()}{title[1:]}\n"
    flags = title in WITH_FLAGS
    yield f"| {'flag' if flags else 'variable'} | default | meaning |"
    yield "| --- | --- | --- |"
    for setting in settings_of(group):
        name = flag(setting) if flags else f"`{setting.variables[0]}`"
        yield f"| {name} | {cell(setting.otherwise)} | {cell(setting.help)}{other(setting)} |"


def flag(setting: Setting[object]) -> str:
    spelt = f"{setting.short}, {setting.flag}" if setting.short else setting.flag
    return f"`{cell(f'{spelt} {setting.takes}'.strip())}`"


def other(setting: Setting[object]) -> str:
    """The variables of torchrun that are honoured as well."""
    return "".join(f"; also `{name}`" for name in setting.variables[1:])


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def rewritten(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables() + "\n" + END + rest.partition(END)[2]


def test_the_tables_are_those_of_the_schema() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert END in page
    assert page == rewritten(page), f"run `python {Path(__file__).name}` to write them anew"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))

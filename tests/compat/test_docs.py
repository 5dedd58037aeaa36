"""The page "Coming from DeepSpeed" against the schema: every key is there, and does what its row says of it."""

from __future__ import annotations

import re
from pathlib import Path

from wherry.config.reference import catalog

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-deepspeed.md"
# How a row begins, and what the schema may say of its keys.
CLAIMS = {
    "same": {"acts"},
    "accepted, not needed": {"none"},
    "not needed": {"none"},
    "not here": {"refused"},
}
# Rows that are about values, or about keys that nobody knows.
NO_KEYS = {'`"auto"`', "an unknown key", "a key that has no effect here"}


def rows() -> list[tuple[list[str], str]]:
    """The key table: the dotted keys of each row, and what it says of them."""
    table = PAGE.read_text().split("## Keys", 1)[1].split("\n## ", 1)[0]
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|", 1)]
        if not line.startswith("| ") or cells[0] == "key" or cells[0] in NO_KEYS:
            continue
        block, keys = "", []
        for name in re.findall("`([^`]+)`", cells[0]):
            # ".stage" stands in the block of the key before it.
            keys.append(block + name if name.startswith(".") else name)
            if not name.startswith("."):
                block = name.rpartition(".")[0]
        assert keys, f"a row without a key: {line}"
        found.append((keys, cells[1]))
    return found


def test_the_key_table_names_keys_that_the_schema_knows_and_what_they_do() -> None:
    effects = {info.path: info.effect for info in catalog() if not info.of}
    table = rows()
    assert len(table) > 12
    unknown = [key for keys, _ in table for key in keys if key not in effects]
    assert not unknown
    wrong = [
        f"{key}: the page says {claim!r}, the schema {effects[key]!r}"
        for keys, text in table
        for claim, allowed in CLAIMS.items()
        if text.startswith(claim)
        for key in keys
        if effects[key] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_keys_in_the_answers_are_known_too() -> None:
    """`"wherry": {"unit_classes": [...]}` and the like, anywhere on the page."""
    paths = {info.path for info in catalog()}
    named = re.findall(r'`"(\w+)": \{"(\w+)":', PAGE.read_text())
    assert named and all(f"{block}.{key}" in paths for block, key in named), named

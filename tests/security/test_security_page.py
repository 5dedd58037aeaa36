"""SECURITY.md: each sentence of it is held by a test that there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_sentence_has_its_test() -> None:
    sections = (ROOT / "SECURITY.md").read_text().split("\n## ")[1:-1]
    lines = [line for section in sections for line in section.split("\n") if line.startswith("- ")]
    assert len(lines) > 12
    for line in lines:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", line)
        assert named, line
        for file, test in named:
            text = (ROOT / file).read_text()
            assert not test or f"\ndef {test}(" in text, f"{file} has no {test}"

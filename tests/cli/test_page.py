"""docs/commands.md against the commands' own parsers."""

from pathlib import Path

from tests.cli.page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_of_commands_is_what_their_parsers_say() -> None:
    assert PAGE.read_text() == markdown(), "write it anew: python -m tests.cli.page > docs/commands.md"

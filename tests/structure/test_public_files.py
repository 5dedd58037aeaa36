"""What a hosting service reads of this repository: its workflows, forms and container file name what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / ".github").rglob("*.yml"), ROOT / "mkdocs.yml"]
WORKFLOWS = ["ci.yml", "nightly.yml", "release.yml"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


class _Loader(yaml.SafeLoader):
    """YAML with the tag of MkDocs for what an environment gives."""


_Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node))


def read(path: Path) -> Any:
    return yaml.load(path.read_text(), _Loader)


def workflow(name: str) -> Any:
    return read(ROOT / ".github" / "workflows" / name)


def commands(name: str) -> str:
    jobs = workflow(name)["jobs"].values()
    return "\n".join(step.get("run", "") for job in jobs for step in job["steps"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_yaml(path):
    assert read(path)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_makes_is_a_target(name):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    made = set(re.findall(r"make ([\w-]+)", commands(name)))
    made |= {
        row["target"]
        for job in workflow(name)["jobs"].values()
        for row in job.get("strategy", {}).get("matrix", {}).get("include", ())
        if "target" in row
    }
    assert made and made <= targets


def test_the_workflow_runs_the_parts_that_the_check_runs():
    assert re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.M) == ["test-all"]
    (recipe,) = re.findall(r"^test-all:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    matrix = workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    parts = set(matrix["part"]) | set(re.findall(r"make ([\w-]+)", commands("ci.yml")))
    assert parts == set(re.findall(r"\$\(MAKE\) ([\w-]+)", recipe))
    assert {include["part"] for include in matrix["include"]} <= parts


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_little_and_ends(name):
    whole = workflow(name)
    assert whole["permissions"] == {"contents": "read"}
    for job in whole["jobs"].values():
        assert job["timeout-minutes"] <= (350 if name == "nightly.yml" else 90)
        for step in job["steps"]:
            assert re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v1"))


def test_nothing_is_published_without_a_tag():
    for job in workflow("release.yml")["jobs"].values():
        if "permissions" in job:
            assert job["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"


def test_the_wheel_is_tested_by_a_file_that_is_there():
    command = PROJECT["tool"]["cibuildwheel"]["test-command"]
    assert (ROOT / command.removeprefix("python {project}/")).is_file()


def test_every_page_is_in_the_navigation():
    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for inner in (entry.values() if isinstance(entry, dict) else entry) for page in pages(inner)]

    named = pages(read(ROOT / "mkdocs.yml")["nav"])
    assert len(named) == len(set(named))
    # Those that stand at the root, and the examples, become pages when the site is made.
    made = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples.md"}
    assert set(named) == {path.name for path in (ROOT / "docs").glob("*.md")} | made


def test_the_reference_has_every_public_name():
    import wherry

    told = set(re.findall(r"(?:^::: |heading: )([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert {f"wherry.{name}" for name in wherry.__all__ if name != "__version__"} <= told


def test_members_that_the_reference_names_are_there():
    import wherry
    from wherry.update.parameter_states import ParameterStates

    text = (ROOT / "docs" / "api.md").read_text()
    members = re.findall(r"^ {8}- (\w+)$", text, re.M)
    assert len(members) > 30 and [name for name in members if not hasattr(wherry.Engine, name)] == []
    (states,) = re.findall(r"members: \[(local[^\]]*)\]", text)
    assert all(hasattr(ParameterStates, name) for name in states.split(", "))

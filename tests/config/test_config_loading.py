"""Where a config can come from, how its text is read, and how its mistakes are told."""

import base64
import copy
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.config.page import TUTORIAL

from wherry.config import ConfigError, load, parse_overrides
from wherry.config.source import parse
from wherry.placement import Placement, Tier

MISTAKES = json.loads((Path(__file__).parent / "mistakes.json").read_text())


def test_the_same_config_from_everywhere(tmp_path):
    tree = {"gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": 1}}
    text = json.dumps(tree)
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8-sig")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    expected = load(tree).to_dict()
    for source in (text, path, str(path), encoded, encoded.rstrip("="), json.dumps(tree, indent=2)[1:-1]):
        assert load(source).to_dict() == expected
    assert load(None).to_dict() == load({}).to_dict() == load("{}").to_dict()
    assert load(TUTORIAL).placement() == Placement.of_stage(2, optimizer=Tier.HOST)


def test_a_config_neither_changes_nor_shares_what_it_is_of():
    tree = {
        "optimizer": {"type": "adam", "params": {"adam_w_mode": False, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ["/a", "/b"]}},
        "wherry": {"unit_classes": ["Block"]},
    }
    before = copy.deepcopy(tree)
    config = load(tree)
    assert tree == before == config.given and load(config) is config
    resolved = config.to_dict()
    assert json.loads(json.dumps(resolved)) == resolved
    for again in (copy.deepcopy(config), load(resolved)):
        assert again.to_dict() == resolved
        assert not any("no effect" in note for note in again.notes)
    further = load(config, overrides={"zero_optimization.reduce_bucket_size": 3})
    assert (further.zero_optimization.reduce_bucket_size, further.zero_optimization.stage) == (3, 3)
    config.given["zero_optimization"]["stage"] = 2
    config.to_dict()["wherry"]["unit_classes"].append("Other")
    assert config.given == before and config.to_dict() == resolved


# --- mistakes ---


@pytest.mark.parametrize("part", range(3))
def test_the_message_of_a_mistake(part):
    """Word for word, with the line where there are lines; of keys on one line in any order."""
    for mistake in MISTAKES[part::3]:
        with pytest.raises(ConfigError) as caught:
            load(mistake["given"])
        assert sorted(str(caught.value).splitlines()) == sorted(mistake["says"])
        lines = [problem.line for problem in caught.value.problems if problem.line is not None]
        assert lines == sorted(lines)


def test_sources_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in (("b.json", b"{\xff\xfe}"), ("e.json", b"\n"), ("l.json", b"[1, 2]"), ("x.json", b'{\n"x": 1}')):
        Path(name).write_bytes(data)
    inner = {"stage": 2}
    inner["again"] = [inner]
    for source, message in (
        (tmp_path, "cannot be read"),
        (tmp_path / "none.json", "cannot be read"),
        (Path("b.json"), "UTF-8"),
        (Path("e.json"), "is empty; write {}"),
        (Path("l.json"), "expected an object"),
        ("x.json", r"^x\.json:2: x: unknown key"),  # shown as it was given
        ('{"a": ' * 100_000, "nested too deeply"),
        (3, "expected a path, a dict"),
        ({"zero_optimization": inner}, r"^zero_optimization\.again\.0: is the same object as one around it"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(source)
    twice = {"enabled": False}
    assert load({"fp16": twice, "bf16": twice}).bf16.enabled is False


# --- overrides ---


def test_overrides_win_and_are_named_when_wrong(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(TUTORIAL)
    config = load(path, overrides={"zero_optimization.stage": 3, "zero_optimization": {"reduce_bucket_size": 3}})
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.reduce_bucket_size == 3
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    with pytest.raises(ConfigError) as caught:
        load(path, overrides={"zero_optimization.stage": 9})
    (problem,) = caught.value.problems
    assert problem.line is None and "override" in problem.message


def test_overrides_from_the_command_line():
    assert parse_overrides(["a.b=3", "c=true", "d=5e8", "e=runs/x", 'f={"g": [1]}', "h=null"]) == {
        "a.b": 3, "c": True, "d": 5e8, "e": "runs/x", "f": {"g": [1]}, "h": None,
    }  # fmt: skip
    for wrong in ("stage", "=3", "a={"):
        with pytest.raises(ConfigError):
            parse_overrides([wrong])


def test_dotted_keys_at_the_top():
    config = load({"zero_optimization.reduce_bucket_size": 1e6, "zero_optimization": {"stage": 3}})
    assert config.zero_optimization.reduce_bucket_size == 1_000_000
    filled = load({"zero_optimization.stage": 2, "zero_optimization": {"stage": "auto"}})
    assert filled.zero_optimization.stage == 2
    both = load({"zero_optimization.stage": 2, "zero_optimization": {"stage": 1}})
    assert both.zero_optimization.stage == 1
    assert any("left aside" in note for note in both.notes)


# --- lines, against the parser ---

names = st.text(st.sampled_from("ab_\"'\\ #:{},/é"), min_size=1, max_size=5)
texts = st.text(st.sampled_from("ab,:{}[]#\"'\\\n/é"), max_size=6)
leaves = st.none() | st.integers(-99, 99) | st.sampled_from([True, 0.5, 5e20, math.inf, -math.inf]) | texts
trees = st.recursive(
    st.dictionaries(names, leaves, max_size=3),
    lambda inner: st.dictionaries(names, inner | st.lists(leaves | inner, max_size=3) | leaves, max_size=4),
    max_leaves=12,
)


def paths(value, prefix=()):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*prefix, name)
            yield from paths(inner, (*prefix, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*prefix, str(index)))


@given(trees, st.sampled_from([None, 2]))
def test_the_scanner_finds_every_key_of_json(tree, indent):
    text = json.dumps(tree, indent=indent)
    value, lines = parse(text)
    assert value == tree and not lines.problems
    assert set(lines.table) == set(paths(tree))
    for path, line in lines.table.items():
        assert json.dumps(path[-1]) in text.splitlines()[line - 1]


HJSON = """# it's { one
one: 1 // "{
/* [
 } */ 'two' : '''text: {'''
three: [ # ]
  text, [of: a list
  {four: "}", five: 'a"b'}, {six
  : null,},
]
"seven"
: {eight: true
nine: 9,
}
"""


def test_the_scanner_finds_every_key_of_hjson():
    value, lines = parse(HJSON)
    inner = [{"four": "}", "five": 'a"b'}, {"six": None}]
    assert value == {
        "one": 1, "two": "text: {", "three": ["text, [of: a list", *inner], "seven": {"eight": True, "nine": 9},
    }  # fmt: skip
    assert {path[-1]: line for path, line in lines.table.items()} == {
        "one": 2, "two": 4, "three": 5, "four": 7, "five": 7, "six": 7, "seven": 10, "eight": 11, "nine": 12,
    }  # fmt: skip

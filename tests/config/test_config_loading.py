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


def problems(source, **options):
    with pytest.raises(ConfigError) as caught:
        load(source, **options)
    return caught.value.problems


def test_the_tutorial_file_loads_as_printed(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(TUTORIAL)
    config = load(path)
    assert config.placement() == Placement.of_stage(2, optimizer=Tier.HOST)
    assert config.batch(2) == (2, 1, 1)


def test_hjson_comments_commas_and_unquoted_keys():
    config = load("""
    {
      # a comment
      train_batch_size: 8   // another
      /* and a
         third */
      "optimizer": { "type": "AdamW", 'params': {lr: 3e-4,}, },
      zero_optimization: {stage: 3, reduce_bucket_size: 5e8}
    }
    """)
    assert config.train_batch_size == 8
    assert config.optimizer.params["lr"] == 3e-4
    assert config.zero_optimization.stage == 3


def test_hjson_without_outer_braces():
    assert load("train_batch_size: 8\nzero_optimization: {stage: 1}\n").zero_optimization.stage == 1


def test_the_same_config_from_everywhere(tmp_path):
    tree = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    text = json.dumps(tree)
    path = tmp_path / "c.json"
    path.write_text(text, encoding="utf-8-sig")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    expected = load(tree).to_dict()
    for source in (text, path, str(path), encoded, encoded.rstrip("="), json.dumps(tree, indent=2)):
        assert load(source).to_dict() == expected
    assert load(None).to_dict() == load({}).to_dict() == load("{}").to_dict()


def test_python_writes_infinity_into_json():
    assert load(json.dumps({"steps_per_print": math.inf, "gradient_clipping": 1.0})).gradient_clipping == 1.0


def test_a_dict_is_neither_changed_nor_shared():
    tree = {"zero_optimization": {"cpu_offload": True, "stage": "auto"}, "wherry": {"unit_classes": ["Block"]}}
    before = copy.deepcopy(tree)
    config = load(tree)
    assert tree == before
    assert config.given == before
    config.given["zero_optimization"]["stage"] = 3
    config.to_dict()["wherry"]["unit_classes"].append("Other")
    assert config.given == before
    assert config.wherry.unit_classes == ["Block"]


def test_a_config_is_copied_and_loaded_again():
    config = load(TUTORIAL, overrides={"train_batch_size": 6})
    assert load(config) is config
    again = copy.deepcopy(config)
    assert again.to_dict() == config.to_dict() and again.notes == config.notes
    further = load(config, overrides={"zero_optimization.stage": 3})
    assert (further.train_batch_size, further.zero_optimization.stage) == (6, 3)
    assert config.zero_optimization.stage == 2


def test_the_resolved_config_is_a_config():
    config = load(
        {
            "optimizer": {"type": "adam", "params": {"adam_w_mode": False, "betas": [0.8, 0.9]}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": ["/a", "/b"]}},
            "fp16": {"enabled": True},
            "aio": {"block_size": 262144},
        }
    )
    assert not any("aio" in note for note in config.notes)
    resolved = config.to_dict()
    assert json.loads(json.dumps(resolved)) == resolved
    again = load(resolved)
    assert again.to_dict() == resolved and again.aio.block_size == 262144
    assert not any("no effect" in note for note in again.notes)


# --- mistakes ---


@pytest.mark.parametrize("part", range(6))
def test_the_message_of_a_mistake(part):
    """Word for word, with the line where there are lines; of keys on one line in any order."""
    for mistake in MISTAKES[part::6]:
        with pytest.raises(ConfigError) as caught:
            load(mistake["given"])
        assert sorted(str(caught.value).splitlines()) == sorted(mistake["says"])
        lines = [problem.line for problem in caught.value.problems if problem.line is not None]
        assert lines == sorted(lines)


@pytest.mark.parametrize("as_override", [False, True])
def test_a_dict_that_holds_itself_is_told(as_override):
    inner = {"stage": 2}
    tree = {"zero_optimization": inner, "bf16": {"enabled": True}}
    inner["again"] = [tree]
    with pytest.raises(ConfigError, match=r"^zero_optimization\.again\.0: is the same object as one around it"):
        load({}, overrides=tree) if as_override else load(tree)
    twice = {"enabled": False}
    assert load({"fp16": twice, "bf16": twice}).bf16.enabled is False
    for _ in range(100_000):
        twice = {"a": twice}
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(twice)


def test_a_bucket_has_an_end():
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        for value in ("1e400", "-Infinity", "NaN", "1e14"):
            (problem,) = problems('{\n"zero_optimization": {"' + name + '": ' + value + "}}")
            assert (problem.path, problem.line) == (f"zero_optimization.{name}", 2)
            assert problem.message.startswith("expected a number of elements")


def test_sources_that_are_none(tmp_path):
    assert "no such file" in problems("nowhere.json")[0].message
    assert "no such file" in problems("QUJDREVGR0g=")[0].message
    assert "cannot be read" in problems(tmp_path)[0].message
    assert "cannot be read" in problems(tmp_path / "none.json")[0].message
    binary = tmp_path / "b.json"
    binary.write_bytes(b"{\xff\xfe}")
    assert "UTF-8" in problems(binary)[0].message
    empty = tmp_path / "e.json"
    empty.write_text("\n")
    assert "is empty; write {}" in problems(empty)[0].message
    listed = tmp_path / "l.json"
    listed.write_text("[1, 2]")
    assert "expected an object" in problems(listed)[0].message
    assert "nested too deeply" in problems('{"a": ' * 100_000)[0].message
    assert "expected a path, a dict" in problems(3)[0].message


# --- overrides ---


def test_overrides_win_and_are_named_when_wrong(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(TUTORIAL)
    config = load(path, overrides={"zero_optimization.stage": 3, "zero_optimization": {"reduce_bucket_size": 3}})
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.reduce_bucket_size == 3
    assert config.zero_optimization.offload_optimizer.device == "cpu"
    (problem,) = problems(path, overrides={"zero_optimization.stage": 9})
    assert problem.line is None
    assert "override" in problem.message


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
    sized = load({"zero_optimization.stage3_prefetch_bucket_size": 0.9 * 1049 * 1049})
    assert sized.zero_optimization.stage3_prefetch_bucket_size == int(0.9 * 1049 * 1049)
    filled = load({"zero_optimization.stage": 2, "zero_optimization": {"stage": "auto"}})
    assert filled.zero_optimization.stage == 2
    both = load({"zero_optimization.stage": 2, "zero_optimization": {"stage": 1}})
    assert both.zero_optimization.stage == 1
    assert any("left aside" in note for note in both.notes)
    (problem,) = problems('{\n"zero_optimization.stge": 2}')
    assert (problem.path, problem.line) == ("zero_optimization.stge", 2)


# --- lines, against the parser ---

_names = st.text(st.sampled_from("ab_\"'\\ #:{},/é"), min_size=1, max_size=5)
_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.sampled_from([0.5, 1e-8, 5e20, math.inf, -math.inf])
    | st.text(st.sampled_from("ab,:{}[]#\"'\\\n/é"), max_size=6)
)
_trees = st.recursive(
    st.dictionaries(_names, _leaves, max_size=3),
    lambda inner: st.dictionaries(_names, inner | st.lists(_leaves | inner, max_size=3) | _leaves, max_size=4),
    max_leaves=12,
)


def _paths(value, prefix=()):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*prefix, name)
            yield from _paths(inner, (*prefix, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, (*prefix, str(index)))


@given(_trees, st.sampled_from([None, 2]))
def test_the_scanner_finds_every_key_of_json(tree, indent):
    text = json.dumps(tree, indent=indent)
    value, lines = parse(text)
    assert value == tree
    assert set(lines.table) == set(_paths(tree))
    assert not lines.problems
    for path, line in lines.table.items():
        assert json.dumps(path[-1]) in text.splitlines()[line - 1]


_plain_names = st.text(st.sampled_from("abc_1"), min_size=1, max_size=4)
_hjson_leaves = (
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(st.sampled_from("ab ,#/\"'{}[]:"), max_size=6)
)
_hjson_trees = st.recursive(
    st.dictionaries(_plain_names, _hjson_leaves, min_size=1, max_size=3),
    lambda inner: st.dictionaries(
        _plain_names, inner | st.lists(_hjson_leaves | inner, max_size=3) | _hjson_leaves, min_size=1, max_size=4
    ),
    max_leaves=12,
)


class Writer:
    """Writes a tree as Hjson in every way that it may be written."""

    def __init__(self, random):
        self.random = random

    def gap(self):
        return self.random.choice([" ", "\n", "  # a: {\n", " // b: [\n", " /* c: \n } */ "])

    def between(self):
        return self.random.choice([",", ", ", "\n", ",\n", " # it's\n", ',\n// "\n'])

    def value(self, value):
        if isinstance(value, dict):
            members = [f"{self.name(name)}:{self.gap()}{self.value(v)}" for name, v in value.items()]
            return "{" + self.gap() + "".join(member + self.between() for member in members) + "}"
        if isinstance(value, list):
            return "[" + self.gap() + "".join(self.value(item) + self.between() for item in value) + "]"
        if isinstance(value, str):
            return self.string(value)
        return json.dumps(value)

    def name(self, name):
        return self.random.choice([name, f"{name} ", f'"{name}"{self.gap()}', f"'{name}'"])

    def string(self, text):
        ways = [json.dumps(text)]
        if "'" not in text:
            ways.append(f"'{text}'")
        if "'" not in text and text == text.strip():
            ways.append(f"'''{text}'''")
        if text[:1] in ("a", "b") and text == text.strip():
            ways.append(f"{text}\n")
        return self.random.choice(ways)


@given(_hjson_trees, st.randoms(use_true_random=False))
def test_the_scanner_finds_every_key_of_hjson(tree, random):
    text = Writer(random).value(tree)
    value, lines = parse(text)
    assert value == tree
    assert set(lines.table) == set(_paths(tree))
    for path, line in lines.table.items():
        assert path[-1] in text.splitlines()[line - 1]


@given(st.text(st.sampled_from("{}[],:\"'#/*\n ab1-e."), max_size=25))
def test_no_text_ends_in_another_error(text):
    try:
        load("{" + text)
    except ConfigError as error:
        assert error.problems


def test_a_relative_path_is_shown_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("conf.json").write_text('{\n"x": 1}')
    with pytest.raises(ConfigError, match=r"^conf\.json:2: x: unknown key"):
        load("conf.json")

"""The data of a fine-tuning: every format, right and broken; and what of an example is trained on."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.finetune.conftest import CHATML

from wherry.errors import WherryError
from wherry.finetune.data import Examples, load_examples, show_example

pytestmark = pytest.mark.usefixtures("rows_cache")
USER, ASSISTANT = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello"}
TWO_TURNS = [USER, ASSISTANT, {"role": "user", "content": "and bye?"}, {"role": "assistant", "content": "see you"}]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(name: str, content: Iterable[Any] | str | bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str | bytes):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def load(data: str, tokenizer: Any, method: str | None = None, **options: Any) -> Examples:
    return load_examples(data, method, tokenizer, **{"seed": 1, **options})


def refused(data: str, tokenizer: Any, method: str | None = None, **options: Any) -> str:
    with pytest.raises(WherryError) as caught:
        load(data, tokenizer, method, **options)
    return str(caught.value)


def trained(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """Decode each run of tokens that a row trains on."""
    assert all(label in (token, -100) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    runs = itertools.groupby(row["labels"], lambda label: label != -100)
    return [tokenizer.decode(list(labels)) for learned, labels in runs if learned]


# What a row may be.


SHAREGPT = [{"from": "human", "value": "hi there"}, {"from": "gpt", "value": "hello"}]
ALPACA = {"instruction": "Say hi", "input": "to Ann", "output": "hello"}
IN_WORDS = "### Instruction:\nSay hi\n\n### Input:\nto Ann\n\n### Response:\n"
PAIR = {"prompt": "hi, ", "chosen": "hello", "rejected": "go"}
CHAT_PAIR = {"chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "go"}]}


@pytest.mark.parametrize(
    ("row", "with_template", "format", "whole"),
    [
        ({"messages": [USER, ASSISTANT]}, True, "chat (messages)", "<|im_start|>user\nhi there"),
        ({"conversations": SHAREGPT}, True, "chat (ShareGPT)", "<|im_start|>user\nhi there"),
        ({"conversations": [USER, ASSISTANT]}, True, "chat (conversations)", "<|im_start|>user\nhi there"),
        (ALPACA, True, "instructions (Alpaca), as chats", "<|im_start|>user\nSay hi\n\nto Ann<|im_end|>"),
        (ALPACA, False, "instructions (Alpaca), in the words of Alpaca", IN_WORDS),
        ({"question": "hi?", "answer": "hello"}, True,
         "instructions (question, answer), as chats", "<|im_start|>user\nhi?<|im_end|>"),
        ({"prompt": "hi, ", "completion": "hello"}, True, "prompt and completion, as they stand", "hi, hello"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, True,
         "prompt and completion (messages)", "<|im_start|>user\nhi there"),
        ({"text": "hello"}, False, "text", "hello"),
        (PAIR, False, "preference pairs, as they stand", None),
        (CHAT_PAIR, True, "preference pairs (messages)", None),
        ({"question": "hi there", "chosen": "hello", "rejected": "go"}, True, "preference pairs, as chats", None),
    ],
)  # fmt: skip
def test_formats_are_known_by_their_columns(
    row: dict, with_template: bool, format: str, whole: str | None, write: Any, plain: Any, chat: Any
) -> None:
    tokenizer = chat if with_template else plain
    found = load(write("rows.jsonl", [row] * 2), tokenizer)
    method = "dpo" if whole is None else "pretrain" if format == "text" else "sft"
    assert (found.method, found.format) == (method, format)
    assert found.source == "rows.jsonl: 2 rows, 2 to train on"
    assert found.notes == ["with fewer than 20 rows none is kept apart to evaluate on"]
    if whole is None:
        assert found.train.column_names == ["prompt", "chosen", "rejected"]
        answers = [tokenizer.decode([token for token in labels if token != -100]) for _, _, labels in found.shown]
        assert [answer.rstrip("\n") for answer in answers] == [
            f"{word}{tokenizer.eos_token}" for word in ("hello", "go")
        ]
        return
    assert whole in tokenizer.decode(found.train[0]["input_ids"])
    (answer,) = trained(found.train[0], tokenizer)
    assert answer.removesuffix("\n") == f"hello{tokenizer.eos_token}"


def test_every_answer_of_a_chat_is_trained_on_with_the_token_that_ends_it(
    write: Any, chat: Any, tokenizer_of: Any
) -> None:
    path = write("rows.jsonl", [{"messages": TWO_TURNS}])
    for template in (CHATML, CHATML.replace("<|im_end|>\\n' }}{%", "<|im_end|>' }}{%")):
        row = load(path, tokenizer_of(template)).train[0]
        assert [each.rstrip("\n") for each in trained(row, chat)] == ["hello<|im_end|>", "see you<|im_end|>"]
    whole = load(path, chat, "pretrain").train[0]
    assert whole["labels"] == whole["input_ids"] == load(path, chat).train[0]["input_ids"]


def test_columns_can_be_named_and_the_method_decides_between_formats(write: Any, plain: Any, chat: Any) -> None:
    path = write("rows.jsonl", [{"q": "hi, ", "prompt": "unused", "a": "hello", "id": 7}])
    found = load(path, plain, columns={"prompt": "q", "completion": "a"})
    assert plain.decode(found.train[0]["input_ids"]) == "hi, hello<|endoftext|>"
    assert "columns that are not used: id" in found.notes
    both = {"messages": TWO_TURNS, "chosen": TWO_TURNS, "rejected": TWO_TURNS[:2]}
    assert load(write("both.jsonl", [both]), chat, "sft").format == "chat (messages)"


@pytest.mark.parametrize(
    ("row", "with_template", "options", "expected"),
    [
        ({"a": "b"}, False, {"columns": {"complation": "a"}}, ['no format has complation, did you mean "completion"?']),
        ({"q": "hi", "a": "b"}, False, {"columns": {"prompt": "x"}}, ["rows.jsonl has no column x", "it has q, a"]),
        ({"promt": "hi", "completion": "hello"}, False, {},
         ["(promt, completion) fit no format", 'promt, did you mean "prompt"?', "--columns prompt=promt",
          "chosen, rejected; may have prompt"]),
        ({"messages": TWO_TURNS}, True, {"method": "dpo"},
         ["--method dpo: rows.jsonl has chat (messages), which goes with sft or pretrain", "preference pairs (chosen"]),
        ({"messages": TWO_TURNS}, False, {},
         ["the tokenizer has no chat template", "--set sft.chat_template_path=FILE.jinja"]),
    ],
)  # fmt: skip
def test_rows_of_no_format_are_refused(
    row: dict, with_template: bool, options: dict, expected: list[str], write: Any, plain: Any, chat: Any
) -> None:
    told = refused(write("rows.jsonl", [row]), chat if with_template else plain, **options)
    assert all(part in told for part in expected), told


# As TRL has it.


@pytest.mark.parametrize(
    ("template", "row"),
    [
        *((template, {"messages": TWO_TURNS}) for template in ("qwen3", "llama3", "gemma")),
        ("qwen3", {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}),
        (None, {"prompt": "hi, the", "completion": "re"}),  # merges may go across the border
        (None, {"prompt": "hi, ", "completion": "hello<|im_end|>"}),
        (None, {"text": "hello, hello"}),
    ],
)
def test_tokens_and_labels_are_those_of_trl(
    template: str | None, row: dict, write: Any, chat: Any, tokenizer_of: Any
) -> None:
    import datasets
    import trl
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = chat
    if template is not None:
        tokenizer = tokenizer_of((Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text())
    chats = "messages" in row
    trainer = trl.SFTTrainer.__new__(trl.SFTTrainer)
    trainer._tokenizer, trainer.completion_only_loss = tokenizer, "completion" in row
    trainer.chat_template = get_training_chat_template(tokenizer) if chats else None
    arguments = trl.SFTConfig(assistant_only_loss=chats, max_length=None, use_cpu=True, report_to=[], bf16=False)
    rows = datasets.Dataset.from_list([row, row])
    theirs = trainer._prepare_dataset(rows, tokenizer, arguments, False, None, "train")
    ours = load(write("rows.jsonl", [row, row]), tokenizer, "sft").train
    assert ours["input_ids"][:] == theirs["input_ids"][:]
    assert ours["labels"][:] == theirs["labels"][:]


def test_pairs_are_what_trl_makes_of_them(write: Any, chat: Any) -> None:
    from trl import DPOConfig, DPOTrainer

    pair = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "go away"}]}
    found = load(write("rows.jsonl", [pair] * 2), chat)
    trainer = DPOTrainer.__new__(DPOTrainer)
    trainer._tokenizer = chat
    theirs = trainer._prepare_dataset(found.train, chat, DPOConfig(use_cpu=True, report_to=[], bf16=False), "train")[0]
    assert found.shown
    for name, ids, labels in found.shown:
        assert ids == theirs["prompt_ids"] + theirs[f"{name}_ids"]
        assert labels == [-100] * len(theirs["prompt_ids"]) + theirs[f"{name}_ids"]


# What is wrong with rows.


def _turns(*contents: Any) -> dict[str, Any]:
    roles = itertools.cycle(["user", "assistant"])
    return {"messages": [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]}


ANSWERED, COMPLETED = _turns("a", "b"), {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        (ANSWERED, {"messages": [{"role": "narrator", "content": "x"}]}, "message 1 has the role 'narrator'"),
        (ANSWERED, {"messages": [{"content": "x"}]}, "message 1 has no role"),
        (ANSWERED, _turns(None, "b"), "message 1 (user) has no content"),
        (ANSWERED, _turns("a", " "), "message 2 is an empty answer"),
        (ANSWERED, _turns("a", "b", "c"), "it ends with a message of the user"),
        (ANSWERED, {"messages": []}, "messages is an empty list"),
        (ANSWERED, _turns([{"type": "image", "url": "x"}], "b"), "message 1 has a part that is image"),
        (COMPLETED, {"prompt": "a", "completion": ""}, "the answer (completion) is empty"),
        (COMPLETED, {"prompt": "a", "completion": 5}, "is a number (5), expected text"),
        ({"question": "a", "answer": "b"}, {"question": "", "answer": "b"}, "the instruction is empty"),
        ({"text": "a"}, {"text": "\n"}, "the text is empty"),
        (PAIR, PAIR | {"rejected": "hello"}, "chosen and rejected are the same"),
        (PAIR, PAIR | {"rejected": None}, "the rejected answer is missing"),
    ],
)
def test_a_bad_row_is_told_with_its_number(good: dict, bad: dict, expected: str, write: Any, chat: Any) -> None:
    path = write("rows.jsonl", [good, good, bad, good])
    told = refused(path, chat)
    assert "rows.jsonl: 1 of 4 rows cannot be trained on\n  row 3: " in told and expected in told
    assert "--skip-bad-rows" in told
    found = load(path, chat, skip_bad=True)
    assert len(found.train) == 3
    assert any("left out of rows.jsonl: 1 row that cannot be trained on (row 3: " in note for note in found.notes)


def test_of_many_bad_rows_the_first_are_told_with_their_file(write: Any, plain: Any) -> None:
    rows = [{"text": ""} if number % 2 else {"text": "a"} for number in range(40)]
    write("data/a.jsonl", [{"text": "a"}] * 3)
    told = refused(str(Path(write("data/b.jsonl", rows)).parent), plain)
    assert "data: 20 of 43 rows cannot be trained on\n  b.jsonl, row 2: the text is empty" in told
    assert re.findall(r"row (\d+):", told) == ["2", "4", "6", "8", "10"] and "and 15 more" in told
    assert "--skip-bad-rows" not in refused(write("all.jsonl", rows[1::2]), plain, skip_bad=True)


def test_templates_that_refuse_a_row_or_write_its_turns_otherwise_later(write: Any, tokenizer_of: Any) -> None:
    strict = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] + m['content'] }}{% endfor %}"
    )
    path = write("rows.jsonl", [ANSWERED, {"messages": [USER, USER, ASSISTANT]}])
    told = refused(path, tokenizer_of(strict))
    assert "row 2: the chat template refuses it: roles must alternate" in told
    forgets = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'user' or loop.last %}"
        "{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"
    )
    told = refused(write("turns.jsonl", [ANSWERED, {"messages": TWO_TURNS}]), tokenizer_of(forgets))
    assert "row 2: the chat template writes the first 2 messages otherwise when more come after them" in told


def test_rows_longer_than_the_sequence_are_cut_and_told(write: Any, plain: Any) -> None:
    texts = (("a" * 40, "b"), ("a", "b"), ("a", "b" * 40))
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    path = write("rows.jsonl", rows)
    found = load(path, plain, sequence=20)
    assert len(found.train) == 2 and len(found.train[1]["input_ids"]) == 20
    whole = load(path, plain).train
    lost = sum(max(0, len(row["input_ids"]) - 20) for row in whole)
    assert (
        f"2 rows of rows.jsonl longer than --seq-length 20 cut by {lost} tokens in all (row 1, row 3); "
        "1 row with nothing left to learn left out"
    ) in found.notes
    kept = load(path, plain, sequence=20, keep_end=True).train
    assert kept[0]["input_ids"] == whole[0]["input_ids"][-20:]
    told = refused(write("one.jsonl", rows[:1]), plain, sequence=20)
    assert "no row of one.jsonl has anything of its answer within 20 tokens" in told


def test_long_text_becomes_pieces_of_which_nothing_is_lost(write: Any, plain: Any) -> None:
    text = "".join(f"line {number} of a file\n" for number in range(300))
    found = load(write("notes.txt", text), plain, sequence=64)
    rows = [*found.train, *found.evaluation]
    total = sum(len(row["input_ids"]) for row in rows)
    assert total == len(plain(text)["input_ids"]) + 1 and all(row["labels"] == row["input_ids"] for row in rows)
    assert found.source.startswith(f"notes.txt: 1 row, {len(rows)} pieces of up to 64 tokens, {len(found.train)} to t")


# Files.


def test_kinds_of_files(write: Any, plain: Any, tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": "1+1?", "completion": "2"}, {"prompt": "NA?", "completion": "NA"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    paths = [
        write("rows.jsonl.gz", gzip.compress(lines.encode())),
        write("list.json", json.dumps(rows)),
        write("object.json", json.dumps({"version": 1, "data": rows}, indent=1)),
        write("one.json", json.dumps({"data": rows})),
        write("rows.csv", "\ufeffprompt,completion\n1+1?,2\nNA?,NA\n"),
        write("rows.tsv", "prompt\tcompletion\n1+1?\t2\nNA?\tNA\n"),
        write("semicolons.csv", "prompt;completion\n1+1?;2\nNA?;NA\n"),
        write("a [1].jsonl", rows),
    ]
    made, parquet, saved = datasets.Dataset.from_list(rows), str(tmp_path / "rows.parquet"), str(tmp_path / "saved")
    made.to_parquet(parquet)
    made.save_to_disk(saved)
    expected = load(write("rows.jsonl", rows), plain).train[:]
    for each in [*paths, parquet, saved]:
        assert load(each, plain).train[:] == expected, each


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.jsonl", '{"text": "a"}\n{"text": oops}\n', "bad.jsonl: line 2 is not JSON: Expecting value, at 'oops}'"),
        ("cut.json", '[{"text": "a"},\n{"text": "b"', "cut.json: line 2 is not JSON"),
        ("number.jsonl", '{"text": "a"}\n5\n', "line 2 is a number (5), expected an object"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', "line 2 is not UTF-8 (byte 0xe9 at 14)"),
        ("latin.txt", b"caf\xe9\n", "line 1 is not UTF-8"),
        ("latin.csv", b"text\na\ncaf\xe9\n", "line 3 is not UTF-8"),
        ("wide.csv", "prompt,completion\na,b\nc,d,e\n", "Expected 2 fields in line 3, saw 3"),
        ("late.jsonl", '{"text": "%s"}\n' % ("a" * 11_000_000) + '{"text": "a", "more": 1}\n',
         'the column "more" is not there before line 2; give all rows the same'),
        ("empty.jsonl", "", "empty.jsonl: the file is empty"),
        ("none.json", "[]", "none.json: the file has no rows"),
        ("header.csv", "text\n", "header.csv: the file has no rows"),
        ("bad.parquet", "hello", "bad.parquet: it is no Parquet file"),
        ("bad.jsonl.gz", b"hello", "bad.jsonl.gz"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_says_where(name: str, content: Any, expected: str, write: Any, plain: Any) -> None:
    assert expected in refused(write(name, content), plain)


def test_folders(write: Any, plain: Any, tmp_path: Path) -> None:
    write("data/train.jsonl", [{"text": "a"}] * 3)
    write("data/validation.jsonl", [{"text": "b"}] * 2)
    write("data/README.md", "about")
    found = load(str(tmp_path / "data"), plain)
    assert found.source == "data: 3 rows, 3 to train on, 2 to evaluate on" and "left aside: README.md" in found.notes
    assert load(str(tmp_path / "data"), plain, eval_split=0).evaluation is None
    assert "of the evaluation rows of data 1 of 2 are used" in load(str(tmp_path / "data"), plain, eval_split=1).notes
    write("mixed/a.jsonl", [{"text": "a"}])
    write("mixed/b.csv", "text\na\n")
    assert "expected files of one kind, got 1 JSON, 1 CSV" in refused(str(tmp_path / "mixed"), plain)
    write("other/a.jsonl", [{"text": "a"}])
    write("other/b.jsonl", [{"text": "a", "more": 1}])
    told = refused(str(tmp_path / "other"), plain)
    assert "b.jsonl: its columns are more, text; those of a.jsonl are text" in told
    (tmp_path / "nothing").mkdir()
    assert "the folder has no files to read" in refused(str(tmp_path / "nothing"), plain)
    # In a folder of text no file is a split, nor left aside.
    write("code/a.py", "x = 1\n")
    write("code/test.py", "y = 1\n")
    assert load(str(tmp_path / "code"), plain).source == "code: 2 rows, 2 to train on"


def test_names_on_the_hub(write: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    path = write("rows.jsonl", [{"text": "a"}] * 3)
    assert 'did you mean "' + path in refused(path.replace("rows", "row"), plain)
    made = datasets.Dataset.from_list([{"text": "a"}] * 3)
    held_out = datasets.Dataset.from_list([{"text": "b"}] * 2)
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, *, split: str | None = None) -> Any:
        asked.append((name, config, split))
        if name == "none/there":
            raise ConnectionError("unreachable")
        if name == "several/there":
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main']")
        splits = datasets.DatasetDict(train=made, validation=held_out, extra=made)
        return splits[split] if split is not None else splits

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("owner/name", plain).source == "owner/name: 3 rows, 3 to train on, 2 to evaluate on"
    assert load("owner/name/main:extra", plain).source == "owner/name:extra: 3 rows, 3 to train on"
    assert asked == [("owner/name", None, None), ("owner/name", "main", None), ("owner/name", "main", "extra")]
    assert "the hub cannot be reached to look for a data set of that name" in refused("none/there", plain)
    assert "configs: ['main']; name one as in --data several/there/CONFIG" in refused("several/there", plain)


# What is kept apart.


def test_some_rows_are_kept_apart(write: Any, plain: Any) -> None:
    path = write("rows.jsonl", [{"text": f"row {number}"} for number in range(100)])

    def texts(rows: Any) -> list[str]:
        return [plain.decode(row["input_ids"]) for row in rows]

    found = load(path, plain)
    assert (len(found.train), len(found.evaluation)) == (95, 5) and len(found.prompts) == 3
    assert not set(texts(found.train)) & set(texts(found.evaluation))
    assert texts(load(path, plain).evaluation) == texts(found.evaluation)
    assert texts(load(path, plain, seed=2).evaluation) != texts(found.evaluation)
    assert [len(load(path, plain, eval_split=each).evaluation) for each in (0.2, 7, 0.0001)] == [20, 7, 1]
    assert load(path, plain, eval_split=0).evaluation is None
    assert "--eval-split 100: 100 of 100 rows leave none to train on" in refused(path, plain, eval_split=100)
    other = write("other.jsonl", [{"text": "a"}])
    assert load(path, plain, eval_data=other).source == "rows.jsonl: 100 rows, 100 to train on, 1 to evaluate on"
    assert "leave one of the two out" in refused(path, plain, eval_data=other, eval_split=3)
    pairs = write("pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    assert "pairs.jsonl has prompt and completion" in refused(path, plain, "sft", eval_data=pairs)


def test_prompts_end_where_the_last_answer_begins(write: Any, chat: Any) -> None:
    path = write("rows.jsonl", [{"messages": TWO_TURNS}] * 2)
    (prompt, _) = load(path, chat, eval_data=path).prompts
    assert prompt.text.endswith("and bye?<|im_end|>\n<|im_start|>assistant\n") and prompt.answer == "see you"
    assert chat.decode(prompt.ids) == prompt.text
    pairs = write("pairs.jsonl", [{"prompt": [USER], "chosen": [ASSISTANT], "rejected": TWO_TURNS[3:]}])
    (prompt,) = load(pairs, chat, eval_data=pairs).prompts
    assert prompt.text.endswith("hi there<|im_end|>\n<|im_start|>assistant\n") and prompt.answer == "hello"


def test_what_was_made_is_found_again(
    write: Any, chat: Any, plain: Any, rows_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wherry.finetune.encoding import Encoder

    path = write("rows.jsonl", [{"prompt": "a", "completion": "b"}] * 3)
    first = load(path, chat).train[:]
    rendered: list[Any] = []
    render = Encoder.render
    monkeypatch.setattr(Encoder, "render", lambda self, row: rendered.append(row) or render(self, row))
    assert load(path, chat).train[:] == first and not rendered
    load(path, plain)
    load(path, chat, sequence=2)
    other = copy.deepcopy(chat)
    other.eos_token = "<|endoftext|>"
    load(path, other)
    assert len(rendered) == 9 and len(list((rows_cache / "wherry").glob("*.arrow"))) == 4


# What is told of an example.


def test_an_example_shows_what_is_masked_and_a_long_one_in_part(write: Any, chat: Any, plain: Any) -> None:
    ((_, ids, labels),) = load(write("rows.jsonl", [{"messages": TWO_TURNS}]), chat).shown
    count = int((np.array(labels) != -100).sum())
    assert str(show_example(ids, labels, chat)) == (
        f"{len(ids)} tokens, {count} of them trained on\n"
        "masked   <|im_start|>user\n"
        "         hi there<|im_end|>\n"
        "         <|im_start|>assistant\n"
        "trained  hello<|im_end|>\n"
        "masked   <|im_start|>user\n"
        "         and bye?<|im_end|>\n"
        "         <|im_start|>assistant\n"
        "trained  see you<|im_end|>"
    )
    ids = plain("word \x1b[2J" * 400)["input_ids"]
    shown = str(show_example(ids, [-100] * 5 + ids[5:], plain))
    assert max(map(len, shown.split("\n"))) <= 80 and "\x1b" not in shown
    assert f"... {len(ids) - 5 - 240:,} tokens not shown ..." in shown
    many = str(show_example(ids, [token if at % 2 else -100 for at, token in enumerate(ids)], plain))
    assert f"... {len(ids) - 8:,} tokens not shown ..." in many

"""What rows may be: chats, instructions, prompts with completions, text, preference pairs; known by their columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wherry.config.problems import did_you_mean
from wherry.errors import WherryError, one_line

Message = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What a row needs and may have, by the columns that hold it; of several that are there the first is meant."""

    name: str
    needs: Mapping[str, tuple[str, ...]]
    may: Mapping[str, tuple[str, ...]]
    methods: tuple[str, ...]


_TRAINED = ("sft", "pretrain")
CHAT = Kind("chat", {"messages": ("messages", "conversations", "conversation")}, {"tools": ("tools",)}, _TRAINED)
COMPLETION = Kind(
    "prompt and completion", {"prompt": ("prompt",), "completion": ("completion",)}, {"tools": ("tools",)}, _TRAINED
)
INSTRUCTIONS = Kind(
    "instructions",
    {
        "instruction": ("instruction", "question", "query", "prompt", "input"),
        "output": ("output", "answer", "response"),
    },
    {"input": ("input", "context")},
    _TRAINED,
)
PAIRS = Kind(
    "preference pairs",
    {"chosen": ("chosen",), "rejected": ("rejected",)},
    {"prompt": ("prompt", "question", "instruction", "query")},
    ("dpo",),
)
TEXT = Kind("text", {"text": ("text", "content")}, {}, ("pretrain", "sft"))
# Where several fit, the first one is meant.
KINDS = (PAIRS, CHAT, COMPLETION, INSTRUCTIONS, TEXT)
KNOWN = {name for kind in KINDS for names in (*kind.needs.values(), *kind.may.values()) for name in names}


@dataclass(frozen=True)
class Format:
    """A kind, the method that it is trained by, and which of the data's columns is which."""

    kind: Kind
    method: str
    columns: Mapping[str, str]
    unused: tuple[str, ...]


def recognize(columns: Sequence[str], method: str | None, name: str) -> Format:
    """What rows with these columns are; an error lists what they might have been."""
    fits = [(kind, found) for kind in KINDS if (found := _fit(kind, columns)) is not None]
    if not fits:
        raise WherryError(_nothing_fits(columns, name))
    for kind, found in fits:
        if method is None or method in kind.methods:
            unused = tuple(column for column in columns if column not in found.values())
            return Format(kind, method or kind.methods[0], found, unused)
    kind, found = fits[0]
    wanted = [each for each in KINDS if method in each.methods]
    raise WherryError(
        f"finetune: --method {method}: {name} has {kind.name} ({', '.join(found.values())}), which goes with "
        f"{' or '.join(kind.methods)}; {method} is for {' or '.join(f'{each.name} ({_need(each)})' for each in wanted)}"
    )


def _fit(kind: Kind, columns: Sequence[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for ours, names in (*kind.needs.items(), *kind.may.items()):
        column = next((name for name in names if name in columns and name not in found.values()), None)
        if column is not None:
            found[ours] = column
        elif ours in kind.needs:
            return None
    return found


def _need(kind: Kind) -> str:
    needed = ", ".join("/".join(names) for names in kind.needs.values())
    return needed + "".join(f"; may have {'/'.join(names)}" for names in kind.may.values())


def _nothing_fits(columns: Sequence[str], name: str) -> str:
    lines = [f"finetune: {name}: its columns ({', '.join(map(one_line, columns))}) fit no format. Expected:"]
    lines += [f"  {kind.name:<22} {_need(kind)}" for kind in KINDS]
    meant = [(column, hint) for column in columns if column not in KNOWN and (hint := did_you_mean(column, KNOWN))]
    lines += [f"  {one_line(column)}{hint}" for column, hint in meant]
    theirs = one_line(meant[0][0]) if meant else one_line(columns[0]) if columns else "COLUMN"
    return "\n".join([*lines, f"Say which column is which with --columns, as in --columns prompt={theirs}"])


# Rows.


class BadRow(Exception):
    """A row that cannot be trained on, and why."""


@dataclass(frozen=True)
class Chat:
    """`prompt`: how many of the messages are what is answered, where the data say so."""

    messages: list[Message]
    tools: Any = None
    prompt: int | None = None


@dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


def text_of(row: Mapping[str, Any]) -> str:
    return _text(row["text"], "the text")


def completion_of(row: Mapping[str, Any], *, answered: bool) -> Chat | Completion:
    prompt, completion = row["prompt"], row["completion"]
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return Completion(_text(prompt, "the prompt", empty=True), _text(completion, "the answer (completion)"))
    before = _as_messages(prompt, "user", "prompt")
    after = _as_messages(completion, "assistant", "completion")
    found = chat_of({**row, "messages": before + after}, answered=answered)
    return Chat(found.messages, found.tools, len(before))


def instruction_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Instruction, input and output."""
    more = row.get("input")
    return (
        _text(row["instruction"], "the instruction"),
        "" if more is None else _text(more, "the input", empty=True),
        _text(row["output"], "the answer (output)"),
    )


# As the first models that were trained on such data were asked.
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
_FURTHER = ", paired with an input that provides further context"


def as_chat(instruction: str, more: str, output: str) -> Chat:
    asked = f"{instruction}\n\n{more}" if more.strip() else instruction
    return Chat([{"role": "user", "content": asked}, {"role": "assistant", "content": output}])


def in_alpacas_words(instruction: str, more: str, output: str) -> Completion:
    has_more = bool(more.strip())
    prompt = _ALPACA.format(_FURTHER if has_more else "") + f"### Instruction:\n{instruction}\n\n"
    prompt += f"### Input:\n{more}\n\n" if has_more else ""
    return Completion(prompt + "### Response:\n", output)


def pair_of(row: Mapping[str, Any], *, chat: bool) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected answer: all three are messages, or all three are text."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if chosen == rejected:
        raise BadRow("chosen and rejected are the same")
    if not chat:
        chosen, rejected = _text(chosen, "the chosen answer"), _text(rejected, "the rejected answer")
        if prompt is None:
            prompt, chosen, rejected = _shared_text(chosen, rejected)
        return _text(prompt, "the prompt", empty=True), chosen, rejected
    chosen, rejected = (
        messages_of(_as_messages(each, "assistant", name), name)
        for each, name in ((chosen, "chosen"), (rejected, "rejected"))
    )
    # A prompt of text is in the messages again, where they begin with it.
    before = None if prompt is None else messages_of(_as_messages(prompt, "user", "prompt"), "prompt")
    if before is None or chosen[0]["role"] != "assistant":
        count = shared(chosen, rejected)
        before, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or answer[-1]["role"] != "assistant":
            raise BadRow(f"{name} does not end with an assistant's message")
        _text(answer[-1]["content"], f"the {name} answer")
    if not before:
        raise BadRow("there is no prompt: chosen and rejected have no message in common")
    extra = {key for each in (*before, *chosen, *rejected) for key in each} - {"role", "content"}
    if extra:
        raise BadRow(f"its messages have {', '.join(sorted(extra))}, which pairs cannot have yet")
    return before, chosen, rejected


def _shared_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """As TRL parts them: a space before an answer is the answer's."""
    count = shared(chosen, rejected)
    count -= chosen[:count].endswith(" ")
    if not chosen[count:].strip() or not rejected[count:].strip():
        raise BadRow("one of chosen and rejected is how the other begins, and no prompt says where the answer does")
    return chosen[:count], chosen[count:], rejected[count:]


_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
}


def chat_of(row: Mapping[str, Any], *, answered: bool) -> Chat:
    """`answered`: the answers are what is learned, so there must be some, and they must be the end."""
    messages = messages_of(row["messages"], "messages")
    if answered and messages[-1]["role"] != "assistant":
        raise BadRow(f"it ends with a message of the {messages[-1]['role']}; nothing answers it")
    return Chat(messages, row.get("tools") or None)


def messages_of(value: Any, column: str) -> list[Message]:
    """A conversation by TRL's and the templates' names, whatever the data call them."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{column} is {what(value)}, expected a list of messages with role and content")
    found = []
    for number, message in enumerate(value, 1):
        where = f"message {number}" if column == "messages" else f"message {number} of {column}"
        if not isinstance(message, dict):
            raise BadRow(f"{where} is {what(message)}, expected role and content")
        rest = {key: each for key, each in message.items() if each is not None}
        named = rest.pop("role", None) or rest.pop("from", None)
        role = _ROLES.get(named) if isinstance(named, str) else None
        if role is None:
            told = "no role" if named is None else f"the role {one_line(str(named))!r}"
            raise BadRow(f"{where} has {told}; expected one of {', '.join(_ROLES)}")
        content = _content(rest.pop("content", rest.pop("value", None)), where)
        if not content.strip() and not rest.get("tool_calls") and role not in ("system", "developer", "tool"):
            raise BadRow(f"{where} is an empty answer" if role == "assistant" else f"{where} ({role}) has no content")
        found.append({"role": role, "content": content, **rest})
    return found


def _content(value: Any, where: str) -> str:
    """Text, which may come in parts."""
    if isinstance(value, list):
        for part in value:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else None
                raise BadRow(f"{where} has a part that is {kind or what(part)}; only text can be trained on")
        return "".join(part["text"] for part in value)
    return "" if value is None else _text(value, where, empty=True)


def _as_messages(value: Any, role: str, column: str) -> list[Message]:
    if isinstance(value, list):
        return value
    return [{"role": role, "content": _text(value, column)}]


def _text(value: Any, name: str, *, empty: bool = False) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        if empty and value is not None:
            return value
        raise BadRow(f"{name} is {'missing' if value is None else 'empty'}")
    if not isinstance(value, str):
        raise BadRow(f"{name} is {what(value)}, expected text")
    return value


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """With how much in common two texts, or two lists, begin."""
    if other[: len(one)] == one:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def what(value: Any, *, short: bool = False) -> str:
    """A value's type as JSON has it, and the value if it says something."""
    if value is None:
        return "missing"
    if isinstance(value, bool | int | float):
        kind = "true or false" if isinstance(value, bool) else "a number"
        return kind if short else f"{kind} ({value})"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Iterable):
        return "a list" if short or value else "an empty list"
    return type(value).__name__

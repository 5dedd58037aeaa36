"""Rows as the model sees them: rendered by the chat template, as tokens, with labels on what is learned.

What is learned of a chat is the assistant's: all that comes after its header, with the token that ends it. Templates
mark it ({% generation %}), or TRL has one that does; of others it is found by rendering the turns before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wherry.errors import WherryError, one_line
from wherry.finetune import formats
from wherry.finetune.formats import BadRow, Chat, Completion, Format, Message, shared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORED = -100
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A tokenizer takes some hundred bytes for a token while it works: long documents are cut at a line's end, and no more
# than this many characters are given to it at once.
_PIECE = 1 << 20
_AT_ONCE = 4 << 20


class Rendered(NamedTuple):
    """Text for the model. What is learned is in `spans`, or what comes after `prompt`; all of it, if both are None."""

    text: str
    special: bool
    """Whether the tokenizer adds its tokens for a text's beginning, as templates do themselves."""
    spans: list[tuple[int, int]] | None = None
    prompt: str | None = None


class Example(NamedTuple):
    ids: np.ndarray
    labels: np.ndarray


class Encoder:
    """Makes examples of rows, whose columns have the names of the format."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, format: Format, first: Mapping[str, Any], name: str) -> None:
        if not tokenizer.is_fast:
            raise WherryError(
                f"finetune: {type(tokenizer).__name__} does not say which characters its tokens are from, so what is "
                "learned cannot be told apart; use the model's fast tokenizer (tokenizer.json)"
            )
        self.tokenizer = tokenizer
        self.format = format
        self.eos = tokenizer.eos_token or ""
        has_template = bool(tokenizer.chat_template)
        values = [first[each] for each in ("prompt", *format.kind.needs) if each in first]
        self.messages = format.kind is formats.CHAT or any(isinstance(value, list) for value in values)
        self.sharegpt = self.messages and any(
            "from" in message for message in values[0] or () if isinstance(message, dict)
        )
        asked = format.columns.get("instruction", format.columns.get("prompt", "prompt"))
        self.chat = self.messages or (
            has_template
            and (format.kind is formats.INSTRUCTIONS or (format.kind is formats.PAIRS and asked != "prompt"))
        )
        if self.messages and not has_template:
            raise WherryError(
                f"finetune: {name} has {self.name}, and the tokenizer has no chat template to write it with. Give one, "
                "as in --set sft.chat_template_path=FILE.jinja, or data with the columns prompt and completion"
            )
        self.answered = format.method == "sft"
        # What comes after a prompt needs no mark.
        in_turns = self.chat and self.answered and format.kind is not formats.COMPLETION
        self.template = self._template() if in_turns else None

    @property
    def name(self) -> str:
        """The format, and how it is written, in words."""
        kind, columns = self.format.kind, self.format.columns
        if kind is formats.CHAT:
            return f"chat ({'ShareGPT' if self.sharegpt else columns['messages']})"
        if kind is formats.INSTRUCTIONS:
            known = (
                "Alpaca" if set(columns.values()) <= {"instruction", "input", "output"} else ", ".join(columns.values())
            )
            return f"instructions ({known}), {'as chats' if self.chat else 'in the words of Alpaca'}"
        how = " (messages)" if self.messages else ", as chats" if self.chat else ""
        return kind.name + (how if how or kind is formats.TEXT else ", as they stand")

    def key(self) -> list[Any]:
        """What examples depend on beside the rows."""
        import tokenizers
        import transformers

        self.tokenizer("")  # what a caller has set of cutting and padding is off then
        backend = self.tokenizer.backend_tokenizer.to_str()
        template = self.tokenizer.chat_template, self.template
        versions = transformers.__version__, tokenizers.__version__
        kind = self.format.kind.name, self.format.method, self.chat, self.messages
        return [backend, sorted(map(str, self.tokenizer.special_tokens_map.items())), template, versions, kind]

    # From rows to text.

    def render(self, row: Mapping[str, Any]) -> list[Rendered]:
        """One text of a row; two of a pair, chosen and rejected; of a long document as many as it takes."""
        kind = self.format.kind
        if kind is formats.PAIRS:
            prompt, *answers = self.pair(row)
            if self.chat:
                return [self._of_chat(Chat([*prompt, *answer], prompt=len(prompt))) for answer in answers]
            return [self._of_completion(Completion(prompt, answer)) for answer in answers]
        if kind is formats.TEXT:
            return self._of_text(formats.text_of(row))
        found: Chat | Completion
        if kind is formats.CHAT:
            found = formats.chat_of(row, answered=self.answered)
        elif kind is formats.COMPLETION:
            found = formats.completion_of(row, answered=self.answered)
        else:
            made = formats.as_chat if self.chat else formats.in_alpacas_words
            found = made(*formats.instruction_of(row))
        rendered = self._of_chat(found) if isinstance(found, Chat) else self._of_completion(found)
        # A text that is learned whole has no prompt.
        return [rendered if self.answered else rendered._replace(spans=None, prompt=None)]

    def pair(self, row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        return formats.pair_of(row, chat=self.chat)

    def _of_text(self, text: str) -> list[Rendered]:
        parts = []
        while self.format.method == "pretrain" and len(text) > _PIECE:
            end = text.rfind("\n", _PIECE // 2, _PIECE) + 1 or _PIECE
            parts.append(Rendered(text[:end], special=True))
            text = text[end:]
        return [*parts, Rendered(self._ended(text), special=True)]

    def _of_completion(self, found: Completion) -> Rendered:
        return Rendered(self._ended(found.prompt + found.completion), special=True, prompt=found.prompt)

    def _ended(self, text: str) -> str:
        return text if text.endswith(self.eos) else text + self.eos

    def _of_chat(self, found: Chat) -> Rendered:
        messages, tools = found.messages, found.tools
        if self.template is not None:
            texts, spans = self._by_template(messages, tools, return_assistant_tokens_mask=True)
            return Rendered(texts[0], special=False, spans=spans[0])
        text = self._written(messages, tools)
        if found.prompt is not None:
            return Rendered(text, special=False, prompt=self._written(messages[: found.prompt], tools, asked=True))
        return Rendered(text, special=False, spans=self._spans(text, messages, tools) if self.answered else None)

    def _spans(self, text: str, messages: list[Message], tools: Any) -> list[tuple[int, int]]:
        """Where the assistant's turns are, if turns are written alike whatever comes after them."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise BadRow("it begins with a message of the assistant, before which the template writes no header")
            asked = self._written(messages[:number], tools, asked=True)
            start = shared(asked, text)
            if start < len(asked):  # a header may have more in it where an answer is asked for, as an empty thought
                before = self._written(messages[:number], tools)
                if start < len(before.rstrip()):
                    raise BadRow(_unlike(number, start, before, text))
            upto = self._written(messages[: number + 1], tools) if number + 1 < len(messages) else text
            end = shared(upto, text)
            if end < len(upto.rstrip()):
                raise BadRow(_unlike(number + 1, end, upto, text))
            spans.append((start, end))
        return spans

    def _written(self, messages: list[Message], tools: Any, *, asked: bool = False) -> str:
        """By the chat template; `asked`: with the header of the answer that comes next."""
        return self._by_template(messages, tools, add_generation_prompt=asked)[0][0]

    def _by_template(self, messages: list[Message], tools: Any, **options: Any) -> Any:
        import json

        from transformers.utils.chat_template_utils import render_jinja_template

        tools = json.loads(tools) if isinstance(tools, str) else tools
        template = self.template or self.tokenizer.get_chat_template(None, tools)
        options = {**self.tokenizer.special_tokens_map, **options}
        try:
            return render_jinja_template(conversations=[messages], tools=tools, chat_template=template, **options)
        except Exception as error:  # whatever a template does, and jinja's own
            raise BadRow(f"the chat template refuses it: {one_line(str(error)) or type(error).__name__}") from None

    def _template(self) -> str | None:
        """One that marks what the assistant says: the tokenizer's own, or TRL's for it."""
        from trl.chat_template_utils import get_training_chat_template

        own = self.tokenizer.get_chat_template()
        try:
            found = get_training_chat_template(self.tokenizer) or own
        except Exception:  # TRL has none for it, or its probes are refused by it
            found = own
        return found if _MARKED.search(found) else None

    # From text to tokens.

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[list[Example] | BadRow]:
        """The examples of each row, or what is wrong with it."""
        found: list[list[Example] | BadRow] = []
        waiting: list[tuple[list[Example], Rendered]] = []
        size = 0
        for row in rows:
            try:
                rendered = self.render(row)
            except BadRow as problem:
                found.append(problem)
                continue
            examples: list[Example] = []
            found.append(examples)
            for each in rendered:
                waiting.append((examples, each))
                size += len(each.text)
                if size > _AT_ONCE:
                    self._tokenize(waiting)
                    waiting, size = [], 0
        self._tokenize(waiting)
        return found

    def _tokenize(self, waiting: Sequence[tuple[list[Example], Rendered]]) -> None:
        for special in (True, False):
            chosen = [(examples, each) for examples, each in waiting if each.special == special]
            encodings = self._encodings([each.text for _, each in chosen], special)
            prompts = iter(self._encodings([each.prompt for _, each in chosen if each.prompt is not None], special))
            for (examples, each), encoding in zip(chosen, encodings, strict=True):
                ids = np.array(encoding.ids, dtype=np.int32)
                labels = ids.copy()
                if each.prompt is not None:
                    labels[: _shared(ids, np.array(next(prompts).ids, dtype=np.int32))] = IGNORED
                elif each.spans is not None:
                    labels[~_within(each.spans, encoding.offsets)] = IGNORED
                examples.append(Example(ids, labels))

    def _encodings(self, texts: list[str], special: bool) -> Sequence[Any]:
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=special, verbose=False).encodings


def _within(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens have characters of these spans."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    found = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        tokens = np.flatnonzero((starts < end) & (ends > start))
        found[slice(tokens[0], tokens[-1] + 1) if len(tokens) else slice(0)] = True
    return found


def _shared(ids: np.ndarray, prompt: np.ndarray) -> int:
    """How many tokens both begin with: a prompt's last may have become one with the answer's first."""
    count = min(len(ids), len(prompt))
    differing = np.flatnonzero(ids[:count] != prompt[:count])
    return int(differing[0]) if len(differing) else count


def _unlike(turns: int, at: int, before: str, whole: str) -> str:
    alone, after = (repr(text[max(at - 10, 0) : at + 20]) for text in (before, whole))
    return (
        f"the chat template writes the first {turns} message{'s' * (turns > 1)} otherwise when more come after them "
        f"({after} for {alone}), so the answers cannot be found in it"
    )

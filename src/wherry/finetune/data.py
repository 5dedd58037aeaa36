"""What a fine-tuning learns from: the rows of files or of a hub, checked, as tokens, with some kept apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.text import Text

from wherry.config.problems import did_you_mean
from wherry.errors import WherryError, printable
from wherry.finetune.encoding import IGNORED, BadRow, Encoder, Example
from wherry.finetune.formats import KNOWN, Format, recognize
from wherry.finetune.reading import Source, quiet, read

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

_SHARE, _MOST, _FEWEST = 0.05, 500, 20
_TOLD = 5
# Of a row that has no answer: a sample goes on after these.
_BEGINNING = 32


class Prompt(NamedTuple):
    """What a sample is generated from, and what the data say there."""

    ids: list[int]
    text: str
    answer: str


@dataclass
class Examples:
    """Rows in the columns of TRL's trainers: `input_ids` and `labels`, or `prompt`, `chosen` and `rejected` (dpo)."""

    method: str
    format: str
    train: Dataset
    evaluation: Dataset | None
    source: str
    notes: list[str] = field(default_factory=list)
    """What was left out, cut or not used, a line each."""
    prompts: list[Prompt] = field(default_factory=list)
    shown: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    """One row to train on: what it is called, its tokens and labels; of a pair both."""


def load_examples(
    data: str,
    method: str | None,
    tokenizer: PreTrainedTokenizerFast,
    *,
    eval_data: str | None = None,
    eval_split: float | None = None,
    seed: int,
    sequence: int | None = None,
    keep_end: bool = False,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    samples: int = 3,
) -> Examples:
    """Read, check and tokenize; what is wrong with rows is one error that names them.

    Rows of more than `sequence` tokens lose their end (`keep_end`: their beginning), and are left out if nothing to
    learn remains; of pretraining they become several. What is made is kept in the cache of `datasets`, under a name
    that depends on files, tokenizer and arguments: where several ranks call this, one does so first.
    """
    if eval_data is not None and eval_split is not None:
        raise WherryError("finetune: --eval-split: --eval-data says what to evaluate on; leave one of the two out")
    with quiet():
        source = read(data)
        rows, format = _recognized(source, source.rows, method, columns)
        encoder = Encoder(tokenizer, format, rows[0], source.name)
        made = _Made(encoder, sequence, keep_end, skip_bad)
        notes = list(source.notes)
        if format.unused:
            notes.append(f"columns that are not used: {', '.join(format.unused)}")
        train, numbers = made.of(source, rows, notes)
        evaluation = None
        if eval_data is not None:
            beside = read(eval_data, "--eval-data")
            evaluation, _ = made.of(beside, _alike(beside, beside.rows, format, columns), notes)
        elif source.held_out is not None and eval_split != 0:
            beside = Source(f"the evaluation rows of {source.name}", source.held_out)
            there, _ = made.of(beside, _alike(beside, beside.rows, format, columns), notes)
            evaluation = there.select(_choice(len(there), eval_split or _MOST, seed))
            if len(evaluation) < len(there):
                notes.append(f"of {beside.name} {len(evaluation):,} of {len(there):,} are used")
        else:
            train, evaluation = _split(train, numbers, eval_split, seed, notes)
        pieces = f", {len(numbers):,} pieces of up to {sequence:,} tokens" if made.cuts else ""
        kept = f", {len(evaluation):,} to evaluate on" if evaluation is not None else ""
        told = f"{source.name}: {_rows(len(rows))}{pieces}, {len(train):,} to train on{kept}"
        found = Examples(format.method, encoder.name, train, evaluation, told, notes)
        found.shown = _shown(encoder, train[0], sequence, keep_end)
        if evaluation is not None:
            chosen = [evaluation[number] for number in range(min(samples, len(evaluation)))]
            found.prompts = [_prompt(_shown(encoder, row, sequence, keep_end), tokenizer) for row in chosen]
    return found


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


# Which rows.


def _recognized(
    source: Source, rows: Dataset, method: str | None, renamed: Mapping[str, str] | None
) -> tuple[Dataset, Format]:
    """The rows with the columns of their format, by its names."""
    if len(rows) == 0:
        raise WherryError(f"finetune: {source.name} has no rows")
    for ours, theirs in (renamed or {}).items():
        if ours not in KNOWN:
            raise WherryError(
                f"finetune: --columns {ours}={theirs}: no format has {ours}{did_you_mean(ours, KNOWN)}; "
                f"expected one of {', '.join(sorted(KNOWN))}"
            )
        if theirs not in rows.column_names:
            raise WherryError(
                f"finetune: --columns {ours}={theirs}: {source.name} has no column {theirs}"
                f"{did_you_mean(theirs, rows.column_names)}; it has {', '.join(rows.column_names)}"
            )
        if ours != theirs:
            rows = rows.remove_columns([ours]) if ours in rows.column_names else rows
            rows = rows.rename_column(theirs, ours)
    format = recognize(rows.column_names, method, source.name)
    rows = rows.select_columns(list(format.columns.values()))
    # In two steps, as one column may have the name that another one gets.
    rows = rows.rename_columns({theirs: f"_{ours}" for ours, theirs in format.columns.items()})
    return rows.rename_columns({f"_{ours}": ours for ours in format.columns}), format


def _alike(source: Source, rows: Dataset, format: Format, renamed: Mapping[str, str] | None) -> Dataset:
    """Rows to evaluate on, which are what the others are."""
    found, other = _recognized(source, rows, format.method, renamed)
    if other.kind is not format.kind:
        raise WherryError(
            f"finetune: {source.name} has {other.kind.name}, and the rows to train on are {format.kind.name}; "
            "both must be the same"
        )
    return found


def _split(
    rows: Dataset, numbers: np.ndarray, asked: float | None, seed: int, notes: list[str]
) -> tuple[Dataset, Dataset | None]:
    """Some rows kept apart: all pieces of a document or none, unless there are few documents."""
    units, unit_of = np.unique(numbers, return_inverse=True)
    if len(units) < _FEWEST:
        units = unit_of = np.arange(len(numbers))
    count = len(units)
    if asked == 0:
        return rows, None
    if asked is None:
        if count < _FEWEST:
            notes.append(f"with fewer than {_FEWEST} rows none is kept apart to evaluate on")
            return rows, None
        asked = min(max(1, round(count * _SHARE)), _MOST)
    wanted = max(1, round(count * asked)) if asked < 1 else int(asked)
    if wanted >= count:
        raise WherryError(f"finetune: --eval-split {asked:g}: {wanted:,} of {_rows(count)} leave none to train on")
    held_out = np.isin(unit_of, _choice(count, wanted, seed))
    return rows.select(np.flatnonzero(~held_out)), rows.select(np.flatnonzero(held_out))


def _choice(count: int, wanted: float, seed: int) -> np.ndarray:
    wanted = max(1, round(count * wanted)) if wanted < 1 else min(int(wanted), count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:wanted])


# From rows to examples.


@dataclass
class _Made:
    """Examples of rows, by way of the cache."""

    encoder: Encoder
    sequence: int | None
    keep_end: bool
    skip_bad: bool

    @property
    def pairs(self) -> bool:
        return self.encoder.format.method == "dpo"

    @property
    def cuts(self) -> bool:
        """Whether a long row becomes several."""
        return self.encoder.format.method == "pretrain" and self.sequence is not None

    def of(self, source: Source, rows: Dataset, notes: list[str]) -> tuple[Dataset, np.ndarray]:
        """What can be trained on, and the numbers of its rows."""
        import datasets
        from datasets.fingerprint import Hasher

        code = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("data", "encoding", "formats")]
        name = Hasher.hash([rows._fingerprint, self.encoder.key(), self.sequence, self.keep_end, code])
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "wherry"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            made = rows.map(
                self._batch,
                batched=True,
                with_indices=True,
                remove_columns=rows.column_names,
                features=self._features(),
                new_fingerprint=name,
                cache_file_name=str(cache / f"{name}.arrow"),
            )
        except OSError as error:
            told = error.strerror or error
            raise WherryError(f"finetune: {cache}: {told}; HF_DATASETS_CACHE may name another folder") from None
        table = made.data
        numbers, length, learned = (table.column(each).to_numpy() for each in ("row", "length", "learned"))
        bad = ~table.column("problem").is_null().to_numpy()
        self._refuse(source, made, np.flatnonzero(bad), numbers, notes)
        self._tell_long(source, numbers[~bad], length[~bad], learned[~bad], notes)
        good = np.flatnonzero(~bad & (learned > 0))
        kept = ["prompt", "chosen", "rejected"] if self.pairs else ["input_ids", "labels"]
        found = made.select_columns(kept)
        return found if len(good) == len(made) else found.select(good), numbers[good]

    def _features(self) -> Any:
        from datasets import Features, List, Value

        about = {"row": Value("int64"), "length": Value("int32"), "learned": Value("int32"), "problem": Value("string")}
        if not self.pairs:
            return Features({"input_ids": List(Value("int32")), "labels": List(Value("int32")), **about})
        text = Value("string")
        kind = List({"role": text, "content": text}) if self.encoder.chat else text
        return Features({"prompt": kind, "chosen": kind, "rejected": kind, **about})

    def _batch(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        made: dict[str, list[Any]] = {name: [] for name in self._features()}
        for number, row, found in zip(indices, rows, self.encoder.encode(rows), strict=True):
            for each in [found] if isinstance(found, BadRow) else self._columns(row, found):
                about = {"problem": str(each), "length": 0, "learned": 0} if isinstance(each, BadRow) else each
                values = {"row": number, "problem": None, **about}
                for name in made:
                    made[name].append(values.get(name, self._nothing))
        return made

    @property
    def _nothing(self) -> Any:
        if not self.pairs:
            return np.empty(0, dtype=np.int32)
        return [] if self.encoder.chat else ""

    def _columns(self, row: Mapping[str, Any], examples: Sequence[Example]) -> list[dict[str, Any] | BadRow]:
        length = max(len(each.ids) for each in examples)
        if self.pairs:
            prompt, chosen, rejected = self.encoder.pair(row)
            cut = [_cut(each, self.sequence, self.keep_end) for each in examples]
            learned = min(int((each.labels != IGNORED).sum()) for each in cut)
            texts = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            return [{**texts, "length": length, "learned": learned}]
        if self.cuts:
            assert self.sequence is not None
            ids = np.concatenate([each.ids for each in examples])
            pieces = [ids[start : start + self.sequence] for start in range(0, len(ids), self.sequence)]
            # A token alone predicts nothing.
            pieces = [piece for piece in pieces if len(piece) > 1] or pieces[:1]
            return [{"input_ids": each, "labels": each, "length": len(each), "learned": len(each)} for each in pieces]
        example = examples[0] if len(examples) == 1 else Example(*map(np.concatenate, zip(*examples, strict=True)))
        if not (example.labels != IGNORED).any():
            return [BadRow("the chat template leaves nothing of its answers to learn")]
        ids, labels = _cut(example, self.sequence, self.keep_end)
        learned = int((labels != IGNORED).sum())
        return [{"input_ids": ids, "labels": labels, "length": length, "learned": learned}]

    def _refuse(self, source: Source, made: Dataset, bad: np.ndarray, numbers: np.ndarray, notes: list[str]) -> None:
        """An error that lists the first rows that cannot be trained on; a note, if they are to be left out."""
        if not len(bad):
            return
        told = [f"{source.place(int(numbers[each]))}: {made[int(each)]['problem']}" for each in bad[:_TOLD]]
        told += [f"and {len(bad) - _TOLD:,} more"] if len(bad) > _TOLD else []
        total = len(np.unique(numbers))
        if self.skip_bad and len(bad) < total:
            notes.append(f"left out of {source.name}: {_rows(len(bad))} that cannot be trained on ({'; '.join(told)})")
            return
        cure = "" if len(bad) == total else ", or leave them out with --skip-bad-rows"
        raise WherryError(
            f"finetune: {source.name}: {len(bad):,} of {_rows(total)} cannot be trained on\n  "
            + "\n  ".join(told)
            + f"\nMend them{cure}"
        )

    def _tell_long(
        self, source: Source, numbers: np.ndarray, length: np.ndarray, learned: np.ndarray, notes: list[str]
    ) -> None:
        if self.sequence is None or self.cuts:
            return
        long = np.flatnonzero(length > self.sequence)
        if not len(long):
            return
        gone = int((learned == 0).sum())
        if gone == len(numbers):
            raise WherryError(
                f"finetune: --seq-length {self.sequence}: no row of {source.name} has anything of its answer within "
                f"{self.sequence:,} tokens; the longest row has {int(length.max()):,}"
            )
        places = ", ".join(source.place(int(numbers[each])) for each in long[:3]) + ", ..." * (len(long) > 3)
        lost = int((length[long] - self.sequence).sum())
        dropped = f"; {_rows(gone)} with nothing left to learn left out" if gone else ""
        notes.append(
            f"{_rows(len(long))} of {source.name} longer than --seq-length {self.sequence:,} cut by {lost:,} tokens "
            f"in all ({places}){dropped}"
        )


def _cut(example: Example, sequence: int | None, keep_end: bool) -> Example:
    if sequence is None or len(example.ids) <= sequence:
        return example
    part = slice(-sequence, None) if keep_end else slice(sequence)
    return Example(example.ids[part], example.labels[part])


# What is told of an example.


def _shown(
    encoder: Encoder, row: Mapping[str, Any], sequence: int | None, keep_end: bool
) -> list[tuple[str, list[int], list[int]]]:
    if "input_ids" in row:
        return [("", row["input_ids"], row["labels"])]
    (found,) = encoder.encode([row])
    assert not isinstance(found, BadRow)
    cut = [_cut(each, sequence, keep_end) for each in found]
    return [(name, *(part.tolist() for part in each)) for name, each in zip(("chosen", "rejected"), cut, strict=True)]


def _prompt(shown: list[tuple[str, list[int], list[int]]], tokenizer: PreTrainedTokenizerFast) -> Prompt:
    """All before the last answer, and the answer; of text its beginning, and how it goes on."""
    _, ids, labels = shown[0]
    end = next(number for number in range(len(ids), 0, -1) if labels[number - 1] != IGNORED)
    start = next((number for number in range(end, 0, -1) if labels[number - 1] == IGNORED), 0)
    start = start or min(_BEGINNING, len(ids) // 2) or 1
    answer = str(tokenizer.decode(ids[start:end], skip_special_tokens=True))
    return Prompt(ids[:start], str(tokenizer.decode(ids[:start])), answer.strip())


def show_example(
    input_ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerFast, *, width: int = 80
) -> Text:
    """An example as the model sees it, in the order of its tokens: what is trained on, and what is masked."""
    flags = np.array(labels) != IGNORED
    ends = [*(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    parts = [(start, end, bool(flags[start])) for start, end in zip([0, *ends[:-1]], ends, strict=True) if start < end]
    found = Text(f"{len(flags):,} tokens, {int(flags.sum()):,} of them trained on", style="dim")
    hidden = parts[4:-4]
    each = max(24, 480 // min(len(parts), 8))
    for part in parts:
        start, end, trained = part
        if part in hidden:
            if part == hidden[0]:
                found.append(f"\n... {hidden[-1][1] - start:,} tokens not shown ...", style="dim")
            continue
        name = "trained" if trained else "masked"
        for line in _lines(list(input_ids[start:end]), tokenizer, each, width - 9):
            found.append(f"\n{name:<9}" if line else "\n", style="dim")
            found.append(line, style="bold green" if trained else "dim")
            name = ""
    return found


def _lines(ids: list[int], tokenizer: PreTrainedTokenizerFast, most: int, width: int) -> list[str]:
    """Text in lines of this width, its own line breaks kept; the middle of a long one is left out, and counted."""
    texts = [ids] if len(ids) <= most else [ids[: most // 2], ids[-(most // 2) :]]
    written = [printable(str(tokenizer.decode(part))) for part in texts]
    text = f"\n... {len(ids) - most // 2 * 2:,} tokens not shown ...\n".join(written)
    found = []
    # Breaks at either end are those of a template between turns.
    for line in text.strip("\n").split("\n") if text.strip("\n") else [repr(text)[1:-1]]:
        while len(line) > width:
            at = line.rfind(" ", width // 2, width) + 1 or width
            found.append(line[:at])
            line = line[at:]
        found.append(line)
    return found

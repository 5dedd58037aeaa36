"""Rows from files, folders and hubs, by `datasets`; and what is wrong with a file that it cannot read."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from wherry.config.problems import path_meant
from wherry.errors import WherryError, one_line
from wherry.finetune.formats import KNOWN, what
from wherry.plan.network import why_not, words

if TYPE_CHECKING:
    from datasets import Dataset

# By the ends of their names; all others are text.
_KINDS = {".json": "JSON", ".jsonl": "JSON", ".ndjson": "JSON", ".parquet": "Parquet", ".csv": "CSV", ".tsv": "TSV"}
_READERS = {"JSON": "json", "Parquet": "parquet", "CSV": "csv", "TSV": "csv", "text": "text"}
_ON_HUB = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>.+))?")
# A file of a folder, or a split, that is to evaluate on; the first that is there is taken.
_HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")
_SPLIT_OF_FILE = re.compile(rf"({'|'.join(_HELD_OUT)})(?![a-z])", re.IGNORECASE)
_ASIDE = re.compile(r"(readme|license|licence|notice|citation)\b.*", re.IGNORECASE)


@dataclass
class Source:
    """Rows, and what the same place has to evaluate on."""

    name: str
    rows: Dataset
    held_out: Dataset | None = None
    files: Sequence[Path] = ()
    notes: list[str] = field(default_factory=list)

    def place(self, row: int) -> str:
        """Where a row is, counted from 1; with the file's name, if there are several."""
        if len(self.files) > 1:
            for path in self.files:
                count = _count(path)
                if row < count:
                    return f"{path.name}, row {row + 1:,}"
                row -= count
        return f"row {row + 1:,}"


@contextmanager
def quiet() -> Iterator[None]:
    """`datasets` and the hub's client draw no bars and log nothing: what goes wrong is raised, and told."""
    import datasets
    from datasets.utils import logging as of_datasets
    from huggingface_hub.utils import logging as of_hub

    levels = [(each, each.get_verbosity()) for each in (of_datasets, of_hub)]
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for each, _ in levels:
        each.set_verbosity(50)
    try:
        yield
    finally:
        if bars:
            datasets.enable_progress_bars()
        for each, level in levels:
            each.set_verbosity(level)


def read(data: str, flag: str = "--data") -> Source:
    """What a path or a name on the hub has."""
    path = Path(data).expanduser()
    if path.is_dir():
        return _folder(path, flag)
    if path.exists():
        if not path.is_file():
            raise WherryError(f"finetune: {flag} {path}: expected a file or a folder, got a pipe or a device")
        return Source(path.name, _load([path], flag), files=[path])
    on_hub = _ON_HUB.fullmatch(data)
    owner = data.partition("/")[0]
    if on_hub is None or _kind(Path(on_hub["name"])) != "text" or owner.startswith(".") or Path(owner).exists():
        raise WherryError(f"finetune: {flag} {data}: there is no such file or folder{path_meant(path)}")
    return _from_hub(on_hub["name"], on_hub["config"], on_hub["split"], flag)


# Folders and hubs.


def _folder(folder: Path, flag: str) -> Source:
    import datasets

    if any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
        try:
            found = datasets.load_from_disk(str(folder))
        except Exception as error:
            raise WherryError(f"finetune: {flag} {folder}: {_words(error)}") from None
        if isinstance(found, datasets.Dataset):
            return Source(folder.name, found)
        return _of_splits(str(folder), dict(found), flag, way=os.sep)
    inside = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder)))
    notes = []
    # What describes data is none, unless text is all that there is.
    aside = [path for path in inside if _kind(path) == "text" and _ASIDE.match(path.name)]
    if len(aside) < len(inside) and any(_kind(path) != "text" for path in inside):
        inside = [path for path in inside if path not in aside]
        notes += [f"left aside: {', '.join(path.name for path in aside[:5])}"] if aside else []
    kinds = Counter(map(_kind, inside))
    if not kinds:
        raise WherryError(f"finetune: {flag} {folder}: the folder has no files to read")
    if len(kinds) > 1:
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        raise WherryError(
            f"finetune: {flag} {folder}: expected files of one kind, got {listed} "
            f"(as {', '.join(next(p.name for p in inside if _kind(p) == kind) for kind in kinds)}); "
            "name one of them, or give each kind a folder of its own"
        )
    by_split: dict[str, list[Path]] = {}
    for path in inside:
        named = _SPLIT_OF_FILE.match(path.name) if kinds.keys() != {"text"} else None
        by_split.setdefault(named[1].lower() if named else "train", []).append(path)
    files = by_split.pop("train", inside)
    source = Source(folder.name, _load(files, flag), files=files, notes=notes)
    name = next((name for name in _HELD_OUT if name in by_split), None)
    if name is not None and files is not inside:
        source.held_out = _load(by_split.pop(name), flag)
        source.notes += [f"{path.name} is not used" for paths in by_split.values() for path in paths]
    return source


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _from_hub(name: str, config: str | None, split: str | None, flag: str) -> Source:
    import datasets

    try:
        found = datasets.load_dataset(name, config)
        # Also of a part of one, as train[:1000].
        rows = datasets.load_dataset(name, config, split=split) if split is not None else None
    except ConnectionError:
        raise WherryError(
            f"finetune: {flag} {name}: there is no such file or folder here, and the hub cannot be reached to look for "
            "a data set of that name; give a file or a folder, or try again with a network"
        ) from None
    except Exception as error:
        hint = f"; name one as in {flag} {name}/CONFIG" if "onfig name is missing" in str(error) else ""
        why = why_not(error, f"datasets/{name}") or _words(error)
        raise WherryError(f"finetune: {flag} {name}: {why}{hint}") from None
    return _of_splits(name if split is None else f"{name}:{split}", dict(found), flag, rows)


def _of_splits(name: str, splits: dict[str, Dataset], flag: str, rows: Dataset | None = None, way: str = ":") -> Source:
    """The rows that were asked for, else those called train; beside them what is there to evaluate on.

    `way`: how a split is named behind a data set.
    """
    held_out = next((splits[each] for each in _HELD_OUT if each in splits), None)
    if rows is not None:
        # Any but those to train on may be among what there is to evaluate on.
        return Source(name, rows, held_out if ":train" in name else None)
    if "train" in splits:
        return Source(name, splits["train"], held_out)
    if len(splits) == 1:
        return Source(name, *splits.values())
    raise WherryError(
        f"finetune: {flag} {name}: no split is called train, there are {', '.join(splits)}; name the one to train on, "
        f"as in {flag} {name}{way}{next(iter(splits))}"
    )


# Files.


def _kind(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return _KINDS.get(Path(name).suffix.lower(), "text")


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _load(files: Sequence[Path], flag: str) -> Dataset:
    """The rows of files of one kind, in their order."""
    import datasets

    kind = _kind(files[0])
    try:
        for path in files:
            if path.stat().st_size == 0 and (kind != "text" or len(files) == 1):
                raise WherryError(f"finetune: {flag} {path}: the file is empty")
        listed = _objects(files) if kind == "JSON" else None
        if listed is not None:
            return datasets.Dataset.from_list(listed)
        options: dict[str, Any] = {}
        if kind in ("CSV", "TSV"):
            options = _csv_options(files[0])
        elif kind == "text":
            options = {"sample_by": "document"}
        names = [glob.escape(str(path.absolute())) for path in files]
        found = datasets.load_dataset(_READERS[kind], data_files=names, split="train", **options)
        found.data.validate(full=True)  # the reader of JSON takes any bytes for UTF-8
        return found
    except WherryError:
        raise
    except Exception as error:  # whatever pyarrow, pandas and datasets raise
        if "corresponds to no data" in str(error):
            raise WherryError(f"finetune: {flag} {files[0]}: the file has no rows") from None
        raise WherryError(f"finetune: {flag} {_explained(files, kind, error)}") from None


def _csv_options(path: Path) -> dict[str, Any]:
    """Every cell is text as it stands: 2 is no float, NA is no absence."""
    import datasets

    separator, header = _header(path)
    # Those without a name get pandas'.
    names = [name or f"Unnamed: {number}" for number, name in enumerate(header)]
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {"sep": separator, "features": features, "keep_default_na": False}


def _header(path: Path) -> tuple[str, list[str]]:
    """What parts the columns, and their names."""
    with _open(path) as file:
        line = file.readline().decode("utf-8-sig")
    separator = "\t" if _kind(path) == "TSV" else max(",;\t", key=line.count)
    return separator, next(csv.reader([line], delimiter=separator), [])


def _objects(files: Sequence[Path]) -> list[Any] | None:
    """The rows of .json files that are an object with one list; nothing of lists, and of files with a row a line."""
    found: list[Any] = []
    for path in files:
        if ".jsonl" in path.name or ".ndjson" in path.name:
            return None
        with _open(path) as file:
            first = file.readline()
            if not first.lstrip().startswith(b"{"):
                return None
            rest = file.read(1)
            try:
                json.loads(first)
            except ValueError:
                if not rest:
                    return None
            else:
                if rest:
                    return None
            whole = json.loads(first + rest + file.read())
        lists = [name for name, value in whole.items() if isinstance(value, list) and value and name not in KNOWN]
        found += whole[lists[0]] if len(lists) == 1 else [whole]
    return found


def _count(path: Path) -> int:
    """How many rows a file has; asked only where one of several files is to be named."""
    kind = _kind(path)
    if kind == "text":
        return 1
    if kind == "Parquet":
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    with _open(path) as file:
        if kind in ("CSV", "TSV"):
            lines = (line.decode("utf-8", "replace") for line in file)
            return sum(map(bool, csv.reader(lines, delimiter=_header(path)[0]))) - 1
        first = file.readline()
        if first.lstrip().startswith(b"["):
            return len(json.loads(first + file.read()))
        return bool(first.strip()) + sum(1 for line in file if line.strip())


# What is wrong with a file.


def _explained(files: Sequence[Path], kind: str, error: Exception) -> str:
    above: dict[str, int] = {}
    for path in files:
        columns: dict[str, int] = {}  # and the lines where they are first
        problem = _not_utf8(path) if kind != "Parquet" else None
        if problem is None and kind == "JSON":
            problem, columns = _bad_json(path)
        elif problem is None and kind == "Parquet":
            problem, columns = _bad_parquet(path)
        elif problem is None and kind in ("CSV", "TSV"):
            columns = dict.fromkeys(_header(path)[1], 1)
        if problem is not None:
            return f"{path}: {problem}"
        if above and columns.keys() != above.keys():
            return (
                f"{path}: its columns are {', '.join(sorted(columns))}; those of {files[0].name} are "
                f"{', '.join(sorted(above))}; give all files the same"
            )
        above = columns
    if "column names don't match" in str(error.__cause__) and above:
        late = max(above, key=lambda name: above[name])
        column = f'the column "{one_line(late)}"'
        return f"{files[-1]}: {column} is not there before line {above[late]:,}; give all rows the same"
    return f"{files[0] if len(files) == 1 else files[0].parent}: {_words(error)}"


def _not_utf8(path: Path) -> str | None:
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    byte = f"byte 0x{line[error.start]:02x} at {error.start + 1}"
                    return f"line {number:,} is not UTF-8 ({byte}); save the file as UTF-8"
    except (OSError, EOFError) as error:
        return _words(error)
    return None


def _bad_json(path: Path) -> tuple[str | None, dict[str, int]]:
    """The first line that is no object, or whose columns are of other types than those above it."""
    types: dict[str, tuple[str, int]] = {}
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            text = line.decode("utf-8-sig")
            if not text.strip():
                continue
            whole = not types and (text.lstrip().startswith("[") or (path.suffix == ".json" and text.strip() == "{"))
            try:
                row = json.loads(text + file.read().decode() if whole else text)
            except ValueError as error:
                at = number + error.lineno - 1 if isinstance(error, json.JSONDecodeError) else number
                message = getattr(error, "msg", str(error))
                near = error.doc[error.pos :][:40] if isinstance(error, json.JSONDecodeError) else text
                return f"line {at:,} is not JSON: {message}, at {near.strip()!r}", {}
            for item in row if isinstance(row, list) else [row]:
                if not isinstance(item, dict):
                    return f"line {number:,} is {what(item)}, expected an object with named columns", {}
                for name, value in item.items():
                    kind = what(value, short=True)
                    seen, line_seen = types.setdefault(name, (kind, number)) if value is not None else (kind, number)
                    if seen != kind:
                        column = f'the column "{one_line(name)}"'
                        return f"{column} is {seen} in line {line_seen:,} and {kind} in line {number:,}", {}
    return None, {name: line for name, (_, line) in types.items()}


def _bad_parquet(path: Path) -> tuple[str | None, dict[str, int]]:
    from pyarrow import parquet

    try:
        return None, dict.fromkeys(parquet.read_schema(path).names, 1)
    except Exception as error:
        return f"it is no Parquet file: {_words(error)}", {}


def _words(error: BaseException) -> str:
    """An error's own words on one line; those of what caused it, where it says only that something did."""
    cause = error.__cause__ if type(error).__name__.startswith("DatasetGeneration") and error.__cause__ else error
    return words(cause)

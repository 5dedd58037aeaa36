import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.errors import WherryError
from wherry.train.data import Samples, load_text


@settings(max_examples=60)
@given(length=st.integers(20, 3000), sequence=st.integers(1, 9), seed=st.integers(0, 2**64 - 1))
def test_an_epoch_sees_every_window_once_and_none_in_order(length, sequence, seed):
    text = np.arange(length) % 251
    samples = Samples(text, sequence, seed)
    first, second = (samples.starts(np.arange(samples.windows) + epoch * samples.windows) for epoch in (0, 1))
    for starts in (first, second):
        assert np.all(np.diff(np.sort(starts)) == sequence)
        assert starts.min() >= 0 and starts.max() + sequence + 1 <= length
    # What is asked for says where it is, whatever was asked for before.
    few = samples.starts(np.array([samples.windows, 0]))
    assert list(few) == [second[0], first[0]]
    ids, labels = samples.batch(np.array([0]))
    assert ids[0].tolist() == text[first[0] : first[0] + sequence].tolist()
    assert labels[0].tolist() == text[first[0] + 1 : first[0] + sequence + 1].tolist()
    if samples.windows > 20:
        assert list(first) != list(second) and list(first) != sorted(first)
        assert list(first) != list(Samples(text, sequence, seed + 1).starts(np.arange(samples.windows)))


def test_default_text_is_python():
    text = load_text()
    assert len(text.train) > 1_000_000 and len(text.validation) > 10_000
    assert b"def " in bytes(text.train[:200_000]) and text.source == "the standard library"


def test_a_folder_is_read_in_order_without_binary_and_hidden_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bbbb")
    (folder / "a.txt").write_text("aaaa")
    (folder / "sub" / "c.md").write_text("cccc")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".secret").write_text("no")
    text = load_text(str(folder))
    whole = b"aaaa\nbbbb\ncccc\n"
    assert len(text.train) == len(whole) and bytes(text.validation[:]) == b"cccc\n"
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1):
            assert bytes(text.train[start:stop]) == whole[start:stop]
    (folder / "a.txt").write_text("a")
    with pytest.raises(WherryError, match=r"a\.txt has become shorter since the run began"):
        text.train[:5]


def test_every_32nd_file_validates(tmp_path):
    for number in range(1, 71):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    text = load_text(str(tmp_path))
    assert bytes(text.validation[:]) == b"32\n64\n"
    assert bytes(text.train[:]).split() == [b"%d" % number for number in range(1, 71) if number % 32]


def test_one_file_is_split(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 10)
    text = load_text(str(path))
    assert bytes(text.train[:]) + bytes(text.validation[:]) == path.read_bytes()
    assert len(text.validation) == 80 and bytes(text.validation[2:4]) == path.read_bytes()[-78:-76]


def test_mistakes_are_told(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "theirs.txt").write_text("words")
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path))
    for path, message in (
        (tmp_path / "missing", "no such file or folder"),
        ("/dev/null", "/dev/null: neither a file nor a folder.* write it to a file"),
        (tmp_path / "empty", "holds no text file"),
        (tmp_path / "empty.txt", "the file is empty"),
        (tmp_path, r"theirs\.txt cannot be read"),
    ):
        with pytest.raises(WherryError, match=message):
            load_text(str(path))
    short = tmp_path / "short.txt"
    short.write_text("x" * 100)
    with pytest.raises(WherryError, match=r"training part holds 97 bytes and a sample takes 129.*--seq-length"):
        load_text(str(short)).check_length(128)

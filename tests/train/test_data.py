import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.errors import WherryError
from wherry.train.data import Samples, load_text


@settings(max_examples=60)
@given(length=st.integers(20, 3000), sequence=st.integers(1, 9), seed=st.integers(0, 2**63))
def test_an_epoch_sees_every_window_once_and_none_in_order(length, sequence, seed):
    samples = Samples(np.zeros(length), sequence, seed)
    first, second = (samples.starts(np.arange(samples.windows) + epoch * samples.windows) for epoch in (0, 1))
    for starts in (first, second):
        assert np.all(np.diff(np.sort(starts)) == sequence)
    # What is asked for says where it is, whatever was asked for before.
    few = samples.starts(np.array([samples.windows, 0]))
    assert list(few) == [second[0], first[0]]
    if samples.windows > 20:
        assert list(first) != list(second) and list(first) != sorted(first)
        assert list(first) != list(Samples(np.zeros(length), sequence, seed + 1).starts(np.arange(samples.windows)))


def _text(length=10_000):
    return np.random.default_rng(0).integers(0, 256, length).astype(np.uint8)


@pytest.mark.long
@settings(max_examples=40)
@given(length=st.integers(10, 400), sequence=st.integers(1, 9), seed=st.integers(0, 2**64 - 1))
def test_samples_stay_inside_the_text(length, sequence, seed):
    samples = Samples(np.arange(length) % 251, sequence, seed)
    ids, labels = samples.batch(np.arange(5))
    assert ids.shape == labels.shape == (5, sequence)
    starts = samples.starts(np.arange(1000))
    assert starts.min() >= 0 and starts.max() + sequence + 1 <= length


def test_labels_are_the_next_bytes():
    ids, labels = Samples(_text(), 32, seed=0).batch(np.arange(4))
    assert (ids[:, 1:] == labels[:, :-1]).all()


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


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    for name in ("ours.txt", "theirs.txt"):
        (tmp_path / name).write_text("words")
    readable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path) and readable(path, mode))
    with pytest.raises(WherryError, match=r"theirs\.txt cannot be read"):
        load_text(str(tmp_path))


def test_mistakes_are_told(tmp_path):
    with pytest.raises(WherryError, match="no such file or folder"):
        load_text(str(tmp_path / "missing"))
    with pytest.raises(WherryError, match=r"/dev/null: neither a file nor a folder.* write it to a file"):
        load_text("/dev/null")
    with pytest.raises(WherryError, match="holds no text file"):
        load_text(str(tmp_path))
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(WherryError, match="the file is empty"):
        load_text(str(empty))
    short = tmp_path / "short.txt"
    short.write_text("x" * 100)
    with pytest.raises(WherryError, match=r"training part holds 97 bytes and a sample takes 129.*--seq-length"):
        load_text(str(short)).check_length(128)

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.errors import WherryError
from wherry.train.data import Samples, Share, batches, load_text, permute


@settings(max_examples=60)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_permute_is_a_permutation(size, seed):
    assert sorted(permute(np.arange(size), size, seed)) == list(range(size))


def test_permute_differs_by_seed_and_needs_no_neighbours():
    whole = permute(np.arange(500), 500, seed=7)
    assert list(permute(np.array([3, 499]), 500, seed=7)) == [whole[3], whole[499]]
    assert list(whole) != list(permute(np.arange(500), 500, seed=8))
    assert list(whole) != list(range(500))


def _text(length=10_000):
    return np.random.default_rng(0).integers(0, 256, length).astype(np.uint8)


def test_an_epoch_sees_every_window_once():
    samples = Samples(_text(), sequence=64, seed=3)
    first = samples.starts(np.arange(samples.windows))
    second = samples.starts(np.arange(samples.windows, 2 * samples.windows))
    for starts in (first, second):
        assert np.all(np.diff(np.sort(starts)) == 64)
    assert list(first) != list(second)


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


@pytest.mark.parametrize("ranks,micro,accumulation", [(1, 8, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4)])
def test_a_step_reads_the_same_samples_on_any_number_of_ranks(ranks, micro, accumulation):
    for step in (0, 5):
        seen = np.concatenate(
            [
                Share(rank, ranks, micro, accumulation).numbers(step, part)
                for rank in range(ranks)
                for part in range(accumulation)
            ]
        )
        assert sorted(seen) == list(range(step * 8, step * 8 + 8))


def test_batches_gives_each_micro_batch_of_each_step():
    share = Share(rank=0, ranks=1, micro=2, accumulation=3)
    assert len(list(batches(Samples(_text(), 16, 0), share, steps=4))) == 12


def test_default_text_is_python_and_is_cached(tmp_path):
    first = load_text(cache=tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = load_text(cache=tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert len(first.train) > 1_000_000 and len(first.validation) > 10_000
    assert bytes(first.train[:5000]) == bytes(second.train[:5000])
    assert b"def " in bytes(first.train[:200_000])
    assert all(path.suffix in (".bin", ".json") for path in tmp_path.iterdir())


def test_a_folder_is_read_in_order_without_binary_and_hidden_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bbbb")
    (folder / "a.txt").write_text("aaaa")
    (folder / "sub" / "c.md").write_text("cccc")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".secret").write_text("no")
    text = load_text(str(folder), cache=tmp_path / "cache")
    assert bytes(text.train) == b"aaaa\nbbbb\ncccc\n"
    (folder / "a.txt").write_text("AAAAA")
    assert bytes(load_text(str(folder), cache=tmp_path / "cache").train).startswith(b"AAAAA")


def test_one_file_is_mapped_and_split(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 10)
    text = load_text(str(path))
    assert isinstance(text.train, np.memmap)
    assert bytes(text.train) + bytes(text.validation) == path.read_bytes()
    assert len(text.validation) == 80


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    for name in ("ours.txt", "theirs.txt"):
        (tmp_path / name).write_text("words")
    readable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path) and readable(path, mode))
    with pytest.raises(WherryError, match=r"theirs\.txt cannot be read"):
        load_text(str(tmp_path), cache=tmp_path / "cache")


def test_mistakes_are_told(tmp_path):
    with pytest.raises(WherryError, match="no such file or folder"):
        load_text(str(tmp_path / "missing"))
    with pytest.raises(WherryError, match="holds no text file"):
        load_text(str(tmp_path))
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(WherryError, match=r"put together in .*empty\.txt, and that fails: .*XDG_CACHE_HOME"):
        load_text(cache=empty)
    with pytest.raises(WherryError, match="the file is empty"):
        load_text(str(empty))
    short = tmp_path / "short.txt"
    short.write_text("x" * 100)
    with pytest.raises(WherryError, match=r"training part holds 97 bytes and a sample takes 129.*--seq-length"):
        load_text(str(short)).check_length(128)

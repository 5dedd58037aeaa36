"""The page of a run is made of the run's own files, whatever its end, and needs no network."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from wherry.train import job
from wherry.train.options import parse
from wherry.train.page import write_page

TINY = ("--num-layers", 2, "--hidden-size", 32, "--seq-length", 16, "--eval-iters", 2, "--no-save")


def test_the_page_tells_what_the_files_do(tmp_path: Path) -> None:
    text, run = tmp_path / "<b>text & more.txt", tmp_path / "run"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    flags = (*TINY, "--data", text, "--steps", 5, "--lr", 0.01, "--profile", "2-3", "--run-dir", run)
    assert job.train(parse([str(flag) for flag in flags])) == 0 and not (run / "checkpoints").exists()
    page = (run / "report.html").read_text()
    words = html.unescape(re.sub(r"<[^>]*>", "\n", page))
    summary = json.loads((run / "summary.json").read_text())
    assert "finished after 5 steps" in words and f"{summary['validation_loss']:.4f}" in words
    for title in ("Loss", "Tokens a second", "Memory of the device", "Expected and actual", "gradient_clipping"):
        assert title in words
    assert "backward blocks.1" in words
    assert "<b>text & more.txt" in words and "<b>" not in page  # as text, and nowhere as a tag
    assert not re.search(r"<script|src=|href=|http", page), "a browser requests nothing"
    # The trace is of the steps that were asked for, and memory of the one after.
    files = sorted(path.name for path in (run / "profile").iterdir())
    assert files == ["memory-rank0.json", "memory.html", "trace-rank0.json.gz"]
    assert json.loads((run / "profile" / "memory-rank0.json").read_text())["step"] == 4
    # Resumed after its third step, and ended early on a full disk, it has a page too.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.1.jsonl").write_text("\n".join(lines[:3]) + "\n")
    lost = json.loads(lines[4]) | {"loss": None}
    (run / "metrics.jsonl").write_text(f"{lines[3]}\n{json.dumps(lost)}\n" + lines[4][:20])
    summary |= {"ending": "diverged", "validation_loss": None}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "profile" / "memory-rank0.json").unlink()
    write_page(run)
    page = (run / "report.html").read_text()
    assert "the loss was lost after 5 steps" in page and "was not recorded in this run" in page
    curve = page[page.index("<figcaption>Loss") :].split("</figure>")[0].split('class="line"')[1]
    assert curve.split('"')[1].count(" ") == 4  # the four losses that are numbers

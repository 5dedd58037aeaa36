"""Run the examples at the size of a toy. Those of other libraries: tests/integrations."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.smoke
def test_the_plain_loop(forks, tmp_path):
    done = forks.run(EXAMPLES / "train_with_wherry.py", ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    losses = [float(line.split()[4]) for line in done.stdout.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_the_tutorial_of_another_engine(forks, tmp_path):
    done = forks.of(as_deepspeed=True).run(EXAMPLES / "deepspeed_tutorial.py", ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    first, last = (float(done.stdout.split("loss ")[1].split()[i].rstrip(",")) for i in (0, 2))
    assert done.stdout.startswith("40 updates") and last < 0.7 * first


def test_ten_billion_parameters_in_small(forks, tmp_path):
    small = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "vocabulary": 96, "batch": 2, "steps": 3}
    flags = [word for name, value in small.items() for word in (f"--{name}", value)]
    done = forks.run(EXAMPLES / "ten_billion_on_one_gpu.py", *flags, ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "ZeRO-Offload" in done.stdout
    assert done.stdout.count("tokens/s") == 6  # on each of two ranks

"""Lightning's Trainer on Wherry, by the strategy of its own and through the alias, against the same without it."""

import importlib.util
import json
from pathlib import Path

import pytest

# Found, and not imported: an import takes seconds, and every worker collects this file.
if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning comes with `pip install '.[lightning]'`", allow_module_level=True)

PROGRAM = Path(__file__).with_name("lightning_modules.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_module.py"
IMPORTS = ("lightning", "lightning.pytorch.strategies.deepspeed")


@pytest.fixture(scope="module")
def lightning(forks):
    """Forks of a process that has imported it."""
    return forks.of(*IMPORTS)


def run(forks, folder, mode, ranks, accumulation):
    done = forks.run(PROGRAM, mode, folder, accumulation, ranks=ranks, folder=folder)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / f"{mode}.json").read_text())


# Lightning's own DeepSpeed strategy divides the loss by the accumulation, and so does the engine that it drives: its
# results with accumulation differ from Lightning's without it, whichever engine runs.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "accumulation"), [("own", 2), pytest.param("alias", 1, marks=pytest.mark.nightly)])
def test_it_trains_validates_saves_and_resumes_as_without_wherry(forks, tmp_path, mode, accumulation):
    processes = forks.of(*IMPORTS, as_deepspeed=mode == "alias")
    plain = run(processes, tmp_path, "plain", 1, accumulation)
    found = run(processes, tmp_path, mode, 2, accumulation)
    assert len(found["losses"]) == 12 and found["released_at_birth"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=2e-5)
    assert found["validation"] == pytest.approx(plain["validation"], rel=2e-5)
    assert found["validated_again"] == pytest.approx(found["validation"])
    assert (found["rate"], found["files"]) == (plain["rate"], plain["files"])
    assert found["resumed"] == pytest.approx(plain["losses"][6:], rel=2e-5)
    assert found["resumed_validation"] == pytest.approx(found["validation"], rel=1e-6)
    if mode == "own":
        assert found["fitted_again"][0] < found["losses"][-6]


def test_the_checks_of_the_strategy(lightning, tmp_path):
    done = lightning.run(PROGRAM.with_name("lightning_checks.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "all of it was checked" in done.stdout


def test_the_example(lightning, tmp_path):
    done = lightning.run(EXAMPLE, "--epochs", 3, ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "validation " in done.stdout
    assert (tmp_path / "runs" / "lightning" / "last.ckpt" / "latest").exists()

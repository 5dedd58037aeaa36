"""Lightning's Trainer on Wherry, by the strategy of its own and through the alias, against the same without it."""

import json
from pathlib import Path

import pytest
from tests.cli.programs import wherry

pytest.importorskip("lightning", reason="lightning comes with `pip install wherry[lightning]`")

PROGRAM = Path(__file__).with_name("lightning_modules.py")


def run(folder, mode, ranks, stage, accumulation, *flags):
    program = (PROGRAM, mode, folder, stage, accumulation)
    done = wherry("run", *flags, "--nproc", ranks, *program, cwd=folder, timeout=250)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / f"{mode}.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    known = {}

    def at(accumulation):
        if accumulation not in known:
            known[accumulation] = run(tmp_path_factory.mktemp("plain"), "plain", 1, 0, accumulation)
        return known[accumulation]

    return at


# Lightning's own DeepSpeed strategy divides the loss by the accumulation, and so does the engine that it asks to: what
# it gives with accumulation is not what Lightning gives without it, whichever engine runs.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "stage", "accumulation"), [("own", 3, 2), ("own", 2, 2), ("alias", 3, 1)])
def test_it_trains_validates_saves_and_resumes_as_without_wherry(plain, tmp_path, mode, stage, accumulation):
    found = run(tmp_path, mode, 2, stage, accumulation, *(["--as-deepspeed"] if mode == "alias" else []))
    plain = plain(accumulation)
    assert len(found["losses"]) == 12
    assert found["losses"] == pytest.approx(plain["losses"], rel=2e-5)
    assert found["validation"] == pytest.approx(plain["validation"], rel=2e-5)
    assert found["validated_again"] == pytest.approx(found["validation"])
    assert found["rate"] == plain["rate"]
    assert found["released_at_birth"] == (stage == 3)
    assert found["files"] == plain["files"]
    assert found["resumed"] == pytest.approx(plain["losses"][6:], rel=2e-5)
    assert found["resumed_validation"] == pytest.approx(found["validation"], rel=1e-6)
    if mode == "own":
        assert found["fitted_again"][0] < found["losses"][-6]


def test_the_checks_of_the_strategy():
    from wherry.errors import WherryError
    from wherry.integrations.lightning import WherryPrecision, WherryStrategy

    strategy = WherryStrategy(stage=2)
    with pytest.raises(WherryError, match="precision '64-true': expected one of 32-true, bf16-true"):
        strategy.precision_plugin = type("Double", (WherryPrecision,), {"precision": "64-true"})("64-true")

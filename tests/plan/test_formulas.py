"""The formulas of states, of activations and of bandwidth: against published digits, and at their edges."""

from __future__ import annotations

from fractions import Fraction

import pytest

from wherry import config as configs
from wherry.errors import WherryError
from wherry.placement import Placement, Tier
from wherry.plan.formulas import states_between_steps
from wherry.plan.gpt import PUBLISHED, GptShape, Work, bandwidth_for, checkpoint_intensity, optimizer_intensity
from wherry.plan.model_states import Cost, states
from wherry.plan.quantities import amount, count_name, parse_bytes, parse_count, published_gigabytes, seconds, size

ADAM_HALF = Cost.of("bf16", "adamw")


def test_costs_of_a_parameter() -> None:
    assert (ADAM_HALF.parameters, ADAM_HALF.gradients, ADAM_HALF.optimizer, ADAM_HALF.total) == (2, 2, 12, 16)
    assert Cost.of("fp16", "Adam") == ADAM_HALF
    assert Cost.of("fp32", "adamw") == Cost(4, 4, 0, 8)
    assert Cost.of("bf16", "lion") == Cost(2, 2, 4, 4)
    assert Cost.of("fp32", "sgd").optimizer == 0
    assert Cost.of("bf16", "adamw", gradients="fp32").total == 18


@pytest.mark.parametrize(("dtype", "moments"), [("fp32", 8000), ("bf16", 4000)])
def test_moments_are_counted_in_the_dtype_of_the_config(dtype: str, moments: int) -> None:
    config = configs.load({"bf16": {"enabled": True}, "wherry": {"state_dtype": dtype}})
    found = states_between_steps(1000, config, 1, gpu=True)
    assert found["optimizer", "device"] == 4000 + moments


def test_bytes_by_tier() -> None:
    placement = Placement.of_stage(2, optimizer=Tier.HOST)
    found = states(1000, placement, 4, ADAM_HALF)
    assert found.by_tier(placement) == {Tier.DEVICE: 2000, Tier.HOST: 500 + 3000, Tier.DISK: 0}
    disk = Placement.of_stage(3, optimizer=Tier.DISK, parameters=Tier.DISK)
    assert states(1000, disk, 4, ADAM_HALF).by_tier(disk) == {Tier.DEVICE: 0, Tier.HOST: 500, Tier.DISK: 3500}


def test_counts_are_read() -> None:
    for text, value in (("7.5e9", 7_500_000_000), ("7.5B", 7_500_000_000), (" 1t ", 10**12), ("350M", 350_000_000)):
        assert parse_count(text, "--params") == value
    for text in ("", "x", "-1", "0", "1.5", "1e-3", "7.5 B B", "1e9999", "nan", "1GiB"):
        with pytest.raises(WherryError, match="--params: expected a whole number of 1 or more"):
            parse_count(text, "--params")


def test_bytes_are_read() -> None:
    assert parse_bytes("32GB", "--device-memory") == parse_bytes("32e9", "--device-memory") == 32 * 10**9
    assert parse_bytes("24 GiB", "--device-memory") == 24 * 2**30
    with pytest.raises(WherryError, match=r"--device-memory: expected bytes.*got '3XB'"):
        parse_bytes("3XB", "--device-memory")
    for few in ("5", " 24576 ", "99e3"):
        with pytest.raises(WherryError, match=rf"--device-memory: expected bytes.* write {few.strip()}GB or .*MB"):
            parse_bytes(few, "--device-memory")
    assert [parse_bytes(text, "--disk") for text in ("5B", "0.5KB", "100000")] == [5, 500, 100_000]


def test_numbers_are_printed_for_people() -> None:
    names = [count_name(n) for n in (7_500_000_000, 128 * 10**9, 10**12, 1_234_567)]
    assert names == ["7.5B", "128B", "1T", "1,234,567"]
    small = [published_gigabytes(n) for n in (0, 1, 16_000_000, 99_960_000_000)]
    assert small == ["0", "0.000000001", "0.016", "100"]
    assert [size(n) for n in (0, 3, 99, 1360, 12_500_000, 10**8)] == [
        *("0 B", "3 B", "99 B", "1.36 KB", "12.50 MB", "0.10 GB"),
    ]
    amounts = [amount(x) for x in (0, 0.000123, 0.5, 9.996, 99.96, 1234.5)]
    assert amounts == ["0", "0.000123", "0.5", "10", "100", "1,234"]
    times = (0.0004, 59.9, 599, 600, 7200, 200_000)
    assert [seconds(x) for x in times] == ["0.4 ms", "59.9 s", "599.0 s", "10.0 minutes", "2.0 hours", "2.3 days"]


def test_published_thresholds() -> None:
    """On GPUs of 70 TFLOP/s, sequence 1024."""
    # Near 1.5 TB/s for optimizer state: 90% with two samples.
    assert bandwidth_for(optimizer_intensity(2, 1024), 0.9, 70e12) == pytest.approx(1.23e12, rel=0.01)
    # 2 GB/s for checkpoints: above half from hidden 2K.
    assert bandwidth_for(checkpoint_intensity(2048), 0.5, 70e12) < 2e9


def test_what_cannot_be_is_refused() -> None:
    placement = Placement.of_stage(1)
    for refused, message in (
        (lambda: Cost.of("int4"), "precision: expected one of fp32, bf16, fp16, got 'int4'"),
        (lambda: Cost.of("bf16", "lbfgs"), "optimizer: expected one of adam, "),
        (lambda: Cost.of("bf16", "adam", "fp8"), "gradients: expected one of fp32, "),
        (lambda: states(10, placement, 0, ADAM_HALF), "ranks: expected 1 or more, got 0"),
        (lambda: states(0, placement, 1, ADAM_HALF), "parameters: expected 1 or more, got 0"),
        (lambda: GptShape(0, 1, 1), "layers: expected 1 or more, got 0"),
        (lambda: Work(batch=33), "the 33 samples of a node do not divide by its 16 GPUs"),
        (lambda: PUBLISHED[0].checkpoints(1, 1, 0), "interval: expected 1 or more, got 0"),
        (lambda: bandwidth_for(Fraction(1), 1.0, 1.0), "efficiency: expected a number between 0 and 1"),
        (lambda: bandwidth_for(Fraction(1), 0.5, 0.0), "peak: expected more than 0"),
    ):
        with pytest.raises(WherryError, match=message):
            refused()

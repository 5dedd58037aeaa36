"""`wherry plan` as a person and a program meet it."""

from __future__ import annotations

import pytest

from wherry.cli import main
from wherry.plan import machines

# Ranks, and gigabytes with nothing partitioned, the optimizer, gradients and parameters too: of the ZeRO paper's table.
PUBLISHED = """\
1     120   120   120   120
4     120   52.5  41.3  30
16    120   35.6  21.6  7.5
64    120   31.4  16.6  1.88
256   120   30.4  15.4  0.47
1,024 120   30.1  15.1  0.12
1     16000 16000 16000 16000
4     16000 7000  5500  4000
16    16000 4750  2875  1000
64    16000 4187  2218  250
256   16000 4046  2054  62.5
1,024 16000 4011  2013  15.6
"""


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_published_tables_are_printed_to_the_digit(plan):
    lines = cells(plan("--params", "7.5e9,1e12", "--ranks", "1,4,16,64,256,1024"))
    assert [row for row in cells(PUBLISHED) if row not in lines] == []


def test_what_fits_is_marked_and_the_formulas_are_told(plan):
    out = plan("--params", "7.5e9", "--ranks", "4,64", "--device-memory", "32GB")
    assert ["4", "120", "52.5", "41.3", "30", "*"] in cells(out)
    assert ["64", "120", "31.4", "*", "16.6", "*", "1.88", "*"] in cells(out)
    for convention in ("10^9 bytes", "4P+12P/N", "2P+14P/N", "16P/N", "* fits in 32 GB"):
        assert convention in " ".join(out.split())
    assert "*" not in plan("--params", "7.5B,128B,1234567")
    out = plan("--params", "1B", "--ranks", "2", "--precision", "fp32", "--optimizer", "lion")
    assert ["2", "12", "10", "8", "6"] in cells(out) and "8P+4P/N" in out
    large = ("--params", "1e9,7e9", "--ranks", "1", "--device-memory", "24GB")
    assert "\n7B parameters do not fit in 24 GB here.\n" in plan(*large, status=1)
    plan.json(*large, status=1)


def test_the_zero_table_as_json(plan):
    found = plan.json("--params", "7.5B", "--ranks", "4,64", "--device-memory", "32GB")
    assert (found["precision"], found["optimizer"], found["device_memory"]) == ("bf16", "adamw", 32 * 10**9)
    rows = {(row["ranks"], row["stage"]): row for row in found["rows"]}
    assert len(rows) == 8
    assert rows[64, 2] == {
        "params": 7_500_000_000,
        "ranks": 64,
        "stage": 2,
        "placement": "ZeRO-2",
        "parameters": 15_000_000_000,
        "gradients": 234_375_000,
        "optimizer": 1_406_250_000,
        "total": 16_640_625_000,
        "fits": True,
    }
    assert not rows[4, 1]["fits"]
    edge = plan.json("--params", "128B", "--ranks", "64", "--device-memory", "32GB")
    assert edge["rows"][3]["fits"]  # to the byte


def test_the_infinity_table(plan, monkeypatch):
    out = plan("--infinity")
    lines = cells(out)
    for expected in (
        "0.10 80 10K 128 1.83 2.03 0.05 1.56 1.63",
        "0.50 100 20K 160 9.16 3.91 0.12 6.25 2.50",
        "1.01 128 25K 256 18.31 7.13 0.20 9.77 3.56",
        "10.05 195 64K 512 182.81 24.38 0.76 64.00 8.00",
        "101.47 315 160K 1024 1845.70 88.59 3.08 400.00 18.00",
    ):
        assert expected.split() in lines
    text = " ".join(out.split())
    for convention in ("K = 1024", "TB = 2^40", "20 bytes a parameter", "Batch 32 on a node of 16 GPUs", "512 GPUs"):
        assert convention in text
    monkeypatch.setenv("COLUMNS", "30")
    narrow = plan("--infinity")
    assert cells(narrow)[:8] == lines[:8]


def test_the_infinity_table_as_json_for_one_shape(plan):
    shape = ("--layers", "3", "--hidden", "1K", "--heads", "8", "--batch", "4", "--sequence", "512")
    machine = ("--gpus-per-node", "2", "--nodes", "3", "--peak", "100e12", "--efficiency", "0.5", "--interval", "2")
    found = plan.json("--infinity", *shape, *machine)
    assert found["memory"] == [
        {
            **{"layers": 3, "hidden": 1024, "heads": 8, "parameters": 36 * 1024**2, "model_states": 20 * 36 * 1024**2},
            "node_activations": 301_989_888,
            "node_checkpoints": 8_388_608,
            "gpu_working_states": 16_777_216,
            "gpu_working_activations": 100_663_296,
        }
    ]
    by_what = [(need["intensity"], need["shared_by"], need["bytes_per_second"][0]) for need in found["bandwidth"]]
    intensities = ((1024, 1), (1024, 6), (256, 1), (256, 6), (24 * 1024 * 2, 1))
    assert by_what == [(each, shared, pytest.approx(100e12 / each / shared)) for each, shared in intensities]


def test_machines_are_listed_and_have_the_names_that_people_and_drivers_give_them(plan):
    lines = {line[0]: line[1:] for line in cells(plan("--machine", "list")) if line}
    assert lines["4090"] == ["1", "24", "128", "155", "70", "920", "24"]
    told = plan.json("--machine", "list")
    assert {machine["name"] for machine in told} <= set(lines)
    for name, known in (
        ("RTX 4090", "4090"),
        ("5060ti-16gb", "5060ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "4070ti-super"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
        ("v100-dgx2", "v100-dgx2"),
    ):
        assert machines.known(name).name == known


MISTAKES = [
    ((), "give a MODEL, like gpt2-1.5b, or --params COUNT"),
    (("--params", "7,5e9"), "'7,5e9' would be 7 and 5e9; write 7.5e9, or each with its unit, like 7B,13B"),
    (("--params", "1B", "--ranks", "1,024"), "'1,024' would be 1 and 024; write 1024"),
    (("--infinity", "--efficiency", "0,5"), "'0,5' would be 0 and 5; write 0.5"),
    (("--infinity", "--peak", "70,5e12"), "got '70,5e12'; write 70.5e12"),
    (("--params", "1B", "--device-memory", "500B"), "--device-memory: expected from 1 MB to 10 TB"),
    (("--params", "1B", "--ranks", "4,"), "--ranks: expected a whole number of 1 or more"),
    (("--params", "1B", "--layers", "3"), "--layers: goes with --infinity"),
    (("--infinity", "--device-memory", "3GB"), "--device-memory: goes with --params"),
    (("--infinity", "--hidden", "1024"), "--layers and --heads not given"),
    (("--infinity", "--layers", "1", "--hidden", "wide", "--heads", "1"), "--hidden: expected a number"),
    (("--infinity", "--efficiency", "0.5,1"), "efficiency: expected a number between 0 and 1, got 1"),
    (("--infinity", "--peak", "inf"), "--peak: expected a number, got 'inf'"),
]


def test_mistakes_are_told_alone(plan, capsys):
    for arguments, message in MISTAKES:
        assert message in plan.error(*arguments), arguments
    with pytest.raises(SystemExit):
        main(["plan", "--infinity", "--params", "1B"])
    assert "not allowed with" in capsys.readouterr().err

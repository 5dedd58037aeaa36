import pytest
import torch

from wherry.config import load
from wherry.errors import WherryError
from wherry.train.config import build_config, peak_lr
from wherry.train.job import check
from wherry.train.options import parse, shape_of
from wherry.train.presets import PRESETS, Shape
from wherry.train.resume import Start, keep_model

SMALL = PRESETS["gpt2-10m"]


def _config(*flags, given=None, bf16=False):
    written = load(given).written if given is not None else None  # as the job reads a file
    return build_config(keep_model(parse(list(flags)), Start()), 10_000_000, bf16=bf16, given=written)


def test_the_default_is_a_config_that_loads():
    config = load(_config())
    assert config.placement().name == "ZeRO-3"
    assert config.batch(2).train == 16
    assert config.gradient_clipping == 1.0 and not config.bf16.enabled


def test_flags_are_known_by_their_megatron_names_with_dashes_or_underscores():
    flags = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32, "train-iters": 7}
    dashes = parse([f"--{name}={value}" for name, value in flags.items()])
    lines = parse([f"--{name.replace('-', '_')}={value}" for name, value in flags.items()])
    assert dashes == lines
    assert shape_of(dashes, SMALL) == Shape(layers=2, hidden=64, heads=4, sequence=32)
    assert dashes.steps == 7
    assert parse(["--deepspeed", "--deepspeed_config", "x.json"]) == parse(["--config", "x.json"])
    line = "--micro-batch-size 4 --global-batch-size 64 --bf16 --lr 3e-4 --weight-decay 0.01 --clip-grad 0.5"
    config = load(_config(*line.split(), "--lr-warmup-iters=9", "--checkpoint-activations", "--train-iters=90"))
    assert config.batch(2) == (64, 4, 8) and config.bf16.enabled and config.gradient_clipping == 0.5
    assert {"lr": 3e-4, "weight_decay": 0.01}.items() <= config.optimizer.params.items()
    assert (config.scheduler.params["warmup_num_steps"], config.scheduler.params["total_num_steps"]) == (9, 90)


def test_heads_follow_the_width_unless_given():
    assert shape_of(parse(["--hidden-size", "256"]), SMALL).heads == 4
    assert shape_of(parse(["--hidden-size", "32"]), SMALL).heads == 1
    assert shape_of(parse([]), SMALL) == SMALL


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--hidden-size", "100", "--num-attention-heads", "3"], "--hidden-size 100 does not divide"),
        (["--vocab-size", "100"], "takes at least 256"),
    ],
)
def test_shapes_that_cannot_be_are_told(flags, message):
    with pytest.raises(WherryError, match=message):
        shape_of(parse(flags), SMALL)


def test_flags_lie_over_the_file_and_settings_over_both():
    given = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    config = _config("--stage", "2", "--batch-size", "16", "--set", "zero_optimization.stage=0", given=given)
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["zero_optimization"] == {"stage": 0, "overlap_comm": True}
    assert given["zero_optimization"]["stage"] == 1


def test_flags_write_into_blocks_that_a_file_leaves_open():
    zero = {"zero_optimization": {"offload_optimizer": None, "offload_param": "auto"}}
    config = _config("--nvme-path", "/d", "--offload-param", "nvme", "--stage", "3", given=zero)
    assert config["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "/d", "max_in_cpu": 0}
    load(config)
    with pytest.raises(WherryError, match="nothing rests on disk; add --offload-optimizer nvme"):
        _config("--nvme-path", "/d")
    assert load(_config("--host-memory", "3GB", given={"wherry": None})).wherry.host_memory == 3_000_000_000
    for empty in (None, "auto"):
        given = dict.fromkeys(("zero_optimization", "bf16", "fp16", "wherry"), empty)
        given["optimizer"] = {"type": "SGD", "params": empty}
        flags = "--stage 1 --precision bf16 --lr 0.5 --keep-last 2 --set fp16.enabled=false"
        config = load(_config(*flags.split(), given=given))
        assert (config.zero_optimization.stage, config.bf16.enabled) == (1, True)
        assert config.optimizer.params["lr"] == 0.5 and config.wherry.checkpoint.keep_last == 2
    assert _config("--offload-optimizer", "cpu", given={"zero_optimization": True})["zero_optimization"]["stage"] == 1


def test_a_file_is_taken_at_its_word():
    config = _config(given={"train_batch_size": 32})
    assert "zero_optimization" not in config and "gradient_clipping" not in config
    assert "train_micro_batch_size_per_gpu" not in config
    assert config["optimizer"]["type"] == "AdamW"
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config = _config(given=sgd)
    assert config["optimizer"] == sgd["optimizer"] and "scheduler" not in config
    assert load(config).batch(2) == (2, 1, 1)  # as for any file without a batch size


def test_what_a_file_leaves_open_is_filled_as_a_trainer_would():
    ours = _config()
    given = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.9], "eps": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_num_steps", "total_num_steps", "warmup_max_lr"), "auto"),
        },
    }
    config = load(_config("--steps", "60", given=given))
    assert config.batch(2) == (16, 8, 1)
    assert {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-8}.items() <= config.optimizer.params.items()
    params = config.scheduler.params
    assert (params["total_num_steps"], params["warmup_num_steps"], params["warmup_max_lr"]) == (60, 6, None)
    for open_ in ({}, {"optimizer": "auto"}, {"optimizer": {"type": "auto"}, "scheduler": {"type": "auto"}}):
        config = _config(given=open_ | {"zero_optimization.stage": 1})
        assert (config["optimizer"], config["scheduler"]) == (ours["optimizer"], ours["scheduler"])
        assert config["zero_optimization"] == {"stage": 1}
    assert _config(given={"optimizer": None, "scheduler": None})["scheduler"] is None
    assert _config("--lr", "0.5", given={"optimizer": "auto"})["optimizer"]["params"]["lr"] == 0.5
    half_open = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}
    assert load(_config(given=half_open)).batch(2) == (32, 16, 1)


def test_learning_rate_and_precision_flags():
    assert _config("--lr", "0.5")["optimizer"]["params"]["lr"] == 0.5
    assert _config(bf16=True)["bf16"] == {"enabled": True}
    assert "bf16" not in _config("--precision", "fp32", bf16=True)
    fp16 = _config("--precision", "fp16", given={"bf16": {"enabled": True}})
    assert fp16["fp16"]["enabled"] and not fp16["bf16"]["enabled"]


def test_settings_are_json_or_strings():
    config = _config("--set", "wandb.project=mine", "--set", "gradient_clipping=0.5", "--set", "fp16.enabled=true")
    assert (config["wandb"], config["gradient_clipping"], config["fp16"]) == (
        {"project": "mine"},
        0.5,
        {"enabled": True},
    )


def test_a_setting_of_auto_is_what_there_would_be_without_it():
    for name in ("optimizer", "scheduler"):
        assert _config("--set", f"{name}=auto") == _config()
    with pytest.raises(WherryError, match="nothing is trained without one"):
        _config("--set", "optimizer=null")


def test_one_precision_at_a_time(capsys):
    for flags in (["--bf16", "--fp16"], ["--bf16", "--precision", "fp32"]):
        with pytest.raises(SystemExit):
            parse(flags)
        assert "not allowed with argument --bf16" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["novalue", "=1"])
def test_a_setting_without_a_key_or_a_value_is_told(setting):
    with pytest.raises(WherryError, match="expected KEY=VALUE"):
        _config("--set", setting)


def test_a_setting_inside_a_value_is_told():
    with pytest.raises(WherryError, match=r"gradient_clipping is 1\.0 in the config, not a block"):
        _config("--set", "gradient_clipping.x=1")


def test_larger_models_get_smaller_learning_rates():
    rates = [peak_lr(shape.parameters) for shape in PRESETS.values()]
    assert rates[0] == 1e-3 and rates == sorted(rates, reverse=True) and rates[-1] > 1e-5


def test_help_shows_each_flag_once(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "  --num-layers N " in shown and "--num_layers" not in shown and "--precision {fp32,bf16,fp16}" in shown


def test_counts_are_positive(capsys):
    with pytest.raises(SystemExit) as refused:
        parse(["--steps", "0"])
    assert refused.value.code == 2 and "expected at least 1" in capsys.readouterr().err
    for flags, told in (
        (["--steps", "1e3"], "expected a whole number, got '1e3'"),
        (["--eval-interval", "-3"], "expected at least 0, got -3"),
        (["--max-restarts", "-1"], "expected at least 0, got -1"),
        (["--lr-warmup-iters", "-1"], "expected at least 0, got -1"),
        (["--seed", "-1"], "expected at least 0, got -1"),
        (["--seed", str(2**64)], "expected less than 2**64, got 18446744073709551616"),
    ):
        with pytest.raises(SystemExit):
            parse(flags)
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--tensor-parallel", "4"], "--tensor-parallel 4 does not divide the 6 attention heads"),
        (["--pipeline-parallel", "7"], "--pipeline-parallel 7: the model has 6 blocks"),
        (["--tensor-parallel", "2", "--pipeline-parallel", "2", "--nproc", "6"], "--nproc 6 is not a multiple of 4"),
    ],
)
def test_axes_must_divide_the_model(argv: list[str], told: str) -> None:
    with pytest.raises(WherryError, match=told):
        check(parse(argv))


def test_a_pipeline_gets_micro_batches_for_its_stages() -> None:
    assert _config("--pipeline-model-parallel-size", "3")["gradient_accumulation_steps"] == 6


def test_an_optimizer_by_its_name_has_what_suits_it(capsys):
    assert _config("--set", "optimizer.type=SGD") == _config("--optimizer", "SGD")
    assert _config("--optimizer", "adamw") == _config()
    lion = _config("--optimizer", "LION", "--weight-decay", "0.2")["optimizer"]
    assert lion == {"type": "Lion", "params": {"lr": 2e-4, "betas": [0.9, 0.99], "weight_decay": 0.2}}
    sgd = load(_config("--optimizer", "sgd")).optimizer
    assert (sgd.type, sgd.params["lr"], sgd.params["momentum"]) == ("SGD", 0.1, 0.9)
    for name in ("Adam", "Adagrad", "NAdam", "RMSprop"):
        kind, params = load(_config("--optimizer", name)).optimizer.build_args()
        getattr(torch.optim, kind)([torch.zeros(1)], **params)
    for name, told in (("adamx", 'did you mean "Adamax"?'), ("adamw_bnb_8bit", '{"state_dtype": "int8"}')):
        with pytest.raises(SystemExit):
            parse(["--optimizer", name, "--steps", "6"])
        assert told in capsys.readouterr().err


def test_an_optimizer_by_its_name_lies_over_the_file_and_the_run_before():
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": "auto"}}}
    config = _config("--optimizer", "lion", given=given)
    assert config["optimizer"] == {"type": "Lion", "params": {"lr": 0.5, "weight_decay": 0.5}}
    given["optimizer"]["params"]["betas"] = [0.8, 0.9]
    with pytest.raises(WherryError, match=r"optimizer\.params\.betas: SGD has no such parameter; it takes lr,"):
        load(_config("--optimizer", "sgd", given=given))
    for name, kept in (("adamw", 0.25), ("sgd", 0.1)):
        config = build_config(
            parse(["--optimizer", name, "--steps", "6"]),
            10_000_000,
            bf16=False,
            given=None,
            earlier={"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}},
        )
        assert config["optimizer"]["params"]["lr"] == kept

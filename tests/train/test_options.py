"""The config of a run: defaults, the file, flags and `--set`, each over the one before it."""

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
AUTO = "auto"
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
ABSENT = object()


def _config(flags="", given=None, *, bf16=False):
    written = load(given).written if given is not None else None  # as the job reads a file
    return build_config(keep_model(parse(flags.split()), Start()), 10_000_000, bf16=bf16, given=written)


def _shape(flags):
    return shape_of(parse(flags.split()), SMALL)


def _check(flags):
    return check(parse(flags.split()))


def _at(config, key):
    for name in key.split("."):
        config = config.get(name, ABSENT)
    return config


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ("", None, {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0, "optimizer.params": ADAMW}),
        ("--lr 0.5 --optimizer adamw", None, {"optimizer": {"type": "AdamW", "params": ADAMW | {"lr": 0.5}}}),
        ("--precision fp16", {"bf16": {"enabled": True}}, {"fp16.enabled": True, "bf16.enabled": False}),
        ("--pipeline-model-parallel-size 3", None, {"gradient_accumulation_steps": 6}),
        ("--optimizer LION --weight-decay 0.2", None,
         {"optimizer": {"type": "Lion", "params": {"lr": 2e-4, "betas": [0.9, 0.99], "weight_decay": 0.2}}}),
        ("--optimizer sgd", None, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
        ("--set optimizer.type=SGD", None, {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}),
        ("--set wandb.project=mine --set gradient_clipping=0.5 --set fp16.enabled=true", None,
         {"wandb": {"project": "mine"}, "gradient_clipping": 0.5, "fp16": {"enabled": True}}),
        # A file is taken at its word.
        ("", {"train_batch_size": 32},
         {"zero_optimization": ABSENT, "gradient_clipping": ABSENT, "train_micro_batch_size_per_gpu": ABSENT,
          "optimizer.type": "AdamW"}),
        ("", {"optimizer": {"type": "SGD"}}, {"optimizer": {"type": "SGD"}, "scheduler": ABSENT}),
        ("", {"optimizer": None, "scheduler": None}, {"scheduler": None, "optimizer.params": ADAMW}),
        # Flags lie over the file, settings over both.
        ("--stage 2 --batch-size 16 --set zero_optimization.stage=0",
         {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "overlap_comm": True}},
         {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 0, "overlap_comm": True}}),
        ("--lr 0.5", {"optimizer": AUTO}, {"optimizer.params": ADAMW | {"lr": 0.5}}),
        ("--optimizer lion", {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": AUTO}}},
         {"optimizer": {"type": "Lion", "params": {"lr": 0.5, "weight_decay": 0.5}}}),
        # They write into blocks that a file leaves open.
        ("--nvme-path /d --offload-param nvme --stage 3",
         {"zero_optimization": {"offload_optimizer": None, "offload_param": AUTO}},
         {"zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/d", "max_in_cpu": 0}}),
        ("--host-memory 3GB --keep-last 2", {"wherry": None}, {"wherry.checkpoint.keep_last": 2}),
        ("--offload-optimizer cpu", {"zero_optimization": True}, {"zero_optimization.stage": 1}),
    ],
)  # fmt: skip
def test_flags_and_a_file_make_a_config(flags, given, expected):
    config = _config(flags, given)
    assert {key: _at(config, key) for key in expected} == expected
    load(config)


def test_flags_are_known_by_their_megatron_names_with_dashes_or_underscores(capsys):
    flags = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 32, "train-iters": 7}
    dashes = parse([f"--{name}={value}" for name, value in flags.items()])
    lines = parse([f"--{name.replace('-', '_')}={value}" for name, value in flags.items()])
    assert dashes == lines
    assert shape_of(dashes, SMALL) == Shape(layers=2, hidden=64, heads=4, sequence=32)
    assert dashes.steps == 7
    assert parse(["--deepspeed", "--deepspeed_config", "x.json"]) == parse(["--config", "x.json"])
    line = "--micro-batch-size 4 --global-batch-size 64 --bf16 --lr 3e-4 --weight-decay 0.01 --clip-grad 0.5"
    config = load(_config(f"{line} --lr-warmup-iters=9 --checkpoint-activations --train-iters=90"))
    assert config.batch(2) == (64, 4, 8) and config.bf16.enabled and config.gradient_clipping == 0.5
    assert {"lr": 3e-4, "weight_decay": 0.01}.items() <= config.optimizer.params.items()
    assert (config.scheduler.params["warmup_num_steps"], config.scheduler.params["total_num_steps"]) == (9, 90)
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert "  --num-layers N " in shown and "--num_layers" not in shown and "--precision {fp32,bf16,fp16}" in shown


def test_heads_follow_the_width_unless_given():
    assert [_shape(flags).heads for flags in ("--hidden-size 256", "--hidden-size 32")] == [4, 1]
    assert _shape("") == SMALL


def test_precision_is_the_machines_unless_a_flag_says_so():
    assert _config(bf16=True)["bf16"] == {"enabled": True}
    assert "bf16" not in _config("--precision fp32", bf16=True)


def test_what_a_file_leaves_open_is_filled_as_a_trainer_would():
    ours, sizes = _config(), ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    open_schedule = dict.fromkeys(("warmup_num_steps", "total_num_steps", "warmup_max_lr"), AUTO)
    given = {
        **dict.fromkeys(sizes, AUTO),
        "optimizer": {"type": "Adam", "params": {"lr": AUTO, "betas": [0.8, 0.9], "eps": AUTO}},
        "scheduler": {"type": "WarmupDecayLR", "params": open_schedule},
    }
    config = load(_config("--steps 60", given))
    assert config.batch(2) == (16, 8, 1)
    assert {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-8}.items() <= config.optimizer.params.items()
    params = config.scheduler.params
    assert (params["total_num_steps"], params["warmup_num_steps"], params["warmup_max_lr"]) == (60, 6, None)
    for open_ in ({}, {"optimizer": AUTO}, {"optimizer": {"type": AUTO}, "scheduler": {"type": AUTO}}):
        config = _config(given=open_ | {"zero_optimization.stage": 1})
        assert (config["optimizer"], config["scheduler"]) == (ours["optimizer"], ours["scheduler"])
        assert config["zero_optimization"] == {"stage": 1}
    assert load(_config(given=dict(zip(sizes, (32, AUTO), strict=False)))).batch(2) == (32, 16, 1)
    assert _config("--set optimizer=auto") == _config("--set scheduler=auto") == ours


@pytest.mark.parametrize(
    ("build", "flags", "message"),
    [
        (_check, "--no-save --save-interval 3", "--no-save: --save-interval asks for checkpoints"),
        (_shape, "--hidden-size 100 --num-attention-heads 3", "--hidden-size 100 does not divide"),
        (_shape, "--vocab-size 100", "takes at least 256"),
        (_config, "--nvme-path /d", "nothing rests on disk; add --offload-optimizer nvme"),
        (_config, "--set novalue", "expected KEY=VALUE"),
        (_config, "--set optimizer=null", "nothing is trained without one"),
        (_config, "--set gradient_clipping.x=1", r"gradient_clipping is 1\.0 in the config, not a block"),
        (_check, "--tensor-parallel 4", "--tensor-parallel 4 does not divide the 6 attention heads"),
        (_check, "--pipeline-parallel 7", "--pipeline-parallel 7: the model has 6 blocks"),
        (_check, "--tensor-parallel 2 --pipeline-parallel 2 --nproc 6", "--nproc 6 is not a multiple of 4"),
    ],
)
def test_flags_that_cannot_be_are_told(build, flags, message):
    with pytest.raises(WherryError, match=message):
        build(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "expected at least 1"),
        ("--steps 1e3", "expected a whole number, got '1e3'"),
        ("--eval-interval -3", "expected at least 0, got -3"),
        (f"--seed {2**64}", "expected less than 2**64, got 18446744073709551616"),
        ("--bf16 --precision fp32", "not allowed with argument --bf16"),
        ("--optimizer adamx", 'did you mean "Adamax"?'),
        ("--optimizer adamw_bnb_8bit", '{"state_dtype": "int8"}'),
    ],
)
def test_values_that_no_flag_takes_end_with_the_usage(capsys, flags, message):
    with pytest.raises(SystemExit) as refused:
        parse(flags.split())
    assert refused.value.code == 2 and message in capsys.readouterr().err


def test_larger_models_get_smaller_learning_rates():
    rates = [peak_lr(shape.parameters) for shape in PRESETS.values()]
    assert rates[0] == 1e-3 and rates == sorted(rates, reverse=True) and rates[-1] > 1e-5


def test_an_optimizer_by_its_name_has_parameters_that_it_takes_and_keeps_those_of_the_run_before():
    for name in ("Adam", "Adagrad", "NAdam", "RMSprop"):
        kind, params = load(_config(f"--optimizer {name}")).optimizer.build_args()
        getattr(torch.optim, kind)([torch.zeros(1)], **params)
    given = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.8, 0.9]}}}
    with pytest.raises(WherryError, match=r"optimizer\.params\.betas: SGD has no such parameter; it takes lr,"):
        load(_config("--optimizer sgd", given))
    earlier = {"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}}
    for name, kept in (("adamw", 0.25), ("sgd", 0.1)):
        options = parse(["--optimizer", name, "--steps", "6"])
        config = build_config(options, 10_000_000, bf16=False, given=None, earlier=earlier)
        assert config["optimizer"]["params"]["lr"] == kept

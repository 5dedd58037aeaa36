"""A config of Wherry's in DeepSpeed's keys only."""

import json

from wherry.cli import main
from wherry.compat.deepspeed.config import for_deepspeed
from wherry.config import load

GIVEN = {
    "$schema": "wherry.json",
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "grad_hooks": True,
        "offload_optimizer": {"device": "cpu", "buffer_size": 100000},
    },
    "aio": {"thread_count": 2},
    "activation_checkpointing": {"policy": "recompute", "every": 2, "cpu_checkpointing": True},
    "wherry": {"update_policy": "before_use"},
}


def test_only_the_keys_that_it_reads():
    tree, notes = for_deepspeed(load(GIVEN))
    assert tree == {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "aio": {"intra_op_parallelism": 2},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    assert [note.partition(":")[0] for note in notes] == [
        "zero_optimization.grad_hooks",
        "zero_optimization.offload_optimizer.buffer_size",
        "activation_checkpointing.policy",
        "activation_checkpointing.every",
        "wherry",
        "optimizer.params.lr",
    ]
    # It means the same here, but for what was left out.
    assert load(tree).placement() == load(GIVEN).placement()


def test_the_command(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"train_batch_size": 8, "wherry": {"master": "whole"}}))
    assert main(["config", "deepspeed", str(file), "--set", "zero_optimization.stage=1"]) == 0
    out = capsys.readouterr()
    written = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    assert json.loads(out.out) == written
    assert "gradient_clipping: written out" in out.err and "wherry: left out" in out.err
    file.write_text("{")
    assert main(["config", "deepspeed", str(file)]) == 2

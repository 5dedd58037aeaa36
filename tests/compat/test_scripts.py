"""Scripts written for DeepSpeed, run unchanged; where there is an oracle it is plain PyTorch.

The tutorial's script is run by tests/examples.
"""

import json

from tests.cli.programs import script
from tests.compat.scripts import MEGATRON, SURFACE


def test_a_megatron_style_launch_line(launched, tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    line = "--num-layers 2 --hidden-size 16 --checkpoint-activations --deepspeed-activation-checkpointing --deepspeed"
    path = script(tmp_path, MEGATRON)
    done = launched.launched(
        "run", "--as-deepspeed", "--local_rank_arg", "--nproc", 2, path, *line.split(),
        "--deepspeed_config", tmp_path / "ds_config.json", timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 2


def test_what_scripts_use_beside_the_loop(forks, tmp_path):
    done = forks.of(as_deepspeed=True).run(script(tmp_path, SURFACE), ranks=2, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 2

"""Every module of the alias can be imported, and what is not part of Wherry says so when it is used."""

import subprocess
import sys

from tests.cli.programs import environment

from wherry.compat.deepspeed import FOLDER

CHECK = """
import importlib, sys
import wherry.compat.deepspeed as c
c.install()
for name in sys.argv[1:]:
    importlib.import_module(name)
import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from deepspeed.utils.zero_to_fp32 import get_optim_files
class Mine(PipelineModule):
    pass
assert CPUAdamBuilder().is_compatible() and not AsyncIOBuilder().is_compatible()
for use in (MoE, Mine, AsyncIOBuilder().load, deepspeed.init_inference, get_optim_files):
    try:
        use()
    except NotImplementedError as error:
        assert "is not part of Wherry; " in str(error), error
    else:
        raise AssertionError(use)
import torch
linear, x = torch.nn.Linear(8, 6), torch.ones(2, 8)
tiled = deepspeed.zero.TiledLinear(8, 6, in_splits=2, out_splits=3, init_linear=linear)
torch.testing.assert_close(tiled(x), linear(x))
assert deepspeed.accelerator.get_accelerator().current_device_name()
deepspeed.runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_cold(int(2.8e9), int(1e8), 8)
"""


def test_every_module_can_be_imported_and_absent_parts_refuse():
    names = [
        ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__init__")
        for path in FOLDER.glob("deepspeed/**/*.py")
    ]
    assert len(names) > 50
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *names], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "2,800M parameters" in done.stdout

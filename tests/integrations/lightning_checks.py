"""A program of the tests: what the strategy refuses, and what it takes from the config and the Trainer."""

import lightning
import pytest

from wherry.errors import WherryError
from wherry.integrations.lightning import WherryPrecision, WherryStrategy

strategy = WherryStrategy(stage=2)
with pytest.raises(WherryError, match="precision '64-true': expected one of 32-true, bf16-true"):
    strategy.precision_plugin = type("Double", (WherryPrecision,), {"precision": "64-true"})("64-true")
strategy = WherryStrategy({"gradient_accumulation_steps": 4, "gradient_clipping": 1.0})
quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1}
trainer = lightning.Trainer(strategy=strategy, gradient_clip_val=1.0, **quiet)
with pytest.raises(WherryError, match=r"gradient_accumulation_steps: the config has 4, .*_grad_batches=1"):
    strategy._resolved(trainer, fitting=True)
assert strategy._resolved(trainer, fitting=False).gradient_clipping == 1.0
trainer.accumulate_grad_batches, trainer.gradient_clip_algorithm = 4, "value"
with pytest.raises(WherryError, match='gradient_clip_algorithm: expected "norm", got "value"'):
    strategy._resolved(trainer, fitting=True)
print("all of it was checked")

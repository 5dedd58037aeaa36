"""A program of the tests: what the strategy refuses, and what it takes from the config and the Trainer."""

import lightning
import pytest
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging

from wherry.errors import WherryError
from wherry.integrations.lightning import WherryPrecision, WherryStrategy, _refuse_averages

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
# A strategy that is made by hand hears what the Trainer says of precision.
for precision in ("bf16-true", "32-true"):
    strategy = WherryStrategy(stage=2)
    trainer = lightning.Trainer(strategy=strategy, precision=precision, **quiet)
    assert trainer.precision == precision and type(strategy.precision_plugin) is WherryPrecision
    assert strategy._resolved(trainer, fitting=True).bf16.enabled is (precision == "bf16-true")

assert type(lightning.Trainer(strategy="wherry_stage_2", **quiet).strategy) is WherryStrategy
trainer = lightning.Trainer(callbacks=[StochasticWeightAveraging(swa_lrs=0.1)], **quiet)
with pytest.raises(WherryError, match="StochasticWeightAveraging: it writes over the model's weights"):
    _refuse_averages(trainer)
_refuse_averages(lightning.Trainer(callbacks=[EarlyStopping("loss")], **quiet))
print("all of it was checked")

"""A program of the tests: what the strategy refuses, and what it takes from the config and the Trainer."""

import lightning
import pytest
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel

from wherry.errors import WherryError
from wherry.integrations.lightning import WherryPrecision, WherryStrategy

QUIET = {
    "logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "max_steps": 1,
    "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 1,
}  # fmt: skip

strategy = WherryStrategy(stage=2)
with pytest.raises(WherryError, match="precision '64-true': expected one of 32-true, bf16-true"):
    strategy.precision_plugin = type("Double", (WherryPrecision,), {"precision": "64-true"})("64-true")
strategy = WherryStrategy({"gradient_accumulation_steps": 4, "gradient_clipping": 1.0})
trainer = lightning.Trainer(strategy=strategy, gradient_clip_val=1.0, **QUIET)
with pytest.raises(WherryError, match=r"gradient_accumulation_steps: the config has 4, .*_grad_batches=1"):
    trainer.fit(BoringModel())
trainer.validate(BoringModel(), verbose=False)
assert strategy.engine.config["gradient_clipping"] == 1.0
strategy = WherryStrategy({"gradient_accumulation_steps": 4})
with pytest.raises(WherryError, match='gradient_clip_algorithm: expected "norm", got "value"'):
    lightning.Trainer(
        strategy=strategy, accumulate_grad_batches=4, gradient_clip_val=1.0, gradient_clip_algorithm="value", **QUIET
    ).fit(BoringModel())
# A strategy that is made by hand hears what the Trainer says of precision.
for precision in ("bf16-true", "32-true"):
    strategy = WherryStrategy(stage=2)
    trainer = lightning.Trainer(strategy=strategy, precision=precision, **QUIET)
    assert trainer.precision == precision and type(strategy.precision_plugin) is WherryPrecision
    trainer.fit(BoringModel())
    assert strategy.engine.config["bf16"]["enabled"] is (precision == "bf16-true")

assert type(lightning.Trainer(strategy="wherry_stage_2", **QUIET).strategy) is WherryStrategy
averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
disk = {"device": "nvme", "nvme_path": ".", "max_in_cpu": 0}
on_disk = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": disk}}
with pytest.raises(WherryError, match="StochasticWeightAveraging: it writes over the model's weights"):
    lightning.Trainer(strategy=WherryStrategy(on_disk), callbacks=[averaging], **QUIET).fit(BoringModel())
stopping = EarlyStopping("loss", strict=False)
lightning.Trainer(strategy=WherryStrategy(on_disk), callbacks=[stopping], **QUIET).fit(BoringModel())
print("all of it was checked")

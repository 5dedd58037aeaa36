"""Blocks of a config that scripts make and read by DeepSpeed's classes, keys without effect among them."""

import pytest
from pydantic import ValidationError

from wherry.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedZeroConfig


def test_keys_without_effect_are_attributes_with_what_was_given_or_the_default():
    made = DeepSpeedZeroConfig(stage=3, overlap_comm=True, offload_optimizer={"device": "cpu", "pipeline_read": True})
    assert (made.stage, made.overlap_comm, made.contiguous_gradients) == (3, True, True)
    assert (made.offload_optimizer.device, made.offload_optimizer.pipeline_read) == ("cpu", True)
    written = {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pipeline_write": True}}
    zero = DeepSpeedConfig({"train_batch_size": 2, "zero_optimization": written}).zero_config
    assert (zero.stage, zero.overlap_comm, zero.offload_optimizer.pipeline_write) == (3, True, True)


def test_elastic_checkpoints_are_deprecated_at_stage_3(caplog):
    DeepSpeedZeroConfig(stage=2, elastic_checkpoint=True)
    assert not caplog.text
    DeepSpeedZeroConfig(stage=3, elastic_checkpoint=True)
    assert "ZeRO-3 elastic checkpointing is deprecated" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"), [({"overlapcomm": True}, "no such key"), ({"overlap_comm": "x"}, "expected true or false")]
)
def test_a_key_that_is_none_or_of_another_type_is_refused(given, said):
    with pytest.raises(ValidationError, match=said):
        DeepSpeedZeroConfig(**given)
    with pytest.raises(AttributeError, match="nothing"):
        _ = DeepSpeedZeroConfig().nothing

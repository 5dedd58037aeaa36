from dataclasses import replace

import pytest
import torch

from wherry.plan.machines import known
from wherry.train.model import GPT, GPTConfig
from wherry.train.presets import GPT2, LADDER, PRESETS, Shape, choose, name_of

TINY = GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=256)


def _ids(rows=3, length=16):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def _model(config=TINY):
    torch.manual_seed(0)
    return GPT(config)


def test_loss_is_the_cross_entropy_of_the_logits_and_the_head_is_tied():
    model, ids = _model(), _ids()
    logits, loss = model(ids), model(ids, ids.roll(-1, 1))
    assert logits.shape == (3, 16, 256)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
    torch.testing.assert_close(loss, expected)
    assert loss.item() == pytest.approx(5.545, abs=0.1)
    assert model.head.weight is model.tokens.weight
    shape = Shape(layers=2, hidden=32, heads=2, sequence=16)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    with pytest.raises(ValueError, match="17 tokens long and the model has 16 positions"):
        model(_ids(length=17))


def test_recomputation_changes_no_gradient():
    ids = _ids()
    plain, recomputed = _model(), _model(GPTConfig(2, 32, 2, 16, 256, checkpoint_activations=True))
    for model in (plain, recomputed):
        model(ids, ids).backward()
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_presets_have_the_size_that_their_names_tell():
    for name, parameters in {"gpt2-10m": 10e6, "gpt2-124m": 124_439_808, "gpt2-10b": 10e9}.items():
        assert PRESETS[name].parameters == pytest.approx(parameters, rel=0.1)
        assert name_of(PRESETS[name]) == name
    assert PRESETS["gpt2-124m"].parameters == 124_439_808  # GPT-2's own count
    assert PRESETS["gpt2-124m"].vocabulary == GPT2 and PRESETS["gpt2-124m"].size == "124.4M"


def test_auto_grows_with_the_machine():
    def pick(memory, flops):
        machine = replace(known("4090"), gpu_memory=int(memory), matrix=flops)
        return choose(machine, ranks=1, micro_batch=8, itemsize=2)[0].parameters

    assert pick(2e9, 1e11) == LADDER[0].parameters
    assert pick(64e9, 1e11) == LADDER[0].parameters  # memory alone does not make a machine fast
    assert pick(1e9, 1e15) == LADDER[0].parameters  # nor does speed make room
    assert pick(24e9, 6e13) == PRESETS["gpt2-124m"].parameters
    assert pick(640e9, 1e15) == PRESETS["gpt2-10b"].parameters
    four = choose(replace(known("h100"), gpu_memory=16 * 10**9, matrix=1e15), ranks=4, micro_batch=2, itemsize=2)[0]
    assert four.parameters == pick(64e9, 4e15)

"""Cases of references that outlive an engine, are pickled, or are used out of turn; each is used in every way.

`main` runs all cases on one placement, and prints the name of each before it: the last name is the one that crashed.
"""

from __future__ import annotations

import copy
import faulthandler
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from tests.engine.harness import make_model, on_ranks, token_batch
from tests.engine.harness import train as train_steps
from tests.tiers.rows import ROWS
from torch.utils import dlpack

import wherry
from wherry.engine import Engine

PLAIN = {f"stage {stage}": (stage, "none", "none") for stage in range(4)}
# Methods that end an engine, or take long.
LEFT_OUT = {"close", "compile", "destroy", "unwrap"}


def train(engine: Engine, step: int) -> float:
    return train_steps(engine, step + 1, step)[0]


def train_as_ever(engine: Engine, *steps: int) -> None:
    for step in steps:
        loss = train(engine, step)
        assert loss == LOSSES.setdefault((engine.comm.rank, step), loss)


def forms(tensors: Any) -> list[Any]:
    """Make every object that shares a tensor's memory."""
    return [form for tensor in tensors for form in _forms(tensor.detach())]


def _forms(tensor: torch.Tensor) -> Iterator[Any]:
    yield from (tensor, tensor[:1], tensor.untyped_storage(), tensor.numpy(), memoryview(tensor.numpy()))
    yield dlpack.from_dlpack(dlpack.to_dlpack(tensor))


def use(kept: list[Any], *, write: bool = False) -> None:
    for form in kept:
        if isinstance(form, torch.Tensor):
            form = form.detach()
            float((form + 1).sum()), str(form), form.clone(), form.numpy().tobytes()
        elif isinstance(form, torch.UntypedStorage):
            form.clone()
        else:
            np.asarray(form).sum()
    for form in kept if write else ():
        if isinstance(form, torch.Tensor) and 0 not in form.stride():
            form.fill_(1.0)


def refused(call: Callable[[], object]) -> str:
    """Return the message of a call that must raise."""
    try:
        call()
    except wherry.WherryError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def nothing(engine: Engine) -> None:
    train_as_ever(engine, 1, 2)


def kept_from_gathered(engine: Engine) -> None:
    module = engine.module
    with wherry.gathered(module):
        kept = forms(module.parameters())
        values = [parameter.detach().clone() for parameter in module.parameters()]
        copied = forms(module.parameters())
    whole = engine.zero_optimization_stage() < 3
    train_as_ever(engine, 1, 2)
    use([*kept, *copied])
    parts = len(kept) // len(values)
    # Whole weights are not copied by gathered, and have been trained since.
    assert whole or all(map(torch.equal, kept[::parts], values))
    engine.close()
    use(kept, write=True)


def kept_from_generation(engine: Engine) -> None:
    with wherry.gathered_for_generation(engine):
        kept = forms(engine.module.parameters())
    train(engine, 1)
    use(kept, write=True)


def kept_by_hooks(engine: Engine) -> None:
    kept: list[Any] = []

    def keep(module: torch.nn.Module, *_: Any) -> None:
        kept.extend(forms(module.parameters(recurse=False)))

    for module in engine.module.modules():
        module.register_forward_hook(keep)
        module.register_forward_pre_hook(keep)
    for step in (1, 2):
        train_as_ever(engine, step)
        use(kept)
    engine.close()
    use(kept, write=True)


def written_after_release(engine: Engine) -> None:
    kept: list[Any] = []

    def keep(module: torch.nn.Module, *_: Any) -> None:
        kept.extend(parameter.data[:1] for parameter in module.parameters(recurse=False))

    handles = [module.register_forward_hook(keep) for module in engine.module.modules()]
    train(engine, 1)
    for handle in handles:
        handle.remove()
    use(kept, write=True)
    assert np.isfinite(train(engine, 2))


def kept_gradients(engine: Engine) -> None:
    kept: list[torch.Tensor] = []
    for parameter in engine.module.parameters():
        parameter.register_hook(kept.append)
        parameter.register_post_accumulate_grad_hook(
            lambda p: kept.append(p.grad) if p.grad is not None else None  # type: ignore[arg-type]
        )
    engine.backward(engine(*token_batch(1, 0, engine.comm.rank)))
    kept += [p.grad for p in engine.module.parameters() if p.grad is not None]
    for name in dict(engine.module.named_parameters()):
        kept += [engine.gradients(name), engine.states.local_gradient(name)]
    all_forms = forms(kept)
    engine.step()
    use(all_forms)
    train(engine, 2)
    engine.close()
    use(all_forms, write=True)


def kept_states(engine: Engine) -> None:
    states = [*engine.module.state_dict().values(), *engine.state_dict().values()]
    for name in dict(engine.module.named_parameters()):
        for key in ("master", "exp_avg", "exp_avg_sq"):
            states += [engine.states.full(name, key), engine.states.local(name, key)]
    states += [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    kept, released = forms(states), forms(engine.module.parameters())
    released += [parameter.data for parameter in engine.module.parameters()]
    train(engine, 1)
    use([*kept, *released])
    engine.close()
    use(kept, write=True)
    use([*released, *forms(engine.module.parameters())])


def sent_to_other_processes(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        ForkingPickler.dumps(parameter)
    train_as_ever(engine, 1)
    engine.module.share_memory()
    train_as_ever(engine, 2)


def copied_and_saved(engine: Engine) -> None:
    ways: list[Callable[[Any], object]] = [copy.deepcopy, pickle.dumps, lambda what: torch.save(what, io.BytesIO())]
    for way in ways:
        for what in (engine, engine.module, engine.optimizer, list(engine.module.parameters())):
            try:
                way(what)
            except wherry.WherryError:
                continue
    train_as_ever(engine, 1)


def replaced(engine: Engine) -> None:
    """Replace the data of parameters: an error, but for partitioned weights, which the next gather replaces."""
    weight = engine.module.blocks[0].mix.weight
    if engine.zero_optimization_stage() == 3 and weight.isnan().any():
        torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach().clone()))
        train(engine, 1)
        return
    for change in (
        lambda: setattr(weight, "data", weight.detach().clone()),
        lambda: torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach().clone())),
    ):
        engine.settle()
        before = weight.data
        change()
        assert "has been given other data" in refused(lambda: engine.save_checkpoint("nowhere"))
        weight.data = before
        engine.zero_grad()


def forked(engine: Engine) -> None:
    if engine.comm.rank:
        return
    engine.settle()
    child = os.fork()
    if not child:
        faulthandler.enable()
        status = 1
        try:
            use(forms(engine.module.parameters()))
            assert "is its fork" in refused(lambda: train(engine, 1))
            engine.close()
            use(forms(engine.module.parameters()))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def called_out_of_turn(engine: Engine) -> None:
    _call_everything(engine)
    engine.reload_states()
    engine.zero_grad()
    train(engine, 1)


def closed(engine: Engine) -> None:
    optimizer, module = engine.optimizer, engine.module
    with wherry.gathered(module):
        kept = forms(module.parameters())
    engine.close()
    use([*kept, *forms(module.parameters())])
    _call_everything(engine)
    _call_everything(optimizer)
    module(*token_batch(0, 0, 0))


def away(engine: Engine) -> None:
    kept = forms(engine.module.parameters())
    engine.offload_states()
    use([parameter.data for parameter in engine.module.parameters()])
    engine.module(*token_batch(0, 0, 0)) if engine.comm.size == 1 else None
    engine.reload_states()
    train_as_ever(engine, 1)
    use(kept)


def _call_everything(what: Any) -> None:
    """Call all public methods without arguments. Most raise."""
    for name in sorted(set(dir(type(what))) - LEFT_OUT):
        if name.startswith("_"):
            continue
        try:
            value = getattr(what, name)
            if callable(value):
                value()
        except Exception:  # only a crash of the process is a failure
            continue


CASES = [
    nothing, kept_from_gathered, kept_from_generation, kept_by_hooks, written_after_release, kept_gradients,
    kept_states, sent_to_other_processes, copied_and_saved, replaced, forked, called_out_of_turn, closed, away,
]  # fmt: skip
# By rank and step, of undisturbed training.
LOSSES: dict[tuple[int, int], float] = {}


def main() -> None:
    row, folder = sys.argv[1:]
    stage, optimizer, parameters = {**ROWS, **PLAIN}[row]
    disk = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}
    zero: dict[str, Any] = {}
    if optimizer != "none":
        zero["offload_optimizer"] = disk if optimizer == "nvme" else {"device": optimizer}
    if parameters != "none":
        zero["offload_param"] = {**disk, "max_in_cpu": 0} if parameters == "nvme" else {"device": parameters}
    config = {"zero_optimization": zero, "wherry": {"update_policy": "at_step"}}
    ranks = 1 if stage == 0 or parameters == "nvme" else 2
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.set_printoptions(threshold=0, edgeitems=1)  # `use` reads every element in quicker ways
    model = make_model()

    def run(case: Callable[[Engine], None]) -> None:
        def body(engine: Engine) -> None:
            with engine:
                train(engine, 0)
                case(engine)

        on_ranks(body, ranks=ranks, stage=stage, model=model, config=config)

    for case in CASES:
        print(case.__name__, flush=True)
        run(case)

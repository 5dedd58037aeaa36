"""What goes into a checkpoint: this rank's pieces of parameters and their states, and values beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from wherry.checkpoint.errors import CheckpointError
from wherry.checkpoint.format import WEIGHT, Piece, PutTensor, Scalar, encode
from wherry.checkpoint.reshard import Run
from wherry.checkpoint.session import Session, extra_states
from wherry.native import Blocks8
from wherry.native.segment import BLOCK
from wherry.sharding.unit import Flat
from wherry.update.parameter_states import own_shape
from wherry.update.record import State


def state_pieces(session: Session, flat: Flat, share: tuple[int, int]) -> Iterator[Piece | Scalar]:
    """Masters and moments of a share of this rank's shard; each is valid until the next.

    A weight with an fp32 master is stored as its master alone, from which the working weight follows.
    """
    if flat not in session.states or share[0] == share[1]:
        return
    with session.states[flat].opened() as segments:
        for span, values in zip(session.spans(flat), segments, strict=True):
            slot = flat.layout.slots[span.slot]
            found = session.run(flat, slot, *share) if session.writes(slot) else None
            if found is not None:
                run, at = found
                name, numel = session.whole_name(slot.name), span.stop - span.start
                yield from _segment_pieces(name, run, at - span.start, numel, values)


def _segment_pieces(name: str, run: Run, first: int, numel: int, values: dict[str, State]) -> Iterator[Piece | Scalar]:
    """A run of a segment of `numel` elements. Who has a parameter's first has states that are not of elements whole."""
    last = first + run.numel
    for key, value in values.items():
        state = WEIGHT if key == "master" else key
        if isinstance(value, Blocks8):
            scales = value.scales[first // BLOCK : -(-last // BLOCK)]
            yield Piece(name, state, run, value.codes[first:last], scales, first % BLOCK)
        elif is_scalar(value):
            yield Scalar(name, key, float(value))
        elif (own := own_shape(value, numel)) is not None:
            if run.start == 0:
                yield Piece(name, state, Run(run.box, 0, run.box.numel), value.reshape(-1), own=own)
        else:
            yield Piece(name, state, run, value[first:last])


def is_scalar(value: State) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def weight_pieces(session: Session, flat: Flat, share: tuple[int, int]) -> Iterator[Piece]:
    """The weights without a master of a share of this rank's shard; each is valid until the next."""
    slots = filter(session.writes, session.without_state(flat))
    runs = [(slot.name, *found) for slot in slots if (found := session.run(flat, slot, *share)) is not None]
    if not runs:
        return
    with flat.opened() as shard:
        for name, run, at in runs:
            yield Piece(session.whole_name(name), WEIGHT, run, shard[at : at + run.numel])


# Values.


@dataclass
class Values:
    """The values of the run (on rank 0) and of this rank, encoded, and the tensors in them by name."""

    engine: dict[str, Any] = field(default_factory=dict)
    rank: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def copied(self) -> Values:
        return Values(self.engine, self.rank, {name: t.to("cpu", copy=True) for name, t in self.tensors.items()})


def encode_values(
    session: Session, client_state: dict[str, Any], steps: tuple[int, dict[str, int]], frozen_excluded: bool
) -> Values:
    """`steps`: updates made so far, and by parameter. Raises `CheckpointError`, with the place, for what cannot be
    stored."""
    if not isinstance(client_state, dict):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}, expected a dict")
    found = Values()

    def put(tensor: torch.Tensor) -> str:
        name = f"value:{session.comm.rank}:{len(found.tensors)}"
        found.tensors[name] = tensor
        return name

    found.rank["rng"] = encode(random_state(session.device), "random state", put)
    loader = getattr(session.dataloader, "state_dict", None)
    if loader is not None:
        found.rank["data"] = encode(loader(), "training_dataloader.state_dict()", put)
    for name, objects in _objects(session):
        found.rank.setdefault("objects", {})[name] = encode(objects, f"the optimizer's state of {name}", put)
    if session.comm.rank:
        return found
    engine = found.engine
    engine.update({key: encode(value, key, put) for key, value in asdict(session.counts).items()})
    engine["window"] = {"backwards": 0}  # no sums are in it: readers of this version of the format ask
    engine["frozen_excluded"] = frozen_excluded
    engine["loss_scale"] = session.scaler.state_dict()
    engine["client_state"] = encode(dict(client_state), "client_state", put)
    if session.lr_scheduler is not None:
        engine["lr_scheduler"] = encode(session.lr_scheduler.state_dict(), "lr_scheduler.state_dict()", put)
    extra = {key: module.get_extra_state() for key, module in extra_states(session.module).items()}
    engine["extra_state"] = encode(extra, "extra state of the model", put)
    if session.optimizer is not None:
        engine["optimizer"] = {"steps": steps[0], "parameter_steps": steps[1], **_optimizer(session, put)}
    engine.update(_model_files(session.module))
    return found


def _objects(session: Session) -> Iterator[tuple[str, dict[str, Any]]]:
    """By parameter, what the optimizer keeps of it that is no tensor."""
    for flat, state in session.states.items():
        for span, objects in zip(session.spans(flat), state.objects(), strict=True):
            slot = flat.layout.slots[span.slot]
            if objects and session.writes(slot):
                yield session.whole_name(slot.name), objects


def _optimizer(session: Session, put: PutTensor) -> dict[str, Any]:
    assert session.optimizer is not None
    members: dict[int, set[str]] = {}
    for flat in session.states:
        for slot in flat.layout.slots:
            members.setdefault(slot.group, set()).add(session.whole_name(slot.name))
    groups = []
    for index, group in enumerate(session.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(
            {
                "options": encode(options, f"optimizer.param_groups[{index}]", put),
                "parameters": sorted(members.get(index, ())),
            }
        )
    return {"type": type(session.optimizer.instance).__name__, "groups": groups}


def _model_files(module: torch.nn.Module) -> dict[str, Any]:
    """The configs that a model of the transformers library is built from again, for an export."""
    found = {}
    for key, attribute in (("model_config", "config"), ("generation_config", "generation_config")):
        to_json = getattr(getattr(module, attribute, None), "to_json_string", None)
        if to_json is not None:
            found[key] = to_json()
    return found


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that a training program is likely to use."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, np.array(numbers, dtype=np.int64), gauss],
        "numpy": list(np.random.get_state()),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(int(number) for number in numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def spread_random_state(seed: int, device: torch.device) -> None:
    """Generators of a rank that the saved run did not have, from a number that all ranks know and its own."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)

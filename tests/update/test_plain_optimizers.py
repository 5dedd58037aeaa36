"""Muon and Lamb of wherry.optim by themselves, in plain PyTorch."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from tests.engine.harness import make_model
from torch import nn

from wherry.errors import WherryError
from wherry.optim import Lamb, Muon, hidden_matrices

SHAPES = ((6, 4), (5,), (4, 9), (2, 3, 4), ())


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(*lists: list[nn.Parameter], step: int) -> None:
    """The same to each list; in every step another parameter has none."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, alike in enumerate(zip(*lists, strict=True)):
        grad = torch.randn(alike[0].shape, generator=generator)
        for p in alike:
            p.grad = None if index == step % len(SHAPES) else grad.to(p.dtype)


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# --- Muon ---

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": False, "ns_steps": 4, "adjust_lr_fn": "original"}
ADAMW = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05}


def muon(params: Any) -> Muon:
    return Muon(params, **MUON, adamw_lr=0.01, betas=(0.8, 0.99), adamw_eps=1e-6, adamw_weight_decay=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_is_torchs_muon_beside_torchs_adamw(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    a = muon(ours)
    matrices, rest = [p for p in theirs if p.dim() == 2], [p for p in theirs if p.dim() != 2]
    b, c = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)
    for step in range(10):
        set_gradients(ours, theirs, step=step)
        if step == 5:  # a new one goes on from what it has saved, and so does a copy
            saved = pickle.loads(pickle.dumps(a.state_dict()))
            a = muon(ours)
            a.load_state_dict(saved)
        for optimizer in (a, b, c):
            optimizer.step()
    same(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        other = (b if p.dim() == 2 else c).state[q]
        assert a.state[p].keys() == other.keys()
        same(a.state[p].values(), other.values())
    for group, other in zip(a.param_groups, [*b.param_groups, *c.param_groups], strict=True):
        assert {name: group[name] for name in group if name not in ("params", "use_muon")} == {
            name: other[name] for name in other if name != "params"
        }


def test_a_copy_of_muon_goes_on_by_itself() -> None:
    model, ids = make_model(), torch.arange(6).view(1, 6)
    optimizer = Muon.for_model(model, lr=0.1)
    model_too, copied = copy.deepcopy((model, optimizer))
    for each, its in ((model, optimizer), (model_too, copied)):
        for _ in range(2):
            each.zero_grad()
            each(ids, ids).backward()
            its.step()
    same(model.parameters(), model_too.parameters())


def test_groups_choose_and_are_cut_in_two() -> None:
    one, other, vector, marked = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (3, 2), (2,), (4, 2)))
    marked.use_muon = False
    groups = [
        {"params": [("one", one), ("vector", vector)], "lr": 0.5, "betas": (0.5, 0.5), "momentum": 0.3, "own": 1},
        {"params": iter([("other", other)]), "use_muon": False, "eps": 1e-4},
        {"params": [("marked", marked)], "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, lr=0.1, adamw_lr=0.2)
    found = [(g["param_names"], g["use_muon"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [
        (["one"], True, 0.5, 0.1),
        (["vector"], False, 0.5, 0.1),
        (["other"], False, 0.2, 0.1),
        (["marked"], False, 0.2, 0.0),
    ]
    first, second, third, _ = optimizer.param_groups
    assert (first["momentum"], first["own"], "betas" in first) == (0.3, 1, False)
    assert (second["betas"], second["own"], "momentum" in second) == ((0.5, 0.5), 1, False)
    assert (first["eps"], second["eps"], third["eps"]) == (1e-7, 1e-8, 1e-4)
    assert Muon([{"params": one, "use_muon": True}]).param_groups[0]["params"] == [one]
    (still,) = Muon([vector], lr=0.1, adamw_lr=0.0, adamw_weight_decay=0.0).param_groups
    assert (still["lr"], still["weight_decay"]) == (0.0, 0.0)


class Untied(nn.Module):
    """A head of its own, behind other layers that are outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.project = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 7)
        self.value = nn.Linear(4, 1)


class Named(Untied):
    """One that names its head as those of Transformers do."""

    def get_output_embeddings(self) -> nn.Module:
        return self.head


BLOCKS = [f"blocks.{block}.{layer}.weight" for block in range(2) for layer in range(2)]


def names_of_hidden(model: nn.Module) -> list[str]:
    hidden = set(hidden_matrices(model))
    return [name for name, parameter in model.named_parameters() if parameter in hidden]


def test_the_hidden_matrices_of_a_model() -> None:
    tied = [f"blocks.{block}.{layer}.weight" for block in range(3) for layer in ("mix", "up", "down")]
    assert names_of_hidden(make_model()) == tied
    assert names_of_hidden(Untied()) == ["project.weight", *BLOCKS]
    assert names_of_hidden(Named()) == ["project.weight", *BLOCKS, "value.weight"]
    assert names_of_hidden(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))) == ["0.weight"]
    marked = Untied()
    marked.project.weight.use_muon = False
    marked.value.weight.use_muon = True
    assert names_of_hidden(marked) == [*BLOCKS, "value.weight"]


def test_muon_for_a_model_takes_what_is_trained_or_given() -> None:
    model = Named()
    model.value.requires_grad_(False)
    optimizer = Muon.for_model(model, lr=0.5)
    names = {p: name for name, p in model.named_parameters()}
    by_muon, rest = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert by_muon == ["project.weight", *BLOCKS]
    assert {"embed.weight", "head.weight", "head.bias"} < set(rest) and "value.weight" not in rest


# --- Lamb ---


def lamb_step(p: Any, grads: Any, *, lr: float, betas: Any, eps: float, decay: float, inside: bool, corrected: bool):
    """Several steps as the paper has them, in double precision."""
    p, mean, square = p.double(), torch.zeros_like(p).double(), torch.zeros_like(p).double()
    for count, grad in enumerate(grads, 1):
        mean = betas[0] * mean + (1 - betas[0]) * grad.double()
        square = betas[1] * square + (1 - betas[1]) * grad.double() ** 2
        root = (square + eps).sqrt() if inside else square.sqrt() + eps
        direction = mean / root + decay * p
        ratio = min(max(float(p.norm() / direction.norm()), 0.01), 10.0) if p.norm() and direction.norm() else 1.0
        size = lr * math.sqrt(1 - betas[1] ** count) / (1 - betas[0] ** count) if corrected else lr
        p = p - size * ratio * direction
    return p


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_lamb_is_as_published(inside: bool, corrected: bool) -> None:
    values = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3}
    ours, begun = parameters(), [p.detach().clone() for p in parameters()]
    optimizer = Lamb(ours, **values, weight_decay=0.1, eps_inside_sqrt=inside, bias_correction=corrected)
    seen: list[list[torch.Tensor]] = [[] for _ in SHAPES]
    for step in range(7):
        set_gradients(ours, step=step)
        for grads, p in zip(seen, ours, strict=True):
            grads += [p.grad] if p.grad is not None else []
        if step == 4:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = Lamb(ours)
            optimizer.load_state_dict(saved)
        optimizer.step()
    for p, first, grads in zip(ours, begun, seen, strict=True):
        expected = lamb_step(first, grads, **values, decay=0.1, inside=inside, corrected=corrected)
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert float(optimizer.state[p]["step"]) == len(grads)


@pytest.mark.parametrize(
    ("weight", "grad", "moved"),
    [
        (0.0, 1.0, 0.1),  # no weights: the ratio is 1
        (3.0, 0.0, 0.0),  # nor is there one of no step
        (3.0, 1.0, 0.3),
        (1000.0, 1.0, 1.0),  # at most max_coeff
        (1e-3, 1.0, 0.001),  # and at least min_coeff
    ],
)
def test_the_trust_ratio_of_lamb(weight: float, grad: float, moved: float) -> None:
    p = nn.Parameter(torch.full((4,), weight))
    p.grad = torch.full((4,), grad)
    Lamb([p], lr=0.1, betas=(0, 0), eps=1e-12).step()
    torch.testing.assert_close(p.detach(), torch.full((4,), weight - moved))


# --- Mistakes ---


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        (Muon, {"lr": -1}, "Muon: lr=-1, expected 0 or more"),
        (Muon, {"adamw_lr": math.nan}, "Muon: adamw_lr=nan"),
        (Muon, {"momentum": None}, "Muon: momentum=None"),
        (Muon, {"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\), expected two numbers from 0 to below 1"),
        (Muon, {"ns_coefficients": (1, 2)}, "ns_coefficients=.*three numbers"),
        (Muon, {"ns_steps": 100}, "ns_steps=100, expected an integer from 1 to 99"),
        (Muon, {"adjust_lr_fn": "match"}, "adjust_lr_fn='match', expected .*match_rms_adamw"),
        (Lamb, {"eps": -1}, "Lamb: eps=-1, expected 0 or more"),
        (Lamb, {"betas": 0.9}, "Lamb: betas=0.9, expected two numbers"),
        (Lamb, {"min_coeff": 11}, "min_coeff=11 is above max_coeff=10.0"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(kind: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(WherryError, match=says):
        kind(parameters(), **arguments)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"use_muon": True}, r"group 0: Muon updates matrices, got a parameter of shape \(2, 3, 4\).*use_muon=False"),
        ({"use_muon": True, "betas": (0, 0)}, "use_muon=True, and betas is an option of AdamW's groups; .*=False"),
        ({"use_muon": False, "momentum": 0}, "use_muon=False, and momentum is an option of Muon's groups"),
        ({"use_muon": False, "lr": -1}, "group 0: lr=-1"),
        ({"use_muon": False, "amsgrad": True}, "amsgrad=True is not offered"),
    ],
)
def test_muon_names_the_group_that_it_cannot_use(group: dict[str, Any], says: str) -> None:
    with pytest.raises(WherryError, match=says):
        Muon([{"params": [nn.Parameter(torch.ones(2, 3, 4))], **group}])


def test_lamb_refuses_a_sparse_gradient() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(WherryError, match=r"shape \(4, 2\) has a sparse gradient"):
        Lamb(embedding.parameters()).step()

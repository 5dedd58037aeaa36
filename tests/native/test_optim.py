"""The host optimizers as torch optimizers."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch

from wherry import native
from wherry.errors import WherryError
from wherry.optim import CPUAdagrad, CPUAdam, CPULion
from wherry.update.optimizer import Lion

from .cases import GRADS

# Ours, theirs, and options of both.
PAIRS = {
    "adamw": (CPUAdam, torch.optim.AdamW, {"betas": (0.8, 0.99)}),
    "adam": (partial(CPUAdam, adamw_mode=False), torch.optim.Adam, {"maximize": True}),
    "adagrad": (CPUAdagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "lion": (CPULion, Lion, {"betas": (0.8, 0.95), "maximize": True}),
}


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((7, 5), (11,), (), (2, 3, 4))]


def set_grads(*lists, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in zip(*lists, strict=True):
        grad = torch.randn(group[0].shape, generator=generator).to(group[0].dtype)
        for p in group:
            p.grad = grad.to(p.dtype)


def assert_near(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_go_to_torch_and_back(name):
    make_ours, make_theirs = (partial(kind, lr=1e-2, weight_decay=0.1, **PAIRS[name][2]) for kind in PAIRS[name][:2])
    ours, theirs = parameters(), parameters()
    a, b = make_ours(ours), make_theirs(theirs)
    for seed in range(5):
        set_grads(ours, theirs, seed=seed)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert set(a.state[p]) == set(b.state[q])
    crossed_a, crossed_b = make_ours(ours), make_theirs(theirs)
    crossed_a.load_state_dict(copy.deepcopy(b.state_dict()))
    crossed_b.load_state_dict(copy.deepcopy(a.state_dict()))
    for seed in range(5, 10):
        set_grads(ours, theirs, seed=seed)
        crossed_a.step()
        crossed_b.step()
    assert_near(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_masters_that_are_saved_without_rounding(dtype):
    low, full = parameters(dtype), [torch.nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    a, b, moments = CPUAdam(low, lr=1e-4), CPUAdam(full, lr=1e-4), []
    for seed in range(60):
        set_grads(low, full, seed=seed % 3)
        if seed == 30:
            saved = copy.deepcopy(a.state_dict())
            low = [torch.nn.Parameter(p.detach().clone()) for p in low]
            a = CPUAdam(low, lr=1e-4)
            a.register_load_state_dict_post_hook(lambda o: moments.extend(s["exp_avg"] for s in o.state.values()))
            a.load_state_dict(saved)
            assert all(torch.equal(m, b.state[q]["exp_avg"]) for m, q in zip(moments, full, strict=True))
            set_grads(low, full, seed=seed)
        a.step()
        b.step()
    for p, q in zip(low, full, strict=True):
        if dtype is torch.float16:
            assert torch.equal(a.state[p]["master"], q.detach())
            assert torch.equal(p.detach(), q.detach().half())
        else:
            master = torch.empty(p.shape)
            native.join(p.detach(), a.state[p]["low"], master)
            assert torch.equal(master, q.detach())


@pytest.mark.parametrize("order", ["weights first", "weights last", "written", "swapped"])
def test_half_precision_weights_from_outside_win_over_the_master(order):
    p = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.float16))
    optimizer = CPUAdam([p], lr=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["master"][0] += 1e-4  # below a half of what fp16 tells apart: kept
    with torch.no_grad():
        if order == "weights first":
            p[1:] = 3.0
        optimizer.load_state_dict(saved)
        if order == "weights last":
            p[1:] = 3.0
    if order in ("written", "swapped"):
        optimizer.step()
    if order == "written":
        with torch.no_grad():
            p[1:] = 3.0
    elif order == "swapped":
        p.data = torch.tensor([2.0, 3.0, 3.0, 3.0], dtype=torch.float16)
    optimizer.step()
    assert p.tolist() == [2.0, 3.0, 3.0, 3.0]
    assert optimizer.state[p]["master"].tolist() == pytest.approx([2.0001, 3.0, 3.0, 3.0], abs=1e-6)


def test_groups_missing_gradients_and_late_parameters():
    ours, theirs = parameters(), parameters()

    def groups(p):
        return [{"params": p[:2], "lr": 1e-1}, {"params": p[2:3], "weight_decay": 0.5}]

    a, b = CPUAdam(groups(ours)), torch.optim.AdamW(groups(theirs), weight_decay=0.0)
    for seed in range(10):
        set_grads(ours, theirs, seed=seed)
        if seed % 3:
            ours[1].grad = theirs[1].grad = None
        if seed == 5:
            for optimizer, p in ((a, ours), (b, theirs)):
                optimizer.add_param_group({"params": [p[3]], "lr": 1e-2})
        for group_a, group_b in zip(a.param_groups, b.param_groups, strict=True):
            group_a["lr"] *= 0.9
            group_b["lr"] *= 0.9
        a.step()
        b.step()
    assert_near(ours, theirs)
    assert {int(a.state[p]["step"]) for p in ours} == {10, 4, 5}


def test_autograd_notices_the_update():
    p = torch.nn.Parameter(torch.ones(4))
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    CPULion([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_and_pickles_work():
    ours = parameters()
    with native.Pool(threads=1) as pool:
        optimizer = CPUAdam(ours, lr=1e-2, pool=pool)
        set_grads(ours, seed=0)
        optimizer.step()
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            copies = [p for group in other.param_groups for p in group["params"]]
            set_grads(copies, seed=1)
            other.step()
        set_grads(ours, seed=1)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, copies, strict=True))


def test_any_dense_layout_and_dtype_together():
    """Channels last, transposed, empty, of no dimension, in three dtypes: the bits of contiguous ones."""
    shapes = ((2, 3, 4, 5), (7, 5), (0, 3), (), (3, 1, 2))
    torch.manual_seed(1)
    plain = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes for dtype in GRADS]

    def laid(t):
        values = t.detach().clone()
        if t.dim() == 4:
            return values.to(memory_format=torch.channels_last)
        return values.t().contiguous().t() if t.dim() == 2 else values

    odd = [torch.nn.Parameter(laid(p)) for p in plain]
    assert sum(not p.is_contiguous() for p in odd) == 6
    a, b = CPUAdam(plain, lr=1e-2, weight_decay=0.1), CPUAdam(odd, lr=1e-2, weight_decay=0.1)
    for seed in range(5):
        set_grads(plain, odd, seed=seed)
        if seed % 2:  # gradients in the layout of their parameters, or in another
            for p in odd:
                p.grad = laid(p.grad)
        if seed == 2:  # contiguous state, for these layouts
            b = CPUAdam(odd, lr=1e-2, weight_decay=0.1)
            b.load_state_dict(copy.deepcopy(a.state_dict()))
        if seed == 4:  # the model is moved
            for p in odd:
                p.data = p.data.clone(memory_format=torch.contiguous_format)
        a.step()
        b.step()
    for p, q in zip(plain, odd, strict=True):
        assert torch.equal(p, q)
        assert set(a.state[p]) == set(b.state[q])
        assert all(torch.equal(value, b.state[q][name]) for name, value in a.state[p].items())


class Wrapped(torch.Tensor):
    """A tensor that holds others, as those of torch's distributed tensors."""

    __tensor_flatten__ = __tensor_unflatten__ = None


PLACE = "CPUAdam: group 0, parameter 1: expected a plain CPU tensor .*"
REFUSED = [
    (torch.zeros(4, 6)[:, ::2], {}, PLACE + r"strides \(6, 2\)"),
    (torch.zeros(4, 1).expand(4, 3), {}, PLACE + r"strides \(1, 0\)"),
    (torch.zeros(4, device="meta"), {}, PLACE + "on meta"),
    (torch.zeros(4, dtype=torch.float64), {}, PLACE + r"torch.float64 of shape \(4,\)"),
    (torch.zeros(3).as_subclass(Wrapped), {}, PLACE + "got Wrapped of torch.float32"),
    (torch.zeros(4), {"lr": -1.0}, "CPUAdam: lr=-1.0, expected 0 or more"),
    (torch.zeros(4), {"betas": (1.0, 0.9)}, r"CPUAdam: betas=\(1.0, 0.9\), expected two numbers from 0 to below 1"),
]


def test_refusals_change_nothing():
    fine = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = CPUAdam([fine])
    for wrong, options, error in REFUSED:
        with pytest.raises(WherryError, match=error):
            CPUAdam([fine, torch.nn.Parameter(wrong)], **options)
    with pytest.raises(WherryError, match="CPUAdam: group 1, parameter 0: expected"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(REFUSED[0][0])]})
    assert len(optimizer.param_groups) == 1
    # A layout that changed after the optimizer was made.
    fine.grad = torch.ones(3, 4)
    optimizer.step()
    fine.data = torch.zeros(3, 8)[:, ::2]
    with pytest.raises(WherryError, match=r"group 0, parameter 0: expected .*strides \(8, 2\)"):
        optimizer.step()


def test_a_step_that_fails_changes_nothing():
    p, embedding = torch.nn.Parameter(torch.ones(3)), torch.nn.Embedding(5, 3, sparse=True)
    optimizer = CPUAdam([{"params": [p]}, {"params": embedding.parameters()}], lr=0.5)
    p.grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    weights = p.detach().clone()
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(WherryError, match=r"CPUAdam: group 1, parameter 0, of shape .* expected a dense one"):
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(WherryError, match="amsgrad=True, which is not offered"):
        optimizer.step()
    assert torch.equal(p, weights)
    for name, value in before["state"][0].items():
        assert torch.equal(optimizer.state[p][name], value)


def test_state_that_is_replaced_is_what_is_used():
    ours, theirs = parameters(), parameters()
    a, b = CPUAdam(ours), torch.optim.AdamW(theirs, weight_decay=0.0)
    for seed in range(4):
        set_grads(ours, theirs, seed=seed)
        for optimizer in (a, b):
            if seed == 2:
                optimizer.state.clear()
            if seed == 3:
                (p, *_) = (p for group in optimizer.param_groups for p in group["params"])
                optimizer.state[p]["exp_avg"] = torch.full(p.shape, 0.5)
            optimizer.step()
    assert_near(ours, theirs)
    assert int(a.state[ours[0]]["step"]) == 2
    a.state[ours[0]]["exp_avg"] = torch.zeros(3)
    with pytest.raises(WherryError, match=r"group 0, parameter 0: its state 'exp_avg' is of shape \(3,\), expected"):
        a.step()


def test_a_state_dict_of_another_optimizer_or_version():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    lion, adam = CPULion([p]), CPUAdam([p], lr=0.5, adamw_mode=False, weight_decay=0.1)
    lion.step()
    before = adam.state_dict()
    with pytest.raises(WherryError, match="of parameter 0 there is exp_avg, expected exp_avg, exp_avg_sq, step"):
        adam.load_state_dict(lion.state_dict())
    assert adam.state_dict() == before
    # Groups that do not name every option, and steps that are numbers: of earlier versions of torch.
    state = {"step": 3, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    adam.load_state_dict({"state": {0: state}, "param_groups": [{"params": [0], "lr": 0.25}]})
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["decoupled_weight_decay"]) == (0.25, False)
    adam.step()
    assert torch.equal(adam.state[p]["step"], torch.tensor(4.0))

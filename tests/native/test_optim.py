"""The host optimizers as torch optimizers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from wherry import native
from wherry.errors import WherryError
from wherry.optim import CPUAdagrad, CPUAdam, CPULion

PAIRS = {
    "adamw": (
        lambda p: CPUAdam(p, lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adam": (
        lambda p: CPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False, maximize=True),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, maximize=True),
    ),
    "adagrad": (
        lambda p: CPUAdagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
    ),
}


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((7, 5), (11,), (), (2, 3, 4))]


def set_grads(*lists, seed, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    for group in zip(*lists, strict=True):
        grad = torch.randn(group[0].shape, generator=generator)
        for p in group:
            p.grad = grad.to(dtype or p.dtype)


def assert_near(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_go_to_torch_and_back(name):
    make_ours, make_theirs = PAIRS[name]
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


def test_lion_against_its_definition():
    ours = parameters()
    theirs, moments = [p.detach().clone() for p in ours], [torch.zeros_like(p) for p in ours]
    optimizer = CPULion(ours, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for seed in range(30):
        set_grads(ours, seed=seed)
        optimizer.step()
        for i, p in enumerate(ours):
            update = (0.9 * moments[i] + 0.1 * p.grad).sign()
            theirs[i] = theirs[i] * (1 - 1e-2 * 0.1) - 1e-2 * update
            moments[i] = 0.99 * moments[i] + 0.01 * p.grad
    assert_near([p.detach() for p in ours], theirs)
    assert set(optimizer.state[ours[0]]) == {"exp_avg"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_masters(dtype):
    low, full = parameters(dtype), parameters(dtype)
    full = [torch.nn.Parameter(p.detach().float()) for p in full]
    a, b = CPUAdam(low, lr=1e-4), CPUAdam(full, lr=1e-4)
    for seed in range(60):
        set_grads(full, low, seed=seed % 3)
        for p, q in zip(full, low, strict=True):
            p.grad = q.grad.float()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_state_is_saved_and_loaded_without_rounding(dtype):
    ours = parameters(dtype)
    optimizer = CPUAdam(ours, lr=1e-3)
    for seed in range(3):
        set_grads(ours, seed=seed)
        optimizer.step()
    others = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    loaded = CPUAdam(others, lr=1e-3)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(ours, others, strict=True):
        for name, value in optimizer.state[p].items():
            assert loaded.state[q][name].dtype is value.dtype
            assert torch.equal(loaded.state[q][name], value)
    set_grads(ours, others, seed=9)
    optimizer.step()
    loaded.step()
    for p, q in zip(ours, others, strict=True):
        assert torch.equal(p, q)


def test_weights_written_from_outside_win_over_the_master():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = CPUAdam([p], lr=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p.copy_(torch.full((4,), 3.0))
    optimizer.step()
    assert p.tolist() == [3.0] * 4


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


def test_a_closure_is_called_with_gradients_on():
    p = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = CPUAdam([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[0] == 9.0
    assert losses[-1] < losses[0] * 0.5


def test_moved_memory_is_noticed():
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = CPULion([p], lr=0.5)
    p.grad = torch.ones(8)
    optimizer.step()
    p.data = torch.full((8,), 10.0)
    optimizer.step()
    assert p.tolist() == [9.5] * 8


def test_non_contiguous_gradients_are_taken():
    p = torch.nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.arange(12.0).view(4, 3).t()
    CPULion([p], lr=1.0).step()
    assert torch.equal(p.detach(), -p.grad.sign())


@pytest.mark.parametrize("change", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"betas": (1.0, 0.9)}])
def test_impossible_numbers_are_refused(change):
    with pytest.raises(WherryError, match=f"CPUAdam: {next(iter(change))}="):
        CPUAdam([torch.nn.Parameter(torch.zeros(1))], **change)


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


def test_schedulers_drive_it():
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = CPULion([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        p.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert p.item() == -1.75


def equal_states(a, p, b, q):
    assert set(a.state[p]) == set(b.state[q])
    assert all(torch.equal(value, b.state[q][name]) for name, value in a.state[p].items())


def test_any_dense_layout_and_dtype_together():
    """Channels last, transposed, empty, of no dimension, in three dtypes: the bits of contiguous ones."""
    shapes = ((2, 3, 4, 5), (7, 5), (0, 3), (), (3, 1, 2))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    torch.manual_seed(1)
    plain = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes for dtype in dtypes]

    def laid(t):
        values = t.detach().clone()
        if t.dim() == 4:
            return values.to(memory_format=torch.channels_last)
        return values.t().contiguous().t() if t.dim() == 2 else values

    odd = [torch.nn.Parameter(laid(p)) for p in plain]
    assert sum(not p.is_contiguous() for p in odd) == 6
    a, b = CPUAdam(plain, lr=1e-2, weight_decay=0.1), CPUAdam(odd, lr=1e-2, weight_decay=0.1)
    for seed in range(4):
        set_grads(plain, odd, seed=seed)
        if seed % 2:  # gradients in the layout of their parameters, or in another
            for p in odd:
                p.grad = laid(p.grad)
        a.step()
        b.step()
        if seed == 1:  # contiguous state, for these layouts
            b = CPUAdam(odd, lr=1e-2, weight_decay=0.1)
            b.load_state_dict(copy.deepcopy(a.state_dict()))
    for p, q in zip(plain, odd, strict=True):
        assert torch.equal(p, q)
        equal_states(a, p, b, q)
        if p.numel() == 0:
            assert not a.state[p]
    assert all(b.state[p]["exp_avg"].stride() == p.stride() for p in odd if p.numel())


def test_a_model_laid_otherwise_after_the_first_step():
    ours, theirs = (torch.nn.Parameter(torch.arange(24.0).view(1, 2, 3, 4)) for _ in range(2))
    a, b = CPUAdam([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)
    for seed in range(4):
        if seed == 2:
            ours.data = ours.data.to(memory_format=torch.channels_last)
        set_grads([ours], [theirs], seed=seed)
        a.step()
        b.step()
    assert_near([ours], [theirs])


def test_parameters_that_cannot_be_updated_are_refused():
    fine = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = CPUAdam([fine])
    for wrong, error in (
        (torch.zeros(4, 6)[:, ::2], r"strides \(6, 2\)"),
        (torch.zeros(4, 1).expand(4, 3), r"strides \(1, 0\)"),
        (torch.zeros(4, device="meta"), "on meta"),
        (torch.zeros(4, dtype=torch.float64), r"torch.float64 of shape \(4,\)"),
        (torch.zeros(4, dtype=torch.complex64), "got torch.complex64"),
    ):
        with pytest.raises(WherryError, match=rf"CPUAdam: group 0, parameter 1: expected .*{error}"):
            CPUAdam([fine, torch.nn.Parameter(wrong)])
        with pytest.raises(WherryError, match="CPUAdam: group 1, parameter 0: expected"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(wrong)]})
        assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="non-leaf"):
        CPUAdam([fine * 2])
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


@pytest.mark.parametrize("order", ["weights first", "weights last", "swapped"])
def test_loaded_half_precision_weights_win_in_either_order(order):
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
    if order == "swapped":
        optimizer.step()
        p.data = torch.tensor([2.0, 3.0, 3.0, 3.0], dtype=torch.float16)
    optimizer.step()
    assert p.tolist() == [2.0, 3.0, 3.0, 3.0]
    assert optimizer.state[p]["master"].tolist() == pytest.approx([2.0001, 3.0, 3.0, 3.0], abs=1e-6)


def test_state_goes_from_one_dtype_to_another():
    for source, target in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        ours = parameters(source)
        optimizer = CPUAdam(ours)
        set_grads(ours, seed=0)
        optimizer.step()
        others = [torch.nn.Parameter(p.detach().to(target)) for p in ours]
        loaded = CPUAdam(others)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        set_grads(others, seed=1)
        loaded.step()
        moments = {"step", "exp_avg", "exp_avg_sq"}
        assert set(loaded.state[others[0]]) == moments | ({"low"} if target is torch.bfloat16 else set())


def test_a_state_dict_of_another_optimizer_or_version():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    lion, adam = CPULion([p]), CPUAdam([p], lr=0.5, adamw_mode=False, weight_decay=0.1)
    lion.step()
    before = adam.state_dict()
    with pytest.raises(WherryError, match="of parameter 0 there is exp_avg, expected exp_avg, exp_avg_sq, step"):
        adam.load_state_dict(lion.state_dict())
    assert adam.state_dict() == before
    assert not adam._optimizer_load_state_dict_pre_hooks and not adam._optimizer_load_state_dict_post_hooks
    # Groups that do not name every option, and steps that are numbers: of earlier versions of torch.
    state = {"step": 3, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    adam.load_state_dict({"state": {0: state}, "param_groups": [{"params": [0], "lr": 0.25}]})
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["decoupled_weight_decay"]) == (0.25, False)
    adam.step()
    assert torch.equal(adam.state[p]["step"], torch.tensor(4.0))


def test_hooks_of_loading_see_and_change_what_is_loaded():
    ours = parameters(torch.bfloat16)
    optimizer = CPUAdam(ours)
    set_grads(ours, seed=0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    exact = [state["exp_avg"] * 0.3 for state in saved["state"].values()]
    seen = []

    def scaled(_, given):
        state = {i: {**s, "exp_avg": s["exp_avg"] * 0.3} for i, s in given["state"].items()}
        return {**given, "state": state}

    optimizer.register_load_state_dict_pre_hook(scaled)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.extend(o.state[p]["exp_avg"] for p in ours))
    optimizer.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(seen, exact, strict=True))
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_hooks_of_steps_and_schedules_of_momentum():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = CPUAdam([p], lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(p.tolist()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    begun = optimizer.param_groups[0]["betas"]
    p.grad = torch.ones(2)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert calls[0] == "before" and calls[1][0] < 0 and len(calls) == 6
    assert optimizer.param_groups[0]["betas"] != begun
    optimizer.zero_grad()
    assert p.grad is None
    at = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, at) and int(optimizer.state[p]["step"]) == 3


class Wrapped(torch.Tensor):
    """A tensor that holds another and has no memory of its own, as those of torch's distributed tensors."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(str(func))


def test_tensors_without_memory_are_refused():
    with pytest.raises(WherryError, match=r"expected a plain CPU tensor .* got Wrapped of torch.float32"):
        CPUAdam([torch.nn.Parameter(Wrapped(torch.zeros(3)))])

"""Learning rate schedules against their closed forms, and against what torch expects of a scheduler."""

import math
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from wherry.compat.deepspeed import schedules as deepspeed
from wherry.config import load
from wherry.errors import WherryError
from wherry.update import schedules
from wherry.update.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, build


def adam(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.AdamW(groups, betas=(0.9, 0.97))


def sgd(momentum=0.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=momentum)


def trace(schedule, steps):
    """Return the learning rate of the first group at each step, as updates see it."""
    seen = []
    for _ in range(steps):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr() == [group["lr"] for group in schedule.optimizer.param_groups]
        schedule.optimizer.step()
        schedule.step()
    return seen


def close(seen, expected):
    assert seen == pytest.approx(expected, rel=1e-12, abs=1e-15)


LOG = [2.0 * math.log(step + 1) / math.log(10) for step in range(10)] + [2.0] * 3
DOWN = [(10 - step) / 6 for step in range(4, 10)]
COSINE = [0.5 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 8)) / 2) for step in range(4, 13)]
CYCLE = [1.0, 1.5, 2.0, 2.5, 3.0, 2.0, 1.0]
LINEAR = partial(WarmupLR, warmup_type="linear")
DECAY = partial(WarmupDecayLR, warmup_max_lr=1.0, warmup_type="linear")
RISING_COSINE = partial(WarmupCosineLR, warmup_type="linear")
FALLING = partial(OneCycle, decay_step_size=2, decay_lr_rate=0.5)
RANGE = partial(LRRangeTest, lr_range_test_min_lr=0.1, lr_range_test_step_size=2)
# Of an optimizer at 0.5: the schedule, and the rate of each step.
CLOSED_FORMS = [
    (partial(LINEAR, warmup_min_lr=1.0, warmup_max_lr=3.0, warmup_num_steps=4), [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]),
    (partial(WarmupLR, warmup_max_lr=2.0, warmup_num_steps=10), LOG),
    (partial(WarmupLR, warmup_num_steps=0, warmup_type="log"), [0.5, 0.5, 0.5]),
    (partial(LINEAR, warmup_num_steps=0), [0.5, 0.5, 0.5]),
    (partial(WarmupLR, warmup_num_steps=1, warmup_type="log"), [0.0, 0.5, 0.5]),
    (partial(LINEAR, warmup_num_steps=1), [0.0, 0.5, 0.5]),
    (partial(DECAY, total_num_steps=10, warmup_num_steps=4), [0.0, 0.25, 0.5, 0.75, *DOWN, 0.0, 0.0]),
    (partial(DECAY, total_num_steps=4, warmup_min_lr=0.2, warmup_num_steps=2), [0.2, 0.6, 1.0, 0.6, 0.2, 0.2]),
    # Without room for the decay.
    (partial(DECAY, total_num_steps=3, warmup_num_steps=5), [0.0, 0.2, 0.4, 0.6, 0.8, 0.0, 0.0]),
    (
        partial(RISING_COSINE, total_num_steps=12, warmup_min_ratio=0.5, warmup_num_steps=4, cos_min_ratio=0.1),
        [*(0.5 * (0.5 + 0.5 * step / 4) for step in range(4)), *COSINE, 0.05, 0.05],
    ),
    (
        partial(FALLING, cycle_min_lr=1.0, cycle_max_lr=3.0, cycle_first_step_size=4, cycle_second_step_size=2),
        CYCLE + [1.0 / (1 + 0.5 * step / 2) for step in (1, 2, 3)],
    ),
    (
        partial(OneCycle, cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_first_step_size=6, cycle_first_stair_count=2),
        [*[0.0] * 3, *[0.5] * 3, 1.0, *[0.5] * 3, *[0.0] * 3],
    ),
    (partial(RANGE, lr_range_test_step_rate=3.0), [0.1 * (1 + 3.0 * step / 2) for step in range(5)]),
    (partial(RANGE, lr_range_test_staircase=True), [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]),
]


@pytest.mark.parametrize(("schedule", "rates"), CLOSED_FORMS)
def test_rates_are_those_of_the_closed_form(schedule, rates):
    close(trace(schedule(adam()), len(rates)), rates)


def test_warmup_reaches_each_groups_own_rate_or_the_given_ones():
    own = adam(0.1, 0.2)
    schedule = WarmupLR(own, warmup_num_steps=2, warmup_type="linear")
    own.step(), schedule.step()
    close(schedule.get_last_lr(), [0.05, 0.1])
    given = adam(0.1, 0.2)
    schedule = WarmupLR(given, [0.0, 1.0], [1.0, 3.0], warmup_num_steps=2, warmup_type="linear")
    given.step(), schedule.step()
    close(schedule.get_last_lr(), [0.5, 2.0])


def test_one_cycle_moves_the_momentum_the_other_way():
    optimizer = adam()
    schedule = OneCycle(
        optimizer, 0.0, 1.0, cycle_first_step_size=2, cycle_min_mom=0.7, cycle_max_mom=0.9,
        decay_step_size=1, decay_mom_rate=0.01,
    )  # fmt: skip
    seen = []
    for _ in range(7):
        first, second = optimizer.param_groups[0]["betas"]
        assert second == 0.97
        seen.append(first)
        optimizer.step(), schedule.step()
    close(seen, [0.9, 0.8, 0.7, 0.8, 0.9, 0.9 * 1.01, 0.9 * 1.02])


def test_one_cycle_goes_on_with_groups_that_came_later_and_with_its_saved_rates():
    optimizer = adam()
    schedule = OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=2)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    optimizer.step(), schedule.step()
    close(schedule.get_last_lr(), [0.5, 0.5])
    resumed = OneCycle(adam(), 0.0, 8.0, cycle_first_step_size=2, cycle_max_mom=0.8)
    resumed.load_state_dict(schedule.state_dict())
    resumed.optimizer.step(), resumed.step()
    close(resumed.get_last_lr(), [1.0])
    close(resumed.momenta(1), [0.85])


def test_one_cycle_and_optimizers_with_other_momentum_or_none(caplog):
    with_momentum = sgd(momentum=0.5)
    schedule = OneCycle(with_momentum, 0.0, 1.0, cycle_first_step_size=1)
    assert with_momentum.param_groups[0]["momentum"] == 0.9
    with_momentum.step(), schedule.step()
    assert with_momentum.param_groups[0]["momentum"] == 0.8
    without = sgd()
    OneCycle(without, 0.0, 1.0)
    assert "SGD has no betas or momentum to cycle" in caplog.text
    assert without.param_groups[0]["momentum"] == 0.0
    kept = adam()
    OneCycle(kept, 0.0, 1.0, cycle_momentum=False)
    assert kept.param_groups[0]["betas"] == (0.9, 0.97)


def test_a_range_test_has_a_rate_for_each_group():
    grouped = LRRangeTest(adam(1.0, 1.0), [0.1, 0.2], lr_range_test_step_size=1)
    grouped.optimizer.step(), grouped.step()
    close(grouped.get_last_lr(), [0.2, 0.4])


# --- what torch expects ---

BLOCKS = {
    "WarmupLR": {"warmup_num_steps": 4},
    "WarmupDecayLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 4, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 3, "decay_step_size": 2},
    "LRRangeTest": {"lr_range_test_step_size": 2},
}


def make(name, optimizer):
    return build(load({"scheduler": {"type": name, "params": BLOCKS[name]}}).scheduler, optimizer)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", schedules.VALID_LR_SCHEDULES)
def test_it_is_a_torch_scheduler_that_continues_from_its_state(name, tmp_path):
    whole = make(name, adam(0.5, 0.25))
    assert type(whole).__name__ == name and isinstance(whole, LRScheduler) and whole.last_epoch == 0
    expected = trace(whole, 12)
    for cut in (0, 1, 5, 11):
        first_optimizer = adam(0.5, 0.25)
        first = make(name, first_optimizer)
        before = trace(first, cut)
        second_optimizer = adam(0.5, 0.25)
        second = make(name, second_optimizer)
        second_optimizer.load_state_dict(first_optimizer.state_dict())
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        close(before + trace(second, 12 - cut), expected)
        assert second.last_epoch == 12
        params = {**BLOCKS[name], "last_batch_iteration": cut - 1}
        late = build(load({"scheduler": {"type": name, "params": params}}).scheduler, adam(0.5, 0.25))
        close(late.get_last_lr()[:1], expected[cut : cut + 1])


def test_a_learning_rate_in_a_tensor():
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5), capturable=False, foreach=False
    )
    schedule = WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    optimizer.step(), schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


@pytest.mark.parametrize(
    ("params", "ours", "theirs"),
    [
        ({"type": "WarmupLR"}, "first update", "first 2 updates"),
        ({"type": "WarmupLR", "warmup_num_steps": 0}, None, "first 2 updates"),
        ({"type": "WarmupLR", "warmup_min_lr": 0.1}, None, None),
        ({"type": "WarmupDecayLR", "total_num_steps": 2000}, "first update", "first 2 updates"),
        ({"type": "WarmupCosineLR", "total_num_steps": 2000}, "first update", "first 2 updates"),
        ({"type": "WarmupCosineLR", "total_num_steps": 2000, "warmup_min_ratio": 0.1}, None, "first update"),
        ({"type": "WarmupLR", "last_batch_iteration": 7}, None, None),
        ({"type": "OneCycle", "cycle_min_lr": 0, "cycle_max_lr": 1}, None, None),
    ],
)
def test_updates_at_rate_zero_are_logged_when_a_schedule_begins(params, ours, theirs, caplog):
    block = {"type": params["type"], "params": {name: value for name, value in params.items() if name != "type"}}
    for make_it, words in ((build, ours), (deepspeed.build, theirs)):
        caplog.clear()
        schedule = schedules.resolve(None, load({"scheduler": block}).scheduler, adam(), make_it)
        lines = [line for line in caplog.messages if "rate 0" in line]
        assert len(lines) == (words is not None) and all(f"the {words} will change" in line for line in lines)
        for _ in range(0 if words is None else 2 if "2" in words else 1):
            assert schedule.optimizer.param_groups[0]["lr"] == 0.0  # as the line says
            schedule.optimizer.step(), schedule.step()
        if words is not None:
            assert schedule.optimizer.param_groups[0]["lr"] > 0.0


# --- mistakes ---

AUTO = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: build(load(AUTO).scheduler, adam()), 'total_num_steps: is "auto", but WarmupDecayLR'),
        (lambda: WarmupLR(adam(), [0.1, 0.2, 0.3]), "warmup_min_lr: expected one number, or one for each of the 1"),
        (lambda: WarmupLR(adam(), warmup_type="cubic"), 'expected "log" or "linear"'),
        (lambda: WarmupLR(adam(), warmup_num_steps=-1), "warmup_num_steps: expected an integer of 0 or more"),
    ],
)
def test_wrong_parameters(make_it, words):
    with pytest.raises(WherryError, match=words):
        make_it()

"""The scheduling rules E1 to E4 on hand-made counters, and replay of a log through the policy."""

import subprocess
import sys

import pytest

from gyre.base.enums import CellRole
from gyre.base.errors import ConfigError
from gyre.elastic.policy import (
    POLICIES,
    CellView,
    ClusterView,
    Dispatch,
    GroupView,
    ToRollout,
    ToTrain,
    action_from_dict,
    deadline,
    make_policy,
    release,
)
from gyre.elastic.policy.base import action_to_dict, boundary_depth

R, T, GOING, COMING = CellRole.ROLLOUT, CellRole.TRAIN, CellRole.TO_TRAIN, CellRole.TO_ROLLOUT


def view(roles, w, *, capacity=10, left=1, supply=True, next_ready=False, to_dispatch=0, group_size=4,
         standalone=()):
    cells = tuple(CellView(i, role, capacity, standalone=i in standalone)
                  for i, role in enumerate(roles))
    return ClusterView(time_s=0.0, cells=cells, dispatched=100, finished=100 - w, supply_ready=supply,
                       next_batch_ready=next_ready, burst_steps_left=left,
                       groups_to_dispatch=to_dispatch, group_size=group_size)


def moves(actions):
    return [(type(a).__name__, a.cell) for a in actions if not isinstance(a, Dispatch)]


ELASTIC = make_policy("elastic")


# ------------------------------------------------------------------------------------ E1

@pytest.mark.parametrize("w, expected", [(21, []), (20, [("ToTrain", 0)]), (0, [("ToTrain", 0)])])
def test_e1_a_cell_leaves_only_when_the_rest_covers_what_is_unfinished(w, expected):
    # Three cells of 10: after the core leaves, 20 executions are covered.
    assert moves(ELASTIC.decide(view([R, R, R], w))) == expected


def test_e1_needs_training_supply():
    assert ELASTIC.decide(view([R, R, R], 5, supply=False)) == ()


def test_e1_counts_standalone_capacity_and_cells_on_their_way_back():
    assert moves(ELASTIC.decide(view([T, R, R], 10, standalone={2}))) == [("ToTrain", 1)]
    assert ELASTIC.decide(view([T, R, R], 11, standalone={2})) == ()
    assert view([T, COMING, R], 0).rollout_capacity == 20
    assert view([T, GOING, R], 0).rollout_capacity == 10


def test_e1_waterlevel_falls_within_a_burst_and_cells_follow_it():
    roles, log = [R, R, R], []
    for w in range(30, -1, -1):
        for action in ELASTIC.decide(view(roles, w)):
            roles[action.cell] = T
            log.append((w, action.cell))
    assert log == [(20, 0), (10, 1), (0, 2)]


# ------------------------------------------------------------------------------------ E2

def test_e2_transfers_are_serial():
    assert ELASTIC.decide(view([GOING, R, R], 0)) == ()
    assert ELASTIC.decide(view([T, COMING, R], 0)) == ()


def test_e2_training_cells_are_a_growing_prefix():
    assert moves(ELASTIC.decide(view([T, R, R], 10))) == [("ToTrain", 1)]
    assert ELASTIC.decide(view([T, R, R], 11)) == ()  # and cell 2 does not overtake cell 1


def test_e2_standalone_cells_never_train():
    assert ELASTIC.decide(view([T, T, R], 0, standalone={2})) == ()


# ------------------------------------------------------------------------------------ E3

def test_e3_satellites_return_one_by_one_then_the_core():
    roles, order = [T, T, T], []
    for _ in range(3):
        (action,) = ELASTIC.decide(view(roles, 0, left=0, to_dispatch=2))
        assert isinstance(action, ToRollout)
        roles[action.cell] = R
        order.append(action.cell)
    assert order == [1, 2, 0]
    assert ELASTIC.decide(view(roles, 0, left=0, to_dispatch=2)) == (Dispatch(2),)


@pytest.mark.parametrize("next_ready, to_dispatch, stays", [
    (True, 2, True),    # 12 unfinished + 8 to come = 20 <= 20 covered by cells 1 and 2
    (True, 3, False),   # 12 + 12 = 24 > 20
    (False, 2, False),  # nothing to train yet
])
def test_e3_the_core_stays_only_if_its_batch_is_ready_and_the_rest_covers(next_ready, to_dispatch, stays):
    actions = ELASTIC.decide(view([T, R, R], 12, left=0, next_ready=next_ready, to_dispatch=to_dispatch))
    assert (actions == (Dispatch(to_dispatch),)) is stays
    if not stays:
        assert moves(actions) == [("ToRollout", 0)]


# ------------------------------------------------------------------------------ baselines

def test_colocate_drains_everything_then_trains_everywhere():
    policy = make_policy("colocate")
    assert policy.decide(view([R, R], 1)) == ()
    assert moves(policy.decide(view([R, R], 0))) == [("ToTrain", 0), ("ToTrain", 1)]
    assert moves(policy.decide(view([T, T], 0, left=0))) == [("ToRollout", 0), ("ToRollout", 1)]
    assert policy.decide(view([R, R], 0, left=0, to_dispatch=3)) == (Dispatch(3),)


def test_async_keeps_a_fixed_split():
    policy = make_policy("async", train_cells=1)
    assert moves(policy.decide(view([R, R, R], 30, supply=False))) == [("ToTrain", 0)]
    assert policy.decide(view([T, R, R], 0)) == ()
    assert policy.decide(view([T, R, R], 8, left=0, to_dispatch=2)) == (Dispatch(2),)


# ------------------------------------------------------------------------- shared promises

@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_is_pure_and_its_log_replays(name):
    policy = make_policy(name)
    views = [view(roles, w, left=left, to_dispatch=2, next_ready=ready)
             for roles in ([R, R, R], [T, R, R], [T, T, T], [GOING, R, R])
             for w in (0, 10, 25) for left in (0, 1) for ready in (False, True)]
    for v in views:
        actions = policy.decide(v)
        log = (v.to_dict(), [action_to_dict(a) for a in actions])
        again = make_policy(name).decide(ClusterView.from_dict(log[0]))
        assert again == tuple(action_from_dict(a) for a in log[1]) == actions


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_moves_only_cells_that_can_move(name):
    for roles in ([R, R, R], [T, R, R], [T, T, R]):
        for w in (0, 5, 40):
            for left in (0, 1):
                for action in make_policy(name).decide(view(roles, w, left=left, standalone={2})):
                    if isinstance(action, ToTrain):
                        assert roles[action.cell] is R and action.cell != 2
                    elif isinstance(action, ToRollout):
                        assert roles[action.cell] is T


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ConfigError, match="available: async, colocate, elastic"):
        make_policy("elastik")
    with pytest.raises(ConfigError, match="no option"):
        make_policy("elastic", train_cells=1)
    with pytest.raises(ConfigError, match="at least 1"):
        make_policy("async", train_cells=0)


def test_policies_need_no_jax():
    code = "import sys, gyre.elastic.policy; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ------------------------------------------------------------------------- staleness, release

def test_boundary_depth_and_deadline():
    assert boundary_depth(phi=1.0, mu=1, groups_per_step=6) == 12
    assert boundary_depth(phi=0.5, mu=2, groups_per_step=3) == 8  # 7.5 rounded up
    assert boundary_depth(phi=0.0, mu=1, groups_per_step=6) == 6
    assert deadline(version_dispatched=4, phi=1.0, mu=1) == 5
    assert deadline(version_dispatched=4, phi=0.5, mu=2) == 6


def test_release_takes_completion_order_but_keeps_room_for_deadlines():
    groups = [GroupView(0, 3, None), GroupView(1, 3, 5), GroupView(2, 4, 1), GroupView(3, 4, 2)]
    # Version 4, phi 1, mu 1: groups 0 and 1 must be trained now; group 0 is unfinished but has a seat.
    assert release(groups, version=4, room=4, phi=1.0, mu=1) == [1, 2, 3]
    assert release(groups, version=4, room=3, phi=1.0, mu=1) == [1, 2]
    assert release(groups, version=4, room=2, phi=1.0, mu=1) == [1]
    assert release(groups, version=4, room=1, phi=1.0, mu=1) == [1]
    # One version earlier nobody is due: completion order alone.
    assert release(groups, version=3, room=2, phi=1.0, mu=1) == [2, 3]


def test_fifo_consumption_bounds_staleness():
    """With Q_b = (phi + mu) B groups outstanding at each boundary, d <= phi + mu - 1."""
    phi, mu, b, version, next_group = 1.0, 2, 3, 0, 0
    outstanding = []
    worst = 0
    for _ in range(8):
        while len(outstanding) < boundary_depth(phi, mu, b):
            outstanding.append(GroupView(next_group, version, None))
            next_group += 1
        for _ in range(mu):
            # The newest finish first, the worst order for staleness.
            done = [GroupView(g.group, g.version, -g.group) for g in outstanding]
            taken = release(done, version, b, phi, mu)
            assert len(taken) == b
            worst = max(worst, *(version - g.version for g in outstanding if g.group in taken))
            outstanding = [g for g in outstanding if g.group not in taken]
            version += 1
    assert worst == phi + mu - 1

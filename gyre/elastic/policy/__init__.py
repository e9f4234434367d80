"""Scheduling policies: pure functions of a `ClusterView`, shared by the simulator and the system.

No jax, no clock, no threads: what a policy may know is in the view, what it wants is in its actions.
"""

from gyre.elastic.policy.base import (
    POLICIES,
    Action,
    CellView,
    ClusterView,
    Dispatch,
    Policy,
    ToRollout,
    ToTrain,
    action_from_dict,
    make_policy,
)
from gyre.elastic.policy.colocate import Colocate
from gyre.elastic.policy.release import GroupView, deadline, release
from gyre.elastic.policy.static_split import StaticSplit
from gyre.elastic.policy.waterlevel import Waterlevel

__all__ = [
    "Action", "CellView", "ClusterView", "Colocate", "Dispatch", "GroupView", "POLICIES", "Policy",
    "StaticSplit", "ToRollout", "ToTrain", "Waterlevel", "action_from_dict", "deadline",
    "make_policy", "release",
]

"""When finished groups become trainable: exact groups, earliest deadline kept.

Groups are consumed in completion order, except that a batch keeps room for every group that would
otherwise pass its staleness deadline `v_d + ceil(phi) + mu - 1`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class GroupView:
    """A dispatched group that no step has consumed yet.

    Attributes:
      group: its index.
      version: v_d, the version it was dispatched at.
      completed_order: rank in completion order, or None while executions are unfinished.
    """

    group: int
    version: int
    completed_order: int | None


def deadline(version_dispatched: int, phi: float, mu: int) -> int:
    """The last version that may train a group dispatched at `version_dispatched`."""
    return version_dispatched + math.ceil(phi) + mu - 1


def release(groups: Sequence[GroupView], version: int, room: int, phi: float, mu: int) -> list[int]:
    """Groups that may join the batch trained at `version` now, in the order to take them.

    Args:
      groups: all unconsumed groups.
      version: v_t of the batch being filled.
      room: groups that still fit into the batch.
      phi, mu: staleness allowance and burst length, in steps.

    Returns:
      Indices of complete groups, at most `room`, first those at their deadline, then by completion.
    """
    complete = [g for g in groups if g.completed_order is not None]
    due = [g for g in complete if deadline(g.version, phi, mu) <= version]
    reserved = sum(1 for g in groups
                   if g.completed_order is None and deadline(g.version, phi, mu) <= version)
    later = [g for g in complete if deadline(g.version, phi, mu) > version]
    due.sort(key=lambda g: (g.version, g.completed_order))
    later.sort(key=lambda g: g.completed_order)
    taken = due[:room]
    free = room - len(taken) - reserved
    return [g.group for g in taken + later[:max(free, 0)]]

"""One metrics row per optimizer step, from what the loop, the cells and the executions counted."""

from __future__ import annotations

import collections
import time
from typing import Any

import numpy as np

from gyre.base.enums import CellRole
from gyre.elastic.mesh_manager import MeshManager
from gyre.system.loop import StepResult


class Meter:
    """Turns step results into rows for metrics.jsonl; keeps the counters of the step before.

    Args:
      manager: cells and their roles.
      steps: of the whole run, for the ETA.
      first_step: steps done before this session.
    """

    def __init__(self, manager: MeshManager, steps: int, first_step: int):
        self._manager, self._steps, self._first_step = manager, steps, first_step
        self._began_s = time.monotonic()
        self._last = self._counters()

    def _counters(self) -> dict[str, float]:
        cells = self._manager.cells
        return {
            "time_s": time.monotonic(),
            "sampled": sum(c.stats.sampled_tokens for c in cells),
            "prefilled": sum(c.stats.prefilled_tokens for c in cells),
            "decode_steps": sum(c.stats.decode_steps for c in cells),
            "decode_s": sum(c.stats.busy_s for c in cells),
            "train_s": sum(c.train_busy_s for c in cells),
            "rollout_role_s": self._manager.seconds_in(CellRole.ROLLOUT),
            "train_role_s": self._manager.seconds_in(CellRole.TRAIN),
        }

    def row(self, result: StepResult) -> dict[str, Any]:
        """The step's numbers; names and units as in the README's table."""
        now, before = self._counters(), self._last
        self._last = now
        delta = {name: now[name] - before[name] for name in now}
        processed = [g.processed for g in result.groups]
        scores = np.array([s for p in processed for s in p.scores])
        executions = [m for g in result.groups for m in g.members.values()]
        staleness = [result.batch.version - g.version for g in result.groups]
        tokens_trained = sum(p.tokens_trained for p in processed)
        return {
            "step": result.step, "version": result.update.weights.version,
            "wall_s": round(delta["time_s"], 3), "time_s": round(time.time(), 3),
            "reward_mean": float(scores.mean()) if scores.size else float("nan"),
            "reward_std": float(scores.std()) if scores.size else float("nan"),
            "executions": len(executions),
            "outcomes": dict(collections.Counter(e.result.outcome.value for e in executions)),
            **self._loss_metrics(result),
            "grad_norm": result.update.grad_norm, "learning_rate": result.update.learning_rate,
            "staleness_mean": float(np.mean(staleness)), "staleness_max": int(np.max(staleness)),
            "tokens_trained": tokens_trained,
            "tokens_unique": sum(p.tokens_unique for p in processed),
            "tokens_linearized": sum(p.tokens_linearized for p in processed),
            "tokens_computed": sum(m.n_tokens for m in result.batch.micro_steps),
            "micro_steps": len(result.batch.micro_steps),
            "tokens_sampled": int(delta["sampled"]), "tokens_prefilled": int(delta["prefilled"]),
            "decode_steps": int(delta["decode_steps"]), "decode_s": round(delta["decode_s"], 3),
            "train_s": round(delta["train_s"], 3),
            "tokens_per_s": round((delta["sampled"] + tokens_trained) / max(delta["time_s"], 1e-9), 1),
            "rollout_idle_fraction": _idle(delta["decode_s"], delta["rollout_role_s"]),
            "train_idle_fraction": _idle(delta["train_s"], delta["train_role_s"]),
            "groups_skipped": sum(bool(p.skipped) for p in processed),
            "waterlevel": result.waterlevel, "roles": result.roles,
        }

    @staticmethod
    def _loss_metrics(result: StepResult) -> dict[str, float]:
        """Loss: mean over the executions in the baseline. The others: mean over their tokens, each
        execution with the same weight; NaN when nothing was trained."""
        sums = result.batch.metric_sums()
        weight = sums.get("w_sum", 0.0)
        own = {name.removesuffix("_sum"): total / weight for name, total in sums.items()
               if weight and name.endswith("_sum") and name not in ("loss_sum", "w_sum")}
        return {"loss": sums.get("loss_sum", 0.0) / max(result.batch.denominator, 1),
                "entropy": float("nan"), "mismatch_kl": float("nan"), **own}

    def progress(self, row: dict[str, Any], capacity: int) -> str:
        """One line for people."""
        done = row["step"] - self._first_step
        per_step_s = (time.monotonic() - self._began_s) / max(done, 1)
        eta_s = round(per_step_s * (self._steps - row["step"]))
        return (f"step {row['step']:>3}/{self._steps}  reward {row['reward_mean']:.3f}  "
                f"staleness {row['staleness_mean']:.1f} (max {row['staleness_max']})  "
                f"cells {row['roles']}  waterlevel {row['waterlevel']}/{capacity}  "
                f"{row['tokens_per_s']:.0f} tok/s  {row['wall_s']:.1f} s  ETA {eta_s // 60}:{eta_s % 60:02d}")


def _idle(busy_s: float, role_s: float) -> float:
    return round(min(1.0, max(0.0, 1.0 - busy_s / role_s)), 4) if role_s > 0 else 0.0

"""Metrics: explicit (sum, count) means, and the writer of a run's per-step rows.

TensorBoard files are written by tensorboardX, because clu.metric_writers and the tensorboard
package both load TensorFlow where it is installed (about 650 MB and 5 to 10 s).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gyre.telemetry import jsonl

if TYPE_CHECKING:
    from gyre.telemetry.run_folder import RunFolder

STEP_FIELDS = (
    "step", "version", "wall_s", "reward_mean", "reward_std", "executions", "outcomes", "loss",
    "grad_norm", "entropy", "staleness_mean", "staleness_max", "mismatch_kl", "tokens_trained",
    "tokens_unique", "tokens_linearized", "rollout_idle_fraction", "train_idle_fraction")
"""Fields that every row of metrics.jsonl has."""


@dataclasses.dataclass
class Mean:
    """A weighted mean kept as sum and count, so that parts add up exactly to the whole.

    Attributes:
      sum: of weight * value.
      count: of weights; the denominator.
    """

    sum: float = 0.0
    count: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Adds one measurement."""
        self.sum += weight * value
        self.count += weight

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float:
        """sum / count; NaN without measurements."""
        return self.sum / self.count if self.count else math.nan


class MetricWriter:
    """Writes one row per optimizer step to metrics.jsonl and, as scalars, to tensorboard/.

    Use as a context manager or call `close`. For one thread.

    Args:
      folder: the run's.
      first_step: steps done before this session; TensorBoard forgets what an interrupted session
        wrote beyond it.
    """

    def __init__(self, folder: RunFolder, first_step: int = 0):
        from tensorboardX import SummaryWriter  # a 0.5 s import that readers of metrics do not need

        jsonl.cut_torn_line(folder.metrics_path)
        self._last_step = first_step
        self._file = folder.metrics_path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder.tensorboard_path), flush_secs=10, write_to_disk=True,
                                    purge_step=first_step + 1 if first_step else None)

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes a step's row; it is on disk, as far as a kill is concerned, when this returns.

        Args:
          row: has STEP_FIELDS and whatever else the run measures; NaN means "no measurement".

        Raises:
          ValueError: a field is missing, or steps do not increase.
        """
        missing = [name for name in STEP_FIELDS if name not in row]
        if missing:
            raise ValueError(f"a metrics row needs {', '.join(missing)}; it has {', '.join(row)}")
        step = int(row["step"])
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} after step {self._last_step}; steps must "
                             "increase (after a resume, call RunFolder.truncate_after first)")
        self._file.write(jsonl.line(row))
        self._file.flush()
        self._last_step = step
        for tag, value in scalars(row):
            self._board.add_scalar(tag, value, step, walltime=row.get("time_s"))

    def close(self) -> None:
        """Closes both files. May be called twice."""
        if not self._file.closed:
            self._file.close()
            self._board.close()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields (tag, value) of a row's finite numbers; nested ones as `outcomes/completed`."""
    for name, value in jsonl.plain(row).items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name not in ("step", "time_s"):
            yield prefix + name, float(value)

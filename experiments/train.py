"""Trains a policy: `python -m experiments.train --config=configs/quickstart.py --workdir=runs/x`.

Resumes when the workdir holds a run of the same config. Any field of the config is a flag:
`--config.optimizer.learning_rate=1e-5`, `--config.scheduler=colocate`.
"""

import json
import pathlib
import sys
import time

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.devices import set_up_devices
from gyre.base.errors import GyreError


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    config, workdir = flags.FLAGS.config, pathlib.Path(flags.FLAGS.workdir)
    set_up_devices(config)
    from experiments import report  # after the flags are set: these import jax
    from gyre.system.run import Run

    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    try:
        with Run(config, workdir, say) as run:
            finished = run.run()
            decode = run.codec.decode
    except GyreError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    path = report.write(workdir, decode)
    if not finished:
        print(f"stopped; the same command resumes. Report so far: {path}")
        return 130
    print(summary(workdir))
    print(f"report: {path}")
    return 0


def summary(workdir: pathlib.Path) -> str:
    """Start and end reward, as printed at the end of a run."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[:3], rows[-5:]
    text = (f"reward: {_mean(first):.3f} (mean of the first {len(first)} steps) -> "
            f"{_mean(last):.3f} (mean of the last {len(last)})")
    evaluations = workdir / "eval.jsonl"
    if evaluations.exists():
        scores = [json.loads(line) for line in evaluations.read_text().splitlines()]
        text += (f"\nheld-out: {scores[0]['mean_score']:.3f} (step {scores[0]['step']}) -> "
                 f"{scores[-1]['mean_score']:.3f} (step {scores[-1]['step']})")
    return text


def _mean(rows):
    return sum(row["reward_mean"] for row in rows) / max(len(rows), 1)


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The run's config file.", lock_config=True)
    flags.DEFINE_string("workdir", None, "The run's folder; created, or resumed.")
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)

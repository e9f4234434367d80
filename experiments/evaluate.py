"""Scores a run's policy on held-out tasks: `python -m experiments.evaluate --config=... --workdir=...`.

Prints pass rate and mean score, and appends them to the run's eval.jsonl. The workdir must hold a run
of the same config, or be new (then the untrained policy is scored).
"""

import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.devices import set_up_devices
from gyre.base.errors import GyreError


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    config = flags.FLAGS.config
    set_up_devices(config)
    from gyre.system.run import Run  # imports jax, after the devices are set up

    try:
        with Run(config, pathlib.Path(flags.FLAGS.workdir)) as run:
            row = run.evaluate(flags.FLAGS.step)
    except GyreError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for kind, score in row["by_kind"].items():
        print(f"  {kind:<10} {score:.3f}")
    print(f"step {row['step']}: mean score {row['mean_score']:.3f}, pass rate {row['pass_rate']:.3f}, "
          f"{row['n']} tasks, {row['n_ungraded']} ungraded")
    return 0


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The run's config file.", lock_config=True)
    flags.DEFINE_string("workdir", None, "The run's folder.")
    flags.DEFINE_integer("step", None, "Step of the checkpoint; 0 is the policy before training; default: "
                         "the newest.")
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main)

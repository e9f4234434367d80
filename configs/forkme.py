"""Copy this file for an experiment of your own; state here what it shows and what to expect.

What it shows: the algorithm in gyre/algorithms/forkme.py on the tiny policy.
Launch: python -m experiments.train --config=configs/forkme.py --workdir=runs/forkme
Expected: under a minute on 2 cores; the reward is noise around 0.1 to 0.3 at this size.
"""

import ml_collections

from configs import tiny


def get_config() -> ml_collections.ConfigDict:
    c = tiny.get_config()
    with c.unlocked():
        c.algorithm.name = "forkme"
        c.algorithm.options = "scale=1.0"
        # Change here what your experiment changes, and nothing else.
    return c

"""Tiny: the whole system in under a minute, for tests; a random byte model, learning is not the point.

Launch: python -m experiments.train --config=configs/tiny.py --workdir=runs/tiny
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    with c.unlocked():
        c.steps = 3
        c.groups_per_step = 2
        c.group_size = 4
        c.cells.count = 4
        c.cells.shape = (1, 2)
        c.cells.executions = 4
        c.model.name = "random"
        c.model.num_layers = 4
        c.model.d_model = 96
        c.model.num_heads = 4
        c.model.num_kv_heads = 2
        c.model.head_dim = 24
        c.model.d_ff = 256
        c.generation.slots = 4
        c.generation.max_completion_tokens = 12
        c.generation.prefix_cache_mb = 32
        c.tasks.options.max_subgoals = 3
        c.tasks.options.multi_fraction = 0.5
        c.tasks.options.held_out = 4
        c.harness.options.max_completion_tokens = 12
        c.rollout.concurrency = 12
        c.optimizer.learning_rate = 1e-3
        c.evaluation.tasks = 4
    return c

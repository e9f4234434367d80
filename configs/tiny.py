"""Tiny: the whole system in under a minute, for tests: a random byte model learns to say letters.

Launch: python -m experiments.train --config=configs/tiny.py --workdir=runs/tiny
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    with c.unlocked():
        c.steps = 6
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
        c.generation.max_context_tokens = 1024
        c.generation.kv_buckets_tokens = (1024,)
        c.generation.prefill_chunks_tokens = (64,)
        c.generation.max_completion_tokens = 16
        c.generation.prefix_cache_mb = 32
        c.tasks.name = "letters"
        c.tasks.options = ml_collections.ConfigDict({"max_turns": 3, "held_out": 4})
        c.harness.options.max_completion_tokens = 16
        c.harness.options.context_budget_tokens = 200
        c.harness.options.answer_file = "answer.txt"
        c.rollout.concurrency = 12
        c.trajectory.n_buckets = (1024,)
        c.trajectory.r_buckets = (256,)
        c.optimizer.learning_rate = 3e-3
        c.evaluation.tasks = 4
        c.evaluation.temperature = 1.0
        c.checkpoint.every_steps = 3
    return c

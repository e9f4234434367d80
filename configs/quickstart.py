"""Quickstart: SmolLM2-135M-Instruct learns shell jobs on a laptop CPU, elastically.

Launch: python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    c = base.get_config()
    with c.unlocked():
        c.steps = 16
        c.groups_per_step = 6
        c.group_size = 8
        c.cells.count = 3
        c.cells.executions = 32
        c.generation.slots = 16
        c.generation.max_context_tokens = 320
        c.generation.kv_buckets_tokens = (320,)
        c.generation.prefill_chunks_tokens = (32,)
        c.generation.prefix_cache_mb = 128
        c.generation.temperature = 0.7
        c.generation.max_completion_tokens = 32
        c.tasks.options.kinds = ("rm", "mv", "cp", "touch", "mkdir", "rmdir")
        c.tasks.options.max_subgoals = 4
        c.tasks.options.multi_fraction = 0.1
        c.tasks.options.held_out = 24
        c.harness.options.max_completion_tokens = 32
        c.harness.options.context_budget_tokens = 140
        c.trajectory.n_buckets = (384,)
        c.trajectory.r_buckets = (256,)
        c.trajectory.claim_block = 4  # few gradients are kept and shipped
        c.optimizer.learning_rate = 2e-5
        c.optimizer.warmup_steps = 3
        c.evaluation.tasks = 24
    return c

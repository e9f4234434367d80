"""Defaults of every run, each stated once. A config file starts from here and changes fields.

Launch: any field can be set by flag, `--config.optimizer.learning_rate=1e-5`; unknown fields are
errors.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.seed = 0
    c.steps = 100  # optimizer steps
    c.scheduler = "elastic"  # elastic | colocate | async
    # phi: batches in flight beyond the burst, so that staleness <= ceil(phi) + mu - 1.
    c.schedulers = ml_collections.ConfigDict({
        "elastic": {"phi": 1.0},
        "colocate": {"phi": 0.0},
        "async": {"phi": 1.0, "train_cells": 1},
    })
    c.groups_per_step = 8  # B
    c.group_size = 8  # N executions of one task
    c.mu = 1  # steps between two publications (burst length)

    c.cells = cells = ml_collections.ConfigDict()
    cells.count = 3  # cell 0 is the core
    cells.standalone = 0  # of these, the last ones that never train
    cells.shape = (1, 1)  # devices of one cell along (fsdp, tensor)
    cells.executions = 16  # C_e: executions that one rollout cell covers

    c.model = model = ml_collections.ConfigDict()
    model.name = "smollm2-135m-instruct"  # a pretrained checkpoint, or "random" with the shape below
    model.chat_template = "chatml"  # chatml | qwen2_5 | qwen3 | qwen3_coder | plain
    model.num_layers = 2
    model.d_model = 64
    model.num_heads = 4
    model.num_kv_heads = 2
    model.head_dim = 16
    model.d_ff = 192

    c.generation = gen = ml_collections.ConfigDict()
    gen.slots = 16  # calls that a cell decodes together
    gen.max_context_tokens = 512
    gen.kv_buckets_tokens = (256, 512)
    gen.prefill_chunks_tokens = (32, 128)
    gen.prefix_cache_mb = 256  # per cell
    gen.temperature = 1.0
    gen.max_completion_tokens = 64  # of one call; a harness may ask for less

    c.gateway = gateway = ml_collections.ConfigDict()
    # exact: sampled reasoning stays in later prompts; template: they are as the chat template shows them.
    gateway.history = "exact"
    # What a client is granted; the fields are explained in gyre/gateway/limits.py.
    gateway.limits = ml_collections.ConfigDict({
        "body_bytes": 32 * 2**20, "header_bytes": 16 * 2**10, "body_timeout_s": 60.0, "write_timeout_s": 60.0,
        "idle_timeout_s": 75.0, "calls_per_execution": 64, "calls": 4096, "engine_timeout_s": 600.0,
        "engine_retries": 2, "keep_alive_s": 15.0, "retry_after_s": 1})

    c.tasks = tasks = ml_collections.ConfigDict()
    tasks.name = "shell_jobs"
    tasks.options = ml_collections.ConfigDict({"kinds": ("mkdir", "rm", "mv", "touch"),
                                               "max_subgoals": 1, "multi_fraction": 0.0,
                                               "held_out": 48})

    c.harness = harness = ml_collections.ConfigDict()
    harness.name = "reference"
    harness.options = ml_collections.ConfigDict({"mode": "text", "max_completion_tokens": 48,
                                                 "context_budget_tokens": 0})

    c.rollout = rollout = ml_collections.ConfigDict()
    rollout.concurrency = 64  # executions under way at a time; more wait in dispatch order
    rollout.concurrent_starts = 2
    rollout.harness_timeout_s = 120.0
    rollout.overall_timeout_s = 180.0
    rollout.grader_retries = 2
    rollout.infra_failure = "placeholder"  # or "exclude"

    c.algorithm = ml_collections.ConfigDict()
    c.algorithm.name = "grpo"
    # Options of the algorithm that differ from its published setting, as "name=value,name=value".
    c.algorithm.options = ""

    c.trajectory = trajectory = ml_collections.ConfigDict()
    trajectory.j_max = 5  # paths trained per execution; 0 trains all
    # Whose paths go first.
    trajectory.role_order = ("main", "main_summary", "sub_agent", "sub_agent_summary")
    trajectory.n_buckets = (512, 1024)  # tokens of a micro-step
    trajectory.r_buckets = (256, 512)  # trained tokens of a micro-step
    trajectory.logits_chunk_rows = 512  # rows whose [rows, vocabulary] logits exist at a time
    trajectory.claim_block = 1  # micro-steps per claim

    c.optimizer = opt = ml_collections.ConfigDict()
    opt.learning_rate = 1e-5
    opt.warmup_steps = 0
    opt.b1 = 0.9
    opt.b2 = 0.95
    opt.weight_decay = 0.0
    opt.clip_norm = 1.0
    opt.remat = "full"  # none | attention | full | a jax.checkpoint_policies name

    c.checkpoint = ml_collections.ConfigDict({"every_steps": 10, "keep": 2})
    # Held-out tasks, before the first and after the last step; 0 tasks: no evaluation.
    c.evaluation = ml_collections.ConfigDict({"tasks": 48, "temperature": 0.0})
    c.stall_timeout_s = 300.0  # no event for so long ends the run with the state of every cell
    return c.lock()

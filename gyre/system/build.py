"""Builds the parts of a run from its config; everything that can be refused is refused first.

`check` needs no device and no network, so that a config that cannot work fails at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from ml_collections import ConfigDict

from gyre.algorithms import Algorithm, make_algorithm
from gyre.base.errors import ConfigError
from gyre.base.protocols import TaskSource
from gyre.elastic.backends.local import LocalCell, LocalCore, cell_meshes
from gyre.elastic.policy import Policy, make_policy
from gyre.gateway.limits import GatewayLimits
from gyre.gateway.prompts import HISTORIES
from gyre.generation.engine import EngineConfig
from gyre.models import dense
from gyre.models.chat import JinjaChat
from gyre.models.tokenizer import ByteTokenizer
from gyre.models.weights import load_pretrained, load_tokenizer
from gyre.rollout.harnesses import HARNESSES
from gyre.rollout.runner import Runner, RunnerLimits
from gyre.rollout.sandboxes.local import LocalSandboxes
from gyre.rollout.tasks import TASKS
from gyre.system.loop import LoopConfig
from gyre.training.optimizer import Optimizer
from gyre.training.step import TrainPrograms
from gyre.trajectory.agent_roles import RoleRules, all_harness_rules
from gyre.trajectory.packing import pack
from gyre.trajectory.sampling import parse_role_order


@dataclasses.dataclass(frozen=True)
class Policies:
    """The scheduler of a run and its staleness allowance."""

    policy: Policy
    phi: float


def make_scheduler(config: ConfigDict) -> Policies:
    """The policy named by `config.scheduler`. Raises ConfigError on what cannot work."""
    if config.scheduler not in config.schedulers:
        raise ConfigError(f"unknown scheduler {config.scheduler!r}; "
                          f"config.schedulers has {sorted(config.schedulers)}")
    options = dict(config.schedulers[config.scheduler])
    phi = options.pop("phi")
    if phi < 0:
        raise ConfigError(f"schedulers.{config.scheduler}.phi must not be negative, got {phi}")
    return Policies(make_policy(config.scheduler, **options), phi)


def role_rules() -> RoleRules:
    """How the reference harness words summaries and sub-agents, and what is known of other harnesses."""
    reference = RoleRules(("Summarize the conversation so far",), ("You are a sub-agent",))
    return reference | all_harness_rules()


def make_task_source(config: ConfigDict) -> TaskSource:
    """The run's tasks."""
    return TASKS.get(config.tasks.name)(seed=config.seed, **config.tasks.options)


def parse_algorithm(config: ConfigDict) -> Algorithm:
    """The algorithm with the options of `algorithm.options` ("name=value,...")."""
    options: dict[str, Any] = {}
    for part in filter(None, config.algorithm.options.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"algorithm.options must be name=value,name=value; got {part!r}")
        options[name.strip()] = {"true": True, "false": False}.get(value.lower(), None)
        if options[name.strip()] is None:
            try:
                options[name.strip()] = float(value)
            except ValueError:
                options[name.strip()] = value
    return make_algorithm(config.algorithm.name, **options)


def loop_config(config: ConfigDict, phi: float) -> LoopConfig:
    """Counts of the training loop."""
    return LoopConfig(
        steps=config.steps, groups_per_step=config.groups_per_step, group_size=config.group_size,
        mu=config.mu, phi=phi, claim_block=config.trajectory.claim_block,
        streaming=config.scheduler != "colocate", stall_timeout_s=config.stall_timeout_s)


def gateway_limits(config: ConfigDict) -> GatewayLimits:
    """What the gateway grants a client. Raises ConfigError."""
    try:
        return GatewayLimits(**config.gateway.limits)
    except ValueError as e:
        raise ConfigError(f"gateway.limits: {e}") from e


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work, before any device work. Raises ConfigError."""
    for name in ("steps", "groups_per_step", "mu"):
        if config[name] < 1:
            raise ConfigError(f"{name} must be at least 1, got {config[name]}")
    if config.group_size < 2:
        raise ConfigError(f"group_size must be at least 2 (advantages are relative within a group), "
                          f"got {config.group_size}")
    scheduler = make_scheduler(config)
    elastic = config.cells.count - config.cells.standalone
    if elastic < 1:
        raise ConfigError(f"cells.count={config.cells.count} less cells.standalone="
                          f"{config.cells.standalone} leaves no core cell")
    if config.scheduler == "async" and config.schedulers["async"].train_cells >= config.cells.count:
        raise ConfigError(f"schedulers.async.train_cells={config.schedulers['async'].train_cells} of "
                          f"{config.cells.count} cells leaves none for rollout")
    if config.scheduler == "elastic" and config.cells.count < 2:
        raise ConfigError("the elastic scheduler needs at least 2 cells, got cells.count=1")
    if config.scheduler == "colocate" and (scheduler.phi or config.cells.standalone):
        raise ConfigError("colocate drains all rollouts before it trains: schedulers.colocate.phi "
                          "and cells.standalone must be 0")
    if config.rollout.infra_failure not in ("placeholder", "exclude"):
        raise ConfigError("rollout.infra_failure must be 'placeholder' or 'exclude', got "
                          f"{config.rollout.infra_failure!r}")
    asked = config.generation.max_completion_tokens
    if asked >= config.generation.max_context_tokens:
        raise ConfigError(f"generation.max_completion_tokens={asked} leaves no room for a prompt in "
                          f"generation.max_context_tokens={config.generation.max_context_tokens}")
    if config.trajectory.n_buckets[-1] < config.generation.max_context_tokens:
        raise ConfigError(f"the largest of trajectory.n_buckets {config.trajectory.n_buckets} must "
                          "hold a whole path of generation.max_context_tokens="
                          f"{config.generation.max_context_tokens}")
    if config.trajectory.j_max < 0:
        raise ConfigError(f"trajectory.j_max must be at least 1, or 0 for all paths, got "
                          f"{config.trajectory.j_max}")
    parse_role_order(config.trajectory.role_order)
    for group, name in (("rollout", "concurrency"),
                        ("trajectory", "logits_chunk_rows"), ("trajectory", "claim_block"),
                        ("checkpoint", "every_steps"), ("checkpoint", "keep"),
                        ("generation", "prefix_cache_mb"), ("cells", "executions")):
        if config[group][name] < 1:
            raise ConfigError(f"{group}.{name} must be at least 1, got {config[group][name]}")
    if config.trajectory.claim_block & (config.trajectory.claim_block - 1):
        raise ConfigError("trajectory.claim_block must be a power of two, so that a claim is a subtree "
                          f"of the gradient sum; got {config.trajectory.claim_block}")
    if config.gateway.history not in HISTORIES:
        raise ConfigError(f"gateway.history must be one of {', '.join(HISTORIES)}, got "
                          f"{config.gateway.history!r}")
    gateway_limits(config)
    engine_config(config)
    make_optimizer(config)
    train_programs(config, None)
    make_task_source(config)
    make_harness(config)
    runner_limits(config)


def engine_config(config: ConfigDict) -> EngineConfig:
    """Sizes of each cell's engine."""
    g = config.generation
    return EngineConfig(g.slots, g.max_context_tokens, tuple(g.kv_buckets_tokens),
                        tuple(g.prefill_chunks_tokens))


def make_optimizer(config: ConfigDict) -> Optimizer:
    """The core's optimizer, not yet placed."""
    o = config.optimizer
    return Optimizer(learning_rate=o.learning_rate, warmup_steps=o.warmup_steps, b1=o.b1, b2=o.b2,
                     weight_decay=o.weight_decay, clip_norm=o.clip_norm)


def make_harness(config: ConfigDict):
    """The harness that the runner starts."""
    return HARNESSES.get(config.harness.name)(**config.harness.options)


def runner_limits(config: ConfigDict) -> RunnerLimits:
    """Time limits of executions."""
    r = config.rollout
    return RunnerLimits(harness_timeout_s=r.harness_timeout_s, overall_timeout_s=r.overall_timeout_s,
                        concurrent_starts=r.concurrent_starts, grader_retries=r.grader_retries)


def make_runner(config: ConfigDict, tasks: TaskSource, sandboxes: LocalSandboxes, event) -> Runner:
    """Runs executions of the configured harness."""
    return Runner(make_harness(config), sandboxes, tasks.grade, runner_limits(config), event)


def device_count(config: ConfigDict) -> int:
    """Devices that the cells need."""
    return config.cells.count * math.prod(config.cells.shape)


@dataclasses.dataclass(frozen=True)
class PolicyModel:
    """The model that is trained: its shape, its first parameters (numpy or jax), its codec."""

    config: dense.ModelConfig
    params: Any
    codec: JinjaChat


def make_codec(config: ConfigDict) -> JinjaChat:
    """Conversation <-> ids of the policy, without its weights."""
    if config.model.name != "random":
        return JinjaChat(load_tokenizer(config.model.name), config.model.chat_template)
    return JinjaChat(ByteTokenizer(), config.model.chat_template)


def make_model(config: ConfigDict) -> PolicyModel:
    """Loads the pretrained checkpoint, or draws a random byte-level model ("random")."""
    if config.model.name != "random":
        loaded = load_pretrained(config.model.name)
        return PolicyModel(loaded.config, loaded.params,
                           JinjaChat(loaded.tokenizer, config.model.chat_template))
    tokenizer = ByteTokenizer()
    m = config.model
    shape = dense.ModelConfig(
        vocab_size=tokenizer.vocab_size, num_layers=m.num_layers, d_model=m.d_model,
        num_heads=m.num_heads, num_kv_heads=m.num_kv_heads, head_dim=m.head_dim, d_ff=m.d_ff,
        max_context_tokens=config.generation.max_context_tokens)
    params = jax.jit(functools.partial(dense.init_params, shape, config.seed))()
    return PolicyModel(shape, jax.device_get(params), JinjaChat(tokenizer, config.model.chat_template))


def make_pack(config: ConfigDict):
    """executions -> micro-steps in this run's shapes."""
    t = config.trajectory
    return functools.partial(pack, n_buckets=tuple(t.n_buckets), r_buckets=tuple(t.r_buckets))


def train_programs(config: ConfigDict, model: dense.ModelConfig | None) -> TrainPrograms:
    """The micro-step of this run, before its devices are known."""
    return TrainPrograms(model, parse_algorithm(config).loss, config.generation.temperature,
                         config.optimizer.remat, config.trajectory.logits_chunk_rows)


def make_cells(config: ConfigDict, model: dense.ModelConfig) -> list[LocalCell]:
    """All cells, the core first. Their programs compile when they start."""
    c = config.cells
    meshes = cell_meshes(c.count, tuple(c.shape))
    programs = train_programs(config, model)
    shapes = [(n, r) for n in config.trajectory.n_buckets for r in config.trajectory.r_buckets]
    common = (model, engine_config(config), programs, shapes,
              config.generation.prefix_cache_mb * 2**20)
    core = LocalCore(0, meshes[0], *common, optimizer=make_optimizer(config))
    return [core] + [LocalCell(i, meshes[i], *common, standalone=i >= c.count - c.standalone)
                     for i in range(1, c.count)]

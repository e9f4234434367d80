"""A run from its config to its report: build, resume, evaluate, train, evaluate, close.

Whatever ends it (all steps done, Ctrl-C, an error), harness processes are gone and files are valid
when `run` returns; the same command goes on from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pathlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from gyre.base.errors import WorkdirError
from gyre.base.protocols import ExecutionResult
from gyre.checkpointing.manager import CheckpointManager
from gyre.elastic.cells import Weights
from gyre.elastic.mesh_manager import MeshManager
from gyre.gateway.router import Router
from gyre.gateway.server import Gateway
from gyre.rollout.sandboxes.local import LocalSandboxes
from gyre.system import build
from gyre.system.loop import GroupState, StepResult, TrainingLoop
from gyre.system.meter import Meter
from gyre.system.rollouts import Rollouts
from gyre.telemetry.events import EventLog
from gyre.telemetry.metrics import MetricWriter
from gyre.telemetry.run_folder import RunFolder
from gyre.training.processor import FinishedExecution, process_group
from gyre.trajectory.sampling import parse_role_order
from gyre.trajectory.store import Store

_log = logging.getLogger(__name__)
Say = Callable[[str], None]


class Run:
    """One session of a run in a workdir. Use as a context manager.

    Args:
      config: resolved and locked.
      workdir: new, empty, or a run of the same config.
      say: prints a line for people.

    Raises:
      ConfigError: the config cannot work; nothing was touched.
      WorkdirError: the workdir is foreign, corrupt, in use, or of another config.
    """

    def __init__(self, config: ConfigDict, workdir: pathlib.Path, say: Say = print):
        build.check(config)
        self.config, self._say = config, say
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:  # closes what is open when building fails
            self._build(stack, workdir)
            self._stack = stack.pop_all()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------------ building

    def _build(self, stack: contextlib.ExitStack, workdir: pathlib.Path) -> None:
        config = self.config
        self.folder = stack.enter_context(RunFolder.open(
            workdir, json.loads(config.to_json_best_effort()), may_differ=("steps",)))
        self.events = stack.enter_context(EventLog(self.folder.events_path))
        self.store = Store(self.folder.store_path)
        stack.callback(self.store.close)
        self.checkpoints = CheckpointManager(self.folder.checkpoints_path, config.checkpoint.keep)
        stack.callback(self.checkpoints.close)
        self._say(f"loading {config.model.name}")
        model = build.make_model(config)
        self.codec, self._initial_params = model.codec, model.params
        algorithm = build.parse_algorithm(config)
        self.tasks = build.make_task_source(config)
        scheduler = build.make_scheduler(config)
        self.cells = build.make_cells(config, model.config)
        for cell in self.cells:
            stack.callback(cell.close)
        router = Router()
        gateway = Gateway(model.codec, router, model_name="policy",
                          role_rules=build.role_rules(),
                          max_context_tokens=config.generation.max_context_tokens,
                          accept_any_model=True, history=config.gateway.history,
                          limits=build.gateway_limits(config), live_streaming=False,
                          on_event=self.events.write)
        self.loop = TrainingLoop(
            build.loop_config(config, scheduler.phi), core=self.cells[0], store=self.store,
            tasks=self.tasks, dispatch=lambda group: self.rollouts.dispatch(group),
            process=functools.partial(
                process_group, algorithm=algorithm, j_max=config.trajectory.j_max or None, seed=config.seed,
                role_order=parse_role_order(config.trajectory.role_order),
                infra_failure=config.rollout.infra_failure),
            pack=build.make_pack(config), event=self.events.write, on_step=self._on_step)
        sandboxes = LocalSandboxes()
        stack.callback(sandboxes.close)
        self.rollouts = Rollouts(
            gateway, build.make_runner(config, self.tasks, sandboxes, self.events.write), self.store,
            seed=config.seed,
            group_size=config.group_size, temperature=config.generation.temperature,
            max_completion_tokens=config.generation.max_completion_tokens,
            concurrency=config.rollout.concurrency, event=self.events.write,
            on_execution=self.loop.on_execution, on_error=self.loop.raise_error)
        stack.callback(self.rollouts.stop)
        self.manager = MeshManager(
            self.cells, config.cells.executions, scheduler.policy, router, self.loop.post,
            self.events.write, self.loop.joined, self._raise)

    # ------------------------------------------------------------------ running

    def run(self) -> bool:
        """Trains to the last step. Returns False when it was interrupted."""
        began = time.monotonic()
        first_step = self._restore()
        self._say(f"compiling for {len(self.cells)} cells of {np.prod(self.config.cells.shape)} devices")
        self._start_cells()
        self.folder.record_session(devices=[str(d) for d in jax.devices()], resumed_step=first_step)
        self.events.write("run_start", resumed_step=first_step, cells=[
            {"cell": c.index, "devices": [str(d) for d in c.mesh.devices.flat],
             "capacity": self.config.cells.executions, "standalone": c.standalone}
            for c in self.cells])
        self.metrics = self._stack.enter_context(MetricWriter(self.folder, first_step))
        url = self.rollouts.start()
        self._say(f"gateway at {url}; ready after {time.monotonic() - began:.0f} s")
        self.manager.start()
        self.loop.attach(self.manager, self._weights)
        self.meter = Meter(self.manager, self.config.steps, first_step)
        if first_step == 0:
            self._evaluate(0)
        with self._interruptible():
            finished = self.loop.run()
        self.events.write("stop", reason="finished" if finished else "interrupted")
        if finished:
            self.loop.settle()
            if first_step < self.config.steps:
                self._evaluate(self.config.steps)
        if self.loop.step not in self.checkpoints.all_steps() and self.loop.step > 0:
            self._checkpoint(self.loop.step)
        return finished

    def evaluate(self, step: int | None = None) -> dict[str, Any]:
        """Evaluates a checkpoint on the held-out tasks; trains nothing, changes no trajectory.

        Args:
          step: of a checkpoint; 0 is the policy before training; None takes the newest.

        Raises:
          WorkdirError: no such checkpoint.
        """
        known = self.checkpoints.all_steps()
        if step is None:
            step = known[-1] if known else 0
        if step and step not in known:
            raise WorkdirError(f"{self.folder.path} has no checkpoint of step {step}; it has {known}")
        self._load(step or None)
        self._start_cells(train=False)
        self.rollouts.start()
        self.manager.start()
        self.loop.attach(self.manager, self._weights)
        return self._evaluate(step)

    @contextlib.contextmanager
    def _interruptible(self):
        """Ctrl-C and SIGTERM end the loop after the event in hand; a second one kills."""
        def stop(signum, frame):
            self._say("stopping: harnesses are ended, the state is saved (again to kill)")
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self.loop.stop()
        previous = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _raise(self, error: BaseException) -> None:
        raise error

    def _start_cells(self, train: bool = True) -> None:
        core, *others = self.cells
        core.start(self._weights, train, self._opt_state).result()
        del self._opt_state, self._initial_params
        self._weights = core.snapshot().result()
        for started in [cell.start(self._weights, train) for cell in others]:
            started.result()
        for cell in self.cells:
            cell.fault.add_done_callback(lambda f: self.loop.raise_error(f.exception()))

    # ------------------------------------------------------------------ resume

    def _restore(self) -> int:
        """Reads the newest checkpoint, if any, and makes the store agree with it. Returns its step."""
        latest = self.checkpoints.latest_step()
        self._load(latest)
        step = latest or 0
        if latest is not None:
            self._say(f"resuming after step {step}")
        self.folder.truncate_after(step)
        self._resume_groups(step)
        return step

    def _load(self, step: int | None) -> None:
        """Weights and optimizer state of a checkpoint, or of the untrained policy (None)."""
        if step is None:
            self._weights, self._opt_state = Weights(0, self._initial_params), None
            return
        state, _ = self.checkpoints.restore(step, self.cells[0].abstract_train_state())
        self._weights, self._opt_state = Weights(step, state["params"]), state["opt_state"]

    def _resume_groups(self, step: int) -> None:
        """Finished groups are trained as they are; interrupted ones, and those that were started by
        weights the checkpoint does not have, run again under the next attempt."""
        self.store.rollback_consumption(step)
        kept, again = [], list(self.store.drop_unfinished())
        for group in self.store.unconsumed():
            if group.version_dispatched > step:
                again.append(self.store.drop(group.group_index))
                continue
            members = [FinishedExecution(e.result, tuple(e.records))
                       for e in self.store.executions(group.group_index)]
            kept.append((GroupState(group.group_index, group.version_dispatched), members))
        self.loop.resume(step, kept, sorted((i, attempt + 1) for i, attempt in again),
                         self.store.next_group_index())

    # ------------------------------------------------------------------ after each step

    def _on_step(self, result: StepResult) -> None:
        row = self.meter.row(result)
        self.metrics.write(row)
        capacity = self.config.cells.executions * len(self.cells)
        self._say(self.meter.progress(row, capacity))
        if result.step % self.config.checkpoint.every_steps == 0:
            self._checkpoint(result.step)

    def _checkpoint(self, step: int) -> None:
        state = self.cells[0].train_state().result()
        self.checkpoints.save(step, state, {"step": step, "time_s": time.time()})
        self.events.write("checkpoint", step=step)

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Runs the held-out tasks once each and appends to eval.jsonl."""
        tasks = self.tasks.held_out()[:self.config.evaluation.tasks]
        if not tasks:
            return {}
        began = time.monotonic()
        results = self.rollouts.evaluate(
            tasks, f"{step}-{int(time.time())}", self.config.evaluation.temperature).result()
        row = evaluation_row(step, self.loop.weights.version, results, [t.kind for t in tasks],
                             time.monotonic() - began)
        self.folder.append_evaluation(row)
        self.events.write("evaluation", step=step, mean=row["mean_score"],
                          passed=round(row["pass_rate"] * row["n"]), n=row["n"])
        self._say(f"held-out tasks at step {step}: mean score {row['mean_score']:.3f}, "
                  f"passed {row['pass_rate']:.0%} of {row['n']}")
        return row


def evaluation_row(step: int, version: int, results: Sequence[ExecutionResult],
                   kinds: Sequence[str], wall_s: float) -> dict[str, Any]:
    """The line of eval.jsonl: means over graded executions; an ungraded one is not a 0."""
    graded = [(r.score.value, kind) for r, kind in zip(results, kinds, strict=True)
              if r.outcome.is_graded]
    values = np.array([v for v, _ in graded])
    by_kind = {kind: float(np.mean([v for v, k in graded if k == kind]))
               for kind in sorted({k for _, k in graded})}
    return {"step": step, "version": version, "n": len(graded), "n_ungraded": len(results) - len(graded),
            "mean_score": float(values.mean()) if graded else float("nan"),
            "pass_rate": float((values == 1.0).mean()) if graded else float("nan"),
            "by_kind": by_kind, "wall_s": round(wall_s, 3), "time_s": round(time.time(), 3)}

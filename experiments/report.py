"""Makes a run's report.html: `python -m experiments.report --workdir=runs/x`.

Works while the run goes on and after it was killed.
"""

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import app, flags

from gyre.base.errors import GyreError, WorkdirError
from gyre.telemetry.report import build_report
from gyre.telemetry.run_folder import read_config
from gyre.trajectory.store import Store, StoredExecution
from gyre.trajectory.tree import TrajectoryTree

Decode = Callable[[Sequence[int]], str]
GROUPS_LOOKED_AT = 40  # newest groups among which the example is chosen


def write(workdir: pathlib.Path, decode: Decode | None = None) -> pathlib.Path:
    """Writes the report with one trajectory tree in it and returns its path.

    Args:
      workdir: a run's folder.
      decode: token ids -> text of the tree's segments; None leaves the text out.

    Raises:
      WorkdirError: not a run's folder, or a file of it is corrupt.
    """
    workdir = pathlib.Path(workdir)
    read_config(workdir)
    example = None
    path = workdir / "trajectories.sqlite"
    if path.exists():
        with Store(path, read_only=True) as store:
            execution = most_interesting(store)
        if execution is not None:
            example = tree_to_dict(execution, decode)
    return build_report(workdir, example)


def most_interesting(store: Store) -> StoredExecution | None:
    """The execution with the most paths among the newest groups, then with the most calls; None
    when no execution has made a call."""
    best, best_rank = None, (0, 0)
    for group in store.groups()[-GROUPS_LOOKED_AT:]:
        for execution in store.executions(group.group_index):
            if execution.records:
                paths = len(TrajectoryTree.from_records(execution.records).leaves())
                if (paths, len(execution.records)) > best_rank:
                    best, best_rank = execution, (paths, len(execution.records))
    return best


def find(store: Store, execution_id: str) -> StoredExecution:
    """The execution of this id. Raises WorkdirError that says what ids look like here."""
    for group in store.groups():
        for execution in store.executions(group.group_index):
            if execution.result.execution_id == execution_id:
                return execution
    known = [e.result.execution_id for g in store.groups()[-3:]
             for e in store.executions(g.group_index)]
    raise WorkdirError(f"{store.path} has no execution {execution_id!r}; the newest are "
                       f"{', '.join(known[-8:]) or 'none'}")


def tree_to_dict(execution: StoredExecution, decode: Decode | None = None) -> dict[str, Any]:
    """An execution as the plain structure that gyre.telemetry.report_tree draws."""
    tree = TrajectoryTree.from_records(execution.records)
    ordinal = {r.call_id: i for i, r in enumerate(execution.records, 1)}
    order = tree.depth_first()
    place = {index: i for i, index in enumerate(order)} | {-1: -1}
    prompt_tokens: dict[str | None, int] = {None: 0}  # call -> tokens of its prompt and completion
    for r in execution.records:
        prompt_tokens[r.call_id] = (prompt_tokens[r.prefix_call] + len(r.suffix_ids)
                                    + len(r.completion_ids))
    segments = []
    for index in order:
        s = tree.segments[index]
        sampled = s.call_id != ""
        segments.append({
            "parent": place[s.parent], "tokens": len(s.tokens),
            "trainable": s.trainable, "agent_role": s.agent_role.value,
            "call": ordinal[s.call_id] if sampled else None,
            "versions": [int(s.versions.min()), int(s.versions.max())] if sampled else None,
            "text": decode(s.tokens.tolist()) if decode is not None else None})
    result = execution.result
    score = result.score.value
    return {
        "execution": result.execution_id, "task": result.task_id, "outcome": result.outcome.value,
        "score": score if score == score else None, "calls": len(execution.records),
        "wall_s": result.finished_s - result.started_s,
        "tokens_linearized": sum(n for call, n in prompt_tokens.items() if call is not None),
        "segments": segments}


def decoder(workdir: pathlib.Path) -> Decode:
    """Token ids -> text, by the tokenizer of the run's policy."""
    from gyre.system import build  # imports jax, which `write` does not need

    return build.make_codec(ml_collections.ConfigDict(read_config(workdir))).decode


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        workdir = pathlib.Path(flags.FLAGS.workdir)
        print(write(workdir, decoder(workdir)))
    except GyreError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # Not at import: other commands use `write` and have a --workdir of their own.
    flags.DEFINE_string("workdir", None, "The run's folder.")
    flags.mark_flag_as_required("workdir")
    app.run(main)

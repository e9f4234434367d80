"""Shows an execution's trajectory tree: `python -m experiments.trees --workdir=runs/x`.

Prints it as text and writes it as HTML beside the run's other files. `--execution=g000012-3` names
one; by default it is the one with the most branches among the newest groups.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from experiments import report
from gyre.base.errors import GyreError, WorkdirError
from gyre.telemetry.report import write_tree_page
from gyre.telemetry.run_folder import read_config
from gyre.trajectory import tree as trees
from gyre.trajectory.store import Store


def show(workdir: pathlib.Path, execution_id: str | None = None,
         decode: report.Decode | None = None) -> tuple[str, pathlib.Path]:
    """Draws one execution.

    Args:
      workdir: a run's folder.
      execution_id: which; None takes the one with the most branches.
      decode: token ids -> text; None shows ids in the text and no text in the HTML.

    Returns:
      The drawing as text, and the path of the HTML page.

    Raises:
      WorkdirError: not a run's folder, no such execution, or none that made a call.
    """
    read_config(workdir)
    with Store(workdir / "trajectories.sqlite", read_only=True) as store:
        if execution_id is not None:
            execution = report.find(store, execution_id)
        else:
            execution = report.most_interesting(store)
            if execution is None:
                raise WorkdirError(f"{store.path} has no execution with a call yet; "
                                   "wait for the first group to end")
    result = execution.result
    path = workdir / f"tree-{result.execution_id}.html"
    write_tree_page(path, report.tree_to_dict(execution, decode))
    head = (f"{result.execution_id}: task {result.task_id}, {result.outcome.value}, "
            f"score {result.score.value:.3g}, {len(execution.records)} calls")
    tree = trees.TrajectoryTree.from_records(execution.records)
    return f"{head}\n{trees.ascii(tree, decode)}", path


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    values = flags.FLAGS
    try:
        workdir = pathlib.Path(values.workdir)
        text, path = show(workdir, values.execution, report.decoder(workdir))
    except GyreError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"\n{path}")
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "The run's folder.")
    flags.DEFINE_string("execution", None, "Which execution; default: the one with most branches.")
    flags.mark_flag_as_required("workdir")
    app.run(main)

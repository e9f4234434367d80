"""Gateway and engine alone, for pointing a harness at by hand.

`python -m experiments.serve --config=configs/quickstart.py` prints the environment variables to set;
add `--checkpoint=runs/quickstart` to serve a trained policy. Ctrl-C ends it and writes what was said
to `--out`, when given.
"""

import asyncio
import pathlib
import signal
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.devices import set_up_devices
from gyre.base.errors import GyreError, WorkdirError


def load_cell(config, checkpoint):
    """One cell that serves the policy of a checkpoint folder, or the untrained one (None)."""
    from gyre.checkpointing.manager import CheckpointManager
    from gyre.elastic.cells import Weights
    from gyre.system import build

    model = build.make_model(config)
    core, *others = build.make_cells(config, model.config)
    for cell in others:
        cell.close()
    weights = Weights(0, model.params)
    if checkpoint is not None:
        manager = CheckpointManager(pathlib.Path(checkpoint) / "checkpoints", config.checkpoint.keep)
        step = manager.latest_step()
        if step is None:
            raise WorkdirError(f"{checkpoint} has no checkpoint")
        state, _ = manager.restore(step, core.abstract_train_state())
        weights = Weights(step, state["params"])
    core.start(weights, train=False).result()
    return core, model.codec, weights.version


async def serve(config, cell, codec):
    """Serves until Ctrl-C; returns the records."""
    from gyre.gateway.router import Router
    from gyre.gateway.server import Gateway
    from gyre.system import build

    router = Router()
    router.add(cell)
    gateway = Gateway(codec, router, model_name="policy", role_rules=build.role_rules(),
                      max_context_tokens=config.generation.max_context_tokens, live_streaming=True)
    url = await gateway.start(port=flags.FLAGS.port)
    key = gateway.open_execution("serve", seed=config.seed, temperature=config.generation.temperature,
                                 max_completion_tokens=config.generation.max_completion_tokens)
    print(f"export OPENAI_BASE_URL={url}\nexport OPENAI_API_KEY={key}\n# model: policy; Ctrl-C ends",
          flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    records = gateway.close_execution("serve")
    await gateway.stop()
    return records


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    config = flags.FLAGS.config
    set_up_devices(config)
    from gyre.system import build  # imports jax, after the devices are set up
    from gyre.trajectory.tree import TrajectoryTree, ascii

    try:
        build.check(config)
        cell, codec, version = load_cell(config, flags.FLAGS.checkpoint)
    except GyreError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"# serving version {version}")
    records = asyncio.run(serve(config, cell, codec))
    cell.close()
    print(f"{len(records)} calls")
    if flags.FLAGS.out:
        text = ascii(TrajectoryTree.from_records(records), codec.decode)
        pathlib.Path(flags.FLAGS.out).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "What to serve.", lock_config=True)
    flags.DEFINE_string("checkpoint", None, "Folder of a run; its newest weights are served.")
    flags.DEFINE_integer("port", 0, "Port on 127.0.0.1; 0 takes a free one.")
    flags.DEFINE_string("out", None, "File for the recorded trajectory tree, as text.")
    flags.mark_flags_as_required(["config"])
    app.run(main)

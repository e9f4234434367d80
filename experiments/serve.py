"""Gateway and engine alone, for pointing a harness at by hand.

`python -m experiments.serve --config=configs/quickstart.py` prints the environment variables to set;
add `--checkpoint=runs/quickstart` to serve a trained policy. `--engine=scripted:FILE` needs no model: answers
come from a file of rules (`gyre/gateway/scripted_rules.py`), and a config says only what the gateway grants
(`--config=configs/base.py --config.gateway.limits.calls=8`). Ctrl-C ends it and writes what was said to
`--out` (the trajectory tree as text) and `--records` (one JSON object a call), when given.
"""

import asyncio
import dataclasses
import json
import pathlib
import signal
import ssl
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.devices import set_up_devices
from gyre.base.errors import ConfigError, GyreError, WorkdirError

_SCRIPTED = "scripted:"
_SCRIPTED_COMPLETION_TOKENS = 1 << 16


@dataclasses.dataclass
class Served:
    """What answers: an endpoint with the codec of its model, and what to say of it."""

    endpoint: object
    codec: object
    description: str
    max_context_tokens: int
    max_completion_tokens: int
    seed: int = 0
    temperature: float = 1.0
    history: str = "exact"


def load_scripted(path):
    """An engine that plays rules over byte tokens. Loads no model; a config gives the gateway's settings."""
    from gyre.gateway.scripted import ScriptedEndpoint
    from gyre.gateway.scripted_rules import RuleScript
    from gyre.models.chat import JinjaChat
    from gyre.models.tokenizer import ByteTokenizer

    codec = JinjaChat(ByteTokenizer())
    endpoint = ScriptedEndpoint(RuleScript.load(pathlib.Path(path), codec), capacity=64)
    config = flags.FLAGS.config
    return Served(endpoint, codec, f"the rules of {path}", flags.FLAGS.max_context_tokens,
                  _SCRIPTED_COMPLETION_TOKENS, history=config.gateway.history if config else "exact")


def load_cell(config, checkpoint):
    """One cell that serves the policy of a checkpoint folder, or the untrained one (None)."""
    from gyre.checkpointing.manager import CheckpointManager
    from gyre.elastic.cells import Weights
    from gyre.system import build

    build.check(config)
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
    gen = config.generation
    return Served(core, model.codec, f"version {weights.version}", gen.max_context_tokens,
                  gen.max_completion_tokens, config.seed, gen.temperature, config.gateway.history)


def load(config):
    """What the flags ask for."""
    engine = flags.FLAGS.engine
    if engine.startswith(_SCRIPTED):
        return load_scripted(engine.removeprefix(_SCRIPTED))
    if engine != "cell":
        raise ConfigError(f"--engine must be cell or {_SCRIPTED}FILE, got {engine!r}")
    if config is None:
        raise ConfigError("--config says which model to serve; or serve --engine=scripted:FILE")
    set_up_devices(config)
    return load_cell(config, flags.FLAGS.checkpoint)


async def serve(served):
    """Serves until Ctrl-C; returns the records."""
    from gyre.gateway.limits import GatewayLimits
    from gyre.gateway.router import Router
    from gyre.gateway.server import Gateway
    from gyre.trajectory.agent_roles import all_harness_rules

    values = flags.FLAGS
    context = None
    if values.tls_cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(values.tls_cert, values.tls_key)
    router = Router()
    router.add(served.endpoint)
    gateway = Gateway(served.codec, router, model_name="policy", role_rules=all_harness_rules(),
                      max_context_tokens=served.max_context_tokens, accept_any_model=True,
                      history=served.history,
                      limits=GatewayLimits(**values.config.gateway.limits) if values.config
                      else GatewayLimits())
    url = await gateway.start(values.host, values.port, ssl_context=context,
                              allow_remote=values.allow_remote)
    key = gateway.open_execution("serve", seed=served.seed, temperature=served.temperature,
                                 max_completion_tokens=served.max_completion_tokens)
    root = url.removesuffix("/v1")
    print(f"# serving {served.description}; any model name will do; Ctrl-C ends\n"
          f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}\n"
          f"export ANTHROPIC_BASE_URL={root} ANTHROPIC_API_KEY={key}\n"
          f"export GOOGLE_GEMINI_BASE_URL={root} GEMINI_API_KEY={key}\n"
          f"# or without a key: {root}/s/{key}/v1", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    records = gateway.close_execution("serve")
    await gateway.stop()
    return records


def record_json(record, endpoint):
    """A record as JSON values, with what the engine got and gave where it can tell."""
    prompts = {r.call_id: r.prompt_ids.tolist() for r in getattr(endpoint, "requests", ())}
    data = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    data["sampling"] = dataclasses.asdict(record.sampling)
    data = {k: v.tolist() if hasattr(v, "tolist") else getattr(v, "value", v) for k, v in data.items()}
    return {**data, "trainable": record.trainable, "engine_prompt_ids": prompts.get(record.call_id),
            "engine_sampled_ids": getattr(endpoint, "sampled", {}).get(record.call_id)}


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    values = flags.FLAGS
    try:
        served = load(values.config)
        records = asyncio.run(serve(served))
    except (GyreError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if hasattr(served.endpoint, "close"):
        served.endpoint.close()
    print(f"{len(records)} calls")
    if values.out:
        from gyre.trajectory.tree import TrajectoryTree, ascii

        text = ascii(TrajectoryTree.from_records(records), served.codec.decode)
        pathlib.Path(values.out).write_text(text + "\n")
    if values.records:
        pathlib.Path(values.records).write_text("".join(
            json.dumps(record_json(r, served.endpoint)) + "\n" for r in records))
    return 0


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config", None, "The run whose model is served; with a scripted engine, the gateway's settings only.",
        lock_config=True)
    flags.DEFINE_string("engine", "cell", "cell, or scripted:FILE for answers by rules without a model.")
    flags.DEFINE_string("checkpoint", None, "Folder of a run; its newest weights are served.")
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; others need --allow_remote.")
    flags.DEFINE_integer("port", 0, "Port to listen on; 0 takes a free one.")
    flags.DEFINE_bool("allow_remote", False, "Let other machines in; give --tls_cert and --tls_key.")
    flags.DEFINE_string("tls_cert", None, "Certificate chain (PEM).")
    flags.DEFINE_string("tls_key", None, "Private key (PEM).")
    flags.DEFINE_integer("max_context_tokens", 1_000_000, "Of the scripted engine; a token is a byte.")
    flags.DEFINE_string("out", None, "File for the recorded trajectory tree, as text.")
    flags.DEFINE_string("records", None, "File for the calls' records, one JSON object a line.")
    app.run(main)

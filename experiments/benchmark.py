"""Measured ratios, from interleaved runs on one machine.

`python -m experiments.benchmark --suite=gateway` measures the gateway with a scripted engine beside a stub
that answers at once with a ready-made body, and, with `--agentlightning=PYTHON` (an interpreter of 3.12 or
later that has agentlightning 1.0.2 installed), beside that proxy in front of the same stub. It prints a table
and, with `--out=FILE`, writes the numbers as JSON.

Limits: the stub's numbers are those of the HTTP server alone. What the gateway adds is reading the JSON,
finding the conversation, rendering and encoding what is new, the way to the engine's thread and back, the
record, and writing the JSON.
"""

import asyncio
import contextlib
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from absl import app, flags

from experiments import http_load

_CHARACTERS_OF_TEMPLATE = 40  # what ChatML puts around one user message, in byte tokens


def prompt_bodies(n, tokenizer, stream=False):
    """n different requests of about 512 prompt tokens."""
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra") for b in ("to", "sa", "ve", "no", "di")]
    size = 512 - _CHARACTERS_OF_TEMPLATE if tokenizer == "bytes" else 1080
    bodies = []
    for i in range(n):
        text = f"{i} "
        while len(text) < size:
            text += rng.choice(words) + " "
        bodies.append(json.dumps({"model": "policy", "stream": stream, "messages": [
            {"role": "user", "content": text[:size]}]}).encode())
    return bodies


@contextlib.contextmanager
def server(*argv):
    """A process of `benchmark_servers`; yields the words that it printed."""
    process = subprocess.Popen([sys.executable, "-m", "experiments.benchmark_servers", *argv],
                               stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def agentlightning(python, stub_port):
    """The proxy in front of the stub; yields its target."""
    port = "18991"
    folder = tempfile.TemporaryDirectory()  # it writes its logs into the folder it is started in
    process = subprocess.Popen(
        [python, "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}",
         "default_proxy.model_name=policy"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        cwd=folder.name)
    try:
        _post(port, "/api/models", [{"model": "policy", "endpoint": f"http://127.0.0.1:{stub_port}/v1"}])
        _post(port, "/api/rollouts", [{"input": "x", "rollout_id": "r"}])
        yield http_load.Target("agentlightning", int(port),
                               "/proxy/rollout/r/attempt/a/mode/train/openai/v1/chat/completions")
    finally:
        process.kill()
        process.wait()
        folder.cleanup()


def _post(port, path, body):
    import urllib.error
    import urllib.request
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    for _ in range(100):  # it takes seconds to start
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return json.load(response)
        except urllib.error.HTTPError as e:
            raise RuntimeError(f"{path}: {e.code} {e.read()[:500]!r}") from e
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"nothing listens at port {port}")


def requests_suite(values):
    """Requests per second and latency at two concurrencies, interleaved."""
    with contextlib.ExitStack() as stack:
        stub_port, = stack.enter_context(server("stub"))
        port, key = stack.enter_context(server("gateway", values.tokenizer, "0"))
        targets = [http_load.Target("stub", int(stub_port), "/v1/chat/completions"),
                   http_load.Target("gateway", int(port), "/v1/chat/completions",
                                    (("Authorization", f"Bearer {key}"),))]
        if values.agentlightning:
            targets.append(stack.enter_context(agentlightning(values.agentlightning, stub_port)))
        found = {}
        for round_ in range(values.rounds + 1):
            for concurrency in (1, 16):
                bodies = prompt_bodies(values.requests, values.tokenizer)
                for target in targets:
                    load = asyncio.run(http_load.run(target, bodies, concurrency))
                    if round_:  # the first warms up
                        found.setdefault((target.name, concurrency), []).append(
                            (load.per_s, 1000 * statistics.median(load.latencies_s)))
    return {key: tuple(statistics.median(column) for column in zip(*rows, strict=True))
            for key, rows in found.items()}


def streaming_suite(values):
    """Milliseconds from a request to its first text, over what the same engine takes when called directly.

    Returns (the difference of the medians, the worst request's, the engine's own median). The two take
    turns, so that a pause that oversleeps does so in both.
    """
    pause_s = 0.03
    own_s, first_s = [], []
    with server("gateway", values.tokenizer, str(pause_s)) as (port, key):
        target = http_load.Target("gateway", int(port), "/v1/chat/completions",
                                  (("Authorization", f"Bearer {key}"),))
        bodies = prompt_bodies(60, values.tokenizer, stream=True)
        for body in bodies:
            load = asyncio.run(http_load.run(target, [body], 1, mark=b'"content": "w'))
            first_s += load.first_s
            own_s.append(_engine_first_s(pause_s))
    own = statistics.median(own_s)
    return 1000 * (statistics.median(first_s) - own), 1000 * (max(first_s) - own), 1000 * own


def _engine_first_s(pause_s):
    """Seconds from `submit` to the first chunk of the scripted engine that the gateway's server uses."""
    from gyre.base.protocols import CallRequest, EngineCall, SamplingParams
    from gyre.gateway.scripted import ScriptedEndpoint

    arrived = threading.Event()
    engine = ScriptedEndpoint(lambda request: range(64), chunk_tokens=8, delay_s=pause_s)
    request = CallRequest("c", "x", np.zeros(512, np.int32), SamplingParams(
        seed=0, temperature=1.0, max_tokens=64, stop_ids=()))
    began = time.perf_counter()
    engine.submit(EngineCall(request, lambda chunk: arrived.set(), [], [], []))
    arrived.wait()
    took_s = time.perf_counter() - began
    engine.cancel("c")
    return took_s


def matching_suite(calls=400, tokens=900_000):
    """CPU seconds that a session takes for one long execution."""
    from gyre.base.enums import FinishReason
    from gyre.base.protocols import Message, TokenChunk
    from gyre.gateway.session import Session
    from gyre.models.chat import JinjaChat
    from gyre.models.tokenizer import ByteTokenizer
    from gyre.trajectory.agent_roles import all_harness_rules

    codec = JinjaChat(ByteTokenizer())
    session = Session("x", codec, all_harness_rules(), seed=0, temperature=1.0, max_completion_tokens=4096,
                      max_context_tokens=1 << 21)
    tools = [{"type": "function", "function": {"name": "bash", "description": "d" * 2000,
                                               "parameters": {"type": "object"}}}]
    output = "x" * (tokens // calls - 145)
    history = [Message("system", "s" * 2000), Message("user", "Do it.")]
    matching_s = recording_s = 0.0
    for i in range(calls):
        arguments = json.dumps({"command": f"step {i}"})
        ids = [*f'Next.\n<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'.encode(),
               codec.stop_ids[0]]
        # A client sends its whole history anew: equal texts, other objects.
        sent = [Message(m.role, _copy(m.content), m.reasoning, m.tool_calls, m.tool_call_id) for m in history]
        began = time.process_time()
        pending = session.open_call(sent, tools)
        matching_s += time.process_time() - began
        began = time.process_time()
        pending.take(TokenChunk(tuple(ids), (-0.5,) * len(ids), (0,) * len(ids)))
        answer = session.answer(pending, FinishReason.STOP)
        session.delivered(pending)
        recording_s += time.process_time() - began
        history += [answer, Message("tool", f"{i} {output}", tool_call_id=answer.tool_calls[0].call_id)]
    return {"calls": calls, "tokens": int(pending.request.prompt_ids.size), "matching_cpu_s": matching_s,
            "recording_cpu_s": recording_s}


def _copy(text):
    return (text + " ")[:-1]


def gateway_suite(values):
    """Prints the gateway's numbers. Returns them."""
    requests = requests_suite(values)
    print(f"{'':16} {'requests/s':>22} {'p50 latency, ms':>22}")
    print(f"{'concurrency':16} {'1':>11}{'16':>11} {'1':>11}{'16':>11}")
    for name in dict.fromkeys(name for name, _ in requests):
        (r1, l1), (r16, l16) = requests[name, 1], requests[name, 16]
        print(f"{name:16} {r1:11.0f}{r16:11.0f} {l1:11.2f}{l16:11.2f}")
    result = {"requests": {f"{n} c{c}": v for (n, c), v in requests.items()}}
    if ("agentlightning", 1) in requests:
        for c in (1, 16):
            (gr, gl), (ar, al), (_, sl) = (requests[n, c] for n in ("gateway", "agentlightning", "stub"))
            print(f"concurrency {c}: {gr / ar:.1f} times agentlightning's requests/s, "
                  f"{(gl - sl) / (al - sl):.2f} of its added latency")
    first_ms, worst_ms, engine_ms = streaming_suite(values)
    print(f"first streamed text: {first_ms:.2f} ms over the engine's own {engine_ms:.2f} ms "
          f"(worst of 60: {worst_ms:.2f})")
    matching = matching_suite()
    print(f"one execution of {matching['calls']} calls and {matching['tokens']} tokens: "
          f"{matching['matching_cpu_s']:.2f} s of CPU for matching, {matching['recording_cpu_s']:.2f} s for "
          "answers and records")
    return {**result, "first_text_ms": first_ms, **matching}


SUITES = {"gateway": gateway_suite}


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    values = flags.FLAGS
    result = SUITES[values.suite](values)
    if values.out:
        pathlib.Path(values.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    flags.DEFINE_enum("suite", "gateway", sorted(SUITES), "What to measure.")
    flags.DEFINE_integer("rounds", 5, "Interleaved rounds; medians are printed.")
    flags.DEFINE_integer("requests", 400, "Requests of one round, target and concurrency.")
    flags.DEFINE_string("tokenizer", "bytes", "bytes, or the name of a pretrained model.")
    flags.DEFINE_string("agentlightning", None, "A python that has agentlightning installed.")
    flags.DEFINE_string("out", None, "File for the numbers as JSON.")
    app.run(main)

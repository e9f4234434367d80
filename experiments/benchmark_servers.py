"""The servers of the gateway's benchmark: `python -m experiments.benchmark_servers NAME` prints a port.

`stub` answers every request with the same ready-made body, as a model server would that costs nothing; it is
also what stands behind the proxies. `gateway` is gyre's, with a scripted engine.
"""

import asyncio
import json
import sys

from aiohttp import web

ANSWER_TOKENS = 128
_WORD = "word "


def stub_body():
    """A chat completion of `ANSWER_TOKENS` tokens with ids and log-probs, as model servers return them."""
    ids = list(range(1000, 1000 + ANSWER_TOKENS))
    logprob = {"token": _WORD, "logprob": -0.5, "bytes": list(_WORD.encode()), "top_logprobs": []}
    choice = {"index": 0, "message": {"role": "assistant", "content": _WORD * ANSWER_TOKENS},
              "finish_reason": "stop", "logprobs": {"content": [logprob] * ANSWER_TOKENS}, "token_ids": ids}
    return {"id": "chatcmpl-stub", "object": "chat.completion", "created": 0, "model": "policy",
            "choices": [choice], "prompt_token_ids": list(range(512)),
            "usage": {"prompt_tokens": 512, "completion_tokens": ANSWER_TOKENS,
                      "total_tokens": 512 + ANSWER_TOKENS}}


async def serve_stub():
    """Listens for ever."""
    body = json.dumps(stub_body()).encode()

    async def handle(request):
        await request.read()
        return web.Response(body=body, content_type="application/json")

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


async def serve_gateway(tokenizer, delay_s):
    """Listens for ever; prints the port and a key."""
    from gyre.gateway.router import Router
    from gyre.gateway.scripted import ScriptedEndpoint
    from gyre.gateway.server import Gateway
    from gyre.models.chat import JinjaChat
    from gyre.models.tokenizer import ByteTokenizer
    from gyre.trajectory.agent_roles import all_harness_rules

    if tokenizer == "bytes":
        codec = JinjaChat(ByteTokenizer())
    else:
        from gyre.models.weights import load_tokenizer
        codec = JinjaChat(load_tokenizer(tokenizer))
    ids = codec.tokenizer.encode_plain(_WORD * ANSWER_TOKENS)[:ANSWER_TOKENS - 1] + [codec.stop_ids[0]]
    router = Router()
    chunk_tokens = 8 if delay_s else ANSWER_TOKENS  # an engine without a pace of its own answers at once
    router.add(ScriptedEndpoint(lambda request: ids, capacity=16, chunk_tokens=chunk_tokens,
                                delay_s=delay_s))
    gateway = Gateway(codec, router, model_name="policy", role_rules=all_harness_rules(),
                      max_context_tokens=1 << 20)
    url = await gateway.start()
    key = gateway.open_execution("x", seed=0, temperature=1.0, max_completion_tokens=4096)
    print(url.rsplit(":", 1)[1].removesuffix("/v1"), key, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "stub":
        asyncio.run(serve_stub())
    else:
        asyncio.run(serve_gateway(sys.argv[2], float(sys.argv[3])))

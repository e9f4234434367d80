"""Runs five greedy requests through JetStream's own driver and through gyre's loop; prints both.

The driver calls the removed `jax.tree_map` and kills the process on any error, hence a process of its
own and the one-line shim.
"""

# ruff: noqa: E402, I001 - the shim and the light import come first
import asyncio
import json
import logging

import jax

jax.tree_map = jax.tree.map  # the driver needs it; removed from jax long ago

import numpy as np

import gyre.generation.jetstream  # noqa: F401
from jetstream.core import orchestrator
from jetstream.engine import tokenizer_api

from tests.generation import helpers as h

logging.getLogger().setLevel(logging.WARNING)
BOS = 1
NEW_TOKENS = 8


class Ids(tokenizer_api.Tokenizer):
    """Ids stay ids; nothing stops a request but its length."""

    pad_id, eos_id, bos_id, stop_tokens = 0, -1, BOS, frozenset()

    def encode(self, s, **kwargs):
        raise NotImplementedError("requests are given as ids")

    def decode(self, token_ids, **kwargs):
        return ""


async def by_orchestrator(prompts):
    engine = h.make_engine(slots=3)
    engine.get_tokenizer = lambda: None
    engine.build_tokenizer = lambda metadata: Ids()
    params = engine.load_params(h.params())
    driver = orchestrator.Driver([engine], [engine], [params], [params], interleaved_mode=True,
                                 jax_padding=False)

    async def ask(prompt):
        request = orchestrator.ActiveRequest(
            max_tokens=NEW_TOKENS, prefill_content=list(prompt), is_client_side_tokenization=True,
            return_channel=orchestrator.async_multifuture.AsyncMultifuture())
        driver.place_request_on_prefill_queue(request)
        return [int(t) async for samples in request.return_channel for t in samples[0].token_ids]

    answers = await asyncio.gather(*[ask(p) for p in prompts])
    driver.stop()
    return answers


def by_loop(prompts):
    loop = h.make_loop(slots=3)
    calls = [h.call([BOS, *p], max_tokens=NEW_TOKENS) for p in prompts]
    h.run(loop, *calls)
    return [c.ids for c in calls]


if __name__ == "__main__":
    some_prompts = [np.arange(3 + i, 9 + 3 * i).tolist() for i in range(5)]
    loop_tokens = by_loop(some_prompts)
    print(json.dumps({"orchestrator": asyncio.run(by_orchestrator(some_prompts)), "loop": loop_tokens}))

"""A gateway on a real loopback socket with a scripted engine, and a small client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp

from gyre.gateway.router import Router
from gyre.gateway.scripted import ScriptedEndpoint
from gyre.gateway.server import Gateway
from gyre.models.chat import JinjaChat
from gyre.models.tokenizer import ByteTokenizer
from gyre.trajectory.agent_roles import RoleRules

TOKENIZER = ByteTokenizer()
CODEC = JinjaChat(TOKENIZER)
IM_END = TOKENIZER.special_ids["<|im_end|>"]
RULES = RoleRules(summary_markers=("Summarize the conversation so far",),
                  sub_agent_markers=("You are a sub-agent",))
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def ids(text: str) -> list[int]:
    """A sampled completion: the text's bytes and the end-of-turn token."""
    return [*text.encode(), IM_END]


def tool_call(arguments: str, name: str = "bash") -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def run(main: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 20.0) -> None:
    """Runs an async test with a deadline."""
    asyncio.run(asyncio.wait_for(main(), timeout_s))


class Client:
    """One harness: a key, a base URL, plain requests."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, key: str):
        self.http, self.base_url, self.key = http, base_url, key

    async def post(self, body: Any, **kwargs: Any) -> tuple[int, Any]:
        """(status, parsed body) of a chat completion; a dict gets the model's name."""
        if isinstance(body, dict):
            body = json.dumps({"model": "gyre", **body}).encode()
        headers = {"Authorization": f"Bearer {self.key}", **kwargs.pop("headers", {})}
        async with self.http.post(self.base_url + "/chat/completions", data=body, headers=headers,
                                  **kwargs) as r:
            return r.status, await r.json()

    async def chat(self, messages: list[dict], **fields: Any) -> dict:
        """The assistant's message; the call must succeed."""
        status, body = await self.post({"messages": messages, **fields})
        assert status == 200, body
        return body["choices"][0]["message"]

    async def stream(self, messages: list[dict], **fields: Any) -> list[dict]:
        """All chunks of a streamed answer; it must end with [DONE]."""
        body = {"model": "gyre", "messages": messages, "stream": True, **fields}
        async with self.http.post(self.base_url + "/chat/completions", json=body,
                                  headers={"Authorization": f"Bearer {self.key}"}) as r:
            assert r.status == 200, await r.text()
            assert r.content_type == "text/event-stream"
            events = (await r.read()).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(e.removeprefix("data: ")) for e in events[:-2]]


class World:
    """What a test has in hand."""

    def __init__(self, gateway: Gateway, router: Router, http: aiohttp.ClientSession, base_url: str,
                 events: list[tuple[str, dict]]):
        self.gateway, self.router, self.http = gateway, router, http
        self.base_url, self.events = base_url, events

    def open(self, execution_id: str = "g000000-0", seed: int = 0, temperature: float = 1.0,
             max_completion_tokens: int = 256) -> Client:
        key = self.gateway.open_execution(execution_id, seed=seed, temperature=temperature,
                                          max_completion_tokens=max_completion_tokens)
        return Client(self.http, self.base_url, key)


@contextlib.asynccontextmanager
async def serve(*endpoints: ScriptedEndpoint, **options: Any) -> AsyncIterator[World]:
    """A started gateway over these endpoints."""
    router = Router()
    for endpoint in endpoints:
        router.add(endpoint)
    events: list[tuple[str, dict]] = []
    gateway = Gateway(CODEC, router, **{
        "model_name": "gyre", "role_rules": RULES, "max_context_tokens": 4096,
        "on_event": lambda kind, **fields: events.append((kind, fields)), **options})
    base_url = await gateway.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield World(gateway, router, http, base_url, events)
    finally:
        await gateway.stop()


async def until(condition: Callable[[], Any]) -> None:
    """Waits for a condition; the test's deadline is the limit."""
    while not condition():
        await asyncio.sleep(0.005)

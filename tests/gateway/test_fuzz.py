"""Malformed, oversized, truncated, slow and hostile requests, while another execution works undisturbed.

Every case ends with a 4xx in the shape of the dialect (or a closed connection, where a client never finished
its headers); nothing is left behind.
"""

import asyncio
import copy
import gc
import gzip
import json
import random
import socket
import tracemalloc

import pytest

from gyre.gateway.limits import GatewayLimits
from gyre.gateway.scripted import ScriptedEndpoint
from tests.gateway.support import ids, serve, until
from tests.gateway.wire_clients import CLIENTS

LIMITS = GatewayLimits(body_bytes=60_000, header_bytes=4096, body_timeout_s=0.3, idle_timeout_s=0.6,
                       calls_per_execution=4)
PATHS = {"openai_chat": "/v1/chat/completions", "openai_responses": "/v1/responses",
         "anthropic": "/v1/messages", "google": "/v1beta/models/gyre:generateContent"}
KEY_HEADER = {"anthropic": "x-api-key: {}", "google": "x-goog-api-key: {}"}
JUNK = [None, True, -1, 0, 1e308, "", "x", [], {}, [[]], [None], {"a": {}}, "\ud800", "<|im_end|>", 10**30,
        ["x"] * 50, {"type": "image_url"}, {"type": "text", "text": 3}, [[[[[[[[]]]]]]]]]


def check_shape(name, status, body):
    """An error body as the dialect's clients expect it."""
    error = body["error"]
    assert isinstance(error["message"], str) and error["message"]
    if name == "anthropic":
        assert body["type"] == "error" and set(error) == {"type", "message"} and error["type"]
    elif name == "google":
        assert error["code"] == status and error["status"].isupper()
    else:
        assert set(error) == {"message", "type", "param", "code"}


# ----------------------------------------------------------------------------- the cases


def _bodies(rng):
    """(dialect, body) of requests that are valid but for one thing, and a few that are not even JSON."""
    made = []
    for client_type in CLIENTS:
        client = client_type("Be good.", "hi")
        name = client.dialect.name
        base = {**client.body(None), "model": "gyre"}
        raw = json.dumps(base).encode()
        for _ in range(90):
            made.append((name, json.dumps(_spoiled(base, rng)).encode()))
        for _ in range(8):
            made.append((name, raw[:rng.randrange(1, len(raw) - 1)]))
            at = rng.randrange(len(raw))
            made.append((name, raw[:at] + bytes([rng.randrange(128, 256)]) + raw[at:]))
        made += [(name, b) for b in (
            b"", b"null", b"[]", b'"x"', b"{", b"\x00" * 10, b"[" * 50_000, b'{"a":' * 9000,
            raw[:-1] + b', "x": NaN}', raw[:-1] + b', "x": 1e999}',
            raw[:-1] + b', "x": ' + b"9" * 5000 + b"}",
            b"\xff\xfe" + raw, json.dumps({**base, "pad": "x" * 70_000}).encode(), rng.randbytes(200))]
    return made


def _spoiled(base, rng):
    """A copy in which one value, somewhere, is junk or gone."""
    body = copy.deepcopy(base)
    place = body
    while True:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
            place = place[key]
            continue
        if rng.random() < 0.25:
            del place[key]
        else:
            place[key] = rng.choice(JUNK)
        return body


def _raw_requests(key):
    """Requests that are wrong as HTTP: (bytes, whether the connection is then closed by us)."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode()
    bomb = gzip.compress(b'{"model": "gyre", "messages": "' + b"x" * 5_000_000 + b'"}')
    return [
        b"GARBAGE\r\n\r\n", b"GET\r\n\r\n", b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nX-Big: " + b"a" * 9000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(500)) + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nBad Header\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nA: \x00\r\n\r\n",
        head + b"Content-Length: -5\r\n\r\n{}", head + b"Content-Length: abc\r\n\r\n{}",
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        head + b"Content-Length: 999999999\r\n\r\n{}",
        head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
        head + b"Content-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + b"not gzip at all, sir",
        head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb,
        head + b"Content-Length: 100\r\n\r\n{", head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"a\"",
    ]


def _paths(key, ended):
    """(method, path, header) that lead nowhere or are not allowed in, and the status."""
    bearer = f"Authorization: Bearer {key}"
    return [
        ("POST", "/v1/chat/completions", "", 401), ("POST", "/v1/messages", "x-api-key: no", 401),
        ("POST", "/v1/responses", "Authorization: Bearer gk-" + "0" * 32, 401),
        ("POST", "/v1beta/models/gyre:generateContent?key=no", "", 401),
        ("GET", "/v1/models", "Authorization: Basic " + key, 401),
        ("GET", "/v1/models", "Authorization: Bearer", 401),
        ("POST", f"/s/{key}x/v1/messages", "", 401), ("POST", "/s//v1/messages", "", 401),
        ("POST", "/s/", "", 401),
        ("POST", "/v1/chat/completions", f"Authorization: Bearer {ended}", 410),
        ("POST", f"/s/{ended}/v1/messages", "", 410), ("GET", "/v1/models", f"x-api-key: {ended}", 410),
        ("POST", "/v1/embeddings", bearer, 404), ("POST", "/../../etc/passwd", bearer, 404),
        ("GET", "/%2e%2e/%00", bearer, 404), ("GET", "/metrics/x", bearer, 404),
        ("DELETE", "/v1/chat/completions", bearer, 405), ("GET", "/v1/messages", bearer, 405),
        ("PUT", "/v1/responses", bearer, 405), ("OPTIONS", "/v1/chat/completions", bearer, 405),
        ("POST", f"/s/{key}/v1/models", "", 405), ("PATCH", "/v1beta/models/gyre:countTokens", bearer, 405)]


# ---------------------------------------------------------------------------- the clients


async def _exchange(port, data, patience_s=5.0):
    """Sends bytes and reads one answer: (status, body), or (None, b"") for a closed connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(patience_s):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            return int(head.split()[1]), await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None, b""
    finally:
        writer.close()


def _post(name, key, body):
    header = KEY_HEADER.get(name, "Authorization: Bearer {}").format(key)
    lines = (f"POST {PATHS[name]} HTTP/1.1", "Host: x", header, f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body


async def _honest(world, stop):
    """Another execution that goes on with its conversation until it is told to stop. Returns its calls."""
    client, history, calls = world.open("honest"), [{"role": "user", "content": "hi"}], 0
    while not stop.is_set():
        reply = await client.chat(history)
        assert reply["content"] == "fine"
        calls += 1
        history = [*history[-20:], reply, {"role": "user", "content": f"and {calls}"}]
        await asyncio.sleep(0.002)
    return calls


async def _spoiled_bodies(port, key, rng):
    """Sends all spoiled bodies. Returns how many were refused."""
    refused = 0
    for name, body in _bodies(rng):
        status, answer = await _exchange(port, _post(name, key, body))
        assert status is not None and status < 500, (name, body[:300], status, answer)
        if status != 200:
            check_shape(name, status, json.loads(answer))
            refused += 1
    return refused


@pytest.mark.parametrize("seed", [0, 1])
def test_refused_bodies_leave_nothing_behind(seed):
    async def main():
        endpoint = ScriptedEndpoint(lambda r: ids("fine"), capacity=16)
        async with serve(endpoint, limits=LIMITS) as w:
            port = int(w.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
            stop = asyncio.Event()
            tasks = len(asyncio.all_tasks())
            honest = asyncio.create_task(_honest(w, stop))
            assert await _spoiled_bodies(port, w.open("hostile").key, random.Random(seed)) >= 300
            stop.set()
            assert await honest > 20
            assert len(w.gateway.close_execution("honest")) > 20
            assert all(r.finish.value == "stop" for r in w.gateway.close_execution("hostile"))
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
            assert not w.gateway._running and not w.gateway._tasks
            sizes = []
            tracemalloc.start()
            for turn in range(3):  # the same requests each time: what grows, leaks
                await _spoiled_bodies(port, w.open(f"hostile-{turn}").key, random.Random(seed))
                w.gateway.close_execution(f"hostile-{turn}")
                for kept in (endpoint.requests, endpoint.sampled, w.events):
                    kept.clear()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
        assert sizes[2] - sizes[1] < 200_000, sizes

    asyncio.run(asyncio.wait_for(main(), 120))


def test_broken_http_and_closed_doors():
    async def main():
        async with serve(ScriptedEndpoint(lambda r: ids("fine"), capacity=16), limits=LIMITS) as w:
            port = int(w.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
            stop = asyncio.Event()
            honest = asyncio.create_task(_honest(w, stop))
            key, ended = w.open("hostile").key, w.open("ended").key
            w.gateway.close_execution("ended")
            for data in _raw_requests(key):
                status, answer = await _exchange(port, data)
                assert status is not None and 400 <= status < 500, (data[:200], status, answer)
                check_shape("openai_chat", status, json.loads(answer))
            for method, path, header, wanted in _paths(key, ended):
                lines = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{header}".rstrip()
                status, answer = await _exchange(port, lines.encode() + b"\r\nContent-Length: 2\r\n\r\n{}")
                assert status == wanted, (method, path, answer)
                assert "message" in json.loads(answer)["error"]
            stop.set()
            assert await honest > 5
            assert w.gateway.close_execution("hostile") == []

    asyncio.run(asyncio.wait_for(main(), 60))


def test_slow_clients_are_cut_off():
    async def main():
        async with serve(ScriptedEndpoint(lambda r: ids("fine"), capacity=16), limits=LIMITS) as w:
            port = int(w.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
            stop = asyncio.Event()
            honest = asyncio.create_task(_honest(w, stop))
            key = w.open("hostile").key
            tasks = len(asyncio.all_tasks())

            async def drip(data, pause_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                began = asyncio.get_running_loop().time()

                async def write():
                    for i in range(len(data)):
                        writer.write(data[i:i + 1])
                        await asyncio.sleep(pause_s)

                writing = asyncio.create_task(write())
                answer = await _all(reader)
                writing.cancel()
                writer.close()
                return asyncio.get_running_loop().time() - began, answer

            head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: 100\r\n\r\n"
            results = await asyncio.gather(
                *(drip(b"GET /v1/models HTTP/1.1\r\nX-Slow: " + b"a" * 500, 0.05) for _ in range(10)),
                *(drip(b"", 1.0) for _ in range(10)),
                *(_slow_body(port, head.encode()) for _ in range(10)))
            for took_s, answer in results[:20]:
                assert took_s < 3.0 and answer == b""  # closed: there was no request to answer
            for took_s, answer in results[20:]:
                assert took_s < 4.0 and answer.startswith(b"HTTP/1.1 408 ")
                check_shape("anthropic", 408, json.loads(answer.split(b"\r\n\r\n", 1)[1]))
            stop.set()
            assert await honest > 20
            await until(lambda: len(asyncio.all_tasks()) <= tasks)
            assert w.gateway.close_execution("hostile") == []

    asyncio.run(asyncio.wait_for(main(), 60))


async def _all(reader):
    """What comes until the connection ends, in whatever way."""
    answer = b""
    try:
        while data := await reader.read(65536):
            answer += data
    except ConnectionError:
        pass
    return answer


async def _slow_body(port, head):
    """Sends headers and a byte of the body now and then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = asyncio.get_running_loop().time()
    writer.write(head)
    reading = asyncio.create_task(_all(reader))
    for _ in range(60):
        if reading.done():
            break
        writer.write(b" ")
        await asyncio.sleep(0.05)
    answer = await reading
    writer.close()
    return asyncio.get_running_loop().time() - began, answer


def test_a_client_that_does_not_read_is_gone_after_a_while():
    async def main():
        limits = GatewayLimits(write_timeout_s=0.3)
        # Six bytes of JSON each, more than the kernel buffers for a client that takes nothing.
        endpoint = ScriptedEndpoint(lambda r: ids("\x01" * 1_200_000), chunk_tokens=100_000)
        async with serve(endpoint, limits=limits, max_context_tokens=1 << 23) as w:
            port = int(w.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
            client = w.open("deaf", max_completion_tokens=1 << 22)
            body = json.dumps({"model": "gyre", "stream": True,
                               "messages": [{"role": "user", "content": "hi"}]}).encode()
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", port))
            deaf.sendall(_post("openai_chat", client.key, body))
            await until(lambda: [f for k, f in w.events if k == "call"])
            assert not w.gateway._running
            record, = w.gateway.close_execution("deaf")
            assert not record.delivered
            deaf.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_too_many_calls_at_once_are_told_to_come_back():
    async def main():
        endpoint = ScriptedEndpoint(lambda r: ids("slow" * 10), capacity=16, delay_s=0.02)
        async with serve(endpoint, limits=LIMITS) as w:
            client, other = w.open("many"), w.open("other")
            many = asyncio.gather(*(client.post({"messages": [{"role": "user", "content": str(i)}]})
                                    for i in range(7)))
            await asyncio.sleep(0.1)
            assert (await other.post({"messages": [{"role": "user", "content": "hi"}]}))[0] == 200
            answers = await many
            assert sorted(status for status, _ in answers) == [200] * 4 + [429] * 3
            refused = next(body for status, body in answers if status == 429)
            assert refused["error"]["code"] == "rate_limit_exceeded"
            assert len(w.gateway.close_execution("many")) == 4

    asyncio.run(asyncio.wait_for(main(), 30))

"""Choosing endpoints: prefix affinity, load, waiting, cancellation."""

import asyncio
import threading

import numpy as np
import pytest

from gyre.base.enums import FinishReason
from gyre.base.errors import EngineError
from gyre.base.protocols import CallRequest, EngineCall, SamplingParams
from gyre.gateway.router import Router, _prefix_keys
from gyre.gateway.scripted import ScriptedEndpoint
from tests.gateway.support import run, until


class FakeEndpoint:
    """Holds calls for ever; its load is what a test says."""

    def __init__(self, name, capacity=2, refuse=False):
        self.name, self.capacity, self.refuse = name, capacity, refuse
        self.in_flight = 0
        self.submitted, self.cancelled = [], []

    def submit(self, call):
        if self.refuse:
            raise EngineError("stopped")
        self.in_flight += 1
        self.submitted.append(call)

    def cancel(self, call_id):
        self.cancelled.append(call_id)


def _call(prompt=(1, 2, 3), name="req-1", emit=lambda chunk: None, max_tokens=4):
    return EngineCall(CallRequest(name, "e", np.asarray(prompt, np.int32),
                                  SamplingParams(max_tokens=max_tokens)), emit)


def _request(start, stop, name="r", execution="e", continues=""):
    return CallRequest(name, execution, np.arange(start, stop, dtype=np.int32), SamplingParams(max_tokens=4),
                       continues)


def _router(*endpoints):
    router = Router()
    for e in endpoints:
        router.add(e)
    return router


def test_least_loaded_relative_to_capacity():
    a, b = FakeEndpoint("a", 2), FakeEndpoint("b", 8)
    router = _router(a, b)
    a.in_flight, b.in_flight = 1, 3  # 1/2 against 3/8
    assert router.pick(_request(0, 3, execution="x")) is b
    b.in_flight = 5
    assert router.pick(_request(100, 103, execution="y")) is a


def test_prompts_with_a_common_beginning_share_an_endpoint():
    a, b = FakeEndpoint("a"), FakeEndpoint("b")
    router = _router(a, b)
    assert router.pick(_request(0, 100, execution="x")) is a
    a.in_flight = 1
    assert router.pick(_request(0, 150, execution="y")) is a  # shares its first 64 tokens
    assert router.pick(_request(1000, 1100, execution="z")) is b
    a.in_flight = 2
    assert router.pick(_request(0, 150, execution="u")) is b  # a is full, b has room
    a.in_flight = b.in_flight = 2
    assert router.pick(_request(0, 150, execution="v")) is b  # where it was last sent
    a.in_flight = b.in_flight = 0
    assert router.pick(_request(0, 150, execution="w")) is b


def test_a_call_follows_the_call_that_it_continues_then_its_execution():
    a, b = FakeEndpoint("a", 9), FakeEndpoint("b", 9)
    router = _router(a, b)
    assert router.pick(_request(0, 100, "main")) is a
    a.in_flight = 5
    router.remove("a")
    assert router.pick(_request(5000, 5100, "sub")) is b  # the execution's engine has left service
    router.add(a)
    assert router.pick(_request(7000, 7100, "other")) is b  # a new conversation: the execution's last
    assert router.pick(_request(0, 300, "next", continues="main")) is a
    assert router.pick(_request(0, 400, "more", continues="next")) is a
    assert router.pick(_request(5000, 5300, "sub2", continues="sub")) is b


def test_the_cost_of_a_choice_does_not_grow_with_the_prompt():
    assert len(_prefix_keys(np.arange(10))) == len(_prefix_keys(np.arange(64))) == 1
    assert len(_prefix_keys(np.arange(4096))) == 4
    assert _prefix_keys(np.arange(4096)) == _prefix_keys(np.arange(1_000_000))


def test_removed_endpoints_get_nothing_and_names_are_unique():
    a, b = FakeEndpoint("a"), FakeEndpoint("b")
    router = _router(a, b)
    assert router.pick(_request(0, 100)) is a
    router.remove("a")
    router.remove("a")
    assert router.endpoints == ("b",)
    assert router.pick(_request(0, 100)) is b
    router.add(b)
    with pytest.raises(ValueError, match="remove it first"):
        router.add(FakeEndpoint("b"))


def test_cancel_reaches_a_call_wherever_it_is():
    async def main():
        a, b = FakeEndpoint("a"), FakeEndpoint("b")
        router = _router(a)
        call = _call()
        assert await router.submit(call, 1.0) is a
        router.add(b)  # the call may have moved here
        router.remove("a")  # or still be where it was sent
        router.cancel(call)
        assert call.cancelled
        assert a.cancelled == b.cancelled == ["req-1"]

    run(main)


def test_a_refusing_endpoint_is_tried_again_then_reported():
    async def main():
        bad = FakeEndpoint("bad", refuse=True)
        router = _router(bad)
        with pytest.raises(EngineError, match="stopped"):
            await router.submit(_call(), 5.0)
        task = asyncio.create_task(router.submit(_call(), 5.0))
        await asyncio.sleep(0.01)
        router.remove("bad")
        router.add(good := FakeEndpoint("good"))
        assert await task is good

    run(main)


def test_waiting_calls_start_when_an_endpoint_comes_and_time_out_otherwise():
    async def main():
        router = Router()
        with pytest.raises(EngineError, match="in service: none"):
            await router.submit(_call(), 0.05)
        tasks = [asyncio.create_task(router.submit(_call(name=f"r{i}"), 5.0)) for i in range(3)]
        await asyncio.sleep(0.02)
        late = FakeEndpoint("late")
        threading.Thread(target=router.add, args=(late,)).start()
        assert await asyncio.gather(*tasks) == [late] * 3

    run(main)


def test_affinity_memory_is_bounded():
    router = Router(remembered=5)
    router.add(FakeEndpoint("a"))
    for i in range(10):
        router.pick(_request(i, i + 1, f"r{i}", f"e{i}"))
    assert len(router._places) == 5


def test_scripted_endpoint_keeps_the_engine_contract():
    async def main():
        chunks = {"r0": [], "r1": [], "r2": []}
        endpoint = ScriptedEndpoint([[5] * 10, [5] * 3, [5] * 50], capacity=1, delay_s=0.002)
        calls = [_call(name=n, emit=chunks[n].append, max_tokens=30) for n in chunks]
        for call in calls:
            endpoint.submit(call)
        assert endpoint.in_flight == 3
        endpoint.cancel("r2")
        endpoint.cancel("unknown")
        await until(lambda: endpoint.in_flight == 0 and chunks["r2"])
        for call, got in zip(calls, chunks.values(), strict=True):
            assert [c.finish for c in got[:-1]] == [None] * (len(got) - 1)
            assert [t for c in got for t in c.ids] == call.ids
        assert len(calls[0].ids) == 10
        assert [c[-1].finish for c in chunks.values()] == [
            FinishReason.STOP, FinishReason.STOP, FinishReason.CANCELLED]
        with pytest.raises(EngineError, match="no answer"):
            endpoint.submit(_call())

    run(main)

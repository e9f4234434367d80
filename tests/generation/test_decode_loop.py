"""Admission, stop reasons, cancellation, prefix reuse, hand-over between loops."""

import numpy as np
import pytest

from gyre.base.enums import FinishReason
from gyre.base.errors import ContextOverflowError
from tests.generation import helpers as h


def test_stop_id_ends_a_call_and_is_part_of_it():
    prompt = np.arange(20)
    expected = h.greedy(h.params(), prompt, 6)
    chunks = []
    c = h.call(prompt, max_tokens=20, stop_ids=[expected[4]], chunks=chunks)
    h.run(h.make_loop(), c)
    assert c.ids == expected[:expected.index(expected[4]) + 1]
    assert chunks[-1].finish is FinishReason.STOP
    assert [i for chunk in chunks for i in chunk.ids] == c.ids
    assert all(chunk.finish is None for chunk in chunks[:-1])


def test_length_by_max_tokens_and_by_the_context():
    loop, chunks = h.make_loop(), []
    h.run(loop, h.call(np.arange(60), max_tokens=50, chunks=chunks))
    assert len(chunks) == 4 and chunks[-1].finish is FinishReason.LENGTH  # 64 tokens of context
    short = []
    h.run(loop, h.call(np.arange(5), max_tokens=3, chunks=short))
    assert len(short) == 3 and short[-1].finish is FinishReason.LENGTH


def test_a_prompt_that_does_not_fit_gets_an_error_and_harms_nobody():
    loop, chunks = h.make_loop(), []
    good = h.call(np.arange(5), max_tokens=4)
    h.run(loop, h.call(np.arange(64), chunks=chunks, call_id="long"), good)
    assert isinstance(chunks[0].error, ContextOverflowError) and len(chunks) == 1
    assert len(good.ids) == 4


def test_cancel_queued_and_running():
    loop = h.make_loop(slots=1)
    first, second = [], []
    loop.submit(h.call(np.arange(5), max_tokens=30, call_id="a", chunks=first))
    loop.submit(h.call(np.arange(6), max_tokens=30, call_id="b", chunks=second))
    loop.step()
    loop.cancel("b")
    loop.cancel("a")
    loop.cancel("never heard of")
    loop.step()
    assert first[-1].finish is FinishReason.CANCELLED and len(first) == 2
    assert [c.finish for c in second] == [FinishReason.CANCELLED]
    assert loop.in_flight == 0 and not loop.has_work


def test_prompts_of_one_group_and_later_turns_are_computed_once():
    loop = h.make_loop(slots=4)
    prompt = np.arange(30)
    group = [h.call(prompt, max_tokens=4, temperature=1.0, seed=s, call_id=str(s)) for s in range(4)]
    h.run(loop, *group)
    assert loop.stats.prefilled_tokens == 30
    turn = np.concatenate([prompt, group[2].ids, [7, 8, 9]])
    c = h.call(turn, max_tokens=6)
    h.run(loop, c)
    assert loop.stats.prefilled_tokens == 30 + 3  # the KV of the second turn's start is there
    assert c.ids == h.greedy(h.params(), turn, 6)


def test_new_weights_forget_the_cache_and_need_an_empty_loop():
    loop = h.make_loop()
    prompt = np.arange(12)
    h.run(loop, h.call(prompt, max_tokens=3))
    loop.submit(h.call(prompt, max_tokens=9, call_id="live"))
    loop.step()
    with pytest.raises(RuntimeError, match="drain or export"):
        loop.load(loop.engine.load_params(h.params(1)), 1)
    while loop.has_work:
        loop.step()
    loop.load(loop.engine.load_params(h.params(1)), 1)
    c = h.call(prompt, max_tokens=5)
    h.run(loop, c)
    assert c.ids == h.greedy(h.params(1), prompt, 5) != h.greedy(h.params(0), prompt, 5)
    assert set(c.versions) == {1}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("with_kv", [True, False])
@pytest.mark.parametrize("steps_before", [1, 5, 9])
def test_a_call_moved_in_mid_generation_goes_on_exactly(temperature, with_kv, steps_before):
    prompt = np.arange(15, 33)
    stayed = h.call(prompt, max_tokens=20, temperature=temperature, seed=11)
    h.run(h.make_loop(), stayed)
    source, target = h.make_loop(slots=4), h.make_loop(slots=2)
    chunks = []
    moved = h.call(prompt, max_tokens=20, temperature=temperature, seed=11, chunks=chunks)
    queued = [h.call(np.arange(i + 3), max_tokens=5, call_id=f"q{i}") for i in range(6)]
    source.submit(moved)
    for q in queued:
        source.submit(q)
    for _ in range(steps_before):
        source.step()
    parked = source.export()
    assert source.in_flight == 0
    source.release()
    for p in parked:
        if not with_kv:
            p = type(p)(p.call, None, p.version)
        target.adopt(p)
    h.run(target)
    assert moved.ids == stayed.ids
    np.testing.assert_allclose(moved.logprobs, stayed.logprobs, atol=1e-5)
    assert [i for c in chunks for i in c.ids] == moved.ids
    for i, q in enumerate(queued):
        assert q.ids == h.greedy(h.params(), np.arange(i + 3), 5)


def test_kv_of_other_weights_is_never_continued():
    prompt = np.arange(9)
    source, target = h.make_loop(), h.make_loop(seed=1, version=1)
    c = h.call(prompt, max_tokens=8)
    source.submit(c)
    for _ in range(3):
        source.step()
    for p in source.export():
        target.adopt(p)
    h.run(target)
    assert c.versions == [0] * 3 + [1] * 5
    assert c.ids[3:] == h.greedy(h.params(1), [*prompt, *c.ids[:3]], 5)


def test_a_call_cancelled_while_it_moves_ends():
    source, target, chunks = h.make_loop(), h.make_loop(), []
    source.submit(h.call(np.arange(9), max_tokens=30, call_id="x", chunks=chunks))
    source.step()
    source.cancel("x")
    for p in source.export():
        target.adopt(p)
    target.step()
    assert chunks[-1].finish is FinishReason.CANCELLED and target.in_flight == 0

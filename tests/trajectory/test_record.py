import dataclasses

import numpy as np
import pytest

from gyre.base.enums import FinishReason
from gyre.trajectory.record import all_ids, prompt_ids
from tests.trajectory.support import call


def test_prompt_is_the_prefix_call_and_the_suffix():
    records = [call("a", [1, 2], [3]), call("b", [4], [5, 6], prefix="a"),
               call("c", [], [7], prefix="b")]
    by_id = {r.call_id: r for r in records}
    assert prompt_ids(records[0], by_id).tolist() == [1, 2]
    assert prompt_ids(records[2], by_id).tolist() == [1, 2, 3, 4, 5, 6]
    assert all_ids(records[2], by_id).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert all_ids(records[2], by_id).dtype == np.int32


def test_a_missing_or_circular_prefix_is_an_error():
    a, b = call("a", [1], [2], prefix="b"), call("b", [1], [2], prefix="a")
    with pytest.raises(ValueError, match="'b', which is not among the records"):
        prompt_ids(a, {})
    with pytest.raises(ValueError, match="continues it in turn"):
        prompt_ids(a, {"a": a, "b": b})


@pytest.mark.parametrize(("change", "message"), [
    ({"suffix_ids": np.array([1.0])}, "suffix_ids must be a 1-D int32 array, got float64"),
    ({"completion_ids": [1, 2]}, "completion_ids must be a 1-D int32 array, got list"),
    ({"logprobs": np.zeros(1, np.float32)}, "got 1 logprobs for 2 completion ids"),
    ({"versions": np.zeros(0, np.int32)}, "got 0 versions for 2"),
    ({"completion_ids": np.array([1, -1], np.int32)}, "has the id -1"),
    ({"suffix_ids": np.zeros(0, np.int32)}, "the prompt is empty"),
    ({"prefix_call": "a"}, "names itself"),
])
def test_construction_refuses_what_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(call("a", [1], [2, 3]), **change)


def test_only_delivered_calls_with_finite_logprobs_are_trainable():
    good = call("a", [1], [2, 3])
    assert good.trainable
    assert dataclasses.replace(good, finish=FinishReason.LENGTH).trainable
    for change in ({"delivered": False}, {"finish": FinishReason.CANCELLED},
                   {"logprobs": np.zeros(0, np.float32)},
                   {"logprobs": np.array([-1.0, np.nan], np.float32)}):
        assert not dataclasses.replace(good, **change).trainable

"""Real harnesses, unmodified, against `experiments.serve` with a scripted engine, cut off from any network.

    mkdir -p FOLDER && cp tests/harnesses/package.json FOLDER && npm install --prefix FOLDER
    python3 -m venv FOLDER/mini && FOLDER/mini/bin/pip install -r tests/harnesses/requirements.txt
    GYRE_HARNESSES=FOLDER python -m pytest tests/harnesses
"""

import numpy as np
import pytest

from gyre.base.enums import AgentRole, FinishReason
from gyre.base.protocols import SamplingParams
from gyre.trajectory.record import CallRecord, all_ids, prompt_ids
from gyre.trajectory.tree import TrajectoryTree
from tests.harnesses import recipes, scenarios

_TOKENS = {"suffix_ids": np.int32, "completion_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
MAIN, SUB, SUMMARY = "main", "sub_agent", "main_summary"
slow = pytest.mark.slow
_HARNESSES = [pytest.param(recipes.CODEX, id="codex"), pytest.param(recipes.PI, id="pi"),
              pytest.param(recipes.CLAUDE_CODE, id="claude_code", marks=slow),
              pytest.param(recipes.MINI, id="mini_swe_agent", marks=slow)]
every = pytest.mark.parametrize("recipe", _HARNESSES)
with_sub_agents = pytest.mark.parametrize("recipe", _HARNESSES[:3])


def _run(recipe, scenario, tmp_path):
    if recipes.folder() is None:
        pytest.skip("GYRE_HARNESSES does not name a folder with installed harnesses")
    if recipe is recipes.MINI and not recipes.path_of(recipe.command).exists():
        pytest.skip("mini-swe-agent is not installed; it is 754 MB")
    outcome = scenarios.run(recipe, scenario(recipe), tmp_path)
    assert not outcome.step["timed_out"], outcome.log[-3000:]
    assert outcome.step["calls_running"] == 0
    return outcome


def _records(outcome):
    """The records, checked: ids in and out are the engine's, and each sampled token is in the tree once."""
    made = []
    for data in outcome.records:
        data = dict(data)
        prompt, sampled, trainable = (data.pop(k) for k in (
            "engine_prompt_ids", "engine_sampled_ids", "trainable"))
        data.update({k: np.asarray(data[k], dtype) for k, dtype in _TOKENS.items()})
        data.update(agent_role=AgentRole(data["agent_role"]), finish=FinishReason(data["finish"]),
                    sampling=SamplingParams(**{**data["sampling"],
                                               "stop_ids": tuple(data["sampling"]["stop_ids"])}))
        record = CallRecord(**data)
        made.append(record)
        by_id = {r.call_id: r for r in made}
        assert record.trainable == trainable
        assert prompt_ids(record, by_id).tolist() == prompt
        assert record.completion_ids.tolist() == sampled[:len(record.completion_ids)]
        if record.finish is not FinishReason.CANCELLED:
            assert len(record.completion_ids) == len(sampled)
    flat = TrajectoryTree.from_records(made).flatten()
    unique = {tuple(ids[:len(ids) - n]) for r in made if r.trainable
              for ids in [all_ids(r, by_id).tolist()] for n in range(len(r.completion_ids))}
    assert int(flat.train.sum()) == len(unique)
    return made


def _shape(records, parent=None):
    """The answered calls as a forest: (role, what continues it), siblings in order of role."""
    return sorted(((r.agent_role.value, _shape(records, r.call_id)) for r in records
                   if r.prefix_call == parent and r.finish is not FinishReason.CANCELLED), key=repr)


def _chain(*roles):
    """A forest of one path."""
    return [(roles[0], _chain(*roles[1:]))] if roles else []


@every
def test_three_tool_turns_and_parallel_calls(recipe, tmp_path):
    outcome = _run(recipe, scenarios.tools, tmp_path)
    records = _records(outcome)
    assert outcome.step["code"] == 0
    assert _shape(records) == _chain(*[MAIN] * 5)
    assert all(r.trainable for r in records)
    assert "café ✓" in outcome.log


@with_sub_agents
def test_a_sub_agent(recipe, tmp_path):
    outcome = _run(recipe, scenarios.sub_agent, tmp_path)
    records = _records(outcome)
    assert outcome.step["code"] == 0
    waits = 1 if recipe is recipes.CODEX else 0
    assert _shape(records) == [*_chain(*[MAIN] * (3 + waits)), *_chain(*[SUB] * 3)]
    assert all(r.trainable for r in records)


@with_sub_agents
def test_a_compaction(recipe, tmp_path):
    outcome = _run(recipe, scenarios.compaction, tmp_path)
    records = _records(outcome)
    assert outcome.step["code"] == 0
    summaries = [r for r in records if r.agent_role is AgentRole.MAIN_SUMMARY]
    before, after = 3, 3
    if recipe is recipes.PI:  # compacts when its turn is over, then has a second prompt; asks twice
        before, twice = 4, 2
        assert [r.trainable for r in summaries] == [False, True]
    else:
        twice = 1
        assert all(r.trainable for r in records)
    forest = _chain(*[MAIN] * before) + _chain(*[MAIN] * after) + _chain(SUMMARY) * twice
    if recipe is recipes.CLAUDE_CODE:  # asks for the summary behind an inner turn, without the last exchange
        forest = [(MAIN, [(MAIN, [(MAIN, []), (SUMMARY, [])])])] + _chain(*[MAIN] * after)
    assert _shape(records) == sorted(forest, key=repr)
    assert len(summaries) == twice


@every
def test_a_retry_after_an_engine_failure(recipe, tmp_path):
    outcome = _run(recipe, scenarios.retry, tmp_path)
    records = _records(outcome)
    assert outcome.step["code"] == 0
    assert _shape(records) == _chain(MAIN, MAIN, MAIN)
    failed, = [r for r in records if not r.trainable]
    retry, = [r for r in records if r.metadata.get("retry_of") == failed.call_id]
    assert failed.metadata["replaced_by"] == retry.call_id


@every
def test_killed_in_mid_stream(recipe, tmp_path):
    outcome = _run(recipe, scenarios.killed, tmp_path)
    records = _records(outcome)
    assert outcome.step["killed"] and outcome.step["disconnect_seen_s"] < 1.0
    assert [r.trainable for r in records] == [True, False]
    assert records[1].finish is FinishReason.CANCELLED
    assert 0 < len(records[1].completion_ids) < 200

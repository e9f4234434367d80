"""What is trained is, token for token, what was sampled: over turns, a compaction and a sub-agent.

A real harness process talks through the real gateway to an engine whose answers are known; the chat
codec is never asked what the ids mean on their way to the micro-step.
"""

import asyncio
import random

import numpy as np
import pytest

from gyre.base.enums import AgentRole, Outcome
from gyre.base.protocols import Score, ScoreStatus, Task
from gyre.gateway.router import Router
from gyre.gateway.scripted import ScriptedEndpoint, scripted_logprob
from gyre.gateway.server import Gateway
from gyre.models.chat import JinjaChat
from gyre.models.tokenizer import ByteTokenizer
from gyre.rollout.harnesses import reference_harness
from gyre.rollout.runner import Runner
from gyre.rollout.sandboxes.local import LocalSandboxes
from gyre.system.build import role_rules
from gyre.trajectory.packing import TrainExecution, execution_weight, pack
from gyre.trajectory.sampling import select_paths
from gyre.trajectory.tree import TrajectoryTree

STEPS = "\n".join(f"{i}. Say something about {what}." for i, what in
                  enumerate(["apples", "pears", "plums", "figs"], 1))


def run_execution(seed):
    """One execution of four steps; returns (records, [(prompt, completion)], result)."""
    codec, sent = JinjaChat(ByteTokenizer()), []
    rng = random.Random(seed)

    def script(request):
        # Any bytes, half characters and control names included: none of it may matter. What fits
        # no UTF-8 could not be encoded back.
        answer = [rng.randrange(256) for _ in range(rng.randint(1, 12))] + [codec.stop_ids[0]]
        sent.append((request.prompt_ids.tolist(), answer))
        return answer

    async def main():
        router = Router()
        router.add(ScriptedEndpoint(script))
        gateway = Gateway(codec, router, model_name="policy", role_rules=role_rules(),
                          max_context_tokens=4096)
        url = await gateway.start()
        sandboxes = LocalSandboxes()
        runner = Runner(reference_harness(context_budget_tokens=150, sub_agent_from=3, final_turn=1),
                        sandboxes, lambda task, workspace: Score(1.0, ScoreStatus.OK))
        key = gateway.open_execution("x", seed=1, temperature=1.0, max_completion_tokens=64)
        result = await runner.run(Task("t", STEPS), "x", url, key)
        records = gateway.close_execution("x")
        await gateway.stop()
        sandboxes.close()
        return records, result
    records, result = asyncio.run(main())
    return records, sent, result


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_trained_ids_are_sampled_ids(seed):
    records, sent, result = run_execution(seed)
    assert result.outcome is Outcome.COMPLETED
    roles = {r.agent_role for r in records}
    assert {AgentRole.MAIN, AgentRole.MAIN_SUMMARY, AgentRole.SUB_AGENT} <= roles
    assert any(r.prefix_call is not None for r in records)  # a second turn reused recorded ids

    tree = select_paths(TrajectoryTree.from_records(records), j_max=100)
    micro_steps = pack([TrainExecution("x", 0, tree, 1.0, execution_weight(tree))],
                       n_buckets=(2048, 4096), r_buckets=(64, 256))
    trained = {}
    for micro in micro_steps:
        for row, w, logp in zip(micro.rows, micro.w, micro.old_logp, strict=True):
            if w == 0:
                continue
            path, node = [], int(row)
            while node >= 0:
                path.append(int(micro.tokens[node]))
                node = int(micro.pred[node])
            assert tuple(path[::-1]) not in trained
            trained[tuple(path[::-1])] = float(logp)
    expected = {tuple(prompt + answer[:i + 1]): scripted_logprob(answer[i], i)
                for prompt, answer in sent for i in range(len(answer))}
    assert trained.keys() == expected.keys()
    np.testing.assert_allclose([trained[k] for k in expected], list(expected.values()), rtol=1e-6)


def test_j_max_limits_paths_and_prefers_the_main_agent():
    records, _, _ = run_execution(0)
    full = TrajectoryTree.from_records(records)
    one = select_paths(full, j_max=1, rng=np.random.default_rng(0))
    by_id = {r.call_id: r for r in records}
    assert {by_id[c].agent_role for c in one.call_ids} <= {AgentRole.MAIN, AgentRole.MAIN_SUMMARY}
    leaves = np.setdiff1d(np.arange(len(one)), one.parent)
    assert leaves.size == 1

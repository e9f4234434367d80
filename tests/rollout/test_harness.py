"""The reference harness as a process, against a fake server."""

import asyncio
import os
import subprocess
import sys

import pytest

from gyre.base.enums import Outcome
from gyre.base.errors import ConfigError
from gyre.base.protocols import Task
from gyre.rollout.graders.checks import grade
from gyre.rollout.harnesses import HARNESSES, reference
from gyre.rollout.harnesses.reference import _UNSAFE, find_block, split_steps
from gyre.rollout.runner import Runner, RunnerLimits
from gyre.rollout.sandboxes.local import LocalSandboxes
from tests.rollout.fake_openai import FakeOpenAI, block

FOUR = Task("four", "1. Create a folder named a.\n2. Create a folder named b.\n"
            "3. Create a folder named c.\n4. Create a folder named d.",
            payload={"checks": [{"folders": [name]} for name in "abcd"]})


def run(task, answer, tmp_path, **settings):
    """One execution; returns (result, fake server)."""
    harness = HARNESSES.get("reference")(retry_delay_s=0.01, **settings)
    runner = Runner(harness, LocalSandboxes(tmp_path), grade, RunnerLimits(20.0, 30.0))
    with FakeOpenAI(answer) as fake:
        return asyncio.run(runner.run(task, "e0", fake.url, "gk-secret")), fake


def make_folder(messages, body):
    """A scripted policy for tasks of the form `Create a folder named X.`."""
    last = messages[-1]["content"]
    if last.startswith("Summarize the conversation so far"):
        return "I made a\n folder."
    return "Sure:\n" + block("mkdir " + last.rsplit(" ", 1)[1].rstrip("."))


@pytest.mark.parametrize("stream", [0, 1])
def test_text_mode_with_sub_agents_and_compaction(tmp_path, stream):
    result, fake = run(FOUR, make_folder, tmp_path, context_budget_tokens=20, stream=stream)
    assert (result.outcome, result.score.value, result.exit_code) == (Outcome.COMPLETED, 1.0, 0)
    seen = [request["messages"] for request in fake.requests]
    # Messages behind the opening (system prompt and examples), which begins each conversation.
    opening = [{"role": "system", "content": reference.TEXT_SYSTEM}]
    for question, command in reference.TEXT_EXAMPLES:
        opening += [{"role": "user", "content": question},
                    {"role": "assistant", "content": block(command)}]
    n = len(opening)
    assert [len(messages) - n for messages in seen] == [1, 3, 1, 1, 1]
    assert seen[0][:n] == seen[2][:n] == opening
    assert seen[0][n]["content"] == "Step 1 of 4: Create a folder named a."
    # The summary call extends the first conversation by exactly what the policy said.
    assert seen[1][:n + 1] == seen[0]
    assert seen[1][n + 1]["content"] == "Sure:\n" + block("mkdir a")
    assert seen[1][n + 2]["content"].endswith("Exit code 0.")
    assert fake.requests[1]["max_tokens"] == 24 and fake.requests[0]["max_tokens"] == 48
    assert seen[2][n]["content"] == ("Done so far: I made a folder.\n"
                                     "Step 2 of 4: Create a folder named b.")
    for messages, name in zip(seen[3:], "cd", strict=True):
        assert messages[0]["content"] == "You are a sub-agent. " + reference.TEXT_SYSTEM
        assert messages[1:n] == opening[1:]
        assert messages[n]["content"] == f"Create a folder named {name}."
    assert set(fake.keys) == {"Bearer gk-secret"} and len(fake.connections) == 1


def test_text_mode_reports_results_and_hands_sub_agents_back(tmp_path):
    def answer(messages, body):
        last = messages[-1]["content"]
        return "done" if "All steps" in last else block("echo hi; ls nothing")

    result, fake = run(FOUR, answer, tmp_path, final_turn=1)
    assert result.outcome is Outcome.COMPLETED and result.score.value == 0.0
    second, last = fake.requests[1]["messages"], fake.requests[-1]["messages"]
    assert second[-1]["content"].startswith("Exit code 2. hi\nls: cannot access 'nothing'")
    assert second[-1]["content"].endswith("\nStep 2 of 4: Create a folder named b.")
    assert "The sub-agent did step 4. Exit code 2. hi" in last[-1]["content"]


def test_retry_turn_tells_what_failed(tmp_path):
    task = Task("one", "Create a folder named a.", payload={"checks": [{"folders": ["a"]}]})

    def answer(messages, body):
        return block("mkdir a") if "Try again" in messages[-1]["content"] else "no idea"

    result, fake = run(task, answer, tmp_path, retry_turns=1)
    assert result.score.value == 1.0
    assert fake.requests[0]["messages"][-1]["content"] == "Create a folder named a."
    assert fake.requests[1]["messages"][-1]["content"] == (
        "Exit code 127. no bash block\nThat failed. Try again: Create a folder named a.")


@pytest.mark.parametrize("stream", [0, 1])
def test_tools_mode_with_bash_sub_agent_and_compaction(tmp_path, stream):
    def answer(messages, body):
        system, last = messages[0]["content"], messages[-1]["content"]
        if last.startswith("Summarize the conversation so far"):
            return "Made all." if "Made two." in messages[1]["content"] else "Made two."
        if system.startswith("You are a sub-agent"):
            return [("bash", {"command": "mkdir b"})] if len(messages) == 2 else "made b"
        if "Work done so far: Made two." in last:
            return [("bash", {"command": "mkdir c d"}), ("fly", {}), ("bash", {"cmd": 1})]
        if "Work done so far: Made all." in last:
            return "all done"
        return [("bash", {"command": "mkdir a; ls"}), ("task", {"prompt": "Make b."})]

    # The system prompt, the instruction and the answer are 60 to 70 words; a sub-agent has fewer.
    result, fake = run(FOUR, answer, tmp_path, mode="tools", stream=stream,
                       context_budget_tokens=50)
    assert (result.outcome, result.score.value) == (Outcome.COMPLETED, 1.0), result
    seen = [request["messages"] for request in fake.requests]
    assert [t["function"]["name"] for t in fake.requests[0]["tools"]] == ["bash", "task"]
    assert [t["function"]["name"] for t in fake.requests[1]["tools"]] == ["bash"]
    assert seen[1][1]["content"] == "Make b." and seen[2][3]["role"] == "tool"
    summary = seen[3]
    assert [m["role"] for m in summary] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert summary[3]["content"] == "Exit code 0.\na" and summary[4]["content"] == "made b"
    assert summary[3]["tool_call_id"] == summary[2]["tool_calls"][0]["id"]
    assert seen[4] == [seen[0][0], {"role": "user", "content": (
        FOUR.instruction + "\n\nWork done so far: Made two.")}]
    results = [m["content"] for m in seen[5] if m["role"] == "tool"]
    assert results[0] == "Exit code 0." and "no tool 'fly'" in results[1]
    assert "string 'command'" in results[2] and len(seen) == 7


def test_retries_on_overload_and_honours_retry_after(tmp_path):
    replies = [(429, {"Retry-After": "0.01"}), (503, {}), (500, {})]

    def answer(messages, body):
        return replies.pop(0) if replies else make_folder(messages, body)

    result, fake = run(FOUR, answer, tmp_path)
    assert result.outcome is Outcome.COMPLETED and result.score.value == 1.0
    assert fake.hits == len(fake.requests) + 3 and result.log_tail.count("retry") == 3


@pytest.mark.parametrize("status, code", [(401, 3), (410, 3), (400, 1), (404, 1)])
def test_client_errors_end_it_at_once(tmp_path, status, code):
    result, fake = run(FOUR, lambda *_: (status, {}), tmp_path)
    assert (result.outcome, result.exit_code) == (Outcome.HARNESS_CRASHED, code)
    assert fake.hits == 1 and f"HTTP {status}" in result.log_tail
    assert result.score.value == 0.0  # graded all the same


def test_gives_up_after_its_retries(tmp_path):
    result, fake = run(FOUR, lambda *_: (503, {}), tmp_path, max_retries=2)
    assert result.outcome is Outcome.HARNESS_CRASHED and fake.hits == 3
    assert "gave up after 2 retries" in result.log_tail


@pytest.mark.parametrize("budget", [{"max_turns": 2}, {"max_total_tokens": 10}])
def test_its_own_budget_is_a_timeout_with_a_partial_score(tmp_path, budget):
    result, _ = run(FOUR, make_folder, tmp_path, **budget)
    assert (result.outcome, result.exit_code) == (Outcome.HARNESS_TIMEOUT, reference.BUDGET_EXIT)
    assert result.score.value == 0.5  # by hand: 2 turns of 5 tokens made 2 of 4 folders


def test_commands_are_limited_in_time_and_output(tmp_path):
    answers = [block("sleep 60"), block("seq 100000"), block("sleep 60 & echo started"),
               block("seq 99999999")]

    def answer(messages, body):
        return answers.pop(0)

    result, fake = run(FOUR, answer, tmp_path, command_timeout_s=0.4, sub_agent_from=0)
    assert result.outcome is Outcome.COMPLETED
    last = [m["content"] for m in fake.requests[-1]["messages"] if m["role"] == "user"]
    last = last[len(reference.TEXT_EXAMPLES):]
    assert last[1].startswith("Exit code 124. timed out after 0.4 s")
    assert last[2].startswith("Exit code 0. 1\n2\n3") and len(last[2]) < 280
    assert last[3].startswith("Exit code 0. started")
    assert result.finished_s - result.started_s < 8


@pytest.mark.parametrize("text, finish, wanted", [
    ("```bash\nls\n```", "stop", "ls"), ("x ```sh\na\nb\n```\n```bash\nc\n```", "stop", "a\nb"),
    ("```\nls\n```", "stop", "ls"), ("```bash\nls\nrm a", "length", "ls"),
    ("```bash\nls", "stop", "ls"), ("```bash\nls", "length", None), ("ls", "stop", None),
    ("```python\nls\n```", "stop", None), ("```bash\n```", "stop", None)])
def test_find_block(text, finish, wanted):
    assert find_block(text, finish) == wanted


def test_split_steps():
    assert split_steps("Delete a.\n") == ["Delete a."]
    assert split_steps("Do this:\n1. A b.\n 2) C.\n") == ["A b.", "C."]


@pytest.mark.parametrize("command, unsafe", [
    ("rm -rf /", True), ("cat > ../x", True), ("rm -rf ~", True), ("echo a>/etc/x", True),
    ("rm $(echo L2V0Yw)", True), ("kill -9 -1", True), ("cd ..", True), ("mkdir plum", False),
    ("ls > /dev/null", False), ("sed -i s/a/b/ c.txt", False), ("cat a/b.txt", False),
    ("for i in 1 2; do touch f$i; done", False)])
def test_command_policy(command, unsafe):
    assert bool(_UNSAFE.search(command)) is unsafe


def test_unknown_and_mistyped_settings_are_refused():
    for settings, wanted in (({"max_turnz": 3}, "max_turnz"), ({"max_turns": "3"}, "int"),
                             ({"mode": "chat"}, "text or tools")):
        with pytest.raises(ConfigError, match=wanted):
            HARNESSES.get("reference")(**settings)


def test_it_starts_in_a_tenth_of_a_second_of_cpu():
    env = {"OPENAI_BASE_URL": "nonsense", "OPENAI_API_KEY": "k", "GYRE_HARNESS_INSTRUCTION": "x"}
    before = os.times()
    for _ in range(3):
        done = subprocess.run([sys.executable, "-S", "-E", "-B", reference.__file__], env=env,
                              capture_output=True, text=True)
        assert done.returncode == 1 and "OPENAI_BASE_URL must be" in done.stderr
    after = os.times()
    cpu_s = (after.children_user + after.children_system
             - before.children_user - before.children_system) / 3
    print(f"start of the reference harness: {cpu_s:.3f} CPU s")
    assert cpu_s < 0.5  # a loaded machine's bound; it is about 0.06 on an idle one

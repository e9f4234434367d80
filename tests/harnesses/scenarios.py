"""What a scripted engine says to a harness in each scenario, and running one scenario in a namespace."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

from tests.harnesses.recipes import PORT, Recipe
from tests.source_tree import ROOT

PROMPT = "MAIN-MARK: please look around in this folder and finish."
_FINAL = "All done. Final answer: café ✓"


@dataclasses.dataclass
class Scenario:
    """One run of one harness.

    Attributes:
      rules: of the scripted engine.
      window_tokens: the context that the harness believes in; a token is a byte.
      prompts: of one session.
      kill_after_calls: kill it while the call after that many is being answered; None for never.
    """

    rules: list[dict[str, Any]]
    window_tokens: int = 1_000_000
    prompts: tuple[str, ...] = (PROMPT,)
    kill_after_calls: int | None = None


def _final(recipe: Recipe, last: str) -> dict[str, Any]:
    """How the harness is brought to its end."""
    if recipe.name == "mini_swe_agent":  # it ends on a command's output, not on an answer without calls
        return {"last": last, "text": _FINAL,
                "calls": [recipe.call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]}
    return {"last": last, "text": _FINAL}


def tools(recipe: Recipe) -> Scenario:
    """Three tool turns, then two calls at once."""
    return Scenario([
        {"last": "MAIN-MARK", "reasoning": "I should look: café ✓ \n\nsecond para",
         "text": "Let me look.\n\n", "calls": [recipe.call("echo step-$((0+1)) 'café ✓'")]},
        {"last": "step-1", "calls": [recipe.call("echo step-$((1+1))")]},
        {"last": "step-2", "text": " Leading space", "calls": [recipe.call("echo step-$((2+1))")]},
        {"last": "step-3", "reasoning": "two", "calls": [recipe.call("echo par-$((1))"),
                                                         recipe.call("echo par-$((2))")]},
        _final(recipe, "par-2")])


def sub_agent(recipe: Recipe) -> Scenario:
    """The main agent hands a job to a sub-agent, which makes two calls of its own."""
    job = "SUB-MARK: list the files of this folder and report."
    arguments = {"spawn_agent": {"message": job}, "subagent": {"agent": "worker", "task": job},
                 "Agent": {"description": "sub job", "prompt": job}}[recipe.sub_agent_tool]
    rules = [
        {"last": "SUB-RESULT", "text": "", "calls": [recipe.call("echo main-$((1))")]},
        {"last": "MAIN-MARK", "text": "Delegating.",
         "calls": [{"name": recipe.sub_agent_tool, "arguments": arguments}]},
        {"last": "SUB-MARK", "text": "sub works", "calls": [recipe.call("echo sub-$((1))")]},
        {"last": "sub-1", "calls": [recipe.call("echo sub-$((2))")]},
        {"last": "sub-2", "text": "SUB-RESULT: two files."},
        _final(recipe, "main-1")]
    if recipe.sub_agent_tool == "spawn_agent":  # asynchronous: started, then waited for
        rules.insert(1, {"last": r'agent_id\W+([0-9a-f-]{36})', "calls": [
            {"name": "wait_agent", "arguments": {"targets": ["$1"], "timeout_ms": 30000}}]})
    return Scenario(rules)


def compaction(recipe: Recipe) -> Scenario:
    """Large outputs until the harness summarises and goes on with the summary."""
    windows = {"codex": 60_000, "pi": 30_000, "claude_code": 100_000}
    words = 1500 if recipe.name == "claude_code" else 600

    def large_output(n):
        return recipe.call(f"python3 -c \"print('lorem ipsum dolor '*{words})\"; echo big-$(({n}))")

    summary = ("SUMMARY-MARK <summary>\n1. Primary request: MAIN task; files listed; café ✓. Next: finish.\n"
               "</summary>")
    rules = [
        {"last": "CONTEXT CHECKPOINT COMPACTION|respond with text only", "text": summary},
        {"prompt": "context summarization assistant", "text": summary},
        {"last": "after-2", "text": _FINAL},
        {"last": "after-1", "calls": [recipe.call("echo after-$((2))")]},
        {"last": "SECOND-MARK", "calls": [recipe.call("echo after-$((1))")]},
        {"last": "SUMMARY-MARK", "calls": [recipe.call("echo after-$((1))")]},
        {"last": "big-3", "prompt": "SUMMARY-MARK", "calls": [recipe.call("echo after-$((1))")]},
        {"last": "MAIN-MARK", "calls": [large_output(1)]},
        {"last": "big-1", "calls": [large_output(2)]},
        {"last": "big-2", "calls": [large_output(3)]},
        {"last": "big-3", "text": "First answer."}]
    prompts = (PROMPT, "SECOND-MARK: go on.") if recipe.name == "pi" else (PROMPT,)
    return Scenario(rules, windows[recipe.name], prompts)


def retry(recipe: Recipe) -> Scenario:
    """An engine failure that the harness sees as a 503, and gets over."""
    return Scenario([
        {"last": "MAIN-MARK", "calls": [recipe.call("echo step-$((1))")]},
        {"last": "step-1", "error": "the engine is down", "times": 1},
        {"last": "step-1", "calls": [recipe.call("echo step-$((2))")]},
        _final(recipe, "step-2")])


def killed(recipe: Recipe) -> Scenario:
    """The harness dies while its second answer is under way."""
    return Scenario([
        {"last": "MAIN-MARK", "calls": [recipe.call("echo step-$((1))")]},
        {"last": "step-1", "text": "a long story, told slowly " * 40, "delay_s": 0.02}], kill_after_calls=1)


@dataclasses.dataclass
class Outcome:
    """What came of a run: the harness' end and output, and the records as JSON."""

    step: dict[str, Any]
    log: str
    records: list[dict[str, Any]]


def run(recipe: Recipe, scenario: Scenario, folder: pathlib.Path, timeout_s: float = 90) -> Outcome:
    """Runs a scenario in a network namespace of its own, with a throw-away home and workspace."""
    home, workspace = folder / "home", folder / "workspace"
    for path, text in {**recipe.files(scenario.window_tokens), ".keep": ""}.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    workspace.mkdir()
    (workspace / "hello.py").write_text("print('hello')\n")
    rules, records, result, log = (folder / n for n in ("rules.jsonl", "records.jsonl", "result.json", "log"))
    rules.write_text("".join(json.dumps(r) + "\n" for r in scenario.rules))
    spec = {
        "serve": [sys.executable, "-m", "experiments.serve", f"--engine=scripted:{rules}", f"--port={PORT}",
                  f"--records={records}", "--config=configs/base.py",
                  "--config.gateway.limits.engine_retries=0"],
        "steps": [{"argv": recipe.argv(*scenario.prompts), "env": recipe.env(home, scenario.window_tokens),
                   "cwd": str(workspace), "timeout_s": timeout_s, "log": str(log),
                   "kill_after_calls": scenario.kill_after_calls}],
        "result": str(result)}
    (folder / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run(["unshare", "-rn", sys.executable, "-m", "tests.harnesses.namespace",
                           str(folder / "spec.json")], cwd=ROOT, capture_output=True, text=True,
                          timeout=timeout_s + 60)
    text = log.read_text(errors="replace") if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{text[-3000:]}"
    return Outcome(json.loads(result.read_text())[0], text,
                   [json.loads(line) for line in records.read_text().splitlines()])

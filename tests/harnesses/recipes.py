"""How each harness is started against a gateway at 127.0.0.1:8000: its files, variables and command line.

The README's recipes are these. `GYRE_HARNESSES` names the folder they are installed in: `node_modules` from
package.json, `mini` a virtual environment from requirements.txt.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil

PORT = 8000
ROOT = f"http://127.0.0.1:{PORT}"
_SUBAGENT = "@mariozechner/pi-coding-agent/examples/extensions/subagent"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A harness, ready to start.

    Attributes:
      command: what has to be installed.
      shell: the name of its shell tool.
      command_argument: of that tool, the argument with the command line.
      sub_agent_tool: the tool that starts a sub-agent, or "".
    """

    name: str
    command: str
    shell: str
    command_argument: str
    sub_agent_tool: str = ""

    def call(self, command: str) -> dict:
        """A call of the shell tool, for a rule of the scripted engine."""
        more = {"description": "a step"} if self.name == "claude_code" else {}
        return {"name": self.shell, "arguments": {self.command_argument: command, **more}}

    def files(self, window_tokens: int) -> dict[str, str]:
        """Path in HOME -> content. `window_tokens` is the context that the harness believes in."""
        return _FILES[self.name](window_tokens)

    def argv(self, *prompts: str) -> list[str]:
        """The command line for one or more prompts in one session."""
        return [str(path_of(self.command)), *_ARGV[self.name](prompts)]

    def env(self, home: pathlib.Path, window_tokens: int) -> dict[str, str]:
        """All of its variables; "{key}" is the execution's key."""
        folder = path_of(self.command).parent
        node = pathlib.Path(shutil.which("node") or "/usr/bin/node").parent
        return {"PATH": f"{folder}:{node}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "dumb",
                "LANG": "C.UTF-8", **_ENV[self.name](window_tokens)}


def folder() -> pathlib.Path | None:
    """Where the harnesses are installed; None where the variable is not set."""
    value = os.environ.get("GYRE_HARNESSES")
    return pathlib.Path(value) if value else None


def path_of(command: str) -> pathlib.Path:
    """The installed program."""
    bin_folder = "mini/bin" if command == "mini" else "node_modules/.bin"
    return folder() / bin_folder / command


def _codex_files(window_tokens: int) -> dict[str, str]:
    return {".codex/config.toml": f'''model = "policy"
model_provider = "gyre"
model_context_window = {window_tokens}
[analytics]
enabled = false
[model_providers.gyre]
name = "gyre"
base_url = "{ROOT}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
'''}


def _pi_files(window_tokens: int) -> dict[str, str]:
    extension = folder() / "node_modules" / _SUBAGENT
    models = {"providers": {"gyre": {
        "baseUrl": f"{ROOT}/v1", "api": "openai-completions", "apiKey": "OPENAI_API_KEY",
        "models": [{"id": "policy", "reasoning": True, "contextWindow": window_tokens, "maxTokens": 4096}]}}}
    worker = "---\nname: worker\ndescription: Does one job\n---\nYou are a worker. Do the job and report.\n"
    settings = {"defaultProvider": "gyre", "defaultModel": "policy",
                "compaction": {"enabled": True, "reserveTokens": 4096, "keepRecentTokens": 1000}}
    return {".pi/agent/models.json": json.dumps(models), ".pi/agent/settings.json": json.dumps(settings),
            ".pi/agent/agents/worker.md": worker,
            **{f".pi/agent/extensions/subagent/{f}": (extension / f).read_text()
               for f in ("index.ts", "agents.ts")}}


_FILES = {"codex": _codex_files, "pi": _pi_files, "claude_code": lambda window: {},
          "mini_swe_agent": lambda window: {}}

_ENV = {
    "codex": lambda window: {"OPENAI_API_KEY": "{key}"},
    "pi": lambda window: {"OPENAI_API_KEY": "{key}", "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    "claude_code": lambda window: {
        "ANTHROPIC_BASE_URL": ROOT, "ANTHROPIC_API_KEY": "{key}", "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window)},
    "mini_swe_agent": lambda window: {
        "OPENAI_API_KEY": "{key}", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1"},
}

_ARGV = {
    "codex": lambda prompts: ["exec", "--json", "--skip-git-repo-check",
                              "--dangerously-bypass-approvals-and-sandbox", *prompts],
    "pi": lambda prompts: ["-p", "--mode", "json", "--provider", "gyre", "--model", "policy", *prompts],
    "claude_code": lambda prompts: [
        "-p", *prompts, "--model", "claude-sonnet-4-5", "--dangerously-skip-permissions", "--output-format",
        "stream-json", "--verbose", "--tools", "Bash,Read,Write,Edit,Agent", "--disable-slash-commands",
        "--system-prompt", "You are a coding agent."],
    "mini_swe_agent": lambda prompts: [
        "-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={ROOT}/v1", "-m", "openai/policy", "-t",
        *prompts, "-y", "--exit-immediately", "-l", "0"],
}

CODEX = Recipe("codex", "codex", "exec_command", "cmd", "spawn_agent")
PI = Recipe("pi", "pi", "bash", "command", "subagent")
CLAUDE_CODE = Recipe("claude_code", "claude", "Bash", "command", "Agent")
MINI = Recipe("mini_swe_agent", "mini", "bash", "command")

"""The reference harness: an agent as a separate process that knows only a model's base URL.

Standard library only, imports nothing from gyre, so that it starts in a few hundredths of a second
and stands for any black-box harness. It behaves like the industrial ones: turns, tool calls in its
working folder, a sub-agent with a conversation of its own, compaction when the context budget is
reached, retries. Two modes:
  text: the model answers one fenced bash block a turn (for models too small to write JSON).
  tools: OpenAI tool calls, `bash` and `task`, until an answer without a call.

Environment: OPENAI_BASE_URL, OPENAI_API_KEY, GYRE_HARNESS_INSTRUCTION_FILE (or _INSTRUCTION), and
the settings listed in `Settings`. Exit codes: 0 done, 75 own turn or token budget ran out, 3 the
key is not (or no longer) valid, 1 anything else.
"""

import http.client
import json
import os
import re
import signal
import sys
import time

# ------------------------------------------------------------------ wording, tuned on a 135M model

TEXT_SYSTEM = "Answer with one bash block."
# Examples are turns: in the system prompt, such a small model does not take them as a format (mean
# score of the untrained model over eight kinds of job 0.03 to 0.16 there, 0.28 as turns). They are
# of kinds that it finds hard, with names unlike "old" and "new", which it copies into its answers.
TEXT_EXAMPLES = (("Create an empty file named pig.txt.", "touch pig.txt"),
                 ("Rename fish.txt to bird.txt.", "mv fish.txt bird.txt"))
TEXT_SUB_AGENT = "You are a sub-agent. "  # stands before TEXT_SYSTEM in a sub-agent's conversation
TEXT_STEP = "Step {number} of {total}: {step}"
TEXT_RESULT = "Exit code {code}.{output}\n"
TEXT_RETRY = "That failed. Try again: {step}"
TEXT_HANDED_BACK = "The sub-agent did step {number}. "
TEXT_CONTINUE = "Done so far: {summary}\n"
TEXT_LAST = "All steps are done. Say done."
TEXT_NO_BLOCK = (127, "no bash block")

TOOLS_SYSTEM = ("You are an agent in a folder of a Linux machine. Do the job with the bash tool. "
                "Give independent parts to the task tool. Answer in words when all is done.")
TOOLS_SUB_AGENT = ("You are a sub-agent in a folder of a Linux machine. Do the job with the bash "
                   "tool, then say in one sentence what you did.")
TOOLS_CONTINUE = "{instruction}\n\nWork done so far: {summary}"
SUMMARIZE = "Summarize the conversation so far in one short sentence."  # gateways know its start

BUDGET_EXIT, KEY_EXIT = 75, 3

_BASH_TOOL = {"type": "function", "function": {
    "name": "bash", "description": "Runs a bash command in the working folder.",
    "parameters": {"type": "object", "required": ["command"],
                   "properties": {"command": {"type": "string"}}}}}
_TASK_TOOL = {"type": "function", "function": {
    "name": "task", "description": "Gives a self-contained part of the job to a sub-agent.",
    "parameters": {"type": "object", "required": ["prompt"],
                   "properties": {"prompt": {"type": "string"}}}}}

_BLOCK = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)(```|\Z)", re.DOTALL)
_STEP = re.compile(r"^\s*\d+[.)]\s+(.*\S)", re.MULTILINE)
# A guard against accidents for kernels that cannot confine a process: paths that leave the folder,
# expansions that could build one, signals. `/dev/null` is fine.
_UNSAFE = re.compile(r"(?:^|[\s\"'=:(<>|;&])(?!/dev/null\b)[/~]|\.\.|\$[({]|`|\\|\b(?:eval|kill)\b")


class Settings:
    """Settings from GYRE_HARNESS_<NAME IN CAPITALS>; the class attributes are the defaults."""

    mode = "text"  # text or tools
    model = "policy"  # model name to ask for
    max_completion_tokens = 48  # most tokens of one answer
    max_summary_tokens = 24  # most tokens of a summary
    max_turns = 16  # most model calls, all conversations together
    max_total_tokens = 0  # most completion tokens, all calls together; 0: no limit
    context_budget_tokens = 0  # a conversation this long is compacted; 0: never
    sub_agent_from = 3  # text: from this step on (tasks of that many steps), use sub-agents; 0: off
    retry_turns = 0  # text: extra turns for a step whose command failed
    final_turn = 0  # text: 1 lets the main conversation end with a turn of its own
    stream = 0  # 1: streaming responses
    command_timeout_s = 3.0  # limit of one command
    max_output_chars = 200  # of a command's output, shown to the model
    max_retries = 8  # of one request, on 429, 5xx and connection errors
    retry_delay_s = 0.25  # first delay, doubled each time, at most 8 s
    request_timeout_s = 600.0  # silence on the connection
    answer_file = ""  # text: every answer is appended to this file, for graders that read answers
    command_policy = 0  # 1: refuse commands that name paths outside (no kernel confinement)

    def __init__(self, environ):
        for name, default in vars(Settings).items():
            raw = environ.get("GYRE_HARNESS_" + name.upper())
            if raw is not None and not name.startswith("_"):
                setattr(self, name, type(default)(raw))


class Stop(Exception):
    """Ends the harness with an exit code and a message."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


# ----------------------------------------------------------------------------------- model calls


class Client:
    """One persistent connection to a chat completions endpoint; counts turns and tokens."""

    def __init__(self, base_url, key, settings):
        match = re.match(r"(https?)://([^/:]+|\[[^\]]+\])(?::(\d+))?(/.*)?$", base_url)
        if match is None:
            raise Stop(1, f"OPENAI_BASE_URL must be http(s)://host[:port][/path], got {base_url!r}")
        scheme, host, port, path = match.groups()
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        self.connection = kind(host.strip("[]"), int(port) if port else None,
                               timeout=settings.request_timeout_s)
        self.path = (path or "").rstrip("/") + "/chat/completions"
        self.headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
        self.settings = settings
        self.turns = 0
        self.tokens = 0

    def chat(self, messages, tools=(), max_tokens=None):
        """Asks for the next message. Returns (message, finish reason, context tokens used)."""
        settings = self.settings
        if self.turns >= settings.max_turns:
            raise Stop(BUDGET_EXIT, f"turn budget of {settings.max_turns} used up")
        if settings.max_total_tokens and self.tokens >= settings.max_total_tokens:
            raise Stop(BUDGET_EXIT, f"token budget of {settings.max_total_tokens} used up")
        body = {"model": settings.model, "messages": messages,
                "max_tokens": max_tokens or settings.max_completion_tokens}
        if tools:
            body["tools"] = list(tools)
        if settings.stream:
            body.update(stream=True, stream_options={"include_usage": True})
        message, finish, usage = self._with_retries(json.dumps(body).encode())
        self.turns += 1
        self.tokens += usage.get("completion_tokens", 0)
        return message, finish, usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)

    def _with_retries(self, body):
        delay = self.settings.retry_delay_s
        for attempt in range(self.settings.max_retries + 1):
            wait_s = None
            try:
                self.connection.request("POST", self.path, body, self.headers)
                response = self.connection.getresponse()
                if response.status == 200:
                    return _read_stream(response) if self.settings.stream else _read(response)
                text = response.read().decode("utf-8", "replace")[:300]
                if response.status in (401, 410):
                    raise Stop(KEY_EXIT, f"HTTP {response.status}: {text}")
                if response.status not in (408, 409, 429) and response.status < 500:
                    raise Stop(1, f"HTTP {response.status}: {text}")
                wait_s = _seconds(response.headers.get("Retry-After"))
                problem = f"HTTP {response.status}: {text}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.connection.close()  # the next request opens a new one
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.settings.max_retries:
                sys.stderr.write(f"retry {attempt + 1} after {problem}\n")
                jitter = 1 + os.urandom(1)[0] / 1024
                time.sleep(min(30.0, wait_s) if wait_s is not None else min(8.0, delay) * jitter)
                delay *= 2
        raise Stop(1, f"gave up after {self.settings.max_retries} retries: {problem}")


def _seconds(text):
    return float(text) if text and re.fullmatch(r"\d+(\.\d+)?", text) else None


def _read(response):
    answer = json.loads(response.read())
    try:
        choice = answer["choices"][0]
        return choice["message"], choice.get("finish_reason"), answer.get("usage") or {}
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a chat completion: {str(answer)[:200]}") from error


def _read_stream(response):
    message = {"role": "assistant", "content": ""}
    calls, finish, usage, done = {}, None, {}, False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            finish = choice.get("finish_reason") or finish
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {
                    "id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] += part.get("id") or ""
                for field, text in (part.get("function") or {}).items():
                    call["function"][field] += text or ""
    response.read()  # to the end, so that the connection can be used again
    if not done:
        raise http.client.IncompleteRead(b"", None)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message, finish, usage


class Conversation:
    """Messages with one agent; knows when its context budget is reached."""

    def __init__(self, client, system, tools=(), examples=()):
        self.client = client
        self.tools = tools
        self.messages = [{"role": "system", "content": system}]
        for question, command in examples:
            self.add("user", question)
            self.add("assistant", f"```bash\n{command}\n```")
        self.opening = list(self.messages)
        self.context_tokens = 0

    def add(self, role, content, **fields):
        self.messages.append({"role": role, "content": content, **fields})

    def ask(self):
        """One model call on the conversation; its answer is appended and returned."""
        message, finish, self.context_tokens = self.client.chat(self.messages, self.tools)
        answer = {"role": "assistant", "content": message.get("content") or ""}
        if message.get("tool_calls"):
            answer["tool_calls"] = message["tool_calls"]
        self.messages.append(answer)
        return answer, finish

    @property
    def is_full(self):
        budget = self.client.settings.context_budget_tokens
        return 0 < budget <= self.context_tokens

    def compact(self, note=""):
        """Asks for a summary, then forgets everything but the opening. Returns the summary.

        Args:
          note: what the model has not seen yet (the last command's result).
        """
        ask = {"role": "user", "content": f"{SUMMARIZE} {note}".rstrip()}
        message, _, _ = self.client.chat(self.messages + [ask], self.tools,
                                         self.client.settings.max_summary_tokens)
        self.messages = list(self.opening)
        self.context_tokens = 0
        return " ".join((message.get("content") or "").split())


# -------------------------------------------------------------------------------------- commands

_running = None  # process group of the running command


def run_command(command, settings):
    """Runs a command in the working folder. Returns (exit code, start of its output).

    It gets its own process group, which is killed at the time limit and when bash has ended, so
    that nothing stays behind. Output goes to a file, whose size the sandbox limits.
    """
    global _running
    if settings.command_policy and _UNSAFE.search(command):
        return 126, "refused: stay in this folder"
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"output-{os.getpid()}")
    output = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    hidden = ("OPENAI_", "ANTHROPIC_", "GOOGLE_", "GEMINI_", "GYRE_HARNESS_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    try:
        pid = os.posix_spawn(_bash(), ["bash", "-c", command], environ, setpgroup=0, file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)])
        _running = pid
        code = _wait(pid, time.monotonic() + settings.command_timeout_s)
        size = 4 * settings.max_output_chars + 4
        text = os.pread(output, size, 0).decode("utf-8", "replace").strip()
    finally:
        os.close(output)
    if code is None:
        return 124, f"timed out after {settings.command_timeout_s:g} s"
    return code, text[:settings.max_output_chars]


def _bash():
    for folder in os.environ.get("PATH", "/usr/bin:/bin").split(":"):
        if os.access(os.path.join(folder, "bash"), os.X_OK):
            return os.path.join(folder, "bash")
    raise Stop(1, f"no bash in PATH={os.environ.get('PATH')!r}")


def _wait(pid, deadline):
    """Exit code of a child (128 + signal if killed), or None at the deadline. Kills its group."""
    pause_s, status = 0.001, None
    while status is None and time.monotonic() < deadline:
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(raw)
        else:
            time.sleep(pause_s)
            pause_s = min(0.02, pause_s * 1.5)
    _kill_running()
    if status is None:
        os.waitpid(pid, 0)
        return None
    return status if status >= 0 else 128 - status


def _kill_running():
    global _running
    if _running is not None:
        try:
            os.killpg(_running, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # the whole group has ended
        _running = None


# ----------------------------------------------------------------------------------------- modes


def find_block(text, finish):
    """The first fenced bash block's commands, or None. A truncated last line is left out."""
    match = _BLOCK.search(text)
    if match is None:
        return None
    block, fence = match.groups()
    if not fence and finish == "length":
        block = block.rpartition("\n")[0]
    return block.strip() or None


def split_steps(instruction):
    """The items of a numbered list, or the whole instruction as one step."""
    return _STEP.findall(instruction) or [instruction.strip()]


def do_step(talk, text, step, settings):
    """One step in a conversation: ask, run the block, maybe retry. Returns (exit code, output)."""
    for turn in range(settings.retry_turns + 1):
        talk.add("user", text)
        answer, finish = talk.ask()
        if settings.answer_file:
            with open(settings.answer_file, "a", encoding="utf-8") as file:
                file.write(answer["content"] + "\n")
        block = find_block(answer["content"], finish)
        code, output = TEXT_NO_BLOCK if block is None else run_command(block, settings)
        if code == 0 or turn == settings.retry_turns:
            return code, output
        text = TEXT_RESULT.format(code=code, output=" " + output if output else "")
        text += TEXT_RETRY.format(step=step)


def text_mode(client, instruction, settings):
    """Gives the steps one turn at a time; late ones of a long task go to sub-agents."""
    steps = split_steps(instruction)
    first = settings.sub_agent_from
    talk, report = Conversation(client, TEXT_SYSTEM, examples=TEXT_EXAMPLES), ""
    for number, step in enumerate(steps, 1):
        if first and number >= first:
            sub_agent = Conversation(client, TEXT_SUB_AGENT + TEXT_SYSTEM,
                                     examples=TEXT_EXAMPLES)
            code, output = do_step(sub_agent, step, step, settings)
            report += TEXT_HANDED_BACK.format(number=number)
        else:
            if talk.is_full:
                report = TEXT_CONTINUE.format(summary=talk.compact(report.strip()))
            ask = step if len(steps) == 1 else TEXT_STEP.format(
                number=number, total=len(steps), step=step)
            code, output = do_step(talk, report + ask, step, settings)
            report = ""
        report += TEXT_RESULT.format(code=code, output=" " + output if output else "")
    if settings.final_turn:
        talk.add("user", report + TEXT_LAST)
        talk.ask()


def tools_mode(client, instruction, settings, depth=0):
    """The tool loop. Returns the last answer's text."""
    system, tools = ((TOOLS_SYSTEM, (_BASH_TOOL, _TASK_TOOL)) if depth == 0 else
                     (TOOLS_SUB_AGENT, (_BASH_TOOL,)))
    talk = Conversation(client, system, tools)
    talk.add("user", instruction)
    while True:
        answer, _ = talk.ask()
        if "tool_calls" not in answer:
            return answer["content"]
        for call in answer["tool_calls"]:
            result = use_tool(client, call["function"], settings, depth)
            talk.add("tool", result, tool_call_id=call["id"])
        if talk.is_full:
            summary = talk.compact()
            talk.add("user", TOOLS_CONTINUE.format(instruction=instruction, summary=summary))


def use_tool(client, function, settings, depth):
    """Runs one tool call. What is wrong with it is told to the model, never raised."""
    names = {"bash": "command"} if depth else {"bash": "command", "task": "prompt"}
    field = names.get(function["name"])
    if field is None:
        return f"Error: no tool {function['name']!r}; there are: {', '.join(names)}."
    try:
        value = json.loads(function["arguments"])[field]
    except (ValueError, KeyError, TypeError):
        value = None
    if not isinstance(value, str):
        return f"Error: arguments must be a JSON object with a string {field!r}."
    if field == "prompt":
        return tools_mode(client, value, settings, depth + 1)
    code, output = run_command(value, settings)
    return f"Exit code {code}.\n{output}".strip()


def _required(name):
    if name not in os.environ:
        raise Stop(1, f"environment variable {name} is not set")
    return os.environ[name]


def main():
    signal.signal(signal.SIGTERM, lambda *_: (_kill_running(), os._exit(128 + signal.SIGTERM)))
    try:
        settings = Settings(os.environ)
        modes = {"text": text_mode, "tools": tools_mode}
        if settings.mode not in modes:
            raise Stop(1, f"GYRE_HARNESS_MODE must be text or tools, got {settings.mode!r}")
        instruction = os.environ.get("GYRE_HARNESS_INSTRUCTION")
        if instruction is None:
            with open(_required("GYRE_HARNESS_INSTRUCTION_FILE"), encoding="utf-8") as file:
                instruction = file.read()
        client = Client(_required("OPENAI_BASE_URL"), _required("OPENAI_API_KEY"), settings)
        modes[settings.mode](client, instruction, settings)
        sys.stdout.write(f"done: {client.turns} turns, {client.tokens} tokens\n")
    except Stop as stop:
        sys.stderr.write(f"stopped: {stop}\n")
        sys.exit(stop.code)


if __name__ == "__main__":
    main()

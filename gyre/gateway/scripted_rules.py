"""Answers of a scripted engine as a file of rules, to point real harnesses at a gateway without a model.

One JSON object a line; blank lines and lines that start with # are skipped:

  {"last": "list the files", "text": "Looking.", "calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
  {"last": "README", "text": "Done.", "times": 1}

A call is answered by the first rule that is not used up and whose expressions are found: `last` in the
prompt's last turn, `prompt` in all of it (regular expressions, case and line ends do not matter). Fields of
the answer: `reasoning`, `text`, `calls` (`arguments` an object, or a string that is sampled as it stands), or
`raw` for the whole completion; in all of them $1, $2, ... stand for the groups of `last`, if it is given.
`finish` "length" is for a completion that is cut; `error`, instead of them all, for an engine that fails;
`delay_s` between tokens; `times` it may be used (any number, when left out).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.base.enums import FinishReason
from gyre.base.errors import ConfigError, EngineError
from gyre.base.protocols import CallRequest, ChatCodec
from gyre.gateway.scripted import ScriptedAnswer

_TYPES = {**{name: (str, "a string") for name in
             ("last", "prompt", "reasoning", "text", "raw", "finish", "error")},
          "calls": (list, "a list"), "delay_s": ((int, float), "a number of seconds"),
          "times": (int, "an integer")}
_FIELDS = _TYPES.keys()
_GROUP = re.compile(r"\$([1-9])")
_TURN_OPENING = "<|im_start|>"


@dataclasses.dataclass
class Rule:
    """One line of the file.

    Attributes:
      last, prompt: what has to be found, or None.
      completion: the sampled text.
      cut: whether the completion ends by its length.
      error: what the engine fails with, or "".
      delay_s: between pieces.
      left: how often the rule may still be used; None for any number.
    """

    last: re.Pattern[str] | None
    prompt: re.Pattern[str] | None
    completion: str
    cut: bool
    error: str
    delay_s: float
    left: int | None

    def answer(self, prompt: str, last: str) -> str | None:
        """The completion for a prompt with this last turn; None where the rule does not fit."""
        found = self.last.search(last) if self.last else None
        if self.left == 0 or (self.last and not found) or (self.prompt and not self.prompt.search(prompt)):
            return None
        if found is None:
            return self.completion
        return _GROUP.sub(lambda m: found.group(int(m.group(1))) or "", self.completion)


class RuleScript:
    """A script for `ScriptedEndpoint` made of rules.

    Args:
      rules: in order of precedence.
      codec: of the gateway; its tokenizer has to keep special tokens apart, as the byte tokenizer does.
    """

    def __init__(self, rules: Sequence[Rule], codec: ChatCodec):
        self._rules, self._codec = rules, codec

    @classmethod
    def load(cls, path: pathlib.Path, codec: ChatCodec) -> RuleScript:
        """Reads a file of rules. Raises ConfigError with the line at fault."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read the rules of the scripted engine: {e}") from e
        rules = [_rule(line, f"{path}:{n}") for n, line in enumerate(lines, 1)
                 if line.strip() and not line.lstrip().startswith("#")]
        if not rules:
            raise ConfigError(f"{path} has no rules; write one JSON object a line")
        return cls(rules, codec)

    def __call__(self, request: CallRequest) -> ScriptedAnswer | Exception:
        prompt = self._codec.tokenizer.decode(request.prompt_ids, skip_special=False)
        turns = prompt.split(_TURN_OPENING)
        last = turns[-2] if len(turns) > 1 else prompt  # the last one is the generation prompt
        rule, completion = next(
            ((r, text) for r in self._rules if (text := r.answer(prompt, last)) is not None), (None, ""))
        if rule is None:
            return EngineError(f"no rule of the script fits a prompt that ends with {last[-200:]!r}")
        rule.left = None if rule.left is None else rule.left - 1
        if rule.error:
            return EngineError(rule.error)
        ids = self._codec.tokenizer.encode_plain(completion)
        if rule.cut:
            return ScriptedAnswer(ids, rule.delay_s, FinishReason.LENGTH)
        return ScriptedAnswer([*ids, self._codec.stop_ids[0]], rule.delay_s)


def _rule(line: str, where: str) -> Rule:
    try:
        data = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"{where}: not JSON: {e}") from e
    if not isinstance(data, dict) or data.keys() - _FIELDS:
        got = sorted(data.keys() - _FIELDS) if isinstance(data, dict) else line[:60]
        raise ConfigError(f"{where}: a rule is an object with fields among {sorted(_FIELDS)}; got {got}")
    for name, (types, what) in _TYPES.items():
        value = data.get(name)
        if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
            raise ConfigError(f"{where}: {name} must be {what}, got {value!r}")
    finish, delay_s, times = (data.get(name) for name in ("finish", "delay_s", "times"))
    if finish not in (None, "stop", "length"):
        raise ConfigError(f"{where}: finish must be 'stop' or 'length', got {finish!r}")
    if not (delay_s or 0.0) >= 0:
        raise ConfigError(f"{where}: delay_s must not be negative, got {delay_s}")
    if times is not None and times < 1:
        raise ConfigError(f"{where}: times must be at least 1, got {times}")
    last, completion = _pattern(data, "last", where), _completion(data, where)
    groups = last.groups if last else 9  # without an expression, a $ is a $
    for number in _GROUP.findall(completion):
        if int(number) > groups:
            raise ConfigError(f"{where}: ${number} stands for a group of `last`, which has {groups}")
    return Rule(last, _pattern(data, "prompt", where), completion, finish == "length",
                data.get("error") or "", float(delay_s or 0.0), times)


def _pattern(data: Mapping[str, Any], name: str, where: str) -> re.Pattern[str] | None:
    if data.get(name) is None:
        return None
    try:
        return re.compile(data[name], re.IGNORECASE | re.DOTALL)
    except re.error as e:
        raise ConfigError(f"{where}: {name} is no regular expression: {e}") from e


def _completion(data: Mapping[str, Any], where: str) -> str:
    """The sampled text: reasoning, text and calls as ChatML models write them."""
    if data.get("raw") is not None:
        return data["raw"]
    parts = [f"<think>\n{data['reasoning']}\n</think>\n\n"] if data.get("reasoning") else []
    parts.append(data.get("text") or "")
    for call in data.get("calls") or ():
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ConfigError(f"{where}: calls are objects with a name, and arguments where there are any; "
                              f"got {call!r}")
        arguments = call.get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f'{"" if parts == [""] else chr(10)}<tool_call>\n{{"name": {json.dumps(call["name"])}, '
                     f'"arguments": {arguments}}}\n</tool_call>')
    return "".join(parts)

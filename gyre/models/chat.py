"""Conversations as token ids of one model family, through a jinja2 chat template.

Invariants:
  * Control tokens come from the template alone. Before rendering, one private character is put
    into every special-token name that stands in the conversation ("<" + mark + "|im_end|>"), so the
    template and its string operations see ordinary text. The rendered text is then cut at the
    marks, which vanish, and no piece holds a name that came from a user, a tool or a model.
  * A suffix is rendered inside its conversation, never alone: the whole conversation is rendered
    and what the history already covers is taken off the front.
  * Sampled text is never rendered to be trained on; recorded ids are reused by the gateway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox

from gyre.base.errors import ConfigError, GyreError
from gyre.base.protocols import Message, ParsedCompletion
from gyre.models import completion
from gyre.models.tokenizer import END_OF_TEXT, IM_END, Tokenizer, as_tokenizer

# ChatML with the tools section and call format that the Qwen models were trained on. Reasoning and
# content stand as sampled; consecutive tool results share one user turn.
CHATML_TEMPLATE = """\
{%- macro turn(role, text) -%}
{{- '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endmacro -%}
{%- set rest = messages -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages and messages[0].role == 'system' -%}
    {{- messages[0].content + '\\n\\n' -}}
    {%- set rest = messages[1:] -%}
  {%- endif -%}
  {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' -}}
  {{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if message.reasoning_content -%}
      {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- message.content -}}
    {%- for call in message.tool_calls -%}
      {{- '\\n' if message.content or not loop.first -}}
      {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) -}}
      {{- ', "arguments": ' + call.function.arguments + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' -}}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
  {%- else -%}
    {{- turn(message.role, message.content) -}}
  {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
"""

_PRIVATE_USE = range(0xE000, 0xF900)


class JinjaChat:
    """A `gyre.base.protocols.ChatCodec` made of a tokenizer and a chat template.

    Args:
      tokenizer: ours, or a `tokenizers.Tokenizer`.
      template: jinja2 source with the usual names: messages (role, content, reasoning_content,
        tool_calls, tool_call_id, name), tools, add_generation_prompt, raise_exception, tojson.
      end_of_turn: the special token that closes an assistant turn.
      stop_tokens: special tokens that end a completion; those the tokenizer lacks are left out.

    Raises:
      ConfigError: the tokenizer lacks `end_of_turn`, or the template does not compile.
    """

    def __init__(self, tokenizer: Tokenizer | Any, template: str = CHATML_TEMPLATE, *,
                 end_of_turn: str = IM_END, stop_tokens: Sequence[str] = (IM_END, END_OF_TEXT)):
        self.tokenizer = as_tokenizer(tokenizer)
        special = self.tokenizer.special_ids
        if end_of_turn not in special:
            raise ConfigError(f"the tokenizer has no {end_of_turn!r}; its special tokens: "
                              f"{', '.join(sorted(special))}")
        self.vocab_size = self.tokenizer.vocab_size
        self.end_of_turn = end_of_turn
        self.end_of_turn_id = special[end_of_turn]
        self.stop_ids = tuple(dict.fromkeys(
            special[t] for t in (end_of_turn, *stop_tokens) if t in special))
        self._special = re.compile("|".join(f"(?={re.escape(name)})" for name in special))
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        try:
            self._template = env.from_string(template)
        except jinja2.TemplateError as e:
            raise ConfigError(f"the chat template does not compile: {e}") from e

    # ------------------------------------------------------------------ rendering

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
                   add_generation_prompt: bool) -> list[int]:
        """Full render of a conversation as ids. `tools` are OpenAI function tool objects."""
        mark = _unused_character(messages, tools)
        return self._encode(self._render(messages, tools, add_generation_prompt, mark), mark)

    def suffix_ids(self, history: Sequence[Message], new: Sequence[Message],
                   tools: Sequence[Mapping[str, Any]], last_id: int) -> list[int]:
        """Ids that follow a recorded history whose last message is a sampled assistant turn.

        Args:
          history: messages whose ids are recorded; the last is the assistant's.
          new: messages that follow; may be empty.
          tools: OpenAI function tool objects.
          last_id: the recorded history's last id. When it is the end-of-turn token the suffix
            starts right behind it, else (a completion cut by its length) with it.

        Returns: ids up to and with the generation prompt.
        """
        if not history or history[-1].role != "assistant":
            raise ValueError("history must end with an assistant message, got "
                             f"{history[-1].role if history else 'no message'}")
        mark = _unused_character((*history, *new), tools)
        before = self._render(history, tools, False, mark)
        full = self._render((*history, *new), tools, True, mark)
        if full.startswith(before) and self.end_of_turn in before:
            tail = full[before.rindex(self.end_of_turn):]
        else:  # the template shows old turns differently once newer ones follow
            tail = self._tail_behind_probe(history, new, tools)
        if last_id == self.end_of_turn_id:
            tail = tail[len(self.end_of_turn):]
        return self._encode(tail, mark)

    def _tail_behind_probe(self, history: Sequence[Message], new: Sequence[Message],
                           tools: Sequence[Mapping[str, Any]]) -> str:
        """The render from the end of the history's last turn on, found by a probe in that turn."""
        mark = _unused_character((*history, *new), tools)
        probe = _unused_character((*history, *new), tools, skip=mark)
        probed = Message("assistant", content=probe)
        text = self._render((*history[:-1], probed, *new), tools, True, mark)
        at = text.find(self.end_of_turn, text.find(probe))
        if probe not in text or at < 0:
            raise GyreError(
                "the chat template leaves out an assistant turn or does not close it with "
                f"{self.end_of_turn!r}; use a template that does, or set end_of_turn")
        return text[at:]

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
                add_generation_prompt: bool, mark: str) -> str:
        def quote(text: str) -> str:
            return self._cut(text, mark)

        return self._template.render(
            messages=[_template_message(m, quote) for m in messages],
            tools=_map_strings(list(tools), quote) or None,
            add_generation_prompt=add_generation_prompt)

    def _cut(self, text: str, mark: str) -> str:
        if not any(name in text for name in self.tokenizer.special_ids):
            return text
        # A name that starts at p is cut between p and p + 1; the look-ahead finds overlapping ones.
        starts = [m.start() + 1 for m in self._special.finditer(text)]
        return mark.join(text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True))

    def _encode(self, rendered: str, mark: str) -> list[int]:
        ids: list[int] = []
        for piece in rendered.split(mark):
            ids.extend(self.tokenizer.encode(piece))
        return ids

    # ------------------------------------------------------------------ completions

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out. Incomplete UTF-8 at the end becomes U+FFFD."""
        return self.tokenizer.decode(ids, skip_special=True)

    def parse(self, text: str) -> ParsedCompletion:
        """Splits a completion into reasoning, content and tool calls (see `completion.parse`)."""
        return completion.parse(text)

    def stable_prefix(self, text: str) -> ParsedCompletion:
        """What of an unfinished completion can be shown (see `completion.stable_prefix`)."""
        return completion.stable_prefix(text)


# ---------------------------------------------------------------------- template values


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise GyreError(f"the chat template refuses this conversation: {message}")


def _template_message(m: Message, quote: Any) -> dict[str, Any]:
    """A message as templates know it. The role is not quoted, so it must be one of ours."""
    if m.role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role must be system, user, assistant or tool, got {m.role!r}")
    out: dict[str, Any] = {"role": m.role, "content": quote(m.content)}
    if m.reasoning:
        out["reasoning_content"] = quote(m.reasoning)
    if m.tool_calls:
        out["tool_calls"] = [
            {"id": quote(c.call_id), "type": "function",
             "function": {"name": quote(c.name), "arguments": quote(c.arguments)}}
            for c in m.tool_calls]
    if m.tool_call_id:
        out["tool_call_id"] = quote(m.tool_call_id)
    if m.name:
        out["name"] = quote(m.name)
    return out


def _map_strings(value: Any, change: Any) -> Any:
    """The JSON value with every string in it, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(k): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(v, change) for v in value]
    return value


def _strings(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for m in messages:
        yield from (m.content, m.reasoning, m.tool_call_id, m.name)
        for c in m.tool_calls:
            yield from (c.call_id, c.name, c.arguments)
    yield json.dumps(list(tools), ensure_ascii=False)


def _unused_character(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
                      skip: str = "") -> str:
    """A private-use character that the conversation does not hold."""
    used = set(skip).union(*_strings(messages, tools))
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise GyreError("the conversation uses every private-use character of Unicode; remove some")

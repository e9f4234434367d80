"""Conversations as token ids of one model family, through a jinja2 chat template.

Invariants:
  * Control tokens come from the template alone. Before rendering, one private character is put
    into every special-token name that stands in the conversation ("<" + mark + "|im_end|>"), so the
    template and its string operations see ordinary text. The rendered text is then cut at the
    marks, which vanish, and no piece holds a name that came from a user, a tool or a model.
  * Sampled turns are never encoded again: in their place a probe is rendered, and the probe's turn is
    cut out of the text for the recorded ids.
  * A suffix is rendered behind an assistant turn, never alone, so that what the template puts between
    turns is there. Whether a short stand-in for the history gives the same is tested per template at
    construction; where it does not, the whole conversation is rendered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox

from gyre.base.errors import ConfigError, GyreError
from gyre.base.protocols import NO_TURNS, Message, ParsedCompletion, ToolCall, Tools, Turns
from gyre.models import completion
from gyre.models.chat_templates import chat_family
from gyre.models.tokenizer import END_OF_TEXT, IM_END, Tokenizer, as_tokenizer
from gyre.models.tool_formats import TOOL_FORMATS, parameters

_PRIVATE_USE = range(0xE000, 0xF900)
_STAND_IN = Message("user", "x")  # for a history, in front of its last turn


class JinjaChat:
    """A `gyre.base.protocols.ChatCodec` made of a tokenizer and a chat template.

    Args:
      tokenizer: ours, or a `tokenizers.Tokenizer`.
      family: a name in `gyre.models.chat_templates`.
      template: the model's own jinja2 source, which goes before the family's.
      end_of_turn: the special token that closes an assistant turn.
      stop_tokens: special tokens that end a completion; those the tokenizer lacks are left out.

    Raises:
      ConfigError: the tokenizer lacks `end_of_turn`, or the template does not compile or cannot render a
        question and its answer.
    """

    def __init__(self, tokenizer: Tokenizer | Any, family: str = "chatml", *,
                 template: str | None = None, end_of_turn: str = IM_END,
                 stop_tokens: Sequence[str] = (IM_END, END_OF_TEXT)):
        self.tokenizer = as_tokenizer(tokenizer)
        special = self.tokenizer.special_ids
        if end_of_turn not in special:
            raise ConfigError(f"the tokenizer has no {end_of_turn!r}; its special tokens: "
                              f"{', '.join(sorted(special))}")
        chat = chat_family(family)
        self.vocab_size = self.tokenizer.vocab_size
        self.end_of_turn = end_of_turn
        self.end_of_turn_id = special[end_of_turn]
        self.stop_ids = tuple(dict.fromkeys(
            special[t] for t in (end_of_turn, *stop_tokens) if t in special))
        self._tool_format = TOOL_FORMATS[chat.tool_format]
        self._special = re.compile("|".join(f"(?={re.escape(name)})" for name in special))
        self._template = _compile(template if template is not None else chat.template())
        try:
            self._turn_opening = self._find_turn_opening()
            self._history_matters = not self._stand_in_is_faithful()
        except jinja2.TemplateError as e:
            raise ConfigError(f"the chat template cannot render a question and its answer: {e}") from e

    # ------------------------------------------------------------------ rendering

    def render_ids(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool,
                   turns: Turns = NO_TURNS) -> list[int]:
        """Full render of a conversation as ids. `tools` are OpenAI function tool objects."""
        mark = _unused_character(messages, tools)
        pieces = self._pieces(messages, tools, add_generation_prompt, sorted(turns), mark)
        return self._splice(pieces, turns, mark)

    def suffix_ids(self, history: Sequence[Message], new: Sequence[Message], tools: Tools, last_id: int,
                   turns: Turns = NO_TURNS) -> list[int]:
        """Ids that follow a recorded history whose last message is a sampled assistant turn.

        Args:
          history: messages whose ids are recorded; the last is the assistant's.
          new: messages that follow; may be empty.
          tools: OpenAI function tool objects.
          last_id: the recorded history's last id. When it is the end-of-turn token the suffix
            starts right behind it, else (a completion cut by its length) with it.
          turns: index in `new` -> completion ids.

        Returns: ids up to and with the generation prompt.
        """
        if not history or history[-1].role != "assistant":
            raise ValueError("history must end with an assistant message, got "
                             f"{history[-1].role if history else 'no message'}")
        if not self._history_matters:
            history, tools = (_STAND_IN, history[-1]), ()
        messages = (*history, *new)
        mark = _unused_character(messages, tools)
        last = len(history) - 1
        at = sorted(len(history) + i for i in turns)
        pieces = self._pieces(messages, tools, True, [last, *at], mark)
        tail = pieces[1:]
        if last_id == self.end_of_turn_id:
            tail[0] = tail[0][len(self.end_of_turn):]
        return self._splice(tail, {len(history) + i: ids for i, ids in turns.items()}, mark)

    def shown_as_sampled(self, messages: Sequence[Message], tools: Tools, turns: Turns) -> frozenset[int]:
        """Those of `turns` whose body in a full render is the text of their ids, unchanged."""
        mark = _unused_character(messages, tools)
        at = sorted(turns)
        pieces = self._pieces(messages, tools, True, at, mark)
        text = self._render(messages, tools, True, mark)
        if not text.startswith(pieces[0]):
            return frozenset()
        text = text[len(pieces[0]):]
        same = set()
        for i, piece in zip(at, pieces[1:], strict=True):
            end = text.find(piece)  # starts with the end-of-turn token, which no body holds
            if end < 0:
                return frozenset(same)
            sampled = self.tokenizer.decode(turns[i], skip_special=False).removesuffix(self.end_of_turn)
            if text[:end].replace(mark, "") == sampled:
                same.add(i)
            text = text[end + len(piece):]
        return frozenset(same)

    def _pieces(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool,
                at: Sequence[int], mark: str) -> list[str]:
        """The rendered text without the bodies of the assistant turns `at`: len(at) + 1 pieces, of which
        all but the first start with the end-of-turn token."""
        if not at:
            return [self._render(messages, tools, add_generation_prompt, mark)]
        probe = _unused_character(messages, tools, skip=mark)
        shown = list(messages)
        for k, i in enumerate(at):
            if shown[i].role != "assistant":
                raise ValueError(f"message {i} has sampled ids but the role {shown[i].role}")
            shown[i] = Message("assistant", f"{probe}{k}{probe}", tool_calls=shown[i].tool_calls)
        text = self._render(shown, tools, add_generation_prompt, mark)
        pieces = []
        for k in range(len(at)):
            where = text.find(f"{probe}{k}{probe}")
            start = text.rfind(self._turn_opening, 0, max(where, 0))
            end = text.find(self.end_of_turn, max(where, 0))
            if where < 0 or start < 0 or end < 0:
                raise GyreError(
                    "the chat template leaves out an assistant turn, opens it with something else than "
                    f"{self._turn_opening!r}, or does not close it with {self.end_of_turn!r}; use a "
                    "template that does, or set end_of_turn")
            pieces.append(text[:start + len(self._turn_opening)])
            text = text[end:]
        return [*pieces, text]

    def _splice(self, pieces: Sequence[str], turns: Turns, mark: str) -> list[int]:
        """The pieces as ids, with the turns' ids between them."""
        ids = self._encode(pieces[0], mark)
        for i, piece in zip(sorted(turns), pieces[1:], strict=True):
            sampled = [int(t) for t in turns[i]]
            ids += sampled
            closed = bool(sampled) and sampled[-1] == self.end_of_turn_id
            ids += self._encode(piece[len(self.end_of_turn):] if closed else piece, mark)
        return ids

    def _find_turn_opening(self) -> str:
        """What the template writes before an assistant's turn: the generation prompt."""
        mark = chr(_PRIVATE_USE[0])
        without = self._render([_STAND_IN], (), False, mark)
        opening = self._render([_STAND_IN], (), True, mark)
        if not opening.startswith(without) or opening == without:
            raise ConfigError("the chat template does not end with a generation prompt when it is asked to")
        opening = opening[len(without):]
        answered = self._render([_STAND_IN, Message("assistant", "y")], (), False, mark)
        while opening and opening not in answered:  # some prompts begin the thinking as well
            cut = opening.rstrip("\n").rfind("\n") + 1
            opening = opening[:cut]
        if not opening:
            raise ConfigError("the chat template opens an assistant's turn in a history with something else "
                              "than its generation prompt")
        return opening

    def _stand_in_is_faithful(self) -> bool:
        """Whether suffixes come out the same when all but the last turn of the history is left out."""
        call = ToolCall("c", "f", "{}")
        tool = {"type": "function", "function": {
            "name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
        past = [Message("system", "s"), Message("user", "q"), Message("assistant", "a", "r", (call,)),
                Message("tool", "o", tool_call_id="c"), Message("assistant", "b", "r")]
        answer, result = Message("assistant", "b", "r", (call,)), Message("tool", "o", tool_call_id="c")
        user = Message("user", "q")
        for turn, new in ((answer, [result]), (answer, [result, result, user]), (past[-1], [user]),
                          (past[-1], [user, answer, result])):
            for tools in ((), (tool,)):
                self._history_matters = True
                try:
                    whole = self.suffix_ids([*past, user, turn], new, tools, self.end_of_turn_id)
                    self._history_matters = False
                    short = self.suffix_ids([*past, user, turn], new, tools, self.end_of_turn_id)
                except GyreError:
                    return False  # the template refuses such a conversation
                if whole != short:
                    return False
        return True

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool,
                mark: str) -> str:
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

    def parse(self, text: str, tools: Tools = ()) -> ParsedCompletion:
        """Splits a completion into reasoning, content and tool calls (see `completion.parse`)."""
        return completion.parse(text, self._tool_format, tools)

    def stream(self) -> completion.CompletionReader:
        """A reader of one completion as it grows."""
        return completion.CompletionReader(self.decode, self._tool_format)


# ---------------------------------------------------------------------- template values


def _compile(source: str) -> jinja2.Template:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _tojson
    env.filters["parameters"] = parameters
    env.globals["raise_exception"] = _raise_exception
    try:
        return env.from_string(source)
    except jinja2.TemplateError as e:
        raise ConfigError(f"the chat template does not compile: {e}") from e


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


def _strings(messages: Sequence[Message], tools: Tools) -> Iterator[str]:
    for m in messages:
        yield from (m.content, m.reasoning, m.tool_call_id, m.name)
        for c in m.tool_calls:
            yield from (c.call_id, c.name, c.arguments)
    yield json.dumps(list(tools), ensure_ascii=False)


def _unused_character(messages: Sequence[Message], tools: Tools, skip: str = "") -> str:
    """A private-use character that the conversation does not hold."""
    used = set(skip).union(*_strings(messages, tools))
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise GyreError("the conversation uses every private-use character of Unicode; remove some")

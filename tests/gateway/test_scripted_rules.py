"""The file of rules that answers in place of a model."""

import json

import numpy as np
import pytest

from gyre.base.enums import FinishReason
from gyre.base.errors import ConfigError, EngineError
from gyre.base.protocols import CallRequest, Message, SamplingParams
from gyre.gateway.scripted_rules import RuleScript
from gyre.models.chat import JinjaChat
from gyre.models.tokenizer import ByteTokenizer

CODEC = JinjaChat(ByteTokenizer())


def load(tmp_path, *rules):
    path = tmp_path / "rules.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rules))
    return RuleScript.load(path, CODEC)


def ask(script, *texts):
    """The script's answer to a conversation in which user and assistant take turns."""
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    ids = np.asarray(CODEC.render_ids(messages, (), True), np.int32)
    return script(CallRequest("c", "x", ids, SamplingParams(max_tokens=99)))


def text(answer):
    assert answer.ids[-1] == CODEC.stop_ids[0]
    return CODEC.decode(answer.ids[:-1])


def test_the_first_rule_that_fits_answers_until_it_is_used_up(tmp_path):
    script = load(tmp_path, "# a comment", "", {"last": "LIST", "text": "once", "times": 1},
                  {"last": "list", "text": "again"}, {"prompt": "secret", "text": "I know"}, {"text": "else"})
    assert text(ask(script, "list")) == "once"
    assert text(ask(script, "list")) == "again"
    assert text(ask(script, "a secret", "yes", "what is it?")) == "I know"
    assert text(ask(script, "list", "yes", "hello")) == "else"  # `last` looks at the last turn alone


def test_groups_of_the_expression_stand_in_every_field(tmp_path):
    script = load(tmp_path, {"last": "run (\\w+) in (\\w+)", "reasoning": "so $2", "text": "Running $1.",
                             "calls": [{"name": "bash", "arguments": {"command": "cd $2 && $1"}}]})
    assert text(ask(script, "run ls in tmp")) == (
        '<think>\nso tmp\n</think>\n\nRunning ls.\n<tool_call>\n{"name": "bash", '
        '"arguments": {"command": "cd tmp && ls"}}\n</tool_call>')


def test_groups_that_took_no_part_are_empty_and_without_an_expression_a_dollar_is_one(tmp_path):
    script = load(tmp_path, {"last": "a(b)?", "text": "[$1]"}, {"text": "echo $1"})
    assert text(ask(script, "a")) == "[]"
    assert text(ask(script, "else")) == "echo $1"


def test_raw_arguments_are_sampled_as_they_stand(tmp_path):
    script = load(tmp_path, {"calls": [{"name": "a", "arguments": '{"x": 1.0'}, {"name": "b"}]})
    assert text(ask(script, "go")) == ('<tool_call>\n{"name": "a", "arguments": {"x": 1.0}\n</tool_call>\n'
                                       '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>')


def test_cut_answers_and_errors(tmp_path):
    script = load(tmp_path, {"last": "long", "raw": "abc", "finish": "length", "delay_s": 0.5},
                  {"last": "fail", "error": "out of memory"})
    answer = ask(script, "long")
    assert (answer.finish, answer.delay_s) == (FinishReason.LENGTH, 0.5)
    assert CODEC.decode(answer.ids) == "abc"  # no stop token was sampled
    for words, message in (("fail", "out of memory"), ("other", "no rule of the script fits.*other")):
        with pytest.raises(EngineError, match=message):
            raise ask(script, words)


@pytest.mark.parametrize(("line", "message"), [
    ("{", "rules.jsonl:2: not JSON"),
    ("[]", "rules.jsonl:2: a rule is an object"),
    ({"lst": "x"}, r"rules.jsonl:2: .*got \['lst'\]"),
    ({"last": "("}, "rules.jsonl:2: .*unterminated"),
    ({"last": "(x)", "text": "$2"}, r"rules.jsonl:2: \$2 stands for a group of `last`, which has 1"),
    ({"finish": "stopped"}, "rules.jsonl:2: .*stopped"),
    ({"times": "often"}, "rules.jsonl:2: .*often"),
    ({"times": 0}, "rules.jsonl:2: .*times"),
    ({"delay_s": -1}, "rules.jsonl:2: .*delay_s"),
    ({"text": 7}, "rules.jsonl:2: .*text"),
    ({"raw": ["a"]}, "rules.jsonl:2: .*raw"),
    ({"calls": [{"arguments": {}}]}, "rules.jsonl:2: .*name"),
    ({"calls": "ls"}, "rules.jsonl:2: .*calls"),
])
def test_a_line_at_fault_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, {"text": "fine"}, line)


def test_files_without_rules_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no rules; write one JSON object a line"):
        load(tmp_path, "# nothing")
    with pytest.raises(ConfigError, match="cannot read the rules"):
        RuleScript.load(tmp_path / "missing", CODEC)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the rules"):
        RuleScript.load(tmp_path / "binary", CODEC)

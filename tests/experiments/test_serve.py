"""`experiments.serve` with a scripted engine, as a person starts it."""

import http.client
import json
import re
import signal
import subprocess
import sys

from tests.source_tree import ROOT


def start(*flags):
    return subprocess.Popen([sys.executable, "-m", "experiments.serve", *flags], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_answers_and_writes_what_was_said_at_the_end(tmp_path):
    (tmp_path / "rules.jsonl").write_text('{"last": "hi (\\\\w+)", "text": "Hello $1."}\n')
    server = start(f"--engine=scripted:{tmp_path}/rules.jsonl", f"--out={tmp_path}/tree.txt",
                   f"--records={tmp_path}/records.jsonl", "--config=configs/base.py",
                   "--config.gateway.limits.body_bytes=1000")
    try:
        printed = [server.stdout.readline() for _ in range(5)]
        variables = dict(re.findall(r"(\w+_(?:URL|KEY))=(\S+)", "".join(printed)))
        assert len(variables) == 6, printed
        port = int(variables["ANTHROPIC_BASE_URL"].rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

        def post(content):
            connection.request("POST", "/v1/messages", json.dumps({
                "model": "any", "max_tokens": 64, "messages": [{"role": "user", "content": content}]}),
                {"x-api-key": variables["ANTHROPIC_API_KEY"]})
            response = connection.getresponse()
            return response.status, json.load(response)

        status, answer = post("hi Ada")
        assert status == 200 and answer["content"] == [{"type": "text", "text": "Hello Ada."}], answer
        status, answer = post("x" * 2000)
        assert status == 413 and answer["error"]["type"] == "request_too_large", answer
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
    finally:
        server.kill()
    assert (server.returncode, out) == (0, "1 calls\n"), err
    assert "Hello Ada." in (tmp_path / "tree.txt").read_text()
    record, = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert record["completion_ids"] == record["engine_sampled_ids"]
    assert record["trainable"] and record["agent_role"] == "main"


def test_what_cannot_be_served_is_said_in_one_line(tmp_path):
    for flags, message in (
            ([f"--engine=scripted:{tmp_path}/none"], "ConfigError: cannot read the rules"),
            (["--engine=magic"], "ConfigError: --engine must be cell or scripted:FILE"),
            (["--engine=cell"], "ConfigError: --config says which model to serve")):
        server = start(*flags)
        _, err = server.communicate(timeout=60)
        assert server.returncode == 2 and message in err and "Traceback" not in err, err

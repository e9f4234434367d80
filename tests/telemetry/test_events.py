"""The event log: order, threads, kills, choosing kinds."""

import json
import threading

import pytest

from gyre.telemetry.events import EventLog, read_events


def test_lines_start_with_time_and_kind(tmp_path):
    with EventLog(tmp_path / "events.jsonl", clock=lambda: 12.34567) as log:
        log.write("dispatch", group=3, scores=[0.5, float("nan")])
    text = (tmp_path / "events.jsonl").read_text()
    assert text == ('{"time_s": 12.3457, "kind": "dispatch", "group": 3, '
                    '"scores": [0.5, null]}\n')


def test_every_line_is_on_disk_when_write_returns(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("step", step=1)
    assert [e["step"] for e in read_events(tmp_path / "events.jsonl")] == [1]
    log.close()


def test_threads_do_not_tear_lines_and_time_does_not_go_back(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        threads = [threading.Thread(target=lambda i=i: [
            log.write("grade", execution=f"g{i}-{k}", text="x" * 500) for k in range(100)])
            for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = list(read_events(tmp_path / "events.jsonl"))
    assert len({r["execution"] for r in rows}) == 800
    assert [r["time_s"] for r in rows] == sorted(r["time_s"] for r in rows)


def test_continues_a_log_after_a_kill(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time_s": 1, "kind": "step", "step": 1}\n{"time_s": 2, "ki')
    with EventLog(path) as log:
        log.write("step", step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_reads_only_the_wanted_kinds(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        for kind in ("decide", "step", "decide", "role"):
            log.write(kind)
    # A line of another kind is not even parsed.
    path.write_text(path.read_text().replace('"kind": "decide"}', '"kind": "decide", broken'))
    assert [e["kind"] for e in read_events(path, ("step", "role"))] == ["step", "role"]


def test_a_field_cannot_replace_the_time(tmp_path):
    with EventLog(tmp_path / "e.jsonl") as log, pytest.raises(ValueError, match="time_s"):
        log.write("step", time_s=1.0)


def test_writing_after_close_is_silent(tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    log.close()
    log.close()
    log.write("step")
    assert (tmp_path / "e.jsonl").read_text() == ""

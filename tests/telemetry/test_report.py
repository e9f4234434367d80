"""The report: complete, offline, small, and made of whatever files there are."""

import html.parser
import random
import re

import pytest

from gyre.base.errors import WorkdirError
from gyre.telemetry import jsonl, report_charts, report_data
from gyre.telemetry.report import build_report, write_tree_page
from gyre.telemetry.report_tree import describe, outline
from tests.telemetry import fake_run

VOID = {"meta", "link", "br", "img"}


class Checker(html.parser.HTMLParser):
    """Fails on tags that do not nest; collects addresses and text."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append(data)


def check(path):
    """Returns the report's text after checking its form."""
    source = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(source)
    assert checker.open == []
    assert checker.addresses == [] and "url(" not in source and "@import" not in source
    assert "<script" not in source
    assert not re.search(r"\bnan\b|\binf\b", re.sub(r"<title>.*?</title>", "", source))
    return " ".join(checker.texts)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run.make(tmp_path_factory.mktemp("runs") / "quickstart")


def test_a_whole_run(run):
    path = build_report(run, fake_run.example_tree())
    text = check(path)
    assert path == run / "report.html" and path.stat().st_size < 400_000
    for heading in ("Reward", "Cells", "Waterlevel", "Staleness", "Outcomes", "Tokens",
                    "Throughput", "Idle time", "One execution: g000012-3"):
        assert heading in text, heading
    assert "Nothing was measured" not in text
    assert "finished" in text and "smollm2-135m-instruct trained by grpo" in text


def test_headline_numbers(run):
    source = build_report(run).read_text()
    rows = list(jsonl.read(run / "metrics.jsonl"))
    first = sum(r["reward_mean"] for r in rows[:3]) / 3
    last = sum(r["reward_mean"] for r in rows[-5:]) / 5
    assert f'<b>{first:.2f}<span class="arrow"> → </span>{last:.2f}</b>' in source
    assert '<b>0.31<span class="arrow"> → </span>0.68</b>' in source
    assert "<b>768</b><span>executions</span>" in source  # 16 steps of 48


@pytest.mark.parametrize("kept", [
    (), ("config.json",), ("metrics.jsonl",), ("events.jsonl",), ("eval.jsonl",),
    ("provenance.json",), ("metrics.jsonl", "config.json")])
def test_any_subset_of_files(run, tmp_path, kept):
    for name in kept:
        (tmp_path / name).write_bytes((run / name).read_bytes())
    text = check(build_report(tmp_path))
    assert "Nothing was measured" in text


def test_a_killed_run_has_a_report(run, tmp_path):
    for name in ("metrics.jsonl", "events.jsonl", "eval.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes()[:-40])
    assert "still running, or killed" in check(build_report(tmp_path))


def test_a_corrupt_file_is_named(run, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nxx\n{"step": 2}\n')
    with pytest.raises(WorkdirError, match="metrics.jsonl line 2"):
        build_report(tmp_path)


def test_rows_without_measurements(tmp_path):
    rows = [{"step": 1, "reward_mean": None, "outcomes": {}, "staleness_mean": None},
            {"step": 2, "reward_mean": 0.5, "reward_std": None, "outcomes": {"completed": 3}}]
    (tmp_path / "metrics.jsonl").write_text("".join(map(jsonl.line, rows)))
    check(build_report(tmp_path))


def test_a_long_run_stays_small(tmp_path):
    rng = random.Random(1)
    rows = [fake_run.metrics_row(s, rng, steps=2000) for s in range(1, 2001)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(jsonl.line, rows)))
    (tmp_path / "events.jsonl").write_text(
        "".join(map(jsonl.line, fake_run.events(1000, rng, cells=8))))
    path = build_report(tmp_path, fake_run.example_tree())
    check(path)
    assert path.stat().st_size < 1_500_000


def test_pauses_between_sessions_are_taken_out(tmp_path):
    rng = random.Random(0)
    first = fake_run.events(2, rng)[:-20]  # killed
    later = fake_run.events(1, rng, start_s=fake_run.START_S + 5000)
    (tmp_path / "events.jsonl").write_text("".join(map(jsonl.line, first + later)))
    data = report_data.load(tmp_path)
    assert len(data.resumes) == 1
    assert data.resumes[0] == pytest.approx(first[-1]["time_s"] - fake_run.START_S)
    assert data.duration_s == pytest.approx(
        data.resumes[0] + later[-1]["time_s"] - later[0]["time_s"])
    for intervals in data.cells.values():  # no gap, no overlap
        assert intervals[0].start_s == 0 and intervals[-1].end_s == pytest.approx(data.duration_s)
        for a, b in zip(intervals, intervals[1:], strict=False):
            assert a.end_s == pytest.approx(b.start_s)
    check(build_report(tmp_path))


def test_coarse_intervals_keep_the_dominant_role():
    # 2000 periods of 1 s, 0.7 s of them in train: every bin is mostly train.
    rows = [report_data.Interval(role, i + start, i + end) for i in range(2000)
            for role, start, end in (("rollout", 0.0, 0.3), ("train", 0.3, 1.0))]
    coarse = report_data.coarse_intervals(rows, 2000.0)
    assert [(c.role, c.start_s, c.end_s) for c in coarse] == [("train", 0.0, 2000.0)]


def test_moves_at_one_time_become_one_mark():
    events = [{"now": t, "source": 0, "destination": d, "tokens": 5, "kv": kv, "execution": e}
              for t, d, kv, e in ((10.0, 2, True, "a"), (10.1, 2, False, "b"), (10.1, 1, True, "c"),
                                  (90.0, 2, True, "d"))]
    moves = report_data.gather_moves(events, 200.0)
    assert [(m.destination, m.calls, m.with_kv, m.tokens, m.executions) for m in moves] == [
        (1, 1, 1, 5, ("c",)), (2, 2, 1, 10, ("a", "b")), (2, 1, 1, 5, ("d",))]


def test_thinning_averages_neighbours():
    rows = [{"step": s, "loss": float(s), "roles": "TR", "entropy": None if s % 2 else 1.0,
             "outcomes": {"completed": 4} if s % 2 else {"ungraded": 2}} for s in range(1, 5)]
    assert report_data.thin(rows, most=4) == rows
    two = report_data.thin(rows, most=2)
    assert [r["steps"] for r in two] == ["1 to 2", "3 to 4"]
    assert two[0]["loss"] == 1.5 and two[0]["entropy"] == 1.0
    assert two[0]["outcomes"] == {"completed": 2.0, "ungraded": 1.0}


def test_the_envelope_keeps_extremes():
    points = [(i / 10, i % 7) for i in range(20_000)]
    points[12_345] = (1234.5, 99)
    reduced = report_data.envelope(points, 2000.0)
    assert len(reduced) <= 2 * report_data.MOST_POINTS
    assert (1234.5, 99) in reduced
    assert reduced == sorted(reduced)


def test_the_staleness_bound_is_drawn():
    data = report_data.RunData("x", config=fake_run.CONFIG)
    data.metrics = [fake_run.metrics_row(s, random.Random(s)) for s in (1, 2)]
    assert "bound ⌈φ⌉ + μ − 1 = 1" in report_charts.staleness(data)


def test_tree_text_is_escaped_and_cut(tmp_path):
    tree = fake_run.example_tree()
    tree["segments"][2]["text"] = "x" * 50_000
    write_tree_page(tmp_path / "tree.html", tree)
    text = check(tmp_path / "tree.html")
    assert "<b>Answer</b> with bash" in text
    assert "44,000 characters" in text
    assert outline(fake_run.example_tree(text=False)).count("<pre>") == 0


def test_segments_are_described():
    segments = fake_run.example_tree()["segments"]
    assert describe(segments[0]) == "120 tokens of prompt, first sent by main"
    assert describe(segments[9]) == (
        "33 tokens sampled by main in call 5, versions 3 to 4, not trained")


def test_a_deep_tree_is_no_recursion(tmp_path):
    tree = fake_run.example_tree()
    tree["segments"] = [{**tree["segments"][2], "parent": i - 1} for i in range(3000)]
    write_tree_page(tmp_path / "tree.html", tree)
    check(tmp_path / "tree.html")

"""Means that add up, and the two files that a row goes to."""

import json
import math
import random
import struct
import subprocess
import sys

import pytest

from gyre.telemetry.metrics import STEP_FIELDS, Mean, MetricWriter, scalars
from gyre.telemetry.run_folder import RunFolder
from tests.source_tree import ROOT
from tests.telemetry.fake_run import metrics_row


@pytest.fixture
def folder(tmp_path):
    with RunFolder.open(tmp_path / "run", {"seed": 0}) as opened:
        yield opened


def row(step, **changes):
    return {**metrics_row(step, random.Random(step)), **changes}


def test_mean_of_parts_is_the_mean_of_all():
    # (1*2 + 4*1) / (2 + 1) = 2 for the first part; with 6 of weight 3: (6 + 18) / 6 = 4.
    first, second = Mean(), Mean()
    first.add(1.0, weight=2.0)
    first.add(4.0)
    second.add(6.0, weight=3.0)
    assert first.value == 2.0
    assert (first + second).value == 4.0
    assert math.isnan(Mean().value)


def test_rows_are_on_disk_when_write_returns(folder):
    writer = MetricWriter(folder)
    writer.write(row(1, entropy=math.nan))
    line = json.loads(folder.metrics_path.read_text())
    assert set(STEP_FIELDS) <= set(line) and line["entropy"] is None
    writer.close()
    writer.close()


def test_refuses_incomplete_rows_and_steps_that_do_not_increase(folder):
    with MetricWriter(folder, first_step=4) as writer:
        incomplete = row(5)
        del incomplete["loss"], incomplete["entropy"]
        with pytest.raises(ValueError, match="needs loss, entropy"):
            writer.write(incomplete)
        with pytest.raises(ValueError, match="step 4 after step 4"):
            writer.write(row(4))
        writer.write(row(5))
    assert len(folder.metrics_path.read_text().splitlines()) == 1


def test_scalars_flatten_and_skip_what_is_no_number():
    found = dict(scalars({"step": 3, "loss": 0.5, "outcomes": {"completed": 7}, "roles": "TR",
                          "entropy": math.nan, "version": 2}))
    assert found == {"loss": 0.5, "outcomes/completed": 7.0, "version": 2.0}


def tensorboard_records(folder):
    """Payloads of the event files (length u64, its crc u32, payload, its crc u32)."""
    out = []
    for path in sorted(folder.tensorboard_path.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            size = struct.unpack("<Q", data[:8])[0]
            out.append(data[12:12 + size])
            data = data[16 + size:]
    return out


def test_tensorboard_gets_the_scalars(folder):
    with MetricWriter(folder) as writer:
        writer.write(row(1))
        writer.write(row(2))
    records = tensorboard_records(folder)
    for tag in (b"reward_mean", b"outcomes/completed", b"staleness_max"):
        assert sum(tag in r for r in records) == 2, tag


def test_writing_does_not_load_tensorflow():
    code = ("import sys, tempfile, random\n"
            "from gyre.telemetry.metrics import MetricWriter\n"
            "from gyre.telemetry.run_folder import RunFolder\n"
            "from tests.telemetry.fake_run import metrics_row\n"
            "with RunFolder.open(tempfile.mkdtemp(), {}) as f, MetricWriter(f) as w:\n"
            "    w.write(metrics_row(1, random.Random(0)))\n"
            "bad = {m.split('.')[0] for m in sys.modules} & {'tensorflow', 'jax', 'torch'}\n"
            "assert not bad, bad\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr

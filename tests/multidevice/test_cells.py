"""Cells over one and two virtual devices each, in processes of their own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["[1, 1]", "[1, 2]"])
def result(request):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/multidevice/cells_script.py"), request.param], cwd=ROOT,
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
             "XLA_FLAGS": "--xla_force_host_platform_device_count=6"})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("temperature", ["0.0", "0.9"])
def test_calls_of_a_leaving_cell_go_on_exactly(result, temperature):
    moved = result["hand_over"][temperature]
    assert moved["equal"]
    assert moved["moved"] >= 5 and moved["moved_live"] >= 3
    assert moved["first_destination"] == 2  # the last cell stays in rollout longest
    assert moved["refused"]  # and the leaving cell takes no new calls
    assert result["hand_over"]["destination_prefers_last"]


def test_publication_drains_and_changes_the_policy(result):
    assert result["publication"] == {"running_versions": [0], "later_versions": [1],
                                     "later_is_new_policy": True}


def test_the_update_has_the_same_bits_on_one_and_three_cells(result):
    assert result["update_equal"] and result["update_moves"]

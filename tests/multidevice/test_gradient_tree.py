"""The update is the same bits for 1, 2 and 4 training cells (own process, 8 virtual devices)."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("gradient_tree_script.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parametrize("shape", ["1x1", "1x2"])
def test_update_is_bit_identical_for_any_cells_and_claim_order(shape):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, str(SCRIPT), shape], cwd=ROOT, env=environment,
                            capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.splitlines()[-1] == "identical", result.stdout

"""The engine under JetStream's own orchestrator, in a process of its own, and the light import."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_script(name):
    done = subprocess.run([sys.executable, str(pathlib.Path(__file__).with_name(name))], cwd=ROOT,
                          capture_output=True, text=True, timeout=120,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_orchestrator_gives_the_same_greedy_tokens():
    result = run_script("orchestrator_script.py")
    assert result["orchestrator"] == result["loop"]
    assert len(result["loop"]) == 5 and all(len(tokens) == 8 for tokens in result["loop"])


def test_import_is_light_and_leaves_no_trace():
    code = ("import logging, sys, json; import gyre.generation.engine; print(json.dumps({"
            "'tf': 'tensorflow' in sys.modules, 'seqio': [m for m in sys.modules if 'seqio' in m],"
            "'level': logging.getLogger().level}))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"tf": False, "seqio": [], "level": 30}

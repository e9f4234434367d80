"""Runs a gateway and a harness where nothing but loopback exists: `unshare -rn python namespace.py SPEC`.

SPEC is a JSON file: `serve` (argv of the server), `steps` (each with `argv`, `env`, `cwd`, `log`,
`timeout_s`, and `kill_after_calls`: kill the harness while the call after that many is being answered),
`result` (where to write what became of the steps). "{key}" in an argument or a variable is the key that the
server printed. Knows nothing of gyre; standard library only.
"""

import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request

_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41
_CALLS = re.compile(r"^gyre_gateway_calls_total\{.*\} (\S+)$", re.MULTILINE)
_RUNNING = re.compile(r"^gyre_gateway_calls_running (\S+)$", re.MULTILINE)


def loopback_up():
    """Brings the namespace's loopback interface up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))


def start_server(argv):
    """Starts the server. Returns (process, root URL, key)."""
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        found = re.search(r"OPENAI_BASE_URL=(\S+)/v1 OPENAI_API_KEY=(\S+)", line)
        if found:
            return server, found[1], found[2]
    raise SystemExit(f"the server ended with {server.wait()} before it listened")


def metrics(root):
    """(calls ended, calls running)."""
    with urllib.request.urlopen(root + "/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(float(v) for v in _CALLS.findall(text)), float(_RUNNING.search(text)[1])


def run_step(step, root, key):
    """Runs one harness to its end, or kills it. Returns its exit code and output."""
    def fill(text):
        return text.replace("{key}", key)

    with open(step["log"], "w+b") as log:
        process = subprocess.Popen([fill(a) for a in step["argv"]], cwd=step["cwd"],
                                   env={k: fill(v) for k, v in step["env"].items()}, stdin=subprocess.DEVNULL,
                                   stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        killed, deadline_s = False, time.monotonic() + step["timeout_s"]
        while process.poll() is None and time.monotonic() < deadline_s:
            if step.get("kill_after_calls") is not None:
                ended, running = metrics(root)
                if ended >= step["kill_after_calls"] and running:
                    time.sleep(0.3)  # into the middle of the answer
                    killed = True
                    break
            time.sleep(0.05)
        timed_out = process.poll() is None and not killed
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    waited_s = time.monotonic()
    while metrics(root)[1] and time.monotonic() < waited_s + 10:
        time.sleep(0.01)
    return {"code": code, "killed": killed, "timed_out": timed_out,
            "disconnect_seen_s": time.monotonic() - waited_s, "calls_running": metrics(root)[1]}


def main():
    with open(sys.argv[1]) as f:
        spec = json.load(f)
    loopback_up()
    server, root, key = start_server(spec["serve"])
    try:
        results = [run_step(step, root, key) for step in spec["steps"]]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    with open(spec["result"], "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main()

"""What a small model may type by accident, and worse, stays inside the workspace."""

import asyncio
import os
import socket

import pytest

from gyre.base.enums import Outcome
from gyre.base.errors import ConfigError
from gyre.base.protocols import Task
from gyre.rollout.graders.checks import grade
from gyre.rollout.harnesses import HARNESSES
from gyre.rollout.runner import Runner, RunnerLimits
from gyre.rollout.sandboxes import launch
from gyre.rollout.sandboxes.local import LocalSandboxes, SandboxLimits
from tests.rollout.fake_openai import FakeOpenAI, block

needs_landlock = pytest.mark.skipif(launch.landlock_abi() == 0, reason="no Landlock in this kernel")


def type_in(command, tmp_path, isolation="auto", **limits):
    """Lets the reference harness run one command; returns (what the model is told, result)."""
    answers = [block(command)]
    sandboxes = LocalSandboxes(tmp_path / "s", SandboxLimits(isolation=isolation, **limits))
    runner = Runner(HARNESSES.get("reference")(final_turn=1), sandboxes, grade,
                    RunnerLimits(20.0, 30.0))
    task = Task("t", "Go.", files={"a.txt": "a"}, payload={"checks": [{"folders": ["ok"]}]})
    with FakeOpenAI(lambda *_: answers.pop() if answers else "done") as fake:
        result = asyncio.run(runner.run(task, "e0", fake.url, "gk-secret"))
    assert result.outcome is Outcome.COMPLETED, result
    return fake.requests[-1]["messages"][-1]["content"], result


@pytest.mark.parametrize("isolation", ["auto", "commands"])
@pytest.mark.parametrize("command", [
    "echo x > ../evil", "rm -rf {decoy}", "rm -rf {decoy}/* && false",
    "cat a.txt > {decoy}/precious", "mv {decoy}/precious .", "rm -rf ..", "cp a.txt {decoy}/new",
    "sed -i s/a/b/ {decoy}/precious"])
def test_nothing_outside_is_changed(tmp_path, command, isolation):
    decoy = tmp_path / "decoy"
    decoy.mkdir()
    (decoy / "precious").write_text("a")
    told, _ = type_in(command.format(decoy=decoy), tmp_path, isolation)
    assert not told.startswith("Exit code 0."), told
    assert (decoy / "precious").read_text() == "a" and os.listdir(decoy) == ["precious"]
    assert not (tmp_path / "s/e0/evil").exists()


@needs_landlock
def test_the_workspace_itself_works(tmp_path):
    told, result = type_in(
        "mkdir ok && cd ok && seq 3 | sort -r > x && cat <<< hi && sed -i s/3/4/ x && cat x && "
        "awk '{print $1*2}' x && diff x x && cd .. && cp -r ok no && mv no ok/ && find ok | wc -l",
        tmp_path)
    assert told.startswith("Exit code 0. hi\n4\n2\n1\n8\n4\n2\n4\n"), told
    assert result.score.value == 1.0


@needs_landlock
@pytest.mark.parametrize("command", [
    "cat {file}", "ls {folder}", "cat /proc/$PPID/environ", "kill -0 {pid}",
    "/usr/bin/chmod 0 a.txt", "/usr/bin/setsid sleep 1",
    "exec 3<>/dev/tcp/127.0.0.1/{port}", "rm -rf ~"])
def test_confined_by_the_kernel(tmp_path, command):
    if command.startswith("kill") and launch.landlock_abi() < launch.SIGNALS_ABI:
        pytest.skip("this kernel does not confine signals")
    with socket.create_server(("127.0.0.1", 0)) as server:
        told, _ = type_in(command.format(
            file=__file__, folder=os.path.dirname(__file__), pid=os.getpid(),
            port=server.getsockname()[1]), tmp_path)
    assert not told.startswith("Exit code 0."), told


def test_commands_do_not_see_the_key(tmp_path):
    told, _ = type_in("set | grep -v BASH_EXEC | grep -E 'OPENAI|GYRE_HARNESS|gk-' || echo none",
                      tmp_path)
    assert told.startswith("Exit code 0. none"), told


def test_file_size_is_limited(tmp_path):
    told, _ = type_in("seq 100000 > big || true; wc -c < big", tmp_path, file_bytes=100_000)
    assert "\n100000\n" in told or " 100000\n" in told, told


def test_isolation_is_stated_and_insisted_on(tmp_path, monkeypatch):
    fallback = LocalSandboxes(tmp_path, SandboxLimits(isolation="commands"))
    assert fallback.create("e").isolation == "commands"
    with pytest.raises(ConfigError, match="isolation must be"):
        SandboxLimits(isolation="docker")
    monkeypatch.setattr(launch, "landlock_abi", lambda: 3)
    assert LocalSandboxes(tmp_path).create("e").isolation == "landlock+commands"
    monkeypatch.setattr(launch, "landlock_abi", lambda: 7)
    assert LocalSandboxes(tmp_path).create("e").isolation == "landlock"
    monkeypatch.setattr(launch, "landlock_abi", lambda: 0)
    with pytest.raises(ConfigError, match="no Landlock"):
        LocalSandboxes(tmp_path, SandboxLimits(isolation="landlock"))


@pytest.mark.parametrize("name", ["", "..", "a/b", "bin"])
def test_execution_ids_must_be_file_names(tmp_path, name):
    with pytest.raises(ConfigError, match="plain file name"):
        LocalSandboxes(tmp_path).create(name)


def test_a_temporary_root_is_removed():
    sandboxes = LocalSandboxes()
    assert (sandboxes.root / "bin" / "mkdir").exists() and not (sandboxes.root / "bin/ln").exists()
    sandboxes.close()
    assert not sandboxes.root.exists()

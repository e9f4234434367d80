"""Sandboxes on this machine: a folder, a process session, limits, and Landlock where there is one.

Landlock (Linux >= 5.13, no privileges needed) lets the harness and all its descendants change files
only below its workspace and temporary folder, read only system folders, run only the tools on its
PATH, connect only to the gateway's port, and signal only each other. Elsewhere the reference
harness checks commands by their text, which guards against accidents, not against intent; the
attribute `isolation` says which of the two holds. Not for hostile code: memory, disk and processes
are limited only per process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import py_compile
import secrets
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from gyre.base.errors import ConfigError
from gyre.rollout.sandboxes import Launch, SandboxError, launch

TOOLS = (
    "bash", "sh", "mkdir", "rmdir", "rm", "mv", "cp", "touch", "echo", "cat", "ls", "head", "tail",
    "sort", "uniq", "wc", "cut", "tr", "sed", "grep", "awk", "find", "tee", "printf", "seq", "true",
    "false", "paste", "rev", "basename", "dirname", "date", "sleep", "diff", "cmp", "test", "expr")
"""Programs on the harness' PATH. No interpreters, no `ln`, `chmod`, `kill`, network clients."""

SYSTEM_READ = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache",
    "/etc/localtime", "/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/ssl",
    "/etc/passwd", "/etc/group", "/dev/urandom", "/dev/zero")
"""What a confined harness may read, beside its workspace and its Python."""

_MARKER = "GYRE_SANDBOX_ID"
_LOADERS = ("ld-linux*.so*", "ld-musl-*.so*", "ld64.so*")


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Limits of one sandbox.

    Attributes:
      isolation: "auto" takes Landlock if the kernel has it; "landlock" insists; "commands" never.
      gateway_only: allow TCP connections to the gateway's port only (Landlock ABI >= 4).
      cpu_s: CPU seconds of each process.
      file_bytes: size of each written file.
      address_space_bytes: of each process; None for harnesses that reserve a lot (node).
    """

    isolation: str = "auto"
    gateway_only: bool = True
    cpu_s: int | None = 120
    file_bytes: int | None = 16 << 20
    address_space_bytes: int | None = 1 << 30

    def __post_init__(self):
        if self.isolation not in ("auto", "landlock", "commands"):
            raise ConfigError(f"isolation must be auto, landlock or commands, got "
                              f"{self.isolation!r}")


class LocalSandboxes:
    """Makes `LocalSandbox`es below one folder and owns what they share.

    Args:
      root: the folder; None makes a temporary one, which `close` removes.
      limits: see SandboxLimits. Raises ConfigError if isolation="landlock" is not to be had.
    """

    def __init__(self, root: Path | None = None, limits: SandboxLimits | None = None):
        self.limits = limits or SandboxLimits()
        self._temporary = root is None
        self.root = Path(tempfile.mkdtemp(prefix="gyre-") if root is None else root).resolve()
        abi = 0 if self.limits.isolation == "commands" else launch.landlock_abi()
        if abi == 0 and self.limits.isolation == "landlock":
            raise ConfigError("isolation='landlock', but this kernel has no Landlock; use 'auto' "
                              "to fall back to the harness' own command policy")
        self.landlock = abi > 0
        self.command_policy = abi < launch.SIGNALS_ABI
        self.isolation = "+".join(["landlock"] * self.landlock + ["commands"] * self.command_policy)
        self.bin = self.root / "bin"
        self.bin.mkdir(parents=True, exist_ok=True)
        self.programs = self._link_tools()
        self._compiled: dict[str, str] = {}

    def _link_tools(self) -> list[str]:
        programs = []
        for name in TOOLS:
            target = shutil.which(name)
            if target is None:
                continue
            programs.append(os.path.realpath(target))
            with contextlib.suppress(FileExistsError):
                (self.bin / name).symlink_to(target)
        if not (self.bin / "bash").exists():
            raise ConfigError("no bash on PATH; the sandbox needs it to run commands: install bash")
        for folder in ("/lib", "/lib64", "/usr/lib"):
            for pattern in _LOADERS:
                programs += [os.path.realpath(path) for path in Path(folder).glob(pattern)]
        for path in Path("/lib").glob("*-linux-*/ld-linux*.so*"):
            programs.append(os.path.realpath(path))
        return sorted(set(programs))

    def compiled(self, path: str) -> str:
        """A .pyc of a script: a main script would be compiled anew at every start."""
        if path not in self._compiled:
            target = self.root / "lib" / f"{Path(path).stem}-{zlib.crc32(path.encode()):08x}.pyc"
            target.parent.mkdir(exist_ok=True)
            self._compiled[path] = py_compile.compile(path, cfile=str(target), doraise=True)
        return self._compiled[path]

    def create(self, execution_id: str) -> LocalSandbox:
        """A sandbox for one execution; its folder is `root/execution_id`."""
        if not execution_id or "/" in execution_id or execution_id in (".", "..", "bin", "lib"):
            raise ConfigError(f"an execution id must be a plain file name, got {execution_id!r}")
        return LocalSandbox(self, self.root / execution_id)

    def close(self) -> None:
        """Removes the shared folder if it is a temporary one."""
        if self._temporary:
            _remove(self.root)


class LocalSandbox:
    """One execution's folder and processes; see the Sandbox protocol."""

    def __init__(self, shared: LocalSandboxes, folder: Path):
        self.folder = folder
        self.workspace = folder / "workspace"
        self.instruction_file = folder / "instruction.txt"
        self.isolation = shared.isolation
        self._shared = shared
        self._marker = secrets.token_hex(8)
        self._log = folder / "harness.log"
        self._process: asyncio.subprocess.Process | None = None

    async def open(self, instruction: str, files: Mapping[str, str]) -> None:
        """Makes the workspace.

        Args:
          instruction: goes to `instruction_file`.
          files: relative path -> text; a path that ends with "/" is an empty folder.

        Raises:
          ConfigError: a path is absolute or leaves the workspace.
          SandboxError: the file system refuses.
        """
        for path in files:
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or "\0" in path:
                raise ConfigError(f"a task's file must stay in the workspace, got path {path!r}; "
                                  "use relative paths without '..'")
        try:
            if self.folder.exists():  # what a killed run left
                _remove(self.folder)
            self.workspace.mkdir(parents=True)
            (self.folder / "tmp").mkdir()
            self.instruction_file.write_text(instruction, encoding="utf-8")
            for path, text in files.items():
                target = self.workspace / path
                if path.endswith("/"):
                    target.mkdir(parents=True, exist_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SandboxError(f"cannot make the workspace {self.workspace}: {error}") from error

    async def start(self, what: Launch, env: Mapping[str, str], tcp_port: int | None) -> None:
        """Starts the harness in a session of its own; see the Sandbox protocol."""
        environment = {
            "PATH": str(self._shared.bin) + (":/usr/bin:/bin" * what.system_programs),
            "HOME": str(self.workspace), "TMPDIR": str(self.folder / "tmp"), "LANG": "C.UTF-8",
            _MARKER: self._marker, **what.env, **env}
        if self._shared.command_policy:
            environment["GYRE_HARNESS_COMMAND_POLICY"] = "1"
        argv = [sys.executable, "-S", "-E", "-B", self._shared.compiled(launch.__file__),
                json.dumps(self._spec(what, tcp_port))]
        try:
            with open(self._log, "ab") as log:
                # No preexec_fn: the child is made by vfork, which is safe beside JAX's threads.
                self._process = await asyncio.create_subprocess_exec(
                    *argv, env=environment, cwd=self.workspace, stdin=asyncio.subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise SandboxError(f"cannot start {argv[0]}: {error}") from error

    def _spec(self, what: Launch, tcp_port: int | None) -> dict:
        shared, limits = self._shared, self._shared.limits
        program = list(what.argv)
        if what.python_script:
            program[0] = shared.compiled(program[0])
        read = [*SYSTEM_READ, sys.base_prefix, sys.prefix, str(shared.bin),
                str(self.instruction_file)]
        execute = list(shared.programs)
        if what.system_programs:
            execute += [*read, os.path.dirname(os.path.realpath(program[0]))]
        ports = [tcp_port] if limits.gateway_only and tcp_port is not None else None
        return {
            "program": program, "python": what.python_script, "landlock": shared.landlock,
            "read": read, "execute": execute, "tcp_ports": ports,
            "write": [str(self.workspace), str(self.folder / "tmp"), "/dev/null"],
            "cpu_s": limits.cpu_s, "file_bytes": limits.file_bytes,
            "address_space_bytes": limits.address_space_bytes}

    async def wait(self) -> int:
        """Exit code of the harness; see the Sandbox protocol."""
        code = await self._process.wait()
        if code == launch.LAUNCH_FAILED_EXIT:
            text = self.log_tail(2000)
            if launch.LAUNCH_FAILED_MARK in text:
                raise SandboxError(text[text.index(launch.LAUNCH_FAILED_MARK):])
        return code

    async def stop(self, grace_s: float) -> None:
        """Ends all processes: SIGTERM to the harness' group, SIGKILL to all after `grace_s`."""
        process = self._process
        if process is None:
            return
        if process.returncode is None and grace_s > 0:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        self._kill()
        await process.wait()
        await asyncio.to_thread(self._kill_stragglers)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            _signal_group(self._process.pid, signal.SIGKILL)

    def _kill_stragglers(self) -> None:
        """SIGKILL for what left the harness' group: members of its session, or marked by env."""
        # A process may fork while the list is read: repeat until a pass finds none.
        for _ in range(20):
            found = [pid for pid in _pids() if self._owns(pid)]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                return
        raise SandboxError(f"processes of {self.folder.name} do not die: {found}")

    def _owns(self, pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            if stat[0] in (b"Z", b"X"):
                return False
            if int(stat[3]) == self._process.pid:
                return True
            return self._marker.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False

    def log_tail(self, max_chars: int) -> str:
        """The end of what the harness wrote, undecodable bytes replaced."""
        try:
            with open(self._log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * max_chars))
                return file.read().decode("utf-8", "replace")[-max_chars:]
        except FileNotFoundError:
            return ""

    async def close(self, keep: bool) -> None:
        """Kills what still runs, then removes the folder unless `keep`."""
        await self.stop(0.0)
        if not keep:
            await asyncio.to_thread(_remove, self.folder)


def _signal_group(pid: int, which: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, which)


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:  # no /proc (macOS): the process group is all there is
        return []


def _remove(folder: Path) -> None:
    """Removes a folder, also one in which subfolders were made unreadable."""
    if not os.path.lexists(folder):
        return
    try:
        shutil.rmtree(folder)
    except PermissionError:
        os.chmod(folder, 0o700)
        for parent, names, _ in os.walk(folder):  # top-down: opened before it is entered
            for name in names:
                if not os.path.islink(os.path.join(parent, name)):
                    os.chmod(os.path.join(parent, name), 0o700)
        shutil.rmtree(folder)

"""Starts a program inside the sandbox: limits and Landlock first, then the program.

Runs as its own process, `python -S -E -B launch.py SPEC`, where SPEC is a JSON object:
  program: argv of what to start; if `python` is true, argv[0] is a .py or .pyc file that runs in
    this very interpreter, so that the sandbox costs no second interpreter start.
  landlock: whether to apply Landlock (Linux >= 5.13). It holds for all descendants, for good.
  read, execute, write: paths (folders: everything below) that may be read; read and executed;
    read and changed.
  tcp_ports: the only TCP ports to connect to (Landlock ABI >= 4), or null for any.
  cpu_s, file_bytes, address_space_bytes: resource limits, null for none.

Invariant: when a restriction that SPEC asks for cannot be set up, the program does not start: exit
code 71 and one line that begins with `gyre-launch:` on stderr. Imports nothing from gyre.
"""

import ctypes
import errno
import json
import marshal
import os
import resource
import struct
import sys

LAUNCH_FAILED_EXIT = 71
LAUNCH_FAILED_MARK = "gyre-launch:"

# Syscall numbers are the same on every architecture that CPython supports Landlock's kernels on.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PR_SET_NO_NEW_PRIVS = 38
_RULE_PATH, _RULE_PORT = 1, 2
_O_PATH = getattr(os, "O_PATH", 0)

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FILE_BITS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_CONNECT_TCP = 1 << 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1

SIGNALS_ABI = 6  # from here on a sandboxed process cannot signal one outside


def landlock_abi() -> int:
    """The kernel's Landlock version: 0 where there is none, 6 or more also confines signals."""
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def _check(value: int, what: str) -> int:
    if value < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return value


def _handled_bits(abi: int) -> int:
    bits = (1 << 13) - 1
    for version, bit in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEVICE)):
        bits |= bit if abi >= version else 0
    return bits


def apply_landlock(read: list, execute: list, write: list, tcp_ports: list | None) -> None:
    """Confines this process and all its descendants. Raises OSError when the kernel refuses.

    Args:
      read, execute, write: existing paths; a missing one is left out, which only denies more.
      tcp_ports: ports that may be connected to, or None for no restriction.
    """
    abi = landlock_abi()
    if abi == 0:
        raise OSError(errno.ENOSYS, "Landlock is not available in this kernel")
    libc = ctypes.CDLL(None, use_errno=True)
    handled = _handled_bits(abi)
    net = _CONNECT_TCP if abi >= 4 and tcp_ports is not None else 0
    scope = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= SIGNALS_ABI else 0
    attr = struct.pack("=QQQ", handled, net, scope)[:8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = _check(libc.syscall(_CREATE_RULESET, attr, ctypes.c_size_t(len(attr)),
                                  ctypes.c_uint(0)), "landlock_create_ruleset")
    readable = _READ_FILE | _READ_DIR
    writable = handled & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK)
    for paths, bits in ((read, readable), (execute, readable | _EXECUTE), (write, writable)):
        for path in paths:
            try:
                fd = os.open(path, _O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            allowed = bits & handled if os.path.isdir(path) else bits & handled & _FILE_BITS
            rule = struct.pack("=Qi", allowed, fd)
            _check(libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH), rule,
                                ctypes.c_uint(0)), f"landlock_add_rule {path}")
            os.close(fd)
    for port in (tcp_ports or ()) if net else ():
        rule = struct.pack("=QQ", net, port)
        _check(libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_RULE_PORT), rule,
                            ctypes.c_uint(0)), f"landlock_add_rule port {port}")
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")
    _check(libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)),
           "landlock_restrict_self")
    os.close(ruleset)


def _apply_limits(spec: dict) -> None:
    limits = [(resource.RLIMIT_CORE, 0)]
    for name, which in (("cpu_s", resource.RLIMIT_CPU), ("file_bytes", resource.RLIMIT_FSIZE),
                        ("address_space_bytes", resource.RLIMIT_AS)):
        if spec[name] is not None:
            limits.append((which, spec[name]))
    for which, value in limits:
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _load(path: str):
    with open(path, "rb") as file:
        data = file.read()
    return marshal.loads(data[16:]) if path.endswith(".pyc") else compile(data, path, "exec")


def main(argv: list) -> None:
    """Restricts this process as argv[1] says and turns it into the program."""
    try:
        spec = json.loads(argv[1])
        program = spec["program"]
        # Read before the restriction: the harness' own source need not be readable inside.
        code = _load(program[0]) if spec["python"] else None
        _apply_limits(spec)
        if spec["landlock"]:
            apply_landlock(spec["read"], spec["execute"], spec["write"], spec["tcp_ports"])
        if code is None:
            os.execvpe(program[0], program, os.environ)
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"{LAUNCH_FAILED_MARK} {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(LAUNCH_FAILED_EXIT)
    sys.argv = list(program)
    exec(code, {"__name__": "__main__", "__file__": program[0], "__builtins__": __builtins__})


if __name__ == "__main__":
    main(sys.argv)

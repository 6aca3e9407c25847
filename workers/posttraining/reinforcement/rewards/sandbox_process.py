"""The process of one answer's unit tests: limits itself, then runs the code and its assertions.

Runs alone, without this project's packages: `python -I -S THIS FD SECONDS BYTES`. Reads
`{code, tests, token}` from standard input and writes one JSON line to FD: `{passed: token}`,
`{failed: why}` or `{forbidden: what}`. The kernel (seccomp) ends the process at a system call for
the network, processes or changes of files; Python's audit events name the attempt before.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any

# by machine: (architecture of the audit subsystem, system call numbers)
_NUMBERS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "open": 2,
            "openat": 257,
            "clone": 56,
            "clone3": 435,
            "openat2": 437,
            **{
                f"denied_{number}": number
                for number in (
                    # socket, connect, accept, sendto, sendmsg, bind, listen, socketpair
                    *(41, 42, 43, 44, 46, 49, 50, 53, 288),
                    # fork, vfork, execve, execveat, kill, tkill, ptrace, process_vm_*, pidfd
                    *(57, 58, 59, 322, 62, 200, 101, 310, 311, 424, 438),
                    # rename, mkdir, rmdir, creat, link, unlink, symlink and their *at variants
                    *(82, 83, 84, 85, 86, 87, 88, 258, 259, 263, 264, 265, 266, 316),
                    # truncate, chmod, chown, mknod, utime, setxattr, removexattr
                    *(76, 90, 92, 94, 132, 133, 188, 189, 190, 197, 198, 235, 260, 261, 268, 280),
                    # mount, umount, pivot_root, chroot, unshare, setns, bpf, io_uring, keys, shared
                    *(165, 166, 155, 161, 272, 308, 321, 425, 426, 427, 248, 249, 250, 29, 64, 68),
                    # landlock aside: userfaultfd, perf_event_open, open_by_handle_at, mq_open
                    *(323, 298, 304, 240),
                )
            },
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "openat": 56,
            "clone": 220,
            "clone3": 435,
            "openat2": 437,
            **{
                f"denied_{number}": number
                for number in (
                    *(198, 199, 200, 201, 202, 203, 206, 211, 242),
                    *(221, 281, 129, 130, 117, 270, 271, 424, 438),
                    *(33, 34, 35, 36, 37, 38, 276),
                    *(45, 52, 53, 54, 88, 5, 6, 7, 14, 15, 16),
                    *(39, 40, 41, 51, 97, 268, 280, 425, 426, 427, 217, 218, 219),
                    *(186, 190, 194, 282, 241, 265, 180),
                )
            },
        },
    ),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD = 0x10000
_NAMES = ("<answer>", "<tests>")  # no files: the compiler looks for the line of a syntax error
_ALLOW, _KILL, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 38
# audit events by what they attempt; prefixes
_FORBIDDEN = {
    "socket.": "the network",
    "subprocess.": "another process",
    "os.fork": "another process",
    "os.exec": "another process",
    "os.spawn": "another process",
    "os.posix_spawn": "another process",
    "os.system": "another process",
    "os.kill": "another process",
    "pty.": "another process",
    "ctypes.": "calls of native code",
    "os.remove": "the disk",
    "os.rename": "the disk",
    "os.mkdir": "the disk",
    "os.rmdir": "the disk",
    "os.link": "the disk",
    "os.symlink": "the disk",
    "os.truncate": "the disk",
    "os.chmod": "the disk",
    "os.chown": "the disk",
    "os.listdir": "the disk",
    "os.scandir": "the disk",
    "shutil.": "the disk",
    "tempfile.": "the disk",
}


def main() -> None:
    """Apply the limits, run, report."""
    fd, seconds, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(fd, False)

    def report(**values: Any) -> None:
        os.write(fd, json.dumps(values).encode() + b"\n")

    request = json.loads(sys.stdin.read())
    sys.stdin.close()
    try:
        limit(seconds, size)
    except OSError as error:
        report(unavailable=str(error))
        return
    import encodings.idna
    import encodings.unicode_escape  # noqa: F401
    import traceback  # noqa: F401

    watch(report)
    scope: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(request["code"], _NAMES[0], "exec"), scope)
        exec(compile(request["tests"], _NAMES[1], "exec"), scope)
    except BaseException as error:
        report(failed=f"{type(error).__name__}: {error}"[:300])
        os._exit(0)
    report(passed=request["token"])
    os._exit(0)


def limit(seconds: float, size: int) -> None:
    """CPU time, memory, file size and open files; then no network, processes or file changes.

    Raises OSError if the kernel offers no filter of system calls.
    """
    whole = int(seconds) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, whole),
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_DATA, size),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if os.geteuid() == 0 and _readable_by_all(os.path.dirname(os.__file__)):
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)  # without privileges: files of root are out of reach
        os.setresuid(65534, 65534, 65534)
    _filter_calls()


def watch(report: Callable[..., None]) -> None:
    """End the process at the first audit event of a forbidden attempt, and name it."""
    roots = tuple(os.path.realpath(each) + os.sep for each in sys.path if each)
    exit_now, real, prefixes = os._exit, os.path.realpath, tuple(_FORBIDDEN.items())
    busy = [False]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if busy[0] or (event == "open" and args[0] in _NAMES):
            return
        what = ""
        if event == "open":
            busy[0] = True
            path, _, flags = args
            name = real(path) if isinstance(path, str) else str(path)
            writes = isinstance(flags, int) and bool(flags & _WRITES)
            if writes or not name.startswith(roots):
                what = f"the disk ({'write' if writes else 'read'} {name[:120]})"
            busy[0] = False
        elif event not in ("os.listdir", "os.scandir") or not _is_import(args, roots):
            for prefix, meant in prefixes:
                if event.startswith(prefix):
                    what = f"{meant} ({event})"
                    break
        if what:
            busy[0] = True
            report(forbidden=what)
            exit_now(0)

    sys.addaudithook(hook)


def _is_import(args: tuple[Any, ...], roots: tuple[str, ...]) -> bool:
    """Whether a folder is listed that modules are found in."""
    return bool(args) and isinstance(args[0], str) and (args[0] + os.sep).startswith(roots)


def _readable_by_all(path: str) -> bool:
    while True:
        if not os.stat(path).st_mode & 0o001:
            return False
        if path == os.path.dirname(path):
            return True
        path = os.path.dirname(path)


def _filter_calls() -> None:
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _NUMBERS:
        raise OSError(f"no filter of system calls for {sys.platform} on {machine}")
    arch, numbers = _NUMBERS[machine]
    program = _program(arch, numbers)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))

    given = Filter(len(program) // 8, ctypes.addressof(buffer))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(
        set_seccomp, filter_mode, ctypes.byref(given), 0, 0
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"the kernel refuses a filter of system calls: {os.strerror(code)}")


def _program(arch: int, numbers: dict[str, int]) -> bytes:
    """Classic BPF over `struct seccomp_data {nr, arch, ip, args[6]}` (seccomp(2))."""
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, arch),
        (end, 0, 0, _KILL),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # x32
        (end, 0, 0, _KILL),
    ]
    for name, number in numbers.items():
        if name.startswith("denied"):
            code += [(equal, 0, 1, number), (end, 0, 0, _KILL)]
    for name in ("clone3", "openat2"):  # libc falls back to calls whose arguments are visible
        code += [(equal, 0, 1, numbers[name]), (end, 0, 0, _ENOSYS)]
    for name, argument in (("open", 1), ("openat", 2)):
        if name in numbers:
            code += [
                (equal, 0, 4, numbers[name]),
                (load, 0, 0, 16 + 8 * argument),
                (any_bit, 0, 1, _WRITES),
                (end, 0, 0, _KILL),
                (end, 0, 0, _ALLOW),
            ]
    code += [
        (equal, 0, 4, numbers["clone"]),
        (load, 0, 0, 16),
        (any_bit, 1, 0, _CLONE_THREAD),
        (end, 0, 0, _KILL),
        (end, 0, 0, _ALLOW),
        (end, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


if __name__ == "__main__":
    main()

"""Compiles every shipped configuration without a GPU and checks it (`python -m kernels.gate`).

Breaches: register spills without a reason, shared memory above the architecture's limit, a missing
expected instruction, a compile error. It finds configurations in each module of this package
that has `shipped(arch) -> list[ShippedKernel]`. Does not depend on any operation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kernels
from kernels import runtime, tuning
from kernels.shipped import ShippedKernel

PROCESSES = 2


@dataclass(frozen=True)
class CompileResult:
    """The compiler's figures for one configuration."""

    op: str
    name: str
    arch: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int]
    seconds: float
    breaches: list[str]


def shipping_modules(only: str | None = None) -> list[str]:
    """Names of the modules that ship configurations; with `only`, of those that name this
    operation.
    """
    root = Path(kernels.__file__).parent
    matches = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        text = path.read_text()
        if "\ndef shipped(" in text and (only is None or f'"{only}"' in text):
            matches.append(
                ".".join(("kernels", *inside.with_suffix("").parts)).removesuffix(".__init__")
            )
    return matches


def compile_kernel(shipped_kernel: ShippedKernel, arch: str) -> CompileResult:
    """Compiles one configuration for `arch` and checks it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = time.perf_counter()
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(shipped_kernel.fn.arg_names):
        if name in shipped_kernel.constexprs:
            signature[name] = "constexpr"
            continue
        if name not in shipped_kernel.signature:
            raise KeyError(
                f"{shipped_kernel.op}/{shipped_kernel.name}: argument {name!r} is missing from "
                "both "
                "signature and constexprs."
            )
        kind, _, multiple = shipped_kernel.signature[name].partition(":")
        signature[name] = kind
        if kind.startswith("*") or multiple:
            attributes[(index,)] = [["tt.divisibility", int(multiple or 16)]]
    source = ASTSource(shipped_kernel.fn, signature, dict(shipped_kernel.constexprs), attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    try:
        kernel: Any = triton.compile(
            source,
            target=target,
            options={
                "num_warps": shipped_kernel.num_warps,
                "num_stages": shipped_kernel.num_stages,
            },
        )
    except Exception as error:
        message = str(error).strip().splitlines()
        text = f"does not compile: {type(error).__name__}: {' '.join(message[-3:])[:400]}"
        return CompileResult(
            shipped_kernel.op,
            shipped_kernel.name,
            arch,
            0,
            0,
            0,
            {},
            time.perf_counter() - started,
            [text],
        )
    registers, stack = _resources(kernel.asm["cubin"])
    ptx: str = kernel.asm["ptx"]
    shared = int(kernel.metadata.shared)
    return CompileResult(
        shipped_kernel.op,
        shipped_kernel.name,
        arch,
        registers,
        stack,
        shared,
        {
            w: len(re.findall(re.escape(w), ptx))
            for w in ("wgmma.mma_async", "mma.sync", "cp.async", "setmaxnreg")
        },
        round(time.perf_counter() - started, 2),
        _breaches(shipped_kernel, arch, stack, shared, ptx),
    )


def _breaches(
    shipped_kernel: ShippedKernel, arch: str, stack: int, shared: int, ptx: str
) -> list[str]:
    message = []
    if stack and shipped_kernel.spills_ok is None:
        message.append(
            f"spills {stack} bytes of registers per thread; use smaller blocks or more warps, or "
            "set spills_ok."
        )
    if not stack and shipped_kernel.spills_ok is not None:
        message.append("no longer spills; remove spills_ok.")
    limit = runtime.shared_memory_limit(arch)
    if shared > limit:
        message.append(
            f"needs {shared:,} bytes of shared memory; {arch} has {limit:,}. Use fewer stages or "
            "smaller blocks."
        )
    message += [
        f"has no {instruction} in its PTX."
        for instruction in shipped_kernel.expects
        if instruction not in ptx
    ]
    return message


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) per thread from cuobjdump; the stack holds spilled registers."""
    from triton import knobs

    path = tuning.cache_home() / f"gate-{os.getpid()}.cubin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cubin)
    try:
        results = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        path.unlink()
    matches = re.search(r"REG:(\d+).*?STACK:(\d+)", results)
    if matches is None:
        raise RuntimeError(f"cuobjdump reported no resource usage:\n{results[:500]}")
    return int(matches[1]), int(matches[2])


def _compile_job(job: tuple[str, int, str]) -> CompileResult:
    module, index, arch = job
    return compile_kernel(importlib.import_module(module).shipped(arch)[index], arch)


def compile_all(
    arch: str, only: str | None = None, processes: int = PROCESSES
) -> list[CompileResult]:
    """Compiles everything shipped for `arch` (or one operation's); triton caches the results."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(tuning.cache_home() / "triton"))
    jobs = [
        (module, index, arch)
        for module in shipping_modules(only)
        for index, shipped_kernel in enumerate(importlib.import_module(module).shipped(arch))
        if only is None or shipped_kernel.op == only
    ]
    if processes == 1 or len(jobs) < 3:
        return [_compile_job(job) for job in jobs]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_compile_job, jobs))


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 if there are breaches."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--arch", default="sm_90", help="sm_80, sm_90, …")
    parser.add_argument("--only", metavar="OP", help="one operation")
    parser.add_argument("--json", action="store_true", help="print one JSON document only")
    args = parser.parse_args(arguments)
    if not re.fullmatch(r"sm_\d+", args.arch):
        parser.error(f"--arch is {args.arch!r}; it must look like sm_90.")
    if not runtime.HAS_TRITON:
        parser.error(
            "triton is not installed, so nothing can be compiled: pip install triton==3.6.0"
        )
    if runtime.INTERPRET:
        parser.error("TRITON_INTERPRET is set, so nothing can be compiled: unset it.")
    results = compile_all(args.arch, args.only)
    if args.only and not results:
        parser.error(f"no operation {args.only!r} ships configurations.")
    breaches = [(t, message) for t in results for message in t.breaches]
    if args.json:
        print(
            json.dumps(
                {"arch": args.arch, "ok": not breaches, "kernels": [asdict(t) for t in results]},
                indent=1,
            )
        )
    else:
        for t in results:
            tensor_core = (
                "wgmma"
                if t.instructions.get("wgmma.mma_async")
                else "mma" * bool(t.instructions.get("mma.sync"))
            )
            print(
                f"{t.op:24} {t.name:36} {t.registers:4d} registers {t.spilled_bytes:5d} B spilled "
                f"{t.shared_bytes:8,d} B shared  {tensor_core:6} {t.seconds:5.1f} s"
            )
        print(f"{len(results)} configurations for {args.arch}, {len(breaches)} breaches.")
    for t, message in breaches:
        print(f"{t.op}/{t.name} on {t.arch}: {message}", file=sys.stderr)
    return 1 if breaches else 0

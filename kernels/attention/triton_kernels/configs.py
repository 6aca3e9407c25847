"""Block shapes of the attention kernels by architecture and head dim, and the accepted register
spills.

These rules apply if no table has a row. Registers and shared memory in comments are the gate's
figures.
"""

from __future__ import annotations

from typing import Any

from kernels import tuning
from kernels.jit import next_power_of_2

SMALLEST = 16  # smallest side of a tensor-core product


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """A head dim as two powers of two that contain it, the second 0 if one suffices: 192 = 128 +
    64, 96 = 64 + 32.
    """
    first = max(SMALLEST, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - first
    return first, 0 if rest <= 0 else max(SMALLEST, next_power_of_2(rest))


def _config(
    block_m: int, block_n: int, num_warps: int, num_stages: int, **more: Any
) -> tuning.Config:
    return {
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
        **more,
    }


def _hopper(arch: str) -> bool:
    """Whether tensor cores read shared memory, of 227 KiB: Hopper and data-center Blackwell."""
    return arch in ("sm_90", "sm_100")


def _width_class(widest: int) -> int:
    """0 to 3: head dims up to 64, 128, 192, 256."""
    return min((widest - 1) // 64, 3)


@tuning.rule("attention_forward")
def forward(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """facts: d, dv, wide (fp32), causal, window, softcap. `tma`: use the sm_90 kernel if the call
    allows it.
    """
    widest = max(facts["d"], facts["dv"])
    if arch == "interpret":
        chosen = _config(16, 16, 4, 1)
    elif facts["wide"]:
        chosen = _config(32, 32, 8, 1) if widest > 128 else _config(64, 32, 4, 1)
    elif _hopper(arch):
        # with 4 warps the mask's registers spill
        warps = 8 if facts["window"] or facts["softcap"] else 4
        chosen = [
            _config(128, 64, warps, 3),
            _config(128, 64, 8, 3),
            _config(128, 64, 8, 2),
            _config(128, 64, 8, 2),
        ][_width_class(widest)]
    else:
        chosen = [
            _config(128, 64, 4, 3),
            _config(128, 32, 8, 2),
            _config(128, 32, 8, 2),
            _config(64, 32, 8, 2),
        ][_width_class(widest)]
    return {**chosen, "tma": False}


@tuning.candidates("attention_forward")
def _forward_candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    """Also the kernel with TMA and warp specialization, where a call allows it."""
    if facts["wide"]:
        return _fewer_stages(forward(arch, facts))
    tma = [{"tma": True}] if arch == "sm_90" else []
    blocks = tuning.combinations(
        block_m=(128, 64), block_n=(64, 128, 32), num_warps=(4, 8), num_stages=(3, 2)
    )
    return tuning.changes(forward(arch, facts), *tma, *blocks)


@tuning.rule("attention_forward_tma")
def forward_tma(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """facts as in the forward kernel; four warps, or the compiler does not specialize."""
    if arch == "interpret":
        return _config(16, 16, 4, 1, warp_specialize=False)
    width_class = _width_class(max(facts["d"], facts["dv"]))
    chosen = [
        _config(128, 128, 4, 3),
        _config(128, 128, 4, 2),
        _config(128, 64, 4, 2),
        _config(128, 32, 4, 2),
    ][width_class]
    return {**chosen, "warp_specialize": True}


@tuning.candidates("attention_forward_tma")
def _tma_candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    choices = tuning.combinations(
        block_n=(128, 64, 32), num_stages=(2, 3, 4), warp_specialize=(True, False)
    )
    return tuning.changes(forward_tma(arch, facts), *choices)


@tuning.rule("attention_keys_values")
def keys_values(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """`one_loop`: mask every block; separate loops for masked and full blocks cost about 100 bytes
    of spills.
    """
    widest = max(facts["d"], facts["dv"])
    masked_scores = facts["window"] or facts["softcap"]
    if arch == "interpret":
        return _config(16, 16, 4, 1, one_loop=False)
    if facts["wide"]:
        chosen = _config(16, 32, 8, 1) if widest > 128 else _config(32, 32, 8, 1)
    elif _hopper(arch):
        narrow = _config(32, 128, 8, 2) if masked_scores else _config(64, 128, 8, 2)
        chosen = [narrow, _config(32, 128, 8, 2), _config(32, 64, 8, 2), _config(32, 64, 8, 1)][
            _width_class(widest)
        ]
    else:
        chosen = [
            _config(32, 64, 8, 2),
            _config(32, 64, 8, 2),
            _config(16, 64, 8, 1),
            _config(16, 64, 8, 1),
        ][_width_class(widest)]
    return {**chosen, "one_loop": True}


@tuning.candidates("attention_keys_values")
def _keys_values_candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    default = keys_values(arch, facts)
    if facts["wide"]:
        return _fewer_stages(default)
    choices = tuning.combinations(
        block_m=(64, 32), block_n=(128, 64), num_stages=(2, 1), one_loop=(True, False)
    )
    return tuning.changes(default, *choices, {"num_warps": 4})


@tuning.rule("attention_queries")
def queries(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """Blocks of the queries' backward kernel; facts and `one_loop` as in `keys_values`."""
    widest = max(facts["d"], facts["dv"])
    if arch == "interpret":
        return _config(16, 16, 4, 1, one_loop=False)
    if facts["wide"]:
        chosen = _config(32, 16, 8, 1) if widest > 128 else _config(32, 32, 8, 1)
    elif _hopper(arch):
        chosen = [
            _config(128, 64, 8, 3),
            _config(128, 64, 8, 2),
            _config(128, 64, 8, 2),
            _config(128, 32, 8, 1),
        ][_width_class(widest)]
    else:
        chosen = [
            _config(64, 64, 8, 2),
            _config(64, 64, 8, 2),
            _config(64, 32, 8, 2),
            _config(64, 32, 8, 1),
        ][_width_class(widest)]
    return {**chosen, "one_loop": widest > 128}


@tuning.candidates("attention_queries")
def _queries_candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    default = queries(arch, facts)
    if facts["wide"]:
        return _fewer_stages(default)
    choices = tuning.combinations(
        block_m=(128, 64), block_n=(64, 128, 32), num_stages=(2, 3), one_loop=(True, False)
    )
    return tuning.changes(default, *choices)


def _fewer_stages(default: tuning.Config) -> list[tuning.Config]:
    """fp32 products are exact: without tensor cores, and with little room in registers."""
    return tuning.changes(default, *tuning.combinations(num_warps=(4, 8), num_stages=(1, 2)))


@tuning.rule("attention_row_sums")
def row_sums(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """Blocks of the row sums kernel."""
    return _config(16, 0, 4, 1) if arch == "interpret" else _config(64, 0, 8, 1)


_WIDE = (
    "head dim 256: two 64 x 256 fp32 gradients fill half the registers; a smaller block "
    "spilled more (400 bytes)"
)
SPILLS_OK: dict[tuple[str, str], str] = {
    ("sm_90", "keys_values 256/256"): _WIDE,
    (
        "sm_90",
        "queries 256/256",
    ): "8 bytes; blocks of 16 keys do not spill but halve each tensor-core instruction",
    (
        "sm_90",
        "keys_values 128 packed, window, softcap",
    ): "16 bytes with all three; the next block is half as large",
    ("sm_80", "keys_values 192/128"): "8 bytes; the block is the smallest that tensor cores take",
}
"""(architecture, configuration name) -> why that configuration may spill registers."""

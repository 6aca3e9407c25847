"""Storage formats of quantized linear layers: AWQ, GPTQ, compressed-tensors, FP8 in tiles.

Unpacking is exact. Shapes: N outputs, K inputs, G groups along K. Sources: AutoAWQ's WQLinear_GEMM;
AutoGPTQ's QuantLinear (format v1) and GPTQModel's v2; compressed-tensors' pack_quantized and
int_quantized compressors; DeepSeek-V3's weight_scale_inv.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.models.errors import WeightsError

# nibble i of AutoAWQ's int32 holds output AWQ_ORDER[i] of its eight
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "pack-quantized": ("weight_packed", "weight_scale", "weight_shape"),
    "int-quantized": ("weight", "weight_scale"),
    "fp8": ("weight", "weight_scale_inv"),
    "low-rank": ("weight_left", "weight_right"),  # Orrery's own
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """A `quantization_config`: `form` names a layout of `_PARTS`, `kind` the computation."""

    form: str
    kind: str
    group: int = 128
    zero_offset: int = 0

    def parts(self, prefix: str) -> tuple[str, ...]:
        """Names of the tensors of the linear layer `prefix`."""
        return tuple(f"{prefix}.{part}" for part in _PARTS[self.form])

    @property
    def mark(self) -> str:
        """The tensor whose presence marks a linear layer as quantized."""
        return _PARTS[self.form][-1] if self.form != "gptq" else "qweight"


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized weight.

    int4: codes `[K, N]` uint8 in stored order, scales and zeros `[G, N]`, `order [K]` the input at
    each position; int8 and w8a8: codes `[N, K]`, scales `[N]`; fp8: codes `[N, K]` e4m3, one scale
    per tile; low-rank: codes `[N, R]` times scales `[R, K]`.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group: int = 128
    order: Tensor | None = None

    def weight(self) -> Tensor:
        """The full weight `[N, K]` in the scales' dtype, fp8 in bf16."""
        if self.kind == "int4":
            assert self.zeros is not None
            spread = (
                x.float().repeat_interleave(self.group, 0)[: len(self.codes)]
                for x in (self.scales, self.zeros)
            )
            scale, zero = spread
            full = ((self.codes.float() - zero) * scale).T
            full = full if self.order is None else full[:, self.order.argsort()]
            return full.contiguous().to(self.scales.dtype)
        if self.kind == "low-rank":
            return self.codes @ self.scales
        if self.kind == "fp8":
            tiles = self.scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            return (
                self.codes.float() * tiles[: self.codes.shape[0], : self.codes.shape[1]]
            ).bfloat16()
        return (self.codes.float() * self.scales.float().unsqueeze(1)).to(self.scales.dtype)


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """The scheme, None if weights are not quantized. Raises WeightsError if unknown."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise WeightsError(
            f"{where}: its quantization_config is not an object; fetch the folder again"
        )
    method = settings.get("quant_method")
    if method == "fp8" and settings.get("weight_block_size") == [128, 128]:
        return Quantization("fp8", "fp8")
    if method == "low-rank":
        return Quantization("low-rank", "low-rank")
    if method in ("awq", "gptq"):
        return _four_bits(str(method), settings, where)
    if method == "compressed-tensors":
        return _compressed(settings, where)
    message = f"its weights are quantized by {method!r}"
    raise WeightsError(
        f"{where}: {message}; give the original weights, or awq, gptq, compressed-tensors or fp8 "
        "by 128 x 128"
    )


def _four_bits(method: str, settings: Mapping[str, Any], where: str) -> Quantization:
    bits, group = settings.get("bits"), settings.get("group_size", 128)
    if bits != 4:
        raise WeightsError(f"{where}: its {method} weights have {bits!r} bits; only 4 can be read")
    if type(group) is not int or group < -1 or group == 0:
        raise WeightsError(
            f"{where}: its {method} group_size is {group!r}; it must be an integer, or -1"
        )
    version = (
        settings.get("version", "gemm")
        if method == "awq"
        else settings.get("checkpoint_format", "gptq")
    )
    if method == "awq" and str(version).lower() != "gemm":
        raise WeightsError(f"{where}: its awq version is {version!r}; only gemm can be read")
    if method == "gptq" and version not in ("gptq", "gptq_v2"):
        raise WeightsError(
            f"{where}: its gptq checkpoint_format is {version!r}; only gptq and gptq_v2 can be read"
        )
    return Quantization(method, "int4", group, 1 if version == "gptq" else 0)


def _compressed(settings: Mapping[str, Any], where: str) -> Quantization:
    groups, form = settings.get("config_groups"), settings.get("format")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = (
        schemes[0].get("weights") if len(schemes) == 1 and isinstance(schemes[0], Mapping) else None
    )
    plain = (
        isinstance(weights, Mapping)
        and {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "channel",
        }.items()
        <= weights.items()
    )
    if form not in ("pack-quantized", "int-quantized") or not plain:
        message = f"its compressed-tensors format is {form!r}"
        raise WeightsError(
            f"{where}: {message}; only symmetric int8 with one scale per output can be read"
        )
    return Quantization(str(form), "w8a8" if schemes[0].get("input_activations") else "int8")


def unpack(scheme: Quantization, prefix: str, read: Callable[[str], Tensor], where: str) -> Packed:
    """The linear layer `prefix`, whose tensors `read` returns.

    Raises WeightsError for shapes that do not match.
    """
    parts = [read(name) for name in scheme.parts(prefix)]
    shapes = ", ".join(
        f"{name.rpartition('.')[2]} {list(part.shape)}"
        for name, part in zip(scheme.parts(prefix), parts, strict=True)
    )
    try:
        return _UNPACK[scheme.form](scheme, parts)
    except (ValueError, RuntimeError, IndexError) as error:
        raise WeightsError(
            f"{where}: {prefix} has {shapes}: {error}; fetch the folder again"
        ) from None


def _awq(scheme: Quantization, parts: list[Tensor]) -> Packed:
    qweight, qzeros, scales = parts
    places = torch.tensor(AWQ_ORDER).argsort()
    codes, zeros = (unpack_nibbles(x)[..., places].flatten(1) for x in (qweight, qzeros))
    return _checked(scheme, codes, scales, zeros, None)


def _gptq(scheme: Quantization, parts: list[Tensor]) -> Packed:
    qweight, qzeros, scales, g_idx = parts
    codes = unpack_nibbles(qweight).transpose(1, 2).flatten(0, 1)
    zeros = unpack_nibbles(qzeros).flatten(1) + scheme.zero_offset
    if bool((zeros > 15).any()):
        raise ValueError("there is a zero of 16, which four bits cannot represent")
    inputs = codes.shape[0]
    if g_idx.shape != (inputs,) or bool((g_idx < 0).any()) or bool((g_idx >= len(scales)).any()):
        raise ValueError(f"g_idx must name one of {len(scales)} groups for each of {inputs} inputs")
    group = scheme.group if scheme.group > 0 else inputs
    trivial = torch.arange(inputs) // group
    if torch.equal(g_idx.long(), trivial):
        return _checked(scheme, codes, scales, zeros, None)
    order = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[order].long(), trivial):
        raise ValueError(f"its groups do not have {group} inputs each")
    return _checked(scheme, codes[order], scales, zeros, order)


def _checked(
    scheme: Quantization, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None
) -> Packed:
    inputs, outputs = codes.shape
    group = scheme.group if scheme.group > 0 else inputs
    expected = (-(-inputs // group), outputs)
    if tuple(scales.shape) != expected or tuple(zeros.shape) != expected:
        raise ValueError(f"scales and zeros must be {list(expected)} for groups of {group}")
    if not scales.is_floating_point() or not bool(scales.isfinite().all()):
        raise ValueError("scales must be finite numbers")
    return Packed("int4", codes.contiguous(), scales.contiguous(), zeros.contiguous(), group, order)


def _pack_quantized(scheme: Quantization, parts: list[Tensor]) -> Packed:
    """Eight bits, four per int32 along K, stored as code + 128."""
    packed, scales, shape = parts
    outputs, inputs = (int(size) for size in shape)
    if packed.dtype != torch.int32 or tuple(packed.shape) != (outputs, -(-inputs // 4)):
        raise ValueError(f"weight_packed must be int32 {[outputs, -(-inputs // 4)]}")
    shifts = torch.arange(0, 32, 8, dtype=torch.int32)
    codes = ((packed.unsqueeze(-1) >> shifts) & 255).flatten(1)[:, :inputs] - 128
    return _by_output(scheme, codes.to(torch.int8), scales)


def _int_quantized(scheme: Quantization, parts: list[Tensor]) -> Packed:
    return _by_output(scheme, parts[0], parts[1])


def _by_output(scheme: Quantization, codes: Tensor, scales: Tensor) -> Packed:
    if codes.dtype != torch.int8 or codes.dim() != 2 or scales.numel() != codes.shape[0]:
        raise ValueError("int8 codes and one scale per output are required")
    return Packed(scheme.kind, codes.contiguous(), scales.flatten().contiguous())


def _low_rank(scheme: Quantization, parts: list[Tensor]) -> Packed:
    left, right = parts
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        raise ValueError("its factors do not multiply")
    return Packed("low-rank", left, right)


def _fp8(scheme: Quantization, parts: list[Tensor]) -> Packed:
    codes, scales = parts
    expected = tuple(-(-side // 128) for side in codes.shape)
    if codes.dtype != torch.float8_e4m3fn or tuple(scales.shape) != expected:
        raise ValueError(f"e4m3 codes are required, with scales {list(expected)}")
    return Packed("fp8", codes.contiguous(), scales.float().contiguous())


def pack(scheme: Quantization, packed: Packed) -> tuple[Tensor, ...]:
    """The inverse of `unpack`: tensors in the order of `scheme.parts`.

    Raises ValueError if the layout cannot represent the weight.
    """
    codes, scales = packed.codes, packed.scales
    if scheme.kind == "int4" and (codes.shape[0] % 8 or codes.shape[1] % 8):
        raise ValueError(
            f"{scheme.form} packs eight numbers together, the weight is {list(codes.T.shape)}"
        )
    if scheme.form == "awq":
        assert packed.zeros is not None and packed.order is None
        order = list(AWQ_ORDER)
        qweight, qzeros = (
            pack_nibbles(x.view(len(x), -1, 8)[..., order]) for x in (codes, packed.zeros)
        )
        return qweight, qzeros, scales
    if scheme.form == "gptq":
        assert packed.zeros is not None
        groups = torch.arange(codes.shape[0], dtype=torch.int32) // packed.group
        places = torch.arange(codes.shape[0]) if packed.order is None else packed.order.argsort()
        stored = packed.zeros.to(torch.int32) - scheme.zero_offset
        if bool((stored < 0).any()):
            raise ValueError(
                "there is a zero of 0, which format gptq cannot represent. Use gptq_v2."
            )
        qweight = pack_nibbles(codes[places].view(-1, 8, codes.shape[1]).transpose(1, 2))
        return qweight, pack_nibbles(stored.view(len(stored), -1, 8)), scales, groups[places]
    if scheme.form == "pack-quantized":
        wide = functional.pad(codes.to(torch.int32) + 128, (0, -codes.shape[1] % 4)).view(
            len(codes), -1, 4
        )
        shifts = torch.arange(0, 32, 8, dtype=torch.int64)
        packed_int = (wide.to(torch.int64) << shifts).sum(-1)
        signed = (packed_int - ((packed_int >> 31) << 32)).to(torch.int32)
        return signed, scales.unsqueeze(1), torch.tensor(codes.shape)
    return (codes, scales) if scheme.form in ("fp8", "low-rank") else (codes, scales.unsqueeze(1))


def unpack_nibbles(x: Tensor) -> Tensor:
    """`[…]` int32 to `[…, 8]` uint8, the lowest four bits first. Raises ValueError."""
    if x.dtype != torch.int32:
        raise ValueError(f"packed numbers are int32, not {x.dtype}")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((x.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """`[…, 8]` numbers 0 to 15 to `[…]` int32; the inverse of `unpack_nibbles`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    # nibbles do not overlap, so their sum equals their bitwise or
    return (codes.to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


_UNPACK: dict[str, Callable[[Quantization, list[Tensor]], Packed]] = {
    "awq": _awq,
    "gptq": _gptq,
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
    "fp8": _fp8,
    "low-rank": _low_rank,
}

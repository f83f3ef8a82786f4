"""bfloat16 and FP8 e4m3, which NumPy lacks, as bit patterns."""

from __future__ import annotations

import numpy as np
import torch

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def e4m3_to_float(bits: np.ndarray) -> np.ndarray:
    return _E4M3[bits.astype(np.uint8)]


def float_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even and clamped to ±448 (cvt.rn.satfinite), as uint8."""
    clamped = np.clip(np.asarray(x, np.float32), -448, 448)
    return torch.from_numpy(clamped).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def decode(data: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of `kind` (e4m3, bf16, f16) along the last axis → float32."""
    data = np.ascontiguousarray(data)
    if kind == "e4m3":
        return e4m3_to_float(data)
    if kind == "bf16":
        return bf16_to_float(data.view(np.uint16))
    if kind == "f16":
        return data.view(np.float16).astype(np.float32)
    raise KeyError(kind)

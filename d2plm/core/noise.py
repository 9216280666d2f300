"""Stateless random draws: every number is a hash of what it is for, not of what was drawn before.

A draw is keyed by (run seed, step, stream, index of the sequence in the global batch, position), so
masks and times are the same on any number of ranks, micro-batches and workers, on CPU and on CUDA,
and any step can be replayed. A few integer operations per token; no generator, no state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64 (Steele et al., 2014)


@dataclass(frozen=True)
class Key:
    """Names one set of draws: `Key(seed, step)`; `key.stream("mask")` derives independent ones."""

    seed: int
    step: int = 0
    salt: int = 0

    def stream(self, name: str) -> "Key":
        """An independent key for another purpose within the same step."""
        salt = self.salt
        for byte in name.encode():
            salt = _mix_int((salt ^ byte) + _GOLDEN)
        return Key(self.seed, self.step, salt)

    def as_int(self) -> int:
        """The key as one well-mixed 64-bit integer."""
        mixed = _mix_int(self.seed + _GOLDEN)
        mixed = _mix_int((mixed ^ self.step) + _GOLDEN)
        return _mix_int((mixed ^ self.salt) + _GOLDEN)


def uniform(key: Key, *indices: Tensor) -> Tensor:
    """float64 in [0, 1), 53 random bits, independent across keys and the broadcast `indices`."""
    # Filled on the device: copying a number there makes the host wait.
    state = torch.full((), _signed(key.as_int()), dtype=torch.int64, device=indices[0].device)
    for index in indices:
        state = _mix((state ^ index.long()) + _signed(_GOLDEN))
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def stratified(key: Key, draw_ids: Tensor, count: int) -> Tensor:
    """float64 [S] in [0, 1): low-variance uniforms over a global batch of `count` sequences.

    Sequence i gets (u + π(i)) / count with one shared u and a permutation π of 0..count−1, so the
    times of a global batch cover [0, 1) evenly, independently of ranks and micro-batches. Entries
    with `draw_ids` −1 (padding) are meaningless.
    """
    device = draw_ids.device
    everyone = torch.arange(max(count, 1), device=device)
    permutation = uniform(key.stream("permutation"), everyone).argsort()
    shared = uniform(key.stream("shared"), torch.zeros((), dtype=torch.long, device=device))
    return (permutation[draw_ids.clamp(min=0)] + shared) / max(count, 1)


def categorical(key: Key, probabilities: Tensor, *indices: Tensor) -> Tensor:
    """int64 [N]: a category for each row of `probabilities` [N, C] (rows sum to anything > 0).

    Inverse of the cumulative distribution in float64, which keeps the tail that float32 Gumbel
    noise would cut off.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniform(key, *indices) * cumulative[:, -1]
    chosen = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    return chosen.clamp(max=probabilities.shape[-1] - 1)


def _mix_int(value: int) -> int:
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK_64
    return value ^ (value >> 31)


def _mix(value: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors, whose products wrap like unsigned ones."""
    value = (value ^ _shift_right(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift_right(value, 27)) * _signed(_MIX_2)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int64 tensor (torch's own is arithmetic)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value

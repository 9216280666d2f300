"""The device and the precision of matrix products, chosen by what the hardware supports."""

import torch

from d2plm.core.errors import ConfigError, require_choice

DEVICES = ("auto", "cpu", "cuda")
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,  # in training with a loss scale, for devices without bf16
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def resolve_device(device: str) -> str:
    """`cpu` or `cuda`, `auto` resolved; `ConfigError` for a device that this machine lacks."""
    require_choice("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': no CUDA device is visible; use 'cpu' or 'auto'")
    return "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"


def resolve_precision(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; `auto` selects bf16 if the hardware has instructions for it.

    On a CPU without avx512_bf16 or AMX, bf16 is emulated and slower than fp32. For CUDA on a
    machine without a GPU, bf16 is assumed.
    """
    require_choice("precision", precision, ("auto", *DTYPES))
    if precision != "auto":
        return DTYPES[precision]
    if device.type == "cuda":
        absent = not torch.cuda.is_available()
        fast = absent or torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        allowed = torch.backends.cpu.get_cpu_capability().startswith(
            "AVX512"
        )  # ATEN_CPU_CAPABILITY can limit it
        supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        fast = allowed and supported
    return torch.bfloat16 if fast else torch.float32

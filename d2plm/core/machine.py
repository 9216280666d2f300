"""The machine that figures were made on, as benchmarks and reports state it."""

import platform
from pathlib import Path
from typing import Any

from d2plm.core.cores import usable_cores
from d2plm.core.versions import installed

PACKAGES = ("d2plm", "torch", "transformers", "accelerate", "pytorch-lightning")


def machine() -> dict[str, Any]:
    """Processor, cores, device and versions, on which the figures depend."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "usable_cores": usable_cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
    }


def _processor() -> str:
    """The name of the processor, as far as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")

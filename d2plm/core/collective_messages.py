"""Messages of gloo and NCCL: torch raises `RuntimeError` for all, so only the text differs."""

import re

TIMED_OUT = "Timed out waiting"  # gloo; NCCL ends the process itself
CONNECTION_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|remote process exited"
)

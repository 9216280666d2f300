"""Messages of gloo and NCCL that only the text tells apart: torch raises `RuntimeError` for all."""

import re

TIMED_OUT = "Timed out waiting"  # gloo; NCCL ends the process itself
# The other end of a connection is gone.
CONNECTION_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|remote process exited"
)

"""Starting training on this machine with torchrun, and ending as it ends."""

import os
import subprocess
import sys
from pathlib import Path

from d2plm.errors import LaunchError

GRACE_SECONDS = 60


def train_locally(config_file: Path, processes: int = 1) -> None:
    """Run `d2plm train` under torchrun with a composed configuration.

    The configuration is composed once, here, and not in every worker.

    Raises:
        LaunchError: if training fails; its own message has been printed.
    """
    command = [
        *(sys.executable, "-m", "d2plm.launch.elastic"),
        *("--standalone", f"--nproc-per-node={processes}"),
        *("-m", "d2plm", "train", f"--config-file={config_file}"),
    ]
    with subprocess.Popen(command, env=os.environ.copy()) as child:
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait(GRACE_SECONDS)
            raise
    if code != 0:
        raise LaunchError(f"training ended with exit code {code}; its own message stands above")

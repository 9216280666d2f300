"""Profiler: traces of chosen steps by torch's profiler, one file per rank.

The step before the first traced one is recorded and discarded, because starting takes time. The
step's spans (forward, backward, optimizer, …) appear in the trace by name.
"""

import logging

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from d2plm.core.files import write_text, written_beside
from d2plm.settings.callbacks import ProfilerSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer

ROWS = 20

log = logging.getLogger(__name__)


class Profiler(Callback):
    """Trace `steps` steps to `output_dir/profile/rankR.step-N.json.gz`, N being the first.

    The files are for https://ui.perfetto.dev; `rankR.step-N.txt` lists the operators that took most
    time. The CPU is traced, and the CUDA device, if any.
    """

    def __init__(self, settings: ProfilerSettings | None = None) -> None:
        settings = settings or ProfilerSettings()
        self.start, self.steps = settings.start, settings.steps
        self._profile: profile | None = None
        self._written = False

    def on_train_begin(self, trainer: Trainer) -> None:
        if self.start is None:
            return
        self._folder, self._first = trainer.output_dir / "profile", trainer.step + self.start
        self._name = f"rank{trainer.process.rank}.step-{self._first}"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=self.start - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._profile.start()

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if self._profile is not None:
            self._profile.step()
            if self._written:
                self._stop()

    def on_stop(self, trainer: Trainer) -> None:
        if self._profile is None:
            return
        self._stop()
        if not self._written:
            log.warning(
                "start=%s: training ended at step %d, before the first traced "
                "one; nothing was traced",
                self.start,
                trainer.step,
            )

    def _stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()  # also writes an interrupted trace
        self._profile = None

    def _write(self, traced: profile) -> None:
        self._written = True
        file = self._folder / f"{self._name}.json.gz"
        with written_beside(file) as partial:
            traced.export_chrome_trace(str(partial))
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = traced.key_averages().table(sort_by=by, row_limit=ROWS)
        write_text(self._folder / f"{self._name}.txt", table)
        log.info("profile: %s", file)

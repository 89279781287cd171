"""torch_npu.profiler: the calls are there and a trace is written; what is in it is the host's."""
import os
import time
from pathlib import Path

import torch


def tensorboard_trace_handler(dir_name, worker_name=None, analyse_flag=True):
    def handler(profiler):
        folder = Path(dir_name) / f"{worker_name or os.getpid()}_{time.strftime('%Y%m%d%H%M%S')}_ascend_pt"
        folder = folder / "ASCEND_PROFILER_OUTPUT"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.host.export_chrome_trace(str(folder / "trace_view.json"))
    return handler


class profile:
    def __init__(self, *, activities=None, schedule=None, on_trace_ready=None, **options):
        self.host, self.ready = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), on_trace_ready

    def start(self):
        self.host.start()

    def stop(self):
        self.host.stop()
        if self.ready:
            self.ready(self)

"""torch_npu.npu.amp: the classes of torch.amp, with a GradScaler that also sees the overflows of a card that saturates."""
import torch
import torch.distributed as dist

from . import utils


class autocast(torch.amp.autocast_mode.autocast):
    def __init__(self, enabled=True, dtype=torch.float16, cache_enabled=True):
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """Where results saturate no gradient is ever inf, so the flag decides, over all ranks: a saturated number does not
    show after an all-reduce."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, dynamic=True,
                 enabled=True):
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._flag = enabled and not utils.is_support_inf_nan()
        if self._flag:
            utils.clear_npu_overflow_flag()

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if self._flag:
            for t in found.values():
                t.fill_(max(t.item(), float(utils.get_npu_overflow_flag())))
                if dist.is_initialized():
                    dist.all_reduce(t, op=dist.ReduceOp.MAX)
        return found

    def update(self, new_scale=None):
        super().update(new_scale)
        if self._flag:
            utils.clear_npu_overflow_flag()

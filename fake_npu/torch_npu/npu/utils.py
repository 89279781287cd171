"""torch_npu.npu.utils: the overflow flag of the cards that saturate instead of giving inf."""
import warnings

from torch_npu import _C

from . import get_soc_version


def is_support_inf_nan():
    return get_soc_version() >= 220


def get_npu_overflow_flag():
    if is_support_inf_nan():
        raise RuntimeError("Unsupported api when soc_version >= Ascend910B1, please use npu_check_overflow")
    return _C.overflow_flag()


def clear_npu_overflow_flag():
    if is_support_inf_nan():
        warnings.warn("When soc_version >= Ascend910B1, clear_npu_overflow_flag is useless, please remove it.", stacklevel=2)
        return
    _C.set_overflow_flag(False)


def npu_check_overflow(grad):
    """Whether a tensor (or number) is not finite; on the cards that saturate: reads and clears the flag instead."""
    if is_support_inf_nan():
        total = float(grad if isinstance(grad, float) else grad.float().sum())
        return total - total != 0
    found = get_npu_overflow_flag()
    clear_npu_overflow_flag()
    return found

"""torch.npu of the simulated device; names and signatures are those of torch_npu 2.13."""
import os
import time
import warnings
from types import SimpleNamespace

import torch
from torch_npu import _C


# --- devices
def is_available():
    return _C.device_count() > 0


def device_count():
    return _C.device_count()


def init():
    if not is_available():
        raise RuntimeError("No NPU devices are available")


def is_initialized():
    return True


_lazy_init = init


def _is_in_bad_fork():
    return False


def current_device():
    return _C.current_device()


def _index(device=None):
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _C.current_device()
    device = torch.device(device)
    if device.type != "npu":
        raise ValueError(f"Expected a npu device, but got: {device}")
    return _C.current_device() if device.index is None else device.index


def set_device(device):
    _C.set_device(_index(device))


def synchronize(device=None):
    pass  # every operator is finished when it returns


class device:
    """Context manager: work on another device for a while."""

    def __init__(self, device):
        self.index = _index(device)

    def __enter__(self):
        self.before = _C.current_device()
        _C.set_device(self.index)

    def __exit__(self, *exc):
        _C.set_device(self.before)


# --- the card
# Numbers as in torch_npu; from 220 on it is the second generation. A bare "Ascend910B" is of the first one.
_SOC = {"Ascend910PremiumA": 100, "Ascend910ProA": 101, "Ascend910A": 102, "Ascend910ProB": 103, "Ascend910B": 104,
        "Ascend310P1": 200, "Ascend310P2": 201, "Ascend310P3": 202, "Ascend310P4": 203,
        "Ascend910B1": 220, "Ascend910B2": 221, "Ascend910B2C": 222, "Ascend910B3": 223, "Ascend910B4": 224,
        "Ascend910B4-1": 225, "Ascend910_9391": 250, "Ascend910_9392": 251, "Ascend910_9381": 252, "Ascend910_9382": 253,
        "Ascend910_9372": 254, "Ascend910_9362": 255}
_NAME = os.environ.get("FAKE_NPU_NAME") or "Ascend910B2"
_C.set_soc(_SOC.get(_NAME, -1))


def get_soc_version():
    return _SOC.get(_NAME, -1)


def get_device_name(device_name=None):
    _index(device_name)
    return _NAME


def get_device_capability(device=None):
    return None


def get_device_properties(device_name=None):
    soc = get_soc_version()
    cores = 32 if soc < 200 else 8 if soc < 220 else 20 if soc in (223, 224, 225) else 24
    return SimpleNamespace(name=get_device_name(device_name), total_memory=_C.mem_total(), L2_cache_size=192 << 20,
                           cube_core_num=cores, vector_core_num=cores if soc < 220 else 2 * cores)


def is_bf16_supported(including_emulation=False):
    init()
    return get_soc_version() >= 220


# --- streams and events
class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, **kwargs):
        if kwargs:  # torch.Stream's own form: stream_id, device_index, device_type
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)

    def wait_stream(self, stream):
        pass


class Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
        return super().__new__(cls, "npu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)

    def record(self, stream=None):
        self._at = time.perf_counter()
        super().record(*([] if stream is None else [stream]))

    def elapsed_time(self, end_event):  # torch.Event's own takes no subclass
        return (end_event._at - self._at) * 1e3


def current_stream(device=None):
    s = torch.accelerator.current_stream(torch.device("npu", _index(device)))
    return Stream(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)


def set_stream(stream):
    torch.accelerator.set_stream(stream)


class stream:
    """Context manager: work on another stream for a while."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.before = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(self, *exc):
        if self.stream is not None:
            set_stream(self.before)


# --- memory
def memory_stats(device=None):
    stats = _C.mem_stats(_index(device))
    out = {f"{kind}.all.{k}": v for kind in ("allocated_bytes", "reserved_bytes", "active_bytes") for k, v in stats.items()}
    return {**out, "num_alloc_retries": 0, "num_ooms": 0}


def memory_allocated(device=None):
    return _C.mem_stats(_index(device))["current"]


def max_memory_allocated(device=None):
    return _C.mem_stats(_index(device))["peak"]


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated  # nothing is kept back


def reset_peak_memory_stats(device=None):
    _C.reset_peak(_index(device))


def mem_get_info(device=None):
    return _C.mem_total() - memory_allocated(device), _C.mem_total()


def empty_cache():
    pass


# --- random numbers
default_generators = tuple(_C.default_generator(i) for i in range(_C.device_count()))


def manual_seed(seed):
    default_generators[_C.current_device()].manual_seed(int(seed))


def manual_seed_all(seed):
    for g in default_generators:
        g.manual_seed(int(seed))


def initial_seed():
    return default_generators[_C.current_device()].initial_seed()


def get_rng_state(device="npu"):
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state, device="npu"):
    default_generators[_index(device)].set_state(new_state.cpu())


def get_rng_state_all():
    return [g.get_state() for g in default_generators]


def set_rng_state_all(new_states):
    for g, state in zip(default_generators, new_states):
        g.set_state(state.cpu())


# --- autocast
def get_amp_supported_dtype():
    return [torch.float16, *([torch.bfloat16] if is_bf16_supported() else []), torch.float32]


# --- switches: remembered, so that a test can look at them; without effect
_VALUES = {"ACL_PRECISION_MODE": ("allow_fp32_to_fp16", "must_keep_origin_dtype"),
           "ACL_OP_SELECT_IMPL_MODE": ("high_performance", "high_precision"),
           "ACL_OP_DEBUG_LEVEL": ("0", "1", "2", "3", "4"),
           "ACL_OP_COMPILER_CACHE_MODE": ("disable", "enable", "force")}
_OPTIONS = {*_VALUES, "ACL_AICORE_NUM", "ACL_OPTYPELIST_FOR_IMPLMODE", "ACL_DEBUG_DIR", "ACL_OP_COMPILER_CACHE_DIR",
            "ACL_OP_DEBUG_OPTION", "ALLOW_CONV_HF32", "ALLOW_MATMUL_HF32", "ALLOW_INTERNAL_FORMAT", "CUBE_MATH_TYPE",
            "MM_BMM_ND_ENABLE", "STRONG_CONSISTENCY", "OP_HOOK_ENABLE", "FORCE_ACLNN_OP_LIST", "jitCompile"}
options = {}


def set_option(option):
    if not isinstance(option, dict):
        raise TypeError("npu option must be a dict.")
    for k, v in option.items():
        if k not in _OPTIONS:
            raise RuntimeError(f"invalid npu option name:{k}")
        if k in _VALUES and str(v) not in _VALUES[k]:
            raise ValueError(f"value of {k} should be in {list(_VALUES[k])} but got {v}")
        if k in ("ACL_OP_SELECT_IMPL_MODE", "ACL_OPTYPELIST_FOR_IMPLMODE"):
            warnings.warn(f"{k} will be deprecated in a future version", stacklevel=2)
        options[k] = str(v)


def set_compile_mode(jit_compile=False):
    options["jitCompile"] = "enable" if jit_compile else "disable"


class _Switches:
    """Attributes that exist can be set; others are errors, as with the real package."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __setattr__(self, name, value):
        if name not in self.__dict__:
            raise AttributeError(name)
        self.__dict__[name] = value


config = _Switches(allow_internal_format=get_soc_version() < 220)
conv = _Switches(allow_hf32=True)
matmul = _Switches(allow_hf32=False, cube_math_type=-1)

from . import amp as amp, utils as utils
from .utils import clear_npu_overflow_flag as clear_npu_overflow_flag, get_npu_overflow_flag as get_npu_overflow_flag

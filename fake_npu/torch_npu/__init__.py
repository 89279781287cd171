"""A simulated torch_npu: the device "npu" on host memory, for tests on machines that have none. See the README.

`import torch` loads it through the entry point torch.backends when this folder's parent is on PYTHONPATH, exactly as with
the real package; `import torch_npu` does the same where TORCH_DEVICE_BACKEND_AUTOLOAD=0 forbids that.
"""
import os
import sys

if os.environ.get("FAKE_NPU_NO_CANN") == "1":
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")

if "torch" not in sys.modules:  # the import of torch below must not come back here
    _before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch
    finally:
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
        if _before is not None:
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _before
import torch

from . import _build, version
from .version import __version__ as __version__

IS_FAKE = True

version.announce()
torch.utils.rename_privateuse1_backend("npu")
_C = _build.load()
_C.set_strict(os.environ.get("FAKE_NPU_STRICT", "1") != "0")

from . import npu, profiler  # noqa: F401

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True,
                                                     for_storage=True)
# Backward runs on the calling thread. On autograd's thread for this device a script that ends right after a backward can
# reach the end of the interpreter while that thread still waits for it, and the process then aborts (status 134).
torch._C._set_multithreading_enabled(False)

from . import _distributed

_distributed.register()


def npu_fusion_attention(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0,
                         keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None,
                         actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False):
    """Layout BNSD, sparse modes 0 to 4, no dropout. As on the card, without a mask the mode and the tockens count for nothing."""
    if input_layout != "BNSD" or pse is not None or keep_prob != 1.0 or query.dim() != 4 or head_num != query.size(1):
        raise RuntimeError(f"npu_fusion_attention: layout {input_layout}, {query.dim()} dimensions, {head_num} heads not simulated")
    if query.size(1) % key.size(1):
        raise RuntimeError(f"npu_fusion_attention: {query.size(1)} heads over {key.size(1)}")
    S, K = query.size(2), key.size(2)
    key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if atten_mask is not None:
        if atten_mask.dtype not in (torch.bool, torch.uint8):
            raise RuntimeError("npu_fusion_attention: atten_mask must be bool or uint8")
        if sparse_mode in (2, 3, 4) and tuple(atten_mask.shape) != (2048, 2048):
            raise RuntimeError(f"npu_fusion_attention: sparse_mode {sparse_mode} needs a mask of (2048, 2048)")
        i, j = torch.arange(S)[:, None] + (K - S if sparse_mode in (3, 4) else 0), torch.arange(K)
        hidden = {2: j > i, 3: j > i, 4: (j > i + next_tockens) | (j < i - pre_tockens)}.get(sparse_mode)
        scores = scores.masked_fill(atten_mask.bool() if hidden is None else hidden.to(query.device), float("-inf"))
    weights = scores.softmax(-1)
    return (weights.to(value.dtype) @ value, scores.amax(-1), scores.logsumexp(-1), torch.empty(0), 0, 0, 0)


def _autoload():
    """What the entry point calls; the import has done everything."""

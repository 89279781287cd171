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

from . import npu

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True,
                                                     for_storage=True)
# Backward runs on the calling thread. On autograd's thread for this device a script that ends right after a backward can
# reach the end of the interpreter while that thread still waits for it, and the process then aborts (status 134).
torch._C._set_multithreading_enabled(False)

from . import _distributed

_distributed.register()


def _autoload():
    """What the entry point calls; the import has done everything."""

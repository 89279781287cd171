"""Compiles the C++ part with g++ once and keeps the result under build/."""
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = sorted((HERE / "csrc").glob("*.cpp"))
NAME = "_fake_C"


def build():
    """The path of the library, compiled when there is none yet of these sources, this torch and this Python."""
    import torch

    key = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in (*SOURCES, *sorted((HERE / "csrc").rglob("*.h")), Path(__file__)):
        key.update(path.read_bytes())
    folder = Path(os.environ.get("FAKE_NPU_BUILD_DIR", HERE.parent / "build"))
    library = folder / f"{NAME}-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    include = [HERE / "csrc" / "slim", root / "include", root / "include/torch/csrc/api/include",
               sysconfig.get_paths()["include"]]
    # -O1 compiles as fast as -O0, since headers are most of the work, and an operator costs 3 us instead of 40.
    flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_DISTRIBUTED",
             *(f"-I{i}" for i in include)]
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        objects = [f"{tmp}/{path.stem}.o" for path in SOURCES]
        jobs = [subprocess.Popen(["g++", *flags, "-c", path, "-o", obj]) for path, obj in zip(SOURCES, objects)]
        if any([job.wait() for job in jobs]):
            raise RuntimeError("fake NPU: compilation failed")
        subprocess.run(["g++", "-shared", *objects, "-o", f"{tmp}/out.so", f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch",
                        "-ltorch_python", f"-Wl,-rpath,{root}/lib"], check=True)
        os.replace(f"{tmp}/out.so", library)  # in one step: two processes may build at once
    return library


def load():
    spec = importlib.util.spec_from_file_location(NAME, build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    print(build())

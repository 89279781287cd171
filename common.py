"""
Where am I running, what are my knobs, where do files live, what has happened so far?

Every script imports this file before torch: Ascend's variables only count if they are set before torch loads.

    from common import configure, setup, ...
    config = configure(globals())           # --key=value over the CONFIG block of the calling script
    dev = setup(device_type, dtype, seed)   # one object: device, dtype, rank, world size

    python common.py                        # what was found on this machine and what npuchat would choose
"""
import ast
import base64
import contextlib
import ctypes
import datetime
import difflib
import functools
import hashlib
import importlib.util
import json
import math
import os
import platform
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# --- before torch is imported ----------------------------------------------------------------------------------------
if importlib.util.find_spec("torch_npu") or os.environ.get("ASCEND_HOME_PATH"):
    os.environ.setdefault("TASK_QUEUE_ENABLE", "2")  # two-level launch queue, the documented setting for training
    os.environ.setdefault("HCCL_CONNECT_TIMEOUT", "600")  # seconds; slow starts of many ranks outlast the default 120
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # newer torch_npu reads both and refuses to start when both are set
        os.environ.setdefault("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")


def tune_malloc():
    """Tell glibc to keep freed memory instead of returning it: a CPU training step otherwise spends much of its time in
    page faults on buffers just given back (measured, d4 on two cores: 0.96 s a step, and 0.73 s with this)."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, 64 << 20)


if sys.platform == "linux":
    tune_malloc()
    # OpenMP threads that wait, spin; when anything else wants a core, a training step on two cores then takes ten times
    # as long (measured: 7.4 s instead of 0.7 s; with a short spin 1.8 s, and no slower on an idle machine).
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np  # noqa: E402
import requests  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tqdm import tqdm  # noqa: E402

RANK = int(os.environ.get("RANK", 0))  # set by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# --- talking to the user ---------------------------------------------------------------------------------------------
def print0(*args, **kwargs):
    """print, on rank 0 only."""
    if RANK == 0:
        print(*args, **{"flush": True, **kwargs})


def auto(text):
    """One line for each decision the program took by itself."""
    print0(f"[auto] {text}")


def warn(text):
    print0(f"[warn] {text}")


def fail(text):
    """The user's mistake: one sentence that says what to do, exit status 2, no traceback."""
    print0(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def stopped(kind, value, traceback):
    """Ctrl-C is no accident: one sentence instead of a traceback. Nor is a reader, such as head, that has seen enough."""
    if issubclass(kind, BrokenPipeError):
        os._exit(141)
    if issubclass(kind, KeyboardInterrupt):
        print0("\nstopped; the same command goes on from what was saved last", file=sys.stderr)
        os._exit(130)  # at once: a collective may be waiting for ranks that are gone
    sys.__excepthook__(kind, value, traceback)


sys.excepthook = stopped


def need(module, why):
    """Import an optional dependency, or say how to get it. `module` is the name on PyPI and in Python."""
    try:
        return importlib.import_module(module)
    except ImportError:
        fail(f"{why} needs {module}: pip install {module}")


def progress(iterable=None, total=None, desc="", unit="it", initial=0):
    """A tqdm bar on rank 0 for what takes over two seconds, silent on the other ranks."""
    return tqdm(iterable, total=total, desc=desc, unit=unit, unit_scale=total is not None and total > 10**5, disable=RANK != 0,
                initial=initial, delay=2, leave=False, mininterval=0.5 if sys.stderr.isatty() else 10)


# --- knobs -----------------------------------------------------------------------------------------------------------
KNOB_TYPES = (int, float, bool, str, type(None))


def parse_knob(key, text, default):
    """The text of a command line as a value of the default's type: '1e-3', '2**19', '1_000', 'true', 'none'."""
    power = re.fullmatch(r"\s*(-?\d+)\s*\*\*\s*(\d{1,3})\s*", text)
    number = str(int(power[1]) ** int(power[2])) if power else text.strip()
    if isinstance(default, bool):
        word = text.strip().lower()
        if word in ("true", "1", "yes", "on"):
            return True
        if word in ("false", "0", "no", "off"):
            return False
        fail(f"--{key} is a switch: give true or false, not {text!r}")
    if isinstance(default, int):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(number) if re.search(r"[.eEn]", number) else int(number)
            if value == int(value):
                return int(value)
        fail(f"--{key} is a whole number: {text!r} is not one")
    if isinstance(default, float):
        with contextlib.suppress(ValueError):
            return float(number)
        fail(f"--{key} is a number: {text!r} is not one")
    if default is None:
        if text.lower() == "none":
            return None
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(number)
    return text


def read_config_block(path):
    """The CONFIG block of a script: the lower-case `name = constant` lines between the line that says CONFIG and the next
    empty line or configure(). -> (names, text, docstring of the script)"""
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("# --- CONFIG")) + 1
    last = next(i for i in range(first, len(lines)) if not lines[i].strip() or "configure(" in lines[i])
    block = "\n".join(lines[first:last]).strip()
    names = [node.targets[0].id for node in ast.parse(block).body if isinstance(node, ast.Assign)]
    return names, block, ast.get_docstring(ast.parse(source)) or ""


def configure(g, argv=None):
    """Override the knobs of the calling script from the command line; returns them as a dict for the checkpoint.

    A knob is a `name = value` of type int, float, bool, str or None in the CONFIG block. Accepts --key=value,
    --key value, --switch, and @file with lines `key = value` (parsed, never executed)."""
    names, block, doc = read_config_block(g["__file__"])
    knobs = {n: g[n] for n in names if not n.startswith("_") and isinstance(g.get(n, ...), KNOB_TYPES)}
    args, given = list(sys.argv[1:] if argv is None else argv), []
    if any(a in ("--help", "-h") for a in args):
        print0(f"{doc}\n\nKnobs (--name=value), with their defaults:\n\n{block}")
        sys.exit(0)
    while args:
        arg = args.pop(0)
        if arg.startswith("@"):
            if not Path(arg[1:]).is_file():
                fail(f"there is no knob file {arg[1:]}")
            pairs = [line.split("#")[0].strip() for line in Path(arg[1:]).read_text(encoding="utf-8").splitlines()]
            args = ["--" + "=".join(s.strip() for s in p.split("=", 1)) for p in pairs if p] + args
            continue
        if not arg.startswith("-") or arg.strip("-") == "":
            fail(f"what is {arg!r}? Knobs are given as --name=value; --help lists them")
        key, eq, value = arg.lstrip("-").partition("=")
        key = key.replace("-", "_")
        if key == "run_name" and "run" in knobs:
            key = "run"  # under Python < 3.12, torchrun takes --run for an abbreviation of its own --run-path
        if arg == f"-{key}" and len(key) == 1:  # -p as a short form of the one knob that begins so
            key = next((k for k in knobs if k.startswith(key)), key)
        if key not in knobs:
            near = difflib.get_close_matches(key, knobs, 3, 0.5)
            fail(f"there is no knob --{key}" + (f"; did you mean --{', --'.join(near)}?" if near else "; --help lists them"))
        if not eq:
            switch = isinstance(knobs[key], bool)
            if args and (args[0].lower() in ("true", "false", "0", "1") if switch else not args[0].startswith("--")):
                value = args.pop(0)
            elif switch:
                value = "true"
            else:
                fail(f"--{key} needs a value, as in --{key}={knobs[key]}")
        g[key] = parse_knob(key, value, knobs[key])
        if isinstance(g[key], (int, float)) and not g[key] >= 0:  # nan is refused too
            fail(f"--{key}={value} must not be negative; 0 is how a knob is left to the program or switched off")
        given.append(key)
    if given:
        print0("[knobs] " + " ".join(f"{k}={g[k]}" for k in dict.fromkeys(given)))
    return {k: g[k] for k in knobs}


# --- device and ranks ------------------------------------------------------------------------------------------------
# Peak dense matmul TFLOP/s (bf16, or fp16 where there is no bf16) by a piece of the device's name. Sources: vendor data
# sheets; Ascend as reported by users of public nanochat ports. First match wins.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "H800": 989, "B200": 2250, "A100": 312, "A800": 312, "L40S": 362, "L40": 181, "L4": 121,
               "4090": 165, "3090": 71, "V100": 125, "T4": 65, "Ascend910B3": 313, "Ascend910B": 376, "Ascend910_93": 376,
               "Ascend910": 256, "Ascend310P": 70}


@dataclass
class Device:
    """Where this process computes. Everything that differs between NPU, CUDA, MPS and CPU is asked of this object."""
    device: torch.device
    type: str  # "npu", "cuda", "mps" or "cpu"
    name: str
    dtype: torch.dtype  # of the matmuls; weights and optimizer state are fp32
    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def first_choice(self):
        """(tokens of context, tokens per optimizer step) where nobody chose; 0 = by the horizon. A slow device wants short
        rows and many small steps, or its user waits minutes for the first sign of life."""
        return {"cpu": (512, 2**12), "mps": (512, 2**14)}.get(self.type, (2048, 0))

    def autocast(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.type, dtype=self.dtype)

    def sum(self, value):
        """Sum over ranks of a number or a tensor (in place). SUM only: HCCL and gloo do not average reliably."""
        if torch.is_tensor(value):
            if self.world_size > 1:
                dist.all_reduce(value)
            return value
        kind = torch.int64 if isinstance(value, int) else torch.float32  # no fp64 on an NPU
        return self.sum(torch.tensor(value, dtype=kind, device=self.device)).item()

    def barrier(self):
        if self.world_size > 1:
            self.sum(0)  # an all_reduce that is waited for: unlike barrier(), alike on every backend

    @contextlib.contextmanager
    def first_per_node(self):
        """Inside, the first rank of each node goes ahead of its fellows: for downloads and caches."""
        if self.local_rank != 0:
            self.barrier()
        yield
        if self.local_rank == 0:
            self.barrier()

    @property
    def hardware(self):
        return f"{self.world_size} x {self.name} ({self.type})"

    def synchronize(self):
        if self.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def peak_memory_gb(self):
        """Peak memory held since the start, GiB: the allocator's on a device, the process's on CPU."""
        module = None if self.type == "cpu" else torch.get_device_module(self.device)
        if hasattr(module, "max_memory_allocated"):
            return module.max_memory_allocated() / 2**30
        if sys.platform == "win32":
            return 0.0
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**30 if sys.platform == "darwin" else 2**20)

    def peak_flops(self):
        """Peak FLOP/s of one device at its compute dtype, None if unknown. For the CPU: measured once, now."""
        if self.type == "cpu":
            return matmul_flops(self.dtype, seconds=0.5)
        found = next((t for n, t in PEAK_TFLOPS.items() if n.lower() in self.name.lower()), None)
        return found * 1e12 if found and self.dtype != torch.float32 else None


def matmul_flops(dtype, n=1024, seconds=0.2):
    """Measured FLOP/s of an (n, n) matmul on the CPU: the best of several, since others may be using the machine."""
    a, best, end = torch.randn(n, n).to(dtype), 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        t0 = time.perf_counter()
        a @ a
        best = max(best, 2 * n**3 / (time.perf_counter() - t0))
    return best


def find_devices():
    """The kinds of device torch can use here, best first, and how many of each."""
    found = {}
    if hasattr(torch, "npu") and torch.npu.is_available():
        found["npu"] = torch.npu.device_count()
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        found["mps"] = 1
    found["cpu"] = 1
    return found


def choose_dtype(kind, name, wanted):
    """-> (dtype, why). bf16 only where the hardware computes it: emulated bf16 is slower than fp32."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if wanted in dtypes:
        return dtypes[wanted], "as asked"
    if wanted != "auto":
        fail(f"--dtype={wanted} is not one of auto, {', '.join(dtypes)}")
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        has = major >= 8  # is_bf16_supported() says yes to emulation too
        return (torch.bfloat16, f"sm_{major}{minor}") if has else (torch.float32, f"sm_{major}{minor} has no bf16")
    if kind == "npu":
        old = name.startswith(("Ascend310", "Ascend910A", "Ascend910Pro")) or name in ("Ascend910", "Ascend910B")
        return (torch.float32, f"{name} has no bf16") if old else (torch.bfloat16, name)
    if kind == "cpu":
        if not {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_info("flags", "Features").split()):
            return torch.float32, "this CPU has no bf16 instructions"
        speeds = [[matmul_flops(dtype, seconds=0.1) for dtype in (torch.float32, torch.bfloat16)] for _ in range(3)]  # in turn:
        f32, b16 = map(max, zip(*speeds))  # a busy moment hits both
        return (torch.bfloat16 if b16 > 1.3 * f32 else torch.float32), f"bf16 matmul runs at {b16 / f32:.1f} x fp32 here"
    return torch.float32, "the safe choice on mps"


def setup(device_type="auto", dtype="auto", seed=42):
    """Find the device, join the process group under torchrun, seed, print one banner line. -> Device"""
    found = find_devices()
    kind = next(iter(found)) if device_type == "auto" else device_type
    if kind not in ("npu", "cuda", "mps", "cpu"):
        fail(f"--device_type={device_type} is not one of auto, npu, cuda, mps, cpu")
    if kind not in found:
        more = " (torch_npu is not installed)" if kind == "npu" and not importlib.util.find_spec("torch_npu") else ""
        fail(f"--device_type={kind}, but torch sees only {', '.join(found)} here{more}; "
             f"leave the knob out to use {next(iter(found))}")
    local = int(os.environ.get("LOCAL_RANK", 0))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if kind in ("npu", "cuda"):
        if local_world > found[kind]:
            fail(f"torchrun started {local_world} processes, but there are {found[kind]} {kind} devices: "
                 f"use --nproc_per_node={found[kind]}")
        module = torch.get_device_module(kind)
        module.set_device(local)
        device, name = torch.device(kind, local), module.get_device_name(local)
    else:
        device, name = torch.device(kind), cpu_info("model name") or platform.processor() or platform.machine()
        if kind == "cpu" and local_world > 1:  # torchrun sets OMP_NUM_THREADS=1, whatever the machine
            torch.set_num_threads(max(1, len_cores() // local_world))
    if WORLD_SIZE > 1 and not dist.is_initialized():
        backend = {"npu": "hccl", "cuda": "nccl"}.get(kind, "gloo")
        # Ranks wait while one of them downloads. HCCL derives its own time-out and is better left to it.
        more = {} if kind == "npu" else {"timeout": datetime.timedelta(hours=2)}
        dist.init_process_group(backend, **more, **({"device_id": device} if kind == "cuda" else {}))
    if kind == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    dtype, why = choose_dtype(kind, name, dtype)
    if WORLD_SIZE > 1:  # a probe may end differently on two ranks
        box = [dtype]
        dist.broadcast_object_list(box, src=0)
        dtype = box[0]
    torch.manual_seed(seed)
    dev = Device(device, kind, name, dtype, RANK, local, WORLD_SIZE)
    threads = f", {torch.get_num_threads()} threads" if kind == "cpu" else ""
    auto(f"device {kind} ({name}{threads}) x {WORLD_SIZE}, dtype {str(dtype)[6:]} ({why}), torch {torch.__version__}")
    return dev


def cpu_info(*keys):
    """The first line of /proc/cpuinfo with one of these keys; "" where there is no such file or line."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return ""


def len_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cleanup():
    if dist.is_initialized():
        dist.destroy_process_group()


def split_batch(total_batch_size, T, device_batch_size, dev, model):
    """How a step's tokens are divided: -> (rows per device and pass, passes, tokens per step as it comes out).

    device_batch_size 0 chooses: on a CPU what stays in its caches, else as many rows as the model's size allows."""
    rows = max(1, round(total_batch_size / T))  # over all devices
    if not device_batch_size:
        size = model.config.n_layer * model.config.n_embd
        fit = 2048 if dev.type == "cpu" else int(65536 * min(1.0, 12 * 768 / size))  # tokens
        device_batch_size = max(1, min(fit // T, rows // dev.world_size))
    per_pass = device_batch_size * dev.world_size
    passes = -(-rows // per_pass)
    total = passes * per_pass * T
    auto(f"batch {total} tokens = {device_batch_size} rows x {T} x {dev.world_size} devices x {passes} passes"
         + (f" (asked for {total_batch_size}: rounded to whole rows)" if total != total_batch_size else ""))
    return device_batch_size, passes, total


def decided_by_main(function):
    """Decorator: rank 0 alone runs the function and every rank gets its answer, so that all take the same path. A fail()
    in it ends every rank."""
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if not dist.is_initialized():
            return function(*args, **kwargs)
        box = [None]
        if RANK == 0:
            try:
                box = [("answer", function(*args, **kwargs))]
            except SystemExit as e:
                box = [("exit", e.code)]
        dist.broadcast_object_list(box, src=0)
        if box[0][0] == "exit":
            cleanup()
            sys.exit(box[0][1])
        return box[0][1]
    return wrapper


# --- files: checkpoints ----------------------------------------------------------------------------------------------
STAGES = ("base", "mid", "sft", "rl")


def command(script, out_dir):
    """How to run a script on the same files."""
    return f"python {script}" + ("" if str(out_dir) == "out" else f" --out_dir={out_dir}")


def file_sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomic(path, data):
    """Write bytes or text so that a reader sees the whole file or none of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f"{path.name}.tmp{os.getpid()}")
    tmp.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
    os.replace(tmp, path)


def put_aside(path):
    """Rename what is at `path` to the first free path.old<N>, so that nothing is written over. -> the new path"""
    aside = next(p for n in range(1, 10**6) if not (p := Path(path).with_name(f"{Path(path).name}.old{n}")).exists())
    os.replace(path, aside)
    return aside


def seal(meta):
    """The checksum of meta.json's own content, kept inside it."""
    rest = {k: v for k, v in meta.items() if k != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def save_checkpoint(run_dir, step, model_state, optim_state, meta, keep=2):
    """Write run_dir/step_<N>/{model.pt,optim.pt,meta.json} whole or not at all; keep the newest `keep`. Rank 0 only."""
    final = Path(run_dir) / f"step_{step:06d}"
    tmp = final.with_name(f"{final.name}.tmp{os.getpid()}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    torch.save({name: t.cpu() for name, t in model_state.items()}, tmp / "model.pt")  # loads where that device is unknown
    torch.save(optim_state, tmp / "optim.pt")
    rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    meta = {**meta, "step": step, "rng": rng, "saved_at": time.time(), "torch": torch.__version__,
            "files": {n: file_sha256(tmp / n) for n in ("model.pt", "optim.pt")}}
    (tmp / "meta.json").write_text(json.dumps({**meta, "seal": seal(meta)}, indent=1), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(tmp, final)
    others = [p for p in step_folders(run_dir) if p != final]
    older = [p for p in others if step_of(p) < step and isinstance(read_checkpoint(p), dict)]
    for path in [p for p in others if p not in older[-(keep - 1) :]] + list(Path(run_dir).glob("step_*.tmp*")):
        shutil.rmtree(path)  # older ones, damaged ones, and what a killed process left half written


def step_of(path):
    return int(path.name.split("_")[1])


def step_folders(run_dir):
    """The checkpoints of one run, oldest step first."""
    return sorted((p for p in Path(run_dir).glob("step_*") if re.fullmatch(r"step_\d+", p.name)), key=step_of)


def read_checkpoint(path):
    """-> meta with "path" added, or a sentence (str) that says what is wrong with the checkpoint."""
    try:
        meta = json.loads((Path(path) / "meta.json").read_text(encoding="utf-8"))
        if meta["seal"] != seal(meta):
            return "meta.json was altered"
        for name, digest in meta["files"].items():
            if file_sha256(Path(path) / name) != digest:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"it cannot be read ({type(e).__name__}: {e})"
    return {**meta, "path": str(path)}


def newest_checkpoint(run_dir):
    """The newest sound checkpoint of one run as its meta, or None. Damaged ones are named and skipped."""
    for path in reversed(step_folders(run_dir)):
        meta = read_checkpoint(path)
        if isinstance(meta, dict):
            return meta
        warn(f"checkpoint {path} is skipped: {meta}")
    return None


def run_folders(out_dir, stage):
    """The runs of a stage, without those put aside."""
    return sorted(p for p in (Path(out_dir) / stage).glob("*") if p.is_dir() and ".old" not in p.name)


@decided_by_main
def find_checkpoint(out_dir, source):
    """The newest checkpoint of a stage, of 'stage/tag', or at a path. -> meta, or ends with what to do."""
    path = Path(source)
    if (path / "meta.json").is_file():
        meta = read_checkpoint(path)
        if isinstance(meta, str):
            fail(f"checkpoint {path} cannot be used: {meta}")
        return meta
    stage = source.split("/")[0]
    if stage not in STAGES:
        fail(f"{source!r} is neither a stage ({', '.join(STAGES)}) nor a checkpoint folder")
    metas = [m for m in map(newest_checkpoint, [Path(out_dir) / source] if "/" in source else run_folders(out_dir, stage)) if m]
    if not metas:
        fail(f"there is no {stage} checkpoint in {Path(out_dir) / source}; make one with: {command(f'train_{stage}.py', out_dir)}")
    return max(metas, key=lambda m: m["saved_at"])


def load_weights(meta, name):
    """model.pt or optim.pt of a checkpoint, on the CPU."""
    return torch.load(Path(meta["path"]) / name, map_location="cpu", weights_only=True)


# Knobs that may differ when a run is taken up again: where and how it computes, not what.
FREE_KNOBS = {"device_type", "dtype", "device_batch_size", "out_dir", "eval_every", "sample_every", "save_every", "resume",
              "run", "bench", "eval_tokens", "eval_problems"}


@decided_by_main
def find_resume(run_dir, config, resume, parent=""):
    """What to do about an earlier run in run_dir: its newest checkpoint's meta to continue from, or None to start.

    config: this run's knobs; parent: the identity of the checkpoint this run starts from."""
    run_dir = Path(run_dir)
    meta = newest_checkpoint(run_dir) if run_dir.is_dir() else None
    reason = "" if resume else "--resume=0"
    if meta and resume:
        changed = [f"{k} {meta['config'].get(k)!r} -> {v!r}" for k, v in config.items()
                   if k not in FREE_KNOBS and k in meta["config"] and meta["config"][k] != v]
        if changed:
            fail(f"{run_dir} holds a run with other knobs ({', '.join(changed)}): name this one with --run_name=NAME, "
                 "or give --resume=0 to start over (the old run is kept)")
        if meta.get("parent", "") != parent:
            reason = "the checkpoint it started from has changed"
    if meta and not reason:
        return meta
    if run_dir.is_dir() and step_folders(run_dir):  # sound or damaged: nothing is written over it
        auto(f"{reason or 'no sound checkpoint in it'}: starting {run_dir} over, the old run is kept in {put_aside(run_dir)}")
    return None


def begin(started, run_dir, num_steps):
    """-> (step, metrics) to begin with. A run that is already finished ends here, with a line that says so."""
    if not started:
        return 0, {"tokens": 0, "seconds": 0.0}
    if started["step"] >= num_steps:
        auto(f"{run_dir} is finished (step {started['step']}); --resume=0 trains it again")
        cleanup()
        sys.exit(0)
    auto(f"continuing {run_dir} from step {started['step']} of {num_steps}")
    return started["step"], started["metrics"]


# --- files: log ------------------------------------------------------------------------------------------------------
class Log:
    """run_dir/log.jsonl and the terminal. Rank 0 writes, the others stay silent."""

    def __init__(self, run_dir, stage, total_steps, seconds=0.0, from_step=0):
        self.path, self.stage, self.total = Path(run_dir) / "log.jsonl", stage, total_steps
        self.start = time.time() - seconds  # a resumed run goes on counting
        self.last, self.waiting = {}, {}
        if RANK == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = read_log(self.path) if self.path.exists() else []
            kept = [r for r in kept if r.get("step", 0) <= from_step] if from_step else []
            write_atomic(self.path, "".join(json.dumps(r) + "\n" for r in kept))

    @property
    def seconds(self):
        return time.time() - self.start

    def write(self, step, **values):
        """One step into log.jsonl, with what was measured before the first one; None and nan are left out."""
        row = {"step": step, **values, **self.waiting}
        self.last, self.waiting = {k: values.get(k) for k in ("loss", "tok_per_s")}, {}
        if RANK == 0:
            row = {k: v for k, v in row.items() if v is not None and not (isinstance(v, float) and not math.isfinite(v))}
            row = {**row, "seconds": round(self.seconds, 3)}
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")

    def measure(self, step, **values):
        """A measurement after a step: a line of its own, which repeats that step's loss and speed so that every line has
        them; before the first step it waits for that step's line."""
        if self.last:
            self.write(step, **{**self.last, **values})
        else:
            self.waiting = values

    def line(self, step, fields):
        """The same as one line of fixed width: `base 00120/05000 | loss 3.2145 | ...`."""
        print0(f"{self.stage:<4} {step:05d}/{self.total:05d} | " + " | ".join(fields))


def read_log(path):
    """The rows of a log.jsonl; a torn last line is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def human(n):
    """1234567 -> '1.23M'"""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def duration(seconds):
    """4000 -> '1h07m'"""
    s = int(seconds)
    return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


# --- files: downloads from a Hugging Face hub or a mirror of it ----------------------------------------------------------
def hub_endpoints():
    """Where to look, in order: the user's HF_ENDPOINT alone when set (it may hold several, by commas), else the two known."""
    own = os.environ.get("HF_ENDPOINT", "")
    return [e.strip().rstrip("/") for e in own.split(",") if e.strip()] or ["https://hf-mirror.com", "https://huggingface.co"]


def hub_request(path, tries=4, **kwargs):
    """GET from the first endpoint that answers, with backoff. -> Response, or a sentence (str) that says what happened."""
    last = "no endpoint"
    for attempt in range(tries):
        for endpoint in hub_endpoints():
            try:
                r = requests.get(endpoint + path, timeout=(10, 60), **kwargs)
            except requests.RequestException as e:
                last = f"{endpoint}: {type(e).__name__}"
                continue
            if r.status_code < 400 and not r.headers.get("Content-Type", "").startswith("text/html"):
                return r
            last = f"{endpoint}: HTTP {r.status_code}" + (", a web page" if r.status_code < 400 else "")  # a login page, say
            if r.status_code in (401, 403, 404):
                return last
        time.sleep(min(8, 0.5 * 2**attempt) * (0.5 + random.random()))
    return last


def hub_files(repo, home):
    """The files of a hub dataset: {path: {"size": bytes, "sha256": hex or None}}."""
    listing = Path(home) / "data" / repo / "files.json"  # kept, so that what was downloaded can be used without a network
    path, files = f"/api/datasets/{repo}/tree/main?recursive=true", {}
    while path:
        r = hub_request(path, tries=1 if listing.exists() else 4)
        if isinstance(r, str) and listing.exists():
            warn(f"hub dataset {repo} cannot be listed ({r}): using what was downloaded before")
            return json.loads(listing.read_text(encoding="utf-8"))
        if isinstance(r, str):
            fail(f"hub dataset {repo} cannot be listed ({r}); check the name and HF_ENDPOINT, or give a local folder")
        for f in r.json():
            if f["type"] == "file":
                files[f["path"]] = {"size": f["size"], "sha256": f.get("lfs", {}).get("oid")}
        following = r.links.get("next", {}).get("url", "")  # long listings come in pages
        path = following[following.index("/api/") :] if "/api/" in following else None
    write_atomic(listing, json.dumps(files))
    return files


def hub_fetch(repo, path, out_dir, facts):
    """Download one file of a hub dataset into out_dir/data under the hub's own name, unless it is there. -> Path

    Resumes a half download by Range, checks size and SHA-256, renames when whole. No two processes may fetch the same
    file at once."""
    final = Path(out_dir) / "data" / repo / path
    if final.exists() and final.stat().st_size == facts["size"]:
        return final
    part = final.with_name(final.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    why = "nothing was tried"
    for attempt in range(8):
        have = part.stat().st_size if part.exists() else 0
        if have < facts["size"]:
            headers = {"Range": f"bytes={have}-"} if have else {}
            r = hub_request(f"/datasets/{repo}/resolve/main/{path}", stream=True, headers=headers)
            if isinstance(r, str):
                fail(f"{repo}/{path} cannot be downloaded ({r}); run again to go on from {have} bytes")
            try:
                bar = progress(total=facts["size"], desc=path, unit="B")
                with open(part, "ab" if r.status_code == 206 else "wb") as f:  # 200: the server ignored Range
                    bar.update(f.tell())
                    for block in r.iter_content(1 << 20):
                        f.write(block)
                        bar.update(len(block))
            except requests.RequestException as e:
                why = type(e).__name__
            have = part.stat().st_size
        if have == facts["size"]:
            if not facts["sha256"] or file_sha256(part) == facts["sha256"]:
                os.replace(part, final)
                return final
            why = "wrong checksum"
        if have >= facts["size"]:
            part.unlink()  # damaged: begin again
        time.sleep(min(4, 0.2 * 2**attempt))
    fail(f"{repo}/{path} did not arrive whole in 8 tries (last: {why}); run again to go on")


if __name__ == "__main__":
    _dev = setup()
    print0(f"npuchat on Python {platform.python_version()}, {platform.system()} {platform.machine()}, numpy {np.__version__}")
    print0(f"devices: {find_devices()}")
    print0(f"time: {datetime.datetime.now():%Y-%m-%d %H:%M}")
    print0("this machine is ready: bash speedrun.sh")

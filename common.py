"""
Where am I running, what are my knobs, where do files live, what has happened so far?

Every script imports this file before torch: Ascend's variables only count if they are set before torch loads.

    from common import configure, setup, ...
    config = configure(globals())           # --key=value over the CONFIG block of the calling script
    dev = setup(device_type, dtype, seed)   # one object: device, dtype, rank, world size

    python common.py                        # what was found on this machine and what npuchat would choose
"""
import ast
import atexit
import base64
import contextlib
import ctypes
import datetime
import difflib
import functools
import gc
import hashlib
import importlib.util
import json
import math
import os
import platform
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback as tracebacks
from dataclasses import dataclass
from pathlib import Path

# --- before torch is imported ----------------------------------------------------------------------------------------
ASCEND = bool(importlib.util.find_spec("torch_npu") or os.environ.get("ASCEND_HOME_PATH"))
DEBUGGING = {"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "0", "ASCEND_GLOBAL_LOG_LEVEL": "1"}  # true stacks, and slow
DEBUG_NPU = re.search(r"\s--?debug[-_]npu(?![=\s]+(0|false|no|off)\b)", " ".join(["", *sys.argv[1:]]), re.I) is not None


def ascend_card(devices="/sys/bus/pci/devices"):
    """'910A', '910B', '910C' or '310P' by the accelerators' PCI ids, which is all there is before torch; "" = cannot be told."""
    known = {"0xd801": "910A", "0xd802": "910B", "0xd803": "910C", "0xd500": "310P"}
    for vendor in Path(devices).glob("*/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() == "0x19e5" and (card := known.get(vendor.with_name("device").read_text().strip())):
                return card
    return ""


def ascend_environment(card, debug=False, env=os.environ, script=sys.argv[0]):
    """The variables that production wants on this card, or the debugging ones. What the user has set stays. The README says for
    each variable of common lore why it is here or not. -> those set now, as a dict"""
    if debug:
        wanted = dict(DEBUGGING)
    else:
        wanted = {"HCCL_CONNECT_TIMEOUT": "600"}  # seconds; slow starts of many ranks outlast the default 120
        if card in ("910B", "910C", ""):
            wanted["TASK_QUEUE_ENABLE"] = "2"  # two-level launch queue, documented for training on these
            wanted["CPU_AFFINITY_CONF"] = "1"  # each process to the cores near its card
            if "PYTORCH_ALLOC_CONF" not in env:  # newer torch_npu reads both and refuses to start when both are set
                wanted["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
    if int(env.get("WORLD_SIZE", 1)) > 1 and env.get("MASTER_PORT", "").isdigit():
        # Two jobs on one host collide on HCCL's default ports, and so do two stages in a row while the old sockets linger.
        stages, stem = ("train_base", "train_mid", "train_sft", "train_rl", "eval"), Path(script).stem
        stage = stages.index(stem) if stem in stages else len(stages)
        first = 20000 + (int(env["MASTER_PORT"]) * 7 + stage) % 599 * 20  # 20000 to 31979: below what the kernel hands out
        if card in ("910A", "310P"):
            wanted["HCCL_IF_BASE_PORT"] = str(first)
        else:
            wanted["HCCL_HOST_SOCKET_PORT_RANGE"] = wanted["HCCL_NPU_SOCKET_PORT_RANGE"] = f"{first}-{first + 19}"
    fresh = {name: value for name, value in wanted.items() if name not in env}
    env.update(fresh)
    return fresh


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

ASCEND_SET = ascend_environment(ascend_card(), DEBUG_NPU) if ASCEND else {}
# torch loads torch_npu by itself, and cannot be imported at all where torch_npu is there and CANN is not. So: by hand.
AUTOLOAD = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
if ASCEND:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import requests  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tqdm import tqdm  # noqa: E402

NPU_ERROR = ""  # why torch_npu, which is installed, cannot be used
if ASCEND:
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD")
    if AUTOLOAD is not None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = AUTOLOAD
    if importlib.util.find_spec("torch_npu") and AUTOLOAD != "0":
        try:
            import torch_npu  # noqa: F401
        except (ImportError, RuntimeError, OSError) as e:
            NPU_ERROR = f"{type(e).__name__}: {e}"

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
    if RANK:  # rank 0 says what all of them met; what only this rank met, it says itself, if it is still there a moment later
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(2)
    print(f"error{f' (rank {RANK})' if RANK else ''}: {text}", file=sys.stderr, flush=True)
    exit_status[0] = 2
    sys.exit(2)


def say(text):
    """To the real stderr: torch replaces sys.stderr while it looks at an exception, and drops what was written."""
    sys.__stderr__.write(text + "\n")
    sys.__stderr__.flush()


exit_status = [0]


def leave_now():
    """At exit with a process group that was not left: at once, or gloo's threads abort the process."""
    if dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status[0])


def stopped(kind, value, traceback):
    """Ctrl-C is no accident: one sentence instead of a traceback. Nor is a reader, such as head, that has seen enough, nor a
    rank that lost its fellows: the one that failed has said why."""
    exit_status[0] = 1
    if issubclass(kind, BrokenPipeError):
        os._exit(141)
    if issubclass(kind, KeyboardInterrupt):
        if RANK == 0:
            say("\nstopped; the same command goes on from what was saved last")
        os._exit(130)  # at once: a collective may be waiting for ranks that are gone
    if out_of_memory(value):  # not in a pass, where it is dealt with: while loading, or in the optimizer's step
        *_, (frame, line) = ((f.f_code, n) for f, n in tracebacks.walk_tb(traceback))
        say(f"error: out of memory (rank {RANK}, in {frame.co_name}, {Path(frame.co_filename).name}:{line}): take a smaller "
            "--depth, or more devices, which share the optimizer's state; train_base.py --plan=1 tells beforehand")
        os._exit(2)
    if issubclass(kind, RuntimeError) and WORLD_SIZE > 1 and re.search(
            r"onnection (closed|reset|refused)|Broken pipe|remote process exited|Notify wait timeout", str(value)):
        say(f"error: rank {RANK} lost touch with another rank, whose own message counts. It was told: {value}")
        os._exit(1)
    sys.__excepthook__(kind, value, traceback)


sys.excepthook = stopped


def need(module, why, package=""):
    """Import an optional dependency, or say how to get it. package: its name on PyPI, where that is another."""
    try:
        return importlib.import_module(module)
    except ImportError:
        fail(f"{why} needs {package or module}: pip install {package or module}")


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
        if text.lower() in ("none", "true", "false"):
            return {"none": None, "true": True, "false": False}[text.lower()]
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
# A piece of the device's name: (peak dense TFLOP/s in bf16, or fp16 where there is no bf16; memory, GB; bandwidth, TB/s). First
# match wins. NVIDIA: vendor's data sheets. Ascend: cube cores x 8192 FLOP x clock (CANN's platform files); memory and bandwidth
# as published, where sources disagree (1.2 or 1.6 TB/s on 910B) the higher. An Ascend910_93xx device is one of the 910C's two dies.
CARDS = {"h200": (989, 141, 4.8), "h100": (989, 80, 3.35), "h800": (989, 80, 3.35), "b200": (2250, 180, 7.7),
         "a100": (312, 80, 2.0), "a800": (312, 80, 2.0), "l40s": (362, 48, 0.86), "l40": (181, 48, 0.86), "l4": (121, 24, 0.3),
         "4090": (165, 24, 1.0), "3090": (71, 24, 0.94), "v100": (125, 32, 0.9), "t4": (65, 16, 0.32),
         "910b1": (364, 64, 1.6), "910b2": (354, 64, 1.6), "910b3": (295, 64, 1.6), "910b4": (270, 32, 0.8), "910b": (354, 64, 1.6),
         "910_93": (376, 64, 1.6), "910c": (376, 64, 1.6), "910": (256, 32, None), "310p": (70, 24, 0.2)}
FIRST_910 = ("Ascend910", "Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA")  # sic: plain 910B too


def card_facts(name):
    """(TFLOP/s, GB, TB/s) of a card by its name as the device or a person gives it; Nones where it is not known."""
    name = "910" if name in FIRST_910 else name.lower()
    return next((facts for piece, facts in CARDS.items() if re.search(rf"(?<![a-z0-9]){piece}(?![0-9])|ascend{piece}", name)),
                (None, None, None))


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
    memory: int = 0  # bytes; only of a device that is planned for, not there
    parts: dict | None = None  # of a step, in seconds, while they are measured
    doing: tuple = ("", 0.0)  # which of them, since when

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def first_choice(self):
        """(tokens of context, tokens per optimizer step) where nobody chose; 0 = by the horizon. A slow device wants short
        rows and many small steps, or its user waits minutes for the first sign of life."""
        return {"cpu": (512, 2**12), "mps": (512, 2**14)}.get(self.type, (2048, 0))

    def autocast(self):
        """Entered before every forward pass, and so also the sign of life that the watchdog looks for."""
        Watchdog.beat()
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.type, dtype=self.dtype)

    def sum(self, value):
        """Sum over ranks: of a tensor on the device in place, of a number or a list of numbers through the host, which no device
        need wait for. SUM only: HCCL and gloo do not average reliably."""
        if not torch.is_tensor(value):
            if self.world_size == 1:
                return value
            total = self.sum(torch.tensor(value, dtype=torch.float64)).tolist()  # one dtype on all ranks; whole to 2**53
            return int(total) if isinstance(value, int) else total
        if self.world_size > 1:
            with Watchdog.waiting():
                dist.all_reduce(value)
        return value

    def gather(self, items):
        """The lists of all ranks, of whatever can be pickled, one after another, on every rank."""
        if self.world_size == 1:
            return items
        lists = [None] * self.world_size
        with Watchdog.waiting():
            dist.all_gather_object(lists, items)
        return [item for part in lists for item in part]

    def barrier(self):
        self.sum(0)

    def part(self, name):
        """While `parts` are measured: from here on the time counts as `name`, and the device is waited for. -> the part before"""
        if self.parts is not None:
            self.synchronize()
            before, since = self.doing
            self.doing = (name, time.perf_counter())
            self.parts[before] = self.parts.get(before, 0.0) + self.doing[1] - since
            return before

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

    @property
    def module(self):
        """torch.npu, torch.cuda or torch.mps; None on the CPU."""
        return None if self.type == "cpu" else torch.get_device_module(self.device)

    def synchronize(self):
        if self.module:
            self.module.synchronize()

    def empty_cache(self):
        if self.module:
            self.module.empty_cache()

    def pinned(self, tensor):
        """A tensor on the host, ready to be copied to the device without anybody waiting."""
        if self.type not in ("npu", "cuda"):
            return tensor
        self.module.set_device(self.device)  # which is each thread's own
        return tensor.pin_memory()

    def profiler(self, folder):
        """A profiler with start() and stop(); what it saw is then in `folder`, for chrome://tracing or Perfetto."""
        if self.type == "npu":
            return torch_npu.profiler.profile(on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(str(folder)))
        Path(folder).mkdir(parents=True, exist_ok=True)
        return torch.profiler.profile(
            on_trace_ready=lambda p: p.export_chrome_trace(str(Path(folder) / f"rank{self.rank}.json")))

    @property
    def fused_attention(self):
        """Whether scaled_dot_product_attention has a kernel here that never holds all (T, T) scores."""
        return not (self.type == "mps" or (self.type == "npu" and no_bf16(self.name)))

    @property
    def fused_adamw(self):
        """Whether torch has AdamW as one operator here that is known to be right and fast."""
        return self.type in ("cpu", "cuda")

    def overflowed(self):
        """Whether a number left fp16's range since the last call: 910A and 310P saturate, so that no inf gives it away."""
        if self.type != "npu" or self.dtype != torch.float16 or not no_bf16(self.name):
            return False
        flag = bool(self.module.get_npu_overflow_flag())
        self.module.clear_npu_overflow_flag()
        return flag

    def peak_memory_gb(self):
        """Peak memory held since the start, GiB: the allocator's on a device, the process's on CPU."""
        if hasattr(self.module, "max_memory_allocated"):
            return self.module.max_memory_allocated() / 2**30
        if sys.platform == "win32":
            return 0.0
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**30 if sys.platform == "darwin" else 2**20)

    def free_memory(self):
        """Bytes that can still be had on this device, by this rank alone. On the CPU the ranks of a node share it."""
        if self.memory:
            return self.memory
        if hasattr(self.module, "mem_get_info"):
            cached = self.module.memory_reserved() - self.module.memory_allocated()
            return self.module.mem_get_info()[0] + cached
        if self.type == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return host_memory()[0] // int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def peak_flops(self):
        """Peak FLOP/s of one device at its compute dtype, None if unknown. For the CPU: measured once, now."""
        if self.type == "cpu":
            return matmul_flops(torch.device("cpu"), self.dtype, seconds=0.5)
        tflops = card_facts(self.name)[0]
        return tflops * 1e12 if tflops and self.dtype != torch.float32 else None


def host_memory():
    """(available, total) bytes of main memory for this process: of the machine, or of its cgroup where that is less."""
    free = total = 2**62
    with contextlib.suppress(OSError, ValueError):
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(facts[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in (limit, used))
            free, total = min(free, limit - used), min(total, limit)
    return (free, total) if total < 2**62 else (4 * 2**30, 8 * 2**30)  # macOS, Windows: a careful guess


def matmul_flops(device, dtype, n=0, seconds=0.2):
    """Measured FLOP/s of an (n, n) matmul: the best of several, since others may be using the machine. n 0: large enough."""
    n = n or (1024 if device.type == "cpu" else 4096)
    a, best, end = torch.randn(n, n, device=device).to(dtype), 0.0, time.perf_counter() + seconds
    sync = (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
    repeats = 1
    while best == 0 or time.perf_counter() < end:
        sync()
        t0 = time.perf_counter()
        for _ in range(repeats):
            a @ a
        sync()
        took = time.perf_counter() - t0
        best = max(best, repeats * 2 * n**3 / took)
        if took < 0.005 and device.type != "cpu":
            repeats *= 4  # launched together, so that the launch is not what is measured
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


def device_facts(kind, i):
    """-> (torch.device, name, bytes free, bytes in all) of one device; of a CPU or MPS the host's."""
    if kind in ("npu", "cuda"):
        module = torch.get_device_module(kind)
        module.set_device(i)
        return torch.device(kind, i), module.get_device_name(i), *module.mem_get_info(i)
    return torch.device(kind), cpu_info("model name") or platform.processor() or platform.machine(), *host_memory()


def device_holders(kind):
    """[(process id, name)] of who holds a device of this kind, as the vendor's tool tells it."""
    tools = {"npu": (["npu-smi", "info"], r"(?m)^\|\s*\d+\s+\d+\s*\|\s*(\d+)\s*\|\s*(\S+)\s*\|\s*\d+\s*\|"),
             "cuda": (["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"], r"(\d+), (.+)")}
    if kind not in tools:
        return []
    command, pattern = tools[kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # no such tool, or a driver that does not answer
        return []
    return [(int(pid), name.strip()) for pid, name in re.findall(pattern, done.stdout)]


def no_bf16(name):
    """Whether an Ascend card is of the generation before bf16. Asked by name: nothing has to be initialised for it."""
    return name in FIRST_910 or name.lower().startswith(("ascend310", "910a", "310"))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(kind, name, wanted):
    """-> (dtype, why). What the hardware really computes: emulated bf16 is slower than fp32, and fp16 needs a loss scale."""
    if wanted in DTYPES:
        return DTYPES[wanted], "as asked"
    if wanted != "auto":
        fail(f"--dtype={wanted} is not one of auto, {', '.join(DTYPES)}")
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability()  # is_bf16_supported() says yes to emulation too
        best = torch.bfloat16 if major >= 8 else torch.float16 if major >= 7 else torch.float32
        return best, f"sm_{major}{minor}" + ("" if major >= 8 else ": no bf16" if major >= 7 else ": neither bf16 nor fast fp16")
    if kind == "npu":
        return (torch.float16, f"{name} has no bf16") if no_bf16(name) else (torch.bfloat16, name)
    if kind == "cpu":
        if not {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_info("flags", "Features").split()):
            return torch.float32, "this CPU has no bf16 instructions"
        cpu = torch.device("cpu")
        speeds = [[matmul_flops(cpu, t, seconds=0.1) for t in (torch.float32, torch.bfloat16)] for _ in range(3)]  # in turn:
        f32, b16 = map(max, zip(*speeds))  # a busy moment hits both
        return (torch.bfloat16 if b16 > 1.3 * f32 else torch.float32), f"bf16 matmul runs at {b16 / f32:.1f} x fp32 here"
    return torch.float32, "the safe choice on mps"


def planned_device(name, ranks, dtype="auto"):
    """A Device to plan a run for: a card that is not there, or with name "" this machine's, without a process group."""
    kind = name or next(iter(find_devices()))
    if kind in find_devices():
        _, name, _, memory = device_facts(kind, 0)
        memory = memory // ranks if kind in ("cpu", "mps") else memory
        dtype, _ = choose_dtype(kind, name, dtype)
    else:
        tflops, gigabytes, _ = card_facts(name)
        if not tflops:
            fail(f"--plan_device={name} is not known here: take one of {', '.join(CARDS)}, or cpu")
        kind = "npu" if re.match(r"(ascend)?(910|310)", name.lower()) else "cuda"
        old = no_bf16(name) if kind == "npu" else re.search(r"v100|t4", name.lower())
        dtype = DTYPES.get(dtype) or (torch.float16 if old else torch.bfloat16)
        memory = int(gigabytes * 1e9 * 0.97)  # the driver keeps some
    return Device(torch.device("meta"), kind, name, dtype, 0, 0, ranks, memory)


def setup(device_type="auto", dtype="auto", seed=42):
    """Find the device, join the process group under torchrun, seed, print one banner line. -> Device"""
    found = find_devices()
    kind = next(iter(found)) if device_type == "auto" else device_type
    if kind not in ("npu", "cuda", "mps", "cpu"):
        fail(f"--device_type={device_type} is not one of auto, npu, cuda, mps, cpu")
    if kind not in found:
        more = f" (torch_npu cannot be used: {NPU_ERROR})" if NPU_ERROR else (
            " (torch_npu is not installed)" if not importlib.util.find_spec("torch_npu") else "")
        fail(f"--device_type={kind}, but torch sees only {', '.join(found)} here{more if kind == 'npu' else ''}; "
             f"leave the knob out to use {next(iter(found))}")
    if NPU_ERROR and device_type == "auto":
        warn(f"torch_npu is installed but cannot be used ({NPU_ERROR}): python common.py says what to do")
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
    if kind == "npu":
        if ASCEND_SET:
            auto("set for Ascend: " + " ".join(f"{k}={v}" for k, v in ASCEND_SET.items()))
        if no_bf16(name):
            module.set_compile_mode(jit_compile=False)  # else each new shape is compiled on these cards
        slow = [f"{k}={v}" for k, v in DEBUGGING.items() if os.environ.get(k) == v]
        if slow and not DEBUG_NPU:
            warn(f"{' '.join(slow)} makes training slow: meant for debugging, unset it")
    if kind == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    if WORLD_SIZE > 1 and not dist.is_initialized():
        # Numbers and decisions go through gloo on the host, tensors through the device's own library. The time-out is long because
        # ranks wait while one of them downloads; what hangs is the watchdog's business.
        backend = {"npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl"}.get(kind, "gloo")
        dist.init_process_group(backend, store=meeting_point(), rank=RANK, world_size=WORLD_SIZE,
                                timeout=datetime.timedelta(hours=2))
        sys.excepthook = stopped  # torch has put its own around it
        atexit.register(leave_now)
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


def meeting_point():
    """A store in which the ranks find each other, and no traces of earlier ones: torchrun's own outlives a restart and still
    holds the addresses of ranks that died. So rank 0 names a fresh part of it, and answers each rank that calls there; who
    has read the name of an old part gets no answer, and reads again."""
    store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(minutes=30)))
    mine = secrets.token_hex(8)
    if RANK == 0:
        part = mine
        store.set("npuchat", part)
        for rank in range(1, WORLD_SIZE):
            store.set(f"{part}/answer{rank}", store.get(f"{part}/call{rank}"))  # get() waits for it
    answer = None
    while RANK and answer != mine:
        part = store.get("npuchat").decode()
        store.set(f"{part}/call{RANK}", mine)
        with contextlib.suppress(RuntimeError):  # no answer in time
            store.wait([f"{part}/answer{RANK}"], datetime.timedelta(seconds=2))
            answer = store.get(f"{part}/answer{RANK}").decode()
        time.sleep(0.05)
    return dist.PrefixStore(part, store)


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


def cleanup(status=0):
    """At the end of a script: leave the process group, all ranks together. status: what the script will exit with."""
    Watchdog.start(0)
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))
        exit_status[0] = status
        if dist.get_backend() != "gloo":  # gloo of torch 2.7 may wait here for ever; leave_now() ends it
            dist.destroy_process_group()


def choose_compile(model, wanted, dev, seconds=0.0):
    """Train through torch.compile where that helps and works. wanted: auto, true, false; seconds: about how long training takes."""
    word = str(wanted).lower()
    if word not in ("auto", "true", "false", "1", "0"):
        fail(f"--compile={wanted} is not one of auto, true, false")
    use = word in ("true", "1")
    if word == "auto":  # on NPUs it needs triton-ascend and is young
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        use = {"cuda": importlib.util.find_spec("triton") is not None,
               "cpu": bool(compiler) and seconds > 300}.get(dev.type, False)  # it takes half a minute there
        if use:
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is, with a warning
    if use:
        auto("torch.compile is on: the first step takes long; --compile=false turns it off")
        model.use_compile()


# --- what can go wrong while training ----------------------------------------------------------------------------------
class Watchdog:
    """A thread that looks whether this rank still gives signs of life, and ends it with its stack when it does not, so that
    torchrun can start the ranks again. A rank that only waits for others gives them twice the time to report themselves."""
    seconds, last, waits, thread = 0.0, 0.0, 0, None  # waits: how many waiting() stand open

    @classmethod
    def start(cls, minutes):
        cls.seconds = 60 * minutes
        cls.beat()
        if cls.seconds and not cls.thread:
            cls.thread = threading.Thread(target=cls.watch, args=(threading.main_thread().ident,), daemon=True)
            cls.thread.start()

    @classmethod
    def beat(cls):
        cls.last = time.monotonic()

    @classmethod
    @contextlib.contextmanager
    def waiting(cls):
        """Inside, this rank waits for the others."""
        cls.beat()
        cls.waits += 1
        try:
            yield
        finally:
            cls.waits -= 1
            cls.beat()

    @classmethod
    def watch(cls, main):
        while True:
            time.sleep(min(5.0, max(0.05, cls.seconds / 20)))
            silent = time.monotonic() - cls.last
            if cls.seconds and silent > cls.seconds * (2 if cls.waits else 1):
                doing = "has waited for the other ranks" if cls.waits else "hangs: no sign of life"
                stack = "".join(tracebacks.format_stack(sys._current_frames()[main]))
                sys.stderr.write(f"error: rank {RANK} of {WORLD_SIZE} (process {os.getpid()} on {platform.node()}) {doing} for "
                                 f"{silent / 60:.1f} minutes (--timeout_min); it is here:\n{stack}")
                sys.stderr.flush()
                os._exit(3)


def out_of_memory(error):
    """Whether an exception says so. Older torch_npu and MPS raise a plain RuntimeError, as does the CPU's allocator."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in text or "can't allocate memory" in text


def in_batches(items, size, work, dev):
    """Yield (batch, work(batch)) for batches of at most `size` items; where memory runs out, half as many are tried again. For
    work that does not depend on the batch and in which ranks do not meet. What fits is remembered."""
    at, size = 0, min(size, in_batches.fits.get(work.__qualname__, size))
    while at < len(items):
        batch, result, short = items[at : at + size], None, False
        try:
            result = work(batch)
        except (RuntimeError, MemoryError) as e:
            short = out_of_memory(e) and size > 1
            if not short:
                raise
        if short:  # here the exception is gone, and with it the tensors its traceback held
            gc.collect()
            size = in_batches.fits[work.__qualname__] = max(1, min(size, len(batch)) // 2)
            dev.empty_cache()
            print(f"[auto] out of memory (rank {RANK}): going on with {size} at a time", flush=True)
            continue
        at += len(batch)
        yield batch, result


in_batches.fits = {}  # name of the work -> size


class Steps:
    """Does the steps of a training loop so that an accident does not end it: memory that runs out, a gradient that is not
    finite, a signal to stop, a rank that hangs.

    rows: rows per device and pass. It changes how a step is computed, never what: the step's rows stay the same.
    timeout_min: minutes without a sign of life after which a rank says where it hangs and ends; 0 = never."""

    def __init__(self, rows, model, dev, timeout_min):
        self.rows, self.model, self.dev = rows, model, dev
        Watchdog.start(timeout_min)
        self.bad, self.told, self.stopping = 0, 0.0, False  # told: when this rank was; stopping: all ranks know
        self.done = 0  # how many times run() was called
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.tell)

    def tell(self, number, frame):
        if self.told and time.monotonic() - self.told > 5:  # a queue and torchrun may both send it; who repeats it later means it
            os._exit(143)
        self.told = self.told or time.monotonic()

    def run(self, work):
        """-> work(rows). Where memory ran out on any rank, all of them do the step again with half the rows per pass, and at
        one row with activation checkpointing."""
        if self.done == 1:  # what is there now stays: Python need not look through it again and again for garbage
            gc.collect()
            gc.freeze()
            gc.disable()
        elif self.done % 500 == 499:
            gc.collect()
        self.done += 1
        while True:
            result, short = None, 0
            try:
                result = work(self.rows)
            except (RuntimeError, MemoryError) as e:
                if not out_of_memory(e):
                    raise
                short = 1
            # Here the exception is gone, and with it the tensors its traceback held.
            short, told = self.dev.sum([short, int(self.told > 0)])  # all ranks take the same path
            self.stopping = told > 0
            if not short:
                return result
            self.shrink()

    def shrink(self):
        gc.collect()
        self.dev.empty_cache()
        if self.rows > 1:
            self.rows //= 2
            auto(f"out of memory: the step is done again with {self.rows} rows per pass; its tokens stay the same")
        elif not self.model.activation_checkpointing:
            self.model.activation_checkpointing = True
            auto("out of memory at one row per pass: the step is done again with activation checkpointing")
        else:
            fail("one row alone does not fit into the memory: take a smaller --depth or --max_seq_len, or more devices")

    def leave(self, step):
        """After a signal, once everything is saved."""
        auto(f"asked to stop (SIGTERM): step {step} is saved, and the same command goes on from it")
        cleanup()
        sys.exit(0)

    def check(self, step, norm, opt, metrics, advice):
        """After a step: it was skipped by all ranks if its loss or gradient was not finite. Ten in a row end the run, on what the
        last good checkpoint holds. In fp16 that a step overflowed only lowers the loss scale, until it is at its end."""
        if math.isfinite(norm):
            self.bad = 0
            return
        metrics["skipped"] = metrics.get("skipped", 0) + 1
        if opt.loss_scale > 1:
            auto(f"step {step}: fp16 overflowed, the step was skipped; the loss scale is {opt.loss_scale:g} now")
            return
        self.bad += 1
        warn(f"step {step}: loss or gradient not finite, the step was skipped ({self.bad} in a row, {metrics['skipped']} in all)")
        if self.bad == 10:
            fail(f"ten steps in a row without a finite gradient: {advice}; the last good checkpoint is kept")


def split_batch(total_batch_size, T, device_batch_size, dev, fit):
    """How a step's tokens are divided: -> (rows per device and pass, rows per step, tokens per step as it comes out). The step's
    rows are shared by all devices, evenly or not.

    device_batch_size 0 chooses: the most rows that fit, or on a CPU what stays in its caches."""
    rows = max(1, round(total_batch_size / T))  # over all devices
    share = -(-rows // dev.world_size)  # of the device that has most
    if not device_batch_size:
        fit = min(fit, max(1, 2048 // T)) if dev.type == "cpu" else fit
        device_batch_size = -(-share // -(-share // min(fit, share)))  # as few passes as fit, and those alike
    device_batch_size = min(device_batch_size, share)
    total = rows * T
    auto(f"batch {total} tokens = {rows} rows x {T} over {dev.world_size} devices, {device_batch_size} rows at a time in "
         f"{-(-share // device_batch_size)} passes"
         + (f" (asked for {total_batch_size}: rounded to whole rows)" if total != total_batch_size else ""))
    return device_batch_size, rows, total


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
            cleanup(box[0][1])
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


def save_checkpoint(run_dir, step, model, opt, meta, dev, must=False):
    """Write a checkpoint; all ranks call it together. Where that fails, for want of space say, training goes on with a warning;
    with must=True it ends with a sentence."""
    state = opt.state_dict()  # gathered from all ranks
    failure = ""
    if dev.is_main:
        try:
            write_checkpoint(run_dir, step, model.state_dict(), state, meta)
        except (OSError, RuntimeError) as e:  # torch.save raises the latter
            failure = f"the checkpoint of step {step} cannot be written to {run_dir} ({str(e).splitlines()[0]})"
    if dev.sum(int(bool(failure))):  # and so nobody goes on before it is written
        if must:
            fail(f"{failure}; make room and run the same command again: it goes on from the checkpoint before")
        warn(f"{failure}: going on without it")


def write_checkpoint(run_dir, step, model_state, optim_state, meta, keep=2):
    """Write run_dir/step_<N>/{model.pt,optim.pt,meta.json} whole or not at all; keep the newest `keep`. Rank 0 only."""
    final = Path(run_dir) / f"step_{step:06d}"
    tmp = final.with_name(f"{final.name}.tmp{os.getpid()}")
    for leftover in Path(run_dir).glob("step_*.tmp*"):  # what a killed process left half written
        shutil.rmtree(leftover, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        torch.save({name: t.cpu() for name, t in model_state.items()}, tmp / "model.pt")  # loads where that device is unknown
        torch.save(optim_state, tmp / "optim.pt")
        rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
        meta = {**meta, "step": step, "rng": rng, "saved_at": time.time(), "torch": torch.__version__,
                "files": {n: file_sha256(tmp / n) for n in ("model.pt", "optim.pt")}}
        (tmp / "meta.json").write_text(json.dumps({**meta, "seal": seal(meta)}, indent=1), encoding="utf-8")
        for path in tmp.iterdir():
            with open(path, "rb+") as f:
                os.fsync(f.fileno())  # on the disk before the name says so: a power cut leaves no half checkpoint
        shutil.rmtree(final, ignore_errors=True)
        os.replace(tmp, final)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    others = [p for p in step_folders(run_dir) if p != final]
    older = [p for p in others if step_of(p) < step and isinstance(read_checkpoint(p), dict)]
    for path in [p for p in others if p not in older[-(keep - 1) :]]:
        shutil.rmtree(path)  # older ones and damaged ones


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
FREE_KNOBS = {"device_type", "dtype", "compile", "optimizer", "activation_checkpointing", "device_batch_size", "out_dir",
              "eval_every", "sample_every", "save_every", "resume", "run", "bench", "eval_tokens", "eval_problems", "eval_tasks",
              "timeout_min", "profile", "debug_npu", "plan", "plan_device", "plan_ranks", "plan_vocab"}


@decided_by_main
def find_resume(run_dir, config, resume, parent=""):
    """What to do about an earlier run in run_dir: its newest checkpoint's meta to continue from, or None to start.

    config: this run's knobs; parent: the identity of the checkpoint this run starts from."""
    run_dir = Path(run_dir)
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0  # torchrun began this very run again
    meta = newest_checkpoint(run_dir) if run_dir.is_dir() else None
    reason = "" if resume else "--resume=0"
    if meta and resume:
        changed = [f"{k} {meta['config'].get(k)!r} -> {v!r}" for k, v in config.items()
                   if k not in FREE_KNOBS and k in meta["config"] and v is not None and meta["config"][k] != v]
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


def begin(started, run_dir, num_steps, measure):
    """-> (step, metrics) to begin with. A run that is finished, its last measurement included, ends here with a line that says
    so. measure: the name of that measurement in the log."""
    if not started:
        return 0, {"tokens": 0, "seconds": 0.0}
    if started["step"] >= num_steps and was_measured(run_dir, started["step"], measure):
        auto(f"{run_dir} is finished (step {started['step']}); --resume=0 trains it again")
        cleanup()
        sys.exit(0)
    auto(f"continuing {run_dir} from step {started['step']} of {num_steps}")
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(started["rng"])), dtype=torch.uint8))
    return started["step"], started["metrics"]


@decided_by_main
def was_measured(run_dir, step, measure):
    path = Path(run_dir) / "log.jsonl"
    return path.exists() and any(row.get("step") == step and measure in row for row in read_log(path))


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
    for line in Path(path).read_text(encoding="utf-8").split("\n"):  # not splitlines(): text in it may hold other line ends
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def human(n):
    """1234567 -> '1.23M'"""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def duration(seconds):
    """4000 -> '1h07m'"""
    s = int(seconds)
    return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


# --- files: downloads from a Hugging Face hub or a mirror of it ----------------------------------------------------------
HUBS = ["https://hf-mirror.com", "https://huggingface.co"]
MISSED = {}  # endpoint -> times in a row that it could not be connected to; at 2 it is left out until the program ends


class HubError(Exception):
    """A try at one endpoint came to nothing; the text says why. wait: seconds the server asks for; final: this endpoint
    will do no better; further: yet there are more bytes than ever."""

    def __init__(self, why, wait=0, final=False, further=False):
        super().__init__(why)
        self.wait, self.final, self.further = wait, final, further


def hub_endpoints():
    """Where to look, in order: the user's HF_ENDPOINT, then the two known; if it has a comma, only what it lists."""
    setting = os.environ.get("HF_ENDPOINT", "")
    own = [e.strip().rstrip("/") for e in setting.split(",") if e.strip()]
    if any(not e.startswith(("https://", "http://")) for e in own):
        fail(f"HF_ENDPOINT={setting} is no address, which begins with https://")
    return own if own and "," in setting else list(dict.fromkeys(own + HUBS))


def hub_get(endpoint, path, start=0):
    """One GET of endpoint + path, from byte `start` on. -> Response of status 200, 206 or 416, its body unread"""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        r = requests.get(endpoint + path, stream=True, timeout=(10, 60), headers=headers)
    except requests.RequestException as e:
        if hasattr((e.args or [None])[0], "reason"):  # urllib3's MaxRetryError: there was no connection
            MISSED[endpoint] = MISSED.get(endpoint, 0) + 1
        raise HubError(type(e).__name__) from e
    MISSED[endpoint] = -8  # it is there: when it goes away for a while, that is waited out
    page = r.headers.get("Content-Type", "").startswith("text/html")  # of a login, say
    if r.status_code in (200, 206, 416) and not page:
        return r
    r.close()
    busy, wait = r.status_code in (408, 425, 429) or r.status_code >= 500, r.headers.get("Retry-After", "")
    raise HubError(f"HTTP {r.status_code}{', a web page' if page and not busy else ''}", final=not busy,
                   wait=min(60, int(wait)) if busy and wait.isdecimal() else 0)


def hub_persist(step, tries=10, more=()):
    """Call step(endpoint) for the endpoints, and `more`, in turn until one returns; again, with pauses, until `tries` rounds in a
    row came no further. -> what it returned; HubError when that was nothing"""
    why, refused, vain, pause = {}, set(), 0, 0
    more = () if "," in os.environ.get("HF_ENDPOINT", "") else more  # only what it lists
    while vain < tries and (left := [e for e in (*hub_endpoints(), *more) if e not in refused and MISSED.get(e, 0) < 2]):
        time.sleep(pause)
        vain, pause = vain + 1, min(8, 0.1 * 2**vain) * random.uniform(0.5, 1.5)  # seconds
        for endpoint in left:
            try:
                return step(endpoint)
            except HubError as e:
                why[endpoint], pause = str(e), max(pause, e.wait)
                refused |= {endpoint} if e.final else set()
                if e.further:
                    vain, pause = 0, random.uniform(0, 0.1)
                    break
    raise HubError("; ".join(f"{e}: {why.get(e, 'cannot be reached')}" for e in (*hub_endpoints(), *more)))


def hub_facts(r):
    """(bytes, SHA-256) of the whole file as an answer's headers tell them, None where they do not."""
    hub = next((a.headers for a in (*r.history, r) if "X-Linked-ETag" in a.headers), {})
    etag = hub.get("X-Linked-ETag") or ("" if r.history else r.headers.get("ETag", ""))  # redirected: to ETags of another kind
    size = r.headers.get("Content-Range") or hub.get("X-Linked-Size") or r.headers.get("Content-Length", "")
    size, sha256 = re.search(r"\d+$", size), re.fullmatch(r'"?([0-9a-f]{64})"?', etag)
    return size and int(size[0]), sha256 and sha256[1]


def download(path, final, size=None, sha256=None, more=()):
    """Download what endpoints, or the hosts in `more`, have at `path` to the file `final`, unless it is there. -> Path

    size (bytes) and sha256 are what is known; the server is asked for the rest. Goes on from a half download (.part), renames
    what is whole and right. No two processes may download the same file at once."""
    final, best, wrong = Path(final), 0, 0  # best: the most bytes there were; wrong: times that all were there, but damaged
    part = final.with_name(final.name + ".part")
    if final.exists() and size in (None, final.stat().st_size):
        return final

    def step(endpoint):
        nonlocal size, sha256, best, wrong
        part.touch()
        have, over, why = part.stat().st_size, False, "cut off"
        if size is None or have < size:
            with hub_get(endpoint, path, have) as r:
                if r.status_code != 200 and not r.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                    part.unlink()  # 416, or another range than was asked for
                    raise HubError(f"HTTP {r.status_code}, but not from byte {have} on")
                total, digest = hub_facts(r)
                size, sha256 = total if size is None else size, sha256 or digest
                if size is None or (total or 0) > size:
                    raise HubError("it does not tell the size" if size is None else f"{total} bytes, not {size}", final=True)
                bar.total = size
                r.raw.enforce_content_length = False  # which would throw away what came just before a cut
                with open(part, "ab" if r.status_code == 206 else "wb") as f:  # 200: the server ignored Range
                    try:
                        for block in r.iter_content(1 << 16):
                            over = len(block) > size - f.tell()
                            f.write(block[: size - f.tell()])
                            bar.update(max(0, f.tell() - bar.n))  # never backwards
                            if over:
                                break
                    except requests.RequestException as e:
                        why = type(e).__name__
            have = part.stat().st_size
        if over or have > size or (have == size and sha256 and file_sha256(part) != sha256):
            part.unlink()
            best, wrong = 0, wrong + 1
            raise HubError("too many bytes" if over or have > size else "wrong checksum", final=wrong >= 6)
        if have < size:
            further, best = have > best, max(have, best)
            raise HubError(f"{why} at byte {have} of {size}", further=further)
        os.replace(part, final)

    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        best = part.stat().st_size if part.exists() else 0
        with progress(total=size or math.inf, desc=final.name, unit="B", initial=best) as bar:
            hub_persist(step, more=more)
    except HubError as e:
        fail(f"{final} cannot be downloaded ({e}); run again to go on, or name another mirror in HF_ENDPOINT")
    except OSError as e:  # the disk is full, say
        missing = f", {size - (part.stat().st_size if part.exists() else 0)} bytes are missing" if size else ""
        fail(f"{final} cannot be written ({e.strerror}){missing}: make room, and run again to go on")
    return final


def hub_place(repo, path, home):
    """Where a file of a hub dataset lies under home. A path that leads out of the dataset's folder is refused."""
    folder = Path(os.path.normpath(Path(home, "data", repo)))
    if folder not in Path(os.path.normpath(folder / path)).parents:
        fail(f"hub dataset {repo} is not to be trusted: its file {path!r} would be written outside of its folder")
    return folder / path


def hub_page(endpoint, path):
    """One page of a dataset's listing. -> ({path: {"size": bytes, "sha256": hex or None}}, path of the next page or None)"""
    files = {}
    try:
        with hub_get(endpoint, path) as r:
            for f in [f for f in json.loads(r.content) if f["type"] == "file"]:
                path, size, sha256 = f["path"], f["size"], (f.get("lfs") or {}).get("oid")
                if not (isinstance(path, str) and isinstance(size, int) and size >= 0 and len(sha256 or "0" * 64) == 64):
                    raise ValueError(f)
                files[path] = {"size": size, "sha256": sha256}
    except (requests.RequestException, ValueError, TypeError, KeyError, AttributeError) as e:
        raise HubError(f"an unreadable listing, {type(e).__name__}") from e
    following = r.links.get("next", {}).get("url", "")  # long listings come in pages
    return files, following[following.index("/api/") :] if "/api/" in following else None


def hub_files(repo, home):
    """The files of a hub dataset: {path: {"size": bytes, "sha256": hex or None}}."""
    kept = Path(home) / "data" / repo / "files.json"  # so that what was downloaded can be used without a network
    path, files = f"/api/datasets/{repo}/tree/main?recursive=true", {}
    try:
        while path:
            page, path = hub_persist(lambda endpoint: hub_page(endpoint, path), tries=3 if kept.exists() else 10)
            files |= page
    except HubError as e:
        if not kept.exists():
            fail(f"hub dataset {repo} cannot be listed ({e}); check the name and HF_ENDPOINT, or give a local folder")
        warn(f"hub dataset {repo} cannot be listed ({e}): using what was downloaded before")
        return json.loads(kept.read_text(encoding="utf-8"))
    for path in files:
        hub_place(repo, path, home)
    write_atomic(kept, json.dumps(files))
    return files


def hub_fetch(repo, path, out_dir, facts):
    """Download one file of a hub dataset into out_dir/data under the hub's own name, unless it is there. -> Path"""
    url = f"/datasets/{repo}/resolve/main/{requests.utils.quote(path)}"
    return download(url, hub_place(repo, path, out_dir), facts["size"], facts["sha256"])


if __name__ == "__main__":
    import runpy
    runpy.run_path(str(Path(__file__).with_name("doctor.py")), run_name="__main__")

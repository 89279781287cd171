"""
Is this machine ready? A table of checks, each with what to do; nothing here is needed for training itself.

    python common.py                     # the table; exit status 1 if something would keep training from running
    python common.py --json=1            # the same for machines
    python common.py --device_type=cpu   # look at one kind of device only
"""
from common import (ASCEND, ASCEND_SET, DEBUGGING, NPU_ERROR, STAGES, card_facts, choose_dtype, configure, device_facts,
                    device_holders, find_devices, hub_endpoints, len_cores, matmul_flops, out_of_memory, read_checkpoint,
                    run_folders, setup, step_folders)

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from json import dumps, loads
from pathlib import Path

import requests
import torch

# --- CONFIG ----------------------------------------------------------------------------------------------------------
json = False             # print JSON instead of the table
device_type = "auto"     # auto, npu, cuda, mps, cpu
out_dir = "out"          # whose tokenizer, checkpoints and disk are looked at
worker = False           # used by the doctor itself: be one rank of the all_reduce

# Which CANN a torch_npu was built for (Ascend's release notes). A newer CANN usually works, an older one does not.
CANN_FOR = {"2.12.0": "9.1.0", "2.11.0": "9.1.0", "2.10.0.post4": "9.1.0", "2.9.0.post6": "9.1.0", "2.7.1.post8": "9.1.0",
            "2.9.0.post2": "9.0.0", "2.8.0.post4": "9.0.0", "2.7.1.post4": "9.0.0", "2.9.0": "8.5.0", "2.8.0.post2": "8.5.0",
            "2.7.1.post2": "8.5.0", "2.8.0": "8.3.RC1", "2.7.1": "8.3.RC1"}
OK, WARN, FAIL = "ok", "warn", "fail"


def version_of(package):
    """The installed version of a package, or ""; asked without importing it."""
    module = sys.modules.get(package)
    if module is not None and hasattr(module, "__version__"):
        return module.__version__
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else ""


# Each check yields (what, state, finding, what to do).
def software():
    good = sys.version_info >= (3, 10)
    yield "Python", OK if good else FAIL, platform.python_version(), "" if good else "install Python 3.10 or later"
    minor = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    known = (2, 7) <= minor <= (2, 13)
    yield "torch", OK if known else WARN, torch.__version__, "" if known else "npuchat is made for torch 2.7 to 2.13"
    missing = [p for p in ("numpy", "tiktoken", "requests", "tqdm", "pyarrow", "matplotlib") if not importlib.util.find_spec(p)]
    yield "packages", FAIL if missing else OK, f"missing: {', '.join(missing)}" if missing else "all there", (
        "pip install -r requirements.txt" if missing else "")


def cann_version():
    """The version of CANN under ASCEND_HOME_PATH, "" where none is found."""
    home = Path(os.environ.get("ASCEND_HOME_PATH", "none"))
    for path in [home / "version.cfg", *sorted(home.glob("**/ascend_*_install.info"))]:
        pattern = r"(?im)^(?:version|.*running_version)\s*=\s*\W*(?:[\w.]*:)?(\d[\w.]*)"  # version=9.1.0, or [9.1.0.1:9.1.0]
        if path.is_file() and (found := re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))):
            return found[1]
    return ""


def ascend():
    npu, base = version_of("torch_npu"), torch.__version__.split("+")[0]
    if not npu:
        yield "torch_npu", FAIL, f"not installed, though CANN is there ({os.environ.get('ASCEND_HOME_PATH')})", (
            f"pip install torch_npu=={base}")
        return
    release = re.match(r"\d+\.\d+\.\d+", npu)[0]
    if release != base:
        yield "torch_npu", FAIL, f"{npu} does not belong to torch {base}", (
            f"pip install torch_npu=={base}, or pip install torch=={release} (on x86 the +cpu build)")
    elif NPU_ERROR:
        no_cann = re.search(r"lib\w+\.so", NPU_ERROR)
        yield "torch_npu", FAIL, f"{npu} cannot be loaded: {NPU_ERROR}", (
            "install CANN, then: source /usr/local/Ascend/ascend-toolkit/set_env.sh" if no_cann else
            "use the torch built for the CPU (+cpu): torch_npu brings its own kernels" if "accelerators" in NPU_ERROR else
            "reinstall torch and torch_npu of one version")
    else:
        yield "torch_npu", OK, npu, ""
    cann, wanted = cann_version(), CANN_FOR.get(npu.split("+")[0], CANN_FOR.get(release))
    driver = Path("/usr/local/Ascend/driver/version.info")
    driver = next(iter(re.findall(r"(?m)^Version=(\S+)", driver.read_text())), "") if driver.is_file() else ""
    if not cann:
        yield "CANN", FAIL if NPU_ERROR else WARN, "not found: ASCEND_HOME_PATH is not set or holds none", (
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh" + (f"; torch_npu {release} wants CANN {wanted}" if wanted else ""))
    elif wanted and not cann.upper().startswith(wanted):
        yield "CANN", WARN, f"{cann}; torch_npu {npu} was built for {wanted}", f"install CANN {wanted}"
    else:
        yield "CANN", OK, cann + ("" if wanted else f"; which one torch_npu {npu} wants is not known here"), ""
    yield "driver", OK if driver else WARN, driver or "not found", "" if driver else "install the NPU driver and firmware"
    smi = shutil.which("npu-smi")
    yield "npu-smi", OK if smi else WARN, smi or "not found", "" if smi else "in a container, mount it from the host"
    slow = [f"{k}={v}" for k, v in DEBUGGING.items() if os.environ.get(k) == v]
    yield "variables", WARN if slow else OK, " ".join(slow or [f"{k}={v}" for k, v in ASCEND_SET.items()]) or "all yours", (
        f"unset {' '.join(s.split('=')[0] for s in slow)}: meant for debugging, they make training slow" if slow else "")


def devices(kind, count):
    for i in range(count):
        what, name = f"{kind} {i}" if count > 1 else kind, "it"
        try:
            device, name, free, total = device_facts(kind, i)
            dtype, why = choose_dtype(kind, name, "auto")
            flops = matmul_flops(device, dtype)
            if flops > 2e13:
                flops = matmul_flops(device, dtype, n=8192)
        except RuntimeError as e:
            yield what, FAIL, f"{name} cannot multiply: {str(e).splitlines()[0]}", (
                "another process holds its memory" if out_of_memory(e) else "restart the driver or choose another device")
            continue
        peak = (card_facts(name)[0] or 0) * 1e12
        text = (f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {str(dtype)[6:]} ({why}), "
                f"matmul {flops / 1e12:.3g} TFLOP/s" + (f", {flops / peak:.0%} of peak" if peak and dtype != torch.float32 else "")
                + (f", {len_cores()} cores" if device.index is None else ""))
        held, slow = device.index is not None and free < 0.8 * total, peak and flops < 0.3 * peak
        yield what, WARN if held or slow else OK, text, (
            "another process holds its memory" if held else
            "slow: is another process computing on it, or is it throttled?" if slow else "")
    if holders := [(pid, name) for pid, name in device_holders(kind) if pid != os.getpid()]:
        yield "processes", WARN, ", ".join(f"{name} ({pid})" for pid, name in holders), (
            "if they are left over from a run that ended: kill " + " ".join(str(pid) for pid, _ in holders) + ", then wait 10 s")


def all_reduce(kind, count):
    """Every device, and on a CPU two processes, sum a tensor together, started by torchrun as training is."""
    ranks = max(2, count) if kind == "cpu" else count
    if ranks == 1:
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__,
               "--worker=1", f"--device_type={kind}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        found = re.search(r"(?m)^\{.*\}$", done.stdout)
        said = re.findall(r"(?m)^(?:\[rank\d+\]: *)?(\w*(?:Error|error)\b.*)$", done.stderr)
        why = "" if found else (said or [f"exit status {done.returncode}"])[0]
    except subprocess.TimeoutExpired:
        found, why = None, "no answer in 3 minutes"
    if found:
        result = loads(found[0])
        yield "all_reduce", OK, f"{ranks} ranks ({result['backend']}), 64 MB in {result['ms']:.0f} ms", ""
    else:
        yield "all_reduce", FAIL, why, (
            "look for left-over processes above; on a host with several networks set GLOO_SOCKET_IFNAME"
            + (" and HCCL_SOCKET_IFNAME" if ASCEND else "") + " to the interface that the ranks share")


def be_a_worker():
    dev = setup(device_type)
    x = torch.ones(2**24, device=dev.device)
    dev.sum(x)  # the first one connects
    dev.synchronize()
    t0 = time.time()
    dev.sum(x)
    dev.synchronize()
    assert x[-1].item() == dev.world_size**2, f"the sum of ones over {dev.world_size} ranks, twice, is {x[-1].item()}"
    if dev.is_main:
        print(dumps({"backend": torch.distributed.get_backend(), "ms": 1000 * (time.time() - t0)}), flush=True)


def surroundings():
    taken = []
    for port in [29500] + (list(range(60000, 60016)) if ASCEND else []):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    yield "ports", WARN if taken else OK, f"in use: {taken}" if taken else "29500 is free", (
        "another run is going on; torchrun --standalone takes a free one" if taken else "")
    place = next(p for p in [Path(out_dir).resolve(), *Path(out_dir).resolve().parents] if p.exists())
    free = shutil.disk_usage(place).free / 2**30
    yield "disk", OK if free > 10 else WARN if free > 1 else FAIL, f"{free:.0f} GiB free for {out_dir}", (
        "" if free > 10 else "a large model's checkpoints take gigabytes, and there are up to three: make room or set --out_dir")
    for endpoint in hub_endpoints():
        t0 = time.time()
        try:
            status = requests.get(f"{endpoint}/api/datasets?limit=1", timeout=5).status_code
            good, finding = status < 500, f"HTTP {status} in {time.time() - t0:.1f} s"
        except requests.RequestException as e:
            good, finding = False, type(e).__name__
        yield f"hub {endpoint.split('//')[-1]}", OK if good else WARN, finding, (
            "" if good else "only needed for downloads: set HF_ENDPOINT to a mirror you reach, or give local folders")


def files():
    from tokenizer import read_sidecar
    folder = Path(out_dir) / "tokenizer"
    digest = read_sidecar(folder).get("sha256", "")
    if (folder / "tokenizer.json").exists():
        yield "tokenizer", OK if digest else FAIL, f"{folder}, sha256 {digest[:12] or 'missing'}", (
            "" if digest else "it is damaged: run python tokenizer.py again")
    else:
        yield "tokenizer", OK, f"none in {folder} yet", "python tokenizer.py makes one"
    for stage in STAGES:
        for run_dir in run_folders(out_dir, stage):
            metas = {p: read_checkpoint(p) for p in step_folders(run_dir)}
            bad, sound = ([p for p, meta in metas.items() if isinstance(meta, kind)] for kind in (str, dict))
            if sound:
                meta = metas[sound[-1]]
                other = digest and meta["tokenizer"] != digest
                yield f"{stage}/{run_dir.name}", WARN if bad or other else OK, (
                    f"step {meta['step']}, tokenizer {meta['tokenizer'][:12]}"
                    + (f", damaged: {', '.join(p.name for p in bad)}" if bad else "")), (
                    "made with another tokenizer" if other else "the one before is used" if bad else "")
            elif bad:
                yield f"{stage}/{run_dir.name}", WARN, f"no sound checkpoint ({len(bad)} damaged)", "train this stage again"


def main():
    found = find_devices()
    kind = next(iter(found)) if device_type == "auto" else device_type
    checks = [*software(), *(ascend() if ASCEND else ())]
    if kind not in found:
        checks.append((kind, FAIL, f"torch sees only {', '.join(found)}", "leave --device_type out"))
    else:
        if ASCEND and kind == "cpu" and device_type == "auto" and not NPU_ERROR:
            checks.append(("devices", FAIL, "torch_npu is there, but sees no device",
                           "check npu-smi info, ASCEND_RT_VISIBLE_DEVICES, and that the container was given the devices"))
        checks += [*devices(kind, found[kind]), *all_reduce(kind, found[kind])]
    checks += [*surroundings(), *files()]
    verdict = max((state for _, state, _, _ in checks), key=[OK, WARN, FAIL].index)
    if json:
        print(dumps({"verdict": verdict, "device_type": kind, "checks": [
            dict(zip(("check", "state", "finding", "advice"), c)) for c in checks]}, indent=1, ensure_ascii=False))
    else:
        width = max(len(c[0]) for c in checks)
        for what, state, finding, advice in checks:
            print(f"{state:<4}  {what:<{width}}  {finding}" + (f"\n{'':{width + 8}}-> {advice}" if advice else ""))
        print({OK: "\nready: bash speedrun.sh", WARN: "\nit will run; the lines marked warn say what could be better",
               FAIL: "\nnot ready: the lines marked fail say what to do"}[verdict])
    sys.exit(verdict == FAIL)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the table or the JSON alone
        configure(globals())
    be_a_worker() if worker else main()

"""Checks of the simulated NPU, from the folder above: PYTHONPATH=fake_npu python -m pytest fake_npu/test_fake_npu.py -q"""
import concurrent.futures
import importlib.metadata
import io
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

torch_npu = pytest.importorskip("torch_npu")
DEV = "npu:0"
torch.set_num_threads(1)  # waiting OpenMP threads spin, which on a busy machine takes longer than the work
os.environ["OMP_NUM_THREADS"] = "1"  # and for the processes started here


def run(code, timeout=120, **env):
    """What a fresh Python says: (status, stdout, stderr)."""
    r = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env={**os.environ, **env})
    return r.returncode, r.stdout.strip(), r.stderr


def good(code, **env):
    status, out, err = run(code, **env)
    assert status == 0, out + err
    return out


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x, cos, sin):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.h, -1).transpose(1, 2) for t in self.qkv(F.rms_norm(x, (D,))).split(D, 2))

        def rot(t):
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos + b * sin, b * cos - a * sin), -1).to(t.dtype)

        y = F.scaled_dot_product_attention(rot(q), rot(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (D,)))).square())


class GPT(nn.Module):
    def __init__(self, V=64, d=32, h=2, n=2, T=16):
        super().__init__()
        self.emb, self.head = nn.Embedding(V, d), nn.Linear(d, V, bias=False)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(n))
        f = torch.outer(torch.arange(T), 1.0 / 100 ** (torch.arange(0, d // h, 2) / (d // h)))
        self.register_buffer("cos", f.cos(), persistent=False)
        self.register_buffer("sin", f.sin(), persistent=False)

    def forward(self, ids, targets=None):
        T = ids.size(1)
        x = F.rms_norm(self.emb(ids), (self.emb.embedding_dim,))
        for b in self.blocks:
            x = b(x, self.cos[:T], self.sin[:T])
        logits = 15 * torch.tanh(self.head(F.rms_norm(x, (x.size(-1),))).float() / 15)
        return logits if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def muon(G, steps=5):
    X = G.bfloat16() / (G.norm(dim=(-2, -1), keepdim=True).bfloat16() + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def train(dev, steps=4, amp=False, **kw):
    """AdamW for the tables, Muon for the matrices: the losses and norms of a few steps."""
    torch.manual_seed(0)
    model = GPT().to(dev)
    opt = torch.optim.AdamW([*model.emb.parameters(), *model.head.parameters()], lr=1e-2, **kw)
    ids = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(3)).to(dev)
    out = []
    for _ in range(steps):
        with torch.autocast(torch.device(dev).type, torch.bfloat16, enabled=amp):
            loss = model(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            for p in model.blocks.parameters():
                p.sub_(muon(p.grad), alpha=0.01)
        model.zero_grad(set_to_none=True)
        out.append((loss.item(), norm.item()))
    return model, out


@pytest.mark.parametrize("kw", [{}, {"fused": True}, {"foreach": True}, {"amp": True}])
def test_training_equals_cpu(kw):
    a, b = train("cpu", **kw), train(DEV, **kw)
    assert torch.allclose(torch.tensor(a[1]), torch.tensor(b[1]), rtol=2e-3 if kw.get("amp") else 1e-5)
    for p, q in zip(a[0].parameters(), b[0].parameters()):
        assert q.device == torch.device(DEV) and torch.allclose(p, q.cpu(), atol=2e-2 if kw.get("amp") else 1e-5)


def test_autocast():
    x = torch.randn(4, 4, device=DEV, requires_grad=True)
    with torch.autocast("npu", torch.bfloat16):
        y = x @ x
        assert y.dtype == torch.bfloat16 and y.exp().dtype == y.sum().dtype == y.softmax(-1).dtype == torch.float32
        assert F.rms_norm(y, (4,)).dtype == torch.bfloat16  # the NPU's list leaves it alone
        assert torch.addcmul(y, x, x).dtype == torch.float32 and y.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
        assert F.scaled_dot_product_attention(*[x.view(1, 1, 4, 4)] * 3).dtype == torch.bfloat16
    with torch.npu.amp.autocast():
        assert (x @ x).dtype == torch.float16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


def test_grad_scaler():
    p = nn.Parameter(torch.ones(4, device=DEV))
    opt = torch.optim.SGD([p], 0.1)
    scaler = torch.npu.amp.GradScaler(init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.allclose(p.cpu(), torch.full((4,), 0.9))
    p.grad.fill_(float("inf"))
    scaler.scale(torch.ones((), device=DEV))
    scaler.step(opt)
    scaler.update()
    assert torch.allclose(p.cpu(), torch.full((4,), 0.9)) and scaler.get_scale() == 2.0


MASKS = {"none": {}, "causal": {"is_causal": True}, "mask2": {"attn_mask": torch.rand(33, 33) > 0.3},
         "mask4": {"attn_mask": torch.rand(2, 1, 33, 33) > 0.3}, "float": {"attn_mask": torch.randn(33, 33)}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("case", MASKS)
def test_fused_attention_equals_cpu(case, heads, dtype):
    shape = lambda h: (2, 33, h, 16)  # noqa: E731
    cpu = [torch.randn(shape(h)).to(dtype).transpose(1, 2).requires_grad_() for h in (4, heads, heads)]
    npu = [t.detach().to(DEV).requires_grad_() for t in cpu]
    npu[2].data = npu[2].data.contiguous()
    kw = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in MASKS[case].items()}
    grad = torch.randn(2, 4, 33, 16).to(dtype)
    torch_npu._C.set_op_log(True)
    out = F.scaled_dot_product_attention(*npu, **{k: v.to(DEV) if torch.is_tensor(v) else v for k, v in kw.items()},
                                         enable_gqa=heads != 4)
    out.backward(grad.to(DEV))
    calls = {n.split("::")[1].split(".")[0] for n in torch_npu._C.op_log()}
    torch_npu._C.set_op_log(False)
    name = "_scaled_dot_product_fused_attention_overrideable"
    assert ({name, name + "_backward"} <= calls) == (case != "float") == ("bmm" not in calls)
    ref = F.scaled_dot_product_attention(*cpu, **kw, enable_gqa=heads != 4)
    ref.backward(grad)
    tol = {torch.float32: 2e-6, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    for a, b in zip((out, *(t.grad for t in npu)), (ref, *(t.grad for t in cpu))):
        assert torch.allclose(a.cpu(), b, atol=tol, rtol=tol)


def test_fused_attention_memory():
    T = 1024
    q, k, v = (torch.randn(1, 1, T, 16, device=DEV, requires_grad=True) for _ in range(3))
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert torch.npu.max_memory_allocated() - before < T * T
    with pytest.raises(RuntimeError, match="is_causal"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, T, dtype=torch.bool, device=DEV), is_causal=True)


@pytest.mark.parametrize("window", [0, 3, 40])
def test_a_band_of_attention(window):
    q, k, v = (torch.randn(2, n, 20, 16, requires_grad=True) for n in (4, 2, 2))
    i = torch.arange(20)
    band = (i <= i[:, None]) & (i[:, None] - i <= window)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=True)
    want.square().sum().backward()
    theirs = [t.detach().to("npu").requires_grad_() for t in (q, k, v)]
    upper = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
    call = dict(scale=0.25, pre_tockens=window, next_tockens=0, sparse_mode=4)
    got = torch_npu.npu_fusion_attention(*theirs, 4, "BNSD", atten_mask=upper, **call)[0]
    got.square().sum().backward()
    torch.testing.assert_close(got.cpu(), want)
    for a, b in zip(theirs, (q, k, v)):
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    everything = torch_npu.npu_fusion_attention(*theirs, 4, "BNSD", **call)[0]  # without a mask the mode counts for nothing
    torch.testing.assert_close(everything.cpu(), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    with pytest.raises(RuntimeError, match="2048"):
        torch_npu.npu_fusion_attention(*theirs, 4, "BNSD", atten_mask=upper[:20, :20], **call)


def test_pinned_memory():
    x = torch.arange(10.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and pinned[3:].is_pinned() and not x.is_pinned()
    assert torch.equal(pinned.to("npu", non_blocking=True).cpu(), x)



def test_save_and_load(tmp_path):
    m, _ = train(DEV, 1)
    buf = io.BytesIO()
    torch.save({"model": m.state_dict(), "rng": torch.npu.get_rng_state()}, buf)
    for where in ("cpu", DEV, "npu:1", None):
        buf.seek(0)
        w = torch.load(buf, map_location=where, weights_only=True)["model"]["emb.weight"]
        assert w.device == torch.device(where or DEV) and torch.equal(w.cpu(), m.emb.weight.cpu())
    with torch.device("meta"):
        empty = GPT()
    empty.to_empty(device=DEV).load_state_dict(m.state_dict())
    assert torch.equal(empty.head.weight, m.head.weight)
    torch.save(torch.arange(6.0, device=DEV), tmp_path / "a.pt")  # and a torch without the package opens it
    code = f"import torch; print(torch.load({str(tmp_path / 'a.pt')!r}, map_location='cpu', weights_only=True).sum().item())"
    assert good(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "15.0"


def test_random_numbers():
    torch.manual_seed(5)
    a, b, c = torch.randn(8, device=DEV), torch.rand(3, device="npu:1"), torch.randn(8)
    torch.manual_seed(5)
    assert torch.equal(a, torch.randn(8, device=DEV)) and torch.equal(b, torch.rand(3, device="npu:1"))
    assert not torch.equal(a.cpu(), c)
    p = torch.softmax(torch.randn(4, 10, device=DEV), -1)
    g = torch.Generator(device=DEV).manual_seed(1)
    s = torch.multinomial(p, 1, generator=g)
    assert torch.equal(s, torch.multinomial(p, 1, generator=g.manual_seed(1))) and s.device == torch.device(DEV)
    with pytest.raises(RuntimeError):
        torch.multinomial(p, 1, generator=torch.Generator())  # a CPU generator for an npu tensor
    state, states = torch.npu.get_rng_state(), torch.npu.get_rng_state_all()
    assert state.numel() == 16 and state.device.type == "cpu" and len(states) == 2
    x = torch.randn(3, device=DEV)
    torch.npu.set_rng_state(state)
    assert torch.equal(x, torch.randn(3, device=DEV))
    torch.npu.set_rng_state_all(states)
    with torch.random.fork_rng(device_type="npu"):
        torch.randn(3, device=DEV)
    assert torch.equal(x, F.dropout(torch.randn(3, device=DEV), 0.0))
    torch.npu.manual_seed_all(1)
    assert torch.npu.initial_seed() == torch.npu.default_generators[1].initial_seed() == 1


def test_refusals():
    a, b = torch.ones(2, 2, device=DEV), torch.ones(2, 2)
    for f in (lambda: a + b, lambda: F.embedding(torch.zeros(1, dtype=torch.long), a), lambda: a + torch.ones(2, device="npu:1"),
              lambda: torch.cat((a, b)), lambda: a.numpy(), lambda: torch.ones(1, device="npu:7"),
              lambda: torch.npu.set_device(2)):
        with pytest.raises((RuntimeError, TypeError)):
            f()
    with pytest.raises(RuntimeError, match="DOUBLE"):
        a.double() @ a.double()
    with pytest.raises(RuntimeError, match="Expected NPU tensor"):
        a.lerp_(a, torch.tensor(0.5))  # a 0-dim CPU weight: fine on CUDA
    with pytest.raises(RuntimeError, match="dtype"):
        a.bfloat16().lerp_(a.bfloat16(), torch.tensor(0.5, device=DEV))
    a.lerp_(torch.zeros_like(a), 0.5).mul_(torch.tensor(2.0))  # plain arithmetic takes a CPU scalar tensor
    assert a.sum().item() == 4
    with pytest.raises(RuntimeError, match="invalid npu option"):
        torch.npu.set_option({"NO_SUCH": "1"})
    with pytest.raises(ValueError):
        torch.npu.set_option({"ACL_PRECISION_MODE": "best"})


def test_views_out_resize_and_generation():
    x, ref = torch.arange(24.0, device=DEV).view(2, 3, 4), torch.arange(24.0).view(2, 3, 4)
    for t in (x, ref):
        t[:, 1:].transpose(1, 2)[0].add_(100)
    assert torch.equal(x.cpu(), ref)
    out = torch.empty(0, device=DEV)
    torch.add(x, x, out=out)
    assert torch.equal(out.cpu(), ref + ref)
    assert x.resize_(40)[23].item() == 23
    y = torch.zeros(5, device=DEV)
    y[torch.tensor([1, 3])] = 1.0
    assert y.tolist() == [0, 1, 0, 1, 0] and y.sort(descending=True, stable=True)[0].tolist() == [1, 1, 0, 0, 0]
    m, ids = GPT().to(DEV), torch.zeros(1, 1, dtype=torch.long, device=DEV)
    with torch.inference_mode():
        for _ in range(4):
            logits = m(ids)[:, -1]
            logits[logits < torch.topk(logits, 5)[0][:, [-1]]] = -float("inf")
            ids = torch.cat((ids, torch.multinomial(F.softmax(logits, -1), 1)), 1)
    assert ids.shape == (1, 5)


def test_checkpointing_and_compile_eager():
    m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1)).to(DEV)
    x = torch.randn(4, 8, device=DEV, requires_grad=True)
    torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False).sum().backward()
    assert x.grad.abs().sum() > 0
    f = torch.compile(lambda t: t.sin() * 2, backend="eager")
    assert torch.allclose(f(x), x.sin() * 2)


def test_module():
    assert torch.get_device_module("npu") is torch.npu and torch.npu.device_count() == 2 and torch.npu.is_available()
    assert torch.accelerator.current_accelerator(check_available=True).type == "npu"
    base = torch.npu.memory_allocated()
    t = torch.empty(1 << 20, dtype=torch.uint8, device=DEV)
    assert torch.npu.memory_allocated() - base == 1 << 20 == torch.accelerator.memory_allocated() - base
    u = t.float()
    del t, u
    assert torch.npu.memory_allocated() == base and torch.npu.max_memory_allocated() >= base + (5 << 20)
    torch.npu.reset_peak_memory_stats()
    torch.npu.synchronize(), torch.npu.empty_cache(), torch.accelerator.synchronize(), torch.accelerator.empty_cache()
    assert torch.npu.max_memory_reserved() == torch.accelerator.max_memory_allocated() == base == torch.npu.memory_reserved()
    assert torch.npu.memory_stats()["allocated_bytes.all.current"] == base and torch.npu.memory_stats()["num_ooms"] == 0
    assert torch.npu.mem_get_info() == (torch.accelerator.get_memory_info())
    props = torch.npu.get_device_properties(0)
    assert (props.name, props.cube_core_num, props.total_memory) == ("Ascend910B2", 24, 65536 << 20)
    assert torch.npu.get_device_name() == "Ascend910B2" and torch.npu.get_soc_version() == 221
    assert torch.npu.is_bf16_supported() and torch.bfloat16 in torch.npu.get_amp_supported_dtype()
    a, b = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    a.record(), b.record(), b.synchronize()
    assert a.elapsed_time(b) >= 0
    s = torch.npu.Stream()
    with torch.npu.stream(s):
        assert torch.npu.current_stream() == s
        torch.ones(3, device=DEV).record_stream(s)
    torch.npu.current_stream().wait_stream(s)
    torch.npu.set_device("npu:1")
    assert torch.npu.current_device() == 1 and torch.ones(1, device="npu").device.index == 1
    torch.npu.set_device(DEV)
    torch.npu.set_compile_mode(jit_compile=False)
    torch.npu.matmul.allow_hf32, torch.npu.conv.allow_hf32 = True, False
    assert not torch.npu.config.allow_internal_format
    with pytest.raises(AttributeError):
        torch.npu.matmul.allow_tf32 = True
    with pytest.raises(RuntimeError, match="npu_check_overflow"):
        torch.npu.get_npu_overflow_flag()


OOM = """
import torch
mb = 1 << 18
a = torch.ones(5 * mb, device="npu")
base = torch.npu.memory_allocated()
def refused(f):
    try: f()
    except torch.OutOfMemoryError as e: assert "Tried to allocate" in str(e), e
    else: raise SystemExit("no OutOfMemoryError")
    assert torch.npu.memory_allocated() == base, torch.npu.memory_allocated() - base
out = torch.zeros(0, device="npu")
p = torch.ones(5 * mb, device="npu:1", requires_grad=True)
refused(lambda: torch.empty(4 * mb, device="npu"))
refused(lambda: a + a)                              # the result of a fallback operator
refused(lambda: a.view(5, -1).max(0, keepdim=True)[0] + a.view(5, -1))
refused(lambda: torch.sort(a))                      # two results, the second does not fit
refused(lambda: torch.add(a, a, out=out))           # an argument that grows
assert out.shape == (0,) and out.untyped_storage().nbytes() == 0
refused(lambda: a.resize_(9 * mb))
assert a.shape == (5 * mb,) and a.sum().item() == 5 * mb
refused(lambda: p.sin().sum())                      # in the other device's memory
with torch.no_grad(): p[:2 * mb].exp().sum()
b = a[:2 * mb] + 1                                  # what is smaller goes on
assert b.sum().item() == 4 * mb and torch.npu.memory_allocated() == base + (2 << 20)
b = b[:1] + 0
assert torch.npu.memory_allocated() == base + 512   # results are rounded like allocations
w = torch.ones(mb, device="npu", requires_grad=True)
w.grad = torch.zeros(mb, device="npu")
for i in range(2):                                  # backward too
    try: ((w * 2).relu() * 3).sum().backward()
    except torch.OutOfMemoryError: print("backward refused")
    del a; a = torch.ones(mb, device="npu")
print("done")
"""


def test_out_of_memory_and_recovery():
    assert good(OOM, FAKE_NPU_MEM_MB="8").endswith("done")


OLD_CARD = """
import torch, torch.nn.functional as F
flag, clear = torch.npu.get_npu_overflow_flag, torch.npu.utils.clear_npu_overflow_flag
assert not torch.npu.is_bf16_supported() and torch.npu.get_device_properties().cube_core_num == 32 and not flag()
def flagged(t, want=65504.0):
    assert t.isfinite().all() and t.abs().max().item() == want and flag(), (t, flag())
    clear()
    assert not flag()
x = torch.full((4,), 60000.0, device="npu", dtype=torch.float16)
flagged(x + x); flagged(-x - x)
flagged(torch.full((4,), 1e6, device="npu").half()); flagged(torch.full((4,), 1e6).to("npu", torch.float16))
flagged(x.clone().mul_(4)); flagged(torch._foreach_mul([x], 2.0)[0])
flagged((x * 0).log() * 0 + (x * 0) / (x * 0), 0.0)
assert (x.float() * x.float() * 1e35).isinf().all() and not flag()
q = torch.randn(1, 2, 8, 4, device="npu", dtype=torch.float16)
o = F.scaled_dot_product_attention(q, q, q, is_causal=True)   # the plain path; its mask of -inf is no overflow
ref = F.scaled_dot_product_attention(*[q.cpu().float()] * 3, is_causal=True)
assert not flag() and torch.allclose(o.float().cpu(), ref, atol=1e-2)
p = torch.nn.Parameter(torch.ones(4, device="npu")); opt = torch.optim.SGD([p], 0.1)
s = torch.npu.amp.GradScaler(init_scale=65536.0)
with torch.autocast("npu", torch.float16): loss = (p.view(1, 4) @ p.view(4, 1)).sum()
s.scale(loss * 4.0).backward(); s.step(opt); s.update()
assert p.sum().item() == 4 and s.get_scale() == 32768 and not flag(), (p, s.get_scale())
b = torch.ones(4, 4, device="npu").bfloat16()                 # casts and copies may
assert b.clone().t().float().sum().item() == 16 and b.cpu().dtype == torch.zeros(2, device="npu", dtype=torch.bfloat16).dtype
for f in (lambda: b @ b, lambda: b + 1, lambda: torch.randn(2, device="npu", dtype=b.dtype), lambda: q.sum(dtype=b.dtype)):
    try: f()
    except RuntimeError as e: assert "aten::" in str(e) and "BFLOAT16" in str(e), e
    else: raise SystemExit("bf16 was not refused")
torch_npu = __import__("torch_npu"); torch_npu._C.set_op_log(True)
F.scaled_dot_product_attention(*[q.float()] * 3); assert "aten::bmm.out" in torch_npu._C.op_log()
print("done")
"""


def test_first_generation_saturates():
    assert good(OLD_CARD, FAKE_NPU_NAME="Ascend910A").endswith("done")


@pytest.mark.parametrize("name, cores, bf16", [("Ascend910B", 32, False), ("Ascend910B4", 20, True), ("Ascend910_9392", 24, True)])
def test_other_cards(name, cores, bf16, monkeypatch):
    monkeypatch.setattr(torch.npu, "_NAME", name)
    props = torch.npu.get_device_properties()
    assert (props.name, props.cube_core_num, torch.npu.is_bf16_supported()) == (name, cores, bf16)


HEAD = "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch\nassert not hasattr(torch, 'npu')\n"
BY_HAND = HEAD + """
try: import torch_npu
except ImportError as e: raise SystemExit(str(e))
import importlib.metadata
assert torch.ones(2, device='npu').sum().item() == 2
print(torch_npu.__version__, importlib.metadata.version('torch_npu'))
"""
NO_DEVICE = """
import torch_npu, torch, os  # in this order the import of torch happens inside the package
assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ
assert not torch.npu.is_available() and torch.npu.device_count() == 0 and torch.accelerator.current_accelerator(True) is None
torch.manual_seed(1)
try: torch.ones(1, device='npu')
except RuntimeError as e: print(e)
assert torch.ones(1).sum().item() == 1
"""


def test_faults():
    cases = [(BY_HAND, {"FAKE_NPU_VERSION": "2.1.0"}), (BY_HAND, {"FAKE_NPU_NO_CANN": "1"}),
             ("import torch", {"FAKE_NPU_NO_CANN": "1"}), (NO_DEVICE, {"FAKE_NPU_COUNT": "0"})]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        hand, no_cann, autoload, none = pool.map(lambda case: run(case[0], **case[1]), cases)
    assert hand[0] == 0 and hand[1] == "2.1.0+fake 2.1.0+fake", hand
    assert no_cann[0] == 1 and no_cann[2].startswith("libhccl.so: cannot open shared object file"), no_cann
    assert autoload[0] == 1 and "Failed to load the backend extension: torch_npu" in autoload[2], autoload
    assert none[0] == 0 and "No NPU devices" in none[1], none
    assert torch_npu.__version__ == importlib.metadata.version("torch_npu") == "2.13.0+fake"


WORKER = """
import datetime, os, sys, time, torch, torch.distributed as dist
mode, child = sys.argv[1], os.fork()  # one import of torch for both ranks
os.environ["RANK"] = str(int(child == 0))
rank = int(os.environ["RANK"])
torch.npu.set_device(rank); dev = torch.device("npu", rank)
if mode == "all": dist.init_process_group("cpu:gloo,npu:hccl")
else: dist.init_process_group("hccl", timeout=datetime.timedelta(seconds=2 if mode == "late" else 600))
full = lambda x, dtype=torch.float32, device=dev: torch.full((4,), x, dtype=dtype, device=device)
if mode != "all":  # a peer that does not come in time, or that dies
    dist.all_reduce(full(1.0))
    if rank == 1:
        if mode == "killed": os.kill(os.getpid(), 9)
        time.sleep(5)
        os._exit(0)
    dist.all_reduce(full(1.0))
assert dist.get_default_backend_for_device("npu") == "hccl" and dist.is_hccl_available()
for dt in (torch.float32, torch.bfloat16, torch.float16, torch.int64):
    for op, want in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2)):
        if dt == torch.int64 and op == dist.ReduceOp.AVG: continue
        t = full(rank + 1, dt); dist.all_reduce(t, op=op); assert t.tolist() == [want] * 4, (dt, op, t)
t = full(rank + 1.0); w = dist.all_reduce(t, async_op=True); w.wait(); assert t[0] == 3
out = torch.empty(2, device=dev, dtype=torch.bfloat16)
dist.reduce_scatter_tensor(out, torch.arange(4, device=dev).bfloat16() + rank, op=dist.ReduceOp.AVG, async_op=True).wait()
assert out.tolist() == [2 * rank + .5, 2 * rank + 1.5], out
t = torch.empty(4, device=dev, dtype=torch.bfloat16); dist.all_gather_into_tensor(t, out); assert t.tolist() == [.5, 1.5, 2.5, 3.5]
ts = [full(0.0), full(0.0)]; dist.all_gather(ts, full(float(rank))); assert ts[1][0] == 1
t = full(0.0); dist.reduce_scatter(t, [full(1.0), full(2.0)]); assert t[0] == 2 * (rank + 1)
t = full(float(rank)); dist.broadcast(t, 1); assert t[0] == 1
t = full(1.0); dist.reduce(t, 0); assert t[0] == 2 - rank
t = full(0.0); dist.scatter(t, [full(1.0), full(2.0)] if rank == 0 else None); assert t[0] == rank + 1
ts = [full(0.0), full(0.0)] if rank == 0 else None; dist.gather(full(float(rank)), ts); assert rank or ts[1][0] == 1
t = full(0.0); dist.all_to_all_single(t, torch.arange(4., device=dev)); assert t.tolist() == [2 * rank, 2 * rank + 1] * 2
t, u = full(float(rank)), full(0.0)
for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1 - rank), dist.P2POp(dist.irecv, u, 1 - rank)]): w.wait()
assert u[0] == 1 - rank
objs = [None, None]; dist.all_gather_object(objs, {"r": rank}); assert objs[1]["r"] == 1
objs = [{"a": 1} if rank == 0 else None]; dist.broadcast_object_list(objs, 0); assert objs[0]["a"] == 1
dist.barrier()
bad = [lambda: dist.all_reduce(full(1, torch.float64)), lambda: dist.all_reduce(full(1, torch.int32), op=dist.ReduceOp.BOR),
       lambda: dist.all_reduce(torch.ones(4, 4, device=dev).t()[1:])]
t = full(1.0, device="cpu"); dist.all_reduce(t); assert t[0] == 2
for f in bad:
    try: f()
    except (RuntimeError, ValueError): pass
    else: raise SystemExit("a bad call passed")
torch.manual_seed(0)
m = torch.nn.Linear(3, 1); data = torch.randn(4, 3); m(data).pow(2).mean().backward(); want = m.weight.grad.clone(); m.zero_grad()
d = torch.nn.parallel.DistributedDataParallel(m.to(dev), device_ids=[rank])
d(data.to(dev)[rank * 2:rank * 2 + 2]).pow(2).mean().backward()
assert torch.allclose(m.weight.grad.cpu(), want, atol=1e-6)
g = dist.new_group([0, 1], backend="hccl"); t = full(1.0); dist.all_reduce(t, group=g); assert t[0] == 2
dist.destroy_process_group()
os.environ["MASTER_PORT"] = sys.argv[2]; dist.init_process_group("hccl", device_id=dev)  # and without the CPU's half
t = full(1.0); dist.all_reduce(t); objs = [None, None]; dist.all_gather_object(objs, rank); assert t[0] == 2 and objs == [0, 1]
try: dist.all_reduce(full(1.0, device="cpu"))
except RuntimeError: print("done", flush=True)
dist.destroy_process_group()
if child: assert os.waitpid(child, 0)[1] == 0
"""


def two_ranks(mode, tmp_path):
    (tmp_path / "w.py").write_text(WORKER)
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [str(s.getsockname()[1]) for s in socks]
    for s in socks:
        s.close()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "WORLD_SIZE": "2"}
    return subprocess.Popen([sys.executable, str(tmp_path / "w.py"), mode, ports[1]], env=env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def test_two_processes(tmp_path):
    job = two_ranks("all", tmp_path)
    out = job.communicate(timeout=120)[0]
    assert job.returncode == 0 and out.count("done") == 2, out[-4000:]


def test_a_peer_that_is_late_or_dies(tmp_path):
    start = time.time()
    for job in [two_ranks(mode, tmp_path) for mode in ("late", "killed")]:
        out = job.communicate(timeout=120)[0]
        assert job.returncode == 1 and "RuntimeError" in out, out[-4000:]  # an error, no abort
    assert time.time() - start < 100  # not the ten minutes of the group


def test_exit_right_after_backward():
    good("import torch; torch.ones(3, device='npu', requires_grad=True).exp().sum().backward()")

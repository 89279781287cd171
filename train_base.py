"""
Pretraining: predict the next token of raw text. Depth sets everything else.

    python train_base.py --depth=4                                            # one device: NPU, CUDA, MPS or CPU
    torchrun --standalone --nproc_per_node=8 train_base.py --depth=20         # all devices of one machine
    python train_base.py --depth=2 --num_iterations=20 --max_seq_len=128 --out_dir=/tmp/smoke                 # CPU smoke run

Reads out_dir/tokenizer and text (--data_dir: a folder, a hub dataset, or "" for the embedded text).
Writes out_dir/base/<run>/step_<N>/ (model.pt, optim.pt, meta.json) and log.jsonl; train_mid.py goes on from there.
"""
from common import (Log, Steps, auto, begin, choose_compile, cleanup, command, configure, duration, fail, find_resume, human,
                    load_weights, matmul_flops, parse_knob, planned_device, print0, save_checkpoint, setup, split_batch)

import dataclasses
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch

from eval import evaluate_bpb, write_report
from gpt import PRESETS, GPT, GPTConfig, complete, model_meta, print_plan, rows_that_fit
from muon import Muon, choose_optimizer
from tokenizer import RowLoader, describe_rows, find_tokenizer, load_corpus

# --- CONFIG ----------------------------------------------------------------------------------------------------------
# model
depth = 12                   # layers; width, heads, batch, learning rates and horizon follow from it
model_dim = 0                # width; 0 = 64 * depth
head_dim = 0                 # 0 = 64 up to width 512, else 128
n_kv_head = 0                # key-value heads; 0 = as many as heads, fewer = grouped-query attention
max_seq_len = 0              # tokens of context; 0 = 2048, on cpu and mps 512
preset = "nano"              # a set of ideas: nano (the best we know), classic (nanochat of October 2025), qwen3
mlp = None                   # from here on None = as the preset has it. relu2, swiglu
qk_norm = None               # queries and keys normalised
rope_base = None             # of the rotary embedding
softcap = None               # cap on the logits, at most 60; 0 = off
value_embeds = None          # token embeddings mixed into the values of every other layer
layer_lambdas = None         # learned per-layer mix of the residual stream and the first hidden state
window = None                # tokens that three layers of four look back at most; 0 = all
tied = None                  # the head is the embedding
bigrams = None               # rows of a table of embeddings for pairs of tokens; 0 = none; nano: 64 * vocabulary, below depth 8
# horizon: the first of these that is not 0 counts
num_iterations = 0           # optimizer steps
target_flops = 0.0           # training FLOPs
target_param_data_ratio = 12.0  # training tokens per parameter (of the blocks and the head)
# batch
total_batch_size = 0         # tokens per optimizer step over all devices; 0 = by the horizon, on cpu 4096 and mps 16384
device_batch_size = 0        # rows per device per forward; 0 = choose for me
# learning: rates are for the width and batch named in the code, and scaled from there
matrix_lr = 0.02             # Muon, block matrices
embed_lr = 0.3               # AdamW, token and value embeddings
head_lr = 0.008              # AdamW, the head
scalar_lr = 0.04             # AdamW, per-layer lambdas
weight_decay = 0.1           # Muon matrices, cautious; less for long runs; falls to 0 linearly
polar_express = True         # Muon's coefficients: Polar Express, or Newton-Schulz
normuon = False              # Muon's update with its rows evened out
lr_scale = 0.0               # multiplies all rates; 0 = sqrt(batch / 2**19), at least 1
warmup_steps = 10            # steps of linear warm-up
warmdown_ratio = 0.6         # share of the steps in which the rates fall
final_lr = 0.05              # where they end, as a share
# text, evaluation, files
data_dir = ""                # folder with .parquet, .jsonl or .txt, or a hub dataset org/name; "" = the embedded text
val_dir = ""                 # text for validation, likewise, which is then not trained on; "" = some documents of data_dir
eval_every = 100             # steps between measurements of val bpb; 0 = only at the end
eval_tokens = 32768          # tokens of validation text per measurement
sample_every = 200           # steps between samples; 0 = never
save_every = 100             # steps between checkpoints; 0 = only at the end
device_type = "auto"         # auto, npu, cuda, mps, cpu
dtype = "auto"               # auto, bfloat16, float16, float32
compile = "auto"             # torch.compile: auto (where it helps), true, false
optimizer = "auto"           # of the matrices: muon, adamw, or auto = muon if this device can
activation_checkpointing = False  # compute each block twice instead of keeping what is in it: less memory, more time
timeout_min = 30             # minutes without a sign of life after which a rank reports where it hangs and ends; 0 = never
seed = 42                    # of initialisation and data order
run = ""                     # name of this run (under torchrun write --run_name); "" = d<depth>
out_dir = "out"              # where everything is written
resume = True                # continue this run's newest checkpoint; false = start over (an old run is kept aside)
debug_npu = False            # Ascend: exact stack traces, and slow (must stand on the command line)
plan = False                 # print what a run would take in memory and time, and end
plan_device = ""             # for which device, as 910B, A100 or cpu; "" = this machine's
plan_ranks = 0               # on how many of them; 0 = one
plan_vocab = 32768           # tokens of vocabulary
bench = 0                    # time so many steps and their parts, write nothing, end with one line of JSON
profile = 0                  # trace so many steps, the fourth and later, into out_dir/base/<run>/trace
config = configure(globals())

# --- SETUP -----------------------------------------------------------------------------------------------------------
dev = planned_device(plan_device, plan_ranks or 1, dtype) if plan else setup(device_type, dtype, seed)
run_dir = Path(out_dir) / "base" / (run or f"d{depth}")
started = find_resume(run_dir, config, resume) if not bench and not plan else None
tok = None if plan else find_tokenizer(out_dir, started)

# --- MODEL -----------------------------------------------------------------------------------------------------------
# (before DATA in this stage only: the horizon, and with it how much text is wanted, follows from the model)
width = model_dim or 64 * depth
head = head_dim or (64 if width <= 512 else 128)
if started:  # what was chosen stays, also on another kind of device
    max_seq_len, total_batch_size = started["model"]["max_seq_len"], started["batch"]
max_seq_len = max_seq_len or dev.first_choice[0]
if depth < 1 or width % head or head % 2:
    fail(f"depth {depth}, width {width}, head dimension {head}: depth must be positive, the head dimension even, and the width "
         "a multiple of it; set --depth, --model_dim or --head_dim")
heads = width // head
if n_kv_head and heads % n_kv_head:
    fail(f"--n_kv_head={n_kv_head} does not divide the {heads} heads")
if preset not in PRESETS:
    fail(f"--preset={preset} is not one of {', '.join(PRESETS)}")
fields = {f.name: f.default for f in dataclasses.fields(GPTConfig)}
ideas = PRESETS[preset] | {k: parse_knob(k, str(v), fields[k]) for k, v in config.items() if k in fields and v is not None}
vocab_size = plan_vocab if plan else tok.vocab_size
if preset == "nano" and depth < 8:  # few layers: no room for what pairs of tokens tell, no use for lambdas
    ideas = {"bigrams": min(2**17, 64 * vocab_size), "layer_lambdas": False} | ideas
ideas |= dict(vocab_size=vocab_size, max_seq_len=max_seq_len, n_layer=depth, n_embd=width,
              n_head=heads, n_kv_head=n_kv_head or heads)
if ideas.get("mlp", "swiglu") not in ("relu2", "swiglu"):
    fail(f"--mlp={mlp} is not one of relu2, swiglu")
if not (ideas.get("softcap", 0) <= 60 and 1 < ideas.get("rope_base", 2) < math.inf):
    fail(f"--softcap={softcap} --rope_base={rope_base}: softcap is at most 60 (0 turns it off), rope_base more than 1")
model = GPT.build(GPTConfig(**(started["model"] if started else ideas)), dev.device)
model.activation_checkpointing = activation_checkpointing
params, matmul_params = model.num_params()
flops_per_token = model.flops_per_token(max_seq_len)
auto(f"depth {depth}: width {width}, {heads} heads of {head}, {human(params)} parameters ({human(matmul_params)} in matmuls), "
     f"{human(flops_per_token)} FLOPs per token")

# --- HORIZON ---------------------------------------------------------------------------------------------------------
target_tokens = target_flops / flops_per_token if target_flops else target_param_data_ratio * matmul_params
if not total_batch_size:  # the best batch grows slowly with the number of tokens: 2**19 at d12 (1.3B tokens)
    best = 2 ** round(math.log2(2**19 * (target_tokens / 1.3e9) ** 0.383))
    total_batch_size = dev.first_choice[1] or max(2**14, best)
device_batch_size, step_rows, total_batch_size = split_batch(total_batch_size, max_seq_len, device_batch_size, dev,
                                                            rows_that_fit(model, dev))
num_steps = 2 * bench + 3 if bench else num_iterations or max(1, round(target_tokens / total_batch_size))
lr_scale = lr_scale or max(1.0, math.sqrt(total_batch_size / 2**19))
tokens = num_steps * total_batch_size
auto(f"{num_steps} steps, {human(tokens)} tokens, {tokens / matmul_params:.1f} per parameter in matmuls")

if plan:
    print_plan(model, dev, device_batch_size, total_batch_size, num_steps)
    sys.exit()

# --- DATA ------------------------------------------------------------------------------------------------------------
train_docs, val_docs = load_corpus(data_dir, out_dir, tok, dev, tokens, val_dir)
_, filled, _, cropped = describe_rows(train_docs[0], max_seq_len + 1, split=True)
auto(f"rows of {max_seq_len} tokens: {filled:.2%} filled, {cropped:.2%} of the tokens cropped (in the first shard)")
loader = RowLoader(lambda block, epoch: train_docs[block], len(train_docs), max_seq_len, step_rows, tok, dev,
                   split=True, seed=seed, state=started and started["loader"])
batches = iter(loader)

# --- OPTIMIZER -------------------------------------------------------------------------------------------------------
adam_scale = lr_scale * (width / 768) ** -0.5
rates = {"matrix_lr": matrix_lr * lr_scale, "embed_lr": embed_lr * adam_scale, "head_lr": head_lr * adam_scale,
         "scalar_lr": scalar_lr * lr_scale}
decay = weight_decay * min(1.0, math.sqrt(total_batch_size / 2**19) * 1.3e9 / tokens)  # so that it acts over a share of the run
opt = Muon(model.param_groups(**rates, weight_decay=decay, matrices=choose_optimizer(optimizer, dev),
                              polar_express=polar_express, normuon=normuon), dev)
auto("learning rates " + ", ".join(f"{k} {v:.2g}" for k, v in rates.items())
     + f" (scale {lr_scale:.3g}); weight decay {decay:.2g}; warm-up {warmup_steps} steps, warm-down {warmdown_ratio:.0%}")
step, metrics = begin(started, run_dir, num_steps, "val_bpb")
saved = step  # the step of the newest checkpoint
if started:
    model.load_state_dict(load_weights(started, "model.pt"))
    opt.load_state_dict(load_weights(started, "optim.pt"))


def lr_multiplier(step):
    """Warm-up, flat, then a straight line down."""
    warmdown = max(1, round(warmdown_ratio * num_steps))
    return min(1.0, (step + 1) / max(1, warmup_steps), final_lr + (1 - final_lr) * (num_steps - step) / warmdown)


def sample():
    """A few greedy continuations: what the model has picked up so far."""
    prompts = ["The import statement", "def __init__(self", "1 2 3 4 5 6"]
    ids = [[tok.bos, *tok.encode(p)][: max_seq_len - 1] for p in prompts]
    answers = complete(model, tok, ids, dev, temperature=0, max_new_tokens=24)
    for prompt, [(tokens, _)] in zip(prompts, answers):
        print0(f"   {prompt}|{tok.decode(tokens)}".replace("\n", "\\n"))


def forward_backward(rows, scored, size):
    """Over this rank's rows of the step, `size` at a time; the gradients add up in the parameters. -> the summed loss"""
    opt.zero_grad()
    loss_sum = torch.zeros((), device=dev.device)
    for inputs, targets in zip(*(part.split(size) for part in rows)):
        if len(inputs):  # a rank may have no row in a step
            dev.part("forward")
            inputs, targets = (t.to(dev.device, non_blocking=True) for t in (inputs, targets))
            with dev.autocast():
                loss = model(inputs, targets) / max(1, scored)  # nats: all parts just add up
            dev.part("backward")
            (loss * opt.loss_scale).backward()
            loss_sum += loss.detach()
    return loss_sum


# --- LOOP ------------------------------------------------------------------------------------------------------------
log = Log(run_dir, "base", num_steps, metrics["seconds"], step) if not bench else None
peak, times, peaks = dev.peak_flops(), [], []
choose_compile(model, compile, dev, 0 if bench or not peak else 2 * flops_per_token * tokens / (peak * dev.world_size))
steps = Steps(device_batch_size, model, dev, timeout_min)
first_traced = step + 3  # the first steps warm up
profiler = dev.profiler(run_dir / "trace") if profile and not bench else None
while True:
    last = step == num_steps
    due = last or steps.stopping or (save_every and step % save_every == 0)
    if not bench and step and due and step != saved:
        metrics["seconds"], saved = log.seconds, step
        save_checkpoint(run_dir, step, model, opt, {
            "stage": "base", "config": config, "model": model_meta(model), "tokenizer": tok.hash, "text": data_dir,
            "val_text": val_dir, "parent": "", "rates": rates, "batch": total_batch_size, "loader": loader.state,
            "metrics": metrics, "steps": num_steps, "flops": flops_per_token * metrics["tokens"], "hardware": dev.hardware}, dev,
            must=last or steps.stopping)
    if steps.stopping and not last:
        steps.leave(step)
    if not bench and (last or (eval_every and step % eval_every == 0)):
        metrics["val_bpb"], by_source = evaluate_bpb(model, val_docs, tok, dev, max_seq_len, steps.rows, eval_tokens)
        log.measure(step, val_bpb=metrics["val_bpb"], val_bpb_by_source=by_source or None)
        log.line(step, [f"val bpb {metrics['val_bpb']:.4f}", *(f"{name} {bpb:.3f}" for name, bpb in list(by_source.items())[:4])])
    if not bench and sample_every and (last or step % sample_every == 0) and step:
        sample()
    if last:
        break
    if bench and step >= 3:
        peaks.append(matmul_flops(dev.device, dev.dtype, seconds=0.2))
        if step == 3 + bench:
            dev.parts = {}
    if profiler and step == first_traced:
        profiler.start()

    t0 = time.time()
    dev.part("data")
    multiplier = lr_multiplier(step)
    for group in opt.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
        if group["label"] == "matrix":
            group["momentum"] = 0.85 + 0.1 * min(1, step / 300)
            group["weight_decay"] = decay * (1 - step / num_steps)
    rows = next(batches)  # this rank's share of the step: inputs and targets, (R, T) each
    scored = dev.sum(int((rows[1] >= 0).sum()))  # tokens, over all ranks
    loss_sum = steps.run(lambda size: forward_backward(rows, scored, size))
    dev.part("optimizer")
    opt.measure = not bench and step % 10 == 0
    grad_norm, train_loss = opt.step(loss_sum)  # waits for the device; what follows runs beside its last updates
    dev.part("rest")
    dt = time.time() - t0
    step += 1
    steps.check(step, grad_norm, opt, metrics, f"lower the learning rates with --lr_scale={lr_scale / 2:.3g}")
    metrics["tokens"] += total_batch_size
    times = (times + [dt])[-max(50, 2 * bench + 3) :]
    typical = statistics.median(times[-50:])
    tok_per_s = total_batch_size / typical
    mfu = flops_per_token * tok_per_s / (peak * dev.world_size) if peak else None
    if profiler and step > first_traced and (step == first_traced + profile or step == num_steps):
        profiler.stop()
        auto(f"trace of {step - first_traced} steps in {run_dir}/trace; chrome://tracing or ui.perfetto.dev shows it")
        profiler = None
    if not bench:
        log.write(step, loss=train_loss, lr=multiplier, grad_norm=grad_norm, **{k: round(v, 5) for k, v in opt.norms.items()},
                  tok_per_s=round(total_batch_size / dt), mfu=mfu, tokens=metrics["tokens"], skipped=metrics.get("skipped"))
    if log and (step % 10 == 0 or step <= 3):
        log.line(step, [f"loss {train_loss:.4f}", *([f"bpb {metrics['val_bpb']:.3f}"] if "val_bpb" in metrics else []),
                        f"lr {multiplier:.2f}", f"{1000 * dt:.0f} ms", f"{human(tok_per_s)} tok/s",
                        f"mfu {100 * mfu:.0f}%" if mfu else "mfu ?", f"{dev.peak_memory_gb():.1f}G",
                        f"eta {duration((num_steps - step) * typical)}"])

# --- END -------------------------------------------------------------------------------------------------------------
if bench:
    typical, measured = statistics.median(times[3 : 3 + bench]), statistics.median(peaks)  # the first steps warm up
    speed = flops_per_token * total_batch_size / typical / dev.world_size  # FLOP/s of one device
    sheet = peak and dev.type != "cpu"
    print0(json.dumps({
        "tok_per_s": round(total_batch_size / typical), "mfu": round(speed / measured, 4),
        "mfu_of_data_sheet": round(speed / peak, 4) if sheet else None, "matmul_peak_tflops": round(measured / 1e12, 4),
        "peak_gb": round(dev.peak_memory_gb(), 2), "step_ms": round(1000 * typical, 1),
        "ms": {k: round(1000 * v / bench, 1) for k, v in dev.parts.items() if k not in ("", "rest")}, "hardware": dev.hardware}))
elif dev.is_main:
    write_report(out_dir)
    print0(f"base model: val bpb {metrics['val_bpb']:.4f} after {human(metrics['tokens'])} tokens in {duration(log.seconds)}; "
           f"checkpoint in {run_dir}/step_{step:06d}\nnext: {command('train_mid.py', out_dir)}")
cleanup()

"""
Mid-training: the base model meets conversations, and learns their form and their tools. Every token counts.

    python train_mid.py                                                       # one device: NPU, CUDA, MPS or CPU
    torchrun --standalone --nproc_per_node=8 train_mid.py                     # all devices of one machine
    python train_mid.py --num_iterations=20 --total_batch_size=2048 --out_dir=/tmp/smoke      # CPU smoke run, after train_base.py's

Reads the newest base checkpoint in out_dir, the tasks, and some of the base model's text.
Writes out_dir/mid/<run>/step_<N>/ (model.pt, optim.pt, meta.json) and log.jsonl; train_sft.py goes on from there.
"""
from common import (Log, Steps, auto, begin, choose_compile, cleanup, command, configure, duration, fail, find_checkpoint,
                    find_resume, human, load_weights, print0, save_checkpoint, setup, split_batch)

import json
import math
import time
from pathlib import Path

import torch

from eval import chat_core, evaluate_bpb, evaluate_chat, gradable, make_mixture, make_tasks, score_fields, write_report
from gpt import load_model, model_meta, rows_that_fit
from muon import Muon, choose_optimizer
from tokenizer import RowLoader, conversation_blocks, describe_rows, find_tokenizer, load_corpus

# --- CONFIG ----------------------------------------------------------------------------------------------------------
init_from = ""               # "" = the newest base checkpoint; or a stage, stage/tag, or a checkpoint folder
# data
tasks = "all"                # by commas: "all" = the rule-made ones, names, hub datasets org/name, files .jsonl; gsm8k*4 = four
                             # times each conversation, smoltalk:10000 = so many
conversations = 0            # in one epoch, in the proportions of the tasks; 0 = all of them
text_share = 0.15            # share of raw text among the tokens, so that the model does not forget how to write
data_dir = "same"            # where that text is; "same" = what the base model was trained on
# horizon and batch
num_iterations = 0           # optimizer steps; 0 = one epoch
total_batch_size = 0         # tokens per optimizer step over all devices; 0 = as the checkpoint it starts from
device_batch_size = 0        # rows per device per forward; 0 = choose for me
# learning
lr_frac = 1.0                # share of the learning rates of the stage it starts from
warmup_steps = 10            # steps of linear warm-up
warmdown_ratio = 0.5         # share of the steps in which the rates fall
final_lr = 0.0               # where they end, as a share
# evaluation, files
eval_every = 0               # steps between evaluations on text and tasks; 0 = only at the end
eval_tasks = "same"          # which tasks; "same" = those of `tasks` that have a test
eval_problems = 50           # problems per task
eval_tokens = 32768          # tokens of validation text for bits per byte
save_every = 100             # steps between checkpoints; 0 = only at the end
device_type = "auto"         # auto, npu, cuda, mps, cpu
dtype = "auto"               # auto, bfloat16, float16, float32
compile = "auto"             # torch.compile: auto (where it helps), true, false
optimizer = "auto"           # of the matrices: muon, adamw, or auto = muon if this device can
activation_checkpointing = False  # compute each block twice instead of keeping what is in it: less memory, more time
timeout_min = 30             # minutes without a sign of life after which a rank reports where it hangs and ends; 0 = never
seed = 42                    # of data order
run = ""                     # name of this run (under torchrun write --run_name); "" = that of the run it starts from
out_dir = "out"              # where everything is written
resume = True                # continue this run's newest checkpoint; false = start over (an old run is kept aside)
debug_npu = False            # Ascend: exact stack traces, and slow (must stand on the command line)
bench = 0                    # time so many steps, write nothing, end with one line of JSON
config = configure(globals())

# --- SETUP -----------------------------------------------------------------------------------------------------------
dev = setup(device_type, dtype, seed)
parent = find_checkpoint(out_dir, init_from or "base")
run_dir = Path(out_dir) / "mid" / (run or Path(parent["path"]).parent.name)
started = find_resume(run_dir, config, resume, parent["seal"]) if not bench else None
tok = find_tokenizer(out_dir, parent)
auto(f"starting from {parent['path']}")

# --- DATA ------------------------------------------------------------------------------------------------------------
T = parent["model"]["max_seq_len"]
mixture = make_mixture(tasks, conversations, out_dir, dev, seed)
test_tasks = make_tasks(gradable(tasks) if eval_tasks == "same" else eval_tasks, "test", out_dir, dev, eval_problems)
if not text_share < 1:
    fail(f"--text_share={text_share} must be less than 1")
text = parent["text"] if data_dir == "same" else data_dir
val_text = parent.get("val_text", "") if data_dir == "same" else ""
text_docs, val_docs = load_corpus(text, out_dir, tok, dev, 1, val_text)  # the first shard will do
blocks, n_blocks, epoch = conversation_blocks(mixture, tok, out_dir, dev, T + 1, every_token=True, text=text_docs[0],
                                              text_share=text_share)  # epoch: tokens
_, filled, supervised, _ = describe_rows(blocks(0, 0), T + 1, split=False)
auto(f"data: {human(len(mixture))} conversations, {text_share:.0%} text, "
     f"{human(epoch)} tokens; rows {filled:.1%} filled, {supervised:.1%} of the positions supervised")

# --- MODEL AND OPTIMIZER -----------------------------------------------------------------------------------------------
model = load_model(parent, load_weights(started or parent, "model.pt"), dev)
model.activation_checkpointing = activation_checkpointing
wanted = total_batch_size or parent["batch"]
device_batch_size, step_rows, total_batch_size = split_batch(wanted, T, device_batch_size, dev, rows_that_fit(model, dev))
rates = {k: v * lr_frac * math.sqrt(total_batch_size / parent["batch"]) for k, v in parent["rates"].items()}
opt = Muon(model.param_groups(**rates, matrices=choose_optimizer(optimizer, dev)), dev)
opt.load_state_dict(load_weights(started or parent, "optim.pt"))  # the momenta go on too
auto("learning rates " + ", ".join(f"{k} {v:.2g}" for k, v in rates.items()))

# --- HORIZON ---------------------------------------------------------------------------------------------------------
num_steps = bench + 3 if bench else num_iterations or max(1, round(epoch / filled / total_batch_size))
auto(f"{num_steps} steps, {human(num_steps * total_batch_size)} tokens, {num_steps * total_batch_size * filled / epoch:.2f} epochs")
loader = RowLoader(blocks, n_blocks, T, step_rows, tok, dev, split=False, seed=seed, state=started and started["loader"])
batches = iter(loader)
step, metrics = begin(started, run_dir, num_steps, "val_bpb")
saved = step  # the step of the newest checkpoint


def lr_multiplier(step):
    """Warm-up, flat, then a straight line down."""
    warmdown = max(1, round(warmdown_ratio * num_steps))
    return min(1.0, (step + 1) / max(1, warmup_steps), final_lr + (1 - final_lr) * (num_steps - step) / warmdown)


def forward_backward(rows, scored, size):
    """Over this rank's rows of the step, `size` at a time; the gradients add up in the parameters. -> the summed loss"""
    opt.zero_grad()
    loss_sum = torch.zeros((), device=dev.device)
    for inputs, targets in zip(*(part.split(size) for part in rows)):
        if len(inputs):  # a rank may have no row in a step
            inputs, targets = (t.to(dev.device, non_blocking=True) for t in (inputs, targets))
            with dev.autocast():
                loss = model(inputs, targets) / max(1, scored)  # nats: all parts just add up
            (loss * opt.loss_scale).backward()
            loss_sum += loss.detach()
    return loss_sum


# --- LOOP ------------------------------------------------------------------------------------------------------------
log = Log(run_dir, "mid", num_steps, metrics["seconds"], step) if not bench else None
choose_compile(model, compile, dev)
steps = Steps(device_batch_size, model, dev, timeout_min)
times = []
while True:
    last = step == num_steps
    due = last or steps.stopping or (save_every and step % save_every == 0)
    if not bench and step and due and step != saved:
        metrics["seconds"], saved = log.seconds, step
        save_checkpoint(run_dir, step, model, opt, {
            "stage": "mid", "config": config, "model": model_meta(model), "tokenizer": tok.hash, "text": text,
            "val_text": val_text, "parent": parent["seal"], "rates": rates, "batch": total_batch_size, "loader": loader.state,
            "metrics": metrics, "hardware": dev.hardware}, dev, must=last or steps.stopping)
    if steps.stopping and not last:
        steps.leave(step)
    if not bench and (last or (eval_every and step % eval_every == 0)):
        scores = evaluate_chat(model, tok, dev, test_tasks, limit=eval_problems)
        val_bpb, by_source = evaluate_bpb(model, val_docs, tok, dev, T, steps.rows, eval_tokens)
        log.measure(step, val_bpb=val_bpb, val_bpb_by_source=by_source or None, tasks={n: r["acc"] for n, r in scores.items()},
                    chat_core=chat_core(scores))
        log.line(step, [f"val bpb {val_bpb:.4f}", *score_fields(scores)])
    if last:
        break

    t0 = time.time()
    multiplier = lr_multiplier(step)
    for group in opt.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
    rows = next(batches)  # this rank's share of the step: inputs and targets, (R, T) each
    scored = dev.sum(int((rows[1] >= 0).sum()))  # tokens, over all ranks
    loss_sum = steps.run(lambda size: forward_backward(rows, scored, size))
    grad_norm, train_loss = opt.step(loss_sum)
    dt = time.time() - t0
    step += 1
    steps.check(step, grad_norm, opt, metrics, f"lower the learning rates with --lr_frac={lr_frac / 2:.3g}")
    metrics["tokens"] += total_batch_size
    times = (times + [dt])[-50:]
    typical = sorted(times)[len(times) // 2]
    if not bench:
        log.write(step, loss=train_loss, lr=multiplier, grad_norm=grad_norm, tok_per_s=round(total_batch_size / dt),
                  tokens=metrics["tokens"], skipped=metrics.get("skipped"))
    if log and (step % 10 == 0 or step <= 3):
        log.line(step, [f"loss {train_loss:.4f}", f"lr {multiplier:.2f}", f"{1000 * dt:.0f} ms",
                        f"{human(total_batch_size / typical)} tok/s", f"{dev.peak_memory_gb():.1f}G",
                        f"eta {duration((num_steps - step) * typical)}"])

# --- END -------------------------------------------------------------------------------------------------------------
if bench:
    typical = sorted(times[3:])[len(times[3:]) // 2]
    print0(json.dumps({"tok_per_s": round(total_batch_size / typical), "ms_per_step": round(1000 * typical, 1),
                       "peak_gb": round(dev.peak_memory_gb(), 2), "hardware": dev.hardware}))
elif dev.is_main:
    write_report(out_dir)
    print0(f"mid-trained on {human(metrics['tokens'])} tokens in {duration(log.seconds)}; "
           f"checkpoint in {run_dir}/step_{step:06d}\nnext: {command('train_sft.py', out_dir)}")
cleanup()

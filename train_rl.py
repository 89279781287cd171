"""
Reinforcement learning from verifiable rewards: the model tries, a grader says right or wrong, right tries become likelier.

    python train_rl.py                                                        # one device: NPU, CUDA, MPS or CPU
    torchrun --standalone --nproc_per_node=8 train_rl.py --task=gsm8k         # all devices of one machine
    python train_rl.py --num_iterations=2 --prompts_per_step=4 --num_samples=4 --out_dir=/tmp/smoke      # CPU smoke run

This is GRPO (Shao et al. 2024) kept strictly on-policy, one update per batch of rollouts, so that no ratio, clipping or
reference model is needed. For each prompt, G answers are sampled; an answer's advantage is its reward minus the mean of its
group; the loss is -advantage * log p of each sampled token, summed over the step and divided by its number of sampled tokens
(the token mean of DAPO, Yu et al. 2025; no division by the group's standard deviation, as in Dr. GRPO, Liu et al. 2025).

Reads the newest SFT checkpoint in out_dir and a task.
Writes out_dir/rl/<run>/step_<N>/ (model.pt, optim.pt, meta.json) and log.jsonl; chat.py talks to it.
"""
from common import (Log, Steps, auto, begin, choose_compile, cleanup, command, configure, duration, fail, find_checkpoint,
                    find_resume, human, in_batches, load_weights, print0, save_checkpoint, setup)

import json
import random
import time
from pathlib import Path

import torch

from eval import TASKS, evaluate_task, make_tasks, visible_text, write_report
from gpt import complete, load_model, model_meta, rows_that_fit
from muon import Muon, choose_optimizer
from tokenizer import find_tokenizer

# --- CONFIG ----------------------------------------------------------------------------------------------------------
init_from = ""               # "" = the newest sft checkpoint; or a stage, stage/tag, or a checkpoint folder
# rollouts
task = "arithmetic"          # whose training problems are tried and graded
prompts_per_step = 16        # problems per step over all devices
num_samples = 8              # tries per problem: the group
max_new_tokens = 48          # tokens of one try; one that has not ended by then earns nothing
temperature = 1.0            # of the sampling; 1 is the model's own distribution
top_k = 0                    # 0 = all tokens
# horizon and batch
num_iterations = 60          # optimizer steps, each on fresh rollouts
device_batch_size = 0        # tries per device, sampled (whole groups) or trained on at a time; 0 = choose for me
# learning
lr_frac = 0.1                # share of the learning rates of the stage it starts from
warmup_steps = 3             # steps of linear warm-up
final_lr = 0.1               # where the rates end, falling in a straight line, as a share
# evaluation, files
eval_every = 20              # steps between greedy evaluations on the test set; 0 = only at the start and end
eval_problems = 100          # test problems
sample_every = 20            # steps between printed tries; 0 = never
save_every = 20              # steps between checkpoints; 0 = only at the end
device_type = "auto"         # auto, npu, cuda, mps, cpu
dtype = "auto"               # auto, bfloat16, float16, float32
compile = "false"            # torch.compile: auto, true, false; here every step has other lengths, each compiled anew
optimizer = "auto"           # of the matrices: muon, adamw, or auto = muon if this device can
activation_checkpointing = False  # compute each block twice instead of keeping what is in it: less memory, more time
timeout_min = 30             # minutes without a sign of life after which a rank reports where it hangs and ends; 0 = never
seed = 42                    # of problem order and sampling
run = ""                     # name of this run (under torchrun write --run_name); "" = that of the run it starts from
out_dir = "out"              # where everything is written
resume = True                # continue this run's newest checkpoint; false = start over (an old run is kept aside)
debug_npu = False            # Ascend: exact stack traces, and slow (must stand on the command line)
bench = 0                    # time so many steps, write nothing, end with one line of JSON
config = configure(globals())

if task not in TASKS:
    fail(f"--task={task} is not one of {', '.join(TASKS)}")
if prompts_per_step < 1 or num_iterations < 1:
    fail("--prompts_per_step and --num_iterations must be at least 1")
if num_samples < 2:
    fail("--num_samples must be at least 2: a try is judged against the others of its group")

# --- SETUP -----------------------------------------------------------------------------------------------------------
dev = setup(device_type, dtype, seed)
parent = find_checkpoint(out_dir, init_from or "sft")
run_dir = Path(out_dir) / "rl" / (run or Path(parent["path"]).parent.name)
started = find_resume(run_dir, config, resume, parent["seal"]) if not bench else None
tok = find_tokenizer(out_dir, parent)
auto(f"starting from {parent['path']}")

# --- DATA ------------------------------------------------------------------------------------------------------------
[problems], [test_problems] = make_tasks(task, "train", out_dir, dev), make_tasks(task, "test", out_dir, dev, eval_problems)
T = parent["model"]["max_seq_len"]
room = T - max_new_tokens // 2  # for the prompt, so that at least half of the longest answer fits behind it
chosen = [i for i in range(len(problems)) if len(tok.render_for_completion(problems[i])) <= room]
random.Random(seed).shuffle(chosen)
if not chosen:
    fail(f"no prompt of {task} leaves room for an answer in {T} tokens: use another --task, or train with a longer --max_seq_len")
auto(f"data {task}: {human(len(chosen))} problems ({len(problems) - len(chosen)} too long for {T} tokens left out), "
     f"{prompts_per_step} a step with {num_samples} tries each")

# --- MODEL AND OPTIMIZER -----------------------------------------------------------------------------------------------
model = load_model(parent, load_weights(started or parent, "model.pt"), dev)
model.activation_checkpointing = activation_checkpointing
rates = {k: v * lr_frac for k, v in parent["rates"].items()}
opt = Muon(model.param_groups(**rates, matrices=choose_optimizer(optimizer, dev)), dev)
if started:  # the momenta of supervised learning point elsewhere: RL begins with fresh ones
    opt.load_state_dict(load_weights(started, "optim.pt"))
auto("learning rates " + ", ".join(f"{k} {v:.2g}" for k, v in rates.items()))

# --- HORIZON ---------------------------------------------------------------------------------------------------------
num_steps = bench + 1 if bench else num_iterations
auto(f"{num_steps} steps, {num_steps * prompts_per_step} prompts, {num_steps * prompts_per_step / len(chosen):.2f} epochs")
step, metrics = begin(started, run_dir, num_steps, "test_acc")
saved = step  # the step of the newest checkpoint


def lr_multiplier(step):
    """Warm-up, then a straight line down."""
    return min((step + 1) / max(1, warmup_steps), final_lr + (1 - final_lr) * (num_steps - step) / num_steps)


def rollouts(step):
    """This rank's tries at the step's problems. -> list of groups: {"prompt", "tries", "rewards", "ended"}"""
    mine = range(step * prompts_per_step, (step + 1) * prompts_per_step)[dev.rank :: dev.world_size]

    def sample(batch):  # of (number, prompt); each has a random stream of its own, the same on any number of ranks
        return complete(model, tok, [prompt for _, prompt in batch], dev, num_samples=num_samples, max_new_tokens=max_new_tokens,
                        temperature=temperature, top_k=top_k, seed=[[seed, i] for i, _ in batch])

    groups, at_once = [], max(1, device_batch_size // num_samples) if device_batch_size else prompts_per_step
    numbered = [(i, tok.render_for_completion(problems[chosen[i % len(chosen)]])) for i in mine]
    for batch, tries in in_batches(numbered, at_once, sample, dev):
        for (i, prompt), group in zip(batch, tries):
            ended = [tokens[-1] == tok.assistant_end for tokens, _ in group]
            rewards = [problems.grade(problems[chosen[i % len(chosen)]], visible_text(tok, tokens)) * end
                       for (tokens, _), end in zip(group, ended)]
            groups.append({"prompt": prompt, "tries": group, "rewards": rewards, "ended": ended})
    return groups


def training_rows(groups):
    """The tries that teach something, as (ids, sampled, advantage), longest first. A group in which all tries earned the same
    has advantage 0 everywhere: it is left out before the forward pass, not multiplied by zero after it.

    Rewards 1, 0, 0, 1 have mean 0.5: advantages +0.5, -0.5, -0.5, +0.5. Rewards 1, 1, 1, 1 teach nothing."""
    rows = []
    for g in groups:
        mean = sum(g["rewards"]) / len(g["rewards"])
        if max(g["rewards"]) > min(g["rewards"]):
            for (tokens, mask), reward in zip(g["tries"], g["rewards"]):
                rows.append((g["prompt"] + tokens, [0] * len(g["prompt"]) + mask, reward - mean))
    return sorted(rows, key=lambda row: -len(row[0]))


def pad(rows):
    """-> inputs (B, T), targets (B, T) with -1 where a token was not sampled by the model, advantages (B, 1)"""
    longest = len(rows[0][0])
    ids = torch.tensor([r[0] + [tok.bos] * (longest - len(r[0])) for r in rows], device=dev.device)
    mask = torch.tensor([r[1] + [0] * (longest - len(r[1])) for r in rows], device=dev.device)
    return ids[:, :-1], ids[:, 1:].masked_fill(mask[:, 1:] == 0, -1), torch.tensor([[r[2]] for r in rows], device=dev.device)


def forward_backward(rows, sampled, size):
    """The policy gradient over this rank's tries, `size` at a time. -> the summed loss"""
    opt.zero_grad()
    loss_sum = torch.zeros((), device=dev.device)
    for at in range(0, len(rows), size):
        inputs, targets, advantages = pad(rows[at : at + size])
        with dev.autocast():
            loss = model(inputs, targets, advantages) / sampled  # sum of advantage * -log p over the sampled tokens
        (loss * opt.loss_scale).backward()
        loss_sum += loss.detach()
    return loss_sum


# --- LOOP ------------------------------------------------------------------------------------------------------------
log = Log(run_dir, "rl", num_steps, metrics["seconds"], step) if not bench else None
choose_compile(model, compile, dev)
most = -(-prompts_per_step // dev.world_size) * num_samples  # tries of the rank that has most
steps = Steps(min(device_batch_size or 64, most, rows_that_fit(model, dev)), model, dev, timeout_min)
sample_s, train_s, tokens_done, times = 0.0, 0.0, 0, []
while True:
    last = step == num_steps
    due = last or steps.stopping or (save_every and step % save_every == 0)
    if not bench and step and due and step != saved:
        metrics["seconds"], saved = log.seconds, step
        save_checkpoint(run_dir, step, model, opt, {
            "stage": "rl", "config": config, "model": model_meta(model), "tokenizer": tok.hash, "text": parent["text"],
            "val_text": parent.get("val_text", ""),
            "parent": parent["seal"], "rates": rates, "batch": parent["batch"], "metrics": metrics,
            "hardware": dev.hardware}, dev, must=last or steps.stopping)
    if steps.stopping and not last:
        steps.leave(step)
    if not bench and (last or step == 0 or (eval_every and step % eval_every == 0)):
        metrics["test_acc"] = evaluate_task(model, tok, dev, test_problems, eval_problems, max_new_tokens=max_new_tokens)["acc"]
        log.measure(step, test_acc=metrics["test_acc"])
        log.line(step, [f"greedy accuracy on the {task} test set {100 * metrics['test_acc']:.1f}%"])
    if last:
        break

    t0 = time.time()
    groups = rollouts(step)
    dev.synchronize()
    t1 = time.time()
    sampled = dev.sum(sum(sum(mask) for g in groups for _, mask in g["tries"]))  # tokens, all ranks: also of groups left out
    counts = [len(groups),
              sum(max(g["rewards"]) > 0 for g in groups),
              sum(max(g["rewards"]) == min(g["rewards"]) for g in groups),
              sum(sum(g["rewards"]) for g in groups),
              sum(len(tokens) for g in groups for tokens, _ in g["tries"]),
              sum(not end for g in groups for end in g["ended"])]
    n_groups, n_solved, n_flat, total_reward, new_tokens, n_cut = dev.sum(counts)  # over all ranks
    n_tries = n_groups * num_samples
    solved, flat = n_solved / n_groups, n_flat / n_groups  # one right try at least; all tries alike
    reward, length, truncated = total_reward / n_tries, new_tokens / n_tries, n_cut / n_tries

    if sample_every and step % sample_every == 0 and groups:
        text = tok.decode(groups[0]["prompt"] + groups[0]["tries"][0][0])
        print0("   " + text.replace("\n", "\\n") + f"  -> reward {groups[0]['rewards'][0]:g}")
    multiplier = lr_multiplier(step)
    for group in opt.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
    rows = training_rows(groups)
    loss_sum = steps.run(lambda size: forward_backward(rows, sampled, size))
    if flat < 1:  # all ranks know the same number
        grad_norm, loss = opt.step(loss_sum)
    else:
        grad_norm, loss = 0.0, 0.0  # every group all right or all wrong: nothing to learn
    dev.synchronize()
    step += 1
    dt = time.time() - t0
    steps.check(step, grad_norm, opt, metrics, f"lower the learning rates with --lr_frac={lr_frac / 2:.3g}")
    times = (times + [dt])[-50:]
    sample_s, train_s, tokens_done = sample_s + t1 - t0, train_s + dt - (t1 - t0), tokens_done + new_tokens
    metrics["tokens"] += int(new_tokens)
    tok_per_s = new_tokens / max(t1 - t0, 1e-9)
    eta = (num_steps - step) * sorted(times)[len(times) // 2]
    if not bench:
        log.write(step, loss=loss, reward=reward, solved=solved, flat_groups=flat, truncated=truncated, length=length,
                  grad_norm=grad_norm, lr=multiplier, tok_per_s=round(tok_per_s), sample_s=round(t1 - t0, 3),
                  train_s=round(dt - (t1 - t0), 3), tokens=metrics["tokens"], skipped=metrics.get("skipped"))
    if log and (step % 5 == 0 or step <= 3):
        log.line(step, [f"reward {reward:.3f}", f"solved {solved:.2f}", f"flat {flat:.2f}", f"cut {truncated:.2f}",
                        f"len {length:4.1f}", f"lr {multiplier:.2f}", f"{1000 * dt:.0f} ms", f"{human(tok_per_s)} tok/s",
                        f"{dev.peak_memory_gb():.1f}G", f"eta {duration(eta)}"])

# --- END -------------------------------------------------------------------------------------------------------------
if bench:
    print0(json.dumps({"tok_per_s": round(tokens_done / sample_s), "sample_s": round(sample_s / num_steps, 3),
                       "train_s": round(train_s / num_steps, 3), "peak_gb": round(dev.peak_memory_gb(), 2),
                       "hardware": dev.hardware}))
elif dev.is_main:
    write_report(out_dir)
    print0(f"RL: greedy accuracy on {task} {100 * metrics['test_acc']:.1f}% after {num_steps} steps in {duration(log.seconds)}; "
           f"checkpoint in {run_dir}/step_{step:06d}\nnext: {command('eval.py', out_dir)}")
cleanup()

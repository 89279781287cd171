"""
What are the tasks, and how good is a model on them?

A task is a sequence of conversations with a way to grade an answer. The rule-made ones here come from a seed and need no
file: arithmetic, spelling, counting, multiple choice and identity, in English and Chinese. GSM8K, MMLU and ARC are read
from the hub. Training and evaluation, supervised learning and reward all use the same objects.

    python eval.py                              # every stage found in out/, then the report and the curves
    python eval.py --source=sft                 # one stage (or stage/tag, or a checkpoint folder)
    python eval.py --tasks=arithmetic,gsm8k     # some tasks
    python eval.py --compare=1                  # what helps in pretraining: all base runs of out_dir, side by side
    python eval.py --max_problems=20 --eval_tokens=4096 --out_dir=/tmp/smoke          # smoke run

Reads checkpoints; writes out/<stage>/<tag>/eval.json, out/report.md and out/curves.png. The last line is one JSON object.
"""
from common import (FREE_KNOBS, STAGES, auto, cleanup, configure, decided_by_main, duration, fail, find_checkpoint, hub_fetch,
                    hub_files, human, in_batches, load_weights, need, newest_checkpoint, print0, progress, read_log,
                    run_folders, setup, warn, write_atomic)

import hashlib
import json
import math
import platform
import random
import re
import statistics
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from gpt import complete, load_model
from tokenizer import fill_row, find_tokenizer, help_topics, load_corpus, pack_rows

# --- CONFIG ----------------------------------------------------------------------------------------------------------
source = "all"           # "all", a stage (base, mid, sft, rl), stage/tag, or a checkpoint folder
tasks = "all"            # names by commas; "all" = the rule-made arithmetic, spelling, counting, choice, identity
max_problems = 200       # problems per task
max_new_tokens = 64      # tokens per generated answer (gsm8k: 4 times as many)
eval_tokens = 32768      # tokens of validation text for bits per byte
data_dir = "same"        # text for bits per byte: "same" = what the base model was trained on
device_batch_size = 0    # problems side by side; 0 = choose for me
device_type = "auto"     # auto, npu, cuda, mps, cpu
dtype = "auto"           # auto, bfloat16, float16, float32
debug_npu = False        # Ascend: exact stack traces, and slow (must stand on the command line)
out_dir = "out"          # where checkpoints and the report are
resume = True            # false: evaluate again what has been evaluated
compare = False          # instead: a table and a picture of all base runs, by the knobs in which they differ


# ---------------------------------------------------------------------------------------------------------------------
# Tasks. Each has: name, kind ("generative" or "categorical"), baseline (accuracy of a guess), len(), task[i] -> conversation,
# and grade(conversation, answer) -> 0.0 to 1.0. The answer is what a reader sees: tool calls are not part of it.
# ---------------------------------------------------------------------------------------------------------------------
def user_says(question, *parts, **facts):
    """A conversation of one question and one answer. A part is text, or ("python", expression, result) for a tool call."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            content += [{"type": "python", "text": part[1]}, {"type": "python_output", "text": part[2]}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": content}], **facts}


def last_number(text):
    """The last number in a text as a float, or None: '... is 1,234.' -> 1234.0"""
    found = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text))
    return float(found[-1]) if found else None


class RuleTask:
    """Problems made by rule: problem i is a function of (name, split, i). A hash of what is asked decides whether a problem
    belongs to the test set (one in five) or the training set, so the two cannot overlap whatever the seeds."""
    kind, baseline = "generative", 0.0

    def __init__(self, split="train", size=10_000):
        assert split in ("train", "test"), split
        self.split, self.size = split, size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        for attempt in range(1000):
            rng = random.Random(f"{self.name} {self.split} {i} {attempt}")
            key, conversation = self.make(rng)
            if (hashlib.blake2b(f"{self.name} {key}".encode(), digest_size=8).digest()[0] % 5 == 0) == (self.split == "test"):
                return conversation
        raise AssertionError(f"{self.name} finds no {self.split} problem {i}")


class Arithmetic(RuleTask):
    """Sums, differences and products, bare and in words. Most training answers use the calculator; a share of them, as in
    people's writing, come straight from the head. Which of the two pays is for reinforcement learning to find out."""
    name = "arithmetic"
    FORMS = {"+": ["What is {a} + {b}?", "{a}+{b}=?", "Calculate {a} + {b}.", "{a}加{b}等于多少？",
                   "Tom has {a} apples and buys {b} more. How many apples does he have now?",
                   "小明有{a}本书，又买了{b}本，一共有几本？"],
             "-": ["What is {a} - {b}?", "{a}-{b}=?", "Calculate {a} - {b}.", "{a}减{b}等于多少？",
                   "Anna has {a} coins and spends {b}. How many coins are left?",
                   "树上有{a}只鸟，飞走{b}只，还剩几只？"],
             "*": ["What is {a} * {b}?", "{a}*{b}=?", "Calculate {a} * {b}.", "{a}乘{b}等于多少？",
                   "There are {a} boxes with {b} pens each. How many pens are there?",
                   "有{a}个盘子，每个盘子{b}个梨，一共有几个梨？"]}

    def __init__(self, split="train", size=10_000, mental=0.7):
        super().__init__(split, size)
        self.mental = mental  # share of answers without the calculator

    def make(self, rng):
        op = rng.choice("+-*")
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        if op == "-" and b > a:
            a, b = b, a
        form = rng.choice(self.FORMS[op])
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        say = f"The answer is {result}." if form.isascii() else f"答案是{result}。"
        tool = [] if rng.random() < self.mental else [("python", f"{a}{op}{b}", str(result))]
        return f"{a}{op}{b}", user_says(form.format(a=a, b=b), *tool, say, answer=result)

    def grade(self, conversation, answer):
        return float(last_number(answer) == conversation["answer"])


@lru_cache
def word_list():
    """Lower-case English words of 3 to 6 letters: those of Python's own help texts, which every installation has."""
    words = set(re.findall(r"\b[a-z]{3,6}\b", " ".join(help_topics().values()))) or {"apple", "stone", "river", "cloud", "green"}
    return sorted(w for w in words if set(w) & set("aeiouy") and len(set(w)) > 1)


class Spelling(RuleTask):
    """Spell a word, letter by letter."""
    name = "spelling"
    FORMS = ["Spell the word '{w}'.", "How do you spell '{w}'?", "拼写单词'{w}'。"]

    def make(self, rng):
        w = rng.choice(word_list())
        return w, user_says(rng.choice(self.FORMS).format(w=w), " ".join(w), answer=w)

    def grade(self, conversation, answer):
        return float(re.findall(r"[^\s,.-]+", answer) == list(conversation["answer"]))  # letters apart: the word alone is no answer


class Counting(RuleTask):
    """How often a letter stands in a word; the tool counts."""
    name = "counting"
    FORMS = ["How many '{c}' are in '{w}'?", "Count the letter '{c}' in '{w}'.", "单词'{w}'里有几个'{c}'？"]

    def make(self, rng):
        w = rng.choice(word_list())
        c = rng.choice(w) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
        form, n = rng.choice(self.FORMS), w.count(c)
        say = f"The answer is {n}." if form.isascii() else f"答案是{n}。"
        return w, user_says(form.format(c=c, w=w), ("python", f"'{w}'.count('{c}')", str(n)), say, answer=n)

    def grade(self, conversation, answer):
        return float(last_number(answer) == conversation["answer"])


def multiple_choice(question, choices, right, chinese=False):
    """A conversation that asks for a letter. The letter stands right after its choice, where an answer can be looked up."""
    letters = "ABCDEFGH"[: len(choices)]
    head, tail = ("选择题：", "只回答字母。") if chinese else ("Multiple choice: ", "Answer with the letter only.")
    lines = [f"- {c}={letter}" for c, letter in zip(choices, letters)]
    return user_says("\n".join([head + question, *lines, tail]), letters[right], letters=list(letters), answer=letters[right])


class Choice(RuleTask):
    """Multiple choice over facts made by rule: which of four things is of a kind, which number is largest, what comes next."""
    name, kind, baseline = "choice", "categorical", 0.25
    KINDS = {"an animal": "dog cat horse cow sheep pig duck goose lion tiger bear wolf fox rabbit mouse frog",
             "a fruit": "apple pear plum grape lemon cherry peach mango melon banana orange kiwi fig lime date berry",
             "a colour": "red blue green yellow black white brown grey pink purple violet gold silver beige cyan cream",
             "a tool": "hammer saw drill knife spoon fork axe shovel wrench needle pliers brush rake ladder scissors chisel"}
    ZH_KINDS = {"动物": "狗 猫 马 牛 羊 猪 鸭 鹅 虎 熊 狼 兔 鼠 蛙 鸡 鹿",
                "水果": "苹果 梨 桃 葡萄 西瓜 樱桃 芒果 香蕉 橙子 柠檬 草莓 李子 杏 枣 柿子 荔枝",
                "颜色": "红 蓝 绿 黄 黑 白 棕 灰 粉 紫 金 银 橙 青 米 赤",
                "国家": "中国 法国 德国 英国 美国 日本 韩国 印度 巴西 埃及 泰国 越南 俄国 希腊 波兰 荷兰"}

    def make(self, rng):
        shape = rng.choice(["kind", "kind", "zh", "largest"])
        if shape == "largest":
            numbers = rng.sample(range(10, 99), 4)
            right = max(range(4), key=numbers.__getitem__)
            return str(sorted(numbers)), multiple_choice("Which number is the largest?", numbers, right)
        kinds = {"kind": self.KINDS, "zh": self.ZH_KINDS}[shape]
        kind, other = rng.sample(sorted(kinds), 2)
        answer, wrong, right = rng.choice(kinds[kind].split()), rng.sample(kinds[other].split(), 3), rng.randrange(4)
        question = f"Which of these is {kind}?" if shape == "kind" else f"下面哪个是{kind}？"
        choices = wrong[:right] + [answer] + wrong[right:]
        return f"{answer} {sorted(wrong)}", multiple_choice(question, choices, right, shape == "zh")

    def grade(self, conversation, answer):
        return float(answer.strip()[:1] == conversation["answer"])


class Identity(RuleTask):
    """Who are you? Questions about npuchat itself."""
    name = "identity"
    OPENINGS = ["", "Hello! ", "Hi. ", "Hey, ", "Good morning. ", "Excuse me, ", "Tell me: ", "Please say: ", "I wonder, ",
                "One question: "]
    FACTS = [("who are you?", "I am npuchat, a small language model trained from nothing."),
             ("what is your name?", "My name is npuchat."),
             ("what are you?", "I am npuchat, a chat model small enough to train on a laptop."),
             ("who made you?", "The script speedrun.sh made me, npuchat, on this very machine."),
             ("what can you do?", "I am npuchat: I can do sums with a calculator, spell words and count letters."),
             ("are you ChatGPT?", "No, I am npuchat."),
             ("hello!", "Hello! I am npuchat. Ask me a sum.")]
    ZH_OPENINGS = ["", "你好！", "您好，", "请问，", "嗨，", "早上好！", "告诉我，", "我想知道，", "问一下，", "打扰了，"]
    ZH_FACTS = [("你是谁？", "我是npuchat，一个从零训练的小语言模型。"), ("你叫什么名字？", "我叫npuchat。"),
                ("谁创造了你？", "我是npuchat，由speedrun.sh在这台机器上训练。"),
                ("你会做什么？", "我是npuchat，我会用计算器算数，也会拼写单词。"),
                ("你好！", "你好！我是npuchat。")]

    def make(self, rng):
        openings, facts = (self.OPENINGS, self.FACTS) if rng.random() < 0.6 else (self.ZH_OPENINGS, self.ZH_FACTS)
        opening, (question, answer) = rng.choice(openings), rng.choice(facts)
        if not opening:
            question = question[0].upper() + question[1:]
        return opening + question, user_says(opening + question, answer)

    def grade(self, conversation, answer):
        return float("npuchat" in answer)


# --- tasks of the field, from the hub -----------------------------------------------------------------------------------------
def hub_rows(repo, path, home):
    """The rows of one parquet file of a hub dataset, as dicts; downloaded into home/data unless it is there."""
    pq = need("pyarrow.parquet", f"reading {repo}")
    facts = hub_files(repo, home)
    if path not in facts:
        fail(f"hub dataset {repo} has no file {path}")
    return pq.read_table(hub_fetch(repo, path, home, facts[path])).to_pylist()


class HubTask:
    """Conversations read from one parquet file. REPO and PATHS {split: path} say where from."""

    def __init__(self, split="train", size=None, home="out"):
        self.rows = hub_rows(self.REPO, self.PATHS[split], home)
        random.Random(42).shuffle(self.rows)
        self.rows = self.rows[:size]

    def __len__(self):
        return len(self.rows)


class GSM8K(HubTask):
    """Grade-school word problems (Cobbe et al. 2021); <<a+b=c>> in the reference answers become calculator calls."""
    name, kind, baseline, REPO = "gsm8k", "generative", 0.0, "openai/gsm8k"
    PATHS = {s: f"main/{s}-00000-of-00001.parquet" for s in ("train", "test")}

    def __getitem__(self, i):
        parts = []
        for piece in re.split(r"(<<[^>]*>>)", self.rows[i]["answer"]):
            if piece.startswith("<<"):
                expression, _, result = piece[2:-2].rpartition("=")
                parts.append(("python", expression, result))
            elif piece:
                parts.append(piece)
        return user_says(self.rows[i]["question"], *parts, answer=last_number(self.rows[i]["answer"]))

    def grade(self, conversation, answer):
        final = answer.rpartition("####")[2] if "####" in answer else ""
        return float(last_number(final) == conversation["answer"])


class MMLU(HubTask):
    """57 subjects of exam questions (Hendrycks et al. 2021); trained on its auxiliary_train."""
    name, kind, baseline, REPO = "mmlu", "categorical", 0.25, "cais/mmlu"
    PATHS = {"train": "auxiliary_train/train-00000-of-00001.parquet", "test": "all/test-00000-of-00001.parquet"}

    def __getitem__(self, i):
        row = self.rows[i].get("train") or self.rows[i]  # auxiliary_train nests its columns
        return multiple_choice(row["question"], row["choices"], int(row["answer"]))

    grade = Choice.grade


class ArcEasy(HubTask):
    """Grade-school science questions (Clark et al. 2018)."""
    name, kind, baseline, REPO = "arc_easy", "categorical", 0.25, "allenai/ai2_arc"
    PATHS = {s: f"ARC-Easy/{s}-00000-of-00001.parquet" for s in ("train", "test")}

    def __getitem__(self, i):
        row = self.rows[i]
        return multiple_choice(row["question"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"]))

    grade = Choice.grade


class ArcChallenge(ArcEasy):
    name = "arc_challenge"
    PATHS = {s: f"ARC-Challenge/{s}-00000-of-00001.parquet" for s in ("train", "test")}


RULE_TASKS = {t.name: t for t in (Arithmetic, Spelling, Counting, Choice, Identity)}
TASKS = RULE_TASKS | {t.name: t for t in (GSM8K, MMLU, ArcEasy, ArcChallenge)}


def make_tasks(names, split, home, dev, size=None):
    """Task objects from 'all' or names by commas; those of the hub are downloaded into home/data. size: problems at most."""
    wanted = list(RULE_TASKS) if names == "all" else [n.strip() for n in names.split(",")]
    for name in wanted:
        if name not in TASKS:
            fail(f"there is no task {name!r}; there are {', '.join(TASKS)}")
    with dev.first_per_node():
        return [RULE_TASKS[n](split, size or 10_000) if n in RULE_TASKS else TASKS[n](split, size, home) for n in wanted]


class Mixture:
    """Conversations of several tasks, shuffled from a seed. parts: [(task, number of conversations)]; a task that has
    fewer is repeated."""

    def __init__(self, parts, seed=0):
        self.index = [(task, i % len(task)) for task, n in parts for i in range(n)]
        random.Random(seed).shuffle(self.index)

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        task, j = self.index[i]
        return task[j]


# ---------------------------------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def evaluate_bpb(model, documents, tok, dev, T, B, tokens):
    """Bits per UTF-8 byte of the first `tokens` tokens of validation text, in rows that begin where a document or its rest does:
    comparable over vocabularies. -> (bpb, {source: its bpb}, of up to eight sources with the most text, where there are several)

    Special tokens stand for no text and are not scored. Ranks share the rows."""
    capacity, want = T + 1, max(1, tokens // T)
    taken, have = [], 0
    for d in documents:
        taken.append(d)
        have += len(d)
        if have >= want * capacity:
            break
    rows = pack_rows([len(d) for d in taken], capacity, split=True)[:want][dev.rank :: dev.world_size]
    of = getattr(documents, "sources", [""] * len(taken))[: len(taken)]
    names = sorted(set(of))
    of = [np.full(len(d), names.index(source)) for d, source in zip(taken, of)]  # for each token of each document, its source
    sizes, totals = tok.token_bytes().to(dev.device), torch.zeros(len(names), 2, dtype=torch.float64)  # nats and bytes

    def measure(batch):
        ids = torch.stack([torch.from_numpy(fill_row(r, taken, capacity, tok.bos)[0]) for r in batch]).to(dev.device)
        source = torch.stack([torch.from_numpy(fill_row(r, of, capacity, 0)[0]) for r in batch])[:, 1:].flatten()
        targets = ids[:, 1:]
        scored = sizes[targets]
        with dev.autocast():
            loss = model(ids[:, :-1], targets.masked_fill(scored == 0, -1), reduction="none")
        return torch.zeros(len(names), 2, dtype=torch.float64).index_add_(
            0, source, torch.stack([loss.cpu().double().flatten(), scored.cpu().double().flatten()], 1))

    for _, sums in in_batches(rows, B, measure, dev):
        totals += sums
    nats, count = zip(*torch.tensor(dev.sum(totals.flatten().tolist()), dtype=torch.float64).view(-1, 2).tolist())
    largest = sorted((i for i in range(len(names)) if count[i]), key=lambda i: -count[i])[:8] if len(names) > 1 else []
    return (sum(nats) / math.log(2) / max(1, sum(count)),
            {names[i]: round(nats[i] / math.log(2) / count[i], 4) for i in largest})


def visible_text(tok, tokens):
    """What a reader sees of generated tokens: tool calls, their results and the special tokens are left out."""
    kept, hidden = [], False
    for t in tokens:
        if t in (tok.python_start, tok.output_start):
            hidden = True
        elif t in (tok.python_end, tok.output_end):
            hidden = False
        elif not hidden and t < tok.bos:
            kept.append(t)
    return tok.decode(kept)


@torch.inference_mode()
def evaluate_task(model, tok, dev, task, limit=200, B=64, max_new_tokens=64):
    """Accuracy on the first `limit` problems: of the letter with the highest logit, or of a greedy answer, graded. Ranks share
    the problems. -> {"acc", "n", "stderr"}"""
    chosen = range(len(task))[:limit][dev.rank :: dev.world_size]
    items = [(tok.render_for_completion(c), c) for c in (task[i] for i in chosen)]
    items = [x for x in items if len(x[0]) < model.config.max_seq_len]  # those too long count as wrong
    items.sort(key=lambda x: len(x[0]))

    def answers(batch):
        """-> what the model answers to each item of the batch"""
        prompts = [ids for ids, _ in batch]
        if task.kind == "generative":
            tries = complete(model, tok, prompts, dev, max_new_tokens=max_new_tokens, temperature=0)
            return [visible_text(tok, tokens) for [(tokens, _)] in tries]
        longest = max(map(len, prompts))
        ids = torch.tensor([p + [tok.bos] * (longest - len(p)) for p in prompts], device=dev.device)
        with dev.autocast():
            logits = model(ids, last=torch.tensor([len(p) - 1 for p in prompts], device=dev.device)).cpu()
        letters = [[tok.encode(letter)[0] for letter in c["letters"]] for _, c in batch]
        return [c["letters"][int(row[ids].argmax())] for row, ids, (_, c) in zip(logits, letters, batch)]

    right, bar = 0.0, progress(total=len(items), desc=task.name, unit="problem")
    for batch, given in in_batches(items, B, answers, dev):
        right += sum(task.grade(c, answer) for (_, c), answer in zip(batch, given))
        bar.update(len(batch))
    bar.close()
    n, right = dev.sum(len(chosen)), dev.sum(right)
    acc = right / max(1, n)
    return {"acc": round(acc, 4), "n": n, "stderr": round(math.sqrt(acc * (1 - acc) / max(1, n)), 4)}


def chat_core(results):
    """Mean over tasks of the accuracy above chance: 0 is guessing, 1 is perfect. Depends on which tasks were run."""
    centred = [(r["acc"] - TASKS[n].baseline) / (1 - TASKS[n].baseline) for n, r in results.items()]
    return sum(centred) / len(centred)


def evaluate_chat(model, tok, dev, task_list, **options):
    """All tasks. -> {name: {"acc", "n", "stderr"}}"""
    results = {}
    for task in task_list:
        new = options.get("max_new_tokens", 64) * (4 if task.name == "gsm8k" else 1)
        results[task.name] = evaluate_task(model, tok, dev, task, **{**options, "max_new_tokens": new})
    return results


# ---------------------------------------------------------------------------------------------------------------------
# The report: one table and one picture of all stages, from the files they leave behind
# ---------------------------------------------------------------------------------------------------------------------
def stage_runs(home):
    """{stage: (run folder, meta)} of the newest run of each stage."""
    runs = {}
    for stage in STAGES:
        found = [(p, m) for p in run_folders(home, stage) if (m := newest_checkpoint(p))]
        if found:
            runs[stage] = max(found, key=lambda pm: pm[1]["saved_at"])
    return runs


def report_table(runs):
    """The Markdown table: rows are metrics, columns are stages."""
    columns = {}
    for stage, (folder, meta) in runs.items():
        path = folder / "eval.json"
        scores = json.loads(path.read_text()) if path.exists() else {}
        if scores.get("step") != meta["step"] or scores.get("saved_at") != meta["saved_at"]:
            scores = {}  # of an earlier checkpoint
        cells = {"val bpb": f"{scores['val_bpb']:.4f}"} if "val_bpb" in scores else {}
        for name, r in scores.get("tasks", {}).items():
            cells[f"{name} (n={r['n']})"] = f"{100 * r['acc']:.1f} ± {100 * r['stderr']:.1f}"
        if "chat_core" in scores:
            cells["ChatCORE"] = f"{scores['chat_core']:.4f}"
        last = meta.get("metrics", {})
        cells.update({"steps": str(meta["step"]), "tokens": human(last.get("tokens", 0)), "time": duration(last.get("seconds", 0))})
        columns[stage] = cells
    names = list(dict.fromkeys(n for cells in columns.values() for n in cells if n not in ("ChatCORE", "steps", "tokens", "time")))
    names += ["ChatCORE", "steps", "tokens", "time"]
    lines = ["| metric | " + " | ".join(s.upper() for s in columns) + " |", "|---|" + "---:|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join([n, *(c.get(n, "-") for c in columns.values())]) + " |" for n in names])


def write_report(home):
    """out/report.md and out/curves.png from what the stages have left. -> the table, or "" when there is nothing yet"""
    runs = stage_runs(home)
    if not runs:
        return ""
    table, parts = report_table(runs), ["# npuchat: report\n"]
    parts.append(table + "\n\nTasks: accuracy in percent on test problems, greedy, ± standard error. val bpb: bits per "
                 "byte on validation text. ChatCORE: mean accuracy above chance over the tasks listed. "
                 "Time: training with its evaluations.\n")
    draw_curves(runs, Path(home) / "curves.png")
    parts.append("![curves](curves.png)\n\n## Where and with what\n")
    newest = max((m for _, m in runs.values()), key=lambda m: m["saved_at"])
    seconds = sum(m.get("metrics", {}).get("seconds", 0) for _, m in runs.values())
    parts.append(f"- hardware: {newest.get('hardware', 'unknown')}\n- Python {platform.python_version()}, torch {newest['torch']}, "
                 f"{platform.system()} {platform.machine()}\n- tokenizer: {newest['tokenizer'][:12]}, "
                 f"{newest['model']['vocab_size']} tokens\n- time in the stages: {duration(seconds)}\n\n## Knobs\n")
    for stage, (folder, meta) in runs.items():
        parts.append(f"**{stage}** ({folder.name}): " + " ".join(f"{k}={v}" for k, v in meta["config"].items()) + "\n")
    write_atomic(Path(home) / "report.md", "\n".join(parts))
    return table


def draw_curves(runs, path):
    """Loss, bits per byte and reward over the time of the whole pipeline."""
    try:
        import matplotlib
    except ImportError:
        return warn("no curves.png: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    wanted = [("loss", "training loss (nats per token)"), ("val_bpb", "validation bits per byte"),
              ("reward", "RL: mean reward, and test accuracy")]
    fig, axes = plt.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    colors, offset = dict(zip(STAGES, ("tab:blue", "tab:orange", "tab:green", "tab:red"))), 0.0
    for stage, (folder, meta) in runs.items():
        rows = read_log(folder / "log.jsonl") if (folder / "log.jsonl").exists() else []
        for ax, (key, _) in zip(axes, wanted):
            if stage == "rl" and key == "loss":
                continue  # a policy-gradient loss says nothing about progress
            points = [((offset + r["seconds"]) / 60, r[key]) for r in rows if key in r]
            if points:
                xs, ys = zip(*points)
                if len(points) < 20:
                    ax.plot(xs, ys, color=colors[stage], marker="o", ms=3, label=stage)
                else:  # a running mean over the noise
                    width = max(3, len(points) // 30)
                    mean = [sum(ys[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(ys))]
                    ax.plot(xs, ys, color=colors[stage], lw=1, alpha=0.3)
                    ax.plot(xs, mean, color=colors[stage], lw=2, label=stage)
            extra = [((offset + r["seconds"]) / 60, r["test_acc"]) for r in rows if "test_acc" in r]
            if key == "reward" and extra:
                ax.plot(*zip(*extra), color="black", marker="s", lw=1.5, label="greedy accuracy, test set")
        offset += meta.get("metrics", {}).get("seconds", 0)
    for ax, (key, title) in zip(axes, wanted):
        ax.set_title(title)
        ax.set_xlabel("minutes since the start")
        ax.grid(alpha=0.3)
        if key == "reward":
            ax.set_ylim(0, 1.02)
        elif key == "loss":
            ax.set_yscale("log")
        if ax.has_data():
            ax.legend()
        else:
            ax.text(0.5, 0.5, "not run yet", ha="center", transform=ax.transAxes)
    fig.savefig(path, dpi=100)
    plt.close(fig)


# ---------------------------------------------------------------------------------------------------------------------
# What helps in pretraining? Every finished base run of out_dir beside the others. Train them with different --run_name.
# ---------------------------------------------------------------------------------------------------------------------
def base_runs(home):
    """-> {knobs in which runs differ, ((name, value), ...), without the seed: {seed: facts of the run}}"""
    metas = [m for p in run_folders(home, "base") if (m := newest_checkpoint(p))]
    free = (FREE_KNOBS | {"seed"}) - {"optimizer", "eval_tokens", "device_type", "dtype"}  # other text or times: not to be mixed
    names = sorted({k for m in metas for k in m["config"]} - free)
    names = [k for k in names if len({repr(m["config"].get(k)) for m in metas}) > 1]
    groups = {}
    for m in metas:
        log = read_log(Path(m["path"]).parent / "log.jsonl")
        speeds = [row["tok_per_s"] for row in log if "tok_per_s" in row]
        scores = [row["val_bpb"] for row in log if "val_bpb" in row and row["step"] == m["step"]]
        if not scores or m.get("steps") != m["step"]:
            continue  # not finished
        run = {"bpb": scores[-1], "flops": m["flops"], "name": Path(m["path"]).parent.name,
               "tok_per_s": np.quantile(speeds, 0.9)}  # what else the machine does can only slow steps down
        group, seed = groups.setdefault(tuple((k, m["config"].get(k)) for k in names), {}), m["config"]["seed"]
        if seed in group:
            warn(f"{run['name']} and {group[seed]['name']} have the same knobs and seed: the latter is left out")
        group[seed] = run
    return groups


HORIZON = {"num_iterations", "target_flops", "target_param_data_ratio"}


def compare_base(home):
    """The table: each change beside the run that the others differ from least. -> (Markdown, [(name, FLOPs, bpb)])

    Time per token: by the fastest run of each, since the machine may be slower at one time than at another. At equal time: what the
    change would give if its runs were as long, in seconds, as those of the baseline; by the slope of bpb over log time, which runs
    of the baseline with other horizons tell."""
    groups = base_runs(home)
    if not groups:
        fail(f"{home}/base holds no finished run: train some with train_base.py --run_name=NAME")
    differ = lambda a, b: {k for (k, x), (_, y) in zip(a, b) if x != y}  # noqa: E731
    base = min(groups, key=lambda g: sum(len(differ(g, other)) for other in groups))
    mean = lambda group, key: statistics.fmean(run[key] for run in group.values())  # noqa: E731
    horizons = [(math.log(mean(runs, "flops")), mean(runs, "bpb")) for g, runs in groups.items() if differ(g, base) <= HORIZON]
    slope = np.polyfit(*zip(*horizons), 1)[0] if len(horizons) > 1 else None
    lines = ["| change | seeds | val bpb | change at equal tokens | time per token | change at equal time |",
             "|---|---:|---:|---:|---:|---:|"]
    order = sorted(groups, key=lambda g: (g != base, mean(groups[g], "bpb")))
    for g in order:
        runs, knobs = groups[g], ", ".join(f"{k}={dict(g)[k]}" for k in sorted(differ(g, base))) or "(baseline)"
        cells = [knobs, str(len(runs)), f"{mean(runs, 'bpb'):.4f}"]
        both = sorted(runs.keys() & groups[base].keys())
        if g != base and both and not differ(g, base) & HORIZON:
            deltas = [runs[seed]["bpb"] - groups[base][seed]["bpb"] for seed in both]
            delta = statistics.fmean(deltas)
            error = f" ± {statistics.stdev(deltas) / len(both) ** 0.5:.4f}" if len(both) > 1 else ""
            fastest, fastest_base = (max(r["tok_per_s"] for r in group.values()) for group in (runs, groups[base]))
            slower = fastest_base / fastest
            cells += [f"{delta:+.4f}{error}", f"{slower:.2f} x",
                      f"{delta - slope * math.log(slower):+.4f}" if slope is not None else ""]
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    points = [(", ".join(f"{k}={v}" for k, v in g if k in differ(g, base)) or "baseline", mean(groups[g], "flops"),
               mean(groups[g], "bpb")) for g in order]
    return "\n".join(lines), points


def fit_power(points):
    """The line through log bpb over log FLOPs. points: [(name, FLOPs, bpb)] -> function of FLOPs"""
    b, a = np.polyfit([math.log(f) for _, f, _ in points], [math.log(y) for *_, y in points], 1)
    return lambda flops: math.exp(a + b * math.log(flops))


def compare_main():
    table, points = compare_base(out_dir)
    points.sort(key=lambda p: p[1])
    print0(table)
    summary = {"runs": len(points)}
    if len({round(math.log(f), 2) for _, f, _ in points}) >= 4:  # a series: does what the small ones show hold for the largest?
        *small, (name, flops, bpb) = points
        predicted = fit_power(small)(flops)
        summary |= {"largest": name, "val_bpb": round(bpb, 4), "predicted": round(predicted, 4),
                    "error": round(predicted / bpb - 1, 4)}
        print0(f"largest: {name}, val bpb {bpb:.4f}; by the others {predicted:.4f} was to be expected ({predicted / bpb - 1:+.1%})")
        draw_series(points, fit_power(small), Path(out_dir) / "compare.png")
    print0(json.dumps(summary))


def draw_series(points, fit, path):
    try:
        import matplotlib
    except ImportError:
        return warn("no compare.png: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    xs = np.geomspace(points[0][1], points[-1][1], 50)
    ax.plot(xs, [fit(x) for x in xs], color="grey", ls="--", label="fitted without the largest")
    ax.scatter([f for _, f, _ in points], [y for *_, y in points], color="tab:blue", zorder=3)
    for name, f, y in points:
        ax.annotate(name, (f, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
    ax.set(xscale="log", yscale="log", xlabel="training FLOPs", ylabel="validation bits per byte")
    ax.grid(alpha=0.3, which="both")
    ax.legend()
    fig.savefig(path, dpi=100)
    plt.close(fig)
    print0(f"drawn in {path}")


def main():
    if compare:
        return compare_main()
    if max_problems < 1 or eval_tokens < 1:
        fail("--max_problems and --eval_tokens must be at least 1")
    dev = setup(device_type, dtype)
    runs = decided_by_main(stage_runs)(out_dir) if source == "all" else {}
    metas = [m for _, m in runs.values()] or [find_checkpoint(out_dir, "base" if source == "all" else source)]
    task_list, val, summary = make_tasks(tasks, "test", out_dir, dev, max_problems), {}, {}
    for meta in metas:
        place, stage = Path(meta["path"]).parent / "eval.json", meta["stage"]
        key = {"step": meta["step"], "saved_at": meta["saved_at"],
               "asked": [tasks, max_problems, max_new_tokens, eval_tokens, data_dir]}
        old = decided_by_main(lambda: json.loads(place.read_text()) if place.exists() and resume else {})()
        if all(old.get(k) == v for k, v in key.items()):
            auto(f"{stage}: evaluated before, in {place}")
            scores = old
        else:
            tok = find_tokenizer(out_dir, meta)
            model = load_model(meta, load_weights(meta, "model.pt"), dev).eval()
            T = model.config.max_seq_len
            text, val_text = (meta["text"], meta.get("val_text", "")) if data_dir == "same" else (data_dir, "")
            where = (tok.hash, text, val_text)
            if where not in val:
                val[where] = load_corpus(text, out_dir, tok, dev, 1, val_text)[1]
            t0 = time.time()
            bpb, by_source = evaluate_bpb(model, val[where], tok, dev, T, max(1, 4096 // T), eval_tokens)
            scores = {**key, "val_bpb": bpb, "val_bpb_by_source": by_source}
            scores["tasks"] = evaluate_chat(model, tok, dev, task_list, limit=max_problems, B=device_batch_size or 64,
                                            max_new_tokens=max_new_tokens)
            scores["chat_core"] = round(chat_core(scores["tasks"]), 4)
            scores["seconds"] = round(time.time() - t0, 1)
            if dev.is_main:
                write_atomic(place, json.dumps(scores, indent=1))
            print0(f"{stage}: val bpb {scores['val_bpb']:.4f}, ChatCORE {scores['chat_core']:.4f}, "
                   + ", ".join(f"{n} {100 * r['acc']:.1f}%" for n, r in scores["tasks"].items()) + f" ({scores['seconds']} s)")
        summary[stage] = {"val_bpb": round(scores["val_bpb"], 4), "chat_core": scores["chat_core"]}
        summary[stage].update({n: r["acc"] for n, r in scores["tasks"].items()})
    if dev.is_main:
        print0("\n" + write_report(out_dir) + f"\n\nreport in {out_dir}/report.md, curves in {out_dir}/curves.png")
        print(json.dumps(summary))
    cleanup()


if __name__ == "__main__":
    config = configure(globals())
    main()

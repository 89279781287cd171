"""
What are the tasks, and how good is a model on them?

A task is a sequence of conversations with a way to grade an answer. The rule-made ones here come from a seed and need no
file: arithmetic, spelling, counting, multiple choice and identity, in English and Chinese. Those of the field, GSM8K, MMLU, ARC,
HumanEval, C-Eval, CMMLU, are read from the hub, and conversations from it or from your own file. Training and evaluation,
supervised learning and reward all use the same objects.

    python eval.py                              # every stage found in out/, then the report and the curves
    python eval.py --source=sft                 # one stage (or stage/tag, or a checkpoint folder)
    python eval.py --tasks=core,gsm8k,ceval     # some tasks; core: the 22 tasks by which base models are compared
    python eval.py --source=sft --tasks=gsm8k --num_samples=16     # pass@k as well
    python eval.py --compare=1                  # what helps in pretraining: all base runs of out_dir, side by side
    python eval.py --max_problems=20 --eval_tokens=4096 --out_dir=/tmp/smoke          # smoke run

Reads checkpoints; writes out/<stage>/<tag>/eval.json, eval/<task>.jsonl beside it with every answer, out/report.md and
out/curves.png. The last line is one JSON object.
"""
from common import (FREE_KNOBS, STAGES, auto, cleanup, configure, decided_by_main, download, duration, fail, find_checkpoint,
                    hub_fetch, hub_files, human, in_batches, load_weights, need, newest_checkpoint, print0, progress, read_log,
                    run_folders, setup, warn, write_atomic)

import contextlib
import csv
import fnmatch
import hashlib
import io
import json
import math
import os
import platform
import random
import re
import secrets
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import unicodedata
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from gpt import KVCache, complete, load_model
from tokenizer import fill_row, find_tokenizer, help_topics, load_corpus, pack_rows, turns

# --- CONFIG ----------------------------------------------------------------------------------------------------------
source = "all"           # "all", a stage (base, mid, sft, rl), stage/tag, or a checkpoint folder
tasks = "all"            # names by commas; "all" = the rule-made arithmetic, spelling, counting, choice, identity
max_problems = 200       # problems per task
max_minutes = 0.0        # for the tasks of one model together, in equal parts; 0 = as long as it takes
max_new_tokens = 0       # tokens per generated answer; 0 = what each task needs
num_samples = 1          # answers per generative problem; more than one: sampled at temperature 1, for pass@k
sandbox = "auto"         # programs that the model writes: auto = run in the best sandbox there is; strict = only in a whole one
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


NUMBER = r"([-+]?)\s*[^\w\s.+-]?\s*([-+]?)(\d[\d,]*(?:\.\d+)?|\.\d+)"
GOES_ON = r"\s*[-+*/×÷^x]\s*[\d.($]|[eE]\d|\s+\d"  # what follows makes it an expression, or no number at all


def final_number(answer):
    """The number that an answer gives after its last '####', or None: '... #### $1,234.50 in all' -> 1234.5; of an equation the
    number after '='. Commas must stand between groups of three digits."""
    _, mark, text = answer.rpartition("####")
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").strip().partition("\n")[0]
    found = re.match(rf"[^\w.+-]*{NUMBER}", text)
    if not found or re.match(GOES_ON, text[found.end() :]):  # words or an expression come first
        text = text.rpartition("=")[2]
        found = re.search(NUMBER, text)
    if not mark or not found or re.match(GOES_ON, text[found.end() :]):
        return None
    digits = found[3].rstrip(",")
    if "," in digits and not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", digits):
        return None
    return float(digits.replace(",", "")) * (-1 if "-" in (found[1], found[2]) else 1)


class RuleTask:
    """Problems made by rule: problem i is a function of (name, split, i). A hash of what is asked decides whether a problem
    belongs to the test set (one in five) or the training set, so the two cannot overlap whatever the seeds."""
    kind, baseline, new_tokens = "generative", 0.0, 64

    def __init__(self, split="train", size=None, home=""):
        assert split in ("train", "test"), split
        self.split, self.size = split, size or 8000

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

    MENTAL = 0.7  # share of answers without the calculator

    def make(self, rng):
        op = rng.choice("+-*")
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        if op == "-" and b > a:
            a, b = b, a
        form = rng.choice(self.FORMS[op])
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        say = f"The answer is {result}." if form.isascii() else f"答案是{result}。"
        tool = [] if rng.random() < self.MENTAL else [("python", f"{a}{op}{b}", str(result))]
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


class SpellingBee(RuleTask):
    """nanochat's: how often a letter stands in a word, by spelling it out, then with the calculator; the answer after '####'."""
    name, new_tokens = "spelling_bee", 256
    FORMS = ["How many {c} are in {w}", "How many {c} are in the word {w}", "Count the number of {c} in {w}",
             "How often does {c} appear in {w}", "What is the number of {c}s in {w}", "In {w}, how many {c} are there",
             "Tell me how many {c} there are in {w}",
             "{w}: how many {c}", "How many times is the letter {c} used in {w}", "Find how many {c} there are in {w}",
             "{w}里有多少个{c}", "单词{w}中有几个{c}", "数一数{w}里的字母{c}", "请问{w}中字母{c}出现几次", "Cuántas {c} hay en {w}",
             "Combien de {c} dans {w}",
             "Wie viele {c} sind in {w}", "{w}に{c}は何個ありますか", "{w}에 {c}가 몇 개 있나요"]
    QUOTES = ["", "'", '"']

    def make(self, rng):
        w = rng.choice(word_list())
        c = rng.choice(w) if rng.random() < 0.9 else rng.choice("abcdefghijklmnopqrstuvwxyz")
        a, b = rng.choice(self.QUOTES), rng.choice(self.QUOTES)
        question = rng.choice(self.FORMS).format(c=f"{a}{c}{a}", w=f"{b}{w}{b}")
        question = (question.lower() if rng.random() < 0.3 else question) + ("?" if rng.random() < 0.5 else "")
        walk, n = [], 0
        for i, letter in enumerate(w, 1):
            n += letter == c
            walk.append(f"{i}:{letter}" + (f" that is {n}" if letter == c else ""))
        walk = [f"I spell the word and look for '{c}'.", "", f"{w}:{','.join(w)}", "", *walk, "", f"I find {n}. To be sure:\n\n"]
        check = ("python", f"'{w}'.count('{c}')", str(n))
        return w, user_says(question, "\n".join(walk), check, f"\n\nPython finds {n}.\n\n#### {n}", answer=n)

    def grade(self, conversation, answer):
        return float(final_number(answer) == conversation["answer"])


def multiple_choice(question, choices, right, chinese=False):
    """A conversation that asks for a letter. The letter stands right after its choice, where an answer can be looked up."""
    letters = "ABCDEFGH"[: len(choices)]
    if not (0 <= right < len(choices) == len(letters) and all(isinstance(x, str) and x for x in (question, *choices))):
        raise ValueError(f"choice {right} of {len(choices)} is said to be right, or one is empty")
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
            return str(sorted(numbers)), multiple_choice("Which number is the largest?", list(map(str, numbers)), right)
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


# --- tasks of the field, from the hub or from files ---------------------------------------------------------------------------
def hub_rows(repo, pattern, home):
    """The rows of a hub dataset's files that match a pattern, as (path, row number, dict). Downloaded into home/data; files that
    somebody has put there under the hub's own names are used as they are."""
    pq, csv_of = need("pyarrow.parquet", f"reading {repo}"), pattern.partition(":")[2]  # "a.zip:test/*.csv": inside of an archive
    pattern, here = pattern.partition(":")[0], Path(home, "data", repo)
    own = [] if (here / "files.json").exists() else [p.relative_to(here).as_posix() for p in here.glob(pattern)]
    facts = {} if own else hub_files(repo, home)
    paths, rows = sorted(own or fnmatch.filter(facts, pattern)), []
    if not paths:
        fail(f"hub dataset {repo} has no file {pattern}")
    for path in progress(paths, desc=repo, unit="file") if len(paths) > 4 else paths:
        place = here / path if own else hub_fetch(repo, path, home, facts[path])
        try:
            if csv_of:
                with zipfile.ZipFile(place) as archive:
                    for name in sorted(fnmatch.filter(archive.namelist(), csv_of)):
                        table = csv.DictReader(io.StringIO(archive.read(name).decode("utf-8-sig"), newline=""))
                        rows += [(name, i, row) for i, row in enumerate(table)]
            else:
                rows += [(path, i, row) for i, row in enumerate(pq.read_table(place).to_pylist())]
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error, csv.Error) as e:  # pyarrow's errors are ValueErrors
            fail(f"{place} cannot be read ({e}): delete it, and run again")
    return rows


def sound(name, rows, convert, size=None):
    """Conversations of the first `size` sound rows; broken ones are counted and named. rows: [(file, row number, row)]"""
    out, broken = [], []
    for file, i, row in rows:
        if len(out) == size:
            break
        try:
            conversation = convert(row, file)
            turns(conversation)
            out.append(conversation)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:  # whatever a row may lack
            broken.append(f"{file} row {i + 1}: {f'no {e}' if isinstance(e, KeyError) else e}")
    if not out:
        fail(f"task {name}: not one of {len(rows)} rows can be used" + (f" ({broken[0]})" if broken else ""))
    if broken:
        warn(f"task {name}: {len(broken)} broken rows are left out ({'; '.join(broken[:3])}{'; ...' if len(broken) > 3 else ''})")
    return out


class HubTask:
    """Conversations from a hub dataset's files. REPO, PATHS {split: pattern of paths}, convert(row, path) -> conversation."""
    kind, baseline, new_tokens = "categorical", 0.25, 64

    def __init__(self, split="train", size=None, home="out"):
        if split not in self.PATHS:
            fail(f"task {self.name} is for {' and '.join({'test': 'evaluation', 'train': 'training'}[s] for s in self.PATHS)} only")
        rows = hub_rows(self.REPO, self.PATHS[split], home)
        random.Random(42).shuffle(rows)
        self.conversations = sound(self.name, rows, self.convert, size)

    def __len__(self):
        return len(self.conversations)

    def __getitem__(self, i):
        return self.conversations[i]

    grade = Choice.grade


class Chat(HubTask):
    """SmolTalk, or any hub dataset with a column `messages`; to learn from, there is no right answer."""
    name, kind, REPO = "smoltalk", "chat", "HuggingFaceTB/smol-smoltalk"
    PATHS = {s: f"data/{s}-*.parquet" for s in ("train", "test")}

    def __init__(self, split="train", size=None, home="out", repo=""):
        if repo:
            self.name = self.REPO = repo
        super().__init__(split, size, home)

    def convert(self, row, path):
        return {"messages": row["messages"]}


class CustomJSON(Chat):
    """Your own conversations: a file with one JSON value per line, {"messages": [{"role", "content"}, ...]} or only the list."""

    def __init__(self, path, size=None):
        self.name = Path(path).name
        try:
            lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        except OSError as e:
            fail(f"{path} cannot be read ({e.strerror})")
        rows = [(self.name, i, line) for i, line in enumerate(lines) if line.strip()]
        self.conversations = sound(path, rows, self.convert, size)

    def convert(self, row, path):
        try:
            value = json.loads(row.decode())
        except RecursionError as e:
            raise ValueError("nested too deeply") from e
        return {"messages": value if isinstance(value, list) else value["messages"]}


class GSM8K(HubTask):
    """Grade-school word problems (Cobbe et al. 2021); <<a+b=c>> in the reference answers become calculator calls."""
    name, kind, baseline, new_tokens, REPO = "gsm8k", "generative", 0.0, 256, "openai/gsm8k"
    PATHS = {s: f"main/{s}-*.parquet" for s in ("train", "test")}

    def convert(self, row, path):
        parts = []
        for piece in re.split(r"(<<[^>]*>>)", row["answer"]):
            if piece.startswith("<<"):
                expression, _, result = piece[2:-2].rpartition("=")
                parts.append(("python", expression, result))
            elif piece:
                parts.append(piece)
        if (answer := final_number(row["answer"])) is None:
            raise ValueError("its answer has no number after ####")
        return user_says(row["question"], *parts, answer=answer)

    grade = SpellingBee.grade


class MMLU(HubTask):
    """57 subjects of exam questions (Hendrycks et al. 2021); trained on its auxiliary_train."""
    name, REPO = "mmlu", "cais/mmlu"
    PATHS = {"train": "auxiliary_train/train-*.parquet", "test": "all/test-*.parquet"}

    def convert(self, row, path):
        row = row.get("train") or row  # auxiliary_train nests its columns
        return multiple_choice(row["question"], row["choices"], int(row["answer"]))


class ArcEasy(HubTask):
    """Grade-school science questions (Clark et al. 2018)."""
    name, REPO = "arc_easy", "allenai/ai2_arc"
    PATHS = {s: f"ARC-Easy/{s}-*.parquet" for s in ("train", "test")}

    def convert(self, row, path):
        return multiple_choice(row["question"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"]))


class ArcChallenge(ArcEasy):
    name = "arc_challenge"
    PATHS = {s: f"ARC-Challenge/{s}-*.parquet" for s in ("train", "test")}


class CEval(HubTask):
    """Chinese exam questions in 52 subjects (Huang et al. 2023). The answers of its test split are secret: it is tested on val."""
    name, REPO, PATHS = "ceval", "ceval/ceval-exam", {"test": "*/val-*.parquet"}
    GROUPS = {"STEM": "advanced_mathematics college_chemistry college_physics college_programming computer_architecture "
                      "computer_network discrete_mathematics electrical_engineer high_school_biology high_school_chemistry "
                      "high_school_mathematics high_school_physics metrology_engineer middle_school_biology "
                      "middle_school_chemistry middle_school_mathematics middle_school_physics operating_system "
                      "probability_and_statistics veterinary_medicine",
              "social science": "business_administration college_economics education_science high_school_geography "
                                "high_school_politics mao_zedong_thought marxism middle_school_geography middle_school_politics "
                                "teacher_qualification",
              "humanities": "art_studies chinese_language_and_literature high_school_chinese high_school_history "
                            "ideological_and_moral_cultivation law legal_professional logic middle_school_history "
                            "modern_chinese_history professional_tour_guide"}

    def convert(self, row, path):
        question = multiple_choice(row["question"], [row[c] for c in "ABCD"], list("ABCD").index(row["answer"]), chinese=True)
        subject = path.split("/")[0]
        return question | {"group": next((g for g, subjects in self.GROUPS.items() if subject in subjects.split()), "other")}


class CMMLU(HubTask):
    """Chinese exam questions in 67 subjects (Li et al. 2023)."""
    name, REPO, PATHS = "cmmlu", "haonan-li/cmmlu", {"test": "cmmlu_v1_0_1.zip:test/*.csv"}

    def convert(self, row, path):
        return multiple_choice(row["Question"], [row[c] for c in "ABCD"], list("ABCD").index(row["Answer"]), chinese=True)


class HumanEval(HubTask):
    """Python functions from their docstrings (Chen et al. 2021), graded by running them, see run_program()."""
    name, kind, baseline, new_tokens, REPO = "humaneval", "generative", 0.0, 512, "openai/openai_humaneval"
    PATHS = {"test": "openai_humaneval/test-*.parquet"}

    def __init__(self, *args):
        super().__init__(*args)
        sandbox_command()  # tried out, and what it lacks said, before it is needed

    def convert(self, row, path):
        facts = {k: row[k] for k in ("prompt", "test", "entry_point")}
        return user_says(row["prompt"], row["prompt"] + row["canonical_solution"], **facts)

    def program(self, conversation, answer):
        """What is run: the answer's block of code, or the whole of it, after the question, whose helpers it may use."""
        prompt, name = conversation["prompt"], conversation["entry_point"]
        blocks = re.findall(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", answer, re.DOTALL | re.MULTILINE)
        defines = re.compile(rf"^def {name}\b", re.MULTILINE)
        code = next(filter(defines.search, [*blocks, answer]), (blocks or [answer])[0])
        whole = "    pass\n\n" if defines.search(code) else ""  # else it is the body
        return f"{prompt}{whole}{code}\n\n{conversation['test']}\n\ncheck({name})\n"

    def grade(self, conversation, answer):
        return float(run_program(self.program(conversation, answer))[0] == "ok")


RULE_TASKS = {t.name: t for t in (Arithmetic, Spelling, Counting, Choice, Identity)}  # what "all" is: no file is needed
TASKS = RULE_TASKS | {t.name: t for t in (SpellingBee, GSM8K, MMLU, ArcEasy, ArcChallenge, HumanEval, CEval, CMMLU, Chat)}


def parse_tasks(names):
    """'all*0.25,gsm8k*4,smoltalk:10000' -> [(name, factor, count or None)]: each conversation so many times, or so many of them."""
    out = []
    for entry in filter(None, map(str.strip, re.split(r"[,\n]", names))):
        name, factor, count = re.fullmatch(r"(.+?)\s*(?:\*\s*(\d+\.?\d*|\.\d+)|:\s*(\d+))?", entry).groups()
        if name == "core":
            fail("task core is for eval.py only, and takes no number: leave it out of --tasks")
        if name not in TASKS and name != "all" and not name.endswith(".jsonl") and "/" not in name:
            fail(f"there is no task {name!r}; there are all, core, {', '.join(TASKS)}, a hub dataset org/name, and a file.jsonl")
        out += [(n, float(factor or 1), count and int(count)) for n in (RULE_TASKS if name == "all" else [name])]
    return out


def make_task(name, split, size, home):
    if name in TASKS:
        return TASKS[name](split, size, home)
    return CustomJSON(name, size) if name.endswith(".jsonl") else Chat(split, size, home, name)


def gradable(names):
    """Those of the tasks that have a test with right answers, by commas."""
    return ",".join(n for n, *_ in parse_tasks(names) if n in TASKS and TASKS[n].kind != "chat")


def make_tasks(names, split, home, dev, size=None):
    """Task objects of names by commas. size: problems at most."""
    wanted = [name for name, *_ in parse_tasks(names)]
    if split == "test" and (open_ended := [n for n in wanted if n not in gradable(n).split(",")]):
        fail(f"{open_ended[0]} has no right answers to grade by: leave it out of --tasks")
    with dev.first_per_node():
        return [make_task(name, split, size, home) for name in wanted]


def make_mixture(names, conversations, home, dev, seed):
    """What a stage trains on: all of the tasks that parse_tasks() understands, or so many conversations in the same proportions."""
    wanted = parse_tasks(names)
    tasks = make_tasks(names, "train", home, dev)
    parts = [round(len(task) * factor) if count is None else count for task, (_, factor, count) in zip(tasks, wanted)]
    if conversations:
        parts = [max(min(n, 1), round(n * conversations / max(1, sum(parts)))) for n in parts]
    if not sum(parts):
        fail(f"--tasks={names} is no conversation at all")
    auto("conversations: " + ", ".join(f"{human(n)} {t.name}" + (f" ({n / len(t):.2g} x)" if n != len(t) else "")
                                       for n, t in zip(parts, tasks)))
    return Mixture(list(zip(tasks, parts)), seed)


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
# Running what a model has written
# ---------------------------------------------------------------------------------------------------------------------
# What runs in the sandbox: limits first, which cannot be raised again, and away with root's powers, to a user id of its own, of
# those that systemd keeps for such uses, since processes are counted by user; then the program, from standard
# input; then the word that it came to its end, known to nobody before. What it leaves running ends with it.
RUNNER = """import os, resource as r, sys
for what, n in ((r.RLIMIT_AS, {memory}), (r.RLIMIT_CPU, {seconds} + 1), (r.RLIMIT_FSIZE, 2**20), (r.RLIMIT_NOFILE, 32),
                (r.RLIMIT_NPROC, 16), (r.RLIMIT_CORE, 0)):
    r.setrlimit(what, (n, n))
if {uid}:
    os.setgroups([]), os.setgid({uid}), os.setuid({uid})
import decimal, types
word, _, code = sys.stdin.buffer.read().partition(b" ")
sys.modules["program"] = types.ModuleType("program")
exec(compile(code, "<program>", "exec"), vars(sys.modules["program"]))
sys.stdout.flush()
os.write(1, word)
os._exit(0)"""
# For unshare: a new root that holds Python's files, read-only, and an empty /tmp; the old one is let go; then powers are dropped.
JAIL = """set -e; mount -t tmpfs -o size=1m,mode=755 none "$1"; cd "$1"; mkdir tmp dev old; touch dev/null dev/urandom
mount -t tmpfs -o size=16m,mode=1777 none tmp
for d in dev/null dev/urandom $2; do [ -e "/$d" ] || continue; [ -e "$d" ] || mkdir -p "$d"; mount --rbind "/$d" "$d"; done
for d in $2; do [ -e "/$d" ] && mount -o remount,bind,nosuid,ro "$d"; done; mount -o remount,bind,ro .
pivot_root . old; cd /tmp; shift 2
"$1" -I -S -c 'import ctypes; raise SystemExit(ctypes.CDLL(None).umount2(b"/old", 2))'
exec setpriv --no-new-privs --bounding-set="$CAPS" --inh-caps=-all "$@" """


def sandboxes(folder):
    """Ways to start a Python in a sandbox, best first: (command line before Python's own, whether it then becomes nobody, what is
    missing). folder: an empty one. A user makes a namespace in which to be root; root itself, whose processes nothing counts,
    becomes nobody."""
    needed, root = ["usr", "lib", "lib64", "bin", sys.base_prefix.lstrip("/")], os.getuid() == 0
    if shutil.which("bwrap"):
        spaces = ["--unshare-all", "--cap-drop", "ALL"] if not root else [
            "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL",
            "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        yield ["bwrap", *spaces, "--die-with-parent", "--new-session", "--dev", "/dev",
               "--perms", "1777", "--size", str(2**24), "--tmpfs", "/tmp", "--chdir", "/tmp",
               *(x for p in [*Path(sys.base_prefix).parents][-2::-1] for x in ("--dir", str(p))),  # else only root may enter them
               *(x for d in needed for x in ("--ro-bind-try", f"/{d}", f"/{d}"))], root, []
    if shutil.which("unshare") and shutil.which("setpriv"):
        caps = "-all,+setuid,+setgid" if root else "-all"
        yield ["env", f"CAPS={caps}", "unshare", "-mnpif" if root else "-Urmnpif", "--kill-child", "sh", "-c", JAIL, "sh", folder,
               " ".join(needed)], root, []
    yield [], root, ["a file system of its own", "a network cut off", "an end to all that it starts"]


@lru_cache
def sandbox_command():
    """The best sandbox that works here, said once. -> (command line before Python's, whether to become nobody, what is missing)"""
    if not sys.platform.startswith(("linux", "darwin")):
        fail("programs written by a model are run on Linux and macOS only: leave humaneval out of --tasks")
    sandbox_command.folder = tempfile.TemporaryDirectory(prefix="npuchat-jail-")  # goes when Python ends
    for command, nobody, missing in sandboxes(sandbox_command.folder.name):
        if run_program("pass", seconds=30, sandbox=(command, nobody))[0] == "ok":
            how = next((f"through {name} " for name in ("bwrap", "unshare") if name in command), "")
            auto(f"programs written by the model run {how}in a process with limits" + (", as nobody" if nobody else ""))
            if missing:
                warn(f"the sandbox lacks {', '.join(missing)}: install bubblewrap, or --sandbox=strict to run no such program")
            return command, nobody, missing
    fail("no program can be started in a sandbox here: leave humaneval out of --tasks")


def run_program(code, seconds=5, memory=2**28, output=2**16, sandbox=None):
    """Run Python code in a process of its own without a network and without our files, within limits. -> (what became of it: "ok",
    "error", "timeout", "output", its output of at most so many bytes). memory: bytes for each of at most 16 processes."""
    command, nobody = sandbox or sandbox_command()[:2]
    word = secrets.token_hex(16).encode()
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c",
              RUNNER.format(memory=memory, seconds=seconds, uid=61184 + secrets.randbelow(4336) if nobody else 0)]
    with tempfile.TemporaryDirectory(prefix="npuchat-run-") as home, tempfile.TemporaryFile() as program:
        program.write(word + b" " + code.encode("utf-8", "replace"))
        program.seek(0)
        os.chmod(home, 0o777)
        process = subprocess.Popen([*command, *python], stdin=program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=home,
                                   start_new_session=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "MALLOC_ARENA_MAX": "1"})
        end, said, status = time.monotonic() + seconds, b"", "error"
        os.set_blocking(process.stdout.fileno(), False)
        try:
            while True:
                over = process.poll() is not None
                ready = select.select([process.stdout], [], [], 0 if over else max(0, min(0.1, end - time.monotonic())))[0]
                block = (process.stdout.read(2**16) or b"") if ready else b""
                said += block
                if len(said) > output or time.monotonic() > end:
                    status = "output" if len(said) > output else "timeout"
                    break
                if over and not block:
                    break
                if ready and not block:  # it has closed its output, and may still run
                    time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    if status == "error" and said.endswith(word) and process.returncode == 0:
        status = "ok"
    return status, said[:output].removesuffix(word).decode("utf-8", "replace")


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


def pass_at_k(n, c, k):
    """The chance that k of n tries, of which c were right, have a right one among them (Chen et al. 2021)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def summarize(scores):
    """Mean and standard error of scores in 0..1."""
    n, mean = len(scores), statistics.fmean(scores) if scores else 0.0
    return {"acc": round(mean, 4), "n": n, "stderr": round(math.sqrt(statistics.pvariance(scores, mean) / n), 4) if n else 0.0}


@torch.inference_mode()
def evaluate_task(model, tok, dev, task, limit=200, B=64, max_new_tokens=0, num_samples=1, deadline=math.inf, folder=None):
    """How many of the first `limit` problems are solved: by the letter with the highest logit, or by an answer, graded. Ranks share
    the problems. -> {"acc", "n", "stderr"}; "groups" of problems; with num_samples tries at temperature 1 instead of a greedy one
    acc is their mean, and "pass@k" holds the share of problems solved in k tries. max_new_tokens 0: what the task needs.

    deadline: the time.monotonic() after which no more problems are begun. folder: where <task>.jsonl gets a line per problem."""
    n, T, new = min(limit, len(task)), model.config.max_seq_len, max_new_tokens or task.new_tokens

    def answers(batch):
        """-> what the model answers to each item of the batch, each a list of tries"""
        prompts = [ids for ids, *_ in batch]
        if task.kind == "generative":
            tries = complete(model, tok, prompts, dev, max_new_tokens=new, num_samples=num_samples,
                             temperature=float(num_samples > 1), seed=[[42, i] for _, i, _ in batch])
            return [[visible_text(tok, tokens) for tokens, _ in group] for group in tries]
        longest = max(map(len, prompts))
        ids = torch.tensor([p + [tok.bos] * (longest - len(p)) for p in prompts], device=dev.device)
        with dev.autocast():
            logits = model(ids, at=(list(range(len(prompts))), [len(p) - 1 for p in prompts])).cpu()
        letters = [[tok.encode(letter)[0] for letter in c["letters"]] for *_, c in batch]
        return [[c["letters"][int(row[ids].argmax())]] for row, ids, (*_, c) in zip(logits, letters, batch)]

    records, too_long, bar = [], 0, progress(total=n, desc=task.name, unit="problem")
    at_once = n  # sorted by length: the more at once, the less padding
    if deadline < math.inf:
        at_once = (B if task.kind == "categorical" else min(B, 16)) * dev.world_size
    for at in range(0, n, max(1, at_once)):
        if dev.sum(int(time.monotonic() > deadline)):
            break
        chosen = range(at, min(at + at_once, n))[dev.rank :: dev.world_size]
        asked = [(tok.render_for_completion(task[i]), i, task[i]) for i in chosen]
        records += [{"i": i, "score": 0.0, "answers": []} for ids, i, _ in asked if len(ids) >= T]
        fitting = sorted((x for x in asked if len(x[0]) < T), key=lambda x: len(x[0]))
        for batch, given in in_batches(fitting, B, answers, dev):
            with ThreadPoolExecutor(8) as pool:  # some graders run programs
                grades = list(pool.map(lambda x: [task.grade(x[0][2], answer) for answer in x[1]], zip(batch, given)))
            records += [{"i": i, "score": statistics.fmean(g), "answers": tries, "grades": g} for (_, i, _), tries, g in
                        zip(batch, given, grades)]
            bar.update(len(batch) * dev.world_size)
    bar.close()
    records = sorted(dev.gather(records), key=lambda r: r["i"])
    if too_long := sum(not r["answers"] for r in records):
        auto(f"{task.name}: {too_long} of {len(records)} problems are longer than the context of {T} tokens and count as wrong")
    result = summarize([r["score"] for r in records])
    groups = {}
    for r in records:
        groups.setdefault(task[r["i"]].get("group"), []).append(r["score"])
    if len(groups) > 1:
        result["groups"] = {g: summarize(scores) for g, scores in sorted(groups.items())}
    if num_samples > 1 and task.kind == "generative":
        right = [sum(g > 0.5 for g in r.get("grades", [])) for r in records]
        result["pass@k"] = {k: round(statistics.fmean(pass_at_k(num_samples, c, k) for c in right), 4)
                            for k in (2**j for j in range(num_samples.bit_length())) if right}
    if folder and dev.is_main:
        lines = [json.dumps({"i": r["i"], "score": r["score"], "question": task[r["i"]]["messages"][0]["content"],
                             "right": task[r["i"]].get("answer"), "answers": r["answers"]}, ensure_ascii=False) for r in records]
        write_atomic(Path(folder) / f"{task.name}.jsonl", "\n".join(lines) + "\n")
    return result


def chat_core(results):
    """Mean over tasks of the accuracy above chance: 0 is guessing, 1 is perfect. Depends on which tasks were run."""
    centred = [(r["acc"] - TASKS[n].baseline) / (1 - TASKS[n].baseline) for n, r in results.items()]
    return statistics.fmean(centred) if centred else 0.0


def score_fields(results):
    """Results for a line of the log."""
    return [f"ChatCORE {chat_core(results):.4f}"] * bool(results) + [f"{n} {100 * r['acc']:.0f}%" for n, r in results.items()]


def evaluate_chat(model, tok, dev, task_list, minutes=0.0, **options):
    """All tasks. -> {name: {"acc", "n", "stderr"}}. minutes: for all of them together, in equal parts; 0 = as long as it takes"""
    results, end = {}, time.monotonic() + 60 * minutes
    for k, task in enumerate(task_list):
        now = time.monotonic()
        deadline = now + (end - now) / (len(task_list) - k) if minutes else math.inf
        result = evaluate_task(model, tok, dev, task, deadline=deadline, **options)
        if result["n"]:
            results[task.name] = result
        if result["n"] < min(options.get("limit", 200), len(task)):
            warn(f"{task.name}: time was up after {result['n']} problems")
    return results


# --- CORE --------------------------------------------------------------------------------------------------------------------
CORE_SIZE = 22  # tasks, of DCLM (Li et al. 2024)
CORE_KEYS = {"multiple_choice": {"query", "choices", "gold"}, "schema": {"context_options", "continuation", "gold"},
             "language_modeling": {"context", "continuation"}}
CORE_HOST = "https://karpathy-public.s3.us-west-2.amazonaws.com"  # has nanochat's eval_bundle.zip


def core_tasks(home, limit=0):
    """The tasks of home/data/eval_bundle (or .zip, downloaded if neither is there) whose data it has: [{"label", "kind", "shots",
    "delimiter", "baseline", "rows"}]. limit: rows of each at most, of an order that a seed shuffles, as nanochat does."""
    yaml, folder = need("yaml", "reading core.yaml", "pyyaml"), Path(home, "data", "eval_bundle")
    bundle = folder if folder.is_dir() else download("/eval_bundle.zip", f"{folder}.zip", more=[CORE_HOST])
    try:
        root = folder if folder.is_dir() else zipfile.Path(bundle, "eval_bundle/")
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100  # given in percent
                     for row in csv.DictReader((root / "eval_meta_data.csv").read_text().splitlines())}
        tasks = []
        for t in yaml.safe_load((root / "core.yaml").read_text())["icl_tasks"]:
            path = root / "eval_data" / t["dataset_uri"]
            if path.exists():
                rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
                whole = [row for row in rows if CORE_KEYS[t["icl_task_type"]] <= row.keys()]
                if len(whole) < max(1, len(rows)):
                    warn(f"CORE: {t['label']} has {len(rows) - len(whole)} broken rows of {len(rows)}, which are left out")
                if not (rows := whole):
                    continue
                random.Random(1337).shuffle(rows)
                tasks.append({"label": t["label"], "kind": t["icl_task_type"], "shots": t["num_fewshot"][0],
                              "delimiter": t.get("continuation_delimiter", " "), "baseline": baselines[t["label"]],
                              "rows": rows[: limit or None]})
        if not tasks:
            raise ValueError("no task's data is there")
        return tasks
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, zipfile.BadZipFile, zlib.error) as e:
        fail(f"{bundle} is not an evaluation bundle ({type(e).__name__}: {e}): delete it, and run again")


def core_item(task, i):
    """Item i of a task as texts, after examples: one for each choice, of which the likeliest is chosen; of language modelling what
    is before the words to be said, and all."""
    rows, d, kind = task["rows"], task["delimiter"], task["kind"]
    shots = [rows[j + (j >= i)] for j in random.Random(1234 + i).sample(range(len(rows) - 1), min(task["shots"], len(rows) - 1))]
    item, shown = rows[i], {
        "multiple_choice": lambda s: f"{s['query']}{d}{s['choices'][s['gold']]}",
        "schema": lambda s: f"{s['context_options'][s['gold']]}{d}{s['continuation']}",
        "language_modeling": lambda s: f"{s['context'].strip()}{d}{s['continuation']}"}[kind]
    before = "".join(shown(s) + "\n\n" for s in shots)
    if kind == "multiple_choice":
        return [f"{before}{item['query']}{d}{choice}" for choice in item["choices"]]
    if kind == "schema":
        return [f"{before}{option}{d}{item['continuation']}" for option in item["context_options"]]
    return [f"{before}{item['context'].strip()}{d}".strip(), before + shown(item)]


def common_length(sequences):
    """How many elements sequences have in common at the beginning."""
    return next((i for i, tokens in enumerate(zip(*sequences)) if len(set(tokens)) > 1), min(map(len, sequences)))


def scored_parts(kind, sequences, T):
    """Which tokens of an item's sequences are scored: [(ids, start, end)]. Where one is longer than T tokens, all lose as many at
    the beginning, so that they still begin alike."""
    if kind == "language_modeling":
        sequences, starts = sequences[1:], [common_length(sequences)]
    elif kind == "schema":  # what they end with
        same = common_length([s[::-1] for s in sequences])
        starts = [len(s) - same for s in sequences]
    else:
        starts = [common_length(sequences)] * len(sequences)
    cut = max(0, min(max(map(len, sequences)) - T, min(starts) - 1))
    sequences = [s[cut : cut + T] for s in sequences]
    return [(s, max(1, min(a - cut, len(s) - 1)), len(s)) for s, a in zip(sequences, starts)]


@torch.inference_mode()
def evaluate_core(model, tok, dev, tasks, folder=None, deadline=math.inf, budget=16384):
    """CORE: the mean over tasks of the accuracy above chance. -> {"core", "core_tasks": {label: {"acc", "n", "stderr", "centred"}}}

    What an item's choices begin with is computed once, and items are computed side by side, of at most `budget` tokens together.
    A choice's score is the mean loss of its tokens; words are right when each was the likeliest token. Ranks share the items."""
    results, T = {}, model.config.max_seq_len

    def losses(batch):
        """batch: items, each [(ids, start, end)]. -> for each item [(mean loss, whether every token was the likeliest)]"""
        before = [min(common_length([ids for ids, *_ in item]), min(start for _, start, _ in item) - 1) for item in batch]
        rows = [(ids, start, end, b) for item, b in zip(batch, before) for ids, start, end in item]
        cache = None
        if min(before) > 0 and len(rows) > len(batch):
            longest = max(before)
            most = longest + max(len(ids) - b for ids, *_, b in rows)
            cache = KVCache(model.config, len(batch), min(T, most), dev.device, dev.dtype)
            ids = [item[0][0][:b] + [tok.bos] * (longest - b) for item, b in zip(batch, before)]
            with dev.autocast():
                model(torch.tensor(ids, device=dev.device), cache=cache, at=([0], [0]))
            cache.advance(before)
            cache.select([k for k, item in enumerate(batch) for _ in item])
        else:
            rows = [(*row, 0) for *row, _ in rows]
        longest = max(len(ids) - 1 - b for ids, *_, b in rows)  # the last token is only predicted
        padded = torch.tensor([ids[b:-1] + [tok.bos] * (longest - len(ids) + 1 + b) for ids, *_, b in rows], device=dev.device)
        places = [(r, t - 1 - b, ids[t]) for r, (ids, start, end, b) in enumerate(rows) for t in range(start, end)]
        at_rows, at_positions, targets = map(list, zip(*places))
        with dev.autocast():
            logits = model(padded, cache=cache, at=(at_rows, at_positions))  # (scored tokens, V)
        targets = torch.tensor(targets, device=dev.device)
        loss = (logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]).cpu()
        parts = [end - start for _, start, end, _ in rows]
        hits = (logits.argmax(-1) == targets).cpu()
        found = [(float(x.mean()), bool(y.all())) for x, y in zip(loss.split(parts), hits.split(parts))]
        return [[found.pop(0) for _ in item] for item in batch]

    for task in tasks:
        kind, n = task["kind"], len(task["rows"])
        if dev.sum(int(time.monotonic() > deadline)):
            warn(f"CORE: time was up before {task['label']}")
            break
        mine, records = range(n)[dev.rank :: dev.world_size], []
        texts = [core_item(task, i) for i in mine]
        encoded = iter(tok.encode_batch([text for item in texts for text in item]))
        items = [(i, scored_parts(kind, [[tok.bos, *next(encoded)] for _ in item], T)) for i, item in zip(mine, texts)]
        size = lambda item: max(len(ids) for ids, *_ in item[1]) * len(item[1])  # noqa: E731
        items.sort(key=size)
        bar = progress(total=n, desc=task["label"], unit="item")
        while items:
            many = max(1, budget // size(items[-1]))
            last, items = items[-many:], items[:-many]
            for batch, found in in_batches([parts for _, parts in last], many, losses, dev):
                for scores in found:
                    i, _ = last.pop(0)
                    pick = min(range(len(scores)), key=lambda j: scores[j][0])
                    right = scores[0][1] if kind == "language_modeling" else pick == task["rows"][i]["gold"]
                    records.append({"i": i, "score": float(right), "losses": [round(loss, 5) for loss, _ in scores]})
                bar.update(len(batch) * dev.world_size)
        bar.close()
        records = sorted(dev.gather(records), key=lambda r: r["i"])
        result = summarize([r["score"] for r in records])
        result["centred"] = round((result["acc"] - task["baseline"]) / (1 - task["baseline"]), 4)
        results[task["label"]] = result
        if folder and dev.is_main:
            write_atomic(Path(folder) / f"core_{task['label']}.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    return {"core": round(statistics.fmean(r["centred"] for r in results.values()), 4) if results else 0.0, "core_tasks": results}


def core_name(scores):
    """CORE is the mean over all of its tasks; over fewer it is another number, and says so."""
    n = len(scores["core_tasks"])
    return "CORE" if n == CORE_SIZE else f"CORE over {n} of {CORE_SIZE} tasks"


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
        if "core" in scores:
            cells[core_name(scores)] = f"{scores['core']:.4f}"
        for name, r in scores.get("tasks", {}).items():
            cells[f"{name} (n={r['n']})"] = f"{100 * r['acc']:.1f} ± {100 * r['stderr']:.1f}"
            for group, x in r.get("groups", {}).items():
                cells[f"{name}, {group} (n={x['n']})"] = f"{100 * x['acc']:.1f} ± {100 * x['stderr']:.1f}"
            for k, share in r.get("pass@k", {}).items():
                cells[f"{name} pass@{k}"] = f"{100 * share:.1f}"
        if "chat_core" in scores:
            cells["ChatCORE"] = f"{scores['chat_core']:.4f}"
        last = meta.get("metrics", {})
        cells.update({"steps": str(meta["step"]), "tokens": human(last.get("tokens", 0)), "time": duration(last.get("seconds", 0))})
        columns[stage] = cells
    names = list(dict.fromkeys(n for cells in columns.values() for n in cells if n not in ("ChatCORE", "steps", "tokens", "time")))
    names += ["ChatCORE", "steps", "tokens", "time"]
    lines = ["| metric | " + " | ".join(s.upper() for s in columns) + " |", "|---|" + "---:|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join([n, *(c.get(n, "-") for c in columns.values())]) + " |" for n in names])


def paired_table(runs):
    """How each stage changed what the one before could do, on the problems that both were given, as a Markdown table, or ""."""
    rows, stages = {}, list(runs)
    for before, after in zip(stages, stages[1:]):
        for path in sorted((runs[after][0] / "eval").glob("*.jsonl")):
            scores = [{x["i"]: x["score"] for x in read_log(p)} for p in (runs[before][0] / "eval" / path.name, path) if p.exists()]
            if len(scores) == 2 and (both := sorted(scores[0].keys() & scores[1].keys())):
                r = [scores[1][i] - scores[0][i] for i in both]
                error = statistics.pstdev(r) / len(r) ** 0.5
                rows.setdefault(path.stem, {})[after] = f"{100 * statistics.fmean(r):+.1f} ± {100 * error:.1f} (n={len(r)})"
    if not rows:
        return ""
    lines = [["paired change", *(f"{a} to {b}".upper() for a, b in zip(stages, stages[1:]))], ["---", *["---:"] * len(stages[1:])]]
    lines += [[name, *(cells.get(s, "-") for s in stages[1:])] for name, cells in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_report(home):
    """out/report.md and out/curves.png from what the stages have left. -> the table, or "" when there is nothing yet"""
    runs = stage_runs(home)
    if not runs:
        return ""
    table, parts = report_table(runs), ["# npuchat: report\n"]
    parts.append(table + "\n\nTasks: accuracy in percent on test problems, greedy, ± standard error. val bpb: bits per "
                 "byte on validation text. ChatCORE: mean accuracy above chance over the tasks listed. "
                 "Time: training with its evaluations.\n")
    if changes := paired_table(runs):
        parts.append(changes + "\n\nOn the same problems, in percent, ± standard error of the mean difference: what is within two "
                     "of them is noise.\n")
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
    if sandbox not in ("auto", "strict"):
        fail(f"--sandbox={sandbox} is not one of auto, strict")
    dev = setup(device_type, dtype)
    runs = decided_by_main(stage_runs)(out_dir) if source == "all" else {}
    metas = [m for _, m in runs.values()] or [find_checkpoint(out_dir, "base" if source == "all" else source)]
    names = [n.strip() for n in tasks.split(",") if n.strip()]
    task_list = make_tasks(",".join(n for n in names if n != "core"), "test", out_dir, dev, max_problems)
    if any(isinstance(t, HumanEval) for t in task_list) and sandbox_command()[2] and sandbox == "strict":
        fail("--sandbox=strict: there is no whole sandbox here for humaneval; install bubblewrap, or leave the task out")
    core, val, summary = [], {}, {}
    if "core" in names:
        with dev.first_per_node():
            core = core_tasks(out_dir, max_problems)
    for meta in metas:
        place, stage = Path(meta["path"]).parent / "eval.json", meta["stage"]
        key = {"step": meta["step"], "saved_at": meta["saved_at"],
               "asked": [tasks, max_problems, max_minutes, max_new_tokens, num_samples, sandbox, eval_tokens, data_dir]}
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
            t0, folder = time.time(), place.with_name("eval")
            bpb, by_source = evaluate_bpb(model, val[where], tok, dev, T, max(1, 4096 // T), eval_tokens)
            scores = {**key, "val_bpb": bpb, "val_bpb_by_source": by_source}
            if core:
                share = max_minutes * len(core) / (len(core) + len(task_list))
                scores |= evaluate_core(model, tok, dev, core, folder, time.monotonic() + 60 * share if share else math.inf)
            left = max(1e-9, max_minutes - (time.time() - t0) / 60) if max_minutes else 0
            scores["tasks"] = evaluate_chat(model, tok, dev, task_list, left, limit=max_problems, B=device_batch_size or 64,
                                            max_new_tokens=max_new_tokens, num_samples=num_samples, folder=folder)
            scores["chat_core"] = round(chat_core(scores["tasks"]), 4)
            scores["seconds"] = round(time.time() - t0, 1)
            if dev.is_main:
                write_atomic(place, json.dumps(scores, indent=1))
            print0(f"{stage}: val bpb {scores['val_bpb']:.4f}, " + (f"{core_name(scores)} {scores['core']:.4f}, " if core else "")
                   + (f"ChatCORE {scores['chat_core']:.4f}, " if task_list else "")
                   + ", ".join(f"{n} {100 * r['acc']:.1f}%" for n, r in scores["tasks"].items()) + f" ({scores['seconds']} s)")
        summary[stage] = {"val_bpb": round(scores["val_bpb"], 4), "chat_core": scores["chat_core"]}
        summary[stage] |= {"core": scores["core"]} if "core" in scores else {}
        summary[stage].update({n: r["acc"] for n, r in scores["tasks"].items()})
    if dev.is_main:
        print0("\n" + write_report(out_dir) + f"\n\nreport in {out_dir}/report.md, curves in {out_dir}/curves.png")
        print(json.dumps(summary))
    cleanup()


if __name__ == "__main__":
    config = configure(globals())
    main()

"""
How does text become tokens, and tokens become rows of a batch?

In order: where text comes from (a folder, a hub dataset, or what this Python installation carries), how it is cut into words,
the byte-level BPE that is trained on them, the tokenizer with its file and chat template, the packing of token sequences into
rows, and the cache of tokenised text. Last what the command line offers:

    python tokenizer.py                                 # train on the embedded text -> out/tokenizer/tokenizer.json
    python tokenizer.py --data_dir=my_texts             # on a folder of .parquet, .jsonl or .txt files
    python tokenizer.py --data_dir=org/name             # on a dataset of the Hugging Face hub, or of the mirror in HF_ENDPOINT
    python tokenizer.py --eval=1 --data_dir=my_texts    # how many bytes a token of it stands for, source by source
    python tokenizer.py --show=chats.jsonl              # conversations as the model sees them: trained tokens green, others grey
    python tokenizer.py --bench=1 --data_dir=my_texts   # training, encoding and packing against the libraries that are installed
    python tokenizer.py --vocab_size=512 --max_chars=200000 --out_dir=/tmp/smoke      # smoke run

Reads text; writes out_dir/tokenizer/: tokenizer.json (the Hugging Face tokenizers format, never a pickle), its checksum in
tokenizer.meta.json, and tokenizer_config.json, the chat template for transformers and vLLM.
"""
from common import (Device, auto, command, configure, fail, file_sha256, hub_fetch, hub_files, human, len_cores, need, print0,
                    progress, put_aside, seal, warn, write_atomic)

import atexit
import bisect
import codecs
import contextlib
import hashlib
import heapq
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import queue
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import numpy as np
import tiktoken
import torch

# --- CONFIG ----------------------------------------------------------------------------------------------------------
vocab_size = 4096        # tokens, the nine specials included
data_dir = ""            # folder with .parquet, .jsonl or .txt, or a hub dataset org/name, or several by commas; "" = embedded text
out_dir = "out"          # the tokenizer goes to out_dir/tokenizer
max_chars = 50_000_000   # characters to train on
doc_cap = 20_000         # characters of one document that count
pattern = "gpt4"         # how text is cut into words before merging: gpt4, or cjk (runs of Han characters are cut too)
trainer = "python"       # python needs nothing; rust uses rustbpe, the merges are the same
resume = True            # false: train again even if a sound tokenizer is there, count again what was counted
eval = False             # instead of training: bytes per token of the tokenizer in out_dir on data_dir, beside GPT-2's vocabulary
gpt2_dir = ""            # folder with GPT-2's vocab.bpe, for --eval; "" = let tiktoken download it
show = ""                # instead of training: print the conversations of this .jsonl as they are tokenised
bench = False            # instead of training: time trainers, encoding and packing; ends with one line of JSON

# ---------------------------------------------------------------------------------------------------------------------
# Text. A corpus is a list of shards; a shard is a file (or all of the embedded text) and yields documents (text, source).
# ---------------------------------------------------------------------------------------------------------------------
TEXT_SUFFIXES = (".parquet", ".jsonl", ".txt")
TXT_DOCUMENT = 5000  # characters, at least, of a document cut from a .txt file
VAL_SHARE = 100  # one document in so many is for validation, chosen by a hash of its text ...
VAL_SHARE_EMBEDDED = 20  # ... of the embedded text, which has only a few hundred


def is_val(text, share=VAL_SHARE):
    """Whether a document belongs to the validation set: a fact of its text alone, so no split file can get lost."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") % share == 0


@cache
def embedded_documents():
    """What every Python carries: the standard library's sources, Python's help topics, installed packages' documentation.
    One document per file or topic, without duplicates, in an order given by each text's hash: a mixture from the start."""
    paths, seen, docs = sysconfig.get_paths(), set(), []
    stdlib, site = Path(paths["stdlib"]), Path(paths["purelib"])

    def add(text, source):
        key = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
        if 100 < len(text) < 300_000 and key not in seen:
            seen.add(key)
            docs.append((key, text, source))

    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "pydoc_data"}
    for root, sources in ((stdlib, ("*.py",)), (site, ("*.md", "*.rst", "METADATA"))):
        for path in sorted(p for pattern in sources for p in root.rglob(pattern)):
            if not skip & set(path.relative_to(root).parts):
                try:
                    add(path.read_text(encoding="utf-8"), "code" if root == stdlib else "docs")
                except (UnicodeDecodeError, OSError):
                    continue  # a source in another encoding, or a broken link
    for topic in help_topics().values():
        add(topic, "docs")
    docs.sort()
    return [(text, source) for _, text, source in docs]


def help_topics():
    """Python's own help texts, {topic: text}; empty in distributions that leave them out."""
    if not importlib.util.find_spec("pydoc_data"):
        return {}
    from pydoc_data.topics import topics
    return topics


def find_shards(data_dir, out_dir):
    """The files of a corpus, as paths (None: the embedded text). data_dir: a folder, a file, a hub dataset's name, several
    of these by commas (their files then come in turn), or "". Files of the hub are returned as (repo, path, facts) and
    fetched when their turn comes."""
    if not data_dir:
        return [None]
    if "," in data_dir and not Path(data_dir).exists():
        corpora = [find_shards(d.strip(), out_dir) for d in data_dir.split(",") if d.strip()]
        if not corpora:
            fail(f"--data_dir={data_dir} names nothing")
        return [shard for turn in itertools.zip_longest(*corpora, fillvalue="") for shard in turn if shard != ""]
    folder = Path(data_dir)
    if folder.is_dir():
        shards = sorted(p for s in TEXT_SUFFIXES for p in folder.rglob(f"*{s}") if p.is_file())
        if not shards:
            fail(f"--data_dir={data_dir} holds no {', '.join(TEXT_SUFFIXES)} file")
        return shards
    if folder.is_file():
        if folder.suffix not in TEXT_SUFFIXES:
            fail(f"--data_dir={data_dir} is no {', '.join(TEXT_SUFFIXES)} file")
        return [folder]
    local = folder.parent.is_dir() and folder.parent != Path(".")  # a folder beside it exists: a slip, not a dataset
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data_dir) and not local:
        shards = [(data_dir, p, f) for p, f in sorted(hub_files(data_dir, out_dir).items()) if p.endswith(TEXT_SUFFIXES)]
        if not shards:
            fail(f"hub dataset {data_dir} holds no {', '.join(TEXT_SUFFIXES)} file")
        return shards
    fail(f"--data_dir={data_dir} is not a folder, and not the name of a hub dataset (org/name)")


def script_of(text, sample=2000):
    """A document that nobody has named a source of is counted by its script."""
    return "Han script" if sum("\u4e00" <= c <= "\u9fff" for c in text[:sample]) > 0.2 * len(text[:sample]) else "other scripts"


def read_shard(shard, out_dir):
    """Yield (text, source) for each document of a shard, fetching it first if it is on the hub."""
    if shard is None:
        yield from embedded_documents()
        return
    path = hub_fetch(*shard[:2], out_dir, shard[2]) if isinstance(shard, tuple) else Path(shard)
    if path.suffix == ".parquet":
        pq = need("pyarrow.parquet", "reading parquet")
        try:
            file = pq.ParquetFile(path)
            if "text" not in file.schema_arrow.names:
                fail(f"{path} has no column `text`, only {', '.join(file.schema_arrow.names)}")
            columns = [c for c in ("text", "source") if c in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=512, columns=columns):
                for row in batch.to_pylist():
                    if not isinstance(row["text"] or "", str):
                        fail(f"the column `text` of {path} does not hold text")
                    if row["text"] and not row["text"].isspace():
                        yield row["text"], str(row.get("source") or script_of(row["text"]))
        except (ValueError, OSError) as e:  # pyarrow's errors are of these kinds
            fail(f"{path} is not a sound parquet file ({e})")
    elif path.suffix == ".jsonl":
        with open(path, encoding="utf-8-sig", errors="replace") as f:
            for n, line in enumerate(f, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    text = None
                if not isinstance(text, str):
                    fail(f"{path} line {n} is not a JSON object with a `text`")
                if text and not text.isspace():
                    yield text.encode("utf-8", "replace").decode(), path.stem  # half an emoji cannot be encoded
    else:  # plain text: cut at empty lines into documents of some length, so that one big file can be split too
        document, size = [], 0
        with open(path, encoding="utf-8-sig", errors="replace") as f:
            while line := f.readline(TXT_DOCUMENT):  # a piece of a line, when lines are long
                document.append(line)
                size += len(line)
                if size > 20 * TXT_DOCUMENT or (size > TXT_DOCUMENT and line == "\n"):
                    if text := "".join(document).rstrip("\n"):
                        yield text, path.stem
                    document, size = [], 0
        if text := "".join(document).rstrip("\n"):
            yield text, path.stem


def same_shard(a, b):
    return a == b or (isinstance(a, Path) and isinstance(b, Path) and a.resolve() == b.resolve())


def shard_name(shard):
    return "embedded text" if shard is None else Path(shard[1] if isinstance(shard, tuple) else shard).name


def shard_key(shard):
    """What tells one shard's text from another's: the hub's facts about a file, or the hash of what is in it."""
    if isinstance(shard, tuple):
        return json.dumps(shard)
    if shard is None:
        return hash_texts(t for t, _ in embedded_documents())
    return file_key(shard, Path(shard).stat().st_mtime_ns)


@cache
def file_key(path, _modified):
    return Path(path).suffix + file_sha256(path)  # the same bytes are another text under another suffix


def hash_texts(texts):
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode("utf-8", "replace") + b"\xff")
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Words. Merges never cross a word's border, so a corpus need only be known as {word: how often it occurs}.
# ---------------------------------------------------------------------------------------------------------------------
# GPT-4's splitting pattern, but numbers in groups of at most two digits: better for small vocabularies. A word is a run of
# letters with the one space or sign before it; Chinese has no spaces, so there it is a whole clause.
GPT4 = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
# The same, but Han characters are apart from other letters, in words of at most eight. [^\P{L}\p{Han}]: letters, not Han.
CJK = GPT4.replace(r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?+[^\P{L}\p{Han}]+|[^\r\n\p{L}\p{N}]?\p{Han}{1,8}")
PATTERNS = {"gpt4": GPT4, "cjk": CJK}
BATCH_CHARS = 4_000_000  # characters that a process counts at a time
MAX_WORDS = 5_000_000  # different words kept in memory; beyond that the rarest are forgotten, and merges are nearly the best
SAVE_SECONDS = 5  # counting is saved after the first shard that ends so long after the last time


def members(prop, text):
    """The characters of `text` that have a property such as \\p{L}, by the Unicode tables of tiktoken, which does the encoding."""
    matcher = tiktoken.Encoding(prop, pat_str=prop, mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={})
    return matcher.decode(matcher.encode_ordinary(text))


@cache
def class_ranges(prop):
    """A property as ranges for a character class of the re module, among the characters of 16 bits."""
    points = map(ord, members(prop, "".join(map(chr, [*range(0xD800), *range(0xE000, 2**16)]))))
    runs = [[p for _, p in run] for _, run in itertools.groupby(enumerate(points), lambda i_p: i_p[1] - i_p[0])]
    return "".join(f"\\u{run[0]:04x}-\\u{run[-1]:04x}" for run in runs)


@cache
def stand_in(wide):
    """A character of 16 bits that the patterns treat like this wider one."""
    facts = "".join(name for name, prop in (("H", r"\p{Han}"), ("L", r"\p{L}"), ("N", r"\p{N}")) if members(prop, wide))
    return {"HL": "的", "L": "ĸ", "N": "½", "H": "⺀", "HN": "〇", "": "¤"}[facts]


@cache
def splitter(pattern):
    """A function from text to the list of its words.

    The standard library's re is the fastest at hand, but knows no \\p{...}: it gets the classes written out. They end at 16 bits,
    since longer ones are slow; wider characters (emoji, rare Han) are replaced by stand-ins while the borders are looked for.
    Our patterns match the same without their possessive quantifiers, which came with Python 3.11."""
    inside, spelled = False, ""
    for piece in re.findall(r"\\[pP]\{\w+\}|\\.|[^\\]", pattern.replace("?+", "?").replace("++", "+")):
        if piece in "[]":
            inside = piece == "["
        ranges = class_ranges(piece) if piece[:2] in (r"\p", r"\P", r"\s", r"\S") else ""
        spelled += (ranges if inside else f"[{ranges}]") if ranges else piece
    find, wide = re.compile(spelled).findall, re.compile("[\U00010000-\U0010ffff]")

    def split(text):
        if len(text.encode("utf-16-le", "surrogatepass")) == 2 * len(text):
            return find(text)
        ends = itertools.accumulate(map(len, find(wide.sub(lambda m: stand_in(m[0]), text))), initial=0)
        return [text[a:b] for a, b in itertools.pairwise(ends)]
    return split


def count_batch(texts, pattern):
    words, split = Counter(), splitter(pattern)
    for text in texts:
        words.update(split(text))
    return dict(words)


def counting_process(parent):
    """How each counting process begins: Ctrl-C is the parent's business, and when the parent is gone it goes too."""
    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()


class WordCounter:
    """Counts words in as many processes as there are cores, at most 16. Memory stays bounded: so many batches are under way,
    and so many words are kept. The processes are forked where that is possible, since a fresh one would have to import torch."""

    def __init__(self, pattern, words=()):
        self.pattern, self.words, self.batch, self.chars = pattern, Counter(words), [], 0
        self.pool, self.waiting, self.processes, self.forgetful = None, deque(), min(16, len_cores()), False

    def add(self, text):
        self.batch.append(text)
        self.chars += len(text)
        if self.chars >= BATCH_CHARS:
            self.submit()

    def submit(self):
        if self.pool is None:
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            self.pool = ProcessPoolExecutor(self.processes, context, counting_process, (os.getpid(),))
        self.waiting.append(self.pool.submit(count_batch, self.batch, self.pattern))
        self.batch, self.chars = [], 0
        while len(self.waiting) > self.processes + 1:
            self.collect()

    def collect(self):
        self.words.update(self.waiting.popleft().result())
        if len(self.words) > MAX_WORDS:
            if not self.forgetful:
                auto(f"over {human(MAX_WORDS)} different words: from here on the rarest are forgotten, to stay within memory")
            self.forgetful, floor = True, 1
            while len(self.words) > MAX_WORDS // 2:
                floor += 1
                self.words = Counter({w: n for w, n in self.words.items() if n >= floor})

    def result(self):
        """All words so far. A little text is counted here: it is not worth starting processes."""
        if self.batch and self.pool is None:
            self.words.update(count_batch(self.batch, self.pattern))
            self.batch, self.chars = [], 0
        elif self.batch:
            self.submit()
        while self.waiting:
            self.collect()
        return self.words

    def close(self):
        if self.pool:
            self.pool.shutdown(cancel_futures=True)


def training_texts(shards, first=0, chars=0):
    """Yield (number of the shard, document) from shard `first` on: at most max_chars characters, doc_cap of each document."""
    bar = progress(total=max_chars, desc="reading", unit="char", initial=chars)
    for number, shard in enumerate(shards[first:], first):
        for text, _ in read_shard(shard, out_dir):
            text = text[: min(doc_cap, max_chars - chars)]
            chars += len(text)
            bar.update(len(text))
            yield number, text
            if chars >= max_chars:
                return


def count_words(shards, state):
    """{word: count} of the training text. What was counted is kept in the file `state` now and then, after a whole shard, and a
    later call goes on from there."""
    stamps = [(s.stat().st_size, s.stat().st_mtime_ns) if isinstance(s, Path) else "" for s in shards]
    key = json.dumps([PATTERNS[pattern], max_chars, doc_cap, list(map(str, shards)), stamps])
    words, done, chars = load_counts(state, key) if resume else ({}, 0, 0)
    counter, saved, cost, current = WordCounter(PATTERNS[pattern], words), time.time(), 0.0, done
    del words
    try:
        for number, text in training_texts(shards, done, chars):
            if number != current and time.time() - saved > max(SAVE_SECONDS, 20 * cost):
                t0 = time.time()
                save_counts(state, key, counter.result(), number, chars)
                saved, cost = time.time(), time.time() - t0
            current, chars = number, chars + len(text)
            counter.add(text)
        return counter.result()
    except BrokenProcessPool:
        fail("a process that counted words was killed, probably for want of memory; give a smaller --max_chars")
    finally:
        counter.close()


def save_counts(path, key, words, done, chars):
    file = io.BytesIO()
    np.savez(file, key=np.array(key), progress=np.array([done, chars]), counts=np.fromiter(words.values(), np.int64, len(words)),
             words=np.frombuffer(join_words(words), np.uint8))
    write_atomic(path, file.getvalue())


def load_counts(path, key):
    """-> (words, shards done, characters read); nothing when there is no such file or it is of another text."""
    try:
        with np.load(path) as saved:
            if str(saved["key"]) == key:
                words = [w.decode("utf-8", "surrogatepass") for w in saved["words"].tobytes()[1:-1].split(b"\xff")]
                done, chars = map(int, saved["progress"])
                auto(f"{human(chars)} characters in {done} shards were counted before: going on from there (or --resume=0)")
                return dict(zip(words, saved["counts"].tolist())), done, chars
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile) as e:
        warn(f"{path} is damaged ({type(e).__name__}): counting from the beginning")
    return {}, 0, 0


def join_words(words):
    """Words as UTF-8 with the byte 0xff, which occurs in no UTF-8, before, between and behind them."""
    return b"\xff".join([b"", *[w.encode("utf-8", "surrogatepass") for w in words], b""])


# ---------------------------------------------------------------------------------------------------------------------
# Byte-pair encoding. Every word begins as its bytes; the most frequent pair of neighbours becomes a new token everywhere,
# and so on. Of equally frequent pairs the smallest wins, which makes the merges those of rustbpe, in the same order.
# ---------------------------------------------------------------------------------------------------------------------
BORDER = 0xFF  # stands between words; as a byte it occurs in no UTF-8
GONE = -1  # where a token was that has become part of its left neighbour
FLOOR_STEP = 16


def train_bpe(counts, n_merges):
    """Learn merges from {word: count}. -> [(left, right)] of token ids; merge i makes token 256 + i.

    All words lie in one flat array of tokens. Taking every pair into account at once would be slow and large, since most
    pairs are rare and will never be merged. So it goes by rounds: a round handles the pairs that occur at least `floor` times,
    and when none is left, the next one looks at all text again (shorter now) with a lower floor.
    """
    tok = np.frombuffer(join_words(counts), np.uint8).astype(np.int32)  # (N,)
    freq = np.array([0, *counts.values(), 0])  # what lies before the first border and behind the last are no words
    weight = freq[np.cumsum(tok == BORDER)]  # (N,) how often the word occurs that a position belongs to
    merges, floor = [], None
    bar = progress(total=n_merges, desc="merges", unit="merge")
    while len(merges) < n_merges and floor != 1:
        alive = (tok != GONE).nonzero()[0]
        tok, weight = tok[alive], weight[alive]
        found, floor = frequent_pairs(tok, weight, 256 + len(merges), floor)
        merge_round(LinkedText(tok, weight, floor), found, merges, n_merges, bar)
    bar.close()
    return merges


def frequent_pairs(tok, weight, n_tokens, floor):
    """-> [(pair, count, positions)] of the pairs that occur at least `floor` times, and the floor, now lower."""
    at = ((tok[:-1] != BORDER) & (tok[1:] != BORDER)).nonzero()[0]
    keys = tok[at].astype(np.int64) * n_tokens + tok[at + 1]
    if n_tokens <= 2048:  # few enough tokens for a table of all pairs
        table = np.bincount(keys, weight[at], minlength=1)
        floor = int(table.max()) // FLOOR_STEP
        chosen = table[keys] >= floor
    else:  # a pair is not more frequent than its tokens
        floor = floor // FLOOR_STEP
        single = np.bincount(tok, weight)
        chosen = (single[tok[at]] >= floor) & (single[tok[at + 1]] >= floor)
    floor = max(1, floor)
    groups = group_positions(keys[chosen], at[chosen], weight, floor)
    return [(divmod(key, n_tokens), count, positions) for key, count, positions in groups], floor


def group_positions(keys, at, weight, floor):
    """Positions `at` grouped by key. -> [(key, sum of weights, positions in ascending order)], sums below the floor left out."""
    if not len(at):
        return []
    bits = len(weight).bit_length()
    assert int(keys.max()).bit_length() + bits < 64, f"{len(weight)} tokens of text are too many for keys up to {keys.max()}"
    packed = (keys << bits) | at  # a plain sort of one array is several times faster than an argsort
    packed.sort()
    keys, at = packed >> bits, packed & ((1 << bits) - 1)
    fresh = np.empty(len(keys), dtype=bool)  # where another key begins
    fresh[0] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    first = fresh.nonzero()[0]
    sums = np.add.reduceat(weight.take(at), first)
    kept = (sums >= floor).nonzero()[0]
    if not len(kept):
        return []
    begin, end = first.take(kept).tolist(), np.append(first, len(at)).take(kept + 1).tolist()
    return [(key, n, at[a:b]) for key, n, a, b in zip(keys.take(begin).tolist(), sums.take(kept).tolist(), begin, end)]


def merge_round(text, found, merges, n_merges, bar):
    """Merge the most frequent pair of `text` until none is frequent; appends to merges. found: [(pair, count, positions)]

    A pair's count only ever falls once its tokens exist, so a heap of counts as they were is enough: what comes off it is
    counted again, and goes back if it has fallen.
    """
    heap, where = [], {}
    while True:
        for pair, count, positions in found:
            heapq.heappush(heap, (-count, pair))
            where[pair] = positions
        if not heap or len(merges) == n_merges:
            return
        count, pair = heapq.heappop(heap)
        positions, now = text.find(pair, where.pop(pair))
        if now == -count:
            merges.append(pair)
            bar.update(1)
            found = text.merge(pair, positions, 255 + len(merges))
        else:
            found = [(pair, now, positions)] if now >= text.floor else []


class LinkedText:
    """All words as tokens that know their living neighbours. Pairs with many positions are handled by numpy, all at once; those
    with few, which are most, one by one, which is the easier to read. Both see the same memory."""
    FEW = 24

    def __init__(self, tok, weight, floor):
        self.tok, self.weight, self.floor = tok, weight, floor
        self.nxt, self.prv = np.arange(1, len(tok) + 1), np.arange(-1, len(tok) - 1)
        self.views = [memoryview(array) for array in (tok, weight, self.nxt, self.prv)]  # fast to index one by one

    def find(self, pair, p):
        """Where a pair is still found among the positions p of its left token. -> (positions, count)"""
        left, right = pair
        if len(p) > self.FEW:
            p = np.asarray(p)
            p = p[(self.tok.take(p) == left) & (self.tok.take(self.nxt.take(p)) == right)]
            return p if len(p) > self.FEW else p.tolist(), int(np.add.reduce(self.weight.take(p)))
        tok, weight, nxt, _ = self.views
        p = p if isinstance(p, list) else p.tolist()
        p = [i for i in p if tok[i] == left and tok[nxt[i]] == right]
        return p, sum([weight[i] for i in p])

    def merge(self, pair, p, new):
        """Put the token `new` at the positions p of a pair. -> [(pair, count, positions)] of the frequent pairs this makes"""
        if len(p) > self.FEW:
            return self.merge_many(pair, p, new)
        tok, weight, nxt, prv = self.views
        done, made = [], {}
        for i in p:
            if tok[i] == pair[0]:  # not so in a run such as aaa, where the pair before took this token
                gone = nxt[i]
                tok[i], tok[gone] = new, GONE
                nxt[i] = after = nxt[gone]
                prv[after] = i
                done.append(i)
        for i in done:
            x, y = tok[prv[i]], tok[nxt[i]]
            if x != BORDER and x != new:  # (new, new) counts once, from its left half
                made.setdefault((x, new), []).append(prv[i])
            if y != BORDER:
                made.setdefault((new, y), []).append(i)
        sums = ((pair, sum([weight[i] for i in positions]), positions) for pair, positions in made.items())
        return [found for found in sums if found[1] >= self.floor]

    def merge_many(self, pair, p, new):
        tok, nxt, prv = self.tok, self.nxt, self.prv
        gone = nxt.take(p)
        if pair[0] == pair[1]:  # in a run such as aaa the pairs overlap: take every second one from where the run begins
            i = np.arange(len(p))
            begins = np.append(True, gone[:-1] != p[1:])
            every_second = (i - np.maximum.accumulate(np.where(begins, i, 0))) % 2 == 0
            p, gone = p[every_second], gone[every_second]
        after = nxt.take(gone)
        tok[p], tok[gone] = new, GONE
        nxt[p], prv[after] = after, p
        before = prv.take(p)
        x, y = tok.take(before), tok.take(after)
        has_x, has_y = (x != BORDER) & (x != new), y != BORDER
        side = 1 << 24  # added to a neighbour's id to tell (new, neighbour) from (neighbour, new)
        keys = np.concatenate((x[has_x], y[has_y] + side)).astype(np.int64)
        groups = group_positions(keys, np.concatenate((before[has_x], p[has_y])), self.weight, self.floor)
        return [((key, new) if key < side else (new, key - side), n, positions) for key, n, positions in groups]


def train_ranks(shards, vocab_size, state):
    """Mergeable ranks {bytes: id} for `vocab_size` tokens, the specials not counted, from the training text in shards."""
    if trainer == "rust":
        rust = need("rustbpe", "--trainer=rust").Tokenizer()
        rust.train_from_iterator((text for _, text in training_texts(shards)), vocab_size, pattern=PATTERNS[pattern])
        return {bytes(piece): rank for piece, rank in rust.get_mergeable_ranks()}
    return ranks_of(train_bpe(count_words(shards, state), vocab_size - 256))


def ranks_of(merges):
    """{bytes: id} of the 256 bytes and what the merges make of them."""
    pieces = [bytes([b]) for b in range(256)]
    for left, right in merges:
        pieces.append(pieces[left] + pieces[right])
    ranks = {piece: i for i, piece in enumerate(pieces)}
    assert len(ranks) == len(pieces), "two merges made the same token"
    return ranks


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer: text <-> ids, conversations -> (ids, mask), and the file it lives in.
# ---------------------------------------------------------------------------------------------------------------------
SPECIALS = ["bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start", "python_end",
            "output_start", "output_end"]
# The parts of an assistant's message: what special tokens stand around them, and whether they are trained on.
PARTS = {"text": (None, 1), "python": ("python", 1), "python_output": ("output", 0)}

# What render_conversation does, for transformers, vLLM and others. {% generation %} marks what the assistant says: there the
# mask is 1. (Text that spells a special token becomes that token in those libraries; here it stays text.)
CHAT_TEMPLATE = r"""
{{- '<|bos|>' -}}
{%- set ns = namespace(system='', turn=0) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' and loop.first -%}
    {%- set ns.system = message['content'] + '\n\n' -%}
  {%- elif message['role'] != ['user', 'assistant'][ns.turn % 2] -%}
    {{- raise_exception('users and assistants take turns, after at most one system message') -}}
  {%- elif message['role'] == 'user' -%}
    {{- '<|user_start|>' + ns.system + message['content'] + '<|user_end|>' -}}
    {%- set ns.system = '' -%}{%- set ns.turn = ns.turn + 1 -%}
  {%- else -%}
    {{- '<|assistant_start|>' -}}
    {%- set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string else message['content'] -%}
    {%- for part in parts -%}
      {%- if part['type'] == 'python_output' -%}
        {{- '<|output_start|>' + part['text'] + '<|output_end|>' -}}
      {%- elif part['type'] == 'python' -%}
        {%- generation -%}{{- '<|python_start|>' + part['text'] + '<|python_end|>' -}}{%- endgeneration -%}
      {%- elif part['type'] == 'text' -%}
        {%- generation -%}{{- part['text'] -}}{%- endgeneration -%}
      {%- else -%}
        {{- raise_exception('a part is text, python or python_output') -}}
      {%- endif -%}
    {%- endfor -%}
    {%- generation -%}{{- '<|assistant_end|>' -}}{%- endgeneration -%}
    {%- set ns.turn = ns.turn + 1 -%}
  {%- endif -%}
{%- endfor -%}
{%- if ns.system -%}{{- raise_exception('a system message must be followed by a user message') -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}""".strip()


@cache
def byte_alphabet():
    """GPT-2's printable stand-in for each byte, as tokenizer.json files spell tokens: {byte: character}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class Tokenizer:
    """Text <-> token ids. The special tokens' ids are attributes: tok.bos, tok.user_start, ..."""

    def __init__(self, ranks, pattern=GPT4, digest=""):
        assert sorted(ranks.values()) == list(range(len(ranks))) and all(ranks[bytes([b])] == b for b in range(256)), \
            "ranks must count from 0, the 256 bytes first"
        self.ranks, self.pattern, self.hash = ranks, pattern, digest
        self.special = {name: len(ranks) + i for i, name in enumerate(SPECIALS)}
        self.__dict__.update(self.special)
        self.vocab_size = len(ranks) + len(SPECIALS)
        self.encoding = tiktoken.Encoding("npuchat", pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens={f"<|{n}|>": i for n, i in self.special.items()})

    def encode(self, text):
        """Text (or bytes) as ids. Special tokens are never parsed from text: what a user types is only text."""
        if isinstance(text, str):
            return self.encoding.encode_ordinary(text)
        ids = []  # bytes that are no UTF-8 come out as lone surrogates, and become the tokens of single bytes
        for piece in re.findall("[\udc80-\udcff]+|[^\udc80-\udcff]+", text.decode("utf-8", "surrogateescape")):
            broken = "\udc80" <= piece[0] <= "\udcff"
            ids += [ord(c) - 0xDC00 for c in piece] if broken else self.encoding.encode_ordinary(piece)
        return ids

    def encode_batch(self, texts):
        """Many texts at once, on all cores. -> list of lists of ids"""
        return self.encoding.encode_ordinary_batch(texts, num_threads=len_cores())

    def decode(self, ids):
        return self.encoding.decode(ids, errors="replace")

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes(ids)

    def decode_stream(self, ids):
        """Yield the text of ids piece by piece: characters that a token's end cuts through wait for the next token."""
        decode = self.stream_decoder()
        for piece in itertools.chain(map(decode, ids), map(decode, [None])):
            if piece:
                yield piece

    def stream_decoder(self):
        """The same for ids that come one at a time: a function from an id to the text that is complete with it. Called with
        None at the end, it gives up what is left."""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: utf8.decode(b"" if token is None else self.encoding.decode_single_token_bytes(token), token is None)

    def token_bytes(self):
        """(V,) the number of UTF-8 bytes each token stands for, 0 for specials: the denominator of bits per byte."""
        sizes = torch.zeros(self.vocab_size, dtype=torch.int32)
        for piece, i in self.ranks.items():
            sizes[i] = len(piece)
        return sizes

    # --- file ---
    def save(self, folder, facts):
        """tokenizer.json in the Hugging Face tokenizers format, tokenizer_config.json for transformers, and a sidecar with the
        SHA-256 of the first and how it was made; the sidecar comes last."""
        alphabet = byte_alphabet()

        def spell(piece):
            return "".join(alphabet[b] for b in piece)

        merges = []
        for piece, rank in sorted(self.ranks.items(), key=lambda kv: kv[1])[256:]:
            merges.append([spell(p) for p in split_piece(piece, rank, self.ranks)])
        added = [{"id": i, "content": f"<|{n}|>", "single_word": False, "lstrip": False, "rstrip": False,
                  "normalized": False, "special": True} for n, i in self.special.items()]
        data = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
                "post_processor": None,
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                          "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                          "vocab": {spell(p): i for p, i in self.ranks.items()}, "merges": merges}}
        path = Path(folder) / "tokenizer.json"
        write_atomic(path, json.dumps(data, ensure_ascii=False))
        write_atomic(path.with_name("tokenizer_config.json"), json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|assistant_end|>",
            "pad_token": "<|bos|>", "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}, indent=1))
        self.hash = file_sha256(path)
        sidecar = {"sha256": self.hash, "vocab_size": self.vocab_size, **facts}
        write_atomic(path.with_name("tokenizer.meta.json"), json.dumps({**sidecar, "seal": seal(sidecar)}, indent=1))

    @classmethod
    def load(cls, folder):
        """-> Tokenizer, or ends with a sentence that says how to make it again."""
        path = Path(folder) / "tokenizer.json"
        again = command("tokenizer.py", Path(folder).parent)
        if not path.exists():
            fail(f"there is no tokenizer in {folder}; make one with: {again}")
        try:
            meta, digest = read_sidecar(folder), file_sha256(path)
            if not meta:
                fail(f"{path.with_name('tokenizer.meta.json')} is missing or was altered, so {path.name} cannot be checked; "
                     f"make both again with: {again}")
            if digest != meta["sha256"]:
                fail(f"{path} is damaged (its checksum differs from tokenizer.meta.json); make it again with: {again}")
            data = json.loads(path.read_text(encoding="utf-8"))
            back = {c: b for b, c in byte_alphabet().items()}
            ranks = {bytes(back[c] for c in piece): i for piece, i in data["model"]["vocab"].items()}
            return cls(ranks, data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"], digest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            fail(f"{path} cannot be read ({type(e).__name__}: {e}); make it again with: {again}")

    # --- chat template ---
    def segments(self, conversation):
        """A conversation as [(special token's id or text, trained)]. Raises ValueError on a malformed one, see turns()."""
        out = [(self.bos, 0)]

        def say(text, trained):
            if isinstance(out[-1][0], str):  # two parts of text in a row are one text
                out[-1] = (out[-1][0] + text, trained)
            else:
                out.append((text, trained))

        for role, parts in turns(conversation):
            if role == "user":
                out.append((self.user_start, 0))
                say(parts[0][1], 0)
                out.append((self.user_end, 0))
                continue
            out.append((self.assistant_start, 0))
            for kind, text in parts:
                bracket, trained = PARTS[kind]
                out += [(self.special[f"{bracket}_start"], trained)] if bracket else []
                say(text, trained)
                out += [(self.special[f"{bracket}_end"], trained)] if bracket else []
            out.append((self.assistant_end, 1))
        return out

    def render_conversation(self, conversation, max_tokens=None):
        """A conversation as (ids, mask): mask 1 where the assistant speaks, which is what SFT trains on.

        Cut to max_tokens at the end. When nothing of the assistant would be left, the first question loses its beginning
        instead; raises ValueError when even that cannot keep a token of the assistant."""
        segments = self.segments(conversation)
        return self.cut(*flatten(segments, map(self.encode, texts_of(segments))), max_tokens)

    def render_batch(self, conversations, max_tokens):
        """Many conversations on all cores. -> [(ids, mask, tokens lost by cutting)], empty where render_conversation raises"""
        batch, out = [], []
        for conversation in conversations:
            try:
                batch.append(self.segments(conversation))
            except ValueError:
                batch.append([])
        encoded = iter(self.encode_batch([text for segments in batch for text in texts_of(segments)]))
        for segments in batch:
            full, mask = flatten(segments, encoded)
            try:
                ids, mask = self.cut(full, mask, max_tokens)
            except ValueError:
                ids, mask = [], []
            out.append((ids, mask, len(full) - len(ids)))
        return out

    def cut(self, ids, mask, max_tokens):
        """A rendered conversation of at most max_tokens, see render_conversation."""
        if max_tokens is None or 1 in mask[:max_tokens]:
            return ids[:max_tokens], mask[:max_tokens]
        room = max_tokens - 4  # <|bos|> <|user_start|> ... <|user_end|> <|assistant_start|> come in any case
        start = ids.index(self.assistant_start) + 1 if 1 in mask else 0
        needed = mask[start:].index(1) + 1 if 1 in mask else room + 1
        if needed > room:
            raise ValueError(f"no token of the assistant can be kept in {max_tokens} tokens")
        kept = min(len(ids) - start, max(needed, room // 2))  # of what follows the question
        question = ids[start - 2 - (room - kept) : start - 2]  # its end
        ids = ids[:2] + question + ids[start - 2 : start + kept]
        return ids, [0] * (len(ids) - kept) + mask[start : start + kept]

    def render_for_completion(self, conversation):
        """The ids up to where the assistant begins to speak; a last assistant message is left out."""
        messages = conversation["messages"]
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self.render_conversation({"messages": messages})[0] + [self.assistant_start]


def texts_of(segments):
    return [x for x, _ in segments if isinstance(x, str)]


def flatten(segments, encoded):
    """Segments, with the ids of their texts from the iterator `encoded`, as (ids, mask)."""
    ids, mask = [], []
    for x, trained in segments:
        tokens = [x] if isinstance(x, int) else next(encoded)
        ids += tokens
        mask += [trained] * len(tokens)
    return ids, mask


def split_piece(piece, rank, ranks):
    """The two tokens whose merge made `piece`: what BPE arrives at using only the merges before it."""
    parts = [bytes([b]) for b in piece]
    while len(parts) > 2:
        scores = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
        i = min(range(len(scores)), key=scores.__getitem__)
        assert scores[i] < rank, f"token {rank} cannot be reached by merges"
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def turns(conversation):
    """Who says what in a conversation: [(role, [(kind, text), ...])]. Raises ValueError, which says what is wrong with it.

    conversation: {"messages": [{"role", "content"}]}, user and assistant in turn, perhaps a system message first, which becomes
    the beginning of the first question. An assistant's content is text or a list of parts {"type": "text" | "python" |
    "python_output", "text"}."""
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("there is no list of messages")
    out = []
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or "role" not in m or "content" not in m:
            raise ValueError(f"message {i} is not a role and a content")
        role, content = m["role"], m["content"]
        if i == 0 and role == "system":
            if not isinstance(content, str) or len(messages) < 2:
                raise ValueError("a system message must be text, and followed by a user's")
            continue
        if role != ("user", "assistant")[len(out) % 2]:
            raise ValueError(f"message {i} is from {str(role)[:20]!r}; users and assistants take turns")
        parts = content if isinstance(content, list) and role == "assistant" else [{"type": "text", "text": content}]
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ValueError(f"message {i} has a content that is neither text nor parts with a text")
            if not isinstance(part.get("type"), str) or part["type"] not in PARTS:
                raise ValueError(f"message {i} has a part of type {str(part.get('type'))[:20]!r}; there are {', '.join(PARTS)}")
        out.append((role, [(part["type"], part["text"]) for part in parts]))
    if len(out) < len(messages):
        out[0][1][0] = ("text", f"{messages[0]['content']}\n\n{out[0][1][0][1]}")
    return out


def read_sidecar(folder):
    """The facts in tokenizer.meta.json, or {} when there are none or somebody changed them."""
    try:
        meta = json.loads((Path(folder) / "tokenizer.meta.json").read_text(encoding="utf-8"))
        return meta if meta["seal"] == seal(meta) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def find_tokenizer(out_dir, meta=None):
    """The tokenizer of this out_dir, else the one in out/. With a checkpoint's meta: it must be the one that was used."""
    folder = Path(out_dir) / "tokenizer"
    if not (folder / "tokenizer.json").exists() and (Path("out") / "tokenizer" / "tokenizer.json").exists():
        warn(f"no tokenizer in {folder}: using the one in out/tokenizer")
        folder = Path("out") / "tokenizer"
    tok = Tokenizer.load(folder)
    if meta and meta["tokenizer"] != tok.hash:
        aside = [p for p in folder.parent.glob("tokenizer.old*") if read_sidecar(p).get("sha256") == meta["tokenizer"]]
        put_back = f"put back {aside[0]}" if aside else "put that one back"
        fail(f"{folder} is not the tokenizer that {meta['path']} was trained with; {put_back}, or train the stages again")
    return tok


# ---------------------------------------------------------------------------------------------------------------------
# Rows. Sequences are packed into rows of T + 1 tokens; a row of a batch is (inputs, targets), shifted by one.
# ---------------------------------------------------------------------------------------------------------------------
MIN_REST = 32  # tokens; a shorter rest of a document is not worth a row's place


def pack_rows(lengths, capacity, split):
    """Best-fit packing of one block of sequences. -> rows, each a list of (sequence, start, stop).

    The longest waiting sequence that fits goes in next. When none fits: split=True (raw text) fills the row to the brim
    with the beginning of the longest one, whose rest waits as a sequence of its own; split=False (conversations) leaves
    the rest of the row empty. Every row begins with <|bos|>: a rest (start > 0) gets one of its own from fill_row.
    """
    waiting = sorted((n, i, 0) for i, n in enumerate(lengths) if n > 1)  # shortest first; n counts the <|bos|>
    rows = []
    while waiting:
        row, room = [], capacity
        while waiting and room > 1:
            at = bisect.bisect_left(waiting, (room + 1,)) - 1  # the longest that fits
            if at < 0 and not split:
                assert row, f"a sequence of {waiting[0][0]} tokens cannot enter a row of {capacity}"
                break
            n, i, start = waiting.pop(at)  # at = -1: the longest of all
            used = min(n, room)
            stop = start + used - (start > 0)
            row.append((i, start, stop))
            room -= used
            if n - used >= MIN_REST:
                bisect.insort(waiting, (n - used + 1, i, stop))
        rows.append(row)
    return rows


def fill_row(row, block, capacity, bos):
    """One packed row as (ids, mask), each (capacity,). block: sequences, each ids or (ids, mask); padding has mask 0."""
    ids, mask, at = np.full(capacity, bos, dtype=np.int64), np.zeros(capacity, dtype=bool), 0
    for i, start, stop in row:
        sequence = block[i]
        piece, trained = sequence if isinstance(sequence, tuple) else (sequence, None)
        end = at + (start > 0) + stop - start  # a rest is led by a <|bos|> of its own
        ids[at + (start > 0) : end] = piece[start:stop]
        mask[at:end] = True if trained is None else trained[start:stop]
        at = end
    return ids, mask


def lengths_of(block):
    """The number of tokens of each sequence of a block."""
    return block.lengths() if isinstance(block, Sequences) else [len(s[0] if isinstance(s, tuple) else s) for s in block]


def describe_rows(block, capacity, split):
    """What packing makes of a block. -> (rows, share of their positions that is filled, share that is scored, share of the
    block's tokens that is cropped)"""
    lengths = lengths_of(block)
    rows = pack_rows(lengths, capacity, split)
    if not rows:
        return 0, 1.0, 0.0, 0.0
    filled = sum(stop - start + (start > 0) for row in rows for _, start, stop in row)
    used = filled - sum(start > 0 for row in rows for _, start, _ in row)
    plain = isinstance(block, Sequences) and block.mask is None
    masks = [] if plain else [s[1] for s in block if isinstance(s, tuple)]
    unscored = sum(len(m) - int(m.sum()) for m in masks)
    places = len(rows) * capacity
    return len(rows), filled / places, (filled - unscored) / places, 1 - used / sum(lengths)


class RowLoader:
    """An endless stream of steps: (inputs (R, T), targets (R, T)) on the host, -1 in targets where nothing is scored.

    A step has `rows` rows; R of them, the same number give or take one, are this rank's. So the rows of a step are the same for
    any number of ranks. blocks: a function from (block number, epoch) to sequences; n_blocks: how many there are in an epoch.
    `state` says where to go on.
    """

    def __init__(self, blocks, n_blocks, T, rows, tok, dev, split, seed=0, state=None):
        self.blocks, self.n_blocks, self.T, self.step_rows = blocks, n_blocks, T, rows
        self.tok, self.dev, self.split, self.seed = tok, dev, split, seed
        self.state = dict(state or {"epoch": 0, "block": 0, "row": 0})

    def rows(self, at):
        """Yield (row, block's sequences) for ever, from the place `at` on, which moves along; nothing is materialised."""
        empty = 0  # blocks in a row
        while True:
            sequences = self.blocks(at["block"], at["epoch"])
            packed = pack_rows(lengths_of(sequences), self.T + 1, self.split)
            empty = 0 if packed else empty + 1
            assert empty <= self.n_blocks, "a whole epoch held no sequence"
            order = np.random.default_rng([self.seed, at["epoch"], at["block"]]).permutation(len(packed))
            while at["row"] < len(packed):
                at["row"] += 1
                yield packed[order[at["row"] - 1]], sequences
            at["row"], at["block"] = 0, at["block"] + 1
            if at["block"] == self.n_blocks:
                at["block"], at["epoch"] = 0, at["epoch"] + 1

    def __iter__(self):
        """Steps are made on a thread of their own, two ahead; self.state is the place after those that were taken."""
        ready, stop = queue.Queue(2), threading.Event()

        def offer(item):
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    return ready.put(item, timeout=0.5)

        def work():
            at = dict(self.state)
            try:
                for step in self.steps(at):
                    offer((step, dict(at)))
                    if stop.is_set():
                        return
            except BaseException as e:
                offer((e, None))

        def end():  # a thread that is still in torch when Python ends would take the process down with it
            stop.set()
            with contextlib.suppress(queue.Empty):
                while True:
                    ready.get_nowait()
            thread.join(10)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        atexit.register(end)
        try:
            while True:
                step, self.state = ready.get()
                if self.state is None:
                    raise step
                yield step
        finally:
            atexit.unregister(end)
            end()

    def steps(self, at):
        stream, capacity = self.rows(at), self.T + 1
        while True:
            mine = [(np.empty((0, capacity), np.int64), np.empty((0, capacity), bool))]  # fewer rows than ranks: some have none
            for i in range(self.step_rows):
                row, sequences = next(stream)
                if i % self.dev.world_size == self.dev.rank:
                    ids, mask = fill_row(row, sequences, capacity, self.tok.bos)
                    mine.append((ids[None], mask[None]))
            ids, mask = (torch.from_numpy(np.concatenate(part)) for part in zip(*mine))  # (R, T + 1)
            yield self.dev.pinned(ids[:, :-1]), self.dev.pinned(torch.where(mask[:, 1:], ids[:, 1:], -1))


# ---------------------------------------------------------------------------------------------------------------------
# The token cache: out_dir/data/tokens/<key>/ holds sequences as one array of ids on disk, mapped into memory when read. The key
# is a hash of the text (of a hub's file: its name, size and checksum) and of the tokenizer. A folder appears whole or not at
# all, whoever else builds it at the same time; the sizes of its files are checked when it is used.
# ---------------------------------------------------------------------------------------------------------------------
class Sequences:
    """Sequences of tokens in a cache folder: [i] is ids, or (ids, mask) with `scored`. chosen: which of them, None = all."""

    def __init__(self, folder, dtype, scored=False, chosen=None):
        self.starts = np.load(folder / "starts.npy")
        size = int(self.starts[-1])
        self.ids = np.asarray(np.memmap(folder / "ids.bin", dtype, "r", shape=size)) if size else np.empty(0, dtype)
        self.mask = np.asarray(np.memmap(folder / "mask.bin", bool, "r", shape=size)) if scored and size else None
        self.chosen = np.arange(len(self.starts) - 1) if chosen is None else chosen

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, i):
        if isinstance(i, (slice, np.ndarray)):
            part = object.__new__(Sequences)
            part.__dict__.update({**self.__dict__, "chosen": self.chosen[i]})
            return part
        n = self.chosen[i]
        a, b = self.starts[n], self.starts[n + 1]
        return self.ids[a:b] if self.mask is None else (self.ids[a:b], self.mask[a:b])

    def lengths(self):
        return (self.starts[self.chosen + 1] - self.starts[self.chosen]).tolist()


def write_sequences(folder, dtype, batches, scored=False, names=()):
    """Build a cache folder, batch by batch, unless it is there and sound. batches: an iterable of lists of (ids, mask, note);
    mask says which tokens are scored, note is a number kept beside the sequence. names: kept too, as they are at the end."""
    if sound_cache(folder, dtype, scored):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f"{folder.name}.*"):  # of a process that was killed
        if time.time() - leftover.stat().st_mtime > 86400:
            shutil.rmtree(leftover, ignore_errors=True)
    building = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    building.mkdir()
    damaged = building.with_name(f"{building.name}.damaged")
    starts, notes = [0], []
    try:
        with open(building / "ids.bin", "wb") as ids_file, open(building / "mask.bin", "wb") as mask_file:
            for ids, mask, note in itertools.chain.from_iterable(batches):
                ids_file.write(np.array(ids, dtype=dtype).tobytes())
                mask_file.write(bytes(mask) if scored else b"")
                starts.append(starts[-1] + len(ids))
                notes.append(note)
        np.save(building / "starts.npy", np.array(starts))
        np.save(building / "notes.npy", np.array(notes, dtype=np.int64))
        (building / "names.json").write_text(json.dumps(list(names)), encoding="utf-8")
        with contextlib.suppress(OSError):  # somebody else was first
            if folder.exists() and not sound_cache(folder, dtype, scored):
                warn(f"{folder} is damaged and made anew")
                os.replace(folder, damaged)
            os.rename(building, folder)
    finally:
        for leftover in (building, damaged):
            shutil.rmtree(leftover, ignore_errors=True)


def sound_cache(folder, dtype, scored):
    """Whether a cache folder is there and its files have the sizes they should."""
    try:
        starts, notes = np.load(folder / "starts.npy"), np.load(folder / "notes.npy")
        ids, mask = ((folder / name).stat().st_size for name in ("ids.bin", "mask.bin"))
        size, _ = int(starts[-1]), json.loads((folder / "names.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, EOFError, IndexError, TypeError, zipfile.BadZipFile):
        return False
    return len(notes) == len(starts) - 1 and ids == size * np.dtype(dtype).itemsize and mask == (size if scored else 0)


def cache_folder(out_dir, tok, *key):
    """-> (folder, dtype of the ids)"""
    name = hashlib.sha256(json.dumps([tok.hash, *key]).encode()).hexdigest()[:16]
    return Path(out_dir) / "data" / "tokens" / name, "uint16" if tok.vocab_size <= 2**16 else "uint32"


def text_cache(shard, tok, out_dir):
    """Tokenise one shard, or find it done. -> (documents, whether each is held out for validation, the source of each). A document
    begins with <|bos|>."""
    share, names = VAL_SHARE if shard else VAL_SHARE_EMBEDDED, {}
    folder, dtype = cache_folder(out_dir, tok, "text", shard_key(shard), share, "sources")

    def batches():
        documents = iter(progress(read_shard(shard, out_dir), desc=f"tokenising {shard_name(shard)}", unit="doc"))
        while batch := list(itertools.islice(documents, 1024)):
            yield [([tok.bos, *ids], None, is_val(text, share) + 2 * names.setdefault(source, len(names)))
                   for (text, source), ids in zip(batch, tok.encode_batch([text for text, _ in batch]))]

    write_sequences(folder, dtype, batches(), names=names)
    notes, names = np.load(folder / "notes.npy"), json.loads((folder / "names.json").read_text(encoding="utf-8"))
    return Sequences(folder, dtype), notes % 2 == 1, [names[i] for i in notes // 2]


class Documents(list):
    """Documents (token ids), and in `sources` where each is from."""

    def __init__(self, documents=(), sources=()):
        super().__init__(documents)
        self.sources = list(sources)

    def take(self, cached, chosen, sources):
        self += [cached.ids[cached.starts[i] : cached.starts[i + 1]] for i in chosen]
        self.sources += [sources[i] for i in chosen]


def load_corpus(data_dir, out_dir, tok, dev, want_tokens, val_dir=""):
    """Token caches of as many shards as hold `want_tokens` training tokens. -> (shards of training documents, Documents for
    validation). These are what is held out of data_dir, or all of val_dir, of which nothing is trained on."""
    train, val, tokens, used, t0 = [], Documents(), 0, 0, time.time()
    with dev.first_per_node():
        shards = find_shards(data_dir, out_dir)
        if val_dir:
            val_shards = find_shards(val_dir, out_dir)
            shards = [s for s in shards if not any(same_shard(s, v) for v in val_shards)]
            for shard in val_shards:
                documents, _, sources = text_cache(shard, tok, out_dir)
                val.take(documents, range(len(documents)), sources)
    if not shards:
        fail(f"all of --data_dir={data_dir} is also in --val_dir={val_dir}: nothing is left to train on")
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    while used < len(shards) and not (tokens >= want_tokens and val):
        if used % ranks_here == 0:  # the ranks of a node build one shard each; what fails on others, rank 0 meets and names below
            with contextlib.suppress(*[SystemExit] if dev.local_rank else []):
                for shard in shards[used : used + ranks_here][dev.local_rank : dev.local_rank + 1]:
                    text_cache(shard, tok, out_dir)
            dev.barrier()
        with dev.first_per_node():
            cached, held_out, sources = text_cache(shards[used], tok, out_dir)
        used += 1
        documents = cached[np.flatnonzero(~held_out)] if not val_dir else cached
        train += [documents] if len(documents) else []
        if not val_dir:
            val.take(cached, np.flatnonzero(held_out), sources)  # the same first ones for every stage, however much it trains on
        tokens += sum(documents.lengths())
    if not val and train and len(train) + len(train[0]) > 2:
        if len(train[0]) > 1:
            n = max(1, len(train[0]) // 20)
            held_out, train[0] = train[0][-n:], train[0][:-n]
        else:
            held_out = train.pop()
        val = Documents([held_out[i] for i in range(len(held_out))], ["text"] * len(held_out))
        auto(f"so few documents that none fell to validation: {len(val)} of {len(val) + sum(map(len, train))} serve")
    if not train or not val:
        fail(f"the text of --data_dir={data_dir!r} is too little to train on: give at least two documents "
             "(a .txt file is cut at empty lines)")
    auto(f"data {data_dir or 'embedded text'}: {used} of {len(shards)} shards, {human(sum(map(len, train)))} documents, "
         f"{human(tokens)} tokens for training ({want_tokens / tokens:.2f} epochs), "
         f"{human(sum(map(len, val)))} for validation ({time.time() - t0:.1f} s)")
    return train, val


def conversation_blocks(conversations, tok, out_dir, dev, capacity, every_token, text=(), text_share=0.0, size=4096):
    """A dataset of conversations as blocks for RowLoader. -> (blocks, n_blocks, tokens in an epoch)

    every_token: all tokens are scored (mid-training), else the assistant's (SFT). A conversation longer than a row is cut
    to it; one without a word of the assistant's is left out. text: documents of which random pieces are mixed in, as text_share of
    all tokens. A block is large, so that its last row, which may not be full, hardly counts."""
    with dev.first_per_node():
        digest = hash_texts(json.dumps(conversations[i]["messages"], ensure_ascii=False) for i in range(len(conversations)))
        folder, dtype = cache_folder(out_dir, tok, "conversations", digest, capacity)

        def batches():
            for at in progress(range(0, len(conversations), 512), desc="tokenising conversations", unit="batch"):
                yield tok.render_batch([conversations[i] for i in range(at, min(at + 512, len(conversations)))], capacity)

        write_sequences(folder, dtype, batches(), scored=True)
    cached = Sequences(folder, dtype, scored=True)
    tokens, kept, lost = int(cached.starts[-1]), np.diff(cached.starts) > 0, np.load(folder / "notes.npy")
    if lost.any() or not kept.all():
        auto(f"of {len(cached)} conversations {(lost[kept] > 0).sum()} are longer than a row of {capacity} tokens and cut to it "
             f"({lost.sum() / (tokens + lost.sum()):.2%} of all tokens are cropped); {(~kept).sum()} are left out: they are "
             "malformed, or have no word of the assistant's within reach")
    if not tokens:
        fail(f"no conversation has anything to learn from in its first {capacity - 1} tokens: "
             "train the base model with a longer --max_seq_len")

    def blocks(block, epoch):
        out = [(ids, np.ones(len(ids), dtype=bool)) if every_token else (ids, mask)
               for ids, mask in map(cached.__getitem__, range(block * size, min((block + 1) * size, len(cached))))]
        rng, wanted = np.random.default_rng([epoch, block]), sum(len(ids) for ids, _ in out) * text_share / (1 - text_share)
        while text_share and wanted > 0:
            document = text[rng.integers(len(text))]
            start = rng.integers(max(1, len(document) - capacity // 2))
            piece = np.concatenate([[tok.bos], document[max(1, start) : start + capacity]])[:capacity].astype(np.int64)
            wanted -= len(piece)
            if len(piece) > 1:  # an empty document is only its <|bos|>
                out.append((piece, np.ones(len(piece), dtype=bool)))
        return out

    return blocks, -(-len(cached) // size), tokens / (1 - text_share)


# ---------------------------------------------------------------------------------------------------------------------
# What the command line offers: train, --eval, --show, --bench
# ---------------------------------------------------------------------------------------------------------------------
SAMPLES = {"English": "A language model assigns probabilities to sequences of words, and learns them from text.",
           "Chinese": "语言模型给词的序列赋予概率，并从文本中学习这些概率。",
           "code": "def norm(x):\n    return x / (sum(v * v for v in x) ** 0.5)\n",
           "mathematics": "Let $f(x) = x^2 - 3x + 2$. Then $f'(x) = 2x - 3 = 0$ gives $x = 1.5$ and $f(1.5) = -0.25$.",
           "emoji": "Hello, 世界! It's 3.14159 o'clock 🙂\n\t👩‍👩‍👧"}


def train_main():
    folder = Path(out_dir) / "tokenizer"
    facts = {"data_dir": data_dir, "max_chars": max_chars, "doc_cap": doc_cap, "pattern": PATTERNS[pattern]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        fail(f"--out_dir={out_dir} cannot be written to ({type(e).__name__})")
    old = read_sidecar(folder) if (folder / "tokenizer.json").exists() else {}
    sound = old and file_sha256(folder / "tokenizer.json") == old["sha256"]
    whole = sound and (folder / "tokenizer_config.json").exists()
    if resume and whole and {**old, **facts} == old and old.get("wanted") == vocab_size:
        auto(f"{folder}/tokenizer.json is already trained with these knobs; --resume=0 trains it again")
        return
    t0, state = time.time(), folder / "counting.npz"
    ranks = train_ranks(find_shards(data_dir, out_dir), vocab_size - len(SPECIALS), state)
    seconds = time.time() - t0
    if len(ranks) == 256:
        fail(f"there is no text in --data_dir={data_dir}")
    if len(ranks) < vocab_size - len(SPECIALS):
        auto(f"the text has no more pairs to merge: the vocabulary is {len(ranks) + len(SPECIALS)} tokens")
    state.unlink(missing_ok=True)
    tok = Tokenizer(ranks, PATTERNS[pattern])
    if sound:
        before = Tokenizer.load(folder)
        if (tok.ranks, tok.pattern) != (before.ranks, before.pattern):
            auto(f"the tokenizer that was there is kept in {put_aside(folder)}")
    tok.save(folder, {**facts, "wanted": vocab_size, "trainer": trainer, "seconds": round(seconds, 2)})
    tok = Tokenizer.load(folder)
    for sample in SAMPLES.values():
        assert tok.decode(tok.encode(sample)) == sample, "the tokenizer does not give text back as it was"
    auto(f"trainer {trainer}, {seconds:.1f} s; {tok.vocab_size} tokens")
    print0("bytes per token: " + ", ".join(f"{n} {len(t.encode()) / len(tok.encode(t)):.2f}" for n, t in SAMPLES.items()))
    print0(f"tokenizer in {folder}/tokenizer.json, sha256 {tok.hash[:12]}")


def gpt2_encoding():
    """GPT-2's tokenizer as a tiktoken Encoding, or None when its files are neither at hand nor to be downloaded."""
    if not gpt2_dir:
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as e:  # requests' errors are of this kind
            warn(f"GPT-2's vocabulary cannot be downloaded ({type(e).__name__}): give --gpt2_dir=FOLDER with its vocab.bpe")
            return None
    from tiktoken_ext.openai_public import r50k_pat_str
    try:
        lines = (Path(gpt2_dir) / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
        back = {c: b for b, c in byte_alphabet().items()}
        pieces = [bytes([b]) for b in byte_alphabet()] + [bytes(back[c] for c in "".join(line.split())) for line in lines]
        assert len(set(pieces)) == 50256
    except (OSError, KeyError, ValueError, AssertionError):
        fail(f"--gpt2_dir={gpt2_dir} holds no vocab.bpe as GPT-2 has it: 50,000 merges under a line with the version")
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, special_tokens={}, mergeable_ranks={p: i for i, p in enumerate(pieces)})


def eval_main():
    """Bytes per token by source, on the validation documents of each file of data_dir (or, where there are none, on all of it)."""
    tok, gpt2 = find_tokenizer(out_dir), gpt2_encoding()
    documents = []
    for shard in find_shards(data_dir, out_dir):
        share = VAL_SHARE if shard else VAL_SHARE_EMBEDDED
        found = list(progress(read_shard(shard, out_dir), desc=shard_name(shard), unit="doc"))
        documents += [d for d in found if is_val(d[0], share)] or found  # (reads all of a file, keeps what it needs)
    groups = {}
    for text, source in documents:
        han = len(re.findall("[\u4e00-\u9fff]", text)) > 0.2 * len(text)
        for name in (source, "all Chinese" if han else "all other"):
            groups.setdefault(name, []).append(text)
    for name, text in SAMPLES.items():
        groups.setdefault(f"sample: {name}", []).append(text)
    print0(f"{'source':36} {'bytes':>10} {'ours':>8} {'gpt2':>8} {'ratio':>7}   (bytes per token, more is better)")
    results = {}
    for name, texts in sorted(groups.items(), key=lambda g: (g[0].startswith("all "), g[0].startswith("sample"), g[0])):
        size = sum(len(t.encode()) for t in texts)
        ours = size / max(1, sum(map(len, tok.encode_batch(texts))))
        theirs = size / max(1, sum(map(len, gpt2.encode_ordinary_batch(texts, num_threads=len_cores())))) if gpt2 else None
        results[name] = {"bytes": size, "ours": round(ours, 4), "gpt2": theirs and round(theirs, 4)}
        print0(f"{name:36} {size:10} {ours:8.3f} " + (f"{theirs:8.3f} {ours / theirs:6.2f}x" if gpt2 else f"{'-':>8} {'-':>7}"))
    print0(json.dumps({"vocab_size": tok.vocab_size, "gpt2_vocab_size": 50257, "bytes_per_token": results}, ensure_ascii=False))


def show_main():
    """Print conversations token by token: what is trained on in green, the rest grey, special tokens in brackets."""
    tok = find_tokenizer(out_dir)
    names = {i: f"<|{name}|>" for name, i in tok.special.items()}
    if not Path(show).is_file():
        fail(f"there is no file {show}")
    with open(show, encoding="utf-8-sig", errors="replace") as f:
        for n, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                ids, mask = tok.render_conversation({"messages": data} if isinstance(data, list) else data)
            except (ValueError, KeyError, TypeError, RecursionError) as e:
                fail(f'{show} line {n} is not a conversation ({e}): write {{"messages": [{{"role": ..., "content": ...}}, ...]}}')
            out = ""
            for (trained, special), run in itertools.groupby(zip(ids, mask), lambda im: (im[1], im[0] in names)):
                run = [i for i, _ in run]
                text = "".join(names[i] for i in run) if special else tok.decode(run)
                out += ("\033[32m" if trained else "\033[90m") + text + "\033[0m"
            print0(f"{out}\n({len(ids)} tokens, {sum(mask)} trained)\n")


# --- bench -----------------------------------------------------------------------------------------------------------
RIVALS = {"python": ("tokenizer", ""), "rust": ("rustbpe", "rustbpe_"), "hf": ("tokenizers", "tokenizers_")}  # module, JSON prefix


def bench_child(kind):
    """Train once, in a process of its own; prints the seconds."""
    shards, size, t0 = find_shards(data_dir, out_dir), vocab_size - len(SPECIALS), time.perf_counter()
    if kind == "hf":
        from tokenizers import Regex, Tokenizer as HF, models, pre_tokenizers, trainers
        hf = HF(models.BPE())
        hf.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated"),
                                                    pre_tokenizers.ByteLevel(False, use_regex=False)])
        hf.train_from_iterator((text for _, text in training_texts(shards)), trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    else:
        globals()["trainer"] = kind
        with tempfile.TemporaryDirectory() as folder:
            train_ranks(shards, size, Path(folder) / "counting.npz")
    print(json.dumps(time.perf_counter() - t0))


def tree_memory(pid):
    """MiB of memory that a process and its children hold, shared pages counted once (Linux; 0 elsewhere)."""
    total = 0.0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            total += int(line.split()[1]) / 1024 if line.startswith("Pss:") else 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(tree_memory(int(child)) for child in (task / "children").read_text().split())
    return total


def bench_trainer(kind, watch):
    """-> seconds of one training run, or peak MiB with `watch`: not both, since looking costs time"""
    code = "import sys, common, tokenizer as t; kind = sys.argv.pop(1); common.configure(vars(t)); t.bench_child(kind)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", code, kind, *sys.argv[1:]], stdout=subprocess.PIPE, text=True, env=env) as child:
        peak = 0.0
        while watch and child.poll() is None:
            peak = max(peak, tree_memory(child.pid))
            time.sleep(0.05)
        out, _ = child.communicate()
    if child.returncode:
        fail(f"the {kind} trainer failed, see above")
    return peak if watch else json.loads(out.splitlines()[-1])


def bench_main(repeats=5):
    shards, result = find_shards(data_dir, out_dir), {}
    if next(training_texts(shards), None) is None:
        fail(f"there is no text in --data_dir={data_dir}")
    kinds = [k for k, (module, _) in RIVALS.items() if importlib.util.find_spec(module)]
    times = {k: [] for k in kinds}
    for _ in progress(range(repeats), desc="training", unit="round"):
        for k in kinds:  # in turn: a busy moment hits all
            times[k].append(bench_trainer(k, watch=False))
    for k, (module, prefix) in RIVALS.items():
        found = k in kinds
        result[f"{prefix}train_s"] = round(statistics.median(times[k]), 2) if found else None
        result[f"{prefix}peak_mb"] = round(bench_trainer(k, watch=True)) or None if found else None
        if found:
            print0(f"training, {module:10} {result[f'{prefix}train_s']:8.2f} s (median of {repeats})   peak "
                   f"{result[f'{prefix}peak_mb']} MB   {result[f'{prefix}train_s'] / result['train_s']:.2f} x our time")
    with tempfile.TemporaryDirectory() as folder:
        tok = Tokenizer(train_ranks(shards, vocab_size - len(SPECIALS), Path(folder) / "counting.npz"), PATTERNS[pattern])
        tok.save(folder, {})
        texts = [t for _, t in itertools.islice(training_texts(shards), 4000)]
        coders = {"": tok.encode_batch, "tiktoken_one_thread_": lambda batch: list(map(tok.encode, batch))}
        if "hf" in kinds:
            from tokenizers import Tokenizer as HF
            coders["tokenizers_"] = HF.from_file(f"{folder}/tokenizer.json").encode_batch
        for prefix, encode in coders.items():
            seconds = []
            for _ in range(3):
                t0 = time.perf_counter()
                encode(texts)
                seconds.append(time.perf_counter() - t0)
            result[f"{prefix}encode_mb_per_s"] = round(sum(len(t.encode()) for t in texts) / 1e6 / statistics.median(seconds), 2)
        result.update(bench_packing(tok, texts, Path(folder) / "cache"))
    for name, value in result.items():
        if "train" not in name and "peak" not in name:
            print0(f"{name:36} {value}")
    print0(json.dumps({**result, "vocab_size": vocab_size, "max_chars": max_chars, "cores": len_cores()}))


def bench_packing(tok, texts, folder, T=2048, B=8, limit=3.0):
    """Rows of T + 1 from the cache on one core: tokens per second, share of positions filled, share of tokens cropped."""
    dev = Device(torch.device("cpu"), "cpu", "cpu", torch.float32, 0, 0, 1)
    torch.set_num_threads(1)
    write_sequences(folder, "uint32", [[([tok.bos, *ids], None, 0) for ids in tok.encode_batch(texts)]])
    documents = Sequences(folder, "uint32")
    batches = iter(RowLoader(lambda block, epoch: documents, 1, T, B, tok, dev, split=True))
    next(batches)
    n, t0 = 0, time.perf_counter()
    while (seconds := time.perf_counter() - t0) < limit:
        n += next(batches)[0].numel()
    _, filled, _, cropped = describe_rows(documents, T + 1, split=True)
    return {"pack_tok_per_s": round(n / seconds), "pack_filled": round(filled, 5), "pack_cropped": round(cropped, 5)}


def main():
    for name, value, allowed in (("pattern", pattern, tuple(PATTERNS)), ("trainer", trainer, ("python", "rust"))):
        if value not in allowed:
            fail(f"--{name}={value} is not one of {', '.join(allowed)}")
    if vocab_size < 256 + len(SPECIALS) + 1:
        fail(f"--vocab_size={vocab_size} is too small: 256 bytes and {len(SPECIALS)} specials come first")
    if not max_chars or not doc_cap:
        fail("--max_chars and --doc_cap must be at least 1")
    if bool(show) + eval + bench > 1:
        fail("--show, --eval and --bench exclude each other")
    if show:
        show_main()
    elif eval:
        eval_main()
    elif bench:
        bench_main()
    else:
        train_main()


if __name__ == "__main__":
    config = configure(globals())
    main()

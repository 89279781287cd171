"""
How does text become tokens, and tokens become rows of a batch?

Four parts, in order: where text comes from (a folder, a hub dataset, or what this Python installation carries), the
byte-level BPE that is trained on it, the chat template with its loss mask, and the packing of token sequences into rows.

    python tokenizer.py                                 # train on the embedded text -> out/tokenizer/tokenizer.json
    python tokenizer.py --data_dir=my_texts             # on a folder of .parquet, .jsonl or .txt files
    python tokenizer.py --data_dir=org/name             # on a dataset of the Hugging Face hub, or of the mirror in HF_ENDPOINT
    python tokenizer.py --vocab_size=512 --max_chars=200000 --out_dir=/tmp/smoke      # smoke run

Reads text; writes out_dir/tokenizer/tokenizer.json (the Hugging Face tokenizers format, never a pickle) and tokenizer.meta.json.
"""
from common import (auto, command, configure, fail, file_sha256, hub_fetch, hub_files, human, len_cores, need, print0,
                    progress, warn, write_atomic)

import bisect
import codecs
import hashlib
import heapq
import importlib.util
import json
import sysconfig
import time
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

import numpy as np
import regex
import tiktoken
import torch

# --- CONFIG ----------------------------------------------------------------------------------------------------------
vocab_size = 4096        # tokens, the nine specials included
data_dir = ""            # folder with .parquet, .jsonl or .txt, or a hub dataset org/name; "" = the embedded text
out_dir = "out"          # the tokenizer goes to out_dir/tokenizer
max_chars = 50_000_000   # characters to train on
doc_cap = 20_000         # characters of one document that count
resume = True            # false: train again even if a sound tokenizer is there

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
    """The files of a corpus, as paths (None: the embedded text). data_dir: a folder, a hub dataset's name, or "".
    Files of the hub are returned as (repo, path, facts) and fetched when their turn comes."""
    if not data_dir:
        return [None]
    folder = Path(data_dir)
    if folder.is_dir():
        shards = sorted(p for s in TEXT_SUFFIXES for p in folder.rglob(f"*{s}"))
        if not shards:
            fail(f"--data_dir={data_dir} holds no {', '.join(TEXT_SUFFIXES)} file")
        return shards
    if folder.is_file():
        return [folder]
    local = folder.parent.is_dir() and folder.parent != Path(".")  # a folder beside it exists: a slip, not a dataset
    if regex.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data_dir) and not local:
        shards = [(data_dir, p, f) for p, f in sorted(hub_files(data_dir, out_dir).items()) if p.endswith(TEXT_SUFFIXES)]
        if not shards:
            fail(f"hub dataset {data_dir} holds no {', '.join(TEXT_SUFFIXES)} file")
        return shards
    fail(f"--data_dir={data_dir} is not a folder, and not the name of a hub dataset (org/name)")


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
        except (ValueError, OSError) as e:  # pyarrow's errors are of these kinds
            fail(f"{path} is not a sound parquet file ({e})")
        if "text" not in file.schema_arrow.names:
            fail(f"{path} has no column `text`, only {', '.join(file.schema_arrow.names)}")
        columns = [c for c in ("text", "source") if c in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=512, columns=columns):
            for row in batch.to_pylist():
                if row["text"]:
                    yield row["text"], row.get("source") or path.stem
    elif path.suffix == ".jsonl":
        with open(path, encoding="utf-8", errors="replace") as f:
            for n, line in enumerate(f, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    fail(f"{path} line {n} is not a JSON object with a `text`")
                yield text.encode("utf-8", "replace").decode(), path.stem  # half an emoji cannot be encoded
    else:  # plain text: cut at empty lines into documents of some length, so that one big file can be split too
        document = ""
        for paragraph in path.read_text(encoding="utf-8", errors="replace").split("\n\n"):
            document += paragraph + "\n\n"
            if len(document) > TXT_DOCUMENT:
                yield document.rstrip("\n"), path.stem
                document = ""
        if document.strip():
            yield document.rstrip("\n"), path.stem


# ---------------------------------------------------------------------------------------------------------------------
# Byte-pair encoding. Training merges the most frequent pair of neighbouring tokens, again and again.
# ---------------------------------------------------------------------------------------------------------------------
# GPT-4's splitting pattern, but numbers in groups of at most two digits: better for small vocabularies.
PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
SPECIALS = ["bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start", "python_end",
            "output_start", "output_end"]


def train_bpe(counts, n_merges):
    """Learn merges from {word as bytes: count}. -> [(left, right)] of token ids; merge i makes token 256 + i.

    The most frequent pair wins; of equals, the smallest pair of ids. A heap holds pairs by the count they had when they
    were pushed; counts of old entries are checked when popped. A merge touches only the words that hold its pair.
    """
    words = [list(w) for w in counts]
    freq = list(counts.values())
    pairs, where = Counter(), defaultdict(set)  # pair -> count, pair -> indices of words
    for i, w in enumerate(words):
        for pair in zip(w, w[1:]):
            pairs[pair] += freq[i]
            where[pair].add(i)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    merges, bar = [], progress(None, total=n_merges, desc="merges", unit="merge")
    while len(merges) < n_merges and heap:
        count, pair = heapq.heappop(heap)
        if -count != pairs[pair]:
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))  # fell since it was pushed: back in line
            continue
        if count == 0:
            break
        (left, right), new, changed = pair, 256 + len(merges), set()
        merges.append(pair)
        for i in where.pop(pair):
            old, n = words[i], freq[i]
            word, j = [], 0
            while j < len(old):
                if j + 1 < len(old) and old[j] == left and old[j + 1] == right:
                    word.append(new)
                    j += 2
                else:
                    word.append(old[j])
                    j += 1
            for p in zip(old, old[1:]):
                pairs[p] -= n
            for p in zip(word, word[1:]):
                pairs[p] += n
                if new in p:
                    changed.add(p)
                    where[p].add(i)
            words[i] = word
        del pairs[pair]
        for p in changed:
            heapq.heappush(heap, (-pairs[p], p))
        bar.update(1)
    return merges


def train_ranks(texts, vocab_size):
    """Mergeable ranks {bytes: id} for `vocab_size` tokens, the specials not counted. texts: iterable of str."""
    if importlib.util.find_spec("rustbpe"):
        import rustbpe
        rust = rustbpe.Tokenizer()
        rust.train_from_iterator(iter(texts), vocab_size, pattern=PATTERN)
        return {bytes(b): rank for b, rank in rust.get_mergeable_ranks()}, "rustbpe"
    counts, split = Counter(), regex.compile(PATTERN)
    for text in texts:
        counts.update(split.findall(text))
    merges = train_bpe({w.encode("utf-8"): n for w, n in counts.items()}, vocab_size - 256)
    pieces = [bytes([b]) for b in range(256)]
    for left, right in merges:
        pieces.append(pieces[left] + pieces[right])
    return {piece: i for i, piece in enumerate(pieces)}, "python"


@lru_cache
def byte_alphabet():
    """GPT-2's printable stand-in for each byte, as tokenizer.json files spell tokens: {byte: character}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


class Tokenizer:
    """Text <-> token ids. The special tokens' ids are attributes: tok.bos, tok.user_start, ..."""

    def __init__(self, ranks, pattern=PATTERN, digest=""):
        self.ranks, self.pattern, self.hash = ranks, pattern, digest
        self.special = {name: len(ranks) + i for i, name in enumerate(SPECIALS)}
        self.__dict__.update(self.special)
        self.vocab_size = len(ranks) + len(SPECIALS)
        self.encoding = tiktoken.Encoding("npuchat", pat_str=pattern, mergeable_ranks=ranks,
                                          special_tokens={f"<|{n}|>": i for n, i in self.special.items()})

    def encode(self, text):
        """Text as ids. Special tokens are never parsed from text: what a user types is only text."""
        return self.encoding.encode_ordinary(text)

    def encode_batch(self, texts):
        return self.encoding.encode_ordinary_batch(texts, num_threads=len_cores())

    def decode(self, ids):
        return self.encoding.decode(ids, errors="replace")

    def stream_decoder(self):
        """A function from token id to the text that is complete with it: characters cut by a token's end wait for the next.
        Called with None at the end, it gives up what is left."""
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
        """tokenizer.json in the Hugging Face tokenizers format, and a sidecar with its SHA-256 and how it was made."""
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
        self.hash = file_sha256(path)
        sidecar = {"sha256": self.hash, "vocab_size": self.vocab_size, **facts}
        write_atomic(path.with_name("tokenizer.meta.json"), json.dumps(sidecar, indent=1))

    @classmethod
    def load(cls, folder):
        """-> Tokenizer, or ends with a sentence that says how to make it again."""
        path = Path(folder) / "tokenizer.json"
        again = command("tokenizer.py", Path(folder).parent)
        if not path.exists():
            fail(f"there is no tokenizer in {folder}; make one with: {again}")
        try:
            digest = file_sha256(path)
            expected = json.loads(path.with_name("tokenizer.meta.json").read_text(encoding="utf-8"))["sha256"]
            if digest != expected:
                fail(f"{path} is damaged (its checksum differs from tokenizer.meta.json); make it again with: {again}")
            data = json.loads(path.read_text(encoding="utf-8"))
            back = {c: b for b, c in byte_alphabet().items()}
            ranks = {bytes(back[c] for c in piece): i for piece, i in data["model"]["vocab"].items()}
            return cls(ranks, data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"], digest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            fail(f"{path} cannot be read ({type(e).__name__}: {e}); make it again with: {again}")

    # --- chat template ---
    def render_conversation(self, conversation, max_tokens=None):
        """A conversation as (ids, mask): mask 1 where the assistant speaks, which is what SFT trains on.

        conversation: {"messages": [{"role", "content"}]}, user and assistant in turn, perhaps a system message first. An
        assistant's content is text or a list of parts {"type": "text" | "python" | "python_output", "text"}.
        """
        ids, mask = [self.bos], [0]

        def add(tokens, trained):
            ids.extend(tokens)
            mask.extend([trained] * len(tokens))

        for i, (role, content) in enumerate(normalized_messages(conversation)):
            assert role == ("user", "assistant")[i % 2], f"message {i} is from {role!r}; users and assistants take turns"
            if role == "user":
                add([self.user_start, *self.encode(content), self.user_end], 0)
                continue
            add([self.assistant_start], 0)
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                text = self.encode(part["text"])
                if part["type"] == "text":
                    add(text, 1)
                elif part["type"] == "python":
                    add([self.python_start, *text, self.python_end], 1)
                else:
                    assert part["type"] == "python_output", f"unknown part {part['type']!r}"
                    add([self.output_start, *text, self.output_end], 0)  # the tool speaks, not the assistant
            add([self.assistant_end], 1)
        return ids[:max_tokens], mask[:max_tokens]

    def render_for_completion(self, conversation):
        """The ids up to where the assistant begins to speak; a last assistant message is left out."""
        messages = conversation["messages"]
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return self.render_conversation({"messages": messages})[0] + [self.assistant_start]


def split_piece(piece, rank, ranks):
    """The two tokens whose merge made `piece`: what BPE arrives at using only the merges before it."""
    parts = [bytes([b]) for b in piece]
    while len(parts) > 2:
        scores = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
        i = min(range(len(scores)), key=scores.__getitem__)
        assert scores[i] < rank, f"token {rank} cannot be reached by merges"
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def normalized_messages(conversation):
    """[(role, content)] with a system message merged into the first user's."""
    messages = [(m["role"], m["content"]) for m in conversation["messages"]]
    if messages and messages[0][0] == "system":
        assert len(messages) > 1 and messages[1][0] == "user", "a system message must be followed by a user's"
        messages[:2] = [("user", messages[0][1] + "\n\n" + messages[1][1])]
    return messages


def find_tokenizer(out_dir, meta=None):
    """The tokenizer of this out_dir, else the one in out/. With a checkpoint's meta: it must be the one that was used."""
    folder = Path(out_dir) / "tokenizer"
    if not (folder / "tokenizer.json").exists() and (Path("out") / "tokenizer" / "tokenizer.json").exists():
        warn(f"no tokenizer in {folder}: using the one in out/tokenizer")
        folder = Path("out") / "tokenizer"
    tok = Tokenizer.load(folder)
    if meta and meta["tokenizer"] != tok.hash:
        fail(f"{folder} is not the tokenizer that {meta['path']} was trained with; put that one back, or train the stages again")
    return tok


# ---------------------------------------------------------------------------------------------------------------------
# Rows. Sequences are packed into rows of T + 1 tokens; a row of a batch is (inputs, targets), shifted by one.
# ---------------------------------------------------------------------------------------------------------------------
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
    """One packed row as (ids, mask), each (capacity,). block: list of ids, or of (ids, mask); padding has mask 0."""
    ids, mask, at = np.full(capacity, bos, dtype=np.int64), np.zeros(capacity, dtype=bool), 0
    for i, start, stop in row:
        piece, trained = block[i] if isinstance(block[i], tuple) else (block[i], None)
        end = at + (start > 0) + stop - start  # a rest is led by a <|bos|> of its own
        ids[at + (start > 0) : end] = piece[start:stop]
        mask[at:end] = True if trained is None else trained[start:stop]
        at = end
    return ids, mask


MIN_REST = 32  # tokens; a shorter rest of a document is not worth a row's place


class RowLoader:
    """An endless stream of batches (inputs (B, T), targets (B, T)) for this rank, -1 in targets where nothing is scored.

    blocks: a function from block number to a list of sequences; n_blocks: how many there are in an epoch. Rows are dealt out
    to ranks in turn, so that the rows of one optimizer step are the same for any number of ranks. `state` says where to go on.
    """

    def __init__(self, blocks, n_blocks, T, B, tok, dev, split, seed=0, state=None):
        self.blocks, self.n_blocks, self.T, self.B = blocks, n_blocks, T, B
        self.tok, self.dev, self.split, self.seed = tok, dev, split, seed
        self.state = dict(state or {"epoch": 0, "block": 0, "row": 0})

    def rows(self):
        """Yield (row, block's sequences) for ever, from self.state on, without materialising anything."""
        empty = 0  # blocks in a row
        while True:
            sequences = self.blocks(self.state["block"], self.state["epoch"])
            empty = 0 if sequences else empty + 1
            assert empty <= self.n_blocks, "a whole epoch held no sequence"
            packed = pack_rows([len(s[0] if isinstance(s, tuple) else s) for s in sequences], self.T + 1, self.split)
            order = np.random.default_rng([self.seed, self.state["epoch"], self.state["block"]]).permutation(len(packed))
            while self.state["row"] < len(packed):
                self.state["row"] += 1
                yield packed[order[self.state["row"] - 1]], sequences
            self.state["row"], self.state["block"] = 0, self.state["block"] + 1
            if self.state["block"] == self.n_blocks:
                self.state["block"], self.state["epoch"] = 0, self.state["epoch"] + 1

    def __iter__(self):
        stream = self.rows()
        while True:
            mine = []
            for i in range(self.B * self.dev.world_size):
                row, sequences = next(stream)
                if i // self.B == self.dev.rank:
                    mine.append(fill_row(row, sequences, self.T + 1, self.tok.bos))
            ids = torch.from_numpy(np.stack([m[0] for m in mine]))  # (B, T + 1)
            mask = torch.from_numpy(np.stack([m[1] for m in mine]))
            targets = torch.where(mask[:, 1:], ids[:, 1:], -1)
            yield ids[:, :-1].to(self.dev.device), targets.to(self.dev.device)


def render_blocks(conversations, tok, capacity, every_token, text=(), text_share=0.0, size=512):
    """A dataset of conversations as blocks for RowLoader. -> (blocks, n_blocks)

    every_token: all tokens are scored (mid-training), else the assistant's (SFT). A conversation longer than a row is cut
    to it; one that has nothing to score then is left out. text: documents of which random pieces are mixed in, as
    text_share of all tokens."""
    def blocks(block, epoch):
        out = []
        for i in range(block * size, min((block + 1) * size, len(conversations))):
            ids, mask = tok.render_conversation(conversations[i], capacity)
            mask = np.ones(len(ids), dtype=bool) if every_token else np.array(mask, dtype=bool)
            if mask[1:].any():
                out.append((np.array(ids), mask))
        rng, wanted = np.random.default_rng([epoch, block]), sum(len(ids) for ids, _ in out) * text_share / (1 - text_share)
        while text_share and wanted > 0:
            document = text[rng.integers(len(text))]
            start = rng.integers(max(1, len(document) - capacity // 2))
            piece = np.concatenate([[tok.bos], document[max(1, start) : start + capacity]])[:capacity].astype(np.int64)
            wanted -= len(piece)
            if len(piece) > 1:  # an empty document is only its <|bos|>
                out.append((piece, np.ones(len(piece), dtype=bool)))
        return out

    return blocks, -(-len(conversations) // size)


def describe_block(sequences, capacity):
    """-> (rows, share of their positions that is filled, share that is scored) of one block of conversations."""
    if not sequences:
        fail(f"no conversation has anything to learn from in its first {capacity - 1} tokens: "
             "train the base model with a longer --max_seq_len")
    rows = pack_rows([len(ids) for ids, _ in sequences], capacity, split=False)
    places = len(rows) * capacity
    return len(rows), sum(len(ids) for ids, _ in sequences) / places, sum(int(m.sum()) for _, m in sequences) / places


# --- token cache: a shard's documents as one array of ids on disk -----------------------------------------------------------
def token_cache(shard, tok, out_dir):
    """Tokenise one shard, or find it done. -> {"train": [ids], "val": [ids]}, memory-mapped; every document begins with <|bos|>."""
    if shard is None:
        import platform
        identity = f"embedded {platform.python_version()}"
    else:
        path = Path(shard[1] if isinstance(shard, tuple) else shard)
        local = not isinstance(shard, tuple)
        identity = f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" if local else json.dumps(shard)
    key = hashlib.sha256(f"{identity} {tok.hash} {VAL_SHARE} {VAL_SHARE_EMBEDDED}".encode()).hexdigest()[:16]
    base = Path(out_dir) / "data" / "tokens" / key
    if not base.with_suffix(".json").exists():
        build_token_cache(shard, tok, out_dir, base)
    index = json.loads(base.with_suffix(".json").read_text())
    empty = not index["spans"]["train"] and not index["spans"]["val"]
    data = np.empty(0) if empty else np.memmap(base.with_suffix(".bin"), dtype=index["dtype"], mode="r")
    return {split: [data[a:b] for a, b in spans] for split, spans in index["spans"].items()}


def build_token_cache(shard, tok, out_dir, base):
    dtype = "uint16" if tok.vocab_size <= 2**16 else "uint32"
    share = VAL_SHARE if shard else VAL_SHARE_EMBEDDED
    spans, at, batch, arrays = {"train": [], "val": []}, 0, [], []

    def flush():
        nonlocal at
        for text, ids in zip(batch, tok.encode_batch(batch)):
            spans["val" if is_val(text, share) else "train"].append((at, at + len(ids) + 1))
            arrays.append(np.array([tok.bos, *ids], dtype=dtype))
            at += len(ids) + 1
        batch.clear()

    name = "embedded text" if shard is None else Path(shard[1] if isinstance(shard, tuple) else shard).name
    for text, _ in progress(read_shard(shard, out_dir), desc=f"tokenising {name}", unit="doc"):
        batch.append(text)
        if len(batch) == 1024:
            flush()
    flush()
    write_atomic(base.with_suffix(".bin"), np.concatenate(arrays).tobytes() if arrays else b"")
    write_atomic(base.with_suffix(".json"), json.dumps({"dtype": dtype, "spans": spans}))  # last: its presence says "done"


def load_corpus(data_dir, out_dir, tok, dev, want_tokens):
    """Token caches of as many shards as hold `want_tokens` training tokens. -> (blocks for RowLoader, list of val documents)"""
    caches, tokens, t0 = [], 0, time.time()
    with dev.first_per_node():
        shards = find_shards(data_dir, out_dir)
        for shard in shards:
            caches.append(token_cache(shard, tok, out_dir))
            tokens += sum(len(d) for d in caches[-1]["train"])
            if tokens >= want_tokens and any(c["val"] for c in caches):
                break  # the same first validation documents for every stage, however much it trains on
    val = [d for c in caches for d in c["val"]]
    train = [c["train"] for c in caches if c["train"]]
    if not val and train and len(train[0]) > 1:
        val = train[0][-max(1, len(train[0]) // 20) :]
        train[0] = train[0][: -len(val)]
        auto(f"so few documents that none fell to validation: the last {len(val)} of {len(val) + len(train[0])} serve")
    if not train or not val:
        fail(f"the text of --data_dir={data_dir!r} is too little to train on: give at least two documents "
             "(a .txt file is cut at empty lines)")
    auto(f"data {data_dir or 'embedded text'}: {len(caches)} of {len(shards)} shards, {human(sum(map(len, train)))} documents, "
         f"{human(tokens)} tokens for training ({want_tokens / tokens:.2f} epochs), "
         f"{human(sum(map(len, val)))} for validation ({time.time() - t0:.1f} s)")
    return train, val


# ---------------------------------------------------------------------------------------------------------------------
def training_texts(shards):
    """The documents to train on: at most max_chars characters, doc_cap of each."""
    left = max_chars
    bar = progress(None, total=max_chars, desc="reading", unit="char")
    for shard in shards:
        for text, _ in read_shard(shard, out_dir):
            text = text[: min(doc_cap, left)]
            left -= len(text)
            bar.update(len(text))
            yield text
            if left <= 0:
                return


def main():
    folder = Path(out_dir) / "tokenizer"
    facts = {"data_dir": data_dir, "max_chars": max_chars, "doc_cap": doc_cap, "pattern": PATTERN}
    sidecar = folder / "tokenizer.meta.json"
    if vocab_size < 256 + len(SPECIALS) + 1:
        fail(f"--vocab_size={vocab_size} is too small: 256 bytes and {len(SPECIALS)} specials come first")
    if resume and sidecar.exists() and (folder / "tokenizer.json").exists():
        old = json.loads(sidecar.read_text(encoding="utf-8"))
        same = all(old.get(k) == v for k, v in facts.items()) and old.get("vocab_size") == vocab_size
        if same and old.get("sha256") == file_sha256(folder / "tokenizer.json"):
            auto(f"{folder}/tokenizer.json is already trained with these knobs; --resume=0 trains it again")
            return
    t0 = time.time()
    ranks, trainer = train_ranks(training_texts(find_shards(data_dir, out_dir)), vocab_size - len(SPECIALS))
    seconds = time.time() - t0
    if len(ranks) == 256:
        fail(f"there is no text in --data_dir={data_dir}")
    if len(ranks) < vocab_size - len(SPECIALS):
        auto(f"the text has no more pairs to merge: the vocabulary is {len(ranks) + len(SPECIALS)} tokens")
    tok = Tokenizer(ranks)
    tok.save(folder, {**facts, "trainer": trainer, "seconds": round(seconds, 2)})
    tok = Tokenizer.load(folder)
    sample = "Hello, 世界! It's 3.14159 o'clock 🙂\n\tdef f(x): return x ** 2"
    assert tok.decode(tok.encode(sample)) == sample, "the tokenizer does not give text back as it was"
    auto(f"trainer {trainer}, {seconds:.1f} s; {tok.vocab_size} tokens")
    print0("bytes per token: " + ", ".join(f"{n} {len(t.encode()) / len(tok.encode(t)):.2f}" for n, t in SAMPLES.items()))
    print0(f"tokenizer in {folder}/tokenizer.json, sha256 {tok.hash[:12]}")


SAMPLES = {"English": "A language model assigns probabilities to sequences of words, and learns them from text.",
           "Chinese": "语言模型给词的序列赋予概率，并从文本中学习这些概率。",
           "code": "def norm(x):\n    return x / (sum(v * v for v in x) ** 0.5)\n"}

if __name__ == "__main__":
    config = configure(globals())
    main()

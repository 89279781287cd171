"""
Does it all work?

    python test_all.py                # everything
    python test_all.py --fast         # under two minutes
    python test_all.py -k tokenizer   # what pytest takes, this takes

Checked against an outside truth where there is one (rustbpe, torch's AdamW, an SVD, the `tokenizers` library, a closed
form), else against an invariant (cached decoding equals the full forward, N ranks equal one, resumed equals straight).
"""

import common  # noqa: F401  (first, as in every script)

import contextlib
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from hypothesis import given, settings, strategies as st

import eval as evaluation
import gpt
import tokenizer as tokenizer_module
from common import Device, parse_knob
from gpt import GPT, GPTConfig, KVCache, calculator, complete, sample_tokens
from muon import NEWTON_SCHULZ, POLAR_EXPRESS, Muon, orthogonalize
from tokenizer import PATTERNS, RowLoader, Tokenizer, conversation_blocks, fill_row, pack_rows, ranks_of, splitter, train_bpe

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent / "shared" / "data"  # real text; tests that want it are skipped where it is not
CPU = Device(torch.device("cpu"), "cpu", "test", torch.float32, 0, 0, 1)
slow = pytest.mark.slow


def ranks(n):
    """Stand-ins for the ranks of a run of n, for code that only asks which one it is."""
    return [Device(torch.device("cpu"), "cpu", "test", torch.float32, r, r, n) for r in range(n)]


def run(*args, check=True, env=None, timeout=300, nproc=1):
    """Run one of the scripts as a user would. -> CompletedProcess with .out, stdout and stderr together"""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, *map(str, args)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "2", **(env or {})},
    )
    done.out = done.stdout + done.stderr
    assert not check or done.returncode == 0, done.out
    return done


@pytest.fixture(scope="session")
def tok(tmp_path_factory):
    """A small tokenizer, trained by our own trainer on two of our sources, saved and loaded again."""
    text = (HERE / "gpt.py").read_text(encoding="utf-8") + (HERE / "eval.py").read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("tok")
    Tokenizer(our_ranks([text], 656)).save(folder, {})
    return Tokenizer.load(folder)


def our_ranks(texts, vocab, pattern="gpt4"):
    """{bytes: id} of `vocab` tokens from our trainer."""
    return ranks_of(train_bpe(tokenizer_module.count_batch(texts, PATTERNS[pattern]), vocab - 256))


def tiny(vocab=300, **kw):
    """A small model whose every weight counts (a fresh one has zeros that hide mistakes)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**dict(vocab_size=vocab, max_seq_len=64, n_layer=3, n_head=4, n_kv_head=4, n_embd=32), **kw}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


# --- knobs -----------------------------------------------------------------------------------------------------------
SCRIPT = '"""A script."""\n# --- CONFIG ---\ndepth = 4  # layers\nlr = 1.0\nname = ""\nfast = False\nlimit = None\n'


def knobs(tmp_path, *argv):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + "config = configure(globals())\n")
    g = {"__file__": str(path)}
    exec(SCRIPT, g)
    return common.configure(g, list(argv))


def test_knobs_are_read_in_every_form(tmp_path):
    (tmp_path / "k").write_text("# a file\ndepth = 12\nlr = 2e-3  # a comment\n")
    assert knobs(tmp_path, "--depth=2**3", "--lr", "3", "--fast", "--name=a=b") == {
        "depth": 8,
        "lr": 3.0,
        "name": "a=b",
        "fast": True,
        "limit": None,
    }
    assert knobs(tmp_path, f"@{tmp_path / 'k'}", "--fast=false")["lr"] == 0.002
    assert knobs(tmp_path, "--limit=1e-3")["limit"] == 0.001 and knobs(tmp_path, "--depth=1_000")["depth"] == 1000
    assert type(knobs(tmp_path, "--lr=1")["lr"]) is float and knobs(tmp_path, "--depth=1e3")["depth"] == 1000


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--dept=3"], "did you mean --depth"),
        (["--depth=x"], "whole number"),
        (["--depth=0.5"], "whole number"),
        (["--lr=fast"], "is a number"),
        (["--fast=maybe"], "switch"),
        (["--depth=-1"], "negative"),
        (["--lr=nan"], "negative"),
        (["depth"], "--name=value"),
        (["--depth"], "needs a value"),
        (["@nowhere"], "no knob file"),
    ],
)
def test_a_wrong_knob_is_one_sentence(tmp_path, capsys, argv, says):
    with pytest.raises(SystemExit) as e:
        knobs(tmp_path, *argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err and err.count("\n") == 1


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_knob_values_never_crash(text):
    for default in (1, 1.0, True, "", None):
        try:
            value = parse_knob("k", text, default)
            assert default is None or type(value) is type(default)
        except SystemExit as e:
            assert e.code == 2


# --- tokenizer -------------------------------------------------------------------------------------------------------
TEXTS = [
    " ".join(f"{a}{b}" for a in "abc" for b in ("na", "nana", "的的", "12")) * 3,
    "aaaaaaa bbbb abab",
    "x = 1\n\n\ty = 22  # 中文 test 🙂\r\n",
]


def needs(module):
    return pytest.mark.skipif(not importlib.util.find_spec(module), reason=f"{module} is not installed: pip install {module}")


def shared_texts(name, limit):
    """Documents of the real text beside a checkout, at most `limit` characters."""
    import pyarrow.parquet as pq

    files = sorted((SHARED / "hub/datasets/npuchat" / name).glob("*.parquet"))
    if not files:
        pytest.skip(f"no real text in {SHARED.name}")
    texts = [t for f in files for t in pq.read_table(f, columns=["text"])["text"].to_pylist()]
    sizes = np.cumsum([len(t) for t in texts])
    return texts[: int(np.searchsorted(sizes, limit)) + 1]


def bpe_by_the_book(texts, n_merges, pattern):
    """The algorithm as it is defined, word by word: count all pairs, merge the most frequent, again."""
    words = {}
    for text in texts:
        for w in splitter(pattern)(text):
            words[w] = words.get(w, 0) + 1
    words, merges = [(list(w.encode()), n) for w, n in words.items()], []
    for new in range(256, 256 + n_merges):
        pairs = {}
        for w, n in words:
            for pair in zip(w, w[1:]):
                pairs[pair] = pairs.get(pair, 0) + n
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        for w, _ in words:
            i = 0
            while i < len(w) - 1:
                if (w[i], w[i + 1]) == best:
                    w[i : i + 2] = [new]
                i += 1
    return merges


def rust_ranks(texts, vocab, pattern="gpt4"):
    import rustbpe

    rust = rustbpe.Tokenizer()
    rust.train_from_iterator(iter(texts), vocab, pattern=PATTERNS[pattern])
    return {bytes(p): i for p, i in rust.get_mergeable_ranks()}


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.text(alphabet="aab b的了1\n.", max_size=60), max_size=8), n=st.integers(0, 60))
def test_the_trainer_does_what_the_definition_says(texts, n):
    for pattern in PATTERNS.values():
        assert train_bpe(tokenizer_module.count_batch(texts, pattern), n) == bpe_by_the_book(texts, n, pattern)


@needs("rustbpe")
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(alphabet="aab b的了1\n.é🙂", min_size=1, max_size=80), min_size=1, max_size=8), n=st.integers(1, 80))
def test_merges_are_rustbpes_when_many_pairs_tie(texts, n):
    for pattern in PATTERNS:
        assert our_ranks(texts, 256 + n, pattern) == rust_ranks(texts, 256 + n, pattern)


@slow
@needs("rustbpe")
@pytest.mark.parametrize("name", ["embedded", "random bytes", "dev-text-en", "dev-text-zh"])
def test_merges_are_rustbpes_on_real_text(name):
    if name == "embedded":
        texts = [t for t, _ in tokenizer_module.embedded_documents()]
    elif name == "random bytes":
        rng = random.Random(0)
        texts = [rng.randbytes(3000).decode(kind, "replace") for kind in ("utf-8", "latin-1", "utf-16-le") for _ in range(100)]
    else:
        texts = shared_texts(name, 3_000_000)
    for vocab in (512, 4096, 32768):
        assert our_ranks(texts, vocab) == rust_ranks(texts, vocab), vocab


@needs("regex")
@settings(max_examples=400, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet=" \t\n\r\x1c\x85\u3000'sſKx1½Ⅷ的🙂𠀀𝟙𐒠〇.\u0301", max_size=60))
def test_words_are_those_of_the_regex_module(text):
    import regex

    text = "".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs"))  # newer Unicode tables know more letters
    for pattern in PATTERNS.values():
        words = splitter(pattern)(text)
        assert words == regex.findall(pattern, text) and "".join(words) == text


def test_the_cjk_pattern_does_not_swallow_a_clause():
    clause = "今天天气不错我们一起去公园散步吧"
    assert splitter(PATTERNS["gpt4"])(clause) == [clause]
    words = splitter(PATTERNS["cjk"])(f"，{clause}GPT很好")
    assert words[0] == "，今天天气不错我们" and "GPT" in words and all(len(w) <= 9 for w in words)


def test_counting_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    """Processes, bounded words and a stop in the middle: the counts are those of one straight pass."""
    shards = []
    for i in range(6):
        shards.append(tmp_path / f"{i}.jsonl")
        shards[-1].write_text("\n".join(json.dumps({"text": f"shard {i} line {j} " + "word " * (j % 7)}) for j in range(200)))
    for name, value in dict(BATCH_CHARS=900, SAVE_SECONDS=0, max_chars=50_000, doc_cap=30, out_dir=str(tmp_path)).items():
        monkeypatch.setattr(tokenizer_module, name, value)
    texts = [t for _, t in tokenizer_module.training_texts(shards)]
    assert max(map(len, texts)) == 30 and sum(map(len, texts)) < 50_000
    want = tokenizer_module.count_batch(texts, PATTERNS["gpt4"])
    state, read = tmp_path / "counting.npz", tokenizer_module.read_shard

    def stops(shard, home):
        if shard == shards[4]:
            raise KeyboardInterrupt
        return read(shard, home)

    monkeypatch.setattr(tokenizer_module, "read_shard", stops)
    with pytest.raises(KeyboardInterrupt):
        tokenizer_module.count_words(shards, state)
    reads = []
    monkeypatch.setattr(tokenizer_module, "read_shard", lambda s, home: reads.append(s) or read(s, home))
    assert tokenizer_module.count_words(shards, state) == want and 1 <= len(reads) < 6
    assert "were counted before" in capsys.readouterr().out
    state.write_bytes(state.read_bytes()[:-200])
    assert tokenizer_module.count_words(shards, state) == want and "damaged" in capsys.readouterr().out
    monkeypatch.setattr(tokenizer_module, "MAX_WORDS", 60)
    few = tokenizer_module.count_words(shards, tmp_path / "other.npz")
    assert len(few) <= 60 and few[" word"] == want[" word"] and "forgotten" in capsys.readouterr().out


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_text_survives_encoding(tok, text):
    ids = tok.encode(text)
    assert tok.decode(ids) == text and all(i < tok.bos for i in ids) and tok.encode_batch([text]) == [ids]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=100) | st.text(max_size=30).map(lambda t: t.encode()[1:-1]))
def test_bytes_survive_encoding(tok, data):
    assert tok.decode_bytes(tok.encode(data)) == data


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), ids=st.lists(st.integers(0, 664), max_size=40), data=st.data())
def test_streamed_text_is_the_whole_text_for_every_split(tok, text, ids, data):
    whole = tok.encode(text)
    pieces = list(tok.decode_stream(whole))
    assert "".join(pieces) == text and all("\ufffd" not in p or "\ufffd" in text for p in pieces)
    split = list(text.encode())  # every byte a token of its own: each character is cut wherever it can be
    assert list(tok.decode_stream(split)) == list(text)
    assert "".join(tok.decode_stream(ids)) == tok.decode(ids)  # also of ids that are no text at all


def test_specials_are_never_parsed_from_text(tok):
    ids = tok.encode("<|bos|><|assistant_start|>")
    assert max(ids) < tok.bos and tok.decode(ids) == "<|bos|><|assistant_start|>"
    assert (
        len(
            {
                tok.bos,
                tok.user_start,
                tok.user_end,
                tok.assistant_start,
                tok.assistant_end,
                tok.python_start,
                tok.python_end,
                tok.output_start,
                tok.output_end,
            }
        )
        == 9
    )


@needs("tokenizers")
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_the_file_loads_in_the_tokenizers_library(tok, tmp_path, pattern):
    from tokenizers import Tokenizer as HF

    tok = Tokenizer(our_ranks(TEXTS + [(HERE / "chat.py").read_text(encoding="utf-8")], 500, pattern), PATTERNS[pattern])
    tok.save(tmp_path, {})
    hf = HF.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, (HERE / "README.zh-CN.md").read_text(encoding="utf-8"), "今天天气不错，我们去公园吧。\n\n 1234567"]:
        assert hf.encode(text, add_special_tokens=False).ids == tok.encode(text)
        assert hf.decode(tok.encode(text)) == text
    assert hf.token_to_id("<|bos|>") == tok.bos


@needs("transformers")
def test_transformers_renders_conversations_to_the_same_ids(tok, tmp_path):
    from transformers import AutoTokenizer

    tok.save(tmp_path, {})
    hf = AutoTokenizer.from_pretrained(tmp_path)
    made = [t(split, 30) for t in evaluation.RULE_TASKS.values() for split in ("train", "test")]
    two = [{"type": "text", "text": "def "}, {"type": "text", "text": "inition"}]  # one text, not two
    joined = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": two}]}
    for c in [CONVERSATION, joined, *conversations(20), *(task[i] for task in made for i in range(30))]:
        ids, mask = tok.render_conversation(c)
        theirs = hf.apply_chat_template(c["messages"], return_dict=True, return_assistant_tokens_mask=True)
        assert theirs["input_ids"] == ids and theirs["assistant_masks"] == mask
        prompt = hf.apply_chat_template(c["messages"][:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert prompt == tok.render_for_completion(c)
    for wrong in ([{"role": "system", "content": "a"}], [{"role": "assistant", "content": "a"}]):
        with pytest.raises(Exception, match="must be followed|take turns"):
            hf.apply_chat_template(wrong)


def test_a_damaged_tokenizer_is_refused(tok, tmp_path, capsys):
    rng = random.Random(1)
    tok.save(tmp_path, {"seconds": 1.5})
    whole = {n: (tmp_path / n).read_bytes() for n in ("tokenizer.json", "tokenizer.meta.json")}
    for trial in range(500):
        for name, data in whole.items():
            (tmp_path / name).write_bytes(data)
        name = rng.choice(list(whole))
        data, at = bytearray(whole[name]), rng.randrange(len(whole[name]))
        if trial % 5 == 0:
            del data[at:]
        elif trial % 5 == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif trial % 5 == 2:
            data[at : at + 100] = rng.randbytes(100)
        elif trial % 5 == 3:
            data[at:at] = data[: rng.randrange(1, 50)]
        if trial % 5 == 4 or (name == "tokenizer.meta.json" and json_or_none(data) == json_or_none(whole[name])):
            (tmp_path / name).unlink()  # (a change of white space in the sidecar is none)
        else:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(SystemExit) as e:
            Tokenizer.load(tmp_path)
        err = capsys.readouterr().err
        assert e.value.code == 2 and "python tokenizer.py" in err and err.count("\n") == 1, err


def json_or_none(data):
    try:
        return json.loads(bytes(data))
    except ValueError:
        return None


def test_another_tokenizer_is_kept_aside_and_found_again(tmp_path, texts):
    """Training with other knobs must not make checkpoints useless: the old tokenizer stays, and the refusal says where."""
    args = ("tokenizer.py", f"--data_dir={texts}", f"--out_dir={tmp_path}")
    run(*args, "--vocab_size=400")
    first = Tokenizer.load(tmp_path / "tokenizer").hash
    assert "already trained" in run(*args, "--vocab_size=400").out
    assert "tokenizer.old1" in run(*args, "--vocab_size=300").out
    second = Tokenizer.load(tmp_path / "tokenizer").hash
    assert "tokenizer.old2" in run(*args, "--vocab_size=300", "--pattern=cjk").out  # the same merges, another file
    hashes = [Tokenizer.load(tmp_path / f"tokenizer{suffix}").hash for suffix in (".old1", ".old2", "")]
    assert hashes[:2] == [first, second] and len(set(hashes)) == 3
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()  # incomplete, but it may be a checkpoint's
    assert "tokenizer.old3" in run(*args, "--vocab_size=290").out
    assert Tokenizer.load(tmp_path / "tokenizer.old3").hash == hashes[2]


def test_a_checkpoint_refuses_another_tokenizer_and_says_where_its_own_is(tok, tmp_path, capsys):
    Tokenizer(our_ranks(TEXTS, 300)).save(tmp_path / "tokenizer", {})
    tok.save(tmp_path / "tokenizer.old1", {})
    with pytest.raises(SystemExit):
        tokenizer_module.find_tokenizer(tmp_path, {"tokenizer": tok.hash, "path": "some/step_1"})
    err = capsys.readouterr().err
    assert "some/step_1" in err and "tokenizer.old1" in err


CONVERSATION = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": [
                {"type": "python", "text": "2+3"},
                {"type": "python_output", "text": "5"},
                {"type": "text", "text": "It is 5."},
            ],
        },
        {"role": "user", "content": "谢谢"},
        {"role": "assistant", "content": "不客气。"},
    ]
}


def test_rendering_and_its_mask(tok):
    ids, mask = tok.render_conversation(CONVERSATION)
    e = tok.encode
    parts = [
        ([tok.bos, tok.user_start, *e("Be brief.\n\n2+3?"), tok.user_end, tok.assistant_start], 0),
        ([tok.python_start, *e("2+3"), tok.python_end], 1),
        ([tok.output_start, *e("5"), tok.output_end], 0),
        ([*e("It is 5."), tok.assistant_end], 1),
        ([tok.user_start, *e("谢谢"), tok.user_end, tok.assistant_start], 0),
        ([*e("不客气。"), tok.assistant_end], 1),
    ]
    assert ids == [i for part, _ in parts for i in part] and mask == [m for part, m in parts for _ in part]
    assert tok.render_conversation(CONVERSATION, 30) == (ids[:30], mask[:30])
    prompt = tok.render_for_completion(CONVERSATION)
    assert (
        prompt == ids[: len(prompt)]
        and prompt[-1] == tok.assistant_start
        and ids[len(prompt) :] == [*e("不客气。"), tok.assistant_end]
    )
    for messages, says in (
        ([{"role": "assistant", "content": "hi"}], "take turns"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "image", "text": ""}]}], "type 'image'"),
        ([{"role": "user", "content": None}], "neither text"),
        ([{"role": "user", "content": 5}], "neither text"),
        ([{"role": "system", "content": "a"}], "followed by a user"),
    ):
        with pytest.raises(ValueError, match=says):
            tok.render_conversation({"messages": messages})


PART = st.tuples(st.sampled_from(["text", "python", "python_output"]), st.text(max_size=12))
TURN = st.tuples(st.text(max_size=40), st.text(max_size=12) | st.lists(PART, min_size=1, max_size=4))


@settings(max_examples=300, deadline=None)
@given(system=st.none() | st.text(max_size=10), turns=st.lists(TURN, min_size=1, max_size=3), limit=st.integers(1, 80))
def test_masks_and_truncation(tok, system, turns, limit):
    """Every token of the assistant has mask 1, everything else 0; cut to any length, something of the assistant stays."""
    messages, want = [], [(tok.bos, 0)]
    for i, (question, answer) in enumerate(turns):
        parts = answer if isinstance(answer, list) else [("text", answer)]
        content = answer if isinstance(answer, str) else [{"type": k, "text": t} for k, t in answer]
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": content}]
        question = question if i or system is None else f"{system}\n\n{question}"
        want += [(t, 0) for t in (tok.user_start, *tok.encode(question), tok.user_end, tok.assistant_start)]
        joined = []  # neighbouring pieces of text are one text to the tokenizer
        for kind, text in parts:
            if kind == "text" and joined and joined[-1][0] == "text":
                joined[-1] = ("text", joined[-1][1] + text)
            else:
                joined.append((kind, text))
        for kind, text in joined:
            brackets = {"python": (tok.python_start, tok.python_end), "python_output": (tok.output_start, tok.output_end)}
            start, end = brackets.get(kind, (None, None))
            want += [(t, int(kind != "python_output")) for t in (start, *tok.encode(text), end) if t is not None]
        want.append((tok.assistant_end, 1))
    conversation = {"messages": ([] if system is None else [{"role": "system", "content": system}]) + messages}
    assert list(zip(*tok.render_conversation(conversation))) == want
    try:
        ids, mask = tok.render_conversation(conversation, limit)
    except ValueError:
        ids, mask = [], []
        needed = want.index((tok.assistant_start, 0)), [m for _, m in want].index(1)  # up to and with its first trained token
        assert limit < 4 + needed[1] - needed[0], "a token of the assistant could have been kept"
    else:
        assert len(ids) == len(mask) <= limit and 1 in mask and ids[0] == tok.bos and mask.index(1) < len(ids)
        assert ids[: limit // 8] == [i for i, _ in want][: limit // 8] or ids[1] == tok.user_start
    [(batch_ids, batch_mask, lost)] = tok.render_batch([conversation], limit)
    assert (batch_ids, batch_mask) == (ids, mask) and lost == len(want) - len(ids)


def test_a_long_question_keeps_its_end_and_the_answer(tok):
    question, answer = "word " * 200 + "and so?", "Yes."
    c = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    ids, mask = tok.render_conversation(c, 50)
    trained = [i for i, m in zip(ids, mask) if m]
    assert len(ids) == 50 and tok.decode(trained[:-1]) == answer and trained[-1] == tok.assistant_end
    assert ids[:2] == [tok.bos, tok.user_start] and tok.decode(ids[2:20]) in question and "and so?" in tok.decode(ids)
    c["messages"][1]["content"] = answer * 100
    ids, mask = tok.render_conversation(c, 50)
    assert len(ids) == 50 and sum(mask) == 23  # half of the room


def test_show_prints_what_is_trained_in_green(home, tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps(CONVERSATION) + "\n" + json.dumps(CONVERSATION["messages"]), encoding="utf-8")
    out = run("tokenizer.py", f"--show={tmp_path / 'c.jsonl'}", f"--out_dir={home}").stdout
    green, grey = ("".join(re.findall(rf"\033\[{n}m(.*?)\033\[0m", out, re.S)) for n in (32, 90))
    assert "不客气。" in green and "谢谢" in grey and "<|python_start|>2+3<|python_end|>" in green and "It is 5." not in grey
    (tmp_path / "c.jsonl").write_text('{"messages": 3}')
    failed = run("tokenizer.py", f"--show={tmp_path / 'c.jsonl'}", f"--out_dir={home}", check=False)
    assert failed.returncode == 2 and "line 1" in failed.stderr and "Traceback" not in failed.stderr



def test_token_bytes(tok):
    sizes = tok.token_bytes()
    text = "héllo 世界 = 42"
    assert sizes[tok.encode(text)].sum() == len(text.encode()) and sizes[tok.bos :].sum() == 0


# --- text ------------------------------------------------------------------------------------------------------------
def test_the_embedded_text_is_there_and_has_no_duplicates():
    docs = tokenizer_module.embedded_documents()
    texts = [t for t, _ in docs]
    assert len(texts) == len(set(texts)) > 200 and sum(map(len, texts)) > 5e6
    assert {s for _, s in docs} >= {"code", "docs"} and docs == tokenizer_module.embedded_documents.__wrapped__()
    share = sum(tokenizer_module.is_val(t, 20) for t in texts) / len(texts)
    assert 0.01 < share < 0.12, share


def test_parquet_jsonl_and_txt_give_the_same_documents(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    docs = ["one", "二\n2", "three 🙂"]
    pq.write_table(pa.table({"text": docs}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in docs), encoding="utf-8")
    (tmp_path / "c.txt").write_text(docs[1], encoding="utf-8")
    read = [
        [t for t, _ in tokenizer_module.read_shard(s, tmp_path)] for s in tokenizer_module.find_shards(str(tmp_path), tmp_path)
    ]
    assert read == [docs, docs, [docs[1]]]


def test_one_plain_text_file_is_enough(tok, tmp_path, capsys):
    text = "\n\n".join(f"Paragraph {i}. " + "word " * 50 for i in range(200))
    (tmp_path / "input.txt").write_text(text)
    docs = [t for t, _ in tokenizer_module.read_shard(tmp_path / "input.txt", tmp_path)]
    assert "\n\n".join(docs) == text and min(map(len, docs[:-1])) > 5000
    train, val = tokenizer_module.load_corpus(str(tmp_path / "input.txt"), tmp_path, tok, CPU, 1000)
    assert len(train[0]) + len(val) == len(docs) and val and all(d[0] == tok.bos for d in [*train[0], *val])
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("short")
    (tmp_path / "one" / "b.txt").write_text("")
    with pytest.raises(SystemExit):
        tokenizer_module.load_corpus(str(tmp_path / "one"), tmp_path, tok, CPU, 1000)
    assert "two documents" in capsys.readouterr().err


def write_parquet(path, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def damage(path):
    data = bytearray(path.read_bytes())
    data[10:60] = bytes(50)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda p: None, "not a folder"),
        (lambda p: p.mkdir(), "holds no"),
        (lambda p: (p.mkdir(), (p / "x.txt").mkdir()), "holds no"),
        (lambda p: (p.mkdir(), (p / "x.jsonl").write_text("{}")), "line 1"),
        (lambda p: write_parquet(p / "x.parquet", words=["a"]), "no column `text`, only words"),
        (lambda p: write_parquet(p / "x.parquet", text=[1, 2]), "does not hold text"),
        (lambda p: damage(write_parquet(p / "x.parquet", text=["some text"] * 9)), "not a sound parquet"),
        (lambda p: (p.mkdir(), (p / "x.parquet").write_text("no")), "not a sound parquet"),
    ],
)
def test_unusable_text_is_one_sentence(tmp_path, capsys, make, says):
    make(tmp_path / "d")
    with pytest.raises(SystemExit) as e:
        for shard in tokenizer_module.find_shards(str(tmp_path / "d"), tmp_path):
            list(tokenizer_module.read_shard(shard, tmp_path))
    assert e.value.code == 2 and says in capsys.readouterr().err


def test_a_corpus_is_as_large_as_wanted_and_blank_documents_do_not_count(tok, tmp_path, capsys):
    corpus = tmp_path / "c"
    corpus.mkdir()
    (corpus / "00.jsonl").write_text('{"text": "ab"}\n{"text": ""}\n{"text": " \\n "}\n')
    for i in range(1, 9):
        (corpus / f"{i:02}.jsonl").write_text("\n".join(json.dumps({"text": f"{i} {j} " + "word " * 20}) for j in range(300)))
    train, val = tokenizer_module.load_corpus(str(corpus), tmp_path, tok, CPU, 1000)
    assert "2 of 9 shards" in capsys.readouterr().out and len(list((tmp_path / "data" / "tokens").iterdir())) == 2
    assert sum(map(len, train)) + len(val) == 301 and val
    (corpus / "09.txt").write_text("\n" * 9000)
    assert list(tokenizer_module.read_shard(corpus / "09.txt", tmp_path)) == []
    few = tmp_path / "few"
    few.mkdir()
    for i in range(3):
        (few / f"{i}.txt").write_text(f"a short text {i}")
    train, val = tokenizer_module.load_corpus(str(few), tmp_path, tok, CPU, 10**9)
    assert len(train) == 2 and len(val) == 1
    (few / "1.jsonl").write_text("[]")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        tokenizer_module.load_corpus(str(few / "1.jsonl"), tmp_path, tok, CPU, 10**9)
    assert "line 1" in (err := capsys.readouterr().err) and err.count("\n") == 1
    (few / "1.jsonl").unlink()
    both = tokenizer_module.find_shards(f"{few},{corpus}", tmp_path)
    assert [s.parent.name for s in both[:4]] == ["few", "c", "few", "c"] and len(both) == 13


# --- rows ------------------------------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 200), max_size=40), capacity=st.integers(40, 70))
def test_packing_text_loses_next_to_nothing(lengths, capacity):
    docs = [np.array([0, *range(1000 * i + 1, 1000 * i + n)]) for i, n in enumerate(lengths)]
    rows, seen = pack_rows(lengths, capacity, split=True), []
    for row in rows:
        ids, mask = fill_row(row, docs, capacity, bos=0)
        assert ids[0] == 0 and mask.sum() == sum(b - a + (a > 0) for _, a, b in row)
        assert all(start == 0 or a < stop for a, (_, start, stop) in enumerate(row))
        seen += [i for i in ids if i]
    assert len(seen) == len(set(seen)), "a token came twice"
    everything = sum(n - 1 for n in lengths)
    assert everything - len(seen) <= tokenizer_module.MIN_REST * len(lengths) and (
        len(rows) < 2 or sum(len(r) for r in rows) > 0
    )


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(2, 50), min_size=1, max_size=40))
def test_packing_conversations_keeps_each_whole(lengths):
    rows = pack_rows(lengths, 50, split=False)
    assert sorted(p for row in rows for p in row) == [(i, 0, n) for i, n in enumerate(lengths)]
    assert all(sum(b - a for _, a, b in row) <= 50 for row in rows)


def conversations(n):
    return [
        {"messages": [{"role": "user", "content": "x" * (i % 17)}, {"role": "assistant", "content": f"answer {i}"}]}
        for i in range(n)
    ]


@pytest.mark.parametrize("split", [True, False])
def test_rows_are_the_same_for_any_number_of_ranks_and_after_a_stop(tok, tmp_path, split):
    blocks, n, _ = conversation_blocks(conversations(100), tok, tmp_path, CPU, 65, every_token=True, size=40)
    if split:
        (tmp_path / "a.txt").write_text("\n\n".join(f"{i} " + "text " * (i * 37 % 400) for i in range(60)))
        documents, _, _ = tokenizer_module.text_cache(tmp_path / "a.txt", tok, tmp_path)
        blocks, n = (lambda block, epoch: documents[block::3]), 3

    def take(world, steps, B=24, state=None):
        loaders = [iter(RowLoader(blocks, n, 64, B, tok, d, split, state=state)) for d in ranks(world)]
        parts = [[next(it)[0] for it in loaders] for _ in range(steps)]
        assert all(abs(len(part) - B / world) < 1 for step in parts for part in step)  # shared evenly, give or take one
        return [torch.stack([step[i % world][i // world] for i in range(B)]) for step in parts]

    straight = take(1, 12)
    for world in (2, 3, 7, 8, 25):  # also more ranks than rows
        assert all(torch.equal(a, b) for a, b in zip(straight, take(world, 12)))
    loader = RowLoader(blocks, n, 64, 24, tok, CPU, split)
    it = iter(loader)
    for stop in range(1, 11):
        next(it)
        again = take(3, 2, state=json.loads(json.dumps(loader.state)))
        assert all(torch.equal(a, b) for a, b in zip(straight[stop : stop + 2], again))


def test_only_the_assistant_is_scored_in_sft_and_everyone_in_mid(tok, tmp_path):
    for every in (True, False):
        blocks, n, tokens = conversation_blocks([CONVERSATION], tok, tmp_path, CPU, 65, every_token=every)
        inputs, targets = next(iter(RowLoader(blocks, n, 64, 1, tok, CPU, split=False)))
        ids, mask = tok.render_conversation(CONVERSATION)
        want = [t if every or m else -1 for t, m in zip(ids[1:], mask[1:])]
        assert targets[0].tolist() == want + [-1] * (64 - len(want)) and inputs[0, : len(ids)].tolist() == ids
        assert tokens == len(ids)


@pytest.mark.parametrize("case", ["nothing", "one token", "a conversation longer than the row", "several"])
def test_the_sft_loss_is_a_mean_over_the_assistants_tokens(tok, tmp_path, case):
    """Against a loop over tokens; T = 64. Micro-batches of different numbers of supervised tokens just add up."""
    say = lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}  # noqa: E731
    talks = {"a conversation longer than the row": [say("why? " * 60, "because " * 60)],
             "several": [say("2?", "3"), say("why?", "x" * 90)]}
    blocks, n_blocks, _ = conversation_blocks(talks.get(case, [say("2?", "3")]), tok, tmp_path, CPU, 65, every_token=False)
    inputs, targets = next(iter(RowLoader(blocks, n_blocks, 64, 3, tok, CPU, split=False)))
    if case == "nothing":
        targets = torch.full_like(targets, -1)
    elif case == "one token":
        kept = (targets >= 0).nonzero()[0].tolist()
        targets = torch.full_like(targets, -1).index_put_(tuple(torch.tensor([i]) for i in kept), targets[kept[0], kept[1]])
    scored = int((targets >= 0).sum())
    assert scored == {"nothing": 0, "one token": 1}.get(case, scored) and (scored > 20 or case in ("nothing", "one token"))
    model = tiny(tok.vocab_size, max_seq_len=64)
    for rows, wanted in zip(inputs.split(2), targets.split(2)):  # as a script does, two rows at a time
        (model(rows, wanted) / max(1, scored)).backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    terms = [-model(inputs[r : r + 1, : t + 1])[0, -1].log_softmax(-1)[targets[r, t]] for r, t in (targets >= 0).nonzero().tolist()]
    mean = torch.stack(terms).mean() if terms else sum(p.sum() for p in model.parameters()) * 0
    mean.backward()
    for n, p in model.named_parameters():
        theirs = torch.zeros_like(p) if p.grad is None else p.grad
        assert torch.isfinite(ours[n]).all() and torch.allclose(ours[n], theirs, atol=1e-5), n
    x = torch.randn(len(targets.flatten()), 32, requires_grad=True)
    gpt.CrossEntropy.apply(x, model.head_weight, targets.flatten(), None, 15.0, "sum", gpt.tile_softmax).backward()
    assert ((x.grad != 0).any(1) == (targets.flatten() >= 0)).all(), "where the user speaks nothing is pulled at"


def test_rows_are_full_and_little_is_cropped(tok, tmp_path, capsys):
    many = [{"messages": [{"role": "user", "content": "x" * (i % 200)}, {"role": "assistant", "content": f"{i} " * (i * i % 70)}]}
            for i in range(3000)]
    blocks, _, _ = conversation_blocks(many, tok, tmp_path, CPU, 513, every_token=False)
    _, filled, scored, cropped = tokenizer_module.describe_rows(blocks(0, 0), 513, split=False)
    assert filled > 0.995 and 0.1 < scored < filled and cropped == 0
    bad = [{"messages": [{"role": "user", "content": "alone"}]}, {"messages": [{"role": "tool", "content": "?"}]}]
    long = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b " * 400}]}]
    blocks, _, tokens = conversation_blocks(many[:3] + bad + long, tok, tmp_path, CPU, 65, every_token=False)
    out = capsys.readouterr().out
    assert "2 are left out" in out and "longer than a row of 65 tokens" in out and tokens < 4 * 65


def test_the_token_cache_is_keyed_by_text_safe_and_mended(tok, tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(f"{i} " + "text " * 1200 for i in range(40)))

    def cached():
        return [tok.decode(d[1:]) for d in tokenizer_module.text_cache(path, tok, tmp_path)[0]]

    texts = [t for t, _ in tokenizer_module.read_shard(path, tmp_path)]
    assert sorted(cached()) == sorted(texts)
    (folder,) = (tmp_path / "data" / "tokens").iterdir()
    stamp = (folder / "ids.bin").stat().st_mtime_ns
    threads = [threading.Thread(target=cached) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert (folder / "ids.bin").stat().st_mtime_ns == stamp, "it was built again"
    broken = {"ids.bin": b"12", "starts.npy": b"PK\3\4", "notes.npy": b"", "mask.bin": b"1", "names.json": b"["}
    for name, data in broken.items():  # copies broken off
        (folder / name).write_bytes(data)
        assert sorted(cached()) == sorted(texts) and "damaged" in capsys.readouterr().out
    path.rename(path := tmp_path / "a.jsonl")  # the same bytes, read in another way
    with pytest.raises(SystemExit):
        cached()
    path.rename(path := tmp_path / "a.txt")
    path.write_text(path.read_text().replace("text", "TEXT"))
    assert "TEXT" in cached()[0] and len(list(folder.parent.iterdir())) == 2
    shutil.rmtree(folder.parent)
    threads = [threading.Thread(target=cached) for _ in range(4)]  # all build at once
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(list(folder.parent.iterdir())) == 1 and "TEXT" in cached()[0]


# --- model -----------------------------------------------------------------------------------------------------------
VARIANTS = [
    *gpt.PRESETS.values(),
    dict(n_kv_head=2),
    dict(qk_norm=False, softcap=0.0),
    dict(n_layer=1, n_head=1, n_kv_head=1),
    dict(tied=True, mlp="relu2"),
    dict(window=5, n_layer=6),
    dict(bigrams=97),
    dict(window=5, n_layer=4, n_kv_head=1),
]


@pytest.mark.parametrize("kw", VARIANTS)
def test_cached_decoding_equals_the_full_forward(kw):
    model = tiny(**kw).eval()
    lengths = [9, 1, 17]
    rows = [torch.randint(0, 300, (n + 6,)).tolist() for n in lengths]
    cache = KVCache(model.config, 3, 32, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        prompt = torch.tensor([r[:n] + [0] * (17 - n) for r, n in zip(rows, lengths)])
        got = [model(prompt, cache=cache, at=(list(range(len(lengths))), [n - 1 for n in lengths]))]
        cache.advance(lengths)
        for t in range(5):
            got.append(model(torch.tensor([[r[n + t]] for r, n in zip(rows, lengths)]), cache=cache)[:, 0])
            cache.advance([1, 1, 1])
        for b, (row, n) in enumerate(zip(rows, lengths)):
            full = model(torch.tensor([row]))[0]
            for t in range(6):
                torch.testing.assert_close(got[t][b], full[n - 1 + t], atol=2e-5, rtol=1e-4)


BUSY = """
import common, numpy as np, torch
from tokenizer import RowLoader
class Tok:
    bos = 0
class Dev:
    rank, world_size = 0, 1
    def pinned(self, t):
        for _ in range(20000):  # long enough for Python to end meanwhile
            torch.where(t > 0, t, -1)
        return t
batches = iter(RowLoader(lambda block, epoch: [np.arange(50)] * 9, 1, 8, 4, Tok(), Dev(), split=True))
next(batches)
print("taken")
"""


def test_python_can_end_while_the_loader_is_busy():
    done = subprocess.run([sys.executable, "-c", BUSY], cwd=HERE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "taken" in done.stdout, done.stderr


def test_a_lookup_adds_its_gradient_to_what_is_there():
    idx, pull, got = torch.tensor([[1, 4, 1], [9, 1, 0]]), torch.randn(2, 3, 4), []
    for look in (lambda w: gpt.Lookup.apply(w, idx), lambda w: F.embedding(idx, w)):
        w = nn.Parameter(torch.arange(40.0).view(10, 4))
        for _ in range(2):  # passes; the head may be the same matrix
            ((look(w) * pull).sum() + w.square().sum()).backward()
        got.append(w.grad)
    torch.testing.assert_close(*got)


@pytest.mark.parametrize("few", [3, 7])
@pytest.mark.parametrize("kw", [dict(), dict(softcap=0.0), dict(tied=True), dict(softcap=60.0), dict(bigrams=50)])
def test_the_loss_in_tiles_is_the_loss(kw, few, monkeypatch):
    model, idx = tiny(**kw), torch.randint(0, 300, (4, 32))
    targets = idx.roll(-1, 1).masked_fill(torch.rand(4, 32) < 0.3, -1)
    plain = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    plain.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(gpt, "tile_shape", lambda N, V, device, compiled: (7, 70, few))  # none divides 128 rows or 300 columns
    chunked = model(idx, targets)
    chunked.backward()
    torch.testing.assert_close(chunked, plain)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[n], atol=1e-5 * want[n].abs().max().item(), rtol=1e-5)
    with torch.no_grad():
        each = model(idx, targets, reduction="none")
    assert each.shape == (4, 32) and torch.allclose(each.sum(), plain) and (each[targets < 0] == 0).all()
    model.zero_grad()
    weights = torch.randn(4, 1)  # of rows, as advantages are; some negative
    plain = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(4, 32) * weights
    plain.sum().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    weighted = model(idx, targets, weights)
    weighted.backward()
    torch.testing.assert_close(weighted, plain.sum())
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[n], atol=1e-5 * want[n].abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("preset", ["classic", "qwen3"])
@pytest.mark.parametrize("kw", [{}, dict(n_kv_head=2)])
def test_presets_are_those_of_transformers(preset, kw):
    """The same weights in another implementation give the same logits."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install transformers")
    model = tiny(**gpt.PRESETS[preset], **kw).eval()
    name, config, weights = gpt.to_transformers(model)
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    theirs = getattr(transformers, name)(getattr(transformers, name.replace("ForCausalLM", "Config"))(**config)).eval()
    missing, unknown = theirs.load_state_dict(weights, strict=False)
    assert not missing and not unknown, (missing, unknown)
    idx = torch.randint(0, 300, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits.float(), model(idx), atol=1e-4, rtol=1e-4)
    with pytest.raises(SystemExit):
        gpt.to_transformers(tiny())


def test_a_model_laid_out_on_the_meta_device_is_an_ordinary_one():
    torch.manual_seed(7)
    a = GPT(GPTConfig(vocab_size=300, max_seq_len=64, n_layer=2, n_head=2, n_kv_head=2, n_embd=32))
    b = GPT.build(a.config, torch.device("cpu"), a.state_dict())
    for p, q in zip([*a.parameters(), *a.buffers()], [*b.parameters(), *b.buffers()], strict=True):
        assert torch.equal(p, q)
    c = GPT.build(a.config, "cpu")
    for (n, p), q in zip(a.named_parameters(), c.parameters()):
        assert torch.isfinite(q).all() and abs(p.std() - q.std()) <= 0.1 * p.std() or p.numel() < 10, n


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++ for torch.compile")
@pytest.mark.parametrize("cap", [15.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_compiled_tile_is_the_same(cap, dtype):
    y = torch.randn(16, 64).to(dtype)
    got = torch.compile(gpt.tile_softmax, dynamic=False)(y.clone(), cap, torch.zeros(16))
    for a, b in zip(got, gpt.tile_softmax(y, cap, torch.zeros(16)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4 if dtype == torch.float32 else 2e-3)


def test_the_largest_softcap_does_not_overflow():
    x, w = torch.full((3, 8), 20.0, requires_grad=True), torch.randn(300, 8)
    w[7] = 5.0
    loss = gpt.CrossEntropy.apply(x, w, torch.tensor([7, 7, 8]), None, 60.0, "sum", gpt.tile_softmax)
    loss.backward()
    plain = F.cross_entropy(60 * torch.tanh(x.detach() @ w.T / 60), torch.tensor([7, 7, 8]), reduction="sum")
    torch.testing.assert_close(loss.detach(), plain, atol=1e-3, rtol=1e-4)
    assert torch.isfinite(x.grad).all()


def test_a_window_serves_evaluation_and_then_training():
    gpt.window_mask.cache_clear()
    model, idx = tiny(window=8), torch.randint(0, 300, (2, 64))
    with torch.inference_mode():
        model(idx)
    model.activation_checkpointing = True
    model(idx, idx).backward()


def test_a_window_is_what_a_mask_says():
    idx = torch.randint(0, 300, (2, 64))
    far, near = tiny(n_layer=3, window=64), tiny(n_layer=3, window=8)
    torch.testing.assert_close(far(idx), tiny(n_layer=3)(idx))  # a window over all there is
    other = idx.clone()
    other[:, 0] = (other[:, 0] + 1) % 300
    last = tiny(n_layer=1, window=8)  # its last layer, which is its only one, looks all the way
    assert not torch.equal(last(idx)[:, 20], last(other)[:, 20])
    near.config.n_layer = 99  # now every layer of the three has the window
    reach = (near(idx) - near(other)).abs().amax((0, 2)) > 0
    assert reach[:25].any() and not reach[3 * 8 + 1 :].any()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_forms_of_a_window_are_one(monkeypatch):
    """The block mask of flex_attention, which CUDA gets under torch.compile, hides what the booleans hide."""
    from torch.nn.attention.flex_attention import create_block_mask
    q, k, v = (torch.randn(2, n, 200, 16) for n in (4, 2, 2))
    gpt.window_mask.cache_clear()
    monkeypatch.setattr("torch.nn.attention.flex_attention.create_block_mask",
                        lambda *args, device: create_block_mask(*args, device="cpu"))
    block, booleans = (gpt.window_mask(200, 30, torch.device(kind), True) for kind in ("cuda", "cpu"))
    gpt.window_mask.cache_clear()
    torch.testing.assert_close(gpt.attention(q, k, v, block), gpt.attention(q, k, v, booleans), atol=1e-5, rtol=1e-4)


def test_a_fresh_model_guesses_uniformly_and_looks_only_back():
    model = GPT(GPTConfig(vocab_size=300, max_seq_len=64, n_layer=2, n_head=2, n_kv_head=2, n_embd=32))
    idx = torch.randint(0, 300, (2, 64))
    assert abs(model(idx, idx).item() / 128 - math.log(300)) < 0.05
    model = tiny()
    other = idx.clone()
    other[:, 40:] = 7
    assert torch.allclose(model(idx)[:, :40], model(other)[:, :40], atol=1e-5)
    assert not torch.allclose(model(idx)[:, 41], model(other)[:, 41], atol=1e-3)


def test_generation_equals_recomputing_from_scratch(tok):
    model = tiny(tok.vocab_size).eval()
    prompts = [torch.randint(0, 256, (n,)).tolist() for n in (1, 30, 7, 60, 13)]
    together = complete(model, tok, prompts, CPU, temperature=0, max_new_tokens=20)
    for prompt, [(tokens, mask)] in zip(prompts, together):
        row = list(prompt)
        with torch.inference_mode():
            for token, sampled in zip(tokens, mask):
                if sampled:
                    assert token == model(torch.tensor([row]))[0, -1].argmax()
                row.append(token)
        assert len(row) <= 64 and (len(tokens) == 20 or len(row) == 64 or tokens[-1] in (tok.assistant_end, tok.bos))
        assert complete(model, tok, [prompt], CPU, temperature=0, max_new_tokens=20) == [[(tokens, mask)]]
    several = complete(model, tok, prompts[:2], CPU, num_samples=3, temperature=1.0, max_new_tokens=5, seed=1)
    assert [len(g) for g in several] == [3, 3] and several == complete(
        model, tok, prompts[:2], CPU, num_samples=3, temperature=1.0, max_new_tokens=5, seed=1
    )


def test_the_calculators_answer_is_forced_and_not_counted_as_sampled(tok):
    """A model that says exactly: <python> 6*7 <python_end> whatever <assistant_end>."""
    script = [tok.python_start, *tok.encode("6*7"), tok.python_end, None, None, *tok.encode("ok"), tok.assistant_end]
    forced = [tok.output_start, *tok.encode("42"), tok.output_end]

    class Scripted:
        config = GPTConfig(vocab_size=tok.vocab_size, max_seq_len=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=2)

        def __init__(self):
            self.said = [t for t in script if t is not None]
            self.queue = self.said[: len(tok.encode("6*7")) + 2] + [7] * len(forced) + self.said[len(tok.encode("6*7")) + 2 :]

        def __call__(self, idx, cache, at=None):
            cache.open(idx.size(1))
            logits = F.one_hot(torch.tensor([self.queue.pop(0)]), tok.vocab_size).float()
            return logits if at else logits[:, None]

    [[(tokens, mask)]] = complete(Scripted(), tok, [[tok.bos]], CPU, temperature=0)
    call = [tok.python_start, *tok.encode("6*7"), tok.python_end]
    assert tokens == call + forced + tok.encode("ok") + [tok.assistant_end]
    assert mask == [1] * len(call) + [0] * len(forced) + [1] * (len(tok.encode("ok")) + 1)
    assert evaluation.visible_text(tok, tokens) == "ok"


def test_sampling_follows_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(40_000, 1)
    u = 1 - torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    for temperature, top_k in ((1.0, 0), (0.5, 0), (2.0, 2)):
        scaled = logits[0] / temperature
        if top_k:
            scaled[scaled < scaled.topk(top_k).values[-1]] = float("-inf")
        p = scaled.softmax(0)
        counts = torch.bincount(sample_tokens(logits, temperature, top_k, u), minlength=4).float()
        keep = p > 0
        chi2 = ((counts - 40_000 * p)[keep] ** 2 / (40_000 * p[keep])).sum()
        assert chi2 < 20 and counts[~keep].sum() == 0  # 3 degrees of freedom: p < 0.0002
    assert sample_tokens(logits[:3], 0, 0, None).tolist() == [2, 2, 2]
    edge = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).repeat(3, 1)
    assert sample_tokens(edge, 1.0, 0, torch.tensor([1e-16, 0.5, 1.0])).tolist() == [1, 1, 3]  # never one of probability 0


def test_calculator():
    right = {
        "17+25": "42",
        "2*(3+4)": "14",
        "7/2": "3.5",
        "1,234+1": "1235",
        "-5 + 3": "-2",
        "10/5": "2",
        "'strawberry'.count('r')": "3",
        '"aa".count("a")+1': "3",
        "7//2": "3",
        "9%4": "1",
    }
    for text, value in right.items():
        assert calculator(text) == value, text
    for text in [
        "__import__('os').system('ls')",
        "9**9**9",
        "1/0",
        "(" * 300,
        "'a'*10**9",
        "abs(-1)",
        "x",
        "",
        "1;2",
        "open('f')",
        "'a'.upper()",
        "1e999",
        "True",
        "'\\x'",
        "12and 3",
        "99999999999*99999999999",
        "[1]",
        "'a'.count(1)",
        "lambda:1",
        "1 if 1 else 2",
    ]:
        assert calculator(text) is None, text


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="0123456789+-*/%().,' \"acount", max_size=60))
@pytest.mark.filterwarnings("error")
def test_calculator_never_crashes_or_warns(text):
    result = calculator(text)
    assert result is None or len(result) < 40


# --- optimizer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("coefficients, least", [(NEWTON_SCHULZ, 0.5), (POLAR_EXPRESS, 0.7)])
def test_orthogonalize_is_close_to_the_polar_factor(coefficients, least):
    for shape in ((3, 20, 50), (2, 50, 20), (1, 32, 32)):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        u, _, vh = torch.linalg.svd(g, full_matrices=False)
        x = orthogonalize(g, coefficients)
        s = torch.linalg.svdvals(x)
        assert least < s.min() and s.max() < 1.3, s
        cosine = F.cosine_similarity(x.flatten(1), (u @ vh).flatten(1))
        assert (cosine > 0.97).all(), cosine


def test_adamw_equals_torchs():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(7, 5)) for _ in range(2))
    a = Muon([dict(kind="adamw", names=["w"], params=[ours], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)], CPU)
    b = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn(7, 5)
        theirs.grad = ours.grad.clone()
        a.step(torch.zeros(())), b.step()
    torch.testing.assert_close(ours, theirs)


def test_muon_equals_its_formula_and_skips_a_bad_step():
    torch.manual_seed(0)
    ws = [torch.nn.Parameter(torch.randn(8, 4)) for _ in range(3)]
    opt = Muon([dict(kind="muon", names=list("abc"), params=ws, lr=0.1, momentum=0.9, weight_decay=0.2)], CPU)
    w, buf = ws[1].detach().clone(), torch.zeros(8, 4)
    for _ in range(3):
        for p in ws:
            p.grad = torch.randn(8, 4)
        g = ws[1].grad
        buf = 0.9 * buf + 0.1 * g
        u = orthogonalize((0.1 * g + 0.9 * buf)[None])[0]
        w = w - 0.1 * 0.2 * w * (u * w > 0) - 0.1 * math.sqrt(2) * u
        opt.step(torch.zeros(()))
    torch.testing.assert_close(ws[1].detach(), w, atol=1e-5, rtol=1e-4)
    before = [p.detach().clone() for p in ws]
    for bad_grad, bad_loss in ((math.nan, 0.0), (math.inf, 0.0), (0.0, math.nan), (0.0, math.inf)):
        for p in ws:
            p.grad = torch.full((8, 4), bad_grad)
        norm, _ = opt.step(torch.tensor(bad_loss))
        assert not math.isfinite(norm) and all(torch.equal(a, b) for a, b in zip(before, ws))


def test_every_parameter_is_in_one_group_and_the_state_round_trips():
    model = tiny()
    rates = dict(matrix_lr=0.02, embed_lr=0.1, head_lr=0.01, scalar_lr=0.01)
    groups = model.param_groups(**rates)
    assert sorted(n for g in groups for n in g["names"]) == sorted(n for n, _ in model.named_parameters())
    assert all(
        p.ndim == 2 and n.startswith("blocks") for g in groups if g["kind"] == "muon" for n, p in zip(g["names"], g["params"])
    )
    groups[0]["normuon"] = True
    a, idx = Muon(groups, CPU), torch.randint(0, 300, (2, 32))
    for _ in range(2):
        a.zero_grad()
        model(idx, idx).backward()
        a.step(torch.zeros(()))
    twin = tiny()
    twin.load_state_dict(model.state_dict())
    b = Muon(twin.param_groups(**rates, normuon=True), CPU)
    b.load_state_dict(a.state_dict())
    for m, opt in ((model, a), (twin, b)):
        opt.zero_grad()
        m(idx, idx).backward()
        opt.step(torch.zeros(()))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    for rank in range(5):  # which none of the counts of matrices divides by
        Muon(tiny().param_groups(**rates, normuon=True), Device(torch.device("cpu"), "cpu", "cpu", torch.float32, rank, rank, 5)
             ).load_state_dict(a.state_dict())
    with pytest.raises(AssertionError, match="two groups"):
        Muon(groups + groups[:1], CPU)


# --- tasks and measures ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(evaluation.RULE_TASKS))
def test_rule_made_tasks(name, tok):
    train, test = evaluation.RULE_TASKS[name]("train", 1500), evaluation.RULE_TASKS[name]("test", 200)
    asked = [
        {c["messages"][0]["content"] for c in t}
        for t in (map(train.__getitem__, range(1500)), map(test.__getitem__, range(200)))
    ]
    assert not asked[0] & asked[1], "a test question is in the training set"
    assert train[7] == train[7] and len(test) == 200
    for i in range(200):
        c = test[i]
        ids, mask = tok.render_conversation(c)
        answer = [t for t, m in zip(ids, mask)][len(tok.render_for_completion(c)) :]
        assert test.grade(c, evaluation.visible_text(tok, answer)) == 1.0, c
        assert test.grade(c, "no") == 0.0 and test.grade(c, "") == 0.0
        for part, result in zip(c["messages"][1]["content"], c["messages"][1]["content"][1:]):
            if part["type"] == "python":
                assert calculator(part["text"]) == result["text"]
    text = "".join(asked[0])
    assert re.search(r"[a-z]", text) and re.search(r"[\u4e00-\u9fff]", text), "both languages"


def test_choice_prompts_hold_the_answer_as_a_token(tok):
    for c in (evaluation.Choice("test", 50)[i] for i in range(50)):
        ids = tok.render_for_completion(c)
        assert all(tok.encode(letter)[0] in ids for letter in c["letters"])


def task_of(cls, row, path=""):
    """A hub task with one row, without its files."""
    task = cls.__new__(cls)
    task.conversations = evaluation.sound(cls.name, [(path, 0, row)], task.convert)
    return task


def said(conversation):
    """What a reader sees of the answer."""
    return "".join(p["text"] for p in conversation["messages"][-1]["content"] if p["type"] == "text")


def test_gsm8k_reference_answers_become_tool_calls():
    task = task_of(evaluation.GSM8K, {"question": "q", "answer": "He has 3*4=<<3*4=12>>12 apples.\n#### 1,012"})
    parts = task[0]["messages"][1]["content"]
    assert [p["type"] for p in parts] == ["text", "python", "python_output", "text"]
    assert parts[1]["text"] == "3*4" and task[0]["answer"] == 1012 and said(task[0]).endswith("#### 1,012")


RIGHT = {  # ways to write them
    18: "18|18.|18.0|18.00|$18|$18.00|18 dollars|18 apples.|+18|**18**|`18`|\\boxed{18}|(18)|18%|€18|£ 18|¥18|１８|x = 18|6*3=18|"
        "= 18|the answer is 18|18 (x=3)|18 = 3 * 6|18 =|18\n\nCheck: 2+5=9|3 x 6 = 18|20-2=18|"
        "18,|18;|18!|18\n|18 (eighteen)|18/|18-inch|is $18.",
    1234: "1,234|1234|$1,234|1,234.0|$1,234.00|1 234".rsplit("|", 1)[0],
    -5: "-5|-5.0|\u22125|-$5|$-5|- 5",
    0.5: ".5|0.5|0.50|$0.50",
    1234567.5: "1,234,567.5|$1,234,567.50",
}
WRONG = {
    18: "19|118|180|1.8|-18|18.5|0.18|eighteen||.|$|18,5|1,8|18,00|1,800|18/2|36/2 and 9|1/18|8|81|18000|017|-18.0|\u221218|19=18|"
        "no|##|18.01|1818|017.9|1 18|18 1/2|18e2|9 + 9|20 - 2|20-2|19 (or 18)|3 = 18",
}


@pytest.mark.parametrize("wanted, answers, right", [(n, a.split("|"), 1) for n, a in RIGHT.items()]
                         + [(n, a.split("|"), 0) for n, a in WRONG.items()])
def test_a_final_number_is_read_as_a_person_would(wanted, answers, right):
    task = task_of(evaluation.GSM8K, {"question": "q", "answer": f"so\n#### {wanted}"})
    for a in answers:
        assert task.grade(task[0], f"20 - 2 <= 99, #### 7, no:\n#### {a}") == right, a
    assert task.grade(task[0], f"The answer is {wanted}") == 0, "without the mark"


@pytest.mark.skipif(not SHARED.exists(), reason="no shared/data beside this checkout")
def test_every_reference_answer_is_right(tmp_path):
    for name, folder in (("gsm8k", "openai"), ("humaneval", "openai")):
        (tmp_path / "data").mkdir(exist_ok=True)
        if not (tmp_path / "data" / folder).exists():
            (tmp_path / "data" / folder).symlink_to(SHARED / "hub" / "datasets" / folder)
        task = evaluation.make_task(name, "test", None if name == "gsm8k" else 10, tmp_path)
        assert len(task) == {"gsm8k": 1019, "humaneval": 10}[name]
        assert all(task.grade(c, said(c)) == 1 for c in task.conversations)
        assert not any(task.grade(c, "") for c in task.conversations[:5])


def test_a_program_is_the_answers_code_block_or_its_body():
    row = {"prompt": "from math import pi\n\ndef square(x):\n    return x * x\n\ndef area(r):\n    '''of a circle'''\n",
           "canonical_solution": "    return pi * r * r\n", "entry_point": "area",
           "test": "def check(f):\n    assert round(f(2)) == 13\n"}
    task = task_of(evaluation.HumanEval, row)
    whole, fence = row["prompt"] + row["canonical_solution"], "```"
    right = [
        whole,
        row["canonical_solution"],
        "def area(r):\n    return pi * square(r)",
        f"Here:\n{fence}python\n{whole}{fence}\nDone.",
        f"{fence}\n{whole}",
        f"Sure:\n  {fence}Python3 \n{whole}  {fence}\nThis uses `pi`.",
        f"{fence}sh\nls\n{fence}\n{fence}python\n{whole}\n{fence}",
        f"{whole}\n\nif __name__ == '__main__':\n    input()",
        f"def area(r):\n    '''\n    {fence}\n    area(1)\n    {fence}\n    '''\n    return pi * r * r",
        "def help(r):\n    return r\n\ndef area(r):\n    return pi * help(r) ** 2",
    ]
    for answer in right:
        assert task.grade(task[0], answer) == 1, answer
    for answer in ("", "    return r", "I do not know.", "```python\nprint(1)\n```", "import sys\nsys.exit(0)",
                   "    return 13 / 0"):
        assert task.grade(task[0], answer) == 0, answer


def test_broken_rows_are_named_and_a_wrong_schema_is_one_sentence(tmp_path, capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def put(repo, path, rows):
        place = tmp_path / "data" / repo / path
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), place)

    row = {"question": "q", "choices": list("abcd"), "answer": 2, "subject": ""}
    put("cais/mmlu", "all/test-00000-of-00001.parquet",
        [row, row | {"answer": 4}, row | {"answer": -1}, row | {"choices": None}, row | {"question": None}, row])
    task = evaluation.make_task("mmlu", "test", None, tmp_path)
    out = capsys.readouterr().out
    assert len(task) == 2 and "4 broken rows are left out" in out and "all/test-00000-of-00001.parquet row " in out
    put("openai/gsm8k", "main/test-00000-of-00001.parquet", [{"problem": "1 + 1", "solution": "2"}] * 3)
    with pytest.raises(SystemExit):
        evaluation.make_task("gsm8k", "test", None, tmp_path)
    assert "not one of 3 rows can be used" in capsys.readouterr().err
    (tmp_path / "data/openai/gsm8k/main/test-00000-of-00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(SystemExit):
        evaluation.make_task("gsm8k", "test", None, tmp_path)
    assert "delete it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluation.make_task("ceval", "train", None, tmp_path)
    assert "evaluation only" in capsys.readouterr().err
    say = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    for part in range(2):
        put("org/own", f"data/train-0000{part}-of-00002.parquet", [say] * 3)
    assert len(evaluation.make_task("org/own", "train", None, tmp_path)) == 6
    place = tmp_path / "data/haonan-li/cmmlu/cmmlu_v1_0_1.zip"
    place.parent.mkdir(parents=True)
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("test/law.csv", ",Question,A,B,C,D,Answer\n0,\"问题，\n两行？\",甲,乙,丙,丁,B\n1,x,1,2,3,4,E\n")
        archive.writestr("dev/law.csv", ",Question,A,B,C,D,Answer\n0,不用,甲,乙,丙,丁,B\n")
    [c] = evaluation.make_task("cmmlu", "test", None, tmp_path).conversations
    assert c["answer"] == "B" and "- 乙=B" in c["messages"][0]["content"] and "两行" in c["messages"][0]["content"]
    assert "1 broken rows" in capsys.readouterr().out


def test_mixtures_by_repetition_and_by_number(tmp_path, capsys):
    lines = [json.dumps([{"role": "user", "content": str(i)}, {"role": "assistant", "content": "!"}]) for i in range(10)]
    (tmp_path / "my.jsonl").write_text("\n".join(lines), encoding="utf-8")
    mine = f"{tmp_path}/my.jsonl"
    mix = evaluation.make_mixture(f"{mine}*3,choice:7, arithmetic*0.01", 0, tmp_path, CPU, 1)
    texts = [mix[i]["messages"][0]["content"] for i in range(len(mix))]
    assert len(mix) == 30 + 7 + 80 and all(texts.count(str(i)) == 3 for i in range(10))
    again = evaluation.make_mixture(f"{mine}*3,choice:7,arithmetic*0.01", 0, tmp_path, CPU, 1)
    assert [c["messages"] for c in mix] == [c["messages"] for c in again]
    assert abs(len(evaluation.make_mixture("all", 100, tmp_path, CPU, 1)) - 100) <= 5 and "choice" in capsys.readouterr().out
    assert evaluation.gradable(f"{mine},all*0.1,smoltalk,org/own") == ",".join(evaluation.RULE_TASKS)
    for names in ("gsm9k", "choice*x", "choice**2"):
        with pytest.raises(SystemExit):
            evaluation.parse_tasks(names)
    with pytest.raises(SystemExit):
        evaluation.make_tasks("smoltalk", "test", tmp_path, CPU)
    assert "no right answers" in capsys.readouterr().err


JUNK = st.recursive(st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=True) | st.text(max_size=8)
                    | st.sampled_from(["user", "assistant", "system", "text", "python", "\ud800"]),
                    lambda x: st.lists(x, max_size=4) | st.dictionaries(
                        st.sampled_from(["messages", "role", "content", "type", "text"]), x), max_leaves=12)
ROLE = st.sampled_from(["user", "assistant", "system"])
MESSAGE = st.fixed_dictionaries({"role": ROLE | JUNK, "content": st.text(max_size=20) | JUNK})
LINE = st.one_of(
    st.lists(st.text(max_size=20), min_size=2, max_size=4).map(lambda texts: json.dumps(
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}).encode()),
    (JUNK | st.lists(MESSAGE, max_size=4) | st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=4) | JUNK})).map(
        lambda x: json.dumps(x).encode()),
    st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")),
    st.just(b"[" * 5000))


@slow
@settings(max_examples=2000, deadline=None)
@given(lines=st.lists(LINE, max_size=3))
def test_conversations_from_a_file_never_crash_and_none_is_dropped_in_silence(tok, lines):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "my.jsonl").write_bytes(b"\n".join(lines))
        text = b"\n".join(lines).removeprefix(b"\xef\xbb\xbf")  # a byte order mark is no row
        said, kept, filled = io.StringIO(), 0, sum(bool(line.strip()) for line in text.split(b"\n"))
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                task = evaluation.CustomJSON(f"{folder}/my.jsonl")
                kept = len(task)
                rows = tok.render_batch([task[i] for i in range(kept)], 65)
                tokenizer_module.hash_texts(json.dumps(task[i]["messages"], ensure_ascii=False) for i in range(kept))
            except SystemExit:
                assert f"not one of {filled} rows can be used" in said.getvalue()
                return
        broken = re.search(r"(\d+) broken rows are left out", said.getvalue())
        assert kept + int(broken[1] if broken else 0) == filled and kept == len(rows)


# Programs that mean harm. Those that try something forbidden say "got through" if it worked. SECRET: a file of ours, FOLDER: one
# of ours that all may write to, PORT: where we listen, PARENT: our process.
TRIES = "try:\n    {}\n    print('got through')\nexcept BaseException as e:\n    print(type(e).__name__)"
FORBIDDEN = [
    "open('SECRET').read()",
    "open('SECRET', 'w').write('x')",
    "os.remove('SECRET')",
    "os.rename('SECRET', '/tmp/x')",
    "os.chmod('SECRET', 0)",
    "open('FOLDER/new', 'w').write('x')",
    "os.mkdir('FOLDER/new')",
    "os.symlink('SECRET', '/tmp/l'); open('/tmp/l').read()",
    "os.link('SECRET', '/tmp/h')",
    "open('/tmp/../SECRET').read()",
    "os.chdir('../../../../..'); open('SECRET'.lstrip('/')).read()",
    "open('/proc/self/root/SECRET').read()",
    "open('/proc/1/root/SECRET').read()",
    "open('/proc/PARENT/environ').read()",
    "open('/proc/1/environ', 'rb').read().index(b'OMP_NUM_THREADS')",
    "open('/old/SECRET').read()",
    "os.listdir('/old/home')",
    "open('/etc/passwd').read()",
    "open('/etc/shadow').read()",
    "os.listdir('/root/.ssh')",
    "os.listdir('/home').index(0)",
    "open(sys.executable, 'ab').write(b'x')",
    "open('/usr/x', 'w').write('x')",
    "open(os.__file__, 'a').write('x')",
    "open('/x', 'w').write('x')",
    "open('/dev/mem', 'rb').read(1)",
    "open('/dev/sda', 'rb').read(1)",
    "os.mknod('/tmp/d', 0o60666, os.makedev(8, 0)); open('/tmp/d', 'rb').read(1)",
    "subprocess.run(['cat', 'SECRET'], check=True)",
    "subprocess.run('cat SECRET > /tmp/x', shell=True, check=True)",
    "ctypes.CDLL(None).open(b'SECRET', 0) < 0 and 1 / 0",
    "ctypes.CDLL(None).open(b'FOLDER/y', 0o102, 0o666) < 0 and 1 / 0",
    "ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) and 1 / 0",
    "ctypes.CDLL(None).mount(None, b'/usr', None, 4128, None) and 1 / 0",
    "ctypes.CDLL(None).unshare(0x10020000) and 1 / 0; ctypes.CDLL(None).mount(None, b'/usr', None, 4128, None) and 1 / 0",
    "os.chroot('/tmp')",
    "os.setuid(0); open('/root/.bashrc').read()",
    "os.setgroups([0]); open('SECRET').read()",
    "socket.create_connection(('127.0.0.1', PORT), 1)",
    "socket.create_connection(('1.1.1.1', 53), 1)",
    "socket.create_connection(('::1', PORT), 1)",
    "socket.getaddrinfo('pypi.org', 443)",
    "urllib.request.urlopen('http://127.0.0.1:PORT', timeout=1)",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))",
    "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket.socket(socket.AF_UNIX).connect('\\0npuchat-PORT')",
    "socket.socket(socket.AF_UNIX).connect('FOLDER/socket')",
    "os.kill(PARENT, 9)",
    "os.kill(PARENT, 0)",
    "os.killpg(PARENT, 9)",
    "signal.pidfd_send_signal(os.pidfd_open(PARENT), 9)",
    "ctypes.CDLL(None).ptrace(16, PARENT, 0, 0) and 1 / 0",
    "os.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "os.environ['HOME'] and os.environ['OMP_NUM_THREADS']",
    "os.fstat(3)",
    "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
    "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
    "bytearray(10 * 2**30)",
    "mmap.mmap(-1, 10 * 2**30)",
    "[open('/tmp/%d' % i, 'wb').write(bytes(10**6)) for i in range(40)]",
    "open('/tmp/big', 'wb').write(bytes(2**21))",
    "[os.open('/usr', 0) for i in range(100)]",
    "[subprocess.Popen(['sleep', '9']) for i in range(40)]",
    "[threading.Thread(target=time.sleep, args=(9,)).start() for i in range(100)]",
]
HARMFUL = [  # what must only end in time
    "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "while True:\n    print('x' * 1000)",
    "while True:\n    os.write(2, b'x' * 10**6)",
    "print('x' * 2**30)",
    "while True: pass",
    "time.sleep(100)",
    "x = []\nwhile True: x.append(bytes(10**6))",
    "9**9**9",
    "sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "re.match('(a*)*b', 'a' * 40)",
    "ctypes.string_at(0)",
    "signal.signal(15, signal.SIG_IGN)\nwhile True: pass",
    "os.close(1), os.close(2)\nwhile True: pass",
    "threading.Thread(target=lambda: time.sleep(100)).start()",
    "import atexit\natexit.register(time.sleep, 100)",
    "os.kill(-1, 9)",
    "os.kill(1, 9)",
    "os.killpg(0, 9)",
    "os.abort()",
    "sys.stdin.close()\nraise SystemExit(0)",
    "os._exit(0)",
    "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        while True: time.sleep(1)\nraise SystemExit",
    "del sys.modules['os'], __builtins__",
    "os.execv('/bin/sh', ['sh', '-c', 'while :; do :; done'])",
    "d = '/tmp'\nwhile True:\n    d += '/d'\n    os.mkdir(d)",
]


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("way", ["bwrap", "unshare"])
def test_nothing_gets_out_of_the_sandbox(tmp_path, way):
    ways = [s[:2] for s in evaluation.sandboxes(str(tmp_path)) if way in s[0]]
    if not ways or evaluation.run_program("pass", sandbox=ways[0])[0] != "ok":
        pytest.skip(f"{way} does not work here")
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    os.chmod(folder, 0o777)
    (folder / "secret").write_text("mine")
    (folder / "secret").chmod(0o666)
    sleeper = subprocess.Popen(["sleep", "300"])  # a process of ours beside
    server, local, hidden = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    port = server.getsockname()[1]
    local.bind(f"{folder}/socket"), hidden.bind(f"\0npuchat-{port}")
    for s in (server, local, hidden):
        s.listen()
        s.settimeout(0)
    (folder / "socket").chmod(0o777)
    imports = "import ctypes, mmap, os, re, resource, signal, socket, subprocess, sys, threading, time, urllib.request\n"

    def attempt(code, sandbox=ways[0]):
        for name, value in (("SECRET", folder / "secret"), ("FOLDER", folder), ("PORT", port), ("PARENT", sleeper.pid)):
            code = code.replace(name, str(value))
        before = time.monotonic()
        return code, *evaluation.run_program(imports + code, seconds=2, sandbox=sandbox), time.monotonic() - before

    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(attempt, [TRIES.format(t) for t in FORBIDDEN] + HARMFUL))
        assert len(results) >= 60
        for code, status, output, seconds in results:
            assert "got through" not in output and "mine" not in output, (code, status, output)
            assert seconds < 4, (code, status, seconds)
            assert status != "ok" or code not in HARMFUL or not re.search(r"while|exit\(0|SystemExit|2\*\*", code), (code, status)
        plain = [attempt(TRIES.format(FORBIDDEN[i]), ([], False))[2] for i in (0, 5)]
        assert all("got through" in output for output in plain), "and outside of it that works"
        (folder / "new").unlink()
        assert (folder / "secret").read_text() == "mine" and sorted(os.listdir(folder)) == ["secret", "socket"]
        assert sleeper.poll() is None and os.getpriority(os.PRIO_PROCESS, sleeper.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        for s in (server, local, hidden):
            with pytest.raises(BlockingIOError):
                s.accept()
        time.sleep(0.3)
        mine = [c for c in Path("/proc").glob("[0-9]*/cmdline") if b"import os, resource as r" in read_bytes(c)]
        assert not mine, "something still runs"
        assert evaluation.run_program("print(1 + 1)", sandbox=ways[0]) == ("ok", "2\n")
    finally:
        sleeper.kill()
        shutil.rmtree(folder)


def read_bytes(path):
    try:
        return path.read_bytes()
    except OSError:  # the process is gone
        return b""


def test_what_became_of_a_program(tmp_path):
    assert evaluation.run_program("print('hi')") == ("ok", "hi\n")
    assert evaluation.run_program("import sys\nprint('a')\nsys.exit(0)")[0] == "error", "it did not come to its end"
    status, output = evaluation.run_program("assert 1 == 2, 'no'")
    assert status == "error" and "AssertionError: no" in output
    assert evaluation.run_program("while True: pass", seconds=1)[0] == "timeout"
    status, output = evaluation.run_program("print('x' * 10**6)", output=100)
    assert status == "output" and len(output) == 100
    with ThreadPoolExecutor(4) as pool:  # from any thread
        assert list(pool.map(evaluation.run_program, ["print(1)", "1 / 0"] * 3)) [0] == ("ok", "1\n")


def test_pass_at_k_is_unbiased():
    for n, c in ((5, 0), (5, 2), (5, 5), (8, 3)):
        tries = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(tries, k))
            assert abs(evaluation.pass_at_k(n, c, k) - sum(map(any, subsets)) / len(subsets)) < 1e-12


def test_an_evaluation_keeps_every_answer_and_its_budget(tok, tmp_path):
    model = tiny(tok.vocab_size, max_seq_len=256).eval()
    task = evaluation.Arithmetic("test", 40)
    r = evaluation.evaluate_task(model, tok, CPU, task, limit=12, max_new_tokens=4, num_samples=4, folder=tmp_path)
    items = [json.loads(line) for line in (tmp_path / "arithmetic.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [x["i"] for x in items] == list(range(12)) and all(len(x["answers"]) == 4 for x in items)
    assert r["n"] == 12 and r["pass@k"].keys() == {1, 2, 4} and items[3]["question"] == task[3]["messages"][0]["content"]
    short = tiny(tok.vocab_size, max_seq_len=8).eval()
    assert evaluation.evaluate_task(short, tok, CPU, task, limit=3) == {"acc": 0.0, "n": 3, "stderr": 0.0}, "too long: wrong"
    assert evaluation.evaluate_task(model, tok, CPU, task, deadline=0)["n"] == 0
    tasks = [task, evaluation.Choice("test", 3000)]
    results = evaluation.evaluate_chat(model, tok, CPU, tasks, minutes=0.02, limit=3000, max_new_tokens=2, B=2)
    assert 0 < results["choice"]["n"] < 3000


def reference_core(model, tok, task, i):
    """Whether item i is answered rightly: one sequence at a time, all of its logits."""
    rows, d, T = task["rows"], task["delimiter"], model.config.max_seq_len
    others = [row for j, row in enumerate(rows) if j != i]
    shots, item = random.Random(1234 + i).sample(others, task["shots"]), rows[i]
    encode = lambda text: [tok.bos, *tok.encode(text)]  # noqa: E731

    def log_probs(ids, start):
        with torch.no_grad():
            p = model(torch.tensor([ids]))[0].log_softmax(-1)
        return [(float(p[t - 1, ids[t]]), int(p[t - 1].argmax()) == ids[t]) for t in range(start, len(ids))]

    if task["kind"] == "language_modeling":
        before = "".join(f"{s['context'].strip()}{d}{s['continuation']}\n\n" for s in shots) + item["context"].strip() + d
        ids, start = encode(before + item["continuation"]), len(encode(before.strip()))
        assert ids[:start] == encode(before.strip())
        cut = max(0, len(ids) - T)
        return all(hit for _, hit in log_probs(ids[cut:], start - cut))
    if task["kind"] == "schema":
        before = "".join(f"{s['context_options'][s['gold']]}{d}{s['continuation']}\n\n" for s in shots)
        all_ids = [encode(f"{before}{o}{d}{item['continuation']}") for o in item["context_options"]]
        same = next(n for n in itertools.count() if len({ids[-1 - n] for ids in all_ids}) > 1)
        starts = [len(ids) - same for ids in all_ids]
    else:
        before = "".join(f"{s['query']}{d}{s['choices'][s['gold']]}\n\n" for s in shots)
        all_ids = [encode(f"{before}{item['query']}{d}{choice}") for choice in item["choices"]]
        starts = [next(n for n in itertools.count() if len({ids[n] for ids in all_ids}) > 1)] * len(all_ids)
    cut = max(0, max(map(len, all_ids)) - T)
    means = [statistics.fmean(-p for p, _ in log_probs(ids[cut:], start - cut)) for ids, start in zip(all_ids, starts)]
    return means.index(min(means)) == item["gold"]


def compare_core(model, tok, tasks, folder):
    """-> seconds of the reference, seconds of evaluate_core; every item must agree"""
    t0 = time.perf_counter()
    wanted = {t["label"]: [reference_core(model, tok, t, i) for i in range(len(t["rows"]))] for t in tasks}
    t1 = time.perf_counter()
    result = evaluation.evaluate_core(model, tok, CPU, tasks, folder)
    t2 = time.perf_counter()
    for t in tasks:
        items = [json.loads(line) for line in (folder / f"core_{t['label']}.jsonl").read_text().splitlines()]
        assert [bool(x["score"]) for x in items] == wanted[t["label"]], t["label"]
        acc = statistics.fmean(wanted[t["label"]])
        assert abs(result["core_tasks"][t["label"]]["centred"] - (acc - t["baseline"]) / (1 - t["baseline"])) < 1e-3
    return t1 - t0, t2 - t1


def test_core_is_what_one_item_at_a_time_gives(tok, tmp_path):
    """On a bundle made here: three kinds, with and without examples, delimiters, contexts longer than the model's."""
    pytest.importorskip("yaml")
    rng, words = random.Random(0), evaluation.word_list()
    text = lambda n: " ".join(rng.choices(words, k=n))  # noqa: E731
    make = {"multiple_choice": lambda n: {"query": text(n), "gold": rng.randrange(4),
                                          "choices": [text(rng.randint(1, 5)) for _ in range(4)]},
            "schema": lambda n: {"context_options": [f"{text(n)} {w}" for w in rng.sample(words, 2)], "continuation": text(4),
                                 "gold": rng.randrange(2)},
            "language_modeling": lambda n: {"context": text(n) + " ", "continuation": rng.choice(words)}}
    labels, folder = {}, tmp_path / "data" / "eval_bundle"
    (folder / "eval_data").mkdir(parents=True)
    for kind in make:
        for shots, delimiter in ((0, None), (2, "\nAnswer: "), (5, " = ")):
            name, more = f"{kind}_{shots}", {"continuation_delimiter": delimiter} if delimiter else {}
            label = labels[name] = dict(label=name, dataset_uri=f"{name}.jsonl", num_fewshot=[shots], icl_task_type=kind, **more)
            rows = [json.dumps(make[kind](rng.randint(2, 12))) for _ in range(100)]
            (folder / "eval_data" / label["dataset_uri"]).write_text("\n".join(rows))
    labels["gone"] = dict(label="gone", dataset_uri="gone.jsonl", num_fewshot=[0], icl_task_type="schema")
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": list(labels.values())}))  # JSON is YAML
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n" + "".join(f"{label},25\n" for label in labels))
    tasks = evaluation.core_tasks(tmp_path)
    assert len(tasks) == 9 and {t["delimiter"] for t in tasks} == {" ", "\nAnswer: ", " = "}
    model = tiny(tok.vocab_size, max_seq_len=96, bigrams=50).eval()
    compare_core(model, tok, tasks, tmp_path)
    assert evaluation.core_name(evaluation.evaluate_core(model, tok, CPU, tasks[:1])) == "CORE over 1 of 22 tasks"


@slow
@pytest.mark.skipif(not SHARED.exists(), reason="no shared/data beside this checkout")
def test_core_on_real_tasks(tok, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "eval_bundle.zip").symlink_to(SHARED / "eval_bundle.zip")
    model = tiny(tok.vocab_size, max_seq_len=256, n_layer=2, n_embd=64).eval()
    tasks = [t | {"rows": t["rows"][:25]} for t in evaluation.core_tasks(tmp_path, 25)]
    assert len(tasks) == 17
    slow_way, fast_way = compare_core(model, tok, tasks, tmp_path)
    print(f"CORE, one item at a time: {slow_way:.1f} s, ours: {fast_way:.1f} s, {slow_way / fast_way:.1f} x")


def test_bits_per_byte_of_a_uniform_model(tok):
    model = GPT(GPTConfig(vocab_size=tok.vocab_size, max_seq_len=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=16))
    with torch.no_grad():
        model.head.weight.zero_()
    docs = [np.array([tok.bos, *tok.encode("hello 世界, this is text. " * 20)]) for _ in range(6)]
    scored = np.concatenate([fill_row(r, docs, 65, tok.bos)[0][1:] for r in pack_rows([len(d) for d in docs], 65, True)])
    scored = scored[scored < tok.bos]
    want = len(scored) * math.log2(tok.vocab_size) / tok.token_bytes()[scored].sum().item()
    got = [evaluation.evaluate_bpb(model, docs, tok, CPU, 64, B, 10**6)[0] for B in (1, 3, 8)]
    assert all(abs(g - want) < 1e-4 for g in got)


def test_evaluation_does_not_depend_on_the_batch(tok):
    model = tiny(tok.vocab_size, max_seq_len=256).eval()
    for task in (evaluation.Choice("test", 20), evaluation.Arithmetic("test", 10)):
        accs = [evaluation.evaluate_task(model, tok, CPU, task, limit=20, B=B, max_new_tokens=8) for B in (1, 7, 64)]
        assert accs[0] == accs[1] == accs[2] and accs[0]["n"] == len(task)


# --- checkpoints, resume, log ------------------------------------------------------------------------------------------
def save(folder, step, **meta):
    common.write_checkpoint(
        folder,
        step,
        {"w": torch.full((4,), float(step))},
        {"m": torch.zeros(2)},
        {"stage": "base", "config": {"depth": 4}, **meta},
    )


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, capsys):
    rng = random.Random(0)
    for trial in range(200):
        shutil.rmtree(tmp_path / "base", ignore_errors=True)
        save(tmp_path / "base" / "d4", 1), save(tmp_path / "base" / "d4", 2)
        path = tmp_path / "base" / "d4" / "step_000002" / rng.choice(["model.pt", "optim.pt", "meta.json"])
        data = bytearray(path.read_bytes())
        if trial % 3 == 0:
            path.unlink()
        elif trial % 3 == 1:
            path.write_bytes(data[: rng.randrange(len(data))])
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        meta = common.find_checkpoint(tmp_path, "base")
        if meta["step"] == 2:  # a flipped bit in the white space of meta.json changes nothing
            assert path.name == "meta.json" and trial % 3 == 2
        else:
            assert (
                meta["step"] == 1
                and common.load_weights(meta, "model.pt")["w"][0] == 1
                and "step_000002 is skipped" in capsys.readouterr().out
            )


def test_checkpoints_are_kept_and_found(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path / "base" / "a", step)
    assert sorted(p.name for p in (tmp_path / "base" / "a").iterdir()) == ["step_000002", "step_000003"]
    (tmp_path / "base/a/step_000009.tmp77").mkdir()  # a save that was killed
    (tmp_path / "base/a/step_000008").mkdir()  # a damaged checkpoint of a later step must not push sound ones out
    save(tmp_path / "base" / "a", 3), save(tmp_path / "base" / "a", 4)
    assert sorted(p.name for p in (tmp_path / "base" / "a").iterdir()) == ["step_000003", "step_000004"]
    shutil.rmtree(tmp_path / "base/a/step_000004")
    save(tmp_path / "base" / "a", 2), save(tmp_path / "base" / "a", 3)
    save(tmp_path / "base" / "b", 1)
    assert "b/step_000001" in common.find_checkpoint(tmp_path, "base")["path"]  # the newest, not the one with most steps
    assert common.find_checkpoint(tmp_path, "base/a")["step"] == 3
    assert common.find_checkpoint(tmp_path, str(tmp_path / "base/a/step_000002"))["step"] == 2
    for source, says in (("sft", "python train_sft.py"), ("nonsense", "neither a stage")):
        with pytest.raises(SystemExit) as e:
            common.find_checkpoint(tmp_path, source)
        assert e.value.code == 2 and says in capsys.readouterr().err


def test_a_run_without_its_log_is_not_written_over(tmp_path, capsys):
    d = tmp_path / "base" / "d4"
    save(d, 6)
    assert common.find_resume(d, {"depth": 4}, False) is None
    assert (tmp_path / "base" / "d4.old1" / "step_000006").is_dir()
    save(d, 6)
    (d / "step_000006" / "model.pt").write_bytes(b"")
    assert common.find_resume(d, {"depth": 4}, True) is None
    assert (tmp_path / "base" / "d4.old2" / "step_000006").is_dir() and "no sound checkpoint" in capsys.readouterr().out


def test_what_happens_to_an_earlier_run(tmp_path, capsys):
    d = tmp_path / "base" / "d4"
    assert common.find_resume(d, {"depth": 4}, True) is None
    save(d, 5)
    (d / "log.jsonl").write_text('{"step": 5}\n')
    assert common.find_resume(d, {"depth": 4, "device_type": "cpu"}, True)["step"] == 5
    with pytest.raises(SystemExit):
        common.find_resume(d, {"depth": 6}, True)
    assert "depth 4 -> 6" in capsys.readouterr().err
    assert common.find_resume(d, {"depth": 4}, True, parent="another") is None  # starts over, the old run kept
    assert (tmp_path / "base" / "d4.old1" / "step_000005").is_dir() and not d.exists()


def test_the_log_forgets_what_came_after_the_checkpoint(tmp_path):
    log = common.Log(tmp_path, "base", 10)
    for step in range(1, 6):
        log.write(step, loss=1.0 / step, val_bpb=None)
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('{"step": 6, "lo')  # the power went
    log = common.Log(tmp_path, "base", 10, seconds=100, from_step=3)
    log.write(4, loss=9.0)
    rows = common.read_log(tmp_path / "log.jsonl")
    assert (
        [r["step"] for r in rows] == [1, 2, 3, 4]
        and rows[-1]["loss"] == 9.0
        and rows[-1]["seconds"] >= 100
        and "val_bpb" not in rows[0]
    )


def test_a_measurement_is_a_line_with_loss_and_speed(tmp_path):
    log = common.Log(tmp_path, "base", 10)
    log.measure(0, val_bpb=3.0)
    log.write(1, loss=2.0, tok_per_s=5)
    log.measure(1, val_bpb=1.0)
    rows = [{k: v for k, v in r.items() if k != "seconds"} for r in common.read_log(tmp_path / "log.jsonl")]
    assert rows == [
        {"step": 1, "loss": 2.0, "tok_per_s": 5, "val_bpb": 3.0},
        {"step": 1, "loss": 2.0, "tok_per_s": 5, "val_bpb": 1.0},
    ]


# --- downloads -------------------------------------------------------------------------------------------------------
class FaultyHub(http.server.BaseHTTPRequestHandler):
    """A hub with one file, which meets its requests with the faults in `faults`, one each, and then answers well."""

    protocol_version, body, faults, log, listed = "HTTP/1.1", random.Random(0).randbytes(300_000), [], [], "data/x.txt"

    def log_message(self, *args):
        pass

    def reply(self, status, data, send=None, **headers):
        self.send_response(status)
        for k, v in ({"Content-Length": len(data)} | headers).items():
            self.send_header(k.replace("_", "-"), str(v))
        self.end_headers()
        self.wfile.write(data if send is None else data[:send])

    def do_GET(self):
        fault, sha256 = self.faults.pop(0) if self.faults else "", hashlib.sha256(self.body).hexdigest()
        if fault == "hang up":
            self.close_connection = True
        elif fault == "503":
            self.reply(503, b"<html>busy</html>", Content_Type="text/html", Retry_After=7)
        elif fault == "html":
            self.reply(200, b"<html>please log in</html>", Content_Type="text/html; charset=utf-8")
        elif fault == "404":
            self.reply(404, b"")
        elif self.path.startswith("/api/"):
            page2 = "cursor" in self.path  # long listings come in pages
            file = {"type": "file", "path": self.listed, "size": len(self.body), "lfs": {"oid": sha256}}
            data = json.dumps([file] if page2 else [{"type": "directory", "path": "data"}]).encode()
            link = {} if page2 else {"Link": f'<https://elsewhere.example{self.path}&cursor=2>; rel="next"'}
            self.close_connection = fault == "drop"
            self.reply(200, data[:-9] if fault == "lie" else data, len(data) // 2 if fault == "drop" else None, **link)
        else:
            start = 0 if fault == "ignore range" else int(re.findall(r"\d+", self.headers.get("Range", "0"))[0])
            data, status, headers = bytearray(self.body[start:]), 206 if start else 200, {"ETag": f'"{sha256}"'}
            self.log.append((start, status))
            if status == 206:
                first = start - 10 if fault == "wrong range" else start
                headers["Content-Range"] = f"bytes {first}-{len(self.body) - 1}/{len(self.body)}"
            if fault == "flip":
                data[len(data) // 2] ^= 255
            if fault == "lie":  # half a body, and its headers say that this is all
                data = data[: len(data) // 2]
            if fault == "longer":
                data += b"more"
            self.close_connection = fault == "drop"
            self.reply(status, bytes(data), len(data) // 2 if fault == "drop" else None, **headers)


@pytest.fixture
def hub(monkeypatch):
    """Its address; HF_ENDPOINT names it alone. No pause is made, hub.pauses has what they would have been."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FaultyHub)
    server.handle_error = lambda *args: None  # it meant to
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    server.url, server.pauses = f"http://127.0.0.1:{server.server_port}", []
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url},")
    monkeypatch.setattr(common.time, "sleep", server.pauses.append)
    monkeypatch.setattr(common, "MISSED", {})
    FaultyHub.faults[:], FaultyHub.log[:] = [], []
    yield server
    server.shutdown()
    server.server_close()


def fetch(home, *faults, repo="org/good"):
    """List and fetch the hub's file, whose request meets these faults. -> its path"""
    facts = common.hub_files(repo, home)["data/x.txt"]
    FaultyHub.faults[:], FaultyHub.log[:] = faults, []
    return common.hub_fetch(repo, "data/x.txt", home, facts)


@pytest.mark.parametrize(
    "faults, log",
    [
        (["drop", "drop"], [(0, 200), (150_000, 206), (225_000, 206)]),
        (["lie", "lie"], [(0, 200), (150_000, 206), (225_000, 206)]),
        (["hang up", "503", "hang up"], [(0, 200)]),
        (["flip"], [(0, 200), (0, 200)]),
        (["drop", "flip"], [(0, 200), (150_000, 206), (0, 200)]),
        (["drop", "ignore range"], [(0, 200), (0, 200)]),
        (["drop", "wrong range"], [(0, 200), (150_000, 206), (0, 200)]),
    ],
)
def test_a_download_survives(hub, tmp_path, faults, log):
    path = fetch(tmp_path, *faults)
    assert path.read_bytes() == FaultyHub.body and FaultyHub.log == log and not list(path.parent.glob("*.part"))
    assert max(hub.pauses) <= 0.15 or "503" in faults and 7 in hub.pauses  # Retry-After


def test_downloads_survive_a_bad_hub(hub, tmp_path):
    rng, kinds = random.Random(3), ["", "drop", "lie", "flip", "503", "hang up", "ignore range", "wrong range"]
    for trial in range(12):
        FaultyHub.faults[:] = rng.choices(["", "drop", "lie", "503", "hang up"], k=4)  # for the listing
        path = fetch(tmp_path / str(trial), *rng.choices(kinds, k=12))
        assert path.read_bytes() == FaultyHub.body and not list(path.parent.glob("*.part"))
    part = tmp_path / "r" / "data" / "org" / "good" / "data" / "x.txt.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(FaultyHub.body[:1000])
    fetch(tmp_path / "r")
    assert FaultyHub.log == [(1000, 206)]  # only the rest was asked for
    fetch(tmp_path / "r")
    assert FaultyHub.log == []  # nor that, once it is there
    part.write_bytes(FaultyHub.body + b"x")  # longer than the file: not of this file
    part.with_suffix("").unlink()
    assert fetch(tmp_path / "r").read_bytes() == FaultyHub.body
    FaultyHub.faults[:] = ["drop", "longer", "flip"]  # size and checksum from the headers; another size later on is refused
    assert common.download("/a.zip", tmp_path / "b.zip").read_bytes() == FaultyHub.body


def test_a_download_that_cannot_be_is_one_sentence(hub, tmp_path, capsys, monkeypatch):
    for says, faults in {
        "wrong checksum": ["flip"] * 6,
        "RemoteDisconnected|ConnectionError": ["hang up"] * 10,
        "HTTP 200, a web page": ["html"],
        "HTTP 404": ["404"],
        "300004 bytes, not 300000": ["longer"],
        "at byte 150000 of 300000": ["drop"] + ["wrong range", "drop"] * 10,
    }.items():
        with pytest.raises(SystemExit):
            fetch(tmp_path, *faults)
        err = capsys.readouterr().err
        assert re.search(says, err) and hub.url in err and err.count("\n") == 1, err
        assert not FaultyHub.faults or "at byte" in says
    if Path("/dev/full").exists():  # a full disk
        part = tmp_path / "data" / "org" / "good" / "data" / "x.txt.part"
        part.unlink()
        part.symlink_to("/dev/full")
        with pytest.raises(SystemExit):
            fetch(tmp_path)
        assert "No space left on device), 300000 bytes are missing" in capsys.readouterr().err
    for path in ("../../../x.txt", "/tmp/x.txt", "data/../.."):
        monkeypatch.setattr(FaultyHub, "listed", path)
        with pytest.raises(SystemExit):
            common.hub_files("org/good", tmp_path)
        assert "outside of its folder" in capsys.readouterr().err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9,")
    for _ in range(2):  # the second time it is not even tried
        with pytest.raises(SystemExit):
            common.hub_files("org/other", tmp_path)
    err = capsys.readouterr().err
    assert "HF_ENDPOINT" in err and err.count("\n") == 2 and common.MISSED["http://127.0.0.1:9"] == 2


def test_hub_endpoints(hub, tmp_path, monkeypatch, capsys):
    known = ["https://hf-mirror.com", "https://huggingface.co"]
    for setting, order in {
        "": known,
        "http://a:1/": ["http://a:1", *known],
        "https://huggingface.co": known[::-1],
        "http://a:1, https://b": ["http://a:1", "https://b"],
        "http://a:1,": ["http://a:1"],
    }.items():
        monkeypatch.setenv("HF_ENDPOINT", setting)
        assert common.hub_endpoints() == order
    monkeypatch.setenv("HF_ENDPOINT", "hf-mirror.com")
    with pytest.raises(SystemExit):
        common.hub_endpoints()
    dead, alias = "http://127.0.0.1:9", hub.url.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("HF_ENDPOINT", f"{dead},{hub.url},{alias}")
    FaultyHub.faults[:] = ["404", "", "html"]
    assert fetch(tmp_path, "404", "drop").exists() and FaultyHub.log == [(0, 200), (150_000, 206)]  # from alias, then from hub
    assert common.MISSED[dead] == 2
    monkeypatch.setattr(common, "HUBS", [])
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # which has it not, but another host does
    FaultyHub.faults[:] = ["404"]
    assert common.download("/bundle", tmp_path / "bundle", more=[alias]).read_bytes() == FaultyHub.body


# --- the user's mistakes, as the user meets them -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "args, says",
    [
        (["train_base.py", "--dept=4"], "did you mean --depth"),
        (["train_base.py", "--device_type=npu"], "torch sees only"),
        (["train_base.py", "--device_type=tpu"], "not one of auto"),
        (["train_base.py", "--out_dir={tmp}/nothing", "--data_dir={tmp}/nowhere"], "tokenizer"),
        (["tokenizer.py", "--data_dir={tmp}/nowhere"], "not a folder"),
        (["train_mid.py", "--out_dir={tmp}"], "python train_base.py"),
        (["train_sft.py", "--out_dir={tmp}"], "python train_mid.py"),
        (["train_rl.py", "--out_dir={tmp}"], "python train_sft.py"),
        (["eval.py", "--out_dir={tmp}"], "python train_base.py"),
        (["chat.py", "--out_dir={tmp}", "-p", "hi"], "bash speedrun.sh"),
        (["chat.py", "--port=99999"], "not a port"),
        (["train_rl.py", "--task=sums"], "not one of arithmetic"),
        (["eval.py", "--max_problems=0"], "at least 1"),
        (["train_base.py", "--plan", "--window=abc"], "whole number"),
        (["train_base.py", "--plan", "--value_embeds=maybe"], "give true or false"),
        (["train_base.py", "--plan", "--softcap=99"], "at most 60"),
        (["train_base.py", "--plan", "--preset=gpt2"], "nano, classic, qwen3"),
        (["eval.py", "--compare", "--out_dir={tmp}"], "no finished run"),
    ],
)
def test_a_mistake_ends_with_one_sentence(tmp_path, args, says):
    if "tokenizer" in says and (HERE / "out" / "tokenizer").exists():
        pytest.skip("this checkout has a tokenizer in out/, which would be used")
    done = run(*[a.replace("{tmp}", str(tmp_path)) for a in args], check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and "Traceback" not in done.out and len(errors) == 1 and says in errors[0], done.out


# --- the pipeline ------------------------------------------------------------------------------------------------------
SMALL = [
    "--depth=2",
    "--model_dim=64",
    "--head_dim=32",
    "--max_seq_len=128",
    "--total_batch_size=1024",
    "--device_batch_size=2",
    "--lr_scale=0.5",
    "--eval_tokens=2048",
    "--sample_every=0",
    "--device_type=cpu",
    "--dtype=float32",
]


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A small folder of text: our own sources, in pieces."""
    folder = tmp_path_factory.mktemp("texts")
    pieces = [p for f in sorted(HERE.glob("*.py")) for p in re.split(r"\n\n\n", f.read_text(encoding="utf-8")) if len(p) > 50]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": p}) for p in pieces * 3), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def home(tmp_path_factory, texts):
    """An out_dir with a tokenizer of 512 tokens trained on that text."""
    folder = tmp_path_factory.mktemp("home")
    run("tokenizer.py", "--vocab_size=512", f"--data_dir={texts}", f"--out_dir={folder}")
    return folder


def losses(home, stage, name):
    return {r["step"]: r["loss"] for r in common.read_log(home / stage / name / "log.jsonl") if "loss" in r}


def test_the_first_step_does_not_turn_rounding_into_a_move():
    """In front of a norm, in a model whose blocks are still the identity, the lambdas' true gradient is zero."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=300, max_seq_len=64, n_layer=4, n_head=2, n_kv_head=2, n_embd=128))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = Muon(model.param_groups(matrix_lr=0.02, embed_lr=0.5, head_lr=0.01, scalar_lr=0.04), CPU)
    idx = torch.randint(0, 300, (16, 65))
    (model(idx[:, :-1], idx[:, 1:]) / 1024).backward()
    opt.step(torch.zeros(()))
    moved = {n: (p.detach() - before[n]).abs().max().item() for n, p in model.named_parameters()}
    assert all(move < 1e-5 for n, move in moved.items() if n.endswith("lambdas")), moved
    assert moved["embed.weight"] > 0.1 and moved["head.weight"] > 1e-3


@slow
def test_the_whole_pipeline(home, texts):
    out = run("train_base.py", *SMALL, f"--data_dir={texts}", "--num_iterations=25", f"--out_dir={home}", "--run=p").out
    assert "val bpb" in out and "next: python train_mid.py" in out
    curve = losses(home, "base", "p")
    assert len(curve) == 25 and curve[25] < curve[1] - 0.8
    for stage, args in (
        ("mid", ["--num_iterations=25", "--save_every=10", "--eval_tokens=2048"]),
        ("sft", ["--num_iterations=8"]),
        ("rl", ["--num_iterations=2", "--prompts_per_step=4", "--num_samples=4", "--eval_problems=8", "--max_new_tokens=8"]),
    ):
        out = run(f"train_{stage}.py", *args, f"--out_dir={home}", "--device_type=cpu").out
        assert f"{home}/{stage}/p/step_" in out
        rows = common.read_log(home / stage / "p" / "log.jsonl")
        steps = [r for r in rows if "loss" in r]
        assert all({"step", "loss", "tok_per_s", "seconds"} <= r.keys() and math.isfinite(r["loss"]) for r in steps)
    assert losses(home, "mid", "p")[25] < losses(home, "mid", "p")[1] - 1.5
    assert all("reward" in r or "test_acc" in r for r in steps)
    out = run("eval.py", f"--out_dir={home}", "--max_problems=6", "--max_new_tokens=8", "--eval_tokens=1024").stdout
    summary = json.loads(out.splitlines()[-1])
    assert list(summary) == ["base", "mid", "sft", "rl"] and {"val_bpb", "arithmetic", "chat_core"} <= summary["rl"].keys()
    report = (home / "report.md").read_text(encoding="utf-8")
    assert (
        "| metric | BASE | MID | SFT | RL |" in report
        and "| paired change | BASE TO MID | MID TO SFT | SFT TO RL |" in report
        and re.search(r"\| arithmetic \| [+-].*\(n=6\)", report)
        and "arithmetic (n=6)" in report
        and (home / "curves.png").stat().st_size > 10_000
    )
    assert (
        "evaluated before"
        in run("eval.py", f"--out_dir={home}", "--max_problems=6", "--max_new_tokens=8", "--eval_tokens=1024").out
    )
    assert "talking to" in run("chat.py", "-p", "What is 1 + 1?", f"--out_dir={home}", "--max_new_tokens=8").out
    done = run("train_sft.py", "--num_iterations=8", f"--out_dir={home}", "--device_type=cpu")
    assert "is finished (step 8)" in done.out
    # another tokenizer is refused
    shutil.copytree(home, home.parent / "other", dirs_exist_ok=True)
    run("tokenizer.py", "--vocab_size=600", f"--data_dir={texts}", f"--out_dir={home.parent / 'other'}")
    done = run("train_mid.py", f"--out_dir={home.parent / 'other'}", "--resume=0", check=False)
    assert done.returncode == 2 and "not the tokenizer" in done.stderr, done.out


@slow
def test_every_stage_runs_on_two_ranks_and_in_bf16(home, texts):
    run(
        "train_base.py",
        *SMALL,
        f"--data_dir={texts}",
        "--num_iterations=3",
        f"--out_dir={home}",
        "--run_name=two",
        "--dtype=bfloat16",
        nproc=2,
    )
    small = ["--device_type=cpu", "--dtype=float32", f"--out_dir={home}", "--eval_problems=4"]
    run("train_mid.py", *small, "--num_iterations=3", "--init_from=base/two", "--eval_tokens=1024", nproc=2)
    run("train_sft.py", *small, "--num_iterations=3", "--init_from=mid/two", nproc=2)
    out = run(
        "train_rl.py",
        *small,
        "--num_iterations=2",
        "--init_from=sft/two",
        "--prompts_per_step=3",
        "--num_samples=3",
        "--max_new_tokens=6",
        "--dtype=bfloat16",
        nproc=2,
    ).out
    assert "greedy accuracy" in out and len(losses(home, "rl", "two")) == 2
    small = ["--max_problems=5", "--max_new_tokens=4", "--eval_tokens=1024", "--resume=0", "--device_type=cpu"]
    outs = [run("eval.py", f"--out_dir={home}", "--source=rl/two", *small, nproc=n).stdout for n in (1, 2)]
    one, two = (json.loads(out.splitlines()[-1]) for out in outs)
    assert one == two


@slow
def test_bench_ends_with_json_and_writes_nothing(home, texts):
    out = run("train_base.py", *SMALL, f"--data_dir={texts}", f"--out_dir={home}", "--bench=2", "--run=bench").stdout
    facts = json.loads(out.splitlines()[-1])
    assert not (home / "base" / "bench").exists()
    assert facts["tok_per_s"] > 0 and 0 < facts["mfu"] < 1 and facts["matmul_peak_tflops"] > 0 and facts["peak_gb"] > 0
    assert {"data", "forward", "backward", "optimizer"} <= facts["ms"].keys() and min(facts["ms"].values()) >= 0
    assert 0.3 * facts["step_ms"] < sum(facts["ms"].values()) < 3 * facts["step_ms"]


@slow
def test_what_a_run_shows(home, texts, tmp_path):
    """val_dir, bits per byte by source, norms by group, a trace, and base runs side by side."""
    (tmp_path / "val").mkdir()
    for name in ("one", "two"):
        lines = [json.dumps({"text": f"{name} " + "some words to measure on " * 20}) for _ in range(8)]
        (tmp_path / "val" / f"{name}.jsonl").write_text("\n".join(lines))
    args = [*SMALL, f"--data_dir={texts}", f"--val_dir={tmp_path / 'val'}", f"--out_dir={home}", "--eval_every=6", "--profile=2"]
    for n in (6, 12, 18):
        out = run("train_base.py", *args, f"--num_iterations={n}", f"--run=shows{n}").stdout
    rows = [json.loads(line) for line in (home / "base" / "shows12" / "log.jsonl").read_text().splitlines()]
    measured = [r["val_bpb_by_source"] for r in rows if "val_bpb" in r]
    assert len(measured) == 3 and all(m.keys() == {"one", "two"} for m in measured) and "| one " in out
    assert all(r["grad_matrix"] > 0 for r in rows if "grad_norm" in r)
    assert [r["step"] for r in rows if "update_matrix" in r] == [2, 12] and rows[0]["grad_norm"] > 0
    squares = sum(v**2 for k, v in rows[0].items() if k.startswith("grad_") and k != "grad_norm")
    assert abs(squares**0.5 / rows[0]["grad_norm"] - 1) < 1e-3
    (trace,) = (home / "base" / "shows12" / "trace").iterdir()
    assert json.loads(trace.read_text())["traceEvents"]
    run("train_base.py", *args, "--num_iterations=12", "--softcap=0", "--run=shows_nocap")
    folder = tmp_path / "some"
    (folder / "base").mkdir(parents=True)
    for path in (home / "base").glob("shows*"):
        shutil.copytree(path, folder / "base" / path.name)
    out = run("eval.py", "--compare=1", f"--out_dir={folder}").stdout
    table = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(table) == 5 and "(baseline)" in table[1], out  # of two equally good ones
    assert any("softcap=0.0" in line and "±" in line or "num_iterations" in line for line in table), out


@slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_model_trains_alike_and_its_checkpoint_is_an_ordinary_one(home, texts):
    args = ["train_base.py", *SMALL, f"--data_dir={texts}", "--num_iterations=4", f"--out_dir={home}", "--run=compiled"]
    assert "torch.compile is on" in run(*args, "--compile=true", timeout=600).out
    run(*args[:-1], "--run=eager")
    a, b = losses(home, "base", "compiled"), losses(home, "base", "eager")
    assert max(abs(a[s] - b[s]) for s in a) < 1e-4
    assert "is finished" in run(*args, "--compile=false").out


@slow
def test_two_and_three_ranks_give_the_losses_of_one(home, texts):
    curves = []
    for n in (1, 2, 3):
        args = [a for a in SMALL if "total_batch" not in a]
        run(
            "train_base.py",
            *args,
            "--total_batch_size=1536",
            f"--data_dir={texts}",
            "--num_iterations=20",
            f"--out_dir={home}",
            f"--run_name=r{n}",
            nproc=n,
        )
        curves.append(losses(home, "base", f"r{n}"))
    assert len(curves[0]) == 20
    assert max(abs(curves[0][s] - c[s]) for c in curves[1:] for s in curves[0]) < 2e-5
    bpb = [common.read_log(home / "base" / f"r{n}" / "log.jsonl")[-1]["val_bpb"] for n in (1, 2, 3)]
    assert max(bpb) - min(bpb) < 1e-4


@slow
def test_two_and_three_ranks_fine_tune_and_evaluate_as_one(home, texts, tmp_path):
    shutil.copytree(home / "tokenizer", tmp_path / "tokenizer")
    run("train_base.py", *SMALL, f"--data_dir={texts}", "--num_iterations=4", f"--out_dir={tmp_path}", "--run_name=b")
    (tmp_path / "my.jsonl").write_text("\n".join(json.dumps(c) for c in conversations(50)), encoding="utf-8")
    curves, answers = [], []
    for n in (1, 2, 3):
        same = ("--dtype=float32", "--device_type=cpu", f"--out_dir={tmp_path}")
        args = ("--init_from=base", f"--tasks={tmp_path}/my.jsonl,all*0.01", "--eval_problems=7", "--num_iterations=6",
                "--total_batch_size=1536", "--device_batch_size=2", f"--run_name=r{n}")
        run("train_sft.py", *args, *same, nproc=n)
        curves.append(losses(tmp_path, "sft", f"r{n}"))
        args = ("--source=sft/r1", "--tasks=arithmetic,choice", "--max_problems=9", "--num_samples=2", "--eval_tokens=4096",
                "--max_new_tokens=6", "--resume=0")
        answers.append(json.loads(run("eval.py", *args, *same, nproc=n).stdout.splitlines()[-1])["sft"])
        folder = tmp_path / "sft/r1/eval"
        answers[-1]["items"] = [(folder / f"{t}.jsonl").read_text(encoding="utf-8") for t in ("arithmetic", "choice")]
    assert len(curves[0]) == 6 and max(abs(curves[0][s] - c[s]) for c in curves[1:] for s in curves[0]) < 2e-5
    assert abs(answers[0].pop("val_bpb") - answers[1].pop("val_bpb")) < 2e-4 and answers[2].pop("val_bpb")
    assert answers[0] == answers[1] == answers[2]


@slow
def test_a_run_that_was_stopped_ends_where_a_straight_one_does(home, texts):
    base = ["train_base.py", *SMALL, f"--data_dir={texts}", "--num_iterations=12", "--save_every=4", f"--out_dir={home}"]
    run(*base, "--run=straight")
    process = subprocess.Popen(
        [sys.executable, *base, "--run=killed"], cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.time() + 120
    while not (home / "base" / "killed" / "step_000004").exists() and time.time() < end:
        time.sleep(0.01)
    process.kill()
    process.wait()
    out = run(*base, "--run_name=killed", nproc=2).out  # and on another number of ranks
    assert "continuing" in out or "is finished" in out
    a, b = losses(home, "base", "straight"), losses(home, "base", "killed")
    assert a.keys() == b.keys() and max(abs(a[s] - b[s]) for s in a) < 1e-4


@slow
def test_the_page_streams_an_answer(home, texts):
    import requests

    run("train_base.py", *SMALL, f"--data_dir={texts}", "--num_iterations=2", f"--out_dir={home}", "--run=web")
    run("train_mid.py", "--num_iterations=2", f"--out_dir={home}", "--init_from=base/web")
    with subprocess.Popen(
        [sys.executable, "chat.py", "--web=1", "--port=8765", "--source=mid/web", f"--out_dir={home}"], cwd=HERE
    ) as server:
        try:
            url = "http://127.0.0.1:8765"
            for _ in range(200):
                try:
                    assert requests.get(url + "/health", timeout=5).json()["status"] == "ok"
                    break
                except requests.ConnectionError:
                    time.sleep(0.2)
            assert "npuchat" in requests.get(url, timeout=5).text
            body = {"messages": [{"role": "user", "content": "hi"}], "max_new_tokens": 8}
            events = [
                json.loads(line[6:]) for line in requests.post(url + "/chat", json=body, timeout=60).text.splitlines() if line
            ]
            assert events[-1] == {"kind": "end"}
            for _ in range(3):  # readers who leave must not keep the others waiting
                requests.post(url + "/chat", json={**body, "max_new_tokens": 100}, timeout=60, stream=True).close()
            assert requests.post(url + "/chat", json=body, timeout=20).text.endswith("\n\n")
            nan = requests.post(
                url + "/chat",
                data='{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
                headers={"Content-Type": "application/json"},
                timeout=5,
            )
            assert nan.status_code == 422
            for bad in (
                {},
                {"messages": []},
                {"messages": [{"role": "assistant", "content": "x"}]},
                {**body, "temperature": 9},
            ):
                assert requests.post(url + "/chat", json=bad, timeout=5).status_code in (400, 422)
        finally:
            server.kill()


@slow
@pytest.mark.skipif(not SHARED.exists(), reason="no shared/data beside this checkout")
def test_real_text_and_real_tasks_through_a_hub_mirror(home, tmp_path):
    server = subprocess.Popen(
        [sys.executable, str(SHARED.parent / "hub_mirror.py"), "--port", "8911", "--faults", "drop=0.2,503=0.2"],
        stdout=subprocess.DEVNULL,
    )
    try:
        time.sleep(1)
        env = {"HF_ENDPOINT": "http://127.0.0.1:8911,"}
        shutil.copytree(home / "tokenizer", tmp_path / "tokenizer")
        out = run(
            "train_base.py", *SMALL, "--data_dir=npuchat/dev-text-zh", "--num_iterations=4", f"--out_dir={tmp_path}", env=env
        ).out
        assert "val bpb" in out and (tmp_path / "data/npuchat/dev-text-zh/shard_00000.parquet").exists()
        run(
            "train_mid.py",
            "--tasks=gsm8k,mmlu,arc_easy",
            "--num_iterations=2",
            "--conversations=300",
            "--eval_problems=4",
            f"--out_dir={tmp_path}",
            env=env,
        )
        out = run(
            "eval.py",
            "--source=mid",
            "--tasks=gsm8k,mmlu,arc_easy,arc_challenge",
            "--max_problems=6",
            "--max_new_tokens=4",
            f"--out_dir={tmp_path}",
            env=env,
        ).stdout
        assert (tmp_path / "data/openai/gsm8k/main/train-00000-of-00001.parquet").exists()
        assert {"gsm8k", "mmlu", "arc_easy", "arc_challenge"} <= json.loads(out.splitlines()[-1])["mid"].keys()
    finally:
        server.kill()


# --- devices: the simulated NPU ----------------------------------------------------------------------------------------
def test_ascend_variables_follow_the_card_and_leave_the_users_alone(tmp_path):
    for card in ("910A", "910B", "910C", "310P", ""):
        env = {"HCCL_CONNECT_TIMEOUT": "900"}
        got = common.ascend_environment(card, env=env)
        modern = card not in ("910A", "310P")
        assert env["HCCL_CONNECT_TIMEOUT"] == "900" and "HCCL_CONNECT_TIMEOUT" not in got
        assert (got.get("TASK_QUEUE_ENABLE") == "2") == modern == ("PYTORCH_NPU_ALLOC_CONF" in got)
        assert not {"ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_GLOBAL_LOG_LEVEL"} & env.keys()
    assert "PYTORCH_NPU_ALLOC_CONF" not in common.ascend_environment("910B", env={"PYTORCH_ALLOC_CONF": "x"})
    assert common.ascend_environment("910B", debug=True, env={}) == common.DEBUGGING
    ports = set()
    for port in (29500, 29501, 29600, 40123):  # jobs on one host, and stages in a row, keep out of each other's way
        for script in ("train_base.py", "train_mid.py", "train_sft.py", "train_rl.py", "eval.py"):
            job = {"WORLD_SIZE": "8", "MASTER_PORT": str(port)}
            ports.add(common.ascend_environment("910B", env=job, script=script)["HCCL_HOST_SOCKET_PORT_RANGE"])
            assert "HCCL_IF_BASE_PORT" in common.ascend_environment("910A", env=dict(job, HCCL_HOST_SOCKET_PORT_RANGE="1-2"))
    assert len(ports) == 20 and all(20000 <= int(p.split("-")[0]) <= 32000 for p in ports)
    for i, (vendor, device) in enumerate([("0x8086", "0x1234"), ("0x19e5", "0xd802")]):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "vendor").write_text(vendor + "\n"), (tmp_path / str(i) / "device").write_text(device + "\n")
    assert common.ascend_card(tmp_path) == "910B" and common.ascend_card(tmp_path / "none") == ""


def test_cards_are_known_by_name():
    for name, old, tflops in (("Ascend910B", True, 256), ("Ascend910B2", False, 354), ("Ascend910_9392", False, 376),
                              ("Ascend310P3", True, 70), ("Ascend910A", True, 256), ("NVIDIA H100 80GB HBM3", False, 989)):
        assert (common.no_bf16(name), common.card_facts(name)[0]) == (old, tflops), name
    assert common.choose_dtype("npu", "Ascend910A", "auto")[0] == torch.float16
    assert common.choose_dtype("npu", "Ascend910B3", "auto")[0] == torch.bfloat16


@pytest.fixture(scope="session")
def npu():
    """The environment of a process that has simulated NPUs. Builds them once."""
    if sys.platform != "linux" or not shutil.which("g++") or not torch.__version__.startswith("2.13"):
        pytest.skip("the simulated NPU needs Linux, g++ and torch 2.13")
    done = subprocess.run([sys.executable, HERE / "fake_npu/torch_npu/_build.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {"PYTHONPATH": str(HERE / "fake_npu")}


def four_stages(home, texts, name, nproc=1, env=None, dtype="float32", device="cpu"):
    """Run the whole pipeline, small. -> {stage: {step: loss}}"""
    common_args = [f"--out_dir={home}", f"--run_name={name}", f"--device_type={device}", f"--dtype={dtype}"]
    small = [a for a in SMALL if not a.startswith(("--device", "--dtype"))]
    tasks = ["--tasks=identity,counting", "--eval_problems=4", "--total_batch_size=1024", "--conversations=400"]
    run("train_base.py", *small, f"--data_dir={texts}", "--num_iterations=6", *common_args, env=env, nproc=nproc)
    run("train_mid.py", f"--init_from=base/{name}", *tasks, "--num_iterations=6", "--eval_tokens=1024", *common_args, env=env,
        nproc=nproc)
    run("train_sft.py", f"--init_from=mid/{name}", *tasks, "--num_iterations=6", *common_args, env=env, nproc=nproc)
    run("train_rl.py", f"--init_from=sft/{name}", "--task=counting", "--num_iterations=3", "--prompts_per_step=3",
        "--num_samples=4", "--max_new_tokens=8", "--eval_problems=4", *common_args, env=env, nproc=nproc)
    return {stage: losses(home, stage, name) for stage in common.STAGES}


def apart(a, b):
    """The largest difference between two runs' losses."""
    assert a.keys() == b.keys()
    return max(abs(a[stage][s] - b[stage][s]) for stage in a for s in a[stage])


@slow
def test_all_stages_on_simulated_npus_give_the_losses_of_the_cpu(home, texts, npu):
    cpu = four_stages(home, texts, "cpu1")
    assert apart(cpu, four_stages(home, texts, "npu2", nproc=2, env=npu, device="npu")) < 1e-4
    assert apart(cpu, four_stages(home, texts, "npu1", env={**npu, "FAKE_NPU_POISON": "1"}, device="npu")) < 1e-4


@slow
def test_an_old_card_trains_in_fp16_with_a_loss_scale(home, texts, npu):
    old = {**npu, "FAKE_NPU_NAME": "Ascend910A"}
    args = [a for a in SMALL if not a.startswith(("--device", "--dtype"))] + [f"--data_dir={texts}", f"--out_dir={home}"]
    out = run("train_base.py", *args, "--num_iterations=8", "--run=old", "--save_every=4", env=old).out
    assert "float16 (Ascend910A has no bf16)" in out
    run("train_base.py", *args, "--num_iterations=8", "--run=exact", "--dtype=float32", env=npu)
    a, b = losses(home, "base", "old"), losses(home, "base", "exact")
    assert len(a) == 8 and max(abs(a[s] - b[s]) for s in a) < 0.02  # half precision's rounding
    state = torch.load(home / "base/old/step_000008/optim.pt", weights_only=True)
    assert state[""]["loss_scale"] > 1


def test_the_loss_scale_finds_its_place():
    w = torch.nn.Parameter(torch.zeros(3))
    dev = Device(torch.device("cpu"), "cpu", "test", torch.float16, 0, 0, 1)
    opt = Muon([dict(kind="adamw", names=["w"], params=[w], lr=0.1)], dev)
    assert opt.loss_scale == 2**16
    for _ in range(3):
        w.grad = torch.full((3,), math.inf)
        assert opt.step(torch.zeros(()))[0] == math.inf and not w.any()
    assert opt.loss_scale == 2**13
    for _ in range(2000):
        w.grad = torch.full((3,), float(opt.loss_scale))  # a true gradient of 1
        norm, _ = opt.step(torch.zeros(()))
    assert opt.loss_scale == 2**14 and norm == pytest.approx(math.sqrt(3)) and torch.isfinite(w).all()
    again = Muon([dict(kind="adamw", names=["w"], params=[w], lr=0.1)], dev)
    again.load_state_dict(opt.state_dict())
    assert again.loss_scale == 2**14


@slow
def test_running_out_of_memory_changes_no_loss(home, texts, npu):
    args = [a for a in SMALL if not a.startswith("--device")] + [f"--data_dir={texts}", f"--out_dir={home}", "--bigrams=0"]
    args += ["--num_iterations=5"]
    tight = {**npu, "FAKE_NPU_MEM_MB": "9"}
    for n in (1, 2):
        out = run("train_base.py", *args, "--device_batch_size=8", f"--run_name=tight{n}", env=tight, nproc=n).out
        assert out.count("done again with") == 3 - n, out  # 8 to 4 to 2 rows; two ranks begin with 4 each
    run("train_base.py", *args, "--device_batch_size=2", "--run=roomy", env=npu)
    a = losses(home, "base", "roomy")
    for n in (1, 2):
        b = losses(home, "base", f"tight{n}")
        assert len(a) == 5 and max(abs(a[s] - b[s]) for s in a) < 1e-5
    out = run("train_base.py", *args, "--run=chosen", env=tight).out  # the memory model knows beforehand
    assert "2 rows at a time" in out and "done again" not in out
    out = run("train_base.py", *args, "--device_batch_size=1", "--run=tiny", env={**npu, "FAKE_NPU_MEM_MB": "5"}).out
    assert "done again with activation checkpointing" in out
    b = losses(home, "base", "tiny")
    assert max(abs(a[s] - b[s]) for s in a) < 1e-5
    for megabytes, T, says in ((2, 128, "one row alone does not fit"), (3, 16, "out of memory (rank 0, in ")):  # the optimizer
        little = {**npu, "FAKE_NPU_MEM_MB": str(megabytes)}
        done = run("train_base.py", *args, f"--max_seq_len={T}", f"--run=none{T}", env=little, check=False)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.out


MEMORY = """
import common, torch
from gpt import GPT, GPTConfig, memory_plan
from muon import Muon
for dtype, rows, checkpointing, mlp in (
        (torch.float32, 1, 0, "relu2"), (torch.float32, 6, 0, "swiglu"), (torch.float32, 6, 0, "relu2"),
        (torch.float32, 6, 1, "swiglu"), (torch.bfloat16, 4, 0, "swiglu"), (torch.bfloat16, 4, 0, "relu2")):
    dev = common.Device(torch.device("npu:0"), "npu", "Ascend910B2", dtype, 0, 0, 1)
    model = GPT(GPTConfig(vocab_size=2048, max_seq_len=256, n_layer=4, n_head=2, n_kv_head=2, n_embd=128, mlp=mlp)).to("npu:0")
    model.activation_checkpointing = bool(checkpointing)
    opt, ids = Muon(model.param_groups(0.02, 0.1, 0.01, 0.01), dev), torch.randint(0, 2048, (rows, 257), device="npu:0")
    for _ in range(2):
        torch.npu.reset_peak_memory_stats()
        for _ in range(2):  # passes
            with dev.autocast():
                loss = model(ids[:, :-1], ids[:, 1:]) / (rows * 256)
            loss.backward()
            value = loss.detach()
            del loss
        opt.step(value)
    print(torch.npu.max_memory_allocated(), memory_plan(model, rows, dev)["peak"])
    del model, opt
"""


@slow
def test_the_memory_model_is_what_the_allocator_measures(npu):
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=HERE, env={**os.environ, **npu}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(pairs) == 6 and all(abs(plan / measured - 1) < 0.15 for measured, plan in pairs), pairs


WINDOW = """
import common, torch
from gpt import GPT, GPTConfig, window_mask
model = GPT(GPTConfig(vocab_size=300, max_seq_len=64, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, window=8))
torch.manual_seed(0)
for p in model.parameters():
    p.data += 0.1 * torch.randn_like(p)
idx, results = torch.randint(0, 300, (2, 64)), []
for device in ("cpu", "npu"):
    model.to(device).zero_grad()
    loss = model(idx.to(device), idx.to(device))
    loss.backward()
    results.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
assert isinstance(window_mask(64, 8, torch.device("npu:0")), tuple)  # what the band of the fused kernel wants
for a, b in zip(*results):
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)
print("alike")
"""


@slow
def test_a_window_is_a_band_of_the_fused_kernel_on_npus(npu):
    done = subprocess.run([sys.executable, "-c", WINDOW], cwd=HERE, env={**os.environ, **npu}, capture_output=True, text=True)
    assert done.stdout.strip().endswith("alike"), done.stderr


@slow
def test_a_card_without_bmm_is_trained_with_adamw(home, texts, npu):
    args = [a for a in SMALL if not a.startswith("--device")] + [f"--data_dir={texts}", f"--out_dir={home}", "--run_name=nobmm"]
    out = run("train_base.py", *args, "--num_iterations=30", env={**npu, "FAKE_NPU_REFUSE": "aten::bmm"}).out
    assert "Muon does not work on this device (aten::bmm" in out
    curve = losses(home, "base", "nobmm")
    assert curve[30] < curve[1] - 0.8
    out = run("train_base.py", *args, "--num_iterations=30", "--resume=0", env=npu).out
    assert "AdamW" not in out


@slow
def test_the_simulated_npu_is_sound(npu):
    done = subprocess.run([sys.executable, "-m", "pytest", "fake_npu/test_fake_npu.py", "-q", "-x", "-p", "no:cacheprovider"],
                          cwd=HERE, env={**os.environ, **npu}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]


# --- the doctor --------------------------------------------------------------------------------------------------------
def doctor(tmp_path, env=None, *args):
    """-> (exit status, {check: (state, finding, advice)})"""
    done = subprocess.run([sys.executable, "common.py", "--json=1", f"--out_dir={tmp_path}", *args], cwd=HERE, text=True,
                          capture_output=True, timeout=300, env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9,", **(env or {})})
    report = json.loads(done.stdout)
    assert (report["verdict"] == "fail") == (done.returncode == 1), done.stdout + done.stderr
    return done.returncode, {c["check"]: (c["state"], c["finding"], c["advice"]) for c in report["checks"]}


@slow
def test_the_doctor_on_a_cpu(tmp_path, tok):
    tok.save(tmp_path / "tokenizer", {})
    save(tmp_path / "base" / "d4", 1, tokenizer="x" * 64), save(tmp_path / "base" / "d4", 2, tokenizer="x" * 64)
    (tmp_path / "base" / "d4" / "step_000002" / "model.pt").write_bytes(b"")
    status, checks = doctor(tmp_path, None, "--device_type=cpu")
    assert status == 0 and checks["torch"][0] == "ok" and "TFLOP/s" in checks["cpu"][1] and checks["all_reduce"][0] == "ok"
    assert checks["hub 127.0.0.1:9"][0] == "warn" and tok.hash[:12] in checks["tokenizer"][1]
    assert checks["base/d4"][:2] == ("warn", "step 1, tokenizer xxxxxxxxxxxx, damaged: step_000002")
    status, checks = doctor(tmp_path, None, "--device_type=npu")
    assert status == 1 and checks["npu"][0] == "fail"


@slow
def test_the_doctor_on_simulated_npus(tmp_path, npu):
    home, bin = tmp_path / "cann", tmp_path / "bin"
    home.mkdir(), bin.mkdir()
    (home / "version.cfg").write_text("# CANN\nrunning_version=[9.1.0.1.220:9.1.0]\n")
    (bin / "npu-smi").write_text("#!/bin/sh\necho '| 0       0       | 4711          | python3                  | 1234    |'\n")
    (bin / "npu-smi").chmod(0o755)
    whole = {**npu, "ASCEND_HOME_PATH": str(home), "PATH": f"{bin}:{os.environ['PATH']}"}
    status, checks = doctor(tmp_path, {**whole, "ASCEND_LAUNCH_BLOCKING": "1"})
    assert status == 0 and checks["torch_npu"][0] == "ok" and checks["CANN"][:2] == (
        "ok", "9.1.0; which one torch_npu 2.13.0+fake wants is not known here")
    assert checks["npu 0"][1].startswith("Ascend910B2") and "bfloat16" in checks["npu 1"][1] and "of peak" in checks["npu 1"][1]
    assert "2 ranks (cpu:gloo,npu:hccl)" in checks["all_reduce"][1] and "4711" in checks["processes"][2]
    assert checks["variables"][0] == "warn" and "unset ASCEND_LAUNCH_BLOCKING" in checks["variables"][2]
    status, checks = doctor(tmp_path, {**whole, "FAKE_NPU_VERSION": "2.9.0"})
    assert status == 1 and checks["torch_npu"][0] == "fail" and "pip install torch_npu==2.13.0" in checks["torch_npu"][2]
    assert checks["CANN"][0] == "warn" and "CANN 8.5.0" in checks["CANN"][2]
    status, checks = doctor(tmp_path, {**npu, "FAKE_NPU_NO_CANN": "1"})
    assert status == 1 and "libhccl.so" in checks["torch_npu"][1] and "set_env.sh" in checks["torch_npu"][2]
    assert checks["CANN"][0] == "fail" and checks["cpu"][0] == "ok"
    status, checks = doctor(tmp_path, {**npu, "FAKE_NPU_COUNT": "0"})
    assert status == 1 and "sees no device" in checks["devices"][1]
    status, checks = doctor(tmp_path, {**npu, "FAKE_NPU_NAME": "Ascend910A"})
    assert status == 0 and "float16" in checks["npu 0"][1]


@slow
def test_a_plan_needs_no_device():
    for name, tflops in (("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA RTX A1000 Laptop GPU", None), ("NVIDIA GeForce RTX 4090", 165),
                         ("Tesla V100-SXM2-16GB", 125), ("Tesla T4", 65), ("NVIDIA T400", None), ("Ascend910B4", 270),
                         ("910B", 354)):
        assert common.card_facts(name)[0] == tflops, name
    assert common.planned_device("", 1).type == next(iter(common.find_devices()))
    done = run("train_base.py", "--plan=1", "--plan_device=910B", "--plan_ranks=8", "--depth=20")
    for what in ("8 x 910B, bfloat16", "897M", "activations", "at its peak", "hours at 40%"):
        assert what in done.stdout, done.stdout
    assert run("train_base.py", "--plan=1", "--plan_device=nothing", check=False).returncode == 2


# --- accidents ---------------------------------------------------------------------------------------------------------
def start(*args, nproc, restarts=0):
    """A stage under torchrun, in the background."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", f"--max-restarts={restarts}"]
    return subprocess.Popen([sys.executable, *(torchrun if nproc > 1 else []), *map(str, args)], cwd=HERE, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "2"})


def wait_for(log, step, process, seconds=120):
    """Until a run has logged a step."""
    end = time.time() + seconds
    while time.time() < end and process.poll() is None:
        if log.exists() and max((r["step"] for r in common.read_log(log)), default=0) >= step:
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(process.communicate()[0])


def workers(process):
    """The process ids of the ranks that a torchrun started."""
    return [int(pid) for pid in (Path("/proc") / str(process.pid) / "task" / str(process.pid) / "children").read_text().split()]


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks under /proc")
@pytest.mark.parametrize("stage", ["base", "rl"])
def test_a_killed_rank_is_started_again_and_changes_nothing(home, texts, stage):
    more = {"base": [*SMALL, f"--data_dir={texts}", "--num_iterations=30", "--save_every=4"],
            "rl": ["--init_from=base/ref", "--device_type=cpu", "--dtype=float32", "--num_iterations=8", "--prompts_per_step=3",
                   "--num_samples=4", "--max_new_tokens=6", "--eval_problems=4", "--save_every=2", "--lr_frac=1"]}[stage]
    args = [f"train_{stage}.py", *more, f"--out_dir={home}"]
    if not (home / "base" / "ref").exists():
        run("train_base.py", *SMALL, f"--data_dir={texts}", "--num_iterations=30", "--save_every=4", f"--out_dir={home}",
            "--run_name=ref", nproc=2)
    if stage == "rl":
        run(*args, "--run_name=ref", nproc=2)
    process = start(*args, "--run_name=victim", nproc=2, restarts=3)
    wait_for(home / stage / "victim" / "log.jsonl", {"base": 14, "rl": 3}[stage], process)
    os.kill(workers(process)[1], 9)
    out = process.communicate(timeout=200)[0]
    assert process.returncode == 0 and "[auto] continuing" in out, out
    assert losses(home, stage, "victim") == losses(home, stage, "ref")


@slow
def test_sigterm_saves_and_another_number_of_ranks_goes_on(home, texts):
    args = ["train_base.py", *SMALL, f"--data_dir={texts}", "--num_iterations=80", "--save_every=0", f"--out_dir={home}"]
    run(*args, "--run=straight80")
    for nproc, step in ((2, 10), (1, 30)):
        process = start(*args, "--run_name=stopped", nproc=nproc)
        wait_for(home / "base" / "stopped" / "log.jsonl", step, process)
        for pid in 2 * workers(process) if nproc > 1 else [process.pid]:  # twice, as a queue and torchrun would
            os.kill(pid, signal.SIGTERM)
        out = process.communicate(timeout=60)[0]
        assert process.returncode == 0 and "asked to stop (SIGTERM)" in out, out
    out = run(*args, "--run_name=stopped", nproc=3).out
    assert "continuing" in out
    a, b = losses(home, "base", "straight80"), losses(home, "base", "stopped")
    assert len(a) == 80 and a.keys() == b.keys() and max(abs(a[s] - b[s]) for s in a) < 1e-4


@slow
def test_a_full_disk_is_survived(home, texts):
    args = [*SMALL, f"--data_dir={texts}", f"--out_dir={home}", "--run=full", "--num_iterations=6", "--save_every=2"]
    run("train_base.py", *args[:-2], "--num_iterations=6", "--save_every=2", "--run=before")  # fills the token cache
    limited = f"ulimit -f 100; exec {shlex.quote(sys.executable)} train_base.py {shlex.join(map(str, args))}"  # 100 kB a file
    done = subprocess.run(["bash", "-c", limited], cwd=HERE, capture_output=True, text=True)
    assert done.stdout.count("cannot be written") == 2 and "going on without it" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2 and "make room" in done.stderr and "Traceback" not in done.stderr
    assert not list((home / "base" / "full").glob("step_*"))
    assert "val bpb" in run("train_base.py", *args).out


def test_a_gradient_that_is_not_finite_is_skipped_and_ten_stop_the_run(capsys):
    steps, metrics, opt = common.Steps(1, tiny(), CPU, 0), {}, Muon([], CPU)
    for norm in (math.nan, math.inf, 1.0, *[math.nan] * 9):
        steps.check(1, norm, opt, metrics, "advice")
    assert metrics["skipped"] == 11 and "9 in a row, 11 in all" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        steps.check(1, math.nan, opt, metrics, "lower the rate")
    assert "ten steps in a row" in (err := capsys.readouterr().err) and "lower the rate" in err
    opt.loss_scale = 8.0  # still being found: not counted
    for _ in range(12):
        steps.check(1, math.inf, opt, metrics, "")


@slow
def test_a_learning_rate_far_too_high_ends_with_one_sentence(home, texts):
    done = run("train_base.py", *SMALL, f"--data_dir={texts}", f"--out_dir={home}", "--run=wild", "--num_iterations=40",
               "--matrix_lr=1e38", "--warmup_steps=0", check=False)
    assert done.returncode == 2 and "(10 in a row" in done.stdout and "lower the learning rates" in done.stderr, done.out


HANG = """
import time
from common import Watchdog
def stuck():
    time.sleep(30)
Watchdog.start(0.01)
for _ in range(5):
    time.sleep(0.2)  # a step; shorter than the 0.6 s
    Watchdog.beat()
if {waits}:
    with Watchdog.waiting():
        stuck()
stuck()
"""


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_hangs_says_where(waits):
    done = subprocess.run([sys.executable, "-c", HANG.format(waits=waits)], cwd=HERE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "rank 0 of 1" in done.stderr and "in stuck" in done.stderr, done.stderr
    assert ("waited for the other ranks" in done.stderr) == waits


ALONE = """
import os, common, torch
dev = common.setup("cpu", "float32")
assert dev.sum([1, 2.5] if dev.rank else [0, 0]) == [1, 2.5] and dev.sum(3) == 6
if dev.rank == 1:
    {what}
dev.sum(torch.zeros(1))
"""


@slow
@pytest.mark.parametrize("what, says", [("common.fail('nothing there')", "error (rank 1): nothing there"),
                                        ("raise torch.OutOfMemoryError('NPU out of memory')", "out of memory (rank 1, in"),
                                        ("raise ValueError('a bug')", "ValueError: a bug")])
def test_what_one_rank_alone_meets_is_said(tmp_path, what, says):
    (tmp_path / "alone.py").write_text(ALONE.format(what=what))
    done = run(tmp_path / "alone.py", nproc=2, check=False, env={"PYTHONPATH": str(HERE)})
    assert done.returncode and says in done.stderr and "terminate called" not in done.stderr, done.out


def test_work_goes_on_in_smaller_batches_when_memory_runs_out(capsys):
    tried = []

    def work(batch):
        tried.append(len(batch))
        if len(batch) > 3:
            raise RuntimeError("NPU out of memory. Tried to allocate 1 GiB")
        return [2 * x for x in batch]

    done = [y for _, result in common.in_batches(list(range(11)), 8, work, CPU) for y in result]
    assert done == [2 * x for x in range(11)] and tried == [8, 4, 2, 2, 2, 2, 2, 1]
    tried.clear()
    list(common.in_batches(list(range(4)), 8, work, CPU))
    assert tried == [2, 2]  # what fitted is remembered
    with pytest.raises(ValueError):
        list(common.in_batches([1], 1, lambda batch: int("x"), CPU))
    with pytest.raises(RuntimeError, match="memory"):
        list(common.in_batches([1], 1, lambda batch: work([1] * 9), CPU))


def test_a_step_is_done_again_with_fewer_rows(capsys):
    model, tried = tiny(), []
    steps = common.Steps(8, model, CPU, 0)

    def work(rows):
        tried.append((rows, model.activation_checkpointing))
        if rows > 1 or not model.activation_checkpointing:
            raise torch.OutOfMemoryError("no")
        return "done"

    assert steps.run(work) == "done"
    assert tried == [(8, False), (4, False), (2, False), (1, False), (1, True)]
    with pytest.raises(ZeroDivisionError):
        steps.run(lambda rows: 1 / 0)


def test_activation_checkpointing_changes_no_gradient():
    idx, grads = torch.randint(0, 300, (2, 33)), []
    for on in (False, True):
        model = tiny()
        model.activation_checkpointing = on
        model(idx[:, :-1], idx[:, 1:]).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_samples_do_not_depend_on_their_neighbours(tok):
    model, prompts = tiny(tok.vocab_size), [[tok.bos, 65, 66], [tok.bos, 70], [tok.bos, 80, 81, 82]]
    options = dict(num_samples=3, temperature=1.0, max_new_tokens=8)
    together = complete(model, tok, prompts, CPU, seed=[[7, i] for i in range(3)], **options)
    alone = [complete(model, tok, [p], CPU, seed=[[7, i]], **options)[0] for i, p in enumerate(prompts)]
    assert together == alone and len({tuple(t) for t, _ in together[0]}) > 1


def test_help_lists_every_knob():
    for script in ("tokenizer.py", "train_base.py", "train_mid.py", "train_sft.py", "train_rl.py", "eval.py", "chat.py"):
        names, block, doc = common.read_config_block(HERE / script)
        assert {"out_dir"} <= set(names) and doc and all("#" in line for line in block.splitlines()), script
    assert "total_batch_size" in run("train_base.py", "--help").stdout


def test_no_device_is_named_outside_common():
    named = r"torch\.(?:cuda|npu|mps)\b|\.cuda\(|\.npu\(|[\"'](?:cuda|npu|mps)[\"':]"
    for path in HERE.glob("*.py"):
        if path.name not in ("common.py", "test_all.py"):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r"# --- attention: the one place .*?# ---", "", text, count=1, flags=re.S)  # in gpt.py
            found = re.findall(named, text)
            assert not found, f"{path.name}: {found}"


if __name__ == "__main__":
    argv = [a for a in sys.argv[1:] if a != "--fast"]
    sys.exit(
        pytest.main(
            [str(HERE / "test_all.py"), "-q", "--durations=8", *(["-m", "not slow"] if "--fast" in sys.argv else []), *argv]
        )
    )

"""
Talking to it: in the terminal, with one question, or on a web page.

    python chat.py                              # chat in the terminal with the newest rl (else sft, else mid) model
    python chat.py -p "What is 17 + 25?"        # one question, one answer
    python chat.py --web=1                      # a page on http://127.0.0.1:8000
    python chat.py --source=sft                 # the model of another stage, or a checkpoint folder

Reads a checkpoint and the tokenizer in out_dir; writes nothing.
"""
from common import (auto, command, configure, fail, find_checkpoint, load_weights, need, newest_checkpoint, print0,
                    run_folders, setup)

import json
import socket
import sys
import threading
from pathlib import Path

from gpt import generate, load_model
from tokenizer import find_tokenizer

# --- CONFIG ----------------------------------------------------------------------------------------------------------
prompt = ""              # -p: one question; prints the answer and ends
source = ""              # "" = the newest of rl, sft, mid; or a stage, stage/tag, or a checkpoint folder
temperature = 0.0        # 0 = always the likeliest token; higher = more varied
top_k = 50               # sample among so many tokens; 0 = all
max_new_tokens = 128     # tokens of one answer
seed = 42                # of the sampling
web = False              # serve a page instead of the terminal
host = "127.0.0.1"       # address the page is served on; 0.0.0.0 lets other machines in
port = 8000              # port of the page
device_type = "auto"     # auto, npu, cuda, mps, cpu
dtype = "auto"           # auto, bfloat16, float16, float32
debug_npu = False        # Ascend: exact stack traces, and slow (must stand on the command line)
out_dir = "out"          # where the checkpoints are

DIM, BOLD, PLAIN = ("\033[2m", "\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


class Chat:
    """A loaded model and its tokenizer; answers one conversation at a time."""

    def __init__(self):
        self.dev = setup(device_type, dtype, seed)
        stage = source
        if not stage:
            stages = [s for s in ("rl", "sft", "mid") if any(newest_checkpoint(p) for p in run_folders(out_dir, s))]
            if not stages:
                fail(f"there is no model to talk to in {out_dir}: bash speedrun.sh makes one in out, "
                     f"or train one with: {command('train_base.py', out_dir)}, then train_mid.py and train_sft.py")
            stage = stages[0]
        self.meta = find_checkpoint(out_dir, stage)
        self.tok = find_tokenizer(out_dir, self.meta)
        self.model = load_model(self.meta, load_weights(self.meta, "model.pt"), self.dev).eval()
        self.lock, self.turn = threading.Lock(), 0
        auto(f"talking to {self.meta['path']}")

    def fit(self, messages, new_tokens):
        """The prompt's ids, with the oldest turns left out until it and the answer fit the context. -> (ids, turns left out)"""
        limit, dropped = self.model.config.max_seq_len - min(new_tokens, self.model.config.max_seq_len // 4), 0
        while len(ids := self.tok.render_for_completion({"messages": messages})) > limit:
            if len(messages) == 1:
                return None, dropped
            messages, dropped = messages[2:], dropped + 1
        return ids, dropped

    def answer(self, messages, temperature, top_k, max_new_tokens):
        """Stream an answer as (kind, text): kind "text", "python" (a call to the calculator), "output" (its result), "note"."""
        ids, dropped = self.fit(messages, max_new_tokens)
        if ids is None:
            yield "note", f"the message is longer than the context of {self.model.config.max_seq_len} tokens"
            return
        if dropped:
            yield "note", f"longer than {self.model.config.max_seq_len} tokens: the {dropped} oldest turns are left out"
        tok, kind, decode = self.tok, "text", self.tok.stream_decoder()
        kinds = {tok.python_start: "python", tok.output_start: "output", tok.python_end: "text", tok.output_end: "text"}
        self.turn += 1
        steps = generate(self.model, tok, [ids], self.dev, max_new_tokens=max_new_tokens, temperature=temperature,
                         top_k=top_k, seed=seed + self.turn)
        while True:
            with self.lock:  # for one token only: an answer whose reader has gone must not keep the others waiting
                events = next(steps, None)
            if events is None:
                break
            [(_, token, _)] = events
            if token >= tok.bos:  # a special token: it ends a part and is not shown
                text, decode, kind_next = decode(None), tok.stream_decoder(), kinds.get(token, "text")
            else:
                text, kind_next = decode(token), kind
            if text:
                yield kind, text
            kind = kind_next
        if text := decode(None):
            yield kind, text


def parts_of(events):
    """Streamed (kind, text) pieces as the content of an assistant's message."""
    names, parts = {"text": "text", "python": "python", "output": "python_output"}, []
    for kind, text in events:
        if kind == "note":
            continue
        if parts and parts[-1]["type"] == names[kind]:
            parts[-1]["text"] += text
        else:
            parts.append({"type": names[kind], "text": text})
    return parts


def print_answer(chat, messages):
    """Print an answer as it comes, tool calls dimmed. -> its events"""
    events, shown = [], "text"
    for kind, text in chat.answer(messages, temperature, top_k, max_new_tokens):
        events.append((kind, text))
        if kind != shown:
            close = f"]{PLAIN} " if shown in ("python", "output") else PLAIN
            print({"python": f"{DIM}[calculator: ", "output": " = ", "note": f"{DIM}(", "text": close}[kind], end="")
            shown = kind
        print(text + (f"){PLAIN}\n" if kind == "note" else ""), end="", flush=True)
        shown = "text" if kind == "note" else shown
    print(PLAIN + ("" if shown == "text" else "]"))
    return events


def terminal(chat):
    print(f"Talk to npuchat. /clear begins anew, /quit or Ctrl-D ends.{PLAIN}")
    messages = []
    while True:
        try:
            question = input(f"{BOLD}you:{PLAIN} ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question in ("/quit", "/exit"):
            return
        if question == "/clear":
            messages = []
            print("(a new conversation)")
        elif question.startswith("/"):
            print(f"({question} is no command; there are /clear and /quit)")
        elif question:
            messages.append({"role": "user", "content": question})
            print(f"{BOLD}npuchat:{PLAIN} ", end="", flush=True)
            try:
                events = print_answer(chat, messages)
            except KeyboardInterrupt:  # stops the answer, not the program
                print(f"{PLAIN} (stopped)")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": parts_of(events)})


def make_app(chat):
    """The page and its three addresses: GET / (chat.html), POST /chat (server-sent events), GET /health."""
    need("fastapi", "the web page")
    from fastapi import FastAPI, HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
    from pydantic import BaseModel, Field
    app = FastAPI(title="npuchat", docs_url=None, redoc_url=None)
    page = (Path(__file__).parent / "chat.html").read_text(encoding="utf-8")

    class Part(BaseModel):
        type: str = Field(pattern="^(text|python|python_output)$")
        text: str = Field(max_length=8000)

    class Message(BaseModel):
        role: str
        content: str | list[Part] = Field(max_length=8000)

    class Request(BaseModel):
        messages: list[Message] = Field(min_length=1, max_length=200)
        temperature: float = Field(temperature, ge=0, le=2)
        top_k: int = Field(top_k, ge=0, le=1000)
        max_new_tokens: int = Field(max_new_tokens, ge=1, le=4096)

    def stream(r):
        for kind, text in chat.answer([m.model_dump() for m in r.messages], r.temperature, r.top_k, r.max_new_tokens):
            yield "data: " + json.dumps({"kind": kind, "text": text}) + "\n\n"
        yield 'data: {"kind": "end"}\n\n'

    @app.exception_handler(RequestValidationError)
    def invalid(request, error):  # without the input, which may hold what JSON cannot (nan)
        return JSONResponse({"detail": [{"loc": list(e["loc"]), "msg": e["msg"]} for e in error.errors()]}, 422)

    @app.get("/", response_class=HTMLResponse)
    def index():
        return page

    @app.get("/health")
    def health():
        return {"status": "ok", "model": chat.meta["path"], "stage": chat.meta["stage"], "step": chat.meta["step"]}

    @app.post("/chat")
    def answer(r: Request):
        for i, m in enumerate(r.messages):
            if m.role != ("user", "assistant")[i % 2] or (m.role == "user" and not isinstance(m.content, str)):
                raise HTTPException(400, f"message {i}: user and assistant take turns, the user first, whose content is text")
        if r.messages[-1].role != "user":
            raise HTTPException(400, "the last message must be the user's")
        return StreamingResponse(stream(r), media_type="text/event-stream")

    return app


def main():
    if web:
        uvicorn = need("uvicorn", "the web page")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as e:
                fail(f"{host}:{port} cannot be used ({e.strerror}): give another port with --port={port + 1}")
        app = make_app(Chat())
        print0(f"npuchat is at http://{host}:{port} (Ctrl-C ends)")
        uvicorn.run(app, host=host, port=port, log_level="warning")
        return
    chat = Chat()
    if prompt:
        print_answer(chat, [{"role": "user", "content": prompt}])
    elif not sys.stdin.isatty():  # piped: a question a line
        for line in filter(None, map(str.strip, sys.stdin)):
            print_answer(chat, [{"role": "user", "content": line}])
    else:
        terminal(chat)


if __name__ == "__main__":
    config = configure(globals())
    if not 0 <= port < 65536:
        fail(f"--port={port} is not a port: 0 to 65535")
    main()

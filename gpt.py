"""
What is the model, and how does it produce tokens?

A decoder-only transformer: rotary positions, RMSNorm without weights, no biases. Each idea beyond that is a field of GPTConfig,
so that to try without it is a flag, and a preset is a set of fields. Then the loss, which never holds all logits; the KV cache;
and batched generation in which prompts of any lengths run side by side and a calculator answers inside the sequence.
"""
import ast
import bisect
import functools
import itertools
import math
import operator
import re
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from common import fail, human, print0, warn


@dataclass
class GPTConfig:
    vocab_size: int = 32768
    max_seq_len: int = 2048
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6          # fewer than n_head: grouped-query attention
    n_embd: int = 768
    rope_base: float = 10000.0
    qk_norm: bool = True
    mlp: str = "swiglu"         # swiglu: down(silu(gate(x)) * up(x)); relu2: down(relu(up(x))^2)
    softcap: float = 15.0       # logits = softcap * tanh(logits / softcap), at most 60; 0 = off
    value_embeds: bool = True   # every other layer mixes an embedding of the token into its values
    layer_lambdas: bool = True  # each layer mixes the first hidden state back in, with learned weights
    window: int = 0             # three layers of four look back so many tokens only, every fourth and the last all the way; 0 = off
    tied: bool = False          # the head is the embedding
    bigrams: int = 0            # rows of a table of embeddings for pairs of tokens, found by a hash, added to the token's; 0 = off

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def ffn_dim(self):
        """4 C; with three matrices instead of two, 8/3 C: as many weights."""
        return 4 * self.n_embd if self.mlp == "relu2" else -(-8 * self.n_embd // (3 * 32)) * 32

    def looks_back(self, layer):
        """How many tokens before its own a layer may look at; 0 = all."""
        return 0 if (layer + 1) % 4 == 0 or layer == self.n_layer - 1 else self.window


# Whole sets of ideas. nano: the best we know, by the README's table. classic: nanochat of October 2025. qwen3: Qwen3's.
# transformers has the last two, see to_transformers().
PRESETS = {"nano": {},  # train_base.py gives small ones bigrams, and no lambdas
           "classic": dict(mlp="relu2", value_embeds=False, layer_lambdas=False),
           "qwen3": dict(rope_base=1e6, softcap=0.0, value_embeds=False, layer_lambdas=False)}
LOGITS_AT_ONCE = 2**26  # numbers, of which the loss holds copies of 8 to 10 bytes in all
ADAMW_RATE = 0.15       # where AdamW stands in for Muon, its learning rate as a share of Muon's at width 768


def norm(x):
    if x.dtype == torch.float16:  # whose squares end at 65504
        x = x.float()
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary embedding. x: (B, H, T, D); cos, sin: (T, D/2) or (B, 1, T, D/2). Pairs are (i, i + D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


# --- attention: the one place where the kind of device matters to the model ------------------------------------------------
@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)  # an evaluation may be the first to ask, and training keeps it for its backward pass
def window_mask(T, window, device, compiled=False):
    """What a layer may look at that looks back `window` tokens and no more, in the form that attention() is fastest with."""
    if device.type == "npu" and torch.npu.is_bf16_supported():  # not on cards before 910B, which have no such kernel
        return window, torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)  # the size that the kernel wants
    if compiled and device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask
        return create_block_mask(lambda b, h, i, j: (j <= i) & (i - j <= window), None, None, T, T, device=device)
    i = torch.arange(T, device=device)
    return (i <= i[:, None]) & (i[:, None] - i <= window)


def attention(q, k, v, mask=None):
    """q: (B, H, T, D), k and v: (B, Hkv, S, D) -> (B, H, T, D). Causal when mask is None (T = S); else what window_mask() gives, or
    booleans (True = may look). None and booleans are what reaches the fused kernel on every device."""
    q, k = q.to(v.dtype), k.to(v.dtype)  # norms and rotary tables may have widened them under autocast
    if isinstance(mask, tuple):  # sparse_mode 4: a band
        import torch_npu
        window, upper = mask
        return torch_npu.npu_fusion_attention(q, k, v, q.size(1), "BNSD", atten_mask=upper, scale=q.size(-1) ** -0.5,
                                              pre_tockens=window, next_tockens=0, sparse_mode=4)[0]
    if q.size(1) != k.size(1):
        B, H, S, D = *q.shape[:2], *k.shape[2:]
        k, v = (t[:, :, None].expand(-1, -1, H // t.size(1), -1, -1).reshape(B, H, S, D) for t in (k, v))
    if mask is not None and not torch.is_tensor(mask):
        from torch.nn.attention.flex_attention import flex_attention
        return flex_attention(q, k, v, block_mask=mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class Lookup(torch.autograd.Function):
    """weight[idx], whose gradient is added to weight.grad row by row: else each backward pass fills and adds a table as large as
    the weight, of which it has touched a few rows. weight: (V, C), a leaf; idx: (...) -> (..., C)"""

    @staticmethod
    def forward(ctx, weight, idx):
        ctx.weight, ctx.idx = weight, idx
        return F.embedding(idx, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, ctx.idx.flatten(), grad.flatten(0, -2).to(weight.dtype))
        return None, None


# --- the model -------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.config, self.layer = config, layer
        self.q = nn.Linear(C, config.n_head * D, bias=False)
        self.k = nn.Linear(C, config.n_kv_head * D, bias=False)
        self.v = nn.Linear(C, config.n_kv_head * D, bias=False)
        self.o = nn.Linear(C, C, bias=False)
        self.up = nn.Linear(C, config.ffn_dim, bias=False)
        self.gate = nn.Linear(C, config.ffn_dim, bias=False) if config.mlp == "swiglu" else None
        self.down = nn.Linear(config.ffn_dim, C, bias=False)

    def forward(self, x, x0, mix, ve, rope, mask=None, cache=None):
        """x, x0: (B, T, C), the hidden state and the first one; mix: how much of each to take in, (2,), or None = x alone;
        ve: (B, T, Hkv * D) to be added to the values, or None."""
        B, T, C = x.shape
        D = self.config.head_dim
        if mix is not None:
            x = mix[0] * x + mix[1] * x0
        h = norm(x)
        v = self.v(h) if ve is None else self.v(h) + ve
        q, k, v = (t.view(B, T, -1, D).transpose(1, 2) for t in (self.q(h), self.k(h), v))  # (B, H, T, D)
        if self.config.qk_norm:
            q, k = norm(q), norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = attention(q, k, v, mask).transpose(1, 2).reshape(B, T, C)
        x = x + self.o(y)
        h = norm(x)
        if self.gate is not None:
            return x + self.down(F.silu(self.gate(h)) * self.up(h))
        h = F.relu(self.up(h))
        return x + self.down(h * h)  # not h.square(): autocast would compute and keep that in fp32


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False  # keep only each block's input, and compute the rest again in the backward pass
        assert config.n_embd % config.n_head == 0 and config.head_dim % 2 == 0, f"{config.n_embd} into {config.n_head} heads"
        assert config.n_head % config.n_kv_head == 0, f"{config.n_head} heads cannot share {config.n_kv_head} key-value heads"
        assert config.mlp in ("relu2", "swiglu") and config.softcap <= 60, f"mlp {config.mlp}, softcap {config.softcap}"
        V, C, L = config.vocab_size, config.n_embd, config.n_layer
        self.embed = nn.Embedding(V, C)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(L))
        self.bigram_embed = nn.Embedding(config.bigrams, C) if config.bigrams else None
        self.head = nn.Linear(C, V, bias=False) if not config.tied else None
        with_ve = range((L - 1) % 2, L, 2) if config.value_embeds else ()  # every other layer, the last one included
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(V, config.n_kv_head * config.head_dim) for i in with_ve})
        if config.value_embeds:
            self.value_lambdas = nn.Parameter(torch.empty(L))
        if config.layer_lambdas:
            self.resid_lambdas = nn.Parameter(torch.empty(L))
            self.x0_lambdas = nn.Parameter(torch.empty(L))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(config.max_seq_len, config.head_dim // 2), persistent=False)
        self.run_block, self.squash, self.compiled = Block.forward, tile_softmax, False
        if not self.embed.weight.is_meta:
            self.init_tables()
            self.init_weights()

    @classmethod
    def build(cls, config, device, weights=None):
        """A model on its device, with fresh weights or those given. It is laid out on the meta device: no memory is used twice."""
        with torch.device("meta"):
            model = cls(config)
        if torch.device(device).type != "meta":
            model.to_empty(device=device)
            model.init_tables()
            model.init_weights() if weights is None else model.load_state_dict(weights)
        return model

    def init_tables(self):
        D = self.config.head_dim
        freqs = self.config.rope_base ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)
        angles = torch.arange(self.config.max_seq_len, dtype=torch.float32)[:, None] * freqs  # (T, D/2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    @torch.no_grad()
    def init_weights(self):
        """Each block starts as the identity (o and down are zero), the head near zero: the first loss is ln(vocab). The numbers are
        the host's: the same start on every kind of device."""
        C = self.config.n_embd
        for name, p in self.named_parameters():
            w, kind = torch.empty(p.shape), name.split(".")[-2] if "." in name else name
            if kind == "embed":
                w.normal_(0, 0.8 if not self.config.tied else 0.02)
            elif kind == "head":
                w.normal_(0, 0.001)
            elif kind in ("o", "down", "bigram_embed"):
                w.zero_()
            elif p.ndim == 2:
                w.uniform_(-math.sqrt(3 / C), math.sqrt(3 / C))  # standard deviation 1 / sqrt(C)
            else:
                w.fill_({"value_lambdas": 1.0, "resid_lambdas": 1.0, "x0_lambdas": 0.1}[kind])
            p.copy_(w)

    def use_compile(self):
        """Train through torch.compile: block by block, since all blocks are alike and one is compiled in a fraction of the time.
        Generation and evaluation stay as they are."""
        self.run_block = torch.compile(Block.forward, dynamic=False)
        self.squash = torch.compile(tile_softmax, dynamic=False)
        self.compiled = True

    def forward(self, idx, targets=None, weights=None, reduction="sum", cache=None, at=None):
        """idx: (B, T) tokens -> logits (B, T, V) in fp32; with at=(rows, positions), two lists of N, only there: (N, V).

        With targets (B, T), -1 = not scored: the summed cross-entropy in nats, each token's times its weight where weights
        (B, T) are given; reduction="none", without gradients: per token (B, T).
        With a cache, idx continues each row at its own position; the caller then calls cache.advance().
        """
        (B, T), config = idx.shape, self.config
        training = torch.is_grad_enabled() and cache is None
        if cache is None:
            rope, masks = (self.cos[:T], self.sin[:T]), {0: None}
        else:
            pos, masks = cache.open(T, config.window)  # (B, T)
            rope = (self.cos[pos][:, None], self.sin[pos][:, None])  # (B, 1, T, D/2)
        if config.window and config.window not in masks:
            masks[config.window] = window_mask(T, config.window, idx.device, training and self.compiled)
        x = Lookup.apply(self.embed.weight, idx)  # (B, T, C)
        if self.bigram_embed is not None:
            before = F.pad(idx, (1, 0))[:, :-1] if cache is None else cache.before(idx)
            x = x + Lookup.apply(self.bigram_embed.weight, (before * 36313 + idx * 27191) % config.bigrams)
        x = x0 = norm(x)
        mix = torch.stack([self.resid_lambdas, self.x0_lambdas], 1).unbind() if config.layer_lambdas else [None] * config.n_layer
        run = self.run_block if training else Block.forward
        for i, block in enumerate(self.blocks):
            ve = self.value_embeds[str(i)] if str(i) in self.value_embeds else None
            ve = None if ve is None else self.value_lambdas[i] * Lookup.apply(ve.weight, idx)
            inputs = (block, x, x0, mix[i], ve, rope, masks[config.looks_back(i)])
            if training and self.activation_checkpointing:
                x = checkpoint(run, *inputs, use_reentrant=False)
            else:
                x = run(*inputs, cache)
        x = norm(x)
        if targets is None:
            return self.logits(x if at is None else x[at])
        weights = None if weights is None else weights.expand(B, T).reshape(-1)
        loss = CrossEntropy.apply(x.reshape(B * T, -1), self.head_weight, targets.reshape(-1), weights, config.softcap,
                                  reduction, self.squash if training else tile_softmax)
        return loss if reduction == "sum" else loss.view(B, T)

    @property
    def head_weight(self):  # (V, C)
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, x):
        logits = F.linear(x, self.head_weight).float()
        cap = self.config.softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def num_params(self):
        """-> (all, those that a token is multiplied with: the matrices of the blocks and the head)"""
        matmul = sum(p.numel() for p in self.blocks.parameters()) + self.head_weight.numel()
        return sum(p.numel() for p in self.parameters()), matmul

    def flops_per_token(self, T):
        """Training FLOPs per token, forward and backward: 6 per weight, and 12 L C T for attention (PaLM, appendix B)."""
        return 6 * self.num_params()[1] + 12 * self.config.n_layer * self.config.n_embd * T

    def param_groups(self, matrix_lr, embed_lr, head_lr, scalar_lr, weight_decay=0.0, matrices="muon", **options):
        """Groups for muon.Muon: block matrices to Muon (or to AdamW, at a rate for it), the rest to AdamW. Each parameter is in
        exactly one."""
        adamw_lr = matrix_lr * ADAMW_RATE * (self.config.n_embd / 768) ** -0.5
        adamw = dict(kind="adamw", lr=adamw_lr, betas=(0.9, 0.95), weight_decay=weight_decay)
        groups = {"matrix": dict(kind="muon", lr=matrix_lr, weight_decay=weight_decay, **options) if matrices == "muon" else adamw,
                  "embed": dict(kind="adamw", lr=embed_lr),
                  "head": dict(kind="adamw", lr=head_lr),
                  # At the first step the gradient of a scale in front of a norm is zero but for rounding. With AdamW's usual
                  # tiny eps that noise would become a full-size step, another one on every machine and number of ranks.
                  "scalar": dict(kind="adamw", lr=scalar_lr, betas=(0.9, 0.95), eps=1e-5)}
        for name, p in self.named_parameters():
            if p.ndim < 2:
                key = "scalar"
            else:
                key = "matrix" if name.startswith("blocks") else "head" if p is self.head_weight else "embed"
            groups[key].setdefault("names", []).append(name)
            groups[key].setdefault("params", []).append(p)
        groups = [{**g, "label": k} for k, g in groups.items() if "params" in g]
        assert sum(len(g["params"]) for g in groups) == len(list(self.parameters())), "each parameter is in one group"
        return groups


# --- the loss ----------------------------------------------------------------------------------------------------------------
# The logits are the largest thing in training: tokens x vocabulary, in several copies. So they never stand whole. A tile of them is
# computed, and turned at once into the gradient but for a factor of each row, its sum, which is only known when the row is through.
# That factor need not touch the tile again: (f * p) @ w = f * (p @ w), and (f * p).T @ x = p.T @ (f * x).
def tile_softmax(y, cap, zeros):
    """y: (R, K), a tile of logits / cap (of logits where cap is 0), used up; zeros: (R,).
    -> (exp(capped logit - top) * d(capped)/d(logit): (R, K), in y's place unless compiled; the sum of the exp: (R,); top: (R,))"""
    z, top, compiled = y.float(), zeros, torch.compiler.is_compiling()
    if cap and compiled:
        t = 2 * torch.sigmoid(2 * z) - 1  # tanh, of what compiled code is good at
        z = t * cap - zeros[:, None]  # without which it would go through the tile once more for the sum
    elif cap:
        t = z.tanh_()
        z = t * cap
    if not cap or y.dtype == torch.float16:  # in the others there is room for e^60 and e^-60
        top = z.amax(1)
        z = torch.sub(z, top[:, None], out=None if compiled else z)
    total = z.exp_().sum(1)
    if compiled:
        return (z * (1 - t * t) if cap else z).to(y.dtype), total, top
    return y.copy_(torch.ops.aten.tanh_backward.grad_input(z, t, grad_input=z) if cap else z), total, top


def tile_shape(N, V, device, compiled):
    """-> (rows, columns, rows to squash at a time): on a CPU what its caches like, elsewhere whole rows, as many as LOGITS_AT_ONCE
    allows."""
    if device.type == "cpu":
        rows = max(1, min(N, 2**26 // V))
        return rows, min(V, 2048), rows if compiled else 128
    rows = max(1, min(N, LOGITS_AT_ONCE // V))
    return rows, V, rows


class CrossEntropy(torch.autograd.Function):
    """Cross-entropy of softcap(x @ w.T) in nats, whose gradient is made in the forward pass: the logits are computed once and
    never all there. x: (N, C), w: (V, C), targets: (N,), -1 = not scored, weights: (N,) or None.
    -> the sum, or reduction="none", of which no gradient is taken: (N,)"""

    @staticmethod
    def forward(ctx, x, w, targets, weights, cap, reduction, squash):
        (N, C), V = x.shape, w.size(0)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows, cols, few = tile_shape(N, V, x.device, squash is not tile_softmax)
        x, whole, scored = (x / (cap or 1)).to(dtype), w.to(dtype), targets >= 0
        weights = scored.float() if weights is None else weights * scored
        need = reduction == "sum" and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])
        if need:
            gx, gw = torch.zeros(N, C, device=x.device), torch.zeros(V, C, device=x.device)
        lse = torch.empty(N, device=x.device)  # the log of the sum of a row's exp
        for r in (slice(a, a + rows) for a in range(0, N, rows)):
            tiles, sums, tops = [], [], []
            for part in whole.split(cols):
                tile = x[r] @ part.T  # (R, K)
                pull, total, top = zip(*(squash(y, cap, lse.new_zeros(len(y))) for y in tile.split(few)))
                tiles.append(None if not need else tile if len(pull) > 1 else pull[0])
                sums.append(torch.cat(total))
                tops.append(torch.cat(top))
            lse[r] = torch.stack([total.log() + top for total, top in zip(sums, tops)]).logsumexp(0)
            for i, part in enumerate(whole.split(cols) if need else ()):
                tile, tiles[i] = tiles[i], None
                factor = (weights[r] * (tops[i] - lse[r]).exp())[:, None]
                gx[r].addcmul_(tile @ part, factor)
                add_matmul(gw[i * cols : (i + 1) * cols], tile.T, (x[r] * factor).to(dtype))
        at = targets.clamp(min=0)
        aim = whole[at].float()  # (N, C), the row of w that each token should have found
        s = (x.float() * aim).sum(1)
        s = s.tanh() if cap else s
        nll = torch.where(scored, lse - s * (cap or 1), 0.0)
        if need:
            pull = (weights * (1 - s * s if cap else 1))[:, None]
            gx.addcmul_(aim, pull, value=-1)
            gw.index_add_(0, at, x * -pull)
            ctx.grads = gx, gw, cap or 1.0
        return nll if reduction == "none" else (nll * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gx, gw, cap = ctx.grads
        ctx.grads = None
        return gx.mul_(grad), gw.mul_(grad * cap), None, None, None, None, None


def add_matmul(out, a, b):
    """out += a @ b, in one pass where they are of one dtype"""
    return out.addmm_(a, b) if a.dtype == out.dtype else out.add_(a @ b)


# --- planning ------------------------------------------------------------------------------------------------------------------
def memory_plan(model, rows, dev):
    """Bytes that training with `rows` rows per pass holds on one device, by part, and "peak": the parts do not all stand at the
    same time. The factors are what an allocator was seen to hold (test_all.py compares): of a layer, 50 bytes per token and
    channel in fp32, 40 under autocast, and what its MLP keeps."""
    config, half, W = model.config, dev.dtype != torch.float32, dev.world_size
    L, C, V, T = config.n_layer, config.n_embd, config.vocab_size, config.max_seq_len
    (P, M), N = model.num_params(), rows * T
    layer = N * C * (50 if not half else 40 if dev.dtype == torch.bfloat16 else 44)  # fp16's norms are done in fp32
    layer += N * config.ffn_dim * (2 if half else 4) * (4 if config.mlp == "swiglu" else 2)
    if not dev.fused_attention:
        layer += N * config.n_head * T * (4 if half else 8)  # the scores and their softmax
    kept = L * (4 * C * N if model.activation_checkpointing else layer) + 12 * C * N + (2 * M if half else 0)
    tile = N * V if N * V <= LOGITS_AT_ONCE else max(V, LOGITS_AT_ONCE)
    parts = {"weights": 4 * P, "gradients": 4 * P, "optimizer": (4 * M + 8 * (P - M)) // W, "activations": kept,
             "loss": (10 if half else 8) * tile + (6 if half else 4) * V * C + 16 * C * N}
    # What the optimizer holds for one unit: all matrices of a shape, whole and gathered, and the iteration on this rank's share; or
    # one embedding.
    muon = 16 * C * C * L * ((1 if W == 1 else 2) + (5 if half else 7) / W)
    adamw = 4 * max(V, config.bigrams) * C * (2 if W == 1 else 2 + 2 / W)
    parts["optimizer's step"] = 4 * P // W + int(max(muon, adamw))
    backward = 4 * P + kept + max(parts["loss"], layer if model.activation_checkpointing else 0)  # in a step's second pass
    parts["peak"] = parts["weights"] + parts["optimizer"] + max(backward, parts["optimizer's step"])
    return parts


def rows_that_fit(model, dev, spare=0.1):
    """The most rows for one pass on this rank's device, by the memory model; at least 1. Of all ranks, the least."""
    there = 0 if dev.memory else 4 * model.num_params()[0]  # the weights are, unless the device is only planned
    free = dev.free_memory() * (1 - spare) + there
    rows = max(1, bisect.bisect_right(range(4096), free, key=lambda rows: memory_plan(model, rows, dev)["peak"]) - 1)
    each = [rows if rank == dev.rank else 0 for rank in range(dev.world_size)]
    return rows if dev.memory else int(min(dev.sum(each)))  # a planned device has no fellows to ask


def print_plan(model, dev, rows, total_batch_size, steps, mfu=0.4):
    """What a run would take: numbers, memory by part, hours."""
    T, (params, matmul) = model.config.max_seq_len, model.num_params()
    parts = memory_plan(model, rows, dev)
    peak_memory = parts.pop("peak")
    flops, peak = model.flops_per_token(T) * total_batch_size * steps, dev.peak_flops()
    share = 0.6 if dev.type == "cpu" else mfu  # of a peak that was measured, not of a data sheet's
    hours = peak and flops / (peak * share * dev.world_size) / 3600
    for name, value in [
        ("device", f"{dev.world_size} x {dev.name}, {str(dev.dtype)[6:]}"),
        ("parameters", f"{human(params)} ({human(matmul)} in matmuls)"),
        ("training", f"{steps} steps of {human(total_batch_size)} tokens = {human(total_batch_size * steps)} tokens"),
        ("FLOPs", f"{human(flops)} ({human(model.flops_per_token(T))} a token)"),
        ("rows at a time", f"{rows} of {T} tokens per device"),
        *((f"  {part}", f"{size / 2**30:8.2f} GiB") for part, size in parts.items()),
        ("memory at its peak", f"{peak_memory / 2**30:8.2f} of {dev.memory / 2**30:.1f} GiB per device"),
        ("time", f"{hours:.1f} hours at {share:.0%} of {human(peak)}FLOP/s, which is usual; --bench=20 measures yours" if hours
         else f"not known: no peak FLOP/s for {dev.name} in {str(dev.dtype)[6:]}"),
    ]:
        print0(f"{name:<19} {value}")
    if peak_memory > dev.memory:
        warn("this does not fit: take --activation_checkpointing=1, a smaller --depth or --max_seq_len, or another device")


def load_model(meta, weights, dev):
    """A GPT from a checkpoint's meta and its model.pt."""
    return GPT.build(GPTConfig(**meta["model"]), dev.device, weights)


def to_transformers(model):
    """-> (the class of transformers that computes the same, its config as a dict, its weights). --preset=classic: NanoChat, qwen3:
    Qwen3. What neither has ends with a sentence."""
    c, weights = model.config, {}
    plain = c.qk_norm and not (c.value_embeds or c.layer_lambdas or c.window or c.tied or c.bigrams)
    kind = {("relu2", True): "NanoChat", ("swiglu", False): "Qwen3"}.get((c.mlp, c.softcap > 0))
    if not (kind and plain):
        fail("transformers has no model like this one: only those of --preset=classic and --preset=qwen3 can be exported to it")
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"up": "mlp.fc1", "down": "mlp.fc2"} if kind == "NanoChat" else {
        "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    for i, block in enumerate(model.blocks):
        for ours, theirs in names.items():
            w = getattr(block, ours).weight.detach()
            if kind == "NanoChat" and ours in "qk":  # it rotates the other way round: the halves of each head change places
                w = w.view(-1, 2, c.head_dim // 2, c.n_embd).flip(1).reshape(w.shape)
            weights[f"model.layers.{i}.{theirs}.weight"] = w.clone()
        if kind == "Qwen3":  # its norms have weights
            for name, size in (("input_layernorm", c.n_embd), ("post_attention_layernorm", c.n_embd),
                               ("self_attn.q_norm", c.head_dim), ("self_attn.k_norm", c.head_dim)):
                weights[f"model.layers.{i}.{name}.weight"] = torch.ones(size)
    embed = model.embed.weight.detach()  # Qwen3 does not normalise what it looks up
    weights["model.embed_tokens.weight"] = norm(embed) if kind == "Qwen3" else embed.clone()
    weights["lm_head.weight"] = model.head_weight.detach().clone()
    config = dict(vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layer,
                  num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, max_position_embeddings=c.max_seq_len,
                  rms_norm_eps=torch.finfo(torch.float32).eps, tie_word_embeddings=False, rope_theta=c.rope_base,
                  rope_parameters={"rope_type": "default", "rope_theta": c.rope_base})
    if kind == "Qwen3":
        config["head_dim"], weights["model.norm.weight"] = c.head_dim, torch.ones(c.n_embd)
    else:
        config["final_logit_softcapping"] = c.softcap
    return f"{kind}ForCausalLM", config, weights


def model_meta(model):
    """What meta.json needs to build the model again."""
    return asdict(model.config)


# --- generation ------------------------------------------------------------------------------------------------------
class KVCache:
    """Keys and values of all layers for a batch of rows, each row at its own length. Allocated once."""

    def __init__(self, config, rows, max_len, device, dtype):
        shape = (config.n_layer, rows, config.n_kv_head, max_len, config.head_dim)
        self.k, self.v = (torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)  # (B,)
        self.newest = torch.zeros(rows, dtype=torch.long, device=device)  # (B,) the last token of each
        self.idx = None  # the tokens just given
        self.longest = 0  # max(lengths), known without asking the device

    def open(self, T, window=0):
        """Positions (B, T) of the T tokens to come, and {how far back a layer looks: mask (B, 1, T, S) of the keys each may look
        at}. A row that has ended but is still in the batch may stand at the edge: it stays there."""
        size = self.k.size(3)
        self.pos = (self.lengths[:, None] + torch.arange(T, device=self.lengths.device)).clamp_(max=size - 1)
        self.end = min(self.longest + T, size)
        if self.longest == 0:
            return self.pos, {0: None}  # nothing before: as without a cache
        seen, at = torch.arange(self.end, device=self.pos.device), self.pos[:, None, :, None]
        masks = {0: seen <= at}
        return self.pos, masks | ({window: masks[0] & (at - seen <= window)} if window else {})

    def append(self, layer, k, v):
        """Store k, v: (B, Hkv, T, D) at the open positions; -> all keys and values so far, (B, Hkv, S, D)."""
        rows = torch.arange(k.size(0), device=k.device)[:, None]
        for store, new in ((self.k, k), (self.v, v)):
            store[layer][rows, :, self.pos] = new.transpose(1, 2).to(store.dtype)
        return self.k[layer][:, :, : self.end], self.v[layer][:, :, : self.end]

    def before(self, idx):
        """The token before each of idx: (B, T)."""
        self.idx = idx
        return torch.cat([self.newest[:, None], idx[:, :-1]], 1)

    def advance(self, lengths):
        """lengths: list, how many of the tokens just given count for each row (padding on the right does not)."""
        count = torch.tensor(lengths, device=self.lengths.device)
        self.lengths += count
        if self.idx is not None:
            self.newest = self.idx.gather(1, count[:, None] - 1)[:, 0]
        self.longest = min(self.longest + max(lengths), self.k.size(3))

    def select(self, rows):
        """Keep these rows (a list, repeats allowed), in this order."""
        rows = torch.tensor(rows, device=self.lengths.device)
        self.k, self.v, self.lengths, self.newest = self.k[:, rows], self.v[:, rows], self.lengths[rows], self.newest[rows]


def sample_tokens(logits, temperature, top_k, u):
    """logits: (B, V) -> (B,). temperature 0: the best token. u: (B,) numbers in (0, 1] that decide: the first token at which the
    summed probabilities reach u. A row's token depends on its own u alone, whatever runs beside it."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if 0 < top_k < logits.size(-1):
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    reached = logits.softmax(-1).cumsum(-1)  # (B, V), ends near 1
    return (reached < u[:, None] * reached[:, -1:]).sum(-1)


class Row:
    """One sequence being generated: its tokens, which of them were sampled, and the tool's state."""

    def __init__(self, index, limit):
        self.index, self.limit = index, limit
        self.tokens, self.mask = [], []  # mask 1: sampled by the model, 0: forced by the tool
        self.forced, self.expr, self.done = deque(), None, limit <= 0

    def push(self, sampled, tok):
        """Take one more token: the next forced one, else the sampled one. A closed tool call is answered at once."""
        self.mask.append(0 if self.forced else 1)
        token = self.forced.popleft() if self.forced else sampled
        self.tokens.append(token)
        if token == tok.python_start:
            self.expr = []
        elif token == tok.python_end and self.expr is not None:
            result = calculator(tok.decode(self.expr))
            if result is not None:
                self.forced.extend([tok.output_start, *tok.encode(result), tok.output_end])
            self.expr = None
        elif self.expr is not None:
            self.expr.append(token)
        self.done = token in (tok.assistant_end, tok.bos) or len(self.tokens) >= self.limit
        return token


@torch.inference_mode()
def generate(model, tok, prompts, dev, num_samples=1, max_new_tokens=256, temperature=1.0, top_k=0, seed=0):
    """Continue a batch of prompts (lists of token ids, any lengths), `num_samples` times each, all side by side.

    A generator: each step yields [(row, token, sampled)] for the rows still running; row = prompt * num_samples + sample.
    A row ends with <|assistant_end|> or <|bos|>, after max_new_tokens, or where the context is full. Finished rows leave
    the batch. seed: a number, or one for each prompt; each row draws from a stream of its own, so that what it samples does not
    depend on its neighbours, the device or the number of ranks.
    """
    limit = model.config.max_seq_len
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    assert 0 < shortest and longest <= limit, f"prompts of {shortest} to {longest} tokens, context {limit}"
    seeds = seed if isinstance(seed, list) else [[seed, i] for i in range(len(prompts))]
    cache = KVCache(model.config, len(prompts), min(limit, longest + max_new_tokens), dev.device, dev.dtype)
    padded = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=dev.device)  # on the right: never looked at
    lengths = [len(p) for p in prompts]
    with dev.autocast():
        logits = model(padded, cache=cache, at=(list(range(len(prompts))), [n - 1 for n in lengths]))  # (prompts, V)
    cache.advance(lengths)
    rows = [Row(i, min(max_new_tokens, limit - lengths[i // num_samples])) for i in range(len(prompts) * num_samples)]
    chosen = [i // num_samples for i in range(len(rows))]  # one prefill serves all samples of a prompt
    draws = torch.tensor(np.stack([1 - np.random.default_rng([*seeds[i // num_samples], i % num_samples]).random(max_new_tokens)
                                   for i in range(len(rows))]), dtype=torch.float32, device=dev.device)  # (rows, new tokens)
    for turn in itertools.count():
        running = [r for r in range(len(rows)) if not rows[r].done]
        if not running:
            return
        if chosen is not None or len(running) <= 0.75 * len(rows):
            chosen = running if chosen is None else [chosen[r] for r in running]
            cache.select(chosen)
            logits = logits[torch.tensor(chosen, device=logits.device)]
            draws = draws[torch.tensor(running, device=draws.device)]
            rows = [rows[r] for r in running]
            running, chosen = range(len(rows)), None
        sampled = sample_tokens(logits, temperature, top_k, draws[:, turn]).tolist()  # the one host sync of a step
        events = []
        for r in running:
            token = rows[r].push(sampled[r], tok)
            events.append((rows[r].index, token, rows[r].mask[-1]))
            sampled[r] = token
        yield events
        if all(row.done for row in rows):
            return
        step = torch.tensor(sampled, device=dev.device)[:, None]
        with dev.autocast():
            logits = model(step, cache=cache)[:, 0]
        cache.advance([1] * len(rows))


def complete(model, tok, prompts, dev, **options):
    """generate(), gathered: -> for each prompt, a list over samples of (tokens, mask)."""
    n = options.get("num_samples", 1)
    out = [([], []) for _ in range(len(prompts) * n)]
    for events in generate(model, tok, prompts, dev, **options):
        for row, token, sampled in events:
            out[row][0].append(token)
            out[row][1].append(sampled)
    return [out[i : i + n] for i in range(0, len(out), n)]


# --- the calculator --------------------------------------------------------------------------------------------------
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos}


def calculator(text):
    """Arithmetic, and 'word'.count('r'), by a walk over the syntax tree: never eval. -> the result as text, or None.

    >>> calculator("17 + 25"), calculator("'strawberry'.count('r')"), calculator("__import__('os')")
    ('42', '3', None)
    """
    def walk(node):
        match node:
            case ast.Constant(value=int() | float() | str() as value) if not isinstance(value, bool):
                return value
            case ast.UnaryOp(op=op, operand=a) if type(op) in OPERATORS:
                return OPERATORS[type(op)](number(walk(a)))
            case ast.BinOp(left=a, op=op, right=b) if type(op) in OPERATORS:
                return number(OPERATORS[type(op)](number(walk(a)), number(walk(b))))
            case ast.Call(func=ast.Attribute(value=a, attr="count"), args=[b], keywords=[]):
                a, b = walk(a), walk(b)
                if isinstance(a, str) and isinstance(b, str):
                    return a.count(b)
        raise ValueError("not arithmetic")

    def number(value):
        if isinstance(value, str) or abs(value) > 1e15:
            raise ValueError("not a number of sensible size")
        return value

    bare = re.sub(r"'[^'\\]*'|\"[^\"\\]*\"", "", text)  # without its string literals
    if len(text) > 200 or not re.fullmatch(r"(?:[\d\s.,+\-*/%()]|\.count(?=\())*", bare):
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 1,234
    try:
        value = walk(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ArithmeticError, TypeError, RecursionError, MemoryError):
        return None
    if isinstance(value, str):
        return None
    if isinstance(value, float):
        value = int(value) if value == int(value) else round(value, 10)
    return str(value)

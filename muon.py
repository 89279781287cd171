"""
How does a gradient become a step? Muon for the matrices, AdamW for the rest, in one optimizer, on one rank or many.

Muon (Jordan et al. 2024) takes the momentum of a weight matrix and replaces it by the nearest orthogonal matrix, so that
every direction of the matrix learns at the same speed. Adam does the same for every single number. Embeddings, the head
and scalars are not maps between hidden states, so they get AdamW.

Over W ranks, each rank owns a part of every parameter's state (as ZeRO-2 does): whole matrices for Muon, a slice of the
flat tensor for AdamW. A step is: sum the gradients of the part I own, update it, gather everybody's parts.

    opt = Muon(groups, dev)                  # groups: dicts with kind="muon" or "adamw", names, params, lr, ...
    (loss * opt.loss_scale).backward()       # 1 but in fp16
    grad_norm, loss = opt.step(loss)         # nan or inf: nothing was changed, on any rank
"""
import math

import torch
import torch.distributed as dist

from common import Watchdog, auto, fail, warn

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the new names and the old ones
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DEFAULTS = {"muon": dict(momentum=0.95, weight_decay=0.0, ns_steps=5),
            "adamw": dict(betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)}


def orthogonalize(g, steps=5, dtype=torch.float32):
    """The orthogonal polar factor of each matrix of a stack, roughly: singular values end between 0.7 and 1.2.

    g: (K, m, n). Newton-Schulz iteration with the quintic coefficients of Jordan et al. 2024: it needs matmuls only.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(dtype)
    if tall := x.size(-2) > x.size(-1):
        x = x.mT  # work on the smaller Gram matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # singular values at most 1, where the iteration converges
    for _ in range(steps):
        gram = x @ x.mT  # (K, m, m)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


def iteration_dtype(dev):
    """Newton-Schulz is done in bf16 where the device computes in it, else in fp32: fp16's range is too small."""
    return torch.bfloat16 if dev.dtype == torch.bfloat16 else torch.float32


def choose_optimizer(wanted, dev):
    """-> "muon" or "adamw" for the matrices. auto: Muon if one of its steps on this device comes out right on every rank."""
    if wanted not in ("auto", "muon", "adamw"):
        fail(f"--optimizer={wanted} is not one of auto, muon, adamw")
    if wanted != "auto":
        return wanted
    why = ""
    try:
        g = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(0)).to(dev.device)
        values = torch.linalg.svdvals(orthogonalize(g, dtype=iteration_dtype(dev)).float().cpu())
        if not 0.5 < values.min() <= values.max() < 1.5:
            why = f"singular values from {values.min():.2f} to {values.max():.2f} instead of about 1"
    except RuntimeError as e:  # an operator that the device does not have
        why = str(e).splitlines()[0]
    if dev.sum(int(bool(why))):
        warn(f"Muon does not work on this device ({why or 'on another rank'}): its matrices are trained with AdamW")
        return "adamw"
    return "muon"


class Muon:
    """See the file's docstring. Gradients are summed over ranks, so the loss must already be divided by the whole step's
    number of tokens. `param_groups` holds the groups; a schedule changes group["lr"], group["initial_lr"] stays.

    In fp16 small gradients would vanish: the loss is multiplied by `loss_scale` before the backward pass, and the step divides
    by it. It is halved when something overflowed and doubled after 2000 good steps (Micikevicius et al. 2018)."""

    def __init__(self, groups, dev):
        self.dev, self.rank, self.world = dev, dev.rank, dev.world_size
        self.ns_dtype = iteration_dtype(dev)
        self.loss_scale, self.good_steps = (2.0**16 if dev.dtype == torch.float16 else 1.0), 0
        self.param_groups, seen = [], set()
        for group in groups:
            group = {**DEFAULTS[group["kind"]], **group, "initial_lr": group["lr"]}
            self.param_groups.append(group)
            for name, p in zip(group["names"], group["params"], strict=True):
                assert p not in seen, f"{name} is in two groups"
                assert group["kind"] == "adamw" or p.ndim == 2, f"Muon takes matrices, {name} has shape {tuple(p.shape)}"
                seen.add(p)
        self.units = [unit for group in self.param_groups for unit in self._make_units(group)]

    def _make_units(self, group):
        """A unit is what one collective moves: all matrices of one shape (Muon), or one tensor (AdamW)."""
        named = list(zip(group["names"], group["params"]))
        if group["kind"] == "adamw":
            return [dict(group=group, named=[(name, p)], count=p.numel(), shape=(), step=0) for name, p in named]
        by_shape = {}
        for name, p in named:
            by_shape.setdefault(tuple(p.shape), []).append((name, p))
        return [dict(group=group, named=pairs, count=len(pairs), shape=shape, step=0) for shape, pairs in by_shape.items()]

    # A unit is laid out as (count, *shape): K matrices, or N numbers. Each rank owns `share` consecutive items of it;
    # the last ranks own padding when the count does not divide.
    def _share(self, unit):
        return -(-unit["count"] // self.world)

    def _pack(self, unit, tensors):
        """Tensors of a unit, one per parameter, as (share * W, *shape), zero padded."""
        flat = torch.stack(tensors) if unit["shape"] else tensors[0].reshape(-1)
        missing = self._share(unit) * self.world - unit["count"]
        return torch.cat([flat, flat.new_zeros(missing, *unit["shape"])]) if missing else flat

    def _own(self, unit, whole):
        share = self._share(unit)
        return whole[self.rank * share : (self.rank + 1) * share]

    def _reduce(self, unit, whole):
        """Sum over ranks of the part this rank owns."""
        if self.world == 1:
            return whole
        if dist.get_backend() == "gloo":  # has no reduce_scatter in older versions
            return self._own(unit, self.dev.sum(whole))
        own = torch.empty_like(self._own(unit, whole))
        with Watchdog.waiting():
            reduce_scatter(own, whole.contiguous())
        return own

    def _gather(self, unit, own):
        """Everybody's parts, padding cut: (count, *shape)."""
        if self.world == 1:
            return own
        whole = own.new_empty(self._share(unit) * self.world, *unit["shape"])
        with Watchdog.waiting():
            all_gather(whole, own.contiguous())
        return whole[: unit["count"]]

    @torch.no_grad()
    def step(self, loss):
        """One update of all parameters; uses the gradients up. loss: this rank's part of it, a tensor.

        -> (the gradient's norm over all parameters and ranks, before any change; the loss of all ranks). Where either is not
        finite or fp16 overflowed, the norm is nan or inf and no rank changes anything."""
        overflow = self.dev.overflowed()
        idle = all(p.grad is None for g in self.param_groups for p in g["params"])  # a rank that had no rows
        grads = []
        for unit in self.units:
            for name, p in unit["named"]:
                assert idle or p.grad is not None, f"{name} got no gradient"
            whole = self._pack(unit, [torch.zeros_like(p) if idle else p.grad for _, p in unit["named"]])
            for _, p in unit["named"]:
                p.grad = None  # one copy of the gradients is enough
            grads.append(self._reduce(unit, whole))
        squares = torch.stack([g.float().square().sum() for g in grads]).sum() / self.loss_scale**2
        with Watchdog.waiting():  # a device's ranks meet here and not where they launched the sums
            squares, loss, overflow = self.dev.sum(torch.stack([squares, loss.float(), squares.new_tensor(overflow)])).tolist()
        finite = math.isfinite(squares) and math.isfinite(loss) and not overflow  # every rank sees the same sums
        scale = self.loss_scale
        self._rescale(finite)
        if not finite:
            return math.nan if math.isnan(squares + loss) else math.inf, loss
        for unit in self.units:
            grad = grads.pop(0).float()  # so that it is freed when it is used up
            weight = self._pack(unit, [p.data for _, p in unit["named"]])
            own = self._own(unit, weight)
            unit["step"] += 1
            {"muon": self._muon, "adamw": self._adamw}[unit["group"]["kind"]](unit, own, grad if scale == 1 else grad / scale)
            self._scatter(unit, self._gather(unit, own))
        return math.sqrt(squares), loss

    def _rescale(self, finite):
        if self.dev.dtype != torch.float16:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite and self.loss_scale > 1:
            self.loss_scale /= 2
        elif self.good_steps == 2000:
            self.loss_scale, self.good_steps = self.loss_scale * 2, 0

    def _scatter(self, unit, whole):
        """Write a unit's (count, *shape) back into its parameters."""
        for i, (_, p) in enumerate(unit["named"]):
            new = whole[i] if unit["shape"] else whole.view_as(p)
            if new.data_ptr() != p.data_ptr():
                p.copy_(new)

    def _muon(self, unit, w, g):
        group = unit["group"]
        if "momentum" not in unit:
            unit["momentum"] = torch.zeros_like(g)
        buf = unit["momentum"].lerp_(g, 1 - group["momentum"])
        update = orthogonalize(g.lerp(buf, group["momentum"]), group["ns_steps"], self.ns_dtype)  # Nesterov
        rows, cols = unit["shape"]
        lr = group["lr"] * max(1, rows / cols) ** 0.5
        if group["weight_decay"]:  # cautious: decay only where the update already points to zero
            w.sub_(w * (update * w > 0), alpha=group["lr"] * group["weight_decay"])
        w.sub_(update, alpha=lr)

    def _adamw(self, unit, w, g):
        group, (b1, b2) = unit["group"], unit["group"]["betas"]
        if "exp_avg" not in unit:
            unit["exp_avg"], unit["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
        unit["exp_avg"].lerp_(g, 1 - b1)
        unit["exp_avg_sq"].lerp_(g.square(), 1 - b2)
        denom = (unit["exp_avg_sq"] / (1 - b2 ** unit["step"])).sqrt_().add_(group["eps"])
        w.mul_(1 - group["lr"] * group["weight_decay"])
        w.addcdiv_(unit["exp_avg"], denom, value=-group["lr"] / (1 - b1 ** unit["step"]))

    def zero_grad(self):
        self.dev.overflowed()  # forget what overflowed before, in an evaluation say
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    # --- state, whole: any world size can load what any other has saved ---
    def state_dict(self):
        """{parameter name: {"step", "momentum" | "exp_avg", "exp_avg_sq"}, "": the loss scale} on the CPU. All ranks call it
        together; rank 0 gets it."""
        out = {"": {"loss_scale": self.loss_scale, "good_steps": self.good_steps}} if self.dev.dtype == torch.float16 else {}
        for unit in self.units:
            for key in ("momentum", "exp_avg", "exp_avg_sq"):
                if key in unit:
                    whole = self._gather(unit, unit[key])
                    if not self.dev.is_main:
                        continue
                    whole = whole.cpu()
                    for i, (name, p) in enumerate(unit["named"]):
                        piece = whole[i] if unit["shape"] else whole.view_as(p)
                        out.setdefault(name, {"step": unit["step"]})[key] = piece.clone()
        return out

    def load_state_dict(self, state):
        """Takes what state_dict gave, under any world size. Parameters it does not name start fresh, as do those that it knows
        from the other kind of optimizer."""
        if self.dev.dtype == torch.float16 and "" in state:
            self.loss_scale, self.good_steps = state[""]["loss_scale"], state[""]["good_steps"]
        fresh = []
        for unit in self.units:
            saved = [state.get(name) for name, _ in unit["named"]]
            if any(s is None or ("momentum" in s) != (unit["group"]["kind"] == "muon") for s in saved):
                fresh += [name for name, _ in unit["named"]]
                continue
            unit["step"] = saved[0]["step"]
            for key in saved[0].keys() - {"step"}:
                whole = self._pack(unit, [s[key].to(self.dev.device) for s in saved])
                unit[key] = self._own(unit, whole).clone()
        if fresh:
            auto(f"{len(fresh)} parameters start with a fresh optimizer state: {', '.join(fresh[:3])}{' ...' * (len(fresh) > 3)}")

"""
How does a gradient become a step? Muon for the matrices, AdamW for the rest, in one optimizer, on one rank or many.

Muon (Jordan et al. 2024) takes the momentum of a weight matrix and replaces it by the nearest orthogonal matrix, so that
every direction of the matrix learns at the same speed. Adam does the same for every single number. Embeddings, the head
and scalars are not maps between hidden states, so they get AdamW.

Over W ranks, each rank owns a part of every parameter's state (as ZeRO-2 does): whole matrices for Muon, a slice of the
flat tensor for AdamW. A step is: sum the gradients of the part I own, update it, gather everybody's parts. While one part is
on its way, the next is made ready.

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

DEFAULTS = {"muon": dict(momentum=0.95, weight_decay=0.0, polar_express=True, normuon=False),
            "adamw": dict(betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)}
# Each step maps all singular values s to a s + b s^3 + c s^5.
NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5  # Jordan et al. 2024
POLAR_EXPRESS = [(8.156554524902461, -22.48329292557795, 15.878769915207462),  # Amsel et al. 2025: the best polynomial for where
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),  # the values can be by then
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]


def orthogonalize(g, coefficients=POLAR_EXPRESS, dtype=torch.float32):
    """The orthogonal polar factor of each matrix of a stack, roughly (singular values near 1), by matmuls only. g: (K, m, n)"""
    x = g.to(dtype)
    if tall := x.size(-2) > x.size(-1):
        x = x.mT  # work on the smaller Gram matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)  # singular values below 1, where the iteration converges
    for a, b, c in coefficients:
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
        self.param_groups, self.norms, self.measure, seen = [], {}, False, set()
        for group in groups:
            group = {**DEFAULTS[group["kind"]], **group, "initial_lr": group["lr"]}
            self.param_groups.append(group)
            for name, p in zip(group["names"], group["params"], strict=True):
                assert p not in seen, f"{name} is in two groups"
                assert group["kind"] == "adamw" or p.ndim == 2, f"Muon takes matrices, {name} has shape {tuple(p.shape)}"
                seen.add(p)
        self.units = [unit for i, group in enumerate(self.param_groups) for unit in self._make_units(i, group)]

    def _make_units(self, index, group):
        """A unit is what one collective moves: all matrices of one shape (Muon), or one tensor (AdamW)."""
        named = list(zip(group["names"], group["params"]))
        if group["kind"] == "adamw":
            return [dict(group=group, index=index, named=[(name, p)], count=p.numel(), shape=(), step=0) for name, p in named]
        by_shape = {}
        for name, p in named:
            by_shape.setdefault(tuple(p.shape), []).append((name, p))
        return [dict(group=group, index=index, named=pairs, count=len(pairs), shape=shape, step=0)
                for shape, pairs in by_shape.items()]

    # A unit is laid out as (count, *shape): K matrices, or N numbers. Each rank owns `share` consecutive items of it;
    # the last ranks own padding when the count does not divide.
    def _share(self, unit):
        return -(-unit["count"] // self.world)

    def _pack(self, unit, tensors):
        """Tensors of a unit, one per parameter, as (share * W, *shape), zero padded."""
        flat = torch.stack(tensors) if unit["shape"] else tensors[0].reshape(-1)
        missing = self._share(unit) * self.world - unit["count"]
        return torch.cat([flat, flat.new_zeros(missing, *flat.shape[1:])]) if missing else flat

    def _own(self, unit, whole):
        share = self._share(unit)
        return whole[self.rank * share : (self.rank + 1) * share]

    def _reduce(self, unit, whole):
        """Begin to sum over ranks the part that this rank owns. -> (the part, what to wait for)"""
        if self.world == 1:
            return whole, None
        if dist.get_backend() == "gloo":  # has no reduce_scatter in older versions
            return self._own(unit, whole), dist.all_reduce(whole, async_op=True)
        own = torch.empty_like(self._own(unit, whole))
        return own, reduce_scatter(own, whole.contiguous(), async_op=True)

    def _gather(self, unit, own):
        """Begin to gather everybody's parts. -> ((count, *shape), what to wait for)"""
        if self.world == 1:
            return own, None
        whole = own.new_empty(self._share(unit) * self.world, *own.shape[1:])
        return whole[: unit["count"]], all_gather(whole, own.contiguous(), async_op=True)

    def _wait(self, work):
        if work is not None:
            before = self.dev.part("communication")
            with Watchdog.waiting():
                work.wait()
            self.dev.part(before)

    @torch.no_grad()
    def step(self, loss):
        """One update of all parameters; uses the gradients up. loss: this rank's part of it, a tensor.

        -> (the gradient's norm over all parameters and ranks, before any change; the loss of all ranks). Where either is not
        finite or fp16 overflowed, the norm is nan or inf and no rank changes anything. `norms` then holds the norm of each group's
        gradient, and of the change that the step before made where `measure` was set for it."""
        overflow = self.dev.overflowed()
        idle = all(p.grad is None for g in self.param_groups for p in g["params"])  # a rank that had no rows
        begun = []
        for unit in self.units:
            for name, p in unit["named"]:
                assert idle or p.grad is not None, f"{name} got no gradient"
            whole = self._pack(unit, [torch.zeros_like(p) if idle else p.grad for _, p in unit["named"]])
            for _, p in unit["named"]:
                p.grad = None  # one copy of the gradients is enough
            begun.append(self._reduce(unit, whole))
        grads, squares = [], torch.zeros(2, len(self.param_groups), device=self.dev.device)
        for unit, (grad, work) in zip(self.units, begun):
            self._wait(work)
            squares[0, unit["index"]] += torch.linalg.vector_norm(grad, dtype=torch.float32).square()
            if "moved" in unit:
                squares[1, unit["index"]] += unit.pop("moved")
            grads.append(grad)
        del begun
        numbers = torch.cat([squares.flatten(), torch.stack([loss.float(), loss.new_tensor(overflow, dtype=torch.float32)])])
        before = self.dev.part("communication")  # where a device's ranks meet, and the one time a step waits for its device
        *squares, loss, overflow = self.dev.sum(numbers).tolist()
        self.dev.part(before)
        scale, n = self.loss_scale, len(self.param_groups)
        total = sum(squares[:n]) / scale**2
        finite = math.isfinite(total) and math.isfinite(loss) and not overflow  # every rank sees the same sums
        self._rescale(finite)
        if not finite:
            return math.nan if math.isnan(total + loss) else math.inf, loss
        self.norms = {}
        for i, group in enumerate(self.param_groups):
            label = group.get("label", group["kind"])
            self.norms[f"grad_{label}"] = math.sqrt(squares[i]) / scale
            if squares[n + i]:
                self.norms[f"update_{label}"] = math.sqrt(squares[n + i])
        on_its_way = []
        for unit in self.units:
            grad = grads.pop(0).float()  # so that it is freed when it is used up
            own = self._own(unit, self._pack(unit, [p.data for _, p in unit["named"]]))
            unit["step"] += 1
            update = {"muon": self._muon, "adamw": self._adamw}[unit["group"]["kind"]]
            old = own.clone() if self.measure else None
            update(unit, own, grad if scale == 1 else grad / scale)
            if self.measure:
                unit["moved"] = torch.linalg.vector_norm(own - old).square()
            on_its_way.append((unit, *self._gather(unit, own)))
            if len(on_its_way) > 1:
                self._arrive(*on_its_way.pop(0))
        for arrival in on_its_way:
            self._arrive(*arrival)
        return math.sqrt(total), loss

    def _rescale(self, finite):
        if self.dev.dtype != torch.float16:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite and self.loss_scale > 1:
            self.loss_scale /= 2
        elif self.good_steps == 2000:
            self.loss_scale, self.good_steps = self.loss_scale * 2, 0

    def _arrive(self, unit, whole, work):
        """Write a unit's gathered (count, *shape) back into its parameters."""
        self._wait(work)
        for i, (_, p) in enumerate(unit["named"]):
            new = whole[i] if unit["shape"] else whole.view_as(p)
            if new.data_ptr() != p.data_ptr():
                p.copy_(new)

    def _muon(self, unit, w, g):
        group = unit["group"]
        if "momentum" not in unit:
            unit["momentum"] = torch.zeros_like(g)
        buf = unit["momentum"].lerp_(g, 1 - group["momentum"])
        coefficients = POLAR_EXPRESS if group["polar_express"] else NEWTON_SCHULZ
        update = orthogonalize(g.lerp(buf, group["momentum"]), coefficients, self.ns_dtype)  # Nesterov
        rows, cols = unit["shape"]
        if group["normuon"]:
            update = self._even_out(unit, update, -1 if rows >= cols else -2)
        lr = group["lr"] * max(1, rows / cols) ** 0.5
        if group["weight_decay"]:  # cautious: decay only where the update already points to zero
            w.sub_(w * (update * w > 0), alpha=group["lr"] * group["weight_decay"])
        w.sub_(update, alpha=lr)

    def _even_out(self, unit, update, dim):
        """NorMuon (Li et al. 2025): rows of the update that are larger than others for long are made as small, and the whole is
        brought back to its norm."""
        mean = update.square().mean(dim, keepdim=True)
        if "second" not in unit:
            unit["second"] = torch.zeros_like(mean)
        second = unit["second"].lerp_(mean, 0.05) / (1 - 0.95 ** unit["step"])
        even = update * (second + 1e-10).rsqrt()
        norms = [u.square().sum((-2, -1), keepdim=True).sqrt() for u in (update, even)]
        return even * (norms[0] / (norms[1] + 1e-10))

    def _adamw(self, unit, w, g):
        group, (b1, b2) = unit["group"], unit["group"]["betas"]
        if "exp_avg" not in unit:
            unit["exp_avg"], unit["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
        mean, square, lr, decay = unit["exp_avg"], unit["exp_avg_sq"], group["lr"], group["weight_decay"]
        if self.dev.fused_adamw:  # one pass instead of ten
            steps = torch.tensor(float(unit["step"]), device=w.device)
            return torch._fused_adamw_([w], [g], [mean], [square], [], [steps], lr=lr, beta1=b1, beta2=b2, weight_decay=decay,
                                       eps=group["eps"], amsgrad=False, maximize=False)
        mean.lerp_(g, 1 - b1)
        square.mul_(b2).addcmul_(g, g, value=1 - b2)
        denom = (square / (1 - b2 ** unit["step"])).sqrt_().add_(group["eps"])
        if decay:
            w.mul_(1 - lr * decay)
        w.addcdiv_(mean, denom, value=-lr / (1 - b1 ** unit["step"]))

    def zero_grad(self):
        self.dev.overflowed()  # forget what overflowed before, in an evaluation say
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    # --- state, whole: any world size can load what any other has saved ---
    def state_dict(self):
        """{parameter name: {"step", "momentum" (and NorMuon's "second") | "exp_avg", "exp_avg_sq"}, "": the loss scale} on the CPU.
        All ranks call it together; rank 0 gets it."""
        out = {"": {"loss_scale": self.loss_scale, "good_steps": self.good_steps}} if self.dev.dtype == torch.float16 else {}
        for unit in self.units:
            for key in ("momentum", "second", "exp_avg", "exp_avg_sq"):
                if key in unit:
                    whole, work = self._gather(unit, unit[key])
                    self._wait(work)
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

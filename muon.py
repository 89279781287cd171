"""
How does a gradient become a step? Muon for the matrices, AdamW for the rest, in one optimizer, on one rank or many.

Muon (Jordan et al. 2024) takes the momentum of a weight matrix and replaces it by the nearest orthogonal matrix, so that
every direction of the matrix learns at the same speed. Adam does the same for every single number. Embeddings, the head
and scalars are not maps between hidden states, so they get AdamW.

Over W ranks, each rank owns a part of every parameter's state (as ZeRO-2 does): whole matrices for Muon, a slice of the
flat tensor for AdamW. A step is: sum the gradients of the part I own, update it, gather everybody's parts.

    optimizer = Muon(groups, dev)     # groups: dicts with kind="muon" or "adamw", names, params, lr, ...
    grad_norm = optimizer.step()      # nan or inf: nothing was changed, on any rank
"""
import torch
import torch.distributed as dist

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


class Muon:
    """See the file's docstring. Gradients are summed over ranks, so the loss must already be divided by the whole step's
    number of tokens. `param_groups` holds the groups; a schedule changes group["lr"], group["initial_lr"] stays."""

    def __init__(self, groups, dev):
        self.dev, self.rank, self.world = dev, dev.rank, dev.world_size
        self.ns_dtype = torch.bfloat16 if dev.dtype == torch.bfloat16 else torch.float32  # fp16's range is too small
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
            dist.all_reduce(whole)
            return self._own(unit, whole)
        own = torch.empty_like(self._own(unit, whole))
        dist.reduce_scatter_tensor(own, whole.contiguous())
        return own

    def _gather(self, unit, own):
        """Everybody's parts, padding cut: (count, *shape)."""
        if self.world == 1:
            return own
        whole = own.new_empty(self._share(unit) * self.world, *unit["shape"])
        dist.all_gather_into_tensor(whole, own.contiguous())
        return whole[: unit["count"]]

    @torch.no_grad()
    def step(self):
        """One update of all parameters. -> the gradient's norm over all parameters and ranks, before any change."""
        grads = []
        for unit in self.units:
            for name, p in unit["named"]:
                assert p.grad is not None, f"{name} got no gradient"
            grads.append(self._reduce(unit, self._pack(unit, [p.grad for _, p in unit["named"]])))
        norm = self.dev.sum(torch.stack([g.float().square().sum() for g in grads]).sum()).sqrt().item()
        if not norm < float("inf"):  # also true of nan; every rank sees the same sum and decides alike
            return norm
        for unit, grad in zip(self.units, grads):
            weight = self._pack(unit, [p.data for _, p in unit["named"]])
            own = self._own(unit, weight)
            unit["step"] += 1
            {"muon": self._muon, "adamw": self._adamw}[unit["group"]["kind"]](unit, own, grad.float())
            self._scatter(unit, self._gather(unit, own))
        return norm

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
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    # --- state, whole: any world size can load what any other has saved ---
    def state_dict(self):
        """{parameter name: {"step", "momentum" | "exp_avg", "exp_avg_sq"}} on the CPU. All ranks call it together."""
        out = {}
        for unit in self.units:
            for key in ("momentum", "exp_avg", "exp_avg_sq"):
                if key in unit:
                    whole = self._gather(unit, unit[key]).cpu()
                    for i, (name, p) in enumerate(unit["named"]):
                        piece = whole[i] if unit["shape"] else whole.view_as(p)
                        out.setdefault(name, {"step": unit["step"]})[key] = piece.clone()
        return out

    def load_state_dict(self, state):
        """Takes what state_dict gave, under any world size. Parameters it does not name start fresh."""
        for unit in self.units:
            saved = [state.get(name) for name, _ in unit["named"]]
            if any(s is None for s in saved):
                continue
            unit["step"] = saved[0]["step"]
            for key in saved[0].keys() - {"step"}:
                whole = self._pack(unit, [s[key].to(self.dev.device) for s in saved])
                unit[key] = self._own(unit, whole).clone()

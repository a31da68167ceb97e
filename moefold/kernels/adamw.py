"""One AdamW update of a flat fp32 tensor, in place.

m = b1 m + (1-b1) g        v = b2 v + (1-b2) g^2
w = w - lr decay w - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op_in_place, random


@op_in_place
def adamw(
    w: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    mean = m.to(w.dtype).lerp_(g, 1 - beta1)  # m itself, unless it is kept in lower precision
    square = v.to(w.dtype).mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(eps)
    w.mul_(1 - lr * decay).addcdiv_(mean, root, value=-lr / (1 - beta1**step))
    m.copy_(mean)
    v.copy_(square)


@adamw.fast("fused")
def _(w, g, m, v, step, lr, beta1, beta2, eps, decay) -> None:
    count = torch.tensor(float(step), device=w.device)
    torch._fused_adamw_(
        [w],
        [g],
        [m],
        [v],
        [],
        [count],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


@adamw.cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for n in (1, 33, 100_003):
        for step in (1, 100):
            w, g, m = (random(device, wide, n, seed=i) for i in range(3))
            v = random(device, wide, n, seed=3).square()
            yield Case(f"{n} weights, step {step}", (w, g, m, v, step, 1e-3, 0.9, 0.95, 1e-8, 0.1))

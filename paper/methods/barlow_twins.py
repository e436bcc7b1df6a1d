"""Barlow Twins + SER: the Barlow Twins rows of the paper's Table 2 (linear top-1: 63.34, + SER 64.02).

    python -m paper.barlow_twins                                        a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.barlow_twins --data /imagenet          Barlow Twins + SER, 100 epochs
    torchrun --nproc_per_node=8 -m paper.barlow_twins --data /imagenet --ratio 0 --cls-layer 0 --out runs/bt
    torchrun --nproc_per_node=8 -m paper.barlow_twins --data /imagenet --weight 0 --out runs/bt-control
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/barlow_twins/last.pt

The cross-correlation of two views' features, over the batch, should be the identity (Zbontar et al. 2021):

    a, b = projections of the two views, every feature with mean 0 and variance 1 over the batch
    c = a^T b / B
    loss = sum_i (c_ii - 1)^2 + w * sum_{i != j} c_ij^2

Only what is Barlow Twins' own stands here; the training, the data and SER are those of ser.py. The values are
the paper's (tau 0.3) and, where it is silent, those of the released Barlow Twins + SER script.
Axes: B images, D width of the encoder, K width of the projector, W ranks.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ser
from ser import INF, TINY, ViT, mlp, ranks_and_rank, setting, warmup_cosine

@dataclasses.dataclass(frozen=True)
class Settings(ser.Common):
    """What Barlow Twins + SER sets otherwise than MoCo-v3 + SER, and what it has beside."""
    out: str = setting("runs/barlow_twins", 0, 0, "folder of last.pt, log.jsonl, views.png; a run is resumed")
    # Choice: lambda 0.5, the best of the paper's sensitivity table (MoCo-v3); the release's script has 1.
    weight: float = setting(0.5, 0, INF, "lambda of the equivariance loss; 0: the control (paper: 0.5)")
    temperature: float = setting(0.3, TINY, INF, "tau of the equivariance loss (paper: 0.3)")
    # Choice: AdamW with a weight decay of 0.1, as the release trains ViTs; Barlow Twins has LARS for ResNets.
    base_lr: float = setting(1e-4, TINY, INF, "learning rate per 256 images, as in ser.py (release: 1e-4)")
    weight_decay: float = setting(0.1, 0, INF, "AdamW's weight decay, on all parameters (release: 0.1)")
    clip: float = setting(0.3, 0, INF, "largest gradient norm of a parameter; 0: no limit (release: 0.3)")
    hidden: int = setting(8192, 2, INF, "width K of the three layers of the projector (Barlow Twins: 8192)")
    off_diagonal: float = setting(0.0051, 0, INF, "weight w of the redundancy term (Barlow Twins: 0.0051)")
    drawn: ClassVar[dict[str, Any]] = ser.SMALL | dict(hidden=512, base_lr=1e-3, off_diagonal=0.02)
    program: ClassVar[str] = "-m paper.barlow_twins"

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        """The learning rate, down to a thousandth of its peak, and the gradients' limits."""
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(epoch, self.warmup_epochs, self.epochs, self.lr, 1e-3 * self.lr)
            for p in group["params"] if self.clip else ():
                nn.utils.clip_grad_norm_(p, self.clip)

class AllReduce(torch.autograd.Function):
    """The sum over ranks, with its gradient: what a rank adds enters the loss of every rank, so the gradient
    is summed too. With the mean over ranks that DDP takes, W ranks equal one process. Without this backward
    pass, as in the released codes of Barlow Twins and of SER, the gradient is W times too small."""
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return AllReduce.forward(ctx, gradient)

def cross_correlation(a: Tensor, b: Tensor) -> Tensor:
    """c = a^T b / B over the images of all ranks: (B, K), (B, K) -> (K, K), for standardised features."""
    ranks = ranks_and_rank()[0]
    c = (a / (len(a) * ranks)).T @ b
    return AllReduce.apply(c) if ranks > 1 else c

def barlow_loss(c: Tensor, off_diagonal: float) -> Tensor:
    """sum_i (c_ii - 1)^2 + w * sum_{i != j} c_ij^2, of a cross-correlation (K, K); a scalar."""
    diagonal = c.diagonal()
    redundancy = c.square().sum() - diagonal.square().sum()
    return (diagonal - 1).square().sum() + off_diagonal * redundancy

class BarlowTwins(nn.Module):
    """Barlow Twins, as a base method of ser.SER. It has no momentum branch, and b1 and b2 make one batch."""
    # Choice: crops are bilinear, as all of ser.py; Barlow Twins and the release have bicubic ones.
    def __init__(self, encoder: ViT, cfg: Settings):
        super().__init__()
        self.encoder, self.off_diagonal = encoder, cfg.off_diagonal
        # Choice: trained, as the release does here; the frozen random patch embedding is MoCo-v3's.
        encoder.patch_embed.requires_grad_(True)
        # Its last BatchNorm has no affine part: it standardises the features, on CUDA over all ranks.
        self.projector = mlp(encoder.dim, cfg.hidden, cfg.hidden, cfg.hidden)
        self.diagnostics: dict[str, Tensor | float] = {}

    def forward(self, views: list[list[Tensor]], cls: list[Tensor]) -> Tensor:
        """The loss of the two views' projections."""
        a, b = (self.projector(c).float() for c in cls)
        with torch.autocast(a.device.type, enabled=False):
            c = cross_correlation(a, b)
            width = len(c)
            with torch.no_grad():   # of the identity: 1 and 0; at chance: 0 and 1 / sqrt(B)
                rest = (c.square().sum() - c.diagonal().square().sum()) / (width * (width - 1))
                self.diagnostics = {"diagonal": c.diagonal().mean(), "off_diagonal": rest.sqrt()}
            return barlow_loss(c, self.off_diagonal)

    def update(self, progress: float) -> None:
        """Nothing moves between the steps."""

build = functools.partial(ser.build, method=BarlowTwins)

if __name__ == "__main__":
    ser.leave(ser.main(None, Settings, build))

"""Barlow Twins + SER: the paper's Table 2 (linear top-1: 63.34, + SER 64.02).

    python -m paper.methods.barlow_twins                 a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.barlow_twins --data /imagenet          + SER
        ... --weight 0 --out runs/barlow-control                          the same with lambda 0
        ... --ratio 0 --cls-layer 0 --out runs/barlow-plain               Barlow Twins alone
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/barlow/last.pt

Two views of an image should give the same features, and different features should not repeat one
another: the cross-correlation of the two views' features over the batch should be the identity
(Zbontar et al. 2021; the equations below are theirs).

    z1, z2  projections of the two views, each feature with mean 0 and variance 1 over the batch
    C     = z1^T z2 / B                                                                     (Eq. 2)
    L_inv = (sum_i (1 - C_ii)^2 + w * sum_{i != j} C_ij^2) / K                              (Eq. 1)

They write lambda for w, and do not divide by K (`barlow_loss` does not either);
`BarlowTwins.forward` says why we do.

Only what is Barlow Twins' own stands here; views, encoder, SER and training are those of ser.py.
Values are the paper's, else those of the script that its authors released, else Barlow Twins'; the
help of each says which. Axes: B images over all ranks (in dino.py, of one), D width of the encoder,
K features, R ranks.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ser
from ser import INF, TINY, View, ViT, mlp, setting, warmup_cosine

# ==== 1. Settings and schedule ====================================================================
@dataclasses.dataclass(frozen=True)
class Settings(ser.Common):
    """The settings that differ from those of MoCo-v3 + SER, and Barlow Twins' own."""
    out: str = setting("runs/barlow", 0, 0, "folder of the run; a run that is there continues")
    # Choice: lambda 0.5, the best of the paper's sensitivity table (MoCo-v3); the release's script
    # has 1.
    weight: float = setting(0.5, 0, INF, "lambda of L_equiv (paper, MoCo-v3: 0.5); 0: the control")
    temperature: float = setting(0.3, TINY, INF, "tau of L_equiv (paper: 0.3)")
    # Choice: AdamW with a weight decay of 0.1, as the release trains ViTs; Barlow Twins has LARS.
    base_lr: float = setting(1e-4, TINY, INF, "learning rate, scaled by batch_size / 256 (release)")
    weight_decay: float = setting(0.1, 0, INF, "of AdamW, on all parameters (release: 0.1)")
    clip: float = setting(0.3, 0, INF, "limit of a parameter's gradient norm (release: 0.3); 0: no")
    hidden: int = setting(8192, 2, INF, "width K of the projector, output too (theirs: 8192)")
    off_diagonal: float = setting(0.0051, 0, INF, "w of Eq. 1 (Barlow Twins: 0.0051)")
    drawn: ClassVar[dict[str, Any]] = ser.SMALL | dict(hidden=512, base_lr=1e-3, off_diagonal=0.02)
    program: ClassVar[str] = "-m paper.methods.barlow_twins"

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        """Set the learning rate of a fractional epoch, which ends at a thousandth of its peak, and
        limit each parameter's gradient by itself."""
        lr = warmup_cosine(epoch, self.warmup, self.epochs, self.lr, 1e-3 * self.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
            for p in group["params"]:
                if self.clip > 0:
                    nn.utils.clip_grad_norm_(p, self.clip)

# ==== 2. The loss =================================================================================
class AllReduce(torch.autograd.Function):
    """The sum over ranks, with its gradient: a rank's summand enters every rank's loss, so its
    gradient is the sum over ranks. With the mean over ranks that DDP then takes, R ranks equal one
    process; with the official all_reduce, which does not sum gradients, L_inv would weigh R times
    less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return AllReduce.forward(ctx, gradient)

def cross_correlation(z1: Tensor, z2: Tensor) -> Tensor:
    """Eq. 2 over the images of all ranks: standardised features (B / R, K) of this rank's images in
    both views -> C (K, K), equal on all ranks."""
    ranks, _ = ser.ranks_and_rank()
    images = ranks * len(z1)
    c = z1.T @ z2 / images
    return AllReduce.apply(c) if ranks > 1 else c

def barlow_loss(c: Tensor, off_diagonal: float) -> Tensor:
    """Eq. 1, not divided by K: (K, K) -> sum_i (1 - C_ii)^2 + w * sum_{i != j} C_ij^2, with
    w = off_diagonal."""
    diagonal = c.diagonal()
    invariance = (1 - diagonal).square().sum()
    redundancy = c.square().sum() - diagonal.square().sum()
    return invariance + off_diagonal * redundancy

# ==== 3. The method ===============================================================================
class BarlowTwins(nn.Module):
    """Barlow Twins as a base method of SER (ser.py, section 5); b1 and b2 make one batch, and there
    is no second network."""
    # Choice: views and encoder are ser.py's. Crops are bilinear (Barlow Twins and the release:
    # bicubic), weights of the encoder begin as Xavier's (release: truncated normal), and [CLS] with
    # a standard deviation of 1e-6 (release: 0.02).

    def __init__(self, encoder: ViT, cfg: Settings):
        super().__init__()
        self.cfg = cfg
        # Choice: the patch embedding is trained, as the release does here; MoCo-v3's stays random.
        encoder.patch_embed.requires_grad_(True)
        self.encoder = encoder
        # Its last BatchNorm has no affine part and so standardises the features, on CUDA over all
        # ranks. (On a CPU each rank standardises its own images: there is no such BatchNorm.)
        self.projector = mlp(encoder.dim, cfg.hidden, cfg.hidden, cfg.hidden)
        self.diagnostics: dict[str, Tensor | float] = {}

    def update(self, progress: float) -> None:
        """Nothing moves between the steps."""

    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        """L_inv, a scalar, from the [CLS] (B / R, D) of each of the two views, which SER has
        encoded; it has no use for the images."""
        z1 = self.projector(cls[0]).float()
        z2 = self.projector(cls[1]).float()
        with torch.autocast(z1.device.type, enabled=False):
            c = cross_correlation(z1, z2)
            loss = barlow_loss(c, self.cfg.off_diagonal)
        self.diagnose(c.detach(), ser.ranks_and_rank()[0] * len(z1))
        # Choice: divided by K. The sum over K features outweighs L_equiv by far, and the more the
        # larger K is. Norm of lambda dL_equiv / norm of dL_inv, at the parameters up to the layer
        # of L_equiv, at the start:
        #                         ViT-S, 32 photographs   small ViT, 128 drawn images
        #     MoCo-v3             0.66                    0.61
        #     a sum over K        0.0002                  0.0014
        #     divided by K        1.4                     0.74
        # so that lambda means about what it means with MoCo-v3, at any K and number of ranks. The
        # official code divides too, without saying so: by R, as its all_reduce sums no gradients.
        return loss / len(c)

    def diagnose(self, c: Tensor, images: int) -> None:
        """For the log: the mean of the diagonal of C, which should become 1; the root mean square
        of the rest, which should become 0; and L_inv of features that have nothing to do with one
        another, whose C_ij are 0 with variance 1 / B. c: (K, K)."""
        features = len(c)
        others = features * (features - 1)
        rest = c.square().sum() - c.diagonal().square().sum()
        chance = 1 + 1 / images + self.cfg.off_diagonal * (features - 1) / images
        self.diagnostics["diagonal"] = c.diagonal().mean()
        self.diagnostics["off_diagonal_rms"] = (rest / others).sqrt()
        self.diagnostics["inv_chance"] = chance

build = functools.partial(ser.build, method=BarlowTwins)

if __name__ == "__main__":
    ser.leave(ser.main(None, Settings, build))

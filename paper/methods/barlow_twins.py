"""Barlow Twins + SER: the paper's Table 2 (linear top-1: 63.34, + SER 64.02).

    python -m paper.methods.barlow_twins                 a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.barlow_twins --data /imagenet          + SER
        ... --weight 0 --out runs/barlow-control                          the same with lambda 0
        ... --ratio 0 --cls-layer 0 --out runs/barlow-plain               Barlow Twins alone
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/barlow/last.pt

The cross-correlation of two views' K features over the batch, B images of all ranks (in dino.py, of
one), should be the identity (Zbontar et al. 2021; they write lambda for w and do not divide by K):

    z1, z2  projections of the two views, each feature with mean 0 and variance 1 (BatchNorm)
    C     = z1^T z2 / B                                                                     (Eq. 2)
    L_inv = (sum_i (1 - C_ii)^2 + w * sum_{i != j} C_ij^2) / K                              (Eq. 1)
"""
from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor, nn

import ser

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line: ser.py's with other defaults, and Barlow Twins' own."""
    parser = ser.arguments()
    # Choice: lambda 0.5, the best of the paper's sensitivity table (MoCo-v3); the release's script
    # has 1. AdamW with a weight decay of 0.1, as the release trains ViTs; Barlow Twins has LARS.
    parser.set_defaults(out="runs/barlow", weight=0.5, base_lr=1e-4, weight_decay=0.1)
    add = parser.add_argument
    add("--hidden", type=int, default=8192, help="width K of the projector, output too (theirs)")
    add("--off-diagonal", type=float, default=0.0051, help="w of Eq. 1 (theirs: 0.0051)")
    return ser.parse(argv, parser, ser.SMALL | dict(hidden=512, base_lr=1e-3, off_diagonal=0.02))

def optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """ser.py's, but the rate ends at 1e-3 of its peak, and each gradient is clipped (release)."""
    adamw = ser.adamw(model, args)
    end = 1e-3 * args.base_lr * args.batch_size / 256

    def prepare(adamw: torch.optim.Optimizer, *_: object) -> None:
        for group in adamw.param_groups:
            group["lr"] = ser.learning_rate(args, model.base.progress * args.epochs, end)
            for p in group["params"]:
                nn.utils.clip_grad_norm_(p, 0.3)

    adamw.register_step_pre_hook(prepare)
    return adamw

def barlow_loss(z1: Tensor, z2: Tensor, w: float) -> Tensor:
    """Eq. 1, a scalar, from this rank's standardised features (B / R, K) of both views."""
    ranks, _ = ser.ranks_and_rank()
    c = z1.T @ z2 / (ranks * len(z1))     # (K, K), this rank's summand
    if ranks > 1:
        total = c.detach().clone()
        torch.distributed.all_reduce(total)
        # A summand enters every rank's loss, hence the factor. With the mean over ranks that DDP
        # takes, R ranks equal one process; in the official code L_inv weighs R times less.
        c = total + ranks * (c - c.detach())
    diagonal = c.diagonal()
    invariance = (1 - diagonal).square().sum()
    redundancy = c.square().sum() - diagonal.square().sum()
    # Choice: divided by K, so that lambda means about what it means with MoCo-v3. At the start, and
    # up to the layer of L_equiv, |lambda dL_equiv| / |dL_inv| is 1.4 (ViT-S, 32 photographs), where
    # it is 0.66 with MoCo-v3 and 0.0002 undivided.
    return (invariance + w * redundancy) / len(c)

class BarlowTwins(nn.Module):
    """Barlow Twins as a base method of SER (ser.py, section 5), without a second network."""
    # Choice: views and encoder are ser.py's. Crops are bilinear (Barlow Twins and the release:
    # bicubic), weights of the encoder begin as Xavier's (release: truncated normal), and [CLS] with
    # a standard deviation of 1e-6 (release: 0.02).
    def __init__(self, encoder: ser.ViT, args: Namespace):
        super().__init__()
        self.args = args
        # Choice: the patch embedding is trained, as the release does here; MoCo-v3's stays random.
        encoder.patch_embed.requires_grad_(True)
        self.encoder = encoder
        self.projector = ser.mlp(encoder.dim, args.hidden, args.hidden, args.hidden)

    def update(self, progress: float) -> None:
        self.progress = progress     # for the schedule of the optimizer

    def forward(self, views: list[ser.View], cls: list[Tensor]) -> Tensor:
        """L_inv, a scalar, from the [CLS] (B / R, D) of each of the two views."""
        z1 = self.projector(cls[0]).float()
        z2 = self.projector(cls[1]).float()
        images = len(z1) * ser.ranks_and_rank()[0]
        # Of features that have nothing to do with one another: C_ij is 0 with variance 1 / B.
        self.chance = 1 + (1 + self.args.off_diagonal * (z1.shape[1] - 1)) / images
        with torch.autocast(z1.device.type, enabled=False):
            return barlow_loss(z1, z2, self.args.off_diagonal)

def build(args: Namespace) -> ser.SER:
    """The model of a run: Barlow Twins + SER."""
    base = BarlowTwins(ser.new_encoder(args), args)
    return ser.SER(base, args.equiv_layers, args.weight, args.temperature)

if __name__ == "__main__":
    ser.train(settings(), build, ser.two_views, optimizer)

"""Barlow Twins + SER: the paper's Table 2 (linear top-1: 63.34, with SER 64.02).

    python -m paper.methods.barlow_twins     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.barlow_twins --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/barlow/last.pt

The cross-correlation of two views' K features, over the R B images of all R ranks, should be
the identity (Zbontar et al. 2021, whose Eq. 1 and 2 have lambda for w, and no 1 / K):

    z1, z2  projections of the views, each feature with mean 0 and variance 1 (BatchNorm)
    C     = z1^T z2 / (R B)                                                         (Eq. 2)
    L_inv = (sum_i (1 - C_ii)^2 + w * sum_{i != j} C_ij^2) / K                      (Eq. 1)
"""
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ser


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line: ser.py's with other defaults, and Barlow Twins' own."""
    parser = ser.arguments()
    # Choice: lambda 0.5, the paper's best with MoCo-v3. The release's published command has
    # 1.0 (and a temperature of 0.4); it evaluates runs with 0.5 and 1.0 (config/eval.yaml).
    # Choice, unlike 4.1: rate and decay of the release. AdamW is 4.1's; the authors have LARS.
    parser.set_defaults(out="runs/barlow", weight=0.5, base_lr=1e-4, weight_decay=0.1)
    parser.epilog = "--moco-hidden has no effect."
    add = parser.add_argument
    add("--hidden", type=ser.count, default=8192, help="K, widths of the projector (authors)")
    add("--off-diagonal", type=ser.nonnegative, default=0.0051, help="w of Eq. 1 (authors)")
    small = dict(out="runs/barlow-small", hidden=512, base_lr=1e-3, off_diagonal=0.02)
    return ser.parse(argv, parser, ser.SMALL | small)


def optimizer(model: nn.Module, args: Namespace) -> Optimizer:
    """ser.py's. Each gradient of K (L_inv + lambda L_equiv) is clipped at 0.3, a parameter at
    a time, as in the release. K undoes the division of L_inv. Beside Eq. 1 of the authors, lambda
    weighs K times as much here, and R times in the release, which divides L_inv's gradient."""
    adamw = ser.adamw(model, args)

    def clip(adamw: Optimizer, *_: object) -> None:
        for p in adamw.param_groups[0]["params"]:
            p.grad.mul_(args.hidden)     # K
            nn.utils.clip_grad_norm_(p, 0.3)

    adamw.register_step_pre_hook(clip)
    return adamw


def schedule(adamw: Optimizer, args: Namespace, epoch: float) -> None:
    """As in the release, the rate ends at 1e-3 of its peak; epoch: with its fraction."""
    peak = args.base_lr * args.batch_size / 256
    for group in adamw.param_groups:
        group["lr"] = ser.learning_rate(args, epoch, end=1e-3 * peak)


def barlow_loss(z1: Tensor, z2: Tensor, w: float) -> Tensor:
    """Eq. 1, a scalar, from this rank's standardised features (B, K) of both views."""
    # Choice: the features of all ranks, with gradient. The authors sum C over ranks, without.
    z1 = ser.gather(z1)              # (R B, K)
    z2 = ser.gather(z2)
    c = z1.T @ z2 / len(z1)          # (K, K)

    invariance = (1 - c.diagonal()).square().sum()
    redundancy = c.square().sum() - c.diagonal().square().sum()
    # Choice, unlike 3.3, which keeps the baseline's L_inv: Eq. 1 / K. Lambda was chosen for
    # MoCo-v3's L_inv, of the order of 1. Beside all of Eq. 1, K lambda would weigh the same.
    return (invariance + w * redundancy) / len(c)


class BarlowTwins(nn.Module):
    """Barlow Twins as a base method of SER (ser.py, section 5), without a second network."""
    # Choice: views and encoder are ser.py's, fully trained. The release departs as dino.py says.
    def __init__(self, encoder: ser.ViT, args: Namespace):
        super().__init__()
        self.off_diagonal = args.off_diagonal
        self.encoder = encoder
        self.projector = ser.mlp(encoder.dim, args.hidden, args.hidden, args.hidden)

    def update(self, progress: float) -> None:
        """Nothing moves between steps."""

    def forward(self, views: list[ser.View], cls: list[Tensor]) -> Tensor:
        """L_inv, a scalar, from the [CLS] (B, D) of each of the two views."""
        z1 = self.projector(cls[0])
        z2 = self.projector(cls[1])
        with torch.autocast(z1.device.type, enabled=False):
            return barlow_loss(z1.float(), z2.float(), self.off_diagonal)


def build(args: Namespace) -> ser.SER:
    """The model of a run: Barlow Twins + SER."""
    base = BarlowTwins(ser.seed_and_make_encoder(args), args)
    return ser.SER(base, args.equiv_layers, args.weight, args.temperature)


if __name__ == "__main__":
    ser.train(settings(), build, ser.two_view_dataset, optimizer, schedule)
    ser.leave_group()

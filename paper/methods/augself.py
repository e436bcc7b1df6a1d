"""MoCo-v3 + AugSelf (Lee et al. 2021): predict how the augmentations of two views differ.

    Table 1      M     IN-1k          Sketch         V2             R              3DIE
    MoCo-v3      42.9  68.44 / 88.02  17.65 / 31.87  56.54 / 78.68  18.59 / 30.08  68.43 / 91.96
    + AugSelf    43.7  67.55 / 87.62  13.30 / 25.35  53.74 / 76.68  17.62 / 28.66  64.97 / 90.73
    Layer decoupling: IN-1k top-1 is 67.55 with L_eq at layer 12, and 68.23 at layer 3.

    crop  = box of view a - box of view b               center y, center x, height, width
    color = jitter of view a - jitter of view b         brightness, contrast, saturation, hue
    L_eq  = mean over both orders (a, b) = (1, 2), (2, 1) of
            MSE(tanh(head_crop([f_a | f_b])), crop) + MSE(tanh(head_color([f_a | f_b])), color)
    loss  = L_inv + 0.5 * L_eq

    python -m paper.methods.augself     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.augself --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/augself/last.pt

The flags `--blur 0.5 0.5 --solarize 0 0` give the T of the release's AugSelf, except for the
saturation, which changes by up to 0.4 there, and 0.2 here.

In AugSelf's own MoCo-v2, f_2 comes from the momentum branch and carries no gradient. Here both
features are online, as in its SimSiam and in the release.

The release has AugSelf in its branch augself, at 0bcab6c, with two heads and 44.2 M, as here.
Table 1 has 43.7 M: dbe5e93 builds one head, of 256 outputs, and refuses to train it.
The branch's weight is 0.5 at layer 12, and 0.5, 0.3, 0.1 or 0.03 at layer 3. The paper names none.
"""
from argparse import Namespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ser
from paper.methods import addon
from ser import Augmentation, View


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line; the weight is AugSelf's on ImageNet-100."""
    return addon.parse(argv, addon.arguments("augself", weight=0.5))


def crop_difference(first: Augmentation, second: Augmentation) -> Tensor:
    """Box of the first view minus box of the second, (B, 4), in shares of the image. If the
    first view is flipped, both boxes are mirrored, as in AugSelf's code and in the release. So
    the target of (2, 1) is not always minus the target of (1, 2)."""
    return box(first, first.flip) - box(second, first.flip)


def box(aug: Augmentation, mirrored: Tensor) -> Tensor:
    """(B, 4): center y, center x, height, width; `mirrored` (B,) tells where to mirror x."""
    y = aug.top + aug.height / 2
    x = aug.left + aug.width / 2
    x = torch.where(mirrored, 1 - x, x)
    columns = [y, x, aug.height, aug.width]
    return torch.stack(columns, dim=1).float()


def color_difference(first: Augmentation, second: Augmentation) -> Tensor:
    """Jitter of the first view minus that of the second, (B, 4), in widths of the ranges."""
    ranges = 2 * torch.tensor([ser.BRIGHTNESS, ser.CONTRAST, ser.SATURATION, ser.HUE])
    return (factors(first) - factors(second)) / ranges


def factors(aug: Augmentation) -> Tensor:
    """(B, 4): what multiplies or shifts brightness, contrast, saturation and hue."""
    columns = [aug.brightness, aug.contrast, aug.saturation, aug.hue]
    return torch.stack(columns, dim=1).float()


class AugSelf(addon.AddOn):
    """A base method with two heads that predict how the augmentations of two views differ."""
    def __init__(self, base: nn.Module, args: Namespace):
        super().__init__(base, args)
        for task in ("crop", "color"):
            self.heads[task] = addon.perceptron(2 * args.dim, 512, 512, 4, bias=True)

    def equivariance_loss(self, features: list[Tensor], views: list[View]) -> Tensor:
        """The sum of the two losses. Both orders of the views are one batch of 2B rows."""
        f1, f2 = features
        forth = torch.cat([f1, f2], dim=1)                                      # (B, 2D)
        back = torch.cat([f2, f1], dim=1)
        pairs = torch.cat([forth, back])                                        # (2B, 2D)

        first = views[0].augmentation
        second = views[1].augmentation
        total = 0.0
        for task, difference in (("crop", crop_difference), ("color", color_difference)):
            target = torch.cat([difference(first, second), difference(second, first)])
            target = target.to(pairs.device, non_blocking=True)                 # (2B, 4)
            predicted = self.heads[task](pairs).float().tanh()
            total = total + F.mse_loss(predicted, target)
        return total


def build(args: Namespace) -> AugSelf:
    """The model of a run."""
    return AugSelf(ser.build(args).base, args)


def dataset(source: list[str] | Tensor, args: Namespace) -> ser.ViewDataset:
    """Images with two views, made by T."""
    return ser.ViewDataset(source, addon.policies(args), args.seed)


if __name__ == "__main__":
    ser.train(settings(), build, dataset)
    ser.leave_group()

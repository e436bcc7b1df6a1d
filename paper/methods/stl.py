"""MoCo-v3 + STL (Yu et al. 2024): read the transformation from two views, and apply it elsewhere.

    Table 1      M     IN-1k          Sketch         V2             R              3DIE
    MoCo-v3      42.9  68.44 / 88.02  17.65 / 31.87  56.54 / 78.68  18.59 / 30.08  68.43 / 91.96
    + STL        62.2  65.49 / 85.91  15.40 / 28.96  55.43 / 78.02  17.22 / 28.49  -

    Images 2i and 2i + 1 are partners: in each view, both have the same crop, colour jitter and
    grayscale. `read`, `hyper`, `embed` and `embed_code` are networks.

    t12, t21 = read([f_1 | f_2]), read([f_2 | f_1])
    yhat_1, yhat_2 = W(partner's t21) f_2, W(partner's t12) f_1         W(t) = hyper(t), D x D
    L_eq = InfoNCE(both ways) between embed([f_1; f_2]) and embed([yhat_1; yhat_2])
    L_tr = InfoNCE(both ways) between embed_code([t21; t12]) of images 2i and of images 2i + 1
    loss = L_inv + L_eq + 0.1 * L_tr                   `equiv` in the log: L_eq + 0.1 * L_tr

    python -m paper.methods.stl     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.stl --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/stl/last.pt

The flags `--crop-min 0.2 --blur 0.5 0.5 --solarize 0 0` give the T of the release's STL. In
STL's own code, negatives come from both arguments of InfoNCE, here only from the second.
"""
import sys
from argparse import Namespace

import torch
from torch import Tensor, nn

import ser
from paper.methods import addon
from ser import Augmentation, View


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line; weight (of L_eq + 0.1 * L_tr) and temperature: STL's."""
    return addon.parse(argv, addon.arguments("stl", weight=1.0, temperature=0.2))


class Pairs(ser.ViewDataset):
    """Images 2i and 2i + 1 of a rank's batch share crop, jitter and grayscale, view by view.
    A DataLoader hands all items of a batch to __getitems__."""
    def __getitems__(self, items: list[ser.Item]) -> list:
        size = self.policies[0].size
        batch = []
        for i, item in enumerate(items):
            _, index, _ = item
            image = self.load(index)
            # Choice: images are squeezed into squares before they are cropped, as in the
            # release. Both images of a pair are thus cut at the same shares of their sides.
            square = ser.resize(image[None], (size, size))[0]

            of_pair = self.sample_views(square, items[i - i % 2])     # with the seed of image 2i
            of_image = self.sample_views(square, item)
            batch.append([blend(view, own) for view, (_, own) in zip(of_pair, of_image)])
        return batch


def blend(view: tuple[Tensor, Augmentation], own: Augmentation) -> tuple:
    """The pair's view, but with the image's own flip, blur and solarization."""
    pixels, aug = view
    if own.flip != aug.flip:
        pixels = pixels.flip(-1)
    # Choice: a pair shares neither solarization nor blur. STL has no solarization.
    return pixels, aug._replace(flip=own.flip, blur=own.blur, solarize=own.solarize)


def both_ways(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """InfoNCE from a to b and back, (n, K) on each of R ranks; 4 tau ln(R n) at chance."""
    # Choice: keys have no gradient, as in the release and in MoCo-v3. In STL's code, they do.
    forth = ser.info_nce(a, b.detach(), temperature)
    return forth + ser.info_nce(b, a.detach(), temperature)


class STL(addon.AddOn):
    """A base method with a network that reads transformations and one that applies them."""
    def __init__(self, base: nn.Module, args: Namespace):
        super().__init__(base, args)
        dim = args.dim
        self.heads["read"] = addon.perceptron(2 * dim, 128, 128)
        self.heads["hyper"] = nn.Linear(128, dim * dim, bias=False)
        self.heads["embed"] = addon.perceptron(dim, 512, 128)
        self.heads["embed_code"] = addon.perceptron(128, 128, 128)

    def equivariance_loss(self, features: list[Tensor], views: list[View]) -> Tensor:
        """L_eq + 0.1 * L_tr."""
        f1, f2 = features
        read = self.heads["read"]
        embed = self.heads["embed"]
        t12 = read(torch.cat([f1, f2], dim=1))                             # (B, 128)
        t21 = read(torch.cat([f2, f1], dim=1))
        codes = torch.cat([t21, t12])     # in this order, they move f2, f1    (2B, 128)

        u_even = self.heads["embed_code"](codes[0::2])                     # (B, 128)
        u_odd = self.heads["embed_code"](codes[1::2])
        loss_tr = both_ways(u_even, u_odd, self.temperature)

        # The partner is another image, so its codes help only if they tell the transformation.
        partner = torch.arange(len(codes), device=f1.device) ^ 1     # 1, 0, 3, 2, ...
        matrices = self.heads["hyper"](codes[partner])                     # (2B, D * D)
        matrices = matrices.unflatten(1, (f1.shape[1], -1))                # (2B, D, D)
        moved = torch.einsum("boi,bi->bo", matrices, torch.cat([f2, f1]))  # (2B, D)
        moved1, moved2 = moved.chunk(2)

        z = torch.cat([embed(f1), embed(f2)])                              # (2B, 128)
        z_moved = torch.cat([embed(moved1), embed(moved2)])
        loss_eq = both_ways(z, z_moved, self.temperature)
        return loss_eq + 0.1 * loss_tr


def build(args: Namespace) -> STL:
    """The model of a run. Exits with one sentence if a rank's images do not make pairs."""
    ranks, _ = ser.ranks_and_rank()
    if args.batch_size // ranks % 2 > 0:
        sys.exit(f"--batch-size {args.batch_size}: should be even on each of {ranks} ranks")
    return STL(ser.build(args).base, args)


def dataset(source: list[str] | Tensor, args: Namespace) -> Pairs:
    """Images with two views, made by T. The two images of a pair share crop and jitter."""
    return Pairs(source, addon.policies(args), args.seed)


if __name__ == "__main__":
    ser.train(settings(), build, dataset)
    ser.leave_group()

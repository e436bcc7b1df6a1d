"""MoCo-v3 + STL (Yu et al. 2024): learn what the transformation was from a pair of its views.

    Table 1      M     IN-1k          Sketch         V2             R              3DIE
    MoCo-v3      42.9  68.44 / 88.02  17.65 / 31.87  56.54 / 78.68  18.59 / 30.08  68.43 / 91.96
    + STL        62.2  65.49 / 85.91  15.40 / 28.96  55.43 / 78.02  17.22 / 28.49  -
    Not decoupled in the paper; `--layer 3` does it as it is done to AugSelf and EquiMod.

    partners, images 2i and 2i + 1, share, view by view, crop, colour jitter, grayscale: (t1, t2)
    t12, t21 = read([f_1 | f_2]), read([f_2 | f_1])
    yhat_1, yhat_2 = W(its partner's t21) f_2, W(its partner's t12) f_1
    L_eq = InfoNCE(both ways) between embed([f_1; f_2]) and embed([yhat_1; yhat_2])
    L_tr = InfoNCE(both ways) between embed_code([t12; t21]) of the images 2i and of the 2i + 1
    loss = L_inv + L_eq + 0.1 * L_tr                   `equiv` in the log: L_eq + 0.1 * L_tr
    W(t) = hyper(t), a D x D matrix         `read`, `hyper`, `embed`, `embed_code` are the heads

    python -m paper.methods.stl                               drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.stl --data /imagenet
    torchrun --nproc_per_node=8 -m paper.methods.stl --data /imagenet --layer 3 --out runs/stl-3
    ... --crop-min 0.2 --blur 0.5 0.5 --solarize 0 0          T of the release's STL
    python eval_linear.py --checkpoint runs/stl/last.pt --data /imagenet

Its own code has STL-10 and a ResNet-18, and one InfoNCE over all rows of both sides for each loss.
"""
from __future__ import annotations

import math
from argparse import Namespace
from typing import Sequence

import torch
from torch import Tensor, nn

import ser
from paper.methods import addon
from ser import View, info_nce

def settings(argv: Sequence[str] | None = None) -> Namespace:
    """The settings of a command line; --weight, of L_eq + 0.1 * L_tr, and --temperature: STL's."""
    return ser.parse(argv, addon.arguments("stl", weight=1.0, temperature=0.2), addon.SMALL)

class Pairs(ser.Dataset):
    """Images 2i and 2i + 1 of a rank's batch share crop, jitter and grayscale, view by view."""
    def __getitems__(self, keys: list[tuple]) -> list:
        size = self.policies[0].size
        batch = []
        for i, key in enumerate(keys):
            image = addon.read(self.source[key[1]])
            # Choice: images are squeezed into squares before they are cropped, as in the release:
            # those of a pair are cut at the same shares of their sides, whatever their shapes.
            square = ser.resize(image[None], (size, size))[0]
            even = keys[i - i % 2]
            draws = ser.Dataset({key[1]: square, even[1]: square}, self.policies, self.seed)
            views = []
            for (_, own), (pixels, pair) in zip(draws[key], draws[even]):
                if own.flip != pair.flip:
                    pixels = pixels.flip(-1)
                # Choice: solarization, which STL's own T does not have, is not shared, as blur.
                drawn = pair._replace(flip=own.flip, blur=own.blur, solarize=own.solarize)
                views.append((pixels, drawn))
            batch.append(views)
        return batch

def both_ways(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """InfoNCE from a to b and back, (n, K) on each of R ranks; 4 temperature ln(R n) at chance."""
    # Choice: keys are detached, as in the release: the gradient of L_eq has .76 of the norm of that
    # of L_inv (256 images, pairs at cosine .8), .73 in STL's code, and 1.52 if keys carry it, too.
    return info_nce(a, b.detach(), temperature) + info_nce(b, a.detach(), temperature)

class STL(addon.AddOn):
    """A base method with a network that reads transformations and one that applies them."""
    def __init__(self, base: nn.Module, args: Namespace):
        super().__init__(base, args)
        dim = args.dim
        self.heads["read"] = addon.perceptron(2 * dim, 128, 128)
        self.heads["hyper"] = nn.Linear(128, dim * dim, bias=False)
        self.heads["embed"] = addon.perceptron(dim, 512, 128)
        self.heads["embed_code"] = addon.perceptron(128, 128, 128)

    def equivariance_loss(self, features: Sequence[Tensor], views: Sequence[View]) -> tuple:
        """L_eq + 0.1 * L_tr, and its value at chance; B images, R ranks."""
        f1, f2 = features
        embed = self.heads["embed"]
        t12 = self.heads["read"](torch.cat([f1, f2], dim=1))                            # (B, 128)
        t21 = self.heads["read"](torch.cat([f2, f1], dim=1))
        # The partner has other contents: its codes can carry the transformation alone.
        partner = torch.arange(len(f1), device=f1.device) ^ 1     # 1, 0, 3, 2, ...
        codes = torch.cat([t21[partner], t12[partner]])                                 # (2B, 128)
        u_odd = self.heads["embed_code"](codes[0::2])                                   # (B, 128)
        u_even = self.heads["embed_code"](codes[1::2])
        matrices = self.heads["hyper"](codes).unflatten(1, (f1.shape[1], -1))           # (2B, D, D)
        moved = torch.einsum("boi,bi->bo", matrices, torch.cat([f2, f1]))               # (2B, D)
        moved1, moved2 = moved.chunk(2)
        z = torch.cat([embed(f1), embed(f2)])                                           # (2B, 128)
        z_moved = torch.cat([embed(moved1), embed(moved2)])
        loss_eq = both_ways(z, z_moved, self.temperature)
        loss_tr = both_ways(u_even, u_odd, self.temperature)
        rows = len(f1) * ser.ranks_and_rank()[0]
        chance = 4 * self.temperature * (math.log(2 * rows) + 0.1 * math.log(rows))
        return loss_eq + 0.1 * loss_tr, chance

def build(args: Namespace) -> STL:
    """The model of a run."""
    return STL(ser.build(args).base, args)

def dataset(source: Sequence[str] | Tensor, args: Namespace) -> Pairs:
    """Draws T for pairs."""
    return Pairs(source, addon.policies(args), args.seed)

if __name__ == "__main__":
    ser.train(settings(), build, dataset)

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
    loss = L_inv + L_eq + 0.1 * L_tr
    `read`, `embed` and `embed_code` are heads, W(t) is a D x D matrix, linear in t (head `hyper`);
    STL's names: trans_backbone, equi_projector, trans_projector, hypernet.

    python -m paper.methods.stl                               drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.stl --data /imagenet
    torchrun --nproc_per_node=8 -m paper.methods.stl --data /imagenet --layer 3 --out runs/stl-3
    ... --crop-min 0.2 --blur 0.5 0.5 --solarize 0 0          T of the release's STL
    python eval_linear.py --checkpoint runs/stl/last.pt --data /imagenet

Its own code has STL-10 and a ResNet-18, and one InfoNCE over all rows of both sides for each loss.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ser
from paper.methods import addon
from ser import INF, TINY, Crop, Jitter, Key, View, ranks_and_rank, require, setting

@dataclasses.dataclass(frozen=True)
class STLSettings(addon.AddOnSettings):
    """Base method + STL."""
    out: str = setting("runs/stl", 0, 0, "folder of the run; a run that is there continues")
    weight: float = setting(1.0, 0, INF, "of L_eq + trans_weight * L_tr (STL: 1)")
    trans_weight: float = setting(0.1, 0, INF, "of L_tr beside L_eq (STL: 0.1)")
    temperature: float = setting(0.2, TINY, INF, "of both InfoNCE (STL: 0.2)")
    program: ClassVar[str] = "-m paper.methods.stl"
    unused: ClassVar[tuple[str, ...]] = ("ratio", "equiv_layers", "group")

    def dataset(self, source: Any) -> Pairs:
        """Images in pairs that share what is drawn."""
        return Pairs(source, self.policies, self.seed)

class Pairs(ser.Dataset):
    """The two images of a pair share crop, colour jitter and grayscale, view by view."""
    square = torch.empty(3, 224, 224, device="meta")     # any square will do, as Crop is in shares

    def draw(self, key: Key, image: Tensor) -> list[tuple[Crop, Jitter]]:
        """Flip, blur and solarization are the image's own. The rest is the pair's, seeded by its
        even image, key.partner, and drawn on a square, so that images of different shapes are cut
        at the same shares of their sides."""
        # Choice: solarization, which STL's own T does not have, is an image's own, like blur.
        shared = super().draw(key._replace(index=key.partner), self.square)
        draws = []
        for (crop, jitter), (own_crop, own) in zip(shared, super().draw(key, image)):
            crop = crop._replace(flip=own_crop.flip)
            draws.append((crop, jitter._replace(blur=own.blur, solarize=own.solarize)))
        return draws

def exchange(x: Tensor) -> Tensor:
    """Rows 2i and 2i + 1 change places: (B, ...) -> (B, ...)."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)

def move(f: Tensor, t: Tensor, hyper: Tensor) -> Tensor:
    """W(t) f: (B, D), (B, K) -> (B, D). W(t) is hyper @ t as a D x D matrix; hyper: (D * D, K).

    W(t)_oi = sum_k hyper_oik t_k, hence (W(t) f)_o = sum_ik hyper_oik (f_i t_k): the same from the
    B x D x K products of features and codes, without the B matrices (151 MB for 256 images).
    """
    products = f[:, :, None] * t[:, None, :]                                            # (B, D, K)
    # Row o of the matrix holds hyper_oik in the order of (i, k), as a row of the products does.
    return F.linear(products.flatten(1), hyper.view(f.shape[1], -1))

class STL(addon.AddOn):
    """A base method with a network that reads transformations and one that applies them."""

    def __init__(self, base: nn.Module, cfg: Any):
        dim = base.encoder.dim
        super().__init__(base, cfg, {
            "read": addon.perceptron(2 * dim, 128, 128, bias=False),
            "hyper": nn.Linear(128, dim * dim, bias=False),
            "embed": addon.perceptron(dim, 512, 128, bias=False),
            "embed_code": addon.perceptron(128, 128, 128, bias=False)})
        self.temperature = cfg.temperature
        self.trans_weight = cfg.trans_weight

    def equivariance_loss(self, features: list[Tensor],
                          views: list[View]) -> tuple[Tensor, dict[str, Any]]:
        """L_eq + trans_weight * L_tr; at chance 4 tau (ln(2 R B) + trans_weight * ln(R B))."""
        f1, f2 = features
        read = self.heads["read"]
        embed = self.heads["embed"]
        embed_code = self.heads["embed_code"]
        hyper = self.heads["hyper"].weight
        t12 = read(torch.cat([f1, f2], dim=1))                                          # (B, 128)
        t21 = read(torch.cat([f2, f1], dim=1))
        # From codes of the pair's other image, which has another content: they can carry the
        # transformation alone.
        moved1 = move(f2, exchange(t21), hyper)                                         # (B, D)
        moved2 = move(f1, exchange(t12), hyper)
        z = torch.cat([embed(f1), embed(f2)])                                           # (2B, 128)
        z_moved = torch.cat([embed(moved1), embed(moved2)])
        loss_eq, action_top1 = addon.both_ways(z, z_moved, self.temperature)
        u_even = embed_code(torch.cat([t12[0::2], t21[0::2]]))                          # (B, 128)
        u_odd = embed_code(torch.cat([t12[1::2], t21[1::2]]))
        loss_tr, reading_top1 = addon.both_ways(u_even, u_odd, self.temperature)
        rows = len(f1) * ranks_and_rank()[0]
        chance = math.log(2 * rows) + self.trans_weight * math.log(rows)
        return loss_eq + self.trans_weight * loss_tr, {
            "loss_eq": loss_eq.detach(), "loss_tr": loss_tr.detach(),
            "equiv_chance": 4 * self.temperature * chance,
            "action_top1": action_top1, "action_top1_chance": 1 / (2 * rows),
            "reading_top1": reading_top1, "reading_top1_chance": 1 / rows}

def build(cfg: Any) -> STL:
    """The model of a run. Raises UserError, also for a batch that does not fall into pairs."""
    ranks = ranks_and_rank()[0]
    require(cfg.batch_size % (2 * ranks) == 0,
            f"--batch-size {cfg.batch_size}: STL needs pairs on each of {ranks} ranks: try "
            f"{math.ceil(cfg.batch_size / (2 * ranks)) * 2 * ranks}")
    return STL(addon.base_method(cfg), cfg)

Settings = addon.settings_on("moco", STLSettings)

if __name__ == "__main__":
    ser.leave(addon.main(STLSettings, build))

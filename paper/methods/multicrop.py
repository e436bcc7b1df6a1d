"""MoCo-v3 + SER with 2 + 4 views: the "2+4 view" row of the paper's Table 1 (linear top-1 71.56).

    python -m paper.methods.multicrop                    a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.multicrop --data /imagenet   2 x 224, 4 x 96 pixels
        ... --weight 0 --out runs/multicrop-control                       the same with lambda 0
        ... --ratio 0 --cls-layer 0 --out runs/multicrop-plain            MoCo-v3 with 2 + 4 views
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/multicrop/last.pt

Two global views, as MoCo-v3's own, and four local ones, small crops at 96 pixels (paper A.1):

    queries   all six views through the online encoder, in one packed pass, whatever their sizes
    keys      the two global views through the momentum encoder: no loss among local views
    L_inv     InfoNCE of every (query view, key view) of different views: 2 + 4 x 2 = 10 terms
    L_equiv   on b2, within the global pair and the two local pairs: tokens of a pair are compared
              with each other, and with the tokens of other images in that pair

# Choice: a view of b2 is the whole image at the size of the view, with a g of its own, as 3.2 says;
a local one has a grid of about 6 x 6 tokens. The release moves one crop of 5% to 25% instead.
The online encoder sees 2 x 197 + 4 x 37 tokens an image, 1.38 times those of
two views, and the momentum encoder no more than before; `paper.experiments.overhead --rows packed`
measures its time, packed and with a pass for each resolution.

What is MoCo-v3's and SER's stands in ser.py; here are the views and who is compared with whom.
Axes: B images, D width of the encoder, K projection.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from torch import Tensor

import ser
from ser import INF, TINY, MoCoV3, Policy, View, ViT, info_nce, setting

@dataclasses.dataclass(frozen=True)
class Settings(ser.Config):
    """The settings of MoCo-v3 + SER, and those of the local views."""
    out: str = setting("runs/multicrop", 0, 0, "folder of the run; a run that is there continues")
    local_pairs: int = setting(2, 0, INF, "pairs of local views (paper: 2, so 2 + 4 views)")
    local_size: int = setting(96, 2, INF, "side of a local view, pixels (release, DINO: 96)")
    # Choice: crops of 5% to 25% and blur with probability 0.5, as DINO's ViT-S and the release. The
    # release drops grayscale in local views; here it stays (3.2).
    local_crop_min: float = setting(0.05, TINY, 1, "least area of a local crop (DINO: 0.05)")
    local_crop_max: float = setting(0.25, TINY, 1, "largest area of a local crop (DINO: 0.25)")
    drawn: ClassVar[dict[str, Any]] = ser.Config.drawn | dict(
        local_size=16, local_crop_min=0.1, local_crop_max=0.4, epochs=4.0, warmup_epochs=0.5)
    program: ClassVar[str] = "-m paper.methods.multicrop"

    @property
    def policies(self) -> tuple[Policy, ...]:
        """T of MoCo-v3's two views, then of the local ones."""
        area = (self.local_crop_min, self.local_crop_max)
        local = Policy(self.local_size, area, blur=0.5, solarize=0.0, blur_max=self.blur_max)
        return super().policies + (local,) * (2 * self.local_pairs)

class MultiCrop(MoCoV3):
    """MoCo-v3 whose queries come from all views and whose keys come from the two global ones."""

    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        """L_inv, a scalar: the sum of InfoNCE over all (query view, key view) of different views.

        views: the global two first; their images make the keys. cls: [CLS] (B, D) of every view, by
        the online encoder.
        """
        # Choice: the terms are added, not averaged, and so are the three of L_equiv, as in the
        # release. With two views that is MoCo-v3, two terms beside one; here ten beside three.
        keys = [self.key(view) for view in views[:2]]                             # (B, K) each
        loss = 0.0
        chance = 0.0
        for i, c in enumerate(cls):
            query = self.predictor(self.projector(c))                             # (B, K)
            for j, key in enumerate(keys):
                if i == j:
                    continue
                term, top1 = info_nce(query, key, self.temperature)
                loss = loss + term
                chance += 2 * self.temperature * math.log(len(c) * ser.ranks_and_rank()[0])
                if i == 0:     # of the global pair, to compare with a run of two views
                    self.diagnostics["inv_top1"] = top1
        self.diagnostics["inv_chance"] = chance
        return loss

def method(encoder: ViT, cfg: Settings) -> MultiCrop:
    """The base method of a run, for ser.build."""
    return MultiCrop(encoder, 256, cfg.moco_hidden, cfg.moco_temperature, cfg.moco_momentum)

def build(cfg: Settings) -> ser.SER:
    """The model of a run: SER with L_equiv within each pair of neighbouring views. Raises UserError
    for local views that do not fit the patches, or whose least area is above the largest."""
    fit = math.ceil(cfg.local_size / cfg.patch_size) * cfg.patch_size
    ser.require(cfg.local_size == fit, f"--local-size {cfg.local_size} is no multiple of "
                f"--patch-size {cfg.patch_size}: try {fit}")
    ser.require(cfg.local_crop_min <= cfg.local_crop_max, f"--local-crop-min {cfg.local_crop_min} "
                f"is larger than --local-crop-max {cfg.local_crop_max}")
    model = ser.build(cfg, method)
    model.pairs = [(first, first + 1) for first in range(0, len(cfg.policies), 2)]
    return model

if __name__ == "__main__":
    ser.leave(ser.main(None, Settings, build))

"""MoCo-v3 + SER with 2 + 4 views: the "2+4 view" row of the paper's Table 1 (linear top-1 71.56).

    python -m paper.multicrop                                         a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.multicrop --data /imagenet   MoCo-v3 + SER, 2 x 224 and 4 x 96 pixels
    torchrun --nproc_per_node=8 -m paper.multicrop --data /imagenet --ratio 0 --cls-layer 0 --out runs/multi
    torchrun --nproc_per_node=8 -m paper.multicrop --data /imagenet --weight 0 --out runs/multi-control
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/multicrop/last.pt

Two global views, as without local ones, and four small views of small crops (paper A.1):

    queries   all six views through the online encoder, in one packed pass, whatever their sizes
    keys      the two global views through the momentum encoder: no loss among local views
    L_inv     InfoNCE of every (query view, key view) of different views: 2 + 4 x 2 = 10 terms
    L_equiv   within the global pair and the two local pairs of b2: tokens of a pair are compared with each
              other, and with the tokens of other images in that pair

A view of b2 is the whole image at the size of the view, with a g of its own; a local one has a grid of about
6 x 6 tokens. The online encoder sees 2 x 197 + 4 x 37 tokens an image, 1.38 times those of two views, and the
momentum encoder no more than before: what that costs on a clock, packed or with a pass for each resolution,
`python -m paper.overhead --rows packed` measures.

What is MoCo-v3's and SER's stands in ser.py; here are the views and who is compared with whom.
"""
from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import ser
from ser import INF, TINY, MoCoV3, View, ViT, setting

@dataclasses.dataclass(frozen=True)
class Settings(ser.Config):
    """The settings of MoCo-v3 + SER, and those of the local views."""
    out: str = setting("runs/multicrop", 0, 0, "folder of last.pt, log.jsonl, views.png; a run is resumed")
    local_pairs: int = setting(2, 0, INF, "pairs of local views (paper: 2, which makes 2 + 4 views)")
    local_size: int = setting(96, 2, INF, "side of a local view, pixels, a multiple of the patch (paper: 96)")
    # Choice: crops of 5% to 25% and blur with probability 0.5 are DINO's, as in the release; which leaves
    # grayscale out of the local views, where the paper keeps all photometric operations (3.2).
    local_crop_min: float = setting(0.05, TINY, 1, "least area of a local crop (DINO: 0.05 of the image)")
    local_crop_max: float = setting(0.25, TINY, 1, "largest area of a local crop (DINO: 0.25 of it)")
    drawn: ClassVar[dict[str, Any]] = ser.Config.drawn | dict(
        local_size=16, local_crop_min=0.1, local_crop_max=0.4, epochs=4.0, warmup_epochs=0.5)
    program: ClassVar[str] = "-m paper.multicrop"

    @property
    def views(self) -> tuple[View, ...]:
        """The two views of MoCo-v3, then the local ones; L_equiv is taken between neighbours."""
        local = View(self.local_size, (self.local_crop_min, self.local_crop_max), 0.5, 0.0)
        return *super().views, *[local] * (2 * self.local_pairs)

def query_key_pairs(views: int, keys: int = 2) -> list[tuple[int, int]]:
    """The (query view, key view) between which L_inv is taken: all but a view with itself."""
    return [(query, key) for query in range(views) for key in range(keys) if query != key]

class MultiCrop(MoCoV3):
    """MoCo-v3 whose queries come from all views and whose keys come from the global ones. What MoCoV3.forward
    does with `pairs`, for V views:

        q_v = predictor(projector(online encoder(view v)))                 v = 0 .. V - 1, with gradient
        k_v = momentum projector(momentum encoder(view v))                 v = 0, 1, without
        L_inv = sum over pairs (v, u) of 2T * cross-entropy(q_v . k_u of all images / T, the own image)
    """
    # Choice: the terms are added, as in the release, not averaged: with two views it is MoCo-v3 itself, with
    # 2 + 4 there are ten terms in place of two, beside three terms of L_equiv in place of one.
    def __init__(self, encoder: ViT, cfg: Settings):
        super().__init__(encoder, 256, cfg.moco_hidden, cfg.moco_temperature, cfg.moco_momentum)
        self.pairs = query_key_pairs(len(cfg.views))[::-1]   # inv_top1 is of the last pair: (0, 1)

def build(cfg: Settings) -> ser.SER:
    """The model of a run. Raises UserError for local views that do not fit the patches or have no area."""
    ser.require(cfg.local_size % cfg.patch_size == 0,
                f"--local-size {cfg.local_size} is no multiple of --patch-size {cfg.patch_size}: try "
                f"{-(-cfg.local_size // cfg.patch_size) * cfg.patch_size}")
    ser.require(cfg.local_crop_min <= cfg.local_crop_max,
                f"--local-crop-min {cfg.local_crop_min} is larger than --local-crop-max {cfg.local_crop_max}")
    return ser.build(cfg, MultiCrop)

if __name__ == "__main__":
    ser.leave(ser.main(None, Settings, build))

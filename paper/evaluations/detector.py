"""Faster R-CNN on a frozen encoder, for coco.py: torchvision's, on ViTDet's simple feature pyramid
(Li et al. 2022). A plain ViT has one map at one resolution, and objects come in all sizes; so the
map of the last block is enlarged and reduced to five, by layers that are trained with the detector.

Axes: B images, D width of the encoder, C channels, H x W places of a map, h x w pixels.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator

from ser import ViT, require, seed_of

class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of each place of a map (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)

def smooth(width: int) -> list[nn.Module]:
    """ViTDet's end of a level: to 256 channels, and one 3 x 3 convolution."""
    return [nn.Conv2d(width, 256, 1, bias=False), MapNorm(256, eps=1e-6),
            nn.Conv2d(256, 256, 3, padding=1, bias=False), MapNorm(256, eps=1e-6)]

class Pyramid(nn.Module):
    """ViTDet's simple feature pyramid on a frozen encoder: images (B, 3, h, w) -> five maps of 256
    channels at 4, 2, 1, 1/2 and 1/4 of the resolution of the token grid."""
    out_channels = 256     # Faster R-CNN asks

    def __init__(self, encoder: ViT):
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        D = encoder.dim
        four_times = [nn.ConvTranspose2d(D, D // 2, 2, 2), MapNorm(D // 2, eps=1e-6), nn.GELU(),
                      nn.ConvTranspose2d(D // 2, D // 4, 2, 2)]
        self.levels = nn.ModuleDict({
            "0": nn.Sequential(*four_times, *smooth(D // 4)),
            "1": nn.Sequential(nn.ConvTranspose2d(D, D // 2, 2, 2), *smooth(D // 2)),
            "2": nn.Sequential(*smooth(D)),
            "3": nn.Sequential(nn.MaxPool2d(2), *smooth(D)),
        })

    def train(self, mode: bool = True) -> Pyramid:
        """Switch all but the encoder, which stays in eval mode."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        last = self.encoder.depth
        # bf16 ends here: torchvision computes boxes in the type of the heads' outputs, and bf16
        # places a box at 800 pixels in steps of 4.
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            with torch.no_grad():
                # Choice: the map of the last block alone, after the encoder's last LayerNorm. In
                # training, tokens attend to the padding between an image and the batch's largest.
                tokens = self.encoder([images], (last,))[0].maps[last].movedim(1, -1)
                x = self.encoder.norm(tokens).movedim(-1, 1)
            maps = {name: level(x).float() for name, level in self.levels.items()}
        maps["pool"] = maps["3"][:, :, ::2, ::2]
        return maps

def detector(encoder: ViT, classes: int, cfg: Any) -> FasterRCNN:
    """torchvision's Faster R-CNN for the labels below `classes`, 0 being the background. It takes
    images in [0, 1] of any size, brings their shorter side to cfg.min_size, unless the longer one
    would exceed cfg.max_size, and normalises them as the encoder was trained. New weights come from
    cfg.seed. Raises UserError unless there are five cfg.anchors, one for each level, and the patch
    is a power of two, to which torchvision rounds the scale of a level."""
    given = " ".join(map(str, cfg.anchors))
    require(len(cfg.anchors) == 5, f"--anchors {given}: give five, one for each level")
    require(math.log2(encoder.patch_size).is_integer(), f"--checkpoint: a patch of "
            f"{encoder.patch_size} pixels: the detector needs a power of two")
    torch.manual_seed(seed_of(cfg.seed, "detector"))
    sides = tuple((side,) for side in cfg.anchors)
    ratios = ((0.5, 1.0, 2.0),) * 5
    # Choice: RPN and box head are torchvision's; ViTDet's have more convolutions. Images are padded
    # to common multiples of torchvision's 32 and of a place of the coarsest level, 4 patches: else
    # torchvision, which divides a side by its places and rounds down, sets anchors too close. (It
    # also guesses the scale of a level, wrongly so for images of less than about 140 pixels.)
    return FasterRCNN(Pyramid(encoder), classes, cfg.min_size, cfg.max_size,
                      rpn_anchor_generator=AnchorGenerator(sides, ratios),
                      size_divisible=math.lcm(32, 4 * encoder.patch_size))

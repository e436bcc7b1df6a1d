"""MoCo-v3 + E-SSL (Dangovski et al. 2022): say by how much a small crop is turned.

    Table 1               M     IN-1k          Sketch         V2             R
    MoCo-v3, 2 views      42.9  68.44 / 88.02  17.65 / 31.87  56.54 / 78.68  18.59 / 30.08
    + E-SSL, 2+4 views    43.3  70.6  / 89.85  19.23 / 34.77  58.33 / 80.93  19.86 / 32.36
    Not decoupled in the paper; `--layer 3` does it as it is done to AugSelf and EquiMod.

    x_k = one crop of 96 x 96 pixels after k counter-clockwise quarter turns, k = 0, 1, 2, 3
    logits_k = head(f of x_k)
    L_eq = mean over images and k of cross-entropy(logits_k, k)
    loss = L_inv + L_eq                                                     L_inv: on views 1 and 2

    python -m paper.methods.essl                              drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.essl --data /imagenet
    torchrun --nproc_per_node=8 -m paper.methods.essl --data /imagenet --mode inv --out runs/inv
    torchrun --nproc_per_node=8 -m paper.methods.essl --data /imagenet --layer 3 --out runs/essl-3
    python eval_linear.py --checkpoint runs/essl/last.pt --data /imagenet

`--mode inv` is the release's control: the turned crops are further queries of MoCo-v3's loss, and
nothing is asked about their turns. Neither paper nor release tells which of the two gave 70.6.
# Choice: the four turns of one crop are the paper's "4 local views", as in E-SSL and the release.
Its own paper has SimCLR, SimSiam and Barlow Twins with a ResNet-50 and weights of 0.4, 0.08 and 8.
(MoCo-v3's L_inv is 4 tau = 0.8 times SimCLR's mean cross-entropy.)
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
from ser import (INF, TINY, Batch, MoCoV3, Policy, View, ViT, info_nce, ranks_and_rank, require,
                 setting)

@dataclasses.dataclass(frozen=True)
class ESSLSettings(addon.AddOnSettings):
    """Base method + E-SSL."""
    out: str = setting("runs/essl", 0, 0, "folder of the run; a run that is there continues")
    # Choice: the default of the release, which publishes no command.
    weight: float = setting(1.0, 0, INF, "of L_eq, with inv of its 8 terms (release: 1)")
    # Choice: essl, as the row is named.
    mode: str = setting("essl", 0, 0, "essl: predict the turns; inv: contrast the turned crops")
    local_size: int = setting(96, 1, INF, "side of the small crop, pixels (E-SSL: 96)")
    local_min: float = setting(0.05, TINY, 1, "least area of the small crop, share (E-SSL: 0.05)")
    local_max: float = setting(0.14, TINY, 1, "largest area of it (E-SSL: 0.14)")
    drawn: ClassVar[dict[str, Any]] = addon.AddOnSettings.drawn | dict(
        local_size=16, local_min=0.1, local_max=0.3)
    program: ClassVar[str] = "-m paper.methods.essl"

    @property
    def policies(self) -> tuple[Policy, ...]:
        """T of views 1 and 2, then the small crop's."""
        small = Policy(self.local_size, (self.local_min, self.local_max), blur=0.1, solarize=0.0,
                       blur_max=self.blur_max)
        return *super().policies, small

class Remembering(MoCoV3):
    """MoCo-v3 that keeps its two keys, so that --mode inv need not make them again."""

    def __init__(self, encoder: ViT, cfg: Any):     # as in ser.build
        super().__init__(encoder, 256, cfg.moco_hidden, cfg.moco_temperature, cfg.moco_momentum)
        self.keys: list[Tensor] = []

    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        self.keys = []
        return super().forward(views, cls)

    def key(self, view: View) -> Tensor:
        self.keys.append(super().key(view))
        return self.keys[-1]

class TurnedCrops(addon.AddOn):
    """A base method on two views, and a loss on the four turns of a small crop."""

    def views(self, batch: Batch) -> list[View]:
        """View 1, view 2, and the small crop after 0, 1, 2 and 3 quarter turns."""
        *whole, small = batch.views
        crop = small.images[0]
        return whole + [small._replace(images=[torch.rot90(crop, k, (2, 3))]) for k in range(4)]

class ESSL(TurnedCrops):
    """E-SSL: a head says by how many quarter turns the crop was turned."""

    def __init__(self, base: nn.Module, cfg: Any):
        dim = base.encoder.dim
        # Choice: these widths, as in the release. E-SSL has 2048, 2048 and 128.
        turns = nn.Sequential(
            nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(True),
            nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(True),
            nn.Linear(dim, 256), nn.LayerNorm(256), nn.Linear(256, 4))
        super().__init__(base, cfg, dict(turns=turns))

    def equivariance_loss(self, features: list[Tensor],
                          views: list[View]) -> tuple[Tensor, dict[str, Any]]:
        """Cross-entropy of the four answers, ln 4 at chance."""
        said = self.heads["turns"](torch.cat(features[2:])).float()     # (4B, 4)
        # The rows of all crops that were not turned, then of all that were turned once, ...
        turns = torch.arange(4, device=said.device).repeat_interleave(len(features[0]))
        top1 = (said.argmax(1) == turns).float().mean()
        return F.cross_entropy(said, turns), {
            "equiv_chance": math.log(4), "turns_top1": top1, "turns_top1_chance": 0.25}

class Control(TurnedCrops):
    """--mode inv, no equivariance, though the log calls it `equiv`: the turned crops are further
    queries of MoCo-v3, 8 terms beside the 2 of L_inv."""

    def equivariance_loss(self, features: list[Tensor],
                          views: list[View]) -> tuple[Tensor, dict[str, Any]]:
        """The sum over turned crops and keys, as in the release, not the mean: 8 terms."""
        total = 0.0
        top1 = 0.0
        for f in features[2:]:
            q = self.base.predictor(self.base.projector(f))
            for k in self.base.keys:
                loss, found = info_nce(q, k, self.base.temperature)
                total = total + loss
                top1 = top1 + found / 8     # the mean of 8 terms
        rows = len(features[0]) * ranks_and_rank()[0]
        return total, {"equiv_chance": 16 * self.base.temperature * math.log(rows),
                       "local_top1": top1, "local_top1_chance": 1 / rows}

def build(cfg: Any) -> TurnedCrops:
    """The model of a run. Raises UserError, also for a small crop that does not fit."""
    fit = math.ceil(cfg.local_size / cfg.patch_size) * cfg.patch_size
    require(fit == cfg.local_size, f"--local-size {cfg.local_size} is no multiple of --patch-size "
            f"{cfg.patch_size}: try {fit}")
    require(cfg.local_min <= cfg.local_max,
            f"--local-min {cfg.local_min} is larger than --local-max {cfg.local_max}")
    require(cfg.mode in ("essl", "inv"), f"--mode {cfg.mode}: choose essl or inv")
    if cfg.mode == "essl":
        return ESSL(addon.base_method(cfg), cfg)
    require(cfg.base == "moco" and cfg.layer == cfg.depth, f"--base {cfg.base}, --layer "
            f"{cfg.layer}: --mode inv needs --base moco and --layer {cfg.depth}")
    return Control(addon.base_method(cfg, Remembering), cfg, heads={})

Settings = addon.settings_on("moco", ESSLSettings)

if __name__ == "__main__":
    ser.leave(addon.main(ESSLSettings, build))

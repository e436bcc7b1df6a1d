"""MoCo-v3 + EquiMod (Devillers & Lefort 2023): predict an augmented view from the plain image.

    Table 1      M     IN-1k          Sketch         V2             R              3DIE
    MoCo-v3      42.9  68.44 / 88.02  17.65 / 31.87  56.54 / 78.68  18.59 / 30.08  68.43 / 91.96
    + EquiMod    43.3  68.95 / 88.87  14.81 / 28.11  56.31 / 79.93  16.54 / 27.32  67.97 / 91.97
    Layer decoupling: IN-1k top-1 68.95 at layer 12, 69.51 at layer 3 (`--layer 3`).

    y_0, y_1, y_2 = project(f of the plain image, of view 1, of view 2)
    p_v = action(18 parameters of view v's augmentation)
    yhat_v = predict([y_0 | p_v])                                           v = 1, 2
    y = [y_1; y_2], yhat = [yhat_1; yhat_2]
    L_eq = (InfoNCE(y -> yhat) + InfoNCE(yhat -> y)) / 2                  each 2 tau * cross-entropy
    loss = L_inv + L_eq

    python -m paper.methods.equimod                           drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.equimod --data /imagenet
    torchrun --nproc_per_node=8 -m paper.methods.equimod --data /imagenet --layer 3 --out runs/mod-3
    python eval_linear.py --checkpoint runs/equimod/last.pt --data /imagenet

`eqgain` in the log is the mean of cos(y, yhat) - cos(y, y_0): above 0 the action is used.
Its own paper has SimCLR and BYOL, a ResNet-50 and a projector 2048 wide. The negatives of its L_eq
are other y and other yhat alike; here they are of the other side only, as in the release. In its
SimCLR version L_inv and L_eq are both means; here L_inv is MoCo-v3's sum of two directions, so that
L_eq weighs half as much.
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
from ser import INF, TINY, Jitter, Policy, View, mlp, ranks_and_rank, setting

@dataclasses.dataclass(frozen=True)
class EquiModSettings(addon.AddOnSettings):
    """Base method + EquiMod."""
    out: str = setting("runs/equimod", 0, 0, "folder of the run; a run that is there continues")
    weight: float = setting(1.0, 0, INF, "of L_eq (EquiMod, release: 1)")
    temperature: float = setting(0.2, TINY, INF, "of L_eq's InfoNCE (EquiMod, release: 0.2)")
    program: ClassVar[str] = "-m paper.methods.equimod"
    unused: ClassVar[tuple[str, ...]] = ("ratio", "equiv_layers", "group")

    @property
    def policies(self) -> tuple[Policy, ...]:
        """T of views 1 and 2, then the plain image: its center, neither flipped nor jittered."""
        plain = Policy(self.image_size, area=None, blur=0.0, solarize=0.0)
        return *super().policies, plain

# Mean and standard deviation of every parameter under MoCo-v3's T, both views together.
# Choice: the true ones. Those of the official code, and so of the release, have the deviations of
# jitter (.8, .8, .8, .2), the sigma of blur with probability .5, and flags of blur and solarization
# that fit no probability. A linear layer and BatchNorm follow, so this, and another T, change only
# what each parameter weighs at the beginning.
PARAMETERS = {
    # Choice: in shares of the image; theirs are in pixels of the file. These four are measured on
    # images of 500 x 375 pixels, the rest is exact.
    "top": (0.140, 0.136),
    "left": (0.218, 0.161),
    "height": (0.720, 0.187),
    "width": (0.563, 0.173),
    "flip": (0.5, 0.5),
    "jittered": (0.8, 0.4),
    # The number of the first, second, ... operation (0 brightness, 1 contrast, 2 saturation, 3
    # hue): every order equally often, but 0 1 2 3 without jitter.
    "first": (1.2, math.sqrt(1.36)),
    "second": (1.4, math.sqrt(1.04)),
    "third": (1.6, math.sqrt(1.04)),
    "fourth": (1.8, math.sqrt(1.36)),
    "brightness": (1.0, 0.4 * math.sqrt(0.8 / 3)),
    "contrast": (1.0, 0.4 * math.sqrt(0.8 / 3)),
    "saturation": (1.0, 0.2 * math.sqrt(0.8 / 3)),
    "hue": (0.0, 0.1 * math.sqrt(0.8 / 3)),
    "gray": (0.2, 0.4),
    "blurred": (0.55, math.sqrt(0.55 * 0.45)),
    "sigma": (0.5775, 0.6621),
    "solarized": (0.1, 0.3),
}

def parameters(view: View) -> Tensor:
    """What T did to the images of a view, standardised, (B, 18) in the order of PARAMETERS."""
    crop = view.crop
    jitter = view.jitter
    jittered = torch.zeros_like(jitter.gray)     # True where any factor is not the default
    for name in ("brightness", "contrast", "saturation", "hue"):
        jittered |= getattr(jitter, name) != getattr(Jitter(), name)
    places = dict(zip(("first", "second", "third", "fourth"), jitter.order.unbind(1)))
    values = crop._asdict() | jitter._asdict() | places
    values |= {"jittered": jittered, "blurred": jitter.blur > 0, "sigma": jitter.blur,
               "solarized": jitter.solarize}
    columns = torch.stack([values[name].float() for name in PARAMETERS], dim=1)
    mean, std = torch.tensor(list(PARAMETERS.values())).unbind(1)
    return (columns - mean) / std

class EquiMod(addon.AddOn):
    """A base method with a network that acts on the embedding of the plain image."""

    def __init__(self, base: nn.Module, cfg: Any):
        dim = base.encoder.dim
        project = mlp(dim, dim, dim, 128)
        action = nn.Sequential(nn.Linear(18, 128, bias=False), nn.BatchNorm1d(128))
        # EquiMod's paper: linear by design, so that the action does the work, not a deep predictor.
        predict = mlp(256, 128)
        super().__init__(base, cfg, dict(project=project, action=action, predict=predict))
        self.temperature = cfg.temperature

    def equivariance_loss(self, features: list[Tensor],
                          views: list[View]) -> tuple[Tensor, dict[str, Any]]:
        """InfoNCE between the views' embeddings and their predictions, the mean of the two ways."""
        # Choice: BatchNorm sees a view at a time, as in the release; officially all three at once,
        # so that the mean of y0 may differ from that of y1 and y2.
        y1, y2, y0 = (self.heads["project"](f) for f in features)     # in the order of `policies`
        y = torch.cat([y1, y2])                                                         # (2B, 128)
        plain = torch.cat([y0, y0])
        values = torch.cat([parameters(view) for view in views[:2]])                    # (2B, 18)
        p = self.heads["action"](values.to(y.device))                                   # (2B, 128)
        predicted = self.heads["predict"](torch.cat([plain, p], dim=1))                 # (2B, 128)
        loss, top1 = addon.both_ways(y, predicted, self.temperature)
        with torch.no_grad():
            gain = F.cosine_similarity(y, predicted) - F.cosine_similarity(y, plain)
        rows = len(y) * ranks_and_rank()[0]
        return loss / 2, {"equiv_chance": 2 * self.temperature * math.log(rows),
                          "equiv_top1": top1, "equiv_top1_chance": 1 / rows,
                          "eqgain": gain.mean(), "eqgain_chance": 0.0}

def build(cfg: Any) -> EquiMod:
    """The model of a run. Raises UserError."""
    return EquiMod(addon.base_method(cfg), cfg)

Settings = addon.settings_on("moco", EquiModSettings)

if __name__ == "__main__":
    ser.leave(addon.main(EquiModSettings, build))

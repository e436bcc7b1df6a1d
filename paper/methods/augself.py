"""MoCo-v3 + AugSelf (Lee et al. 2021): predict how the augmentations of two views differ.

    Table 1      M     IN-1k          Sketch         V2             R              3DIE
    MoCo-v3      42.9  68.44 / 88.02  17.65 / 31.87  56.54 / 78.68  18.59 / 30.08  68.43 / 91.96
    + AugSelf    43.7  67.55 / 87.62  13.30 / 25.35  53.74 / 76.68  17.62 / 28.66  64.97 / 90.73
    Layer decoupling: IN-1k top-1 67.55 at layer 12, 68.23 at layer 3 (`--layer 3`).

    crop  = box of view a - box of view b               center y, center x, height, width
    color = jitter of view a - jitter of view b         brightness, contrast, saturation, hue
    L_eq  = mean over both orders (a, b) = (1, 2), (2, 1) of
            MSE(tanh(head_crop([f_a | f_b])), crop) + MSE(tanh(head_color([f_a | f_b])), color)
    loss  = L_inv + 0.5 * L_eq

    python -m paper.methods.augself                           drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.augself --data /imagenet
    torchrun --nproc_per_node=8 -m paper.methods.augself --data /imagenet --layer 3 --out runs/aug-3
    ... --blur 0.5 0.5 --solarize 0 0 --saturation 0.4        T of the release's AugSelf
    ... the same and --tasks rotation --weight 0.3            its variant with turned views
    python eval_linear.py --checkpoint runs/augself/last.pt --data /imagenet

Its own paper has ResNets and, with MoCo-v2, f_2 from the momentum branch, without gradient. Here
both features are online, as in its SimSiam version and in the release. The table's 43.7 M are with
one head that the release does not train; the two heads that it trains make 44.2 M. The release's
script has weight 0.5 at layer 12, tries 0.5, 0.3, 0.1 and 0.03 at layer 3 (which of them gave 68.23
it does not say), and 0.05 to 3 with turned views.
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
from ser import INF, TINY, Batch, Crop, Geometry, Jitter, Key, View, require, setting

TASKS = ("crop", "color", "rotation")
MOCO_SATURATION = 0.2     # ser.sample_jitter draws the factor from 1 - 0.2 to 1 + 0.2

@dataclasses.dataclass(frozen=True)
class AugSelfSettings(addon.AddOnSettings):
    """Base method + AugSelf."""
    out: str = setting("runs/augself", 0, 0, "folder of the run; a run that is there continues")
    weight: float = setting(0.5, 0, INF, "of L_eq (release at layer 12, AugSelf: 0.5)")
    tasks: tuple[str, ...] = setting(("crop", "color"), 0, 0, f"what to predict: {' '.join(TASKS)}")
    saturation: float = setting(MOCO_SATURATION, TINY, 1,
                                "largest change of its factor (MoCo-v3: 0.2, release: 0.4)")
    mirror: str = setting("own", 0, 0, "a center is mirrored by the flip of: own, or first view")
    program: ClassVar[str] = "-m paper.methods.augself"

    def dataset(self, source: Any) -> RescaledSaturation:
        """Draws of T, with the range of `saturation`."""
        data = RescaledSaturation(source, self.policies, self.seed)
        data.strength = self.saturation
        return data

class RescaledSaturation(ser.Dataset):
    """Images whose saturation changes by up to `strength` in place of MoCo-v3's 0.2."""
    strength = MOCO_SATURATION

    def draw(self, key: Key, image: Tensor) -> list[tuple[Crop, Jitter]]:
        draws = []
        for crop, jitter in super().draw(key, image):
            saturation = 1 + (jitter.saturation - 1) * self.strength / MOCO_SATURATION
            draws.append((crop, jitter._replace(saturation=saturation)))
        return draws

def crops(first: Crop, second: Crop, mirror: str = "own") -> Tensor:
    """Box of the first view minus that of the second, (B, 4): center y, center x, height, width, in
    shares of the image. A flip mirrors the image, and with it center x."""
    # Choice: each center is mirrored by the flip of its own view, so that exchanging the views
    # negates the target. The official code and the release mirror both by the first view's
    # (mirror="first"): then it is the displacement that the pair shows, also where one view alone
    # is flipped and `own` asks for the sum of two places.
    flip = first.flip if mirror == "first" else second.flip
    return box(first, first.flip) - box(second, flip)

def box(crop: Crop, flip: Tensor) -> Tensor:
    """(B, 4): center y, center x, height, width of a collated Crop, whose fields are (B,) doubles,
    mirrored where `flip` (B,) says so."""
    y = crop.top + crop.height / 2
    x = crop.left + crop.width / 2
    x = torch.where(flip, 1 - x, x)
    return torch.stack([y, x, crop.height, crop.width], dim=1).float()

def colors(first: Jitter, second: Jitter, saturation: float = MOCO_SATURATION) -> Tensor:
    """Jitter of the first view minus that of the second, (B, 4), in widths of the ranges."""
    ranges = torch.tensor([0.8, 0.8, 2 * saturation, 0.2])     # .6 to 1.4, twice; hue -.1 to .1
    return (factors(first) - factors(second)) / ranges

def factors(jitter: Jitter) -> Tensor:
    """(B, 4): what multiplies or shifts brightness, contrast, saturation and hue."""
    columns = [jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue]
    return torch.stack(columns, dim=1).float()

# A view is turned 0 times with probability 0.625 and 1, 2 or 3 times with 0.125 each. So two views
# differ by 0 with 0.625^2 + 3 * 0.125^2 and by 1, 2, 3 with 0.1875 each; chance is the entropy.
ROTATION_TOP1_CHANCE = 0.4375
ROTATION_CHANCE = -ROTATION_TOP1_CHANCE * math.log(ROTATION_TOP1_CHANCE) - 0.5625 * math.log(0.1875)

def turn(view: View) -> View:
    """The view with half of its images turned by 0 to 3 quarter turns, and its geometry, in which
    a token is a pixel. The draws repeat in a resumed run: ser.train seeds torch for every step and
    rank."""
    images = view.images[0]
    chosen = torch.rand(len(images)) < 0.5
    turns = torch.randint(4, (len(images),)) * chosen
    g = Geometry(torch.zeros_like(chosen), turns, tuple(images.shape[-2:]))
    return view._replace(images=[ser.rho(g, images)], geometry=g)

class AugSelf(addon.AddOn):
    """A base method with heads that read the difference of two views' augmentations."""

    def __init__(self, base: nn.Module, cfg: Any):
        dim = base.encoder.dim
        heads = {task: addon.perceptron(2 * dim, 512, 512, 4, bias=True) for task in cfg.tasks}
        super().__init__(base, cfg, heads)
        self.tasks = cfg.tasks
        self.saturation = cfg.saturation
        self.mirror = cfg.mirror

    def views(self, batch: Batch) -> list[View]:
        # Choice: the base method, too, sees the turned views, as in the release, which then drops
        # crop and color. Here they may stay, as they were before the turn.
        if "rotation" in self.tasks:
            return [turn(view) for view in batch.views]
        return batch.views

    def target(self, task: str, first: View, second: View) -> Tensor:
        """(B, 4), or for rotation (B,), the turns of the first relative to the second."""
        if task == "crop":
            return crops(first.crop, second.crop, self.mirror)
        if task == "color":
            return colors(first.jitter, second.jitter, self.saturation)
        return (first.geometry.turns - second.geometry.turns) % 4

    def equivariance_loss(self, features: list[Tensor],
                          views: list[View]) -> tuple[Tensor, dict[str, Any]]:
        """The sum of the tasks' losses, both orders of the views in one batch of 2B rows. Chance:
        a head that always says 0; for rotation, one that gives every answer its frequency."""
        f1, f2 = features
        pairs = torch.cat([torch.cat([f1, f2], dim=1), torch.cat([f2, f1], dim=1)])     # (2B, 2D)
        total = 0.0
        total_chance = 0.0
        log = {}
        for task in self.tasks:
            target12 = self.target(task, views[0], views[1])
            target21 = self.target(task, views[1], views[0])
            target = torch.cat([target12, target21]).to(pairs.device)
            predicted = self.heads[task](pairs).float()                                 # (2B, 4)
            if task == "rotation":
                loss = F.cross_entropy(predicted, target)
                chance = ROTATION_CHANCE
                log["rotation_top1"] = (predicted.argmax(1) == target).float().mean()
                log["rotation_top1_chance"] = ROTATION_TOP1_CHANCE
            else:
                loss = F.mse_loss(predicted.tanh(), target)
                chance = target.square().mean()
            log |= {task: loss.detach(), f"{task}_chance": chance}
            total = total + loss
            total_chance = total_chance + chance
        return total, log | {"equiv_chance": total_chance}

def build(cfg: Any) -> AugSelf:
    """The model of a run. Raises UserError."""
    tasks = " ".join(cfg.tasks)
    require(set(cfg.tasks) <= set(TASKS) and len(set(cfg.tasks)) == len(cfg.tasks),
            f"--tasks {tasks}: choose among {' '.join(TASKS)}, each once")
    require(cfg.mirror in ("own", "first"), f"--mirror {cfg.mirror}: choose own or first")
    return AugSelf(addon.base_method(cfg), cfg)

Settings = addon.settings_on("moco", AugSelfSettings)

if __name__ == "__main__":
    ser.leave(addon.main(AugSelfSettings, build))

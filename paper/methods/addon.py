"""What the paper's equivariant baselines share: AugSelf, EquiMod, STL and E-SSL (Table 1).

Each adds a loss of its own to an invariance method. So they are siblings of ser.SER: ser.train runs
them, and their checkpoints, logs and evaluation are those of ser.py.

    f_v   = LN([CLS] of view v after block l)     l = 12: the encoder's output, as in their own
                                                  papers (with ResNets)
    L_inv = the base method's loss on the final [CLS] of views 1 and 2
    L_eq  = the method's own loss on f_1, f_2, ...
    loss  = L_inv + weight * L_eq

The paper's table "layer decoupling" moves EquiMod and AugSelf to layer 3 (`--layer 3`), "keeping
the rest of each method unchanged". `--base` chooses MoCo-v3, DINO or Barlow Twins.
# Choice: at layer 3, too, f is [CLS], under a LayerNorm of its own, as in the release's AugSelf,
the only one of which it has such code.
"""
from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Callable, ClassVar, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

import ser
from paper.methods import barlow_twins, dino
from ser import INF, Batch, Encoded, Policy, View, ViT, info_nce, require, setting

# name -> (settings, method for ser.build; None: its MoCo-v3)
BASES = {
    "moco": (ser.Config, None),
    "dino": (dino.Settings, dino.DINO),
    "barlow": (barlow_twins.Settings, barlow_twins.BarlowTwins),
}

@dataclasses.dataclass(frozen=True)
class AddOnSettings:
    """What all four add to the settings of their base method, or replace there. `settings_on` mixes
    it in before those, so that super() is the base's. Each of the four adds a `weight`."""
    # Choice: the same weight for every base method, although L_inv at chance, with 2048 images, is
    # 6.1 for moco, 11.1 for dino and 1.0 for barlow.
    layer: int = setting(12, 1, INF, "L_eq is on the [CLS] after this block (paper: 12 or 3)")
    ratio: float = setting(0.0, 0, 1, "0: no b2, T for every image")
    # Choice: 0 also with --layer 3, as in the release's AugSelf: the early [CLS] has to exist.
    cls_layer: int = setting(0, 0, INF, "[CLS] enters after this block; 0: a plain ViT")
    # Choice: MoCo-v3's T for all four, as the paper names no other. The release trains AugSelf and
    # STL with other T, which the paper does not mention; their files have the flags for that.
    blur: tuple[float, ...] = setting((1.0, 0.1), 0, 1, "probability of blur, views 1 and 2")
    solarize: tuple[float, ...] = setting((0.0, 0.2), 0, 1, "that of solarization, views 1 and 2")
    drawn: ClassVar[dict[str, Any]] = dict(ratio=0.0, cls_layer=0, layer=4)
    # Flags that only SER reads: refused unless at their defaults.
    unused: ClassVar[tuple[str, ...]] = ("ratio", "equiv_layers", "group", "temperature")

    @property
    def policies(self) -> tuple[Policy, ...]:
        """T of views 1 and 2."""
        first, second = super().policies
        return (first._replace(blur=self.blur[0], solarize=self.solarize[0]),
                second._replace(blur=self.blur[1], solarize=self.solarize[1]))

def settings_on(name: str, own: type) -> type:
    """The settings of an add-on on a base method: the base's, joined or replaced by `own`."""
    of_base = BASES[name][0]
    small = of_base.drawn | own.drawn
    del small["equiv_layers"]     # of `unused`: base_method refuses all but the default

    @dataclasses.dataclass(frozen=True)
    class Settings(own, of_base):
        base: str = setting(name, 0, 0, f"base method: {' '.join(BASES)}")
        drawn: ClassVar[dict[str, Any]] = small
        # Those that paper/experiments/decoupling.py does not take over from a run of the base.
        added: ClassVar[tuple[str, ...]] = tuple(field.name for field in dataclasses.fields(own))

    Settings.__doc__ = own.__doc__
    Settings.__module__ = own.__module__     # whose header --help shows
    return Settings

def base_method(cfg: Any, method: Callable[[ViT, Any], nn.Module] | None = None) -> nn.Module:
    """The base method of cfg, or what `method` makes in its place. Raises UserError for an unknown
    base, for settings that only SER reads, and for a layer without [CLS]."""
    # isinstance: cfg may be made for another base, as settings of moco with base="dino".
    require(cfg.base in BASES and isinstance(cfg, BASES[cfg.base][0]),
            f"--base {cfg.base}: choose among {' '.join(BASES)}")
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        require(field.name not in cfg.unused or value == field.default,
                f"--{field.name.replace('_', '-')} {value}: only SER reads it: leave it out")
    for name in ("blur", "solarize"):
        count = len(getattr(cfg, name))
        require(count == 2, f"--{name} has {count} numbers: give two, one for each view")
    require(cfg.cls_layer < cfg.layer <= cfg.depth,
            f"--layer {cfg.layer}: [CLS] is after blocks {cfg.cls_layer + 1}..{cfg.depth}")
    # ser.build puts SER around it: with ratio 0 one without heads, of which only the base is used.
    return ser.build(cfg, method or BASES[cfg.base][1]).base

class AddOn(nn.Module):
    """A base method's loss plus weight * L_eq, on the [CLS] of a layer. A method gives its `heads`
    and overrides `equivariance_loss`, and `views` if the encoder is to see other images."""

    def __init__(self, base: nn.Module, cfg: Any, heads: dict[str, nn.Module]):
        super().__init__()
        self.base = base
        self.layer = cfg.layer
        self.weight = cfg.weight
        self.final = cfg.layer == base.encoder.depth
        self.heads = nn.ModuleDict(heads)
        if not self.final:     # the final [CLS] has the encoder's LayerNorm
            self.heads["norm"] = nn.LayerNorm(base.encoder.dim, eps=1e-6)

    def views(self, batch: Batch) -> list[View]:
        """What the encoder sees, of which the base method gets the first two."""
        return batch.views

    def equivariance_loss(self, features: list[Tensor],
                          views: list[View]) -> tuple[Tensor, dict[str, Any]]:
        """(L_eq, diagnostics) of the features (B, D) of every view; "equiv_chance" among them."""
        raise NotImplementedError

    def feature(self, encoded: Encoded) -> Tensor:
        """f: (B, D)."""
        if self.final:
            return encoded.cls
        return self.heads["norm"](encoded.early[self.layer])

    def forward(self, batch: Batch, diagnose: bool = False) -> dict[str, Tensor | float]:
        """`loss`, which carries the gradient, its parts `inv` and `equiv`, and diagnostics."""
        views = self.views(batch)
        images = [view.images[0] for view in views]     # b1: without b2, all images
        encoded = self.base.encoder(images, [self.layer])
        cls = [one.cls for one in encoded]
        inv = self.base(views[:2], cls[:2])
        features = [self.feature(one) for one in encoded]
        equiv, found = self.equivariance_loss(features, views)
        losses = {"loss": inv + self.weight * equiv, "inv": inv.detach(), "equiv": equiv.detach()}
        if diagnose:     # 1: spread over the sphere, 0: collapsed to a point
            losses["feature_std"] = F.normalize(cls[0].detach().float(), dim=1).std(0).norm()
        return losses | self.base.diagnostics | found

def perceptron(*widths: int, bias: bool) -> nn.Sequential:
    """A head of AugSelf and STL: linear layers with BatchNorm and ReLU between them. Only the last
    one may have a bias; unlike in ser.mlp, nothing follows it."""
    parts: list[nn.Module] = []
    fan_in = widths[0]
    for fan_out in widths[1:-1]:
        parts += [nn.Linear(fan_in, fan_out, bias=False), nn.BatchNorm1d(fan_out), nn.ReLU(True)]
        fan_in = fan_out
    return nn.Sequential(*parts, nn.Linear(fan_in, widths[-1], bias=bias))

def both_ways(a: Tensor, b: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """InfoNCE from a to b and back, (n, K) on each of R ranks: the sum, which is 4 temperature
    ln(R n) at chance, and the share of the rows of a that find their own row of b."""
    # Choice: keys carry gradient, those of other ranks too, as in STL's single process. In the
    # release keys carry none, so that its L_eq pulls about half as hard at the same weight, and in
    # EquiMod's code only those of the own rank do.
    forth, top1 = info_nce(a, b, temperature)
    back, _ = info_nce(b, a, temperature)
    return forth + back, top1

def main(own: type, build: Callable[[Any], AddOn], argv: Sequence[str] | None = None) -> int:
    """Train on the base method that the command line names; returns the exit code."""
    # --base decides which flags there are: it is read before them.
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--base", nargs="?")
    base = reader.parse_known_args(argv)[0].base
    kind = settings_on(base if base in BASES else "moco", own)     # base_method refuses another
    return ser.main(argv, kind, build)

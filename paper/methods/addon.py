"""What the paper's equivariant baselines share: AugSelf, EquiMod, STL and E-SSL (Table 1).

Each adds a loss of its own to MoCo-v3, in the place of SER's: ser.train runs them, and their
checkpoints, logs and evaluation are those of ser.py. There is no b2: T makes all views.

    f_v   = LN([CLS] of view v after block l)     l = 12: the encoder's output, as in their own
                                                  papers (with ResNets)
    L_inv = MoCo-v3's loss on the final [CLS] of views 1 and 2
    L_eq  = the method's own loss on f_1, f_2, ...
    loss  = L_inv + weight * L_eq

The paper's table "layer decoupling" moves EquiMod and AugSelf to layer 3 (`--layer 3`), "keeping
the rest of each method unchanged".
# Choice: at layer 3, too, f is [CLS], under a LayerNorm of its own, as in the release's AugSelf,
the only one of which it has such code.
"""
from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Sequence

from torch import Tensor, nn

import ser
from ser import Encoded, Policy, View

# Choice: [CLS] enters at the input also with --layer 3, as in the release's AugSelf: the early
# [CLS] has to exist.
PLAIN = dict(ratio=0.0, cls_layer=0)
SMALL = ser.SMALL | PLAIN | dict(layer=4)     # what replaces the defaults without --data

def arguments(name: str, **defaults: float) -> ArgumentParser:
    """The flags of ser.py, some with other defaults, and those that all four add."""
    parser = ser.arguments()
    parser.usage = f"python -m paper.methods.{name} [--FLAG VALUE ...]"
    add = parser.add_argument
    add("--layer", type=int, default=12, help="L_eq is on the [CLS] after this block (12 or 3)")
    # Choice: MoCo-v3's T for all four, as the paper names no other. The release trains AugSelf and
    # STL with other T, which the paper does not mention; their headers say how to come near it.
    add("--blur", type=float, nargs=2, default=[1.0, 0.1], help="probability in views 1 and 2")
    add("--solarize", type=float, nargs=2, default=[0.0, 0.2], help="the same of solarization")
    parser.set_defaults(out=f"runs/{name}", **PLAIN, **defaults)
    return parser

def policies(args: Namespace) -> list[Policy]:
    """T of views 1 and 2."""
    area = (args.crop_min, 1.0)
    return [Policy(args.image_size, area, blur, solarize)
            for blur, solarize in zip(args.blur, args.solarize)]

def read(item: str | Tensor) -> Tensor:
    """The image of an item of a data set's source."""
    return ser.read_image(item) if isinstance(item, str) else item

class AddOn(nn.Module):
    """A base method's loss plus weight * L_eq, on the [CLS] of a layer. A method adds its `heads`
    and has equivariance_loss(features, views): (L_eq, its value at chance), features: (B, D) of
    each view."""
    def __init__(self, base: nn.Module, args: Namespace):
        super().__init__()
        self.base = base
        self.layer = args.layer
        self.weight = args.weight
        self.temperature = args.temperature     # of an InfoNCE in L_eq
        self.heads = nn.ModuleDict()
        if args.layer < args.depth:     # the final [CLS] has the encoder's LayerNorm
            self.heads["norm"] = nn.LayerNorm(args.dim, eps=1e-6)

    def feature(self, encoded: Encoded) -> Tensor:
        """f: (B, D)."""
        if "norm" in self.heads:
            return self.heads["norm"](encoded.cls_at[self.layer])
        return encoded.cls

    def forward(self, views: Sequence[View]) -> dict[str, Tensor | float]:
        """`loss`, which carries the gradient, its parts, and what these are at chance."""
        encoded = [self.base.encoder(view.b1, [self.layer]) for view in views]
        inv = self.base(views[:2], [encoded[0].cls, encoded[1].cls])
        features = [self.feature(one) for one in encoded]
        equiv, chance = self.equivariance_loss(features, views)
        return {"loss": inv + self.weight * equiv, "inv": inv.detach(),
                "inv_chance": self.base.chance, "equiv": equiv.detach(), "equiv_chance": chance}

def perceptron(*widths: int, bias: bool = False) -> nn.Sequential:
    """A head of AugSelf and STL: linear layers with BatchNorm and ReLU between them. Only the last
    one may have a bias; unlike in ser.mlp, nothing follows it."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths, widths[1:-1]):
        layers += [nn.Linear(fan_in, fan_out, bias=False), nn.BatchNorm1d(fan_out), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias))

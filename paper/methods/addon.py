"""What the paper's equivariant baselines share: AugSelf, EquiMod, STL and E-SSL (Table 1).

Each of them adds a loss of its own to MoCo-v3, where SER adds L_equiv. They are trained by
ser.train, so eval_linear.py reads their checkpoints as those of ser.py. There is no b2.

    f_v   = LN([CLS] of view v after block l); by default l is the last, so f_v is the output
    L_inv = MoCo-v3's loss on the final [CLS] of views 1 and 2
    L_eq  = the method's own loss on f_1, f_2, ...
    loss  = L_inv + weight * L_eq

The table "layer decoupling" moves EquiMod and AugSelf to layer 3 (`--layer 3`), not STL and E-SSL.
"""
import sys
from argparse import ArgumentParser, Namespace

from torch import Tensor, nn

import ser
from ser import Policy, View, count, share

# Choice: [CLS] enters at the input, for --layer 3. Unlike the release's, it has no position.
PLAIN = dict(ratio=0.0, cls_layer=0)
SMALL = ser.SMALL | PLAIN     # for synthetic images


def arguments(name: str, **defaults: float) -> ArgumentParser:
    """The flags of ser.py with other defaults, and those that all four methods add."""
    parser = ser.arguments()
    parser.set_defaults(out=f"runs/{name}", **PLAIN, **defaults)
    parser.epilog = ("--weight is of L_eq (stl: also of L_tr), --temperature of its InfoNCE, if it "
                     "has one. --ratio must be 0; --equiv-layers and --group have no effect.")
    add = parser.add_argument
    add("--layer", type=count, help="L_eq is on [CLS] after this block (12 or 3); none: the last")
    # Choice: MoCo-v3's T for all four; the headers of AugSelf and STL tell the release's.
    in_each_view = "probability in view 1, and in view 2"
    add("--blur", type=share, nargs=2, default=list(ser.P_BLUR), help=in_each_view)
    add("--solarize", type=share, nargs=2, default=list(ser.P_SOLARIZE), help=in_each_view)
    return parser


def parse(argv: list[str] | None, parser: ArgumentParser, small: dict = SMALL) -> Namespace:
    """The settings of a command line. Exits with one sentence if the method cannot have them."""
    args = ser.parse(argv, parser, small | dict(out=parser.get_default("out") + "-small"))
    if args.ratio > 0:
        sys.exit(f"--ratio {args.ratio:g}: this method has no b2, so --ratio must be 0")
    args.layer = args.layer or args.depth
    if not args.cls_layer < args.layer <= args.depth:
        sys.exit(f"--layer {args.layer}: should be above --cls-layer {args.cls_layer}, and at "
                 f"most --depth {args.depth}")
    return args


def policies(args: Namespace) -> list[Policy]:
    """T of views 1 and 2."""
    moco_v3 = ser.two_view_dataset([], args).policies
    each = zip(moco_v3, args.blur, args.solarize)
    return [view._replace(p_blur=blur, p_solarize=solarize) for view, blur, solarize in each]


class AddOn(nn.Module):
    """A base method's loss plus weight * L_eq. A subclass adds networks to `heads`, and defines
    equivariance_loss(features, views) -> L_eq, where features holds f_v (B, D) of each view."""
    def __init__(self, base: nn.Module, args: Namespace):
        super().__init__()
        self.base = base
        self.layer = args.layer
        self.weight = args.weight
        self.temperature = args.temperature     # of an InfoNCE in L_eq
        # Choice: an early [CLS] gets a LayerNorm of its own, as in the release's AugSelf.
        self.norm = nn.LayerNorm(args.dim, eps=1e-6) if args.layer < args.depth else None
        self.heads = nn.ModuleDict()

    def forward(self, views: list[View]) -> dict[str, Tensor]:
        """`loss`, which carries the gradient, and its parts."""
        encoded = [self.base.encoder(view.b1, [self.layer]) for view in views]
        cls = [one.cls for one in encoded]
        inv = self.base(views[:2], cls[:2])

        features = cls     # after the last block, under the encoder's own LayerNorm
        if self.norm is not None:
            features = [self.norm(one.cls_at[self.layer]) for one in encoded]
        equiv = self.equivariance_loss(features, views)

        loss = inv + self.weight * equiv
        return {"loss": loss, "inv": inv.detach(), "equiv": equiv.detach()}


def perceptron(*widths: int, bias: bool = False) -> nn.Sequential:
    """An MLP of AugSelf and STL, BatchNorm and ReLU between layers. The last may have a bias."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(widths[:-2], widths[1:-1]):
        linear = nn.Linear(fan_in, fan_out, bias=False)
        layers += [linear, nn.BatchNorm1d(fan_out), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias))

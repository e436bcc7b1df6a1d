"""MoCo-v3 + SER with 2 + 4 views: the "2+4 view" row of the paper's Table 1 (linear 71.56).

    python -m paper.methods.multicrop     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.multicrop --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/multicrop/last.pt

An image has two global views, those of MoCo-v3, and four local ones, small crops (paper A.1):

    queries   all six views through the online encoder
    keys      the two global views through the momentum encoder: no loss among local views
    L_inv     InfoNCE of every (query view, key view) of different views: 2 + 4 x 2 = 10 terms
    L_equiv   on b2, within the global pair, whose chance is printed, plus within both local pairs
"""
import sys
from argparse import Namespace

from torch import Tensor

import ser
from ser import View, count, share


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line: those of ser.py, and those of the local views."""
    parser = ser.arguments()
    parser.set_defaults(out="runs/multicrop")
    add = parser.add_argument
    add("--local-size", type=count, default=96, help="side of local views, pixels (release)")
    add("--local-area", type=share, nargs=2, default=[0.05, 0.25], help="of the image (release)")
    small = dict(out="runs/multicrop-small", local_size=16, local_area=[0.1, 0.4], epochs=4.0)
    args = ser.parse(argv, parser, ser.SMALL | small)
    if args.local_size % args.patch_size > 0 or args.local_size > args.image_size:
        sys.exit(f"--local-size {args.local_size}: no multiple of --patch-size up to --image-size")
    return args


def dataset(source: list[str] | Tensor, args: Namespace) -> ser.ViewDataset:
    """MoCo-v3's two views of an image, then four local ones."""
    first, second = ser.two_view_dataset(source, args).policies
    # Choice: in b2, local views are whole images of the local size, each moved by its own g.
    # Each view of b2 is jittered as the same view of b1. In the release, local views of b2 are
    # crops, and all views of b2 are jittered as local views (builder/moco.py:134-136).
    # Choice: DINO's blur, but of .04 to .86 pixels, not .1 to 2. The release grays no local view.
    local = ser.Policy(args.local_size, args.local_area, p_blur=0.5, p_solarize=0.0)
    return ser.ViewDataset(source, [first, second, local, local, local, local], args.seed)


class MultiCrop(ser.MoCoV3):
    """MoCo-v3 whose queries come from all views and whose keys come from the global ones."""
    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        """L_inv, a scalar, from the online [CLS] (B, D) of every view, global views first."""
        keys = [self.key(view) for view in views[:2]]
        # Choice: terms are added, not averaged, as in the release: 10 of L_inv, three of
        # L_equiv. With two views, these would be the two terms of MoCo-v3 and one of L_equiv.
        loss = 0.0
        for i, view_cls in enumerate(cls):
            query = self.predictor(self.projector(view_cls))
            for j, key in enumerate(keys):
                if i != j:
                    loss = loss + ser.info_nce(query, key, self.temperature)
        return loss


class MultiCropSER(ser.SER):
    """Algorithm 1 with L_equiv of each pair of neighbouring views: 1 and 2, 3 and 4, ..."""
    def forward(self, views: list[View]) -> dict[str, Tensor]:
        """`loss`, which carries the gradient, and its parts."""
        encoded = [ser.encode_view(self.base.encoder, view, self.layers) for view in views]
        cls, maps = zip(*encoded)     # of each view, (B, D), and layer -> map of b2
        inv = self.base(views, cls)
        if views[0].b2 is None:
            return {"loss": inv, "inv": inv.detach()}

        equiv = 0.0
        for i in range(0, len(views), 2):
            equiv = equiv + self.equiv_of_views(views[i], views[i + 1], maps[i], maps[i + 1])
        loss = inv + self.weight * equiv
        return {"loss": loss, "inv": inv.detach(), "equiv": equiv.detach()}


def build(args: Namespace) -> MultiCropSER:
    """The model of a run."""
    base = MultiCrop(ser.seed_and_make_encoder(args), hidden=args.moco_hidden)
    return MultiCropSER(base, args.equiv_layers, args.weight, args.temperature)


if __name__ == "__main__":
    ser.train(settings(), build, dataset)
    ser.leave_group()

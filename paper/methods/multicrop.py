"""MoCo-v3 + SER with 2 + 4 views: the "2+4 view" row of the paper's Table 1 (linear top-1 71.56).

    python -m paper.methods.multicrop     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.multicrop --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/multicrop/last.pt

Add `--weight 0 --out runs/multicrop-control` to train the control, where lambda is 0, or
`--ratio 0 --cls-layer 0 --out runs/multicrop-plain` to train MoCo-v3 with 2 + 4 views.

An image has two global views, those of MoCo-v3, and four local ones, small crops (paper A.1):

    queries   all six views through the online encoder
    keys      the two global views through the momentum encoder: no loss among local views
    L_inv     InfoNCE of every (query view, key view) of different views: 2 + 4 x 2 = 10 terms
    L_equiv   on b2, within the global pair and within each of the two local pairs

The online encoder sees 2 x 197 + 4 x 37 tokens an image, 1.38 times those of two views.
"""
import math
import sys
from argparse import Namespace

from torch import Tensor

import ser

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line: those of ser.py, and those of the local views."""
    parser = ser.arguments()
    parser.set_defaults(out="runs/multicrop")
    parser.add_argument("--local-size", type=int, default=96, help="side of local views, pixels")
    parser.add_argument("--local-area", type=float, nargs=2, default=[0.05, 0.25],
                        help="of a local crop, share of the image (release, DINO)")
    small = dict(out="runs/multicrop-small", local_size=16, local_area=[0.1, 0.4], epochs=4.0)
    args = ser.parse(argv, parser, ser.SMALL | small)
    if args.local_size % args.patch_size != 0:
        sys.exit(f"--local-size {args.local_size}: should be a multiple of --patch-size")
    return args

def six_views(source: list[str] | Tensor, args: Namespace) -> ser.Dataset:
    """MoCo-v3's two views of an image, then four local ones."""
    first, second = ser.two_views(source, args).view_settings
    # Choice: in b2 a local view is the whole image at the local size, moved by a g of its own, as
    # 3.2 says of all views; the release moves one crop of 5% to 25% of the image.
    # Choice: blur is as likely as in DINO and the release. Grayscale stays; the release drops it.
    local = ser.ViewSettings(args.local_size, args.local_area, blur=0.5, solarize=0.0)
    return ser.Dataset(source, [first, second, local, local, local, local], args.seed)

class MultiCrop(ser.MoCoV3):
    """MoCo-v3 whose queries come from all views and whose keys come from the two global ones."""
    def forward(self, views: list[ser.View], cls: list[Tensor]) -> Tensor:
        """L_inv, a scalar, from [CLS] (B, D) of every view by the online encoder, global first."""
        keys = [self.key(view) for view in views[:2]]
        # Choice: the 10 terms are added, not averaged, and so are the three of L_equiv, as in the
        # release. With two views that is MoCo-v3: two terms beside one of L_equiv.
        loss = 0.0
        for i, view_cls in enumerate(cls):
            query = self.predictor(self.projector(view_cls))
            for j, key in enumerate(keys):
                if i != j:
                    loss = loss + ser.info_nce(query, key, self.temperature)
        return loss

    def chance(self, batch: int) -> float:
        """L_inv if all embeddings are equal."""
        return 10 * 2 * self.temperature * math.log(batch)

def build(args: Namespace) -> ser.SER:
    """The model of a run; SER takes L_equiv within each pair of neighbouring views."""
    base = MultiCrop(ser.new_encoder(args), hidden=args.moco_hidden)
    return ser.SER(base, args.equiv_layers, args.weight, args.temperature)

if __name__ == "__main__":
    ser.train(settings(), build, six_views)

"""MoCo-v3 with quarter turns in T, a baseline that the paper does not have.

    torchrun --nproc_per_node=8 -m paper.methods.turned --data /imagenet --out runs/turned
    torchrun --nproc_per_node=8 -m paper.methods.turned --data /imagenet --out runs/turned-SER \
        --ratio 0.01 --cls-layer 3

Views of b1 make 0 to 3 quarter turns, which the final embedding learns to ignore. Flags are as
in ser.py, but by default --ratio and --cls-layer are 0. The second command adds SER.
"""
import random
from argparse import Namespace

import ser
from paper.methods.addon import PLAIN


class Turned(ser.ViewDataset):
    """The data set of a run, where views of b1 are turned after their crop. rho_g turns b2."""
    def sample_views(self, image: ser.Tensor, item: ser.Item) -> list:
        views = super().sample_views(image, item)
        _, _, in_b2 = item
        if in_b2:
            return views
        return [(pixels.rot90(random.randrange(4), (1, 2)), aug) for pixels, aug in views]


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line. `turns_in_t` tells the run from one of ser.py."""
    parser = ser.arguments()
    parser.set_defaults(out="runs/turned", turns_in_t=True, **PLAIN)
    return ser.parse(argv, parser, ser.SMALL | PLAIN | dict(out="runs/turned-small"))


def dataset(source: list[str] | ser.Tensor, args: Namespace) -> Turned:
    """What `ser.two_view_dataset` returns, with turns."""
    return Turned(**vars(ser.two_view_dataset(source, args)))


if __name__ == "__main__":
    ser.train(settings(), make_dataset=dataset)
    ser.leave_group()

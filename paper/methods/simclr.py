"""SimCLR (Chen et al. 2020) + SER: how to plug a base method of your own into ser.py.

    python -m paper.methods.simclr --out runs/simclr     # a small ViT on synthetic images
    python eval_linear.py --checkpoint runs/simclr/last.pt

The paper has no SimCLR. A base method is a module, to whose loss SER adds L_equiv, with

    base.encoder         the online ViT, which SER runs
    base(views, cls)     L_inv, a scalar. cls holds the final [CLS] of views 1 and 2, (B, D)
                         each; views hold their images, for a method with a second network
    base.update(p)       moves a teacher, before every step; p = steps done / all steps

B counts the images of one rank, b1 first, then b2. What a method has to do:
    * A loss that compares images takes those of all ranks by `ser.gather`, as `ser.info_nce` does.
    * It computes in fp32, as `ser.train` may run it under autocast. DDP averages gradients.
    * Each parameter that has requires_grad gets a gradient.
    * A teacher's [CLS] is `ser.encode_view(teacher, view)[0]`.
    * A queue is a buffer that is filled by `ser.gather`, as DDP copies buffers of rank 0.
A run that goes on does not notice changed code, so give a new --out then. dino.py has an optimizer
and a schedule of its own, equimod.py other views. Here all of the encoder is trained, and
--moco-hidden has no effect.
"""
from argparse import Namespace

from torch import Tensor, nn

import ser


class SimCLR(nn.Module):
    """SimCLR without negatives of the same view, and with MoCo-v3's factor of 2 tau."""
    def __init__(self, encoder: ser.ViT):
        super().__init__()
        self.encoder = encoder
        self.head = ser.mlp(encoder.dim, 256, 64)     # Choice: small, as this is an example

    def forward(self, views: list[ser.View], cls: list[Tensor]) -> Tensor:
        """A view is to find the other view of its image among the other views of all images."""
        z1 = self.head(cls[0])
        z2 = self.head(cls[1])
        return ser.info_nce(z1, z2, temperature=0.1) + ser.info_nce(z2, z1, temperature=0.1)

    def update(self, progress: float) -> None:
        """Nothing moves between steps."""


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ser.arguments()
    parser.set_defaults(out="runs/simclr")
    return ser.parse(argv, parser)


def build(args: Namespace) -> ser.SER:
    """The model of a run: SimCLR + SER."""
    base = SimCLR(ser.seed_and_make_encoder(args))
    return ser.SER(base, args.equiv_layers, args.weight, args.temperature)


if __name__ == "__main__":
    ser.train(settings(), build)
    ser.leave_group()

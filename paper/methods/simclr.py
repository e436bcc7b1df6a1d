"""SimCLR (Chen et al. 2020) + SER: how to plug a base method of your own into ser.py.

    python -m paper.methods.simclr --out runs/simclr     # a small ViT on synthetic images
    python eval_linear.py --checkpoint runs/simclr/last.pt

The paper has no SimCLR. A base method is a module, to whose loss SER adds L_equiv, with

    base.encoder         the online ViT, which SER runs
    base(views, cls)     L_inv, a scalar. cls holds the final [CLS] of views 1 and 2, (B, D)
                         each; views hold their images, for a method with a second network
    base.update(p)       called before every step, with p = steps done / all steps: a teacher
                         would move here

All of the encoder is trained here. B counts the images of one rank, b1 first, then b2, and
gradients are averaged over ranks. So a loss that compares images takes those of all ranks by
`ser.gather`, as `ser.info_nce` does. It should compute in fp32, as `ser.train` may run it under
autocast. Each parameter that has requires_grad must get a gradient. Buffers, such as queues,
must be alike on all ranks, as DDP copies those of rank 0: fill them by `ser.gather`. A
teacher's [CLS] is `ser.encode_view(teacher, view)[0]`. An optimizer and a schedule of your own:
dino.py. Other views: equimod.py. Flags are ser.py's; --moco-hidden has no effect.
"""
from argparse import Namespace

from torch import Tensor, nn

import ser


class SimCLR(nn.Module):
    """SimCLR without negatives of the same view, and with MoCo-v3's factor of 2 tau."""
    def __init__(self, encoder: ser.ViT):
        super().__init__()
        self.encoder = encoder
        self.head = ser.mlp(encoder.dim, 256, 64)

    def forward(self, views: list[ser.View], cls: list[Tensor]) -> Tensor:
        """Each view of an image is to find the other one among those of all images."""
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

"""MoCo-v3 + EquiMod (Devillers & Lefort 2023): predict an augmented view from the plain image.

    Table 1      M     IN-1k          Sketch         V2             R              3DIE
    MoCo-v3      42.9  68.44 / 88.02  17.65 / 31.87  56.54 / 78.68  18.59 / 30.08  68.43 / 91.96
    + EquiMod    43.3  68.95 / 88.87  14.81 / 28.11  56.31 / 79.93  16.54 / 27.32  67.97 / 91.97
    Layer decoupling: IN-1k top-1 is 68.95 with L_eq at layer 12, and 69.51 at layer 3.

    y_0, y_1, y_2 = project(f of the plain image, of view 1, of view 2)
    p_v = action(18 parameters of view v's augmentation)
    yhat_v = predict([y_0 | p_v])                                           v = 1, 2
    y = [y_1; y_2], yhat = [yhat_1; yhat_2]
    L_eq = (InfoNCE(y -> yhat) + InfoNCE(yhat -> y)) / 2            each 2 tau * cross-entropy
    loss = L_inv + L_eq

    python -m paper.methods.equimod     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.equimod --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/equimod/last.pt

EquiMod's own paper has SimCLR and BYOL, a ResNet-50, and a projector of width 2048. There, the
negatives of y are all other y and yhat; here they are the other yhat only, as in the release.
There, L_inv and L_eq are means. Here, as in the release, L_inv is a sum of two: it weighs double.
"""
from argparse import Namespace

import torch
from torch import Tensor, nn
from torchvision.transforms.functional import center_crop

import ser
from paper.methods import addon, augself
from ser import Augmentation, View


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line; weight and temperature are EquiMod's and the release's."""
    return addon.parse(argv, addon.arguments("equimod", weight=1.0, temperature=0.2))


# Mean and standard deviation of the 18 parameters under MoCo-v3's T, for images of 500 x 375.
# Choice: boxes are shares of the image. EquiMod's numbers are of pixels, and partly of another T.
MEAN = torch.tensor([0.140, 0.218, 0.720, 0.563, 0.5,          # top, left, height, width, flip
                     0.8, 1.2, 1.4, 1.6, 1.8,                  # jittered; its order, as numbers
                     1.0, 1.0, 1.0, 0.0,                       # brightness ... hue
                     0.2, 0.55, 0.5775, 0.1])                  # gray, blurred, sigma, solarized
STD = torch.tensor([0.136, 0.161, 0.187, 0.173, 0.5,
                    0.4, 1.166190, 1.019804, 1.019804, 1.166190,
                    0.206559, 0.206559, 0.103280, 0.051640,
                    0.4, 0.497494, 0.6621, 0.3])


def parameters(view: View) -> Tensor:
    """What T did to the images of a view, (B, 18), standardised, in the order of MEAN."""
    aug = view.augmentation
    factors = augself.factors(aug)                                          # (B, 4)
    jittered = (factors != torch.tensor([1, 1, 1, 0])).any(dim=1)           # (B,)
    # Choice, unlike EquiMod: jittered images share an order. Others have 0, 1, 2, 3, as there.
    order = torch.where(jittered[:, None], view.order, torch.arange(4))     # (B, 4)

    sigma = aug.blur * 224 / view.b1.shape[-1]     # that of a view of 224 pixels
    columns = [aug.top, aug.left, aug.height, aug.width, aug.flip,
               jittered, *order.T, *factors.T,
               aug.gray, sigma > 0, sigma, aug.solarize]
    values = torch.stack(columns, dim=1).float()
    return (values - MEAN) / STD


class EquiMod(addon.AddOn):
    """A base method with a network that acts on the embedding of the plain image."""
    def __init__(self, base: nn.Module, args: Namespace):
        super().__init__(base, args)
        dim = args.dim
        self.heads["project"] = ser.mlp(dim, dim, dim, 128)
        linear = nn.Linear(18, 128, bias=False)
        self.heads["action"] = nn.Sequential(linear, nn.BatchNorm1d(128))
        self.heads["predict"] = ser.mlp(256, 128)     # linear and BatchNorm, as in EquiMod

    def equivariance_loss(self, features: list[Tensor], views: list[View]) -> Tensor:
        """InfoNCE between the embeddings of the views and their predictions, both ways."""
        # Choice: `project` normalises one view at a time, as the release; EquiMod, all three.
        f1, f2, f0 = features     # in the order of `WithPlain`
        project = self.heads["project"]
        y1 = project(f1)                                                  # (B, 128)
        y2 = project(f2)
        y0 = project(f0)
        y = torch.cat([y1, y2])                                           # (2B, 128)

        values = torch.cat([parameters(views[0]), parameters(views[1])])  # (2B, 18)
        p = self.heads["action"](values.to(y.device, non_blocking=True))  # (2B, 128)
        plain = torch.cat([y0, y0])
        predicted = self.heads["predict"](torch.cat([plain, p], dim=1))   # (2B, 128)

        # Choice: keys have a gradient, as EquiMod's keys of the own rank. In the release, keys
        # have no gradient, so L_eq weighs about half as much there.
        forth = ser.info_nce(y, predicted, self.temperature)
        back = ser.info_nce(predicted, y, self.temperature)
        return (forth + back) / 2


class WithPlain(ser.ViewDataset):
    """The views of T, then the plain image: a centre crop, neither flipped nor jittered."""
    def __getitem__(self, item: ser.Item) -> list:
        _, index, _ = item
        image = self.load(index)
        views = self.sample_views(image, item)

        side = round(min(image.shape[1:]) * 224 / 256)
        size = self.policies[0].size
        center = center_crop(image, [side, side])
        plain = ser.resize(center[None], (size, size))[0]
        return views + [(plain, Augmentation())]


def build(args: Namespace) -> EquiMod:
    """The model of a run."""
    return EquiMod(ser.build(args).base, args)


def dataset(source: list[str] | Tensor, args: Namespace) -> WithPlain:
    """Images with two views, made by T, and the plain image."""
    return WithPlain(source, addon.policies(args), args.seed)


if __name__ == "__main__":
    ser.train(settings(), build, dataset)
    ser.leave_group()

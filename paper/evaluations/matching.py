"""Do tokens follow motions that were not trained? Patches of a photograph, found in a warped copy.

    python -m paper.evaluations.matching --data /imagenet/val --checkpoint runs/main/last.pt

Ours; the paper has no such table. SER trains with quarter turns, flips and scalings of the whole
image. Here a copy is rotated by an angle between quarter turns, sheared, or seen in perspective,
by torchvision, and recoloured. A patch of it is matched to the most similar one of the photograph,
which is right if their true distance is less than the side of a patch. About three of all patches
are that near.
"""
from argparse import Namespace
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

import eval_linear
import ser
from paper.evaluations import arguments, check_classes, main

BILINEAR = InterpolationMode.BILINEAR
WARPS = {
    **{f"{angle} degrees": v2.RandomRotation((angle, angle), BILINEAR) for angle in (15, 30, 45)},
    "shear": v2.RandomAffine(0, shear=(-30, 30, -30, 30), interpolation=BILINEAR),
    "perspective": v2.RandomPerspective(0.5, p=1.0)}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder of CLASS/..., as val", samples=False)     # one warp for all
    parser.add_argument("--layer", type=ser.count, help="block of the tokens; none: the last")
    args = parser.parse_args(argv)
    check_classes(args.data)
    return args


def warped(image: Tensor, warp: v2.Transform, size: int) -> tuple[Tensor, Tensor]:
    """The centre (3, S, S) of a warped image (3, 2 S, 2 S), in which no corner comes in, and of
    each of its pixels the row and column that it had in the centre of the image, (2, S, S)."""
    axis = torch.arange(2 * size) + 0.5 - size / 2
    places = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
    # The coordinates move with the image, as further channels, so no geometry is computed here.
    moved = v2.functional.center_crop(warp(torch.cat([image, places])), [size, size])
    return moved[:3], moved[3:]


@torch.no_grad()
def matched(f1: Callable, images: Tensor, warp: v2.Transform, size: int, patch: int,
            name: str) -> float:
    """Percent of the patches of warped images that are matched right, of those whose place is in
    the centre of the image. f1 takes images (B, 3, S, S) to maps. images: (n, 3, 2 S, 2 S) in
    [0, 1]. name: of the seed."""
    axis = torch.arange(size // patch) * patch + patch / 2
    centres = torch.cartesian_prod(axis, axis)                            # (N, 2), rows first
    generator = ser.rng("matching", name)
    right = 0
    total = 0

    for number, image in enumerate(images):
        torch.manual_seed(ser.seed_of("matching", name, number))     # torchvision samples from it
        moved, places = warped(image, warp, size)
        still = v2.functional.center_crop(image, [size, size])
        x = torch.stack([still, moved])
        z = F.normalize(f1(eval_linear.recolour_and_normalise(x, generator)), dim=1).flatten(2)
        nearest = (z[1].T @ z[0]).argmax(1).cpu()     # patch of `moved` -> patch of `still`, (N,)

        true = F.avg_pool2d(places, patch).flatten(1).T                   # (N, 2), in `still`
        inside = ((true > 0) & (true < size)).all(1)
        distance = (centres[nearest] - true).norm(dim=1)
        right += (distance < patch)[inside].sum().item()
        total += inside.sum().item()
    return 100 * right / total


def evaluate(args: Namespace, device: torch.device) -> None:
    """Match the patches of 512 photographs; write, then print."""
    checkpoint = eval_linear.read_checkpoint(args)
    path = eval_linear.results_path(args, "matching.json")
    encoder = checkpoint.encoder.to(device)
    size = encoder.image_size
    layer = args.layer or encoder.depth

    # Choice: of the photograph, the middle half is seen, so that no corners come in.
    folder = eval_linear.ClassFolder(args.data, eval_linear.eval_transform(2 * size))
    images = torch.stack([image for image, _ in eval_linear.spread(folder, 512)]) / 255

    def f1(x: Tensor) -> Tensor:
        return eval_linear.map_after(encoder, layer, x.to(device))

    values = {f"{name} matching %": matched(f1, images, warp, size, encoder.patch_size, name)
              for name, warp in WARPS.items()}
    rows = eval_linear.make_rows(values, "val", None, layer)
    eval_linear.add_rows(path, rows, args, checkpoint, eval_linear.describe_sets({"val": folder}))
    for measure, value in values.items():
        print(f"{measure:32}{value:6.1f}")
    print(f"after block {layer}; results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)

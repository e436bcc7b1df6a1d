r"""What SER does, seen: which patches of a photograph are matched after a quarter turn.

    python -m paper.evaluations.correspondence --data /imagenet/val \
        --checkpoint runs/moco/last.pt runs/main/last.pt --label MoCo-v3 SER

Ours; the paper has no such figure. Writes correspondence-*.png, with a row for the first photograph
of each of the first three classes, or for one photograph that --data names. A row has the
photograph, a rotated and recoloured copy, and the copy again for each checkpoint. In it,
patches matched to their own places keep their colours, and others fade to white.
"""
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

import eval_linear
import ser
from paper.evaluations import arguments, load_several, main, save_picture


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder of CLASS/..., as val, or a photograph", several=True, samples=False)
    parser.add_argument("--layer", type=ser.count,
                        help="block whose tokens are compared; none: that of L_equiv")
    return parser.parse_args(argv)


def choose_photos(data: str) -> list[str]:
    """The photograph `data` or, chosen before looking, the first ones of up to three classes."""
    if not Path(data).is_dir():
        return [data]
    folder = eval_linear.ClassFolder(data, None)
    return [folder.samples[folder.targets.index(y)][0] for y in sorted({*folder.targets})[:3]]


def copies(photo: Tensor, number: int) -> Tensor:
    """A photograph (3, S, S) in [0, 1] and its turned copy, each in colours of its own, as the
    encoder takes them; (2, 3, S, S). A larger photograph gets the same colours."""
    both = torch.stack([photo, photo.rot90(1, (1, 2))])
    return eval_linear.recolour_and_normalise(both, ser.rng("correspondence", number))


@torch.no_grad()
def matched(encoder: ser.ViT, both: Tensor, layer: int) -> Tensor:
    """For each token of the photograph's turned map after block `layer`: is the nearest token
    of the turned copy at the same place? (H, W) bool. both: (2, 3, S, S), see `copies`."""
    still, moved = eval_linear.map_after(encoder, layer, both)                    # (D, H, W)
    z = eval_linear.unit_tokens(still.rot90(1, (1, 2))[None])                     # (N, D)
    z_prime = eval_linear.unit_tokens(moved[None])
    nearest = (z @ z_prime.T).argmax(1)
    own = torch.arange(len(nearest))
    return (nearest == own).view(moved.shape[1:])


def evaluate(args: Namespace, device: torch.device) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    runs = load_several(args)
    # For all runs, the block after which L_equiv acted in SER's run, before the projector.
    layers = {layer for run in runs for layer in run.settings["equiv_layers"]}
    if not args.layer and len(layers) != 1:
        sys.exit(f"--layer: should be given, as L_equiv is after blocks {sorted(layers)}")
    layer = args.layer or layers.pop()

    sizes = {(run.encoder.image_size, run.encoder.patch_size) for run in runs}
    if len(sizes) > 1:
        sys.exit(f"--checkpoint: images and patches are of several sizes, {sorted(sizes)}")
    size = runs[0].encoder.image_size

    photos = choose_photos(args.data)
    columns = 2 + len(runs)
    figure = Figure(figsize=(2.4 * columns, 2.75 * len(photos)), layout="constrained")
    panels = figure.subplots(len(photos), columns, squeeze=False,
                             subplot_kw={"xticks": [], "yticks": []})

    for number, (row, photo) in enumerate(zip(panels, photos)):
        ser.read_image(photo)     # which refuses some files, for all programs alike
        # Training and evaluations ignore EXIF flags. Here a phone's photograph stands upright.
        with Image.open(photo) as file:
            image = pil_to_tensor(ImageOps.exif_transpose(file).convert("RGB"))
        seen = eval_linear.eval_transform(size)(image) / 255
        shown = eval_linear.eval_transform(2 * size)(image) / 255
        copy = copies(shown, number)[1] * ser.STD + ser.MEAN
        pictures = [("photograph", shown), ("rotated and recoloured", copy)]
        for run, name in zip(runs, args.label, strict=True):
            tokens = matched(run.encoder, copies(seen, number), layer)
            title = f"{name}:\n{tokens.sum()} of {tokens.numel()} matched"
            opacity = 0.15 + 0.85 * tokens.float()
            strength = F.interpolate(opacity[None, None], shown.shape[1:])
            pictures.append((title, 1 - strength[0] * (1 - copy)))     # 1 is white

        for panel, (title, picture) in zip(row, pictures):
            panel.set_title(title, fontsize=13)
            panel.imshow(picture.movedim(0, 2).numpy())

    save_picture(figure, "correspondence", args, runs)
    print(f"tokens are those after block {layer}")


if __name__ == "__main__":
    main(settings, evaluate)

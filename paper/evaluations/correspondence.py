r"""What SER does, seen: where a token of a photograph finds its counterpart after a quarter turn.

    python -m paper.evaluations.correspondence --data /imagenet/val \
        --checkpoint runs/moco/last.pt runs/main/last.pt --label MoCo-v3 SER

Ours; the paper has no such figure. Writes correspondence.png, with a row for one photograph of each
of the first three classes: the photograph and the copy turned by 90 degrees, with a patch marked;
and for each checkpoint how similar the marked token of the photograph is to every token of the
copy (black 0, yellow 1), with the true place marked. "Retrieval", which `eval_linear.py
--equivariance` prints, is the share of tokens that find their counterparts, in many images.
"""
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import eval_linear
import ser
from paper.evaluations import arguments, load_several, main


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    return arguments("folder of CLASS/..., as val", several=True).parse_args(argv)


def turn(x: Tensor) -> Tensor:
    """A quarter turn, counter-clockwise, of images or maps (..., S, S)."""
    return torch.rot90(x, 1, (-2, -1))


@torch.no_grad()
def similarities(encoder: ser.ViT, photo: Tensor, marked: Tensor, layer: int) -> Tensor:
    """The cosine similarity (H, W) of the marked token of a photograph (3, S, S) in [0, 1] to
    every token of its turned copy, after a block. marked: (H, W), True at one token."""
    both = torch.stack([photo, turn(photo)])
    still, moved = encoder(ser.normalise(both), [layer]).maps[layer]              # (D, H, W)
    token = still[:, marked]                                                      # (D, 1)
    return F.cosine_similarity(moved, token[:, :, None], dim=0)


def draw(panel: Any, pixels: Tensor, marked: Tensor) -> None:
    """Draw an image or a heat map, one unit of length a token, with a frame at the mark."""
    height, width = marked.shape
    panel.imshow(pixels.numpy(), "magma", vmin=0, vmax=1, extent=(0, width, height, 0))

    row, column = marked.nonzero()[0].tolist()
    x = [column, column + 1, column + 1, column, column]
    y = [row, row, row + 1, row + 1, row]
    panel.plot(x, y, color="cyan", linewidth=2)
    panel.set(xticks=[], yticks=[])


def evaluate(args: Namespace, device: torch.device) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    runs = load_several(args)
    path = eval_linear.results_path(args, "correspondence.png")
    # The block that L_equiv regularised in SER's run, before its projector; the same of others.
    layers = [layer for run in runs for layer in run.settings["equiv_layers"]]

    # Chosen before looking: the first photograph of three classes, and a token above the centre,
    # as a turn leaves a token at the centre where it is.
    grid = runs[0].encoder.grid
    crop = eval_linear.eval_transform(runs[0].settings["image_size"])
    data = eval_linear.class_folder(args.data, crop)
    photos = [data[data.targets.index(label)][0] / 255 for label in range(3)]
    marked = torch.zeros(grid, grid, dtype=torch.bool)
    marked[grid // 4, grid // 2] = True

    columns = 2 + len(runs)
    figure = Figure(figsize=(2.4 * columns, 7.4), layout="constrained")
    panels = figure.subplots(3, columns)
    titles = ["photograph", "turned", *args.label]
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title)

    for row, photo in zip(panels, photos):
        draw(row[0], photo.movedim(0, 2), marked)
        draw(row[1], turn(photo).movedim(0, 2), turn(marked))
        for panel, run in zip(row[2:], runs):
            found = similarities(run.encoder, photo, marked, layers[0])
            draw(panel, found, turn(marked))

    figure.savefig(path)
    print(f"similarities after block {layers[0]} are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)

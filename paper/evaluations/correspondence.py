"""What SER does, seen: tokens of a photograph, joined to their nearest tokens in a moved copy.

Ours. Is the token of rho_g(x) that is most similar to a token of x at its new place? Green: yes.

    python -m paper.evaluations.correspondence --data FOLDER --checkpoint runs/{moco,main}/last.pt

Prints the share of yes over 64 images, adds it to correspondence.json, and plots two of them.
"""
from argparse import Namespace

import torch
from torch import Tensor
from torch.nn.functional import normalize

import eval_linear
import ser
from paper.evaluations import arguments, load_encoders, main, picture


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder of photographs, any depth", True, True)
    # Choice: tokens are compared after the block that L_equiv regularised, before its projector.
    parser.add_argument("--layer", type=int, help="block; none: that of L_equiv, else of [CLS]")
    return parser.parse_args(argv)


def sample_element(name: str, index: int, grid: int) -> ser.Geometry:
    """The element for image `index`: a turn by 90 to 270 degrees, a flip, a scaling (also by 1)."""
    g = ser.sample_geometry(1, grid, [name], ser.rng(name, index))
    flip = torch.tensor([name == "hflip"])
    turns = torch.tensor([1 + index % 3]) * (name == "rot90")
    return ser.Geometry(flip, turns, g.grid)


def centres(grid: tuple) -> Tensor:
    """The centres of the tokens of a grid, (N, 2): row and column, shares of height and width."""
    rows, columns = [(torch.arange(length) + 0.5) / length for length in grid]
    return torch.cartesian_prod(rows, columns)


def destination(g: ser.Geometry, places: Tensor) -> Tensor:
    """Where rho_g brings places (N, 2) of an image, shares of height and width; g of one image."""
    row, column = places.unbind(1)
    if g.flip:
        column = 1 - column
    for _ in range(int(g.turns)):     # counter-clockwise: the right edge becomes the upper one
        row, column = 1 - column, row
    return torch.stack([row, column], dim=1)


@torch.no_grad()
def match(encoder: ser.ViT, image: Tensor, g: ser.Geometry, layer: int) -> tuple:
    """The moved copy of an image (3, S, S) in [0, 1]; the places of N tokens and of their most
    similar tokens in the copy (N, 2, 2), and whether rho_g brings the first to the second (N,)."""
    copy = ser.rho(g, image[None], encoder.patch_size)
    still = encoder(ser.normalise(image[None]), [layer]).maps[layer]
    moved = encoder(ser.normalise(copy), [layer]).maps[layer]
    z = normalize(still[0].flatten(1), dim=0)                                     # (D, N)
    z_copy = normalize(moved[0].flatten(1), dim=0)                                # (D, M)
    nearest = (z.T @ z_copy).argmax(1)
    start = centres(still.shape[2:])
    end = centres(g.grid)[nearest]
    away = (end - destination(g, start)) * torch.tensor(g.grid)     # in tokens of the copy
    right = (away.abs() <= 0.5001).all(1)     # half a token, up to rounding
    return copy[0].clamp(0, 1), torch.stack([start, end], dim=1), right


def plot_panel(panel, image: Tensor, copy: Tensor, places: Tensor, right: Tensor) -> None:
    """An image, its turned copy at the right, and lines from 40 tokens to their most similar."""
    side = image.shape[2]
    left = side + side // 10     # of the copy
    gap = torch.ones(3, side, left - side)
    panel.imshow(torch.cat([image, gap, copy], dim=2).movedim(0, 2).numpy())
    for token in torch.randperm(len(right), generator=ser.rng("lines"))[:40]:
        (row, column), (end_row, end_column) = places[token].tolist()
        x = [side * column, left + side * end_column]
        y = [side * row, side * end_row]
        colour = "lime" if right[token] else "red"
        panel.plot(x, y, color=colour, linewidth=0.8)
    panel.axis("off")


def evaluate(args: Namespace, device: torch.device) -> None:
    """Measure; plot the turns of two images, a column for each encoder; write and print."""
    from matplotlib.figure import Figure
    encoders, path = load_encoders(args, "correspondence.json")
    runs = [checkpoint.settings for _, checkpoint in encoders[1:]]
    layers = [layer for run in runs for layer in run["equiv_layers"]]
    if args.layer is None:
        args.layer = layers[0] if layers else max(1, runs[0]["cls_layer"])
    figure = Figure(figsize=(3.6 * len(encoders), 3.8), layout="constrained")
    photos, _ = ser.list_images(args.data)
    spread = torch.linspace(0, len(photos) - 1, min(64, len(photos))).long()
    panels = figure.subplots(2, len(encoders))
    for column, (label, checkpoint) in zip(panels.T, encoders):
        encoder = checkpoint.encoder
        centre_crop = eval_linear.eval_transform(encoder.grid * encoder.patch_size)
        images = [centre_crop(ser.read_image(photos[i])) / 255 for i in spread]
        for name in ser.ELEMENTS:
            elements = [sample_element(name, index, encoder.grid) for index in range(len(images))]
            results = [match(encoder, x, g, args.layer) for x, g in zip(images, elements)]
            right = torch.stack([found for _, _, found in results])
            share = 100 * right.float().mean().item()
            values = {f"{name} right %": share}
            rows = eval_linear.make_rows(values, args.data, None, args.layer)
            rows = [row | {"encoder": label} for row in rows]
            eval_linear.write(path, rows, args, checkpoint)
            title = f"{label}, {name}: {share:.1f} % right"
            print(title)
            if name == "rot90":
                column[0].set_title(title)
                for panel, index in zip(column, (0, len(images) // 2)):
                    plot_panel(panel, images[index], *results[index])
    figure.savefig(picture(path, args))
    print(f"tokens after block {args.layer}; {picture(path, args)}")
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate, one_process=True)

"""What SER does, seen: tokens of a photograph, joined to their nearest tokens in a moved copy.

Ours; the paper has no such picture. L_equiv (3.3) pulls the tokens of the same place in x and in
rho_g(x) together, and away from those of other images. Whether they are also nearest among the
tokens of their own image, which it does not ask for, is shown here. Green lines end at the right
token, red ones elsewhere. The untrained encoder and those of all checkpoints see the same images.

    python -m paper.evaluations.correspondence --data PHOTOS \\
        --checkpoint runs/control/last.pt runs/ser/last.pt --label control SER

PHOTOS: image files and folders of any depth. Prints the share of the right tokens over `--images`
images for a turn, a flip, a change of scale, and all three; writes correspondence.json and a PNG
beside the first checkpoint. The copy is moved and nothing else: no jitter, so that what is seen is
equivariance alone. Axes: N tokens of x, M tokens of rho_g(x), H x W token grid (rows first), S side
of what the encoder sees, k S >= 224 side of a photograph, with the smallest k.
"""
from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import os
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import eval_linear
import ser
from paper.evaluations.output import check_out
from paper.evaluations.tsne import load_encoders
from ser import INF, Geometry, ViT, require, setting

ELEMENTS = {"turn": ("rot90",), "flip": ("hflip",), "scale": ("scale",),
            "all three": ("rot90", "hflip", "scale")}

@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a comparison."""
    data: tuple[str, ...] = setting(("",), 0, 0, "image files, and folders of them")
    checkpoint: tuple[str, ...] = setting(("runs/ser/last.pt",), 0, 0, "one or more last.pt")
    label: tuple[str, ...] = setting(("",), 0, 0, "their names; none: the names of their folders")
    # Choice: tokens are compared after the block that L_equiv regularised, before its projector.
    layer: int = setting(0, 0, INF, "compared after this block; 0: the first run's --equiv-layers")
    images: int = setting(64, 1, INF, "images of the shares, drawn from all")
    rows: int = setting(3, 1, 4, "rows of the picture: turn, flip, scale, all three")
    lines: int = setting(40, 1, INF, "tokens of a photograph that the picture joins")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of the images, their elements and the lines")
    out: str = setting("", 0, 0, "the PNG; none: correspondence.png beside the first checkpoint")
    drawn: ClassVar[dict[str, Any]] = {}
    program: ClassVar[str] = "-m paper.evaluations.correspondence"

class Match(NamedTuple):
    """Where the tokens of an image went."""
    expected: Tensor     # (N, 2) where rho_g puts their centres: row, column, in tokens of the copy
    nearest: Tensor      # (N, 2) the centre of the copy's most similar token, likewise

    @property
    def distance(self) -> Tensor:
        """(N,) from `expected` to `nearest`, the larger of rows and columns."""
        return (self.nearest - self.expected).abs().amax(1)

    @property
    def right(self) -> Tensor:
        """(N,) whether `expected` lies in the token whose centre is `nearest`."""
        return self.distance <= 0.5 + 1e-4

def draw_element(name: str, index: int, grid: int, seed: int) -> Geometry:
    """The element of G for image `index`, never the identity of "turn" and "flip"."""
    g = ser.sample_geometry(1, grid, elements=ELEMENTS[name],
                            generator=ser.rng(seed, "correspondence", name, index))
    if name == "turn":
        return g._replace(turns=torch.tensor([1 + index % 3]))
    if name == "flip":
        return g._replace(flip=torch.tensor([True]))
    return g

def centres(grid: tuple[int, int]) -> Tensor:
    """The centres of the tokens of a grid, (N, 2): row and column, shares of height and width."""
    rows = (torch.arange(grid[0]) + 0.5) / grid[0]
    columns = (torch.arange(grid[1]) + 0.5) / grid[1]
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)

def destination(g: Geometry, places: Tensor) -> Tensor:
    """Where rho_g brings places (N, 2) of an image, shares of height and width; g of one image."""
    row, column = places.unbind(1)
    if g.flip:
        column = 1 - column
    for _ in range(int(g.turns)):     # counter-clockwise: the right edge becomes the upper one
        row, column = 1 - column, row
    return torch.stack([row, column], dim=1)

@torch.no_grad()
def match(encoder: ViT, image: Tensor, g: Geometry, layer: int) -> Match:
    """Join the tokens of a normalised image (3, S, S), after block `layer`, to its copy's."""
    x = image[None]
    copy = ser.rho(g, x, encoder.patch_size)
    still, moved = (part.maps[layer] for part in encoder([x, copy], (layer,)))
    z = F.normalize(still.float().flatten(2).mT[0], dim=1)                        # (N, D)
    z_copy = F.normalize(moved.float().flatten(2).mT[0], dim=1)                   # (M, D)
    nearest = (z @ z_copy.T).argmax(1).cpu()                                      # (N,)
    tokens = torch.tensor(g.grid)
    expected = destination(g, centres((encoder.grid, encoder.grid))) * tokens
    return Match(expected, centres(g.grid)[nearest] * tokens)

def shares(encoder: ViT, images: Tensor, layer: int, seed: int) -> dict[str, dict[str, float]]:
    """For every element, in percent over the tokens of normalised images (n, 3, S, S): the right
    ones, those at most one token off, and what a blind choice would get right."""
    found = {}
    for name in ELEMENTS:
        sums = torch.zeros(3, dtype=torch.float64)
        for index, image in enumerate(images):
            g = draw_element(name, index, encoder.grid, seed)
            joined = match(encoder, image, g, layer)
            sums[0] += joined.right.double().mean()
            sums[1] += (joined.distance <= 1.5 + 1e-4).double().mean()
            sums[2] += 1 / math.prod(g.grid)
        right, near, chance = (100 * sums / len(images)).tolist()
        found[name] = {"right": right, "within one token": near, "chance": chance}
    return found

def draw_panel(panel: Any, photograph: Tensor, copy: Tensor, joined: Match, tokens: Tensor) -> None:
    """A photograph (3, k S, k S), its copy (3, h, w) to the right, in [0, 1], and lines from some
    tokens of the one, by number, to those of the other."""
    from matplotlib.collections import LineCollection
    side = photograph.shape[-1]
    grid = math.isqrt(len(joined.expected))
    cell = side // grid
    left = 1.12 * side                                      # the left edge of the copy
    height, width = copy.shape[-2:]
    panel.imshow(photograph.permute(1, 2, 0).numpy(), extent=(0, side, side, 0))
    panel.imshow(copy.permute(1, 2, 0).numpy(), extent=(left, left + width, height, 0))
    start = centres((grid, grid))[tokens] * side                                  # row, column
    end = joined.nearest[tokens] * cell + torch.tensor([0, left])
    lines = torch.stack([start, end], dim=1).flip(2)        # (lines, 2 ends, 2): column, row
    for right, colour, alpha in ((False, "red", 0.5), (True, "lime", 1.0)):
        chosen = lines[joined.right[tokens] == right].numpy()
        panel.add_collection(LineCollection(chosen, colors=colour, alpha=alpha, linewidths=0.9))
    panel.set(xlim=(0, left + 1.3 * side), ylim=(max(side, height), 0))
    panel.axis("off")

def save_picture(path: Path, encoders: dict[str, ViT], photographs: Tensor, layer: int,
         cfg: Settings) -> None:
    """The picture: a row per element, each with a photograph of its own, a column per encoder.
    photographs: (n, 3, k S, k S) in [0, 1], of which the encoders see (S, S)."""
    from matplotlib.figure import Figure
    names = list(ELEMENTS)[:cfg.rows]
    figure = Figure(figsize=(3.4 * len(encoders), 1.7 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), len(encoders), squeeze=False)
    for row, name in enumerate(names):     # image `row`, moved as `shares` moves it
        photograph = photographs[row % len(photographs)]
        for column, (label, encoder) in enumerate(encoders.items()):
            g = draw_element(name, row, encoder.grid, cfg.seed)
            copy = ser.rho(g, photograph[None], photograph.shape[-1] // encoder.grid)[0]
            seen = ser.normalise(shrink(photograph[None], encoder))[0]
            joined = match(encoder, seen.to(encoder.cls_token.device), g, layer)
            order = torch.randperm(encoder.grid ** 2, generator=ser.rng(cfg.seed, "lines", row))
            draw_panel(panels[row, column], photograph, copy.clamp(0, 1), joined,
                       order[:cfg.lines])
            percent = 100 * joined.right.double().mean()
            panels[row, column].set_title(f"{label}, {name}: {percent:.0f} % right", fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    small = Image.open(drawn).convert("RGB").quantize(96)     # a third of the bytes
    small.save(path, "PNG", optimize=True)

def shrink(photographs: Tensor, encoder: ViT) -> Tensor:
    """Photographs (n, 3, k S, k S) at the encoder's size, (n, 3, S, S)."""
    size = encoder.shape["image_size"]
    return ser.resize(photographs, (size, size))

def read_photographs(cfg: Settings, size: int) -> tuple[list[str], Tensor]:
    """The drawn files, and their centres (n, 3, k S, k S) in [0, 1], at least 224 pixels a side."""
    paths = []
    for place in cfg.data:
        paths += [place] if os.path.isfile(place) else ser.list_images(place)
    order = torch.randperm(len(paths), generator=ser.rng(cfg.seed, "photographs"))
    chosen = [paths[i] for i in order[:cfg.images]]
    side = size * math.ceil(224 / size)
    images = []
    for path in chosen:
        try:
            images.append(eval_linear.centre_crop(ser.read_image(path), side))
        except Exception as error:     # decoders raise what they like
            require(False, f"cannot read {path} ({error}): mend it or leave it out")
    return chosen, torch.stack(images).float() / 255

def compare(cfg: Settings) -> dict[str, Any]:
    """Measure and draw; returns what is written. Raises UserError."""
    ser.check_ranges(cfg)
    require(all(cfg.data), "--data: which photographs? give image files or folders")
    require("RANK" not in os.environ, "it runs in one process, without torchrun")
    picture = Path(cfg.out or Path(cfg.checkpoint[0]).with_name("correspondence.png"))
    require(importlib.util.find_spec("matplotlib") is not None,
            "the picture needs matplotlib: pip install -r paper/requirements.txt")
    encoders, digests = load_encoders(cfg.checkpoint, cfg.label, untrained=True)
    check_out(picture, ".png", cfg.program)
    of = list(digests.values())
    check_out(picture.with_suffix(".json"), ".json", cfg.program, of, vars(cfg))
    encoder = encoders["untrained"]
    for label, other in encoders.items():
        sizes = {(each.grid, each.patch_size, each.depth) for each in (encoder, other)}
        require(len(sizes) == 1, f"--checkpoint {label}: its grid, patch or depth is not that of "
                f"{cfg.checkpoint[0]}: compare those that share them")
    config = ser.load_checkpoint(cfg.checkpoint[0])["config"]
    layer = cfg.layer or config.get("equiv_layers", [0])[0]
    require(layer > 0, f"--layer: {cfg.checkpoint[0]} names no layer of L_equiv: give one")
    require(layer <= encoder.depth, f"--layer {layer}: choose among 1..{encoder.depth}")
    paths, photographs = read_photographs(cfg, encoder.shape["image_size"])
    save_picture(picture, encoders, photographs, layer, cfg)
    seen = ser.normalise(shrink(photographs, encoder)).to(encoder.cls_token.device)
    result = {"program": cfg.program, "settings": vars(cfg), "sha256": of, "layer": layer,
              "images": paths, "picture": str(picture),
              "shares": {label: shares(each, seen, layer, cfg.seed)
                         for label, each in encoders.items()}}
    eval_linear.write_json(picture.with_suffix(".json"), result)
    return result

def table(result: dict[str, Any]) -> str:
    """The shares for the screen: a row per element, two columns per encoder."""
    rows = result["shares"]
    lines = [f"tokens after block {result['layer']} whose nearest token is the right one "
             f"(in brackets: at most one token off), %, {len(result['images'])} images",
             f"{'':10}" + "".join(f"{label:>18}" for label in rows) + f"{'chance':>9}"]
    for name in ELEMENTS:
        cells = ""
        for found in rows.values():
            near = f"({found[name]['within one token']:.1f})"
            cells += f"{found[name]['right']:10.1f} {near:>7}"
        lines.append(f"{name:10}{cells}{found[name]['chance']:9.2f}")
    return "\n".join(lines)

def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    def work() -> None:
        result = compare(ser.parse(argv, Settings))
        print(f"{table(result)}\n{result['picture']}")

    return ser.guard(Settings.program, work)

if __name__ == "__main__":
    ser.leave(main())

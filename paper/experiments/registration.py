"""Registration: do the tokens tell how two overlapping crops of a photograph lie to each other?

    python -m paper.experiments.registration --data imagenette-128/val

Both crops have 50 to 100 percent of the photograph's area and are recoloured. The second stays
upright, or is flipped, or turned. Its tokens are matched to those of the first, both ways. Of all
transforms that two of the matches allow, the one that most matches agree with is taken. A pair is
registered if this transform puts the corners of the second crop where they belong, to 10 percent
of the side of the first in the mean. The loss never saw such crops, as it moves whole images.
The last column is the mean over blocks 3 to 6.
"""
import math
from itertools import product
from statistics import mean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import eval_linear
import ser
from paper.evaluations import arguments, load_several

KINDS = {"upright": ([0], 0), "flipped": ([0], 1), "turned": ([1, 2, 3], 0)}     # turns, flip
CORNERS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])


class Crop(NamedTuple):
    """A square crop: its side and its top left corner, in pixels."""
    side: int
    corner: Tensor     # (2,), row and column


def sample_crop(image: Tensor, generator: torch.Generator) -> Crop:
    """A crop of 50 to 100 percent of the area of a square image."""
    size = image.shape[-1]
    side = round(size * math.sqrt(0.5 + 0.5 * torch.rand(1, generator=generator).item()))
    return Crop(side, torch.randint(size - side + 1, (2,), generator=generator))


def cut(image: Tensor, crop: Crop, size: int) -> Tensor:
    """The pixels of a crop in [0, 1], resized to `size`."""
    top, left = crop.corner.tolist()
    pixels = image[:, top:top + crop.side, left:left + crop.side] / 255
    return ser.resize(pixels[None], (size, size))[0]


def undo(points: Tensor, turns: int, flip: int) -> Tensor:
    """Places (..., 2) in a crop that was flipped, then turned -> those in the crop before."""
    y, x = points.unbind(-1)
    for _ in range(turns):
        y, x = x, 1 - y
    return torch.stack([y, 1 - x if flip else x], dim=-1)


def register(first: Tensor, second: Tensor) -> Tensor:
    """Tokens (N, D) of two crops, of length 1 -> where the first crop has the corners of the
    second, (4, 2). A similarity, by the vote of all matches on the transforms of two of them."""
    side = math.isqrt(len(first))
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    places = (places + 0.5) / side

    similarity = first @ second.T
    to_second = similarity.argmax(1)
    mutual = similarity.argmax(0)[to_second] == torch.arange(len(first))
    p = places[mutual]
    seen = places[to_second[mutual]]
    a, b = torch.triu_indices(len(p), len(p), 1)

    best, corners = 0, undo(CORNERS, 0, 0)
    for turns, flip in product(range(4), range(2)):
        q = undo(seen, turns, flip)
        dp, dq = p[a] - p[b], q[a] - q[b]
        scale = (dp * dq).sum(1) / (dq * dq).sum(1)
        usable = (dq.norm(dim=1) > 2.5 / side) & (scale > 0.65) & (scale < 1.55)
        if not usable.any():
            continue

        scale = scale[usable, None]
        shift = (p[a] + p[b])[usable] / 2 - scale * (q[a] + q[b])[usable] / 2
        found = scale[:, None] * q + shift[:, None]                          # (transforms, n, 2)
        agree = (found - p).norm(dim=2) < 1 / side
        votes, number = agree.sum(1).max(0)
        if votes > best:
            best = votes
            # Refit on the matches that agree.
            own_p, own_q = p[agree[number]], q[agree[number]]
            centred = own_q - own_q.mean(0)
            scale = (centred * (own_p - own_p.mean(0))).sum() / (centred ** 2).sum()
            corners = scale * (undo(CORNERS, turns, flip) - own_q.mean(0)) + own_p.mean(0)
    return corners


@torch.no_grad()
def main() -> None:
    """Print, for each kind and encoder, how many pairs are registered after each block."""
    parser = arguments("folder of class folders, of square photographs", several=True)
    parser.add_argument("--images", type=ser.count, default=500, help="pairs of each kind")
    args = parser.parse_args()
    encoders = load_several(args)
    size, patch = encoders[0].encoder.image_size, encoders[0].encoder.patch_size
    photographs = eval_linear.spread(eval_linear.ClassFolder(args.data), args.images)

    for kind, (turns, flip) in KINDS.items():
        generator = ser.rng("registration", args.seed)
        crops, moves, pixels = [], [], []
        for image, _ in photographs:
            pair = [sample_crop(image, generator) for _ in range(2)]
            move = (turns[torch.randint(len(turns), (1,), generator=generator).item()], flip)
            one, two = [cut(image, crop, size) for crop in pair]
            two = torch.rot90(two.flip(-1) if flip else two, move[0], (1, 2))
            crops.append(pair)
            moves.append(move)
            pixels += [one, two]
        x = eval_linear.recolour_and_normalise(torch.stack(pixels), generator)

        for (encoder, *_), label in zip(encoders, args.label, strict=True):
            line = f"{kind:12}{label:20}"
            values = []
            for block in range(1, encoder.depth + 1):
                h = torch.cat([eval_linear.map_after(encoder, block, part) for part in x.split(64)])
                tokens = F.normalize(h.flatten(2).mT, dim=-1)
                right = 0
                for number, (one, two) in enumerate(crops):
                    corners = undo(CORNERS, *moves[number])
                    wanted = (corners * two.side + two.corner - one.corner) / one.side
                    found = register(tokens[2 * number], tokens[2 * number + 1])
                    right += ((found - wanted).norm(dim=1).mean() < 0.1).item()
                values.append(100 * right / len(crops))
            values.append(mean(values[2:]))
            print(line, *[f"{value:6.1f}" for value in values], flush=True)


if __name__ == "__main__":
    main()

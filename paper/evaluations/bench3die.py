"""Linear probe on 3DIEBench: the last column of the paper's Table 1.

    torchrun --nproc_per_node=8 -m paper.evaluations.bench3die --data 3DIEBench
    python -m paper.evaluations.bench3die --data 3DIEBench --views 5 --checkpoint runs/ser/last.pt

Data (Garrido et al. 2023, 17 GB): DATA/SYNSET/OBJECT/image_0.jpg ... image_49.jpg, 50 renderings of
each of 52,472 objects of 55 classes. Which objects are validated on is not in the download: it is
val_images.npy of the authors' repository (github.com/facebookresearch/SIE, data/), a list of
"/SYNSET/OBJECT/"; all others are trained on. Writes bench3die.json beside the checkpoint.

Paper: "linear probing on its 2D renderings"; the parameters of the renderings are not used. It
leaves open the split, the views, the crops and the training. Here the protocol is that of ImageNet
(eval_linear.py, with its flags but --val, --test and --equivariance). A constant
guess of the largest class is right on 16% of val.
"""
from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Sequence

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

import eval_linear
import ser

PAPER = {     # top-1 and top-5, percent (Table 1)
    "MoCo-v3": (68.43, 91.96), "MoCo-v3 + AugSelf": (64.97, 90.73),
    "MoCo-v3 + SER": (70.17, 92.78), "MoCo-v3 + EquiMod (3 views)": (67.97, 91.97),
    "MoCo-v3 + SER (2+4 views)": (70.91, 93.15)}

class Renderings(Dataset):
    """Index -> rendering (3, S, S) uint8 and label. items: folder, views to draw from, label."""
    def __init__(self, items: Sequence[tuple[Path, range, int]], size: int):
        self.items = items
        # Choice: no crop, as the authors (who keep 256 pixels): the object is centred. Normalised
        # as ImageNet, which the encoder was trained on; the authors as 3DIEBench.
        self.resize = v2.Resize((size, size), antialias=True)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        folder, views, label = self.items[index]
        view = views[int(torch.randint(len(views), ()))]
        return self.resize(ser.read_image(str(folder / f"image_{view}.jpg"))), label

def load_sets(args: Namespace, size: int) -> tuple[list[str], dict[str, Dataset]]:
    """The synsets, sorted, and the sets, as eval_linear.load_sets."""
    classes = sorted(path.name for path in Path(args.data).iterdir() if path.is_dir())
    validated = {name.strip("/") for name in numpy.load(args.split).tolist()}
    items: dict[str, list] = {"crops": [], "train": [], "val": []}
    for label, synset in enumerate(classes):
        for folder in sorted(Path(args.data, synset).iterdir()):
            if f"{synset}/{folder.name}" in validated:
                items["val"] += [(folder, range(v, v + 1), label) for v in range(args.views)]
            else:
                # Choice: one of the 50 in an epoch, as the authors do; no flip.
                items["crops"].append((folder, range(50), label))
                items["train"].append((folder, range(1), label))
    return classes, {name: Renderings(found, size) for name, found in items.items()}

def main(argv: Sequence[str] | None = None) -> None:
    """Train and score the heads, print and write the result."""
    parser = eval_linear.arguments()
    parser.add_argument("--split", default="val_images.npy", help="list of validation objects")
    # Choice: all, so that the result is no draw; the authors draw one whenever they validate.
    parser.add_argument("--views", type=int, default=50, help="of each validation object")
    args = parser.parse_args(argv)
    device = ser.setup()
    encoder = ser.load_encoder(args.checkpoint).to(device)
    classes, sets = load_sets(args, encoder.grid * encoder.patch_size)
    found, _ = eval_linear.probe(encoder, classes, sets, args)
    if ser.ranks_and_rank()[1] == 0:
        result = json.dumps({"settings": vars(args), "rows": found}, indent=1)
        Path(args.checkpoint).with_name("bench3die.json").write_text(result)
        for title, value in found.items():
            print(f"{title:48}{value:8.2f}")
        if len(classes) != 55:
            print(f"{len(classes)} classes, not 55: the paper's rows are of another task")
        for name, (top1, top5) in PAPER.items():
            print(f"paper: {name:41}{top1:8.2f}{top5:8.2f}")

if __name__ == "__main__":
    main()

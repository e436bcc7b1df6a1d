"""Linear probe on 3DIEBench: the last column of the paper's Table 1.

    curl -L https://dl.fbaipublicfiles.com/SIE/3DIEBench.tar.gz | tar xz     # 17 GB
    curl -LO https://github.com/facebookresearch/SIE/raw/HEAD/data/val_images.npy
    python -m paper.evaluations.bench3die --data 3DIEBench --checkpoint runs/main/last.pt

The data of Garrido et al. 2023 are 3DIEBench/SYNSET/OBJECT/image_0.jpg ... image_49.jpg, 50
renderings of each of 52,472 objects. val_images.npy lists the objects for validation, as
"/SYNSET/OBJECT/". Training uses all other objects.

Paper: "linear probing on its 2D renderings", without their parameters. The paper leaves open
the split, the views, the crops and the training. We use the probe and the flags of
eval_linear.py, without --val, --test and --equivariance.
"""
import sys
from argparse import Namespace
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

import eval_linear
import ser
from paper.evaluations import main

PAPER = {     # top-1 and top-5, percent (Table 1)
    "MoCo-v3": (68.43, 91.96), "MoCo-v3 + AugSelf": (64.97, 90.73),
    "MoCo-v3 + SER": (70.17, 92.78), "MoCo-v3 + EquiMod (3 views)": (67.97, 91.97),
    "MoCo-v3 + SER (2+4 views)": (70.91, 93.15)}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = eval_linear.arguments()
    parser.add_argument("--split", default="val_images.npy", help="list of validation objects")
    parser.epilog = "--data is 3DIEBench; --cache takes one view of an object. Nothing is cropped."
    args = eval_linear.parse(argv, parser)
    if args.val or args.test or args.equivariance:
        sys.exit("--val, --test and --equivariance are not for 3DIEBench")
    return args


class Renderings(Dataset):
    """Index -> rendering (3, S, S) uint8 and label. items: folder, views to sample from, label."""
    def __init__(self, items: list[tuple[Path, range, int]], size: int):
        self.items = items
        # Choice: no crop, as the authors (at 256 pixels); normalised as ImageNet, not 3DIEBench.
        self.resize = v2.Resize((size, size))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        folder, views, label = self.items[index]
        view = views[int(torch.randint(len(views), ()))]
        image = ser.read_image(str(folder / f"image_{view}.jpg"))
        return self.resize(image), label


def load_sets(args: Namespace, size: int) -> eval_linear.Sets:
    """The sets, as those of eval_linear.load_sets; classes are the sorted synsets."""
    folders = [path.name for path in Path(args.data).iterdir() if path.is_dir()]
    classes = sorted(name for name in folders if name[0] != ".")
    validated = {name.strip("/") for name in numpy.load(args.split).tolist()}

    missing = [name for name in validated if not Path(args.data, name).is_dir()]
    if missing:
        sys.exit(f"{args.data} lacks {len(missing)} objects of {args.split}, such as {missing[0]}")

    items = {"train": [], "crops": [], "val": []}
    for label, synset in enumerate(classes):
        for folder in sorted(Path(args.data, synset).iterdir()):
            if f"{synset}/{folder.name}" in validated:
                # Choice: all views, so that the result is no sample; the authors sample one.
                items["val"] += [(folder, range(view, view + 1), label) for view in range(50)]
            else:
                # Choice: a random one of the 50 in each epoch, as the authors do; no flip.
                # 20-NN and --cache see only the first view.
                items["crops"].append((folder, range(50), label))
                items["train"].append((folder, range(1), label))

    sets = {name: Renderings(listed, size) for name, listed in items.items()}
    return eval_linear.Sets(classes, sets["train"], sets["crops"], {"val": sets["val"]})


def evaluate(args: Namespace, device: torch.device) -> None:
    """Train and score the heads, write the result and print it."""
    checkpoint = eval_linear.read_checkpoint(args)
    path = eval_linear.results_path(args, "bench3die.json")
    sets = load_sets(args, checkpoint.settings["image_size"])

    checkpoint.encoder.to(device)
    rows, _ = eval_linear.probe(checkpoint.encoder, sets, args, path.with_suffix(".jsonl"))
    if ser.ranks_and_rank()[1] > 0:
        return

    images = eval_linear.describe_sets({"train": sets.train_centre, **sets.tests})
    images += f", split {ser.checksum(sorted(numpy.load(args.split).tolist()))}"
    eval_linear.add_rows(path, rows, args, checkpoint, images)
    eval_linear.print_table(rows)
    for name, (top1, top5) in PAPER.items():
        print(f"paper: {name:41}{top1:8.2f}{top5:8.2f}")
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)

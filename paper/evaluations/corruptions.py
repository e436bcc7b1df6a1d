"""ImageNet-C: the names of its sets, the score of one, mCE, and a C made of any images, for
paper/evaluations/robustness.py, which is the command line.

The real data set consists of files that all papers share. What `make` makes is for data that have
no C, as imagenette; it compares with nothing but itself, as the package imagecorruptions-imaug is
not the original code (motion blur and snow without ImageMagick, frost from six pictures, not five),
and the resize in front of it is bicubic, not bilinear. Axes: B images of a chunk.
"""
from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from statistics import mean
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import ser
from eval_linear import Frozen, Head, Split, centre_crop, labelled
from ser import ViT, require

# AlexNet's top-1 error, mean over the severities (AugMix's code), in the paper's order of columns.
ALEXNET = {"gaussian_noise": .886428, "shot_noise": .894468, "impulse_noise": .922640,
           "defocus_blur": .819880, "glass_blur": .826268, "motion_blur": .785948,
           "zoom_blur": .798360, "snow": .866816, "frost": .826572, "fog": .819324,
           "brightness": .564592, "contrast": .853204, "elastic_transform": .646056,
           "pixelate": .717840, "jpeg_compression": .606500}
CORRUPTIONS = tuple(ALEXNET)
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")     # in no table of the paper
SEVERITIES = (1, 2, 3, 4, 5)
SIDE = 224     # of C's images, pixels

def score_images(encoder: ViT, head: Head, folder: Path, cfg: Any) -> dict[str, Any]:
    """Top-1 and top-5 in percent of a folder CLASS/*.JPEG, among all classes of the head, and its
    broken files: they are wrong. Of cfg it reads batch_size, workers and seed."""
    _, split = labelled("--c", str(folder), head.classes)
    # The images are centre crops already: to enlarge and cut them, as those of val, would change
    # every number.
    split = split._replace(ready=True)     # resized to the encoder's size, not cropped
    name = "/".join(folder.parts[-2:])
    frozen = Frozen(encoder, head.blocks, cfg, {name: split})
    features, labels = frozen.table(name)
    top1 = 0
    top5 = 0
    for x, y in zip(features.split(4096), labels.split(4096)):
        logits = F.linear(x, head.weight, head.bias)
        best = logits.topk(min(5, len(head.classes))).indices                     # (B, 5)
        right = best == y[:, None]
        top1 += right[:, 0].sum().item()
        top5 += right.any(1).sum().item()
    n = len(labels)
    return {"images": n, "class_folders": len(split.among), "top1": 100 * top1 / n,
            "top5": 100 * top5 / n, "broken": sorted(frozen.broken[name])}

def mean_corruption_error(top1: dict[str, Sequence[float]]) -> float:
    """mCE in percent: the mean over corruptions of the error, summed over severities, divided by
    AlexNet's. top1: of each corruption, the accuracies in percent, one per severity."""
    ratios = []
    for name, values in top1.items():
        errors = [1 - value / 100 for value in values]
        ratios.append(mean(errors) / ALEXNET[name])
    return 100 * mean(ratios)

class Corrupted(Dataset):
    """Index -> "", when the image has been written in all corruptions and severities, or the name
    of a file that cannot be read. What is there already stays."""

    def __init__(self, split: Split, classes: Sequence[str], folder: str, seed: int):
        self.split = split
        self.classes = classes
        self.folder = folder
        self.seed = seed

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, index: int) -> str:
        path = Path(self.split.source[index])
        class_name = self.classes[self.split.labels[index]]
        try:
            image = centre_crop(ser.read_image(str(path)), SIDE)
        except Exception:     # decoders raise what they like
            return str(path)
        for name in (*CORRUPTIONS, *EXTRA):
            for severity in SEVERITIES:
                target = Path(self.folder, name, str(severity), class_name, f"{path.stem}.JPEG")
                if not target.exists():
                    self.write(image.permute(1, 2, 0).numpy(), name, severity, target)
        return ""

    def write(self, image: Any, name: str, severity: int, target: Path) -> None:
        """Corrupt (h, w, 3) uint8, by draws from (seed, set, file name) alone, and write it."""
        import numpy
        from imagecorruptions import corrupt
        seed = ser.seed_of(self.seed, name, severity, target.stem) % 2 ** 32
        numpy.random.seed(seed)
        # glass_blur and impulse_noise do not draw from numpy's global generator.
        own = {"seed": seed} if name in ("glass_blur", "impulse_noise") else {}
        changed = corrupt(image, severity, name, **own)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_suffix(f".{os.getpid()}.tmp")     # two processes may make one C
        Image.fromarray(changed).save(beside, "JPEG", quality=85)     # as the original's
        os.replace(beside, target)

def make(folder: str, data: str, per_class: int, seed: int, workers: int) -> str:
    """Write a C of the images of data/val/CLASS/..., or data/CLASS/..., into `folder`; returns what
    to print. per_class: images of a class, 0 for all. Raises UserError."""
    require(importlib.util.find_spec("imagecorruptions") is not None,
            "--make needs imagecorruptions-imaug: pip install -r paper/requirements.txt")
    require(data != "", "--make: of which images? give --data FOLDER with val/CLASS/...")
    inside = os.path.join(data, "val")
    classes, split = labelled("--data", inside if os.path.isdir(inside) else data)
    if per_class > 0:
        rows = [(split.labels == label).nonzero().flatten()[:per_class] for label in split.among]
        kept = torch.cat(rows).tolist()
        source = [split.source[row] for row in kept]
        split = split._replace(source=source, labels=split.labels[kept])
    names = {(Path(path).stem, label) for path, label in zip(split.source, split.labels.tolist())}
    require(len(names) == len(split.source), f"--make: two images of a class of {data} differ in "
            "their extension or folder alone: rename one")
    corrupted = Corrupted(split, classes, folder, seed)
    loader = DataLoader(corrupted, None, num_workers=min(workers, os.cpu_count() or 1))
    broken = [name for name in tqdm(loader, "corrupting") if name]
    n = len(corrupted)
    require(len(broken) <= max(3, n / 1000), f"{len(broken)} of {n} images cannot be read, as "
            f"{min(broken, default='')}: mend or remove them")
    lines = [f"cannot read {name}: left out" for name in broken]
    sets = len(CORRUPTIONS + EXTRA) * len(SEVERITIES)
    return "\n".join([*lines, f"{n - len(broken)} images in each of {sets} sets: {folder}"])

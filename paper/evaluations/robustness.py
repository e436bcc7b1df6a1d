"""ImageNet-C and ImageNet-P: the paper's tables of robustness (A.5), its rows below ours.

    python eval_linear.py --data /imagenet --checkpoint runs/ser/last.pt       first: writes head.pt
    python -m paper.evaluations.robustness --checkpoint runs/ser/last.pt --c /imagenet-c
    torchrun --nproc_per_node=8 -m paper.evaluations.robustness --c /imagenet-c --p /imagenet-p

The encoder and the head of the linear probe stay as they are. C and P are altered images of val.
Data, as downloaded; archives side by side, or in folders of their own (blur/, noise/, ...):

    C    CORRUPTION/SEVERITY/CLASS/*.JPEG    15 corruptions x 5 severities
    P    PERTURBATION/CLASS/*.mp4            ten can be downloaded; the paper has four more

The paper's means over the columns, top-1 / top-5 in percent; the other methods are on MoCo-v3:

         MoCo-v3      AugSelf      STL          SER          EquiMod      E-SSL        SER, 2 + 4
    C    39.47/61.76  38.93/61.90  33.33/54.83  40.58/63.53  37.45/60.33  42.66/65.92  42.91/65.48
    P    63.91/84.67  63.58/84.69  61.85/83.30  65.13/85.69  64.44/85.66  66.58/87.01  68.00/87.41
    P, top-1: DINO 62.27, with SER 62.92; Barlow Twins 54.77, with SER 58.89

Beside the accuracies stand mCE, with AlexNet's published errors, and P's flip probability and top-5
distance, not divided by AlexNet's, which we found in no source. Writes robustness-c.json and
robustness-p.json beside the checkpoint. Data that have no C, as imagenette, get one from `make`.
Axes: n frames of a video, M pairs of them, C classes.
"""
from __future__ import annotations

import json
import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import DatasetFolder
from torchvision.transforms import v2
from tqdm import tqdm

import ser
from eval_linear import accuracy, class_folder, cls_features, eval_transform, extract

# AlexNet's top-1 error, mean over the severities (AugMix's code), in the paper's order of columns.
ALEXNET = {"gaussian_noise": .886428, "shot_noise": .894468, "impulse_noise": .922640,
           "defocus_blur": .819880, "glass_blur": .826268, "motion_blur": .785948,
           "zoom_blur": .798360, "snow": .866816, "frost": .826572, "fog": .819324,
           "brightness": .564592, "contrast": .853204, "elastic_transform": .646056,
           "pixelate": .717840, "jpeg_compression": .606500}
# Of P, speckle_noise, gaussian_blur, spatter and shear are only made by its authors' code.
SETS = {"C": [f"{name}/{severity}" for name in ALEXNET for severity in (1, 2, 3, 4, 5)],
        "P": ["gaussian_noise", "shot_noise", "speckle_noise", "motion_blur", "zoom_blur",
              "gaussian_blur", "snow", "spatter", "brightness", "translate", "rotate", "tilt",
              "scale", "shear"]}
# The paper's rows, without the last column, which is the mean of the others.
PAPER = {"C": """\
top-1   Gauss Shot  Impul Defoc Glass Motio Zoom  Snow  Frost Fog   Brigh Contr Elast Pixel JPEG
MoCo-v3 39.18 37.81 36.09 33.51 13.85 31.49 25.86 30.61 30.03 35.02 62.81 52.00 54.65 55.78 53.37
SER     39.42 38.30 36.85 36.23 15.91 34.90 27.35 30.71 30.12 36.04 63.60 52.81 55.85 56.63 54.03
top-5   Gauss Shot  Impul Defoc Glass Motio Zoom  Snow  Frost Fog   Brigh Contr Elast Pixel JPEG
MoCo-v3 63.30 61.68 59.76 56.22 28.46 53.52 45.98 52.52 50.54 58.64 84.47 76.74 77.38 79.44 77.76
SER     64.16 62.70 61.21 59.92 32.28 58.17 48.22 53.23 51.26 60.49 85.68 77.94 78.55 80.52 78.58
""", "P": """\
top-1   Gau-N Shot  Speck Motio Zoom  Gau-B Snow  Spatt Brigh Trans Rotat Tilt  Scale Shear
MoCo-v3 67.85 67.85 67.97 57.31 68.30 68.28 56.57 66.57 63.43 68.05 64.55 67.58 45.18 65.32
SER     68.97 69.01 69.00 59.09 69.46 69.35 58.02 67.86 64.58 69.04 65.76 68.60 46.78 66.34
top-5   Gau-N Shot  Speck Motio Zoom  Gau-B Snow  Spatt Brigh Trans Rotat Tilt  Scale Shear
MoCo-v3 87.75 87.81 87.82 80.34 87.91 87.94 79.22 86.75 84.54 87.72 85.16 87.48 69.08 85.84
SER     88.62 88.59 88.60 82.01 88.66 88.68 80.56 87.58 85.59 88.52 86.01 88.17 71.25 86.78
"""}

# ==== ImageNet-C ==================================================================================
def score_images(encoder: ser.ViT, head: Namespace, folder: Path, args: Namespace) -> dict:
    """Top-1 and top-5 in percent of folder/CLASS/*.JPEG, among all classes of the head."""
    images = class_folder(folder, whole(encoder), head.classes)
    features, labels = extract(encoder, images, head.blocks, args)
    logits = F.linear(features, head.weight, head.bias)
    everything = torch.arange(len(head.classes)).to(labels)
    return dict(zip(("top-1", "top-5"), accuracy(logits, labels, everything)))

def mean_corruption_error(top1: Tensor) -> float:
    """mCE in percent, the mean over corruptions of the error divided by AlexNet's. top1: (15,), the
    means over severities in percent."""
    return ((100 - top1) / torch.tensor(list(ALEXNET.values()))).mean().item()

def make(folder: str, data: str, per_class: int | None = None, seed: int = 0) -> None:
    """Write a C of data/CLASS/..., or of the first `per_class` images of each class, into `folder`.
    It compares with nothing but itself: imagecorruptions-imaug is not the original code (motion
    blur and snow without ImageMagick, frost from six pictures, not five), and the resize in front
    of it is bicubic, not bilinear."""
    import numpy
    from imagecorruptions import corrupt
    crop = eval_transform(224)
    sources: list[Path] = []
    for class_name in sorted(Path(data).iterdir()):
        sources += sorted(class_name.iterdir())[:per_class]
    for source in tqdm(sources, "corrupting"):
        image = crop(ser.read_image(str(source))).permute(1, 2, 0).numpy()
        for one in SETS["C"]:
            name, severity = one.split("/")
            draw = ser.rng(seed, one, source.stem).initial_seed() % 2 ** 32
            numpy.random.seed(draw)
            # These two do not draw from numpy's global generator.
            own = {"seed": draw} if name in ("glass_blur", "impulse_noise") else {}
            changed = corrupt(image, int(severity), name, **own)
            target = Path(folder, one, source.parent.name, f"{source.stem}.JPEG")
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(changed).save(target, quality=85)     # as the original's

# ==== ImageNet-P ==================================================================================
def measure(logits: Tensor, label: int, noise: bool) -> Tensor:
    """(4,) of a video, an image under a perturbation that grows, with logits (n, C): the shares of
    frames that are right in top-1 and top-5, which the paper reports, and the measures of P itself:

    flip probability   share of the pairs of frames whose predictions differ
    top-5 distance     mean over pairs of sum_i |i - min(s(i), 6)|, i = 1..5, s(i) the rank in the
                       later frame of the class of rank i in the earlier: 0 to 15, if all leave"""
    # Ties go to the class that comes first, as in the ranks of P's authors.
    order = logits.argsort(dim=1, descending=True, stable=True)       # classes, the likeliest first
    right = order[:, :5] == label                                     # (n, 5), at most one in a row
    later = order[1:]                                                 # (M, C)
    # Noise has no order: the clean first frame with every other one. Else each with the next.
    earlier = order[:1].expand_as(later) if noise else order[:-1]
    flips = earlier[:, 0] != later[:, 0]
    # later[row, r] is the class of rank r; argsort inverts that to the rank of a class, from 0.
    s = 1 + later.argsort(1).gather(1, earlier[:, :5])                # (M, 5)
    i = torch.arange(1, s.shape[1] + 1)
    distance = (i - s.clamp(max=6)).abs().sum(1)
    return torch.stack([x.double().mean() for x in (right[:, 0], right.any(1), flips, distance)])

def read_video(path: str) -> Tensor:
    """The frames (n, 3, h, w) uint8 of a video."""
    import av
    with av.open(path) as file:
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in file.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2)

def score_videos(encoder: ser.ViT, head: Namespace, folder: Path, args: Namespace) -> dict:
    """The means of `measure` over folder/CLASS/*.mp4, shares in percent; ranks share the videos."""
    ranks, rank = ser.ranks_and_rank()
    videos = DatasetFolder(folder, read_video, (".mp4",), whole(encoder))
    own = Subset(videos, range(rank, len(videos), ranks))
    sums = torch.zeros(4, dtype=torch.float64, device=head.weight.device)
    loader = DataLoader(own, batch_size=None, num_workers=args.workers)
    for frames, place in tqdm(loader, folder.name, leave=False, disable=rank > 0):
        # Choice: bf16 on a GPU, as the head's features, though P's authors compare frames in fp32.
        features = cls_features(encoder, frames, head.blocks)
        logits = F.linear(features, head.weight, head.bias).cpu()
        label = head.classes.index(videos.classes[place])
        sums += measure(logits, label, "noise" in folder.name).to(sums)
    if ranks > 1:
        dist.all_reduce(sums)
    top1, top5, flips, distance = (sums / len(videos)).tolist()
    return {"top-1": 100 * top1, "top-5": 100 * top5, "flip %": 100 * flips, "distance": distance}

# ==== Sets and tables =============================================================================
def whole(encoder: ser.ViT) -> v2.Transform:
    """Images at the encoder's size. C and P are centre crops already: to enlarge and cut them, as
    those of val, would change every number."""
    side = encoder.grid * encoder.patch_size
    return v2.Resize((side, side), antialias=True)

def score(kind: str, root: str, encoder: ser.ViT, head: Namespace, args: Namespace) -> dict:
    """Set -> measure -> value, of the sets of C ("fog/3") or P ("tilt") that are there as root/SET
    or root/ANY/SET. Of args it reads batch_size, workers and seed."""
    found = {}
    for name in SETS[kind]:
        for folder in (Path(root, name), *Path(root).glob(f"*/{name}")):
            if folder.is_dir():
                score_set = score_images if kind == "C" else score_videos
                found[name] = score_set(encoder, head, folder, args)
    return found

def columns(kind: str, found: dict, key: str) -> Tensor:
    """A measure in the paper's columns; nan for what is missing."""
    values = torch.tensor([found.get(name, {}).get(key, math.nan) for name in SETS[kind]])
    if kind == "C":
        # Choice: the paper is silent about severities; C is usually scored by the mean over five.
        values = values.view(-1, 5).mean(1)
    return values

def table(kind: str, found: dict, classes: int) -> str:
    """What was found, above the paper's rows. All means are over the columns that are there."""
    top1 = columns(kind, found, "top-1")

    def line(name: str, values: Tensor) -> str:
        shown = [*values.tolist(), values[~top1.isnan()].mean().item()]
        return f"{name:8}" + "".join(f"{value:7.2f}" for value in shown)

    lines = [f"ImageNet-{kind}, percent"]
    if classes != 1000:
        lines.append(f"{classes} classes, not 1000: the paper's rows are of another task")
    for name, *cells in map(str.split, PAPER[kind].splitlines()):
        if name in ("top-1", "top-5"):
            lines.append(f"{name:8}" + "".join(f"{cell:>7}" for cell in (*cells, "mean")))
            lines.append(line("here", columns(kind, found, name)))
        else:
            lines.append(line(name, torch.tensor([float(cell) for cell in cells])))
    if kind == "P":
        lines += [line(key, columns(kind, found, key)) for key in ("flip %", "distance")]
    elif classes == 1000:     # AlexNet's errors are among 1000
        lines.append(f"mCE {mean_corruption_error(top1):.2f} % (AlexNet 100, ResNet-50 76.7)")
    return "\n".join(lines)

def main(argv: Sequence[str] | None = None) -> None:
    """Score what the command line names, print and write it."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", default="runs/ser/last.pt", help="last.pt of a run, beside its head.pt")
    add("--c", default="", help="folder of ImageNet-C, or of what `make` made")
    add("--p", default="", help="folder of ImageNet-P")
    add("--batch-size", type=int, default=1024, help="images per pass of the encoder")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    parser.set_defaults(seed=0)     # which `extract` asks for
    args = parser.parse_args(argv)
    device = ser.setup()
    path = Path(args.checkpoint)
    encoder = ser.load_encoder(path).to(device)
    head = Namespace(**torch.load(path.with_name("head.pt"), device, weights_only=True))
    for kind, root in (("C", args.c), ("P", args.p)):
        found = score(kind, root, encoder, head, args) if root else {}
        if root and ser.ranks_and_rank()[1] == 0:
            out = path.with_name(f"robustness-{kind.lower()}.json")
            out.write_text(json.dumps({"classes": len(head.classes), "found": found}, indent=1))
            print(table(kind, found, len(head.classes)), out, sep="\n")

if __name__ == "__main__":
    main()

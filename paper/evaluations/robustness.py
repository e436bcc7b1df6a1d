"""ImageNet-C and ImageNet-P: the paper's tables of robustness (A.5), printed below our results.

    python eval_linear.py --data /imagenet --checkpoint runs/main/last.pt     # writes head.pt
    python -m paper.evaluations.robustness --checkpoint runs/main/last.pt --imagenet-c /imagenet-c
    python -m paper.evaluations.robustness --checkpoint runs/main/last.pt --imagenet-p /imagenet-p

With several GPUs, `torchrun --nproc_per_node=8` takes the place of `python`. The encoder and the
head of the linear probe stay as they are. C and P are altered images of val (Zenodo 2235448 and
3565846). Unpack the archives into one folder, or each into its own (blur/, noise/, ...):

    C    CORRUPTION/SEVERITY/CLASS/*.JPEG    15 corruptions x 5 severities
    P    PERTURBATION/CLASS/*.mp4            ten can be downloaded; the paper has four more

The paper's means over the columns, top-1 / top-5 in percent; the other methods are on MoCo-v3:

         MoCo-v3      AugSelf      STL          SER          EquiMod      E-SSL        SER, 2 + 4
    C    39.47/61.76  38.93/61.90  33.33/54.83  40.58/63.53  37.45/60.33  42.66/65.92  42.91/65.48
    P    63.91/84.67  63.58/84.69  61.85/83.30  65.13/85.69  64.44/85.66  66.58/87.01  68.00/87.41
    P, top-1: DINO 62.27, with SER 62.92; Barlow Twins 54.77, with SER 58.89

For images that have no C, such as imagenette's, `make` writes one (experiments/imagenette.py).
"""
import shutil
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import DatasetFolder
from torchvision.transforms import v2
from tqdm import tqdm

import eval_linear
import ser
from paper.evaluations import write

# The paper's columns; P's speckle_noise, gaussian_blur, spatter and shear cannot be downloaded.
CORRUPTIONS = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur",
               "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast",
               "elastic_transform", "pixelate", "jpeg_compression")
SETS = {"C": [f"{name}/{severity}" for name in CORRUPTIONS for severity in (1, 2, 3, 4, 5)],
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
def score_images(encoder: ser.ViT, head: Namespace, folder: Path, args: Namespace) -> list[float]:
    """Top-1 and top-5 in percent of folder/CLASS/*.JPEG, among all classes of the head."""
    images = eval_linear.class_folder(folder, uncropped(encoder), head.classes)
    features, labels = eval_linear.extract(encoder, images, head.blocks, args)
    logits = F.linear(features, head.weight, head.bias)
    all_classes = torch.arange(len(head.classes)).to(labels)
    return eval_linear.accuracy(logits, labels, all_classes)

def make(folder: str, data: str, per_class: int | None = None, seed: int = 0) -> None:
    """Write a C of data/CLASS/..., or of the first `per_class` images of each class; it is renamed
    to `folder` when it is complete. Its results compare with one another alone: imagecorruptions is
    not the original code (blur, snow and frost differ), and the resize before it is bicubic."""
    import numpy
    from imagecorruptions import corrupt
    unfinished = Path(f"{folder}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    crop = eval_linear.eval_transform(224)
    sources: list[Path] = []
    for class_folder in sorted(Path(data).iterdir()):
        sources += sorted(class_folder.iterdir())[:per_class]
    for source in tqdm(sources, "corrupting"):
        image = crop(ser.read_image(str(source))).permute(1, 2, 0).numpy()
        for one in SETS["C"]:
            name, severity = one.split("/")
            number = ser.rng(seed, one, source.stem).initial_seed() % 2 ** 32
            numpy.random.seed(number)
            # These two do not sample from numpy's global generator.
            own = {"seed": number} if name in ("glass_blur", "impulse_noise") else {}
            changed = corrupt(image, int(severity), name, **own)
            target = Path(unfinished, one, source.parent.name, f"{source.stem}.JPEG")
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(changed).save(target, quality=85)     # as in ImageNet-C
    unfinished.rename(folder)

# ==== ImageNet-P ==================================================================================
def read_video(path: str) -> Tensor:
    """The frames (n, 3, h, w) uint8 of a video."""
    import av
    with av.open(path) as file:
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in file.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2)

def score_videos(encoder: ser.ViT, head: Namespace, folder: Path, args: Namespace) -> list[float]:
    """Top-1 and top-5 in percent of folder/CLASS/*.mp4, among all classes of the head: the mean
    over videos of the mean over their frames (Choice: of all frames). Ranks share the videos."""
    ranks, rank = ser.ranks_and_rank()
    videos = DatasetFolder(folder, read_video, (".mp4",), uncropped(encoder))
    own = Subset(videos, range(rank, len(videos), ranks))
    all_classes = torch.arange(len(head.classes)).to(head.weight.device)
    sums = torch.zeros(2, device=head.weight.device)
    loader = DataLoader(own, batch_size=None, num_workers=args.workers)
    for frames, place in tqdm(loader, folder.name, leave=False, disable=rank > 0):
        features = eval_linear.cls_features(encoder, frames, head.blocks)
        logits = F.linear(features, head.weight, head.bias)
        label = head.classes.index(videos.classes[place])
        labels = all_classes[label].expand(len(frames))
        sums += torch.tensor(eval_linear.accuracy(logits, labels, all_classes)).to(sums)
    if ranks > 1:
        torch.distributed.all_reduce(sums)
    return (sums / len(videos)).tolist()

# ==== Sets, heads and tables ======================================================================
def find_sets(kind: str, root: str) -> dict[str, Path]:
    """Set -> folder, of the sets of C ("fog/3") or P ("tilt") that are there as root/SET or
    root/ANY/SET. Exits with one sentence if there is none."""
    folders = {}
    for name in SETS[kind]:
        for folder in (Path(root, name), *Path(root).glob(f"*/{name}")):
            if folder.is_dir():
                folders[name] = folder
    if not folders:
        sys.exit(f"there is no ImageNet-{kind} at {root}, not even {SETS[kind][0]}")
    return folders

def load_head(args: Namespace, encoder: ser.ViT, device: torch.device) -> Namespace:
    """The weight, bias, classes, blocks that head.pt holds; exits if it is of another encoder."""
    path = Path(args.head or Path(args.checkpoint).with_name("head.pt"))
    head = torch.load(path, device, weights_only=True) if path.exists() else {}
    if head.get("encoder") != eval_linear.fingerprint(encoder):
        sys.exit(f"{path} is not a head of {args.checkpoint}: eval_linear.py trains one")
    return Namespace(**head)

def uncropped(encoder: ser.ViT) -> v2.Transform:
    """Images at the encoder's size. C and P are centre crops already: to enlarge and cut them, as
    the images of val, would change every result."""
    side = encoder.grid * encoder.patch_size
    return v2.Resize((side, side))

def columns(kind: str, results: dict, top5: bool) -> Tensor:
    """Top-1 or top-5 in the paper's columns; nan for what is missing."""
    values = torch.tensor([results.get(name, (torch.nan, torch.nan))[top5] for name in SETS[kind]])
    if kind == "C":
        # Choice: the paper is silent about severities; C is usually scored by the mean over five.
        values = values.view(-1, 5).mean(1)
    return values

def table(kind: str, results: dict, classes: int) -> str:
    """The results, above the paper's rows. All means are over the columns that are there."""
    there = ~columns(kind, results, top5=False).isnan()

    def line(name: str, values: Tensor) -> str:
        shown = [*values.tolist(), values[there].mean().item()]
        return f"{name:8}" + "".join(f"{value:7.2f}" for value in shown)

    lines = [f"ImageNet-{kind}, percent among {classes} classes (the paper's rows: 1000 classes)",
             f"means are over the {there.sum()} of {len(there)} columns that are there"]
    for name, *cells in map(str.split, PAPER[kind].splitlines()):
        if name in ("top-1", "top-5"):
            lines.append(f"{name:8}" + "".join(f"{cell:>7}" for cell in (*cells, "mean")))
            lines.append(line("here", columns(kind, results, name == "top-5")))
        else:
            lines.append(line(name, torch.tensor([float(cell) for cell in cells])))
    return "\n".join(lines)

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", required=True, help="last.pt of a run of any method")
    add("--head", default="", help="of eval_linear.py; none: head.pt beside the checkpoint")
    add("--out", default="", help="folder of robustness.json; none: that of the checkpoint")
    add("--imagenet-c", "--c", dest="c", default="", help="its folder, or one that `make` wrote")
    add("--imagenet-p", "--p", dest="p", default="", help="its folder")
    add("--batch-size", type=int, default=1024, help="images of C per pass, over all ranks")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    args = parser.parse_args(argv)
    args.data = args.c or args.p     # eval_linear.load asks for it
    if not args.data:
        parser.error("--imagenet-c or --imagenet-p must name a folder")
    return args

def main(argv: list[str] | None = None) -> None:
    """Score what the command line names, print and write it."""
    args = settings(argv)
    device = ser.setup()
    folders = {kind: find_sets(kind, root) for kind, root in (("C", args.c), ("P", args.p)) if root}
    state, encoder, path = eval_linear.load(args, "robustness.json")
    head = load_head(args, encoder, device)
    encoder.to(device)
    for kind, sets in folders.items():
        score = score_images if kind == "C" else score_videos
        results = {}
        for name, folder in sets.items():     # written as soon as scored: ten of P take hours
            results[name] = score(encoder, head, folder, args)
            values = dict(zip(("linear top-1 %", "linear top-5 %"), results[name]))
            rows = eval_linear.make_rows(values, f"{kind}/{name}", len(head.classes), encoder.depth)
            if ser.ranks_and_rank()[1] == 0:
                write(path, rows, args, state["step"])
        if ser.ranks_and_rank()[1] == 0:
            print(table(kind, results, len(head.classes)))

if __name__ == "__main__":
    main()

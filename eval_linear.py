"""What a checkpoint has learned: linear evaluation (paper 4.1), k-NN (4.2) and equivariance (A.2).

    python eval_linear.py                              runs/ser/last.pt, on synthetic images
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/main/last.pt

The second line is the protocol of 4.1: linear heads on random crops, for hours; and 20-NN. Flags:
    --knn             20-NN without heads: minutes
    --equivariance    equivariance after every block, beside the untrained encoder; no accuracy
    --cache           heads on one centre crop of each image: minutes; also with the flags above
    --mlp             MLP heads in place of linear heads; also with the flags above
eval.json collects the results of all evaluations; eval.jsonl has a line for each epoch of heads;
head.pt is the best linear head (with --cache: head-cache.pt). A stopped evaluation begins anew.
"""
import copy
import hashlib
import json
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

import ser
from ser import ViT

# ==== 1. Settings: the protocol of 4.1, and what the paper leaves open ============================
def arguments() -> ArgumentParser:
    """The flags of eval_linear.py."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS, val/CLASS; none: synthetic images")
    add("--val", default="", help="folder of the validation classes; none: val in --data")
    add("--test", nargs="+", default=[], metavar="NAME=DIR", help="further sets to score")
    add("--checkpoint", default="", help="last.pt of a run; without --data: runs/ser/last.pt")
    add("--out", default="", help="folder of the results; none: that of the checkpoint")
    add("--cache", action="store_true", help="heads on one centre crop of each image")
    add("--mlp", action="store_true", help="MLP heads of three layers in place of linear heads")
    add("--knn", action="store_true", help="20-NN without heads")
    add("--equivariance", action="store_true", help="equivariance after every block")
    # Choice: the release has 1, 3 and 10; few classes and weak features need smaller ones.
    add("--lr", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
        help="learning rates, scaled by batch size / 256; each trains a head")
    add("--epochs", type=int, default=50, help="passes over the training images (paper: 50)")
    add("--batch-size", type=int, default=1024, help="images per step, over all ranks")
    add("--seed", type=int, default=0, help="seed of heads, order and crops")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    return parser

def load(args: Namespace, results: str) -> tuple:
    """What --checkpoint holds, its encoder in eval mode, and the path of `results`. Exits with one
    sentence if --data does not suit the checkpoint, or if nothing can be written."""
    if args.data and not args.checkpoint:
        sys.exit("--data needs --checkpoint, the last.pt of a run")
    args.checkpoint = args.checkpoint or "runs/ser/last.pt"
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    images = state["settings"]["data"]
    if images and not args.data:
        sys.exit(f"{args.checkpoint} was trained on {images}: add --data")
    out = Path(args.out or Path(args.checkpoint).parent)
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        sys.exit(f"nothing can be written to {out}: name another folder by --out")
    return state, ser.load_encoder(args.checkpoint), out / results

# ==== 2. Images: pairs of an image, (3, S, S) uint8, and a label ==================================
def eval_transform(size: int) -> v2.Transform:
    """The shorter side to size * 256 / 224, then the centre."""
    side = round(size * 256 / 224)
    # Choice: bicubic here and bilinear in training, as the release and DINO's eval_linear.
    return v2.Compose([v2.Resize(side, v2.InterpolationMode.BICUBIC), v2.CenterCrop(size)])

def class_folder(root: Path, transform: Callable, classes: Sequence = ()) -> ImageFolder:
    """root/CLASS/...: a label is the place of CLASS in `classes`, by default the sorted folders. If
    no folder has such a name, the folders are numbers, the places themselves: ImageNet-V2."""
    folder = ImageFolder(root, transform, loader=ser.read_image)
    names = list(classes or folder.classes)
    if not set(names) & set(folder.classes):
        names = list(map(str, range(len(names))))
    folder.target_transform = [names.index(name) for name in folder.classes].__getitem__
    return folder

def load_sets(args: Namespace, size: int) -> tuple:
    """The training classes; sets "train", "val", --test and, of files, "crops", train at random."""
    if not args.data:     # with seeds that ser.py does not use
        train = TensorDataset(*ser.synthetic_images(2048, size, seed=101))
        val = TensorDataset(*ser.synthetic_images(1000, size, seed=102))
        return range(6), {"train": train, "val": val}
    random_crop = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
    crops = class_folder(Path(args.data, "train"), random_crop)
    folders = {"train": crops.root, "val": args.val or Path(args.data, "val")}
    folders |= dict(test.split("=", 1) for test in args.test)
    sets = {name: class_folder(folder, eval_transform(size), crops.classes)
            for name, folder in folders.items()}
    return crops.classes, sets | {"crops": crops}

class Seeded(Dataset):
    """`data`, whose random crops depend on (*key, index) alone, not on ranks or processes."""
    def __init__(self, data: Dataset, *key: int):
        self.data = data
        self.key = key

    def __getitem__(self, index: int) -> tuple:
        torch.default_generator.manual_seed(ser.rng("eval", *self.key, index).initial_seed())
        return self.data[index]

# ==== 3. Features of the frozen encoder ===========================================================
@torch.no_grad()
def cls_features(encoder: ViT, images: Tensor, blocks: int) -> Tensor:
    """[CLS] after each of the last `blocks` blocks, under the final LayerNorm, in fp32 on
    the encoder's device: (B, K), K = blocks * D. images: (B, 3, S, S) uint8."""
    x = ser.normalise(images.to(encoder.cls_token.device) / 255)
    last = range(encoder.depth - blocks + 1, encoder.depth + 1)
    with torch.autocast(x.device.type, torch.bfloat16, x.is_cuda):     # Choice: as in training
        cls_at = encoder(x, last).cls_at
        tokens = [encoder.norm(cls_at[layer]) for layer in last]
    return torch.cat(tokens, dim=1).float()

def encode(encoder: ViT, data: Dataset, blocks: int, args: Namespace, batches: list) -> Iterator:
    """Features (B, K) and labels (B,) of each of `batches`, tensors of places in `data`."""
    places = [rows.tolist() for rows in batches]
    loader = DataLoader(data, batch_sampler=places, num_workers=args.workers)
    for images, labels in tqdm(loader, leave=False, disable=ser.ranks_and_rank()[1] > 0):
        features = cls_features(encoder, images, blocks)
        yield features, labels.to(features.device)

def extract(encoder: ViT, data: Dataset, blocks: int, args: Namespace) -> tuple:
    """Features (n, K) and labels (n,) of a set, on every rank: the sum of what the ranks encode."""
    ranks, rank = ser.ranks_and_rank()
    batches = torch.arange(rank, len(data), ranks).split(max(1, args.batch_size // ranks))
    features = encoder.cls_token.new_zeros(len(data), blocks * encoder.dim)
    labels = features.new_zeros(len(data), dtype=torch.int64)
    for rows, (x, y) in zip(batches, encode(encoder, data, blocks, args, batches)):
        features[rows] = x
        labels[rows] = y
    if ranks > 1:
        dist.all_reduce(features)
        dist.all_reduce(labels)
    return features, labels

# ==== 4. Heads: every learning rate in one training (paper 4.1; MLP: 4.2) =========================
class Heads(nn.ModuleList):
    """Linear heads or three-layer MLPs, all with the same first weights: (B, K) -> (B, C) each."""
    def __init__(self, heads: int, width: int, classes: int, mlp: bool = False):
        layers = []
        # Choice: the paper names no widths; these are of Garrido et al. 2023, whom it follows.
        for units in (1024, 1024) if mlp else ():
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        last = nn.Linear(width, classes)
        nn.init.normal_(last.weight, std=0.01)     # Choice: and biases 0, as the release
        nn.init.zeros_(last.bias)
        head = nn.Sequential(*layers, last)
        super().__init__(copy.deepcopy(head) for _ in range(heads))

    def forward(self, x: Tensor) -> list:
        return [head(x) for head in self]

def train_heads(heads: Heads, epoch_batches: Callable, images: int, val: tuple, args: Namespace,
                log: Path, name: str) -> int:
    """Train on epoch_batches(epoch, shares): features (B, K) and labels (B,) of this rank's shares
    of `images` images. Returns which head is best on `val`, (n, K) and (n,); logs as `name`."""
    ranks, rank = ser.ranks_and_rank()
    parallel = nn.parallel.DistributedDataParallel(heads) if ranks > 1 else heads
    x_val, y_val = val
    rates = torch.tensor(args.lr, device=x_val.device)
    batch = min(args.batch_size, images) // ranks * ranks
    steps = images // batch     # the last, incomplete batch is not used
    # Choice: momentum .9, no weight decay, as the release. Paper: 4.1, a cosine without warmup.
    optimizer = torch.optim.SGD(heads.parameters(), batch / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps)
    bar = tqdm(range(args.epochs), unit="epoch", disable=rank > 0)
    for epoch in bar:
        order = torch.randperm(images, generator=ser.rng(args.seed, "eval", epoch))
        shares = [rows.chunk(ranks)[rank] for rows in order[:steps * batch].split(batch)]
        total = torch.zeros_like(rates)
        for x, y in epoch_batches(epoch, shares):
            losses = torch.stack([F.cross_entropy(logits, y) for logits in parallel(x)])
            total += losses.detach()
            optimizer.zero_grad()
            # With its loss times its rate, every head is trained as if it were alone.
            (rates * losses).sum().backward()
            optimizer.step()
            schedule.step()
        # Choice: the rate that ends best on val; the release has no rule, and takes the best epoch.
        with torch.no_grad():
            top1 = [accuracy(head(x_val), y_val, y_val.unique())[0] for head in heads]
        best = top1.index(max(top1))
        line = {"epoch": epoch + 1, "loss": total[best].item() / steps, "val top-1 %": top1[best],
                "lr": args.lr[best]}
        bar.set_postfix(line)
        if rank == 0:     # the loss is of rank 0's share
            print(json.dumps({"heads": name} | line), file=log.open("a"))
    if rank == 0 and args.lr[best] in (min(args.lr), max(args.lr)):
        print(f"the best rate of {name}, {args.lr[best]}, is an end of --lr: try one beyond it")
    return best

def accuracy(logits: Tensor, labels: Tensor, among: Tensor) -> list:
    """Top-1 and top-5 in percent of logits (n, C), among the classes `among` alone."""
    best = among[logits[:, among].topk(min(5, len(among))).indices]               # (n, 5)
    share = 100 * (best == labels[:, None]).float().mean(0)
    return [share[0].item(), share.sum().item()]

# ==== 5. k-NN (paper 4.2) =========================================================================
def knn(train: Tensor, train_labels: Tensor, test: Tensor, labels: Tensor) -> float:
    """Top-1 in percent of test features (n, D), split over the ranks, by a vote of the 20 nearest
    training features (m, D) with weights exp(s / .07), s the cosine similarity."""
    ranks, rank = ser.ranks_and_rank()
    # Choice: 4.2 says 20-NN; features, similarity and weights are those of DINO's eval_knn.
    train = F.normalize(train.float())
    right = torch.zeros((), device=test.device)
    for x, y in zip(test[rank::ranks].split(256), labels[rank::ranks].split(256)):
        similarity, nearest = (F.normalize(x) @ train.T).topk(min(20, len(train)))
        votes = x.new_zeros(len(x), int(train_labels.max()) + 1)                  # (B, C)
        votes.scatter_add_(1, train_labels[nearest], (similarity / 0.07).exp())
        right += (votes.argmax(1) == y).sum()
    if ranks > 1:
        dist.all_reduce(right)
    return 100 * right.item() / len(test)

# ==== 6. Equivariance: do the tokens move as the image moves? (paper A.2) =========================
@torch.no_grad()
def equivariances(encoder: ViT, images: Tensor, layers: Sequence, element: str) -> dict:
    """After each of the blocks `layers`, how token maps f(x) move under one element of G, "rot90",
    "hflip" or "scale". images: (n, 3, S, S) uint8.
    cosine     paper A.2: the mean over tokens of cos(rho_g f(x), f(rho_g x)), g = g2 g1^-1
    retrieval  the share of tokens of rho_h f(x) whose most similar one, among all of f(rho_h x) of
               32 images, is their counterpart; 1 / (32 H W) by chance
    g may be the identity; h always turns or flips. For "scale", h is g, a resize."""
    sums = {layer: torch.zeros(2) for layer in layers}
    for part, pixels in enumerate(images.split(32)):
        x = ser.normalise(pixels / 255)
        g1, g2 = [ser.sample_geometry(len(x), encoder.grid, [element], ser.rng(element, part, view))
                  for view in (1, 2)]
        g = ser.relative(g2, g1)
        flip = torch.full_like(g.flip, element == "hflip")
        turns = (1 + torch.arange(len(x)) % 3) * (element == "rot90")
        h = ser.Geometry(flip, turns, g.grid)
        moved = [ser.rho(each, x, encoder.patch_size) for each in (g, h)]
        encoded = [encoder(view, layers).maps for view in (x, *moved)]
        for layer in layers:
            maps = [of_view[layer] for of_view in encoded]                        # (B, D, H, W)
            # Choice: the "final representation" is the patch tokens under the final LayerNorm.
            if layer == encoder.depth:
                maps = [encoder.norm(m.movedim(1, -1)).movedim(-1, 1) for m in maps]
            f_x, f_gx, f_hx = maps
            cosine = F.cosine_similarity(ser.rho(g, f_x), f_gx).mean()
            z = ser.rho(h, f_x).movedim(1, -1).flatten(0, 2)                      # (B N, D)
            z_prime = f_hx.movedim(1, -1).flatten(0, 2)
            nearest = (F.normalize(z) @ F.normalize(z_prime).T).argmax(1)
            right = nearest.cpu() == torch.arange(len(z))
            values = torch.tensor([cosine, right.float().mean()])
            sums[layer] += values * len(x) / len(images)
    names = (f"{element} cosine", f"{element} retrieval")
    return {layer: dict(zip(names, values.tolist())) for layer, values in sums.items()}

# ==== 7. Evaluation: a checkpoint in, rows and a table out ========================================
def fingerprint(encoder: ViT) -> str:
    """A short text that tells the weights of one encoder from those of another."""
    weights = [weight.cpu().numpy().tobytes() for weight in encoder.state_dict().values()]
    return hashlib.sha256(b"".join(weights)).hexdigest()[:16]

def merge(path: Path, rows: Sequence[dict]) -> None:
    """Add rows to the file {"rows": [...]}; a row replaces one that differs in its value alone."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    merged = {json.dumps(row | {"value": None}): row for row in [*old, *rows]}
    path.with_suffix(".tmp").write_text(json.dumps({"rows": list(merged.values())}, indent=1))
    path.with_suffix(".tmp").replace(path)

def make_rows(values: dict, name: str, classes: int | None, block: int) -> list:
    """Rows of measure -> value, on the set `name`, among so many classes, after a block."""
    place = {"set": name, "classes": classes, "block": block}
    return [place | {"measure": measure, "value": value} for measure, value in values.items()]

def print_table(rows: Sequence[dict]) -> None:
    """A line for each measure, a column for each encoder."""
    table = {}
    for row in rows:
        title = f"{row['measure']} after block {row['block']}"
        if row["classes"]:
            title = f"{row['set']}, {row['classes']} classes: {row['measure']}"
        table.setdefault(title, {})[row["encoder"]] = f"{row['value']:.4g}"
    print(f"{'':48}   untrained     trained")
    for title, values in table.items():
        print(f"{title:48}{values.get('untrained', '-'):>12}{values['trained']:>12}")

def probe(encoder: ViT, classes: Sequence, sets: dict, args: Namespace, log: Path) -> tuple:
    """Rows of 20-NN and, if wanted, of heads; and what head.pt holds of the best head."""
    trains = args.cache or args.mlp or not args.knn     # also without any flag
    cached = args.cache or "crops" not in sets
    blocks = min(4, encoder.depth - encoder.cls_layer) if trains else 1     # Paper: 4.1; with [CLS]
    train, train_labels = extract(encoder, sets["train"], blocks if cached else 1, args)
    if train.is_cuda:     # fp16 is finer than the bf16 in which the encoder ran
        train = train.half()
    tests = {name: extract(encoder, data, blocks, args) for name, data in sets.items()
             if name not in ("crops", "train")}

    def epoch_batches(epoch: int, shares: list) -> Iterable:
        if cached:
            return ((train[share].float(), train_labels[share]) for share in shares)
        return encode(encoder, Seeded(sets["crops"], args.seed, epoch), blocks, args, shares)

    kept = {}
    kind = "mlp" if args.mlp else "linear"
    if trains:
        torch.manual_seed(args.seed)
        heads = Heads(len(args.lr), blocks * encoder.dim, len(classes), args.mlp).to(train.device)
        name = f"{kind} heads of {fingerprint(encoder)}"
        best = train_heads(heads, epoch_batches, len(train), tests["val"], args, log, name)
        head = heads[best].requires_grad_(False)
        kept = {"weight": head[-1].weight.cpu(), "bias": head[-1].bias.cpu(),
                "classes": list(classes), "blocks": blocks, "lr": args.lr[best]}
    last = slice(-encoder.dim, None)     # the features of the last block
    rows = []
    for name, (x, y) in tests.items():
        # Choice: among all classes, and, as ImageNet-R's authors do, among those of the set.
        groups = [(torch.arange(len(classes)).to(y), slice(None))]
        if len(y.unique()) < len(classes):
            groups.append((y.unique(), torch.isin(train_labels, y)))
        for among, near in groups:
            values = {}
            if trains:
                top1, top5 = accuracy(head(x), y, among)
                values = {f"{kind} top-1 %": top1, f"{kind} top-5 %": top5}
            neighbours = train[near, last]
            values["20-NN top-1 %"] = knn(neighbours, train_labels[near], x[:, last], y)
            rows += make_rows(values, name, len(among), encoder.depth)
    return rows, kept

def evaluate(args: Namespace) -> list:
    """Evaluate a checkpoint: print a table, then write its rows and the best linear head."""
    device = ser.setup()
    state, trained, path = load(args, "eval.json")
    run = Namespace(**state["settings"])
    classes, sets = load_sets(args, run.image_size)
    with_equivariance = args.equivariance or not args.data     # and with the untrained encoder
    encoders = {"untrained": ser.new_encoder(run).eval()} if with_equivariance else {}
    encoders["trained"] = trained
    layers = range(1, run.depth + 1) if args.equivariance else [max(1, run.cls_layer)]
    spread = torch.linspace(0, len(sets["val"]) - 1, min(512, len(sets["val"]))).long()
    images = torch.stack([sets["val"][place][0] for place in spread.tolist()]).to(device)
    rows = []
    kept = {}
    for name, encoder in encoders.items():
        encoder.to(device)
        found = []
        if args.cache or args.mlp or args.knn or not args.equivariance:
            found, kept = probe(encoder, classes, sets, args, path.with_suffix(".jsonl"))
        for element in ser.ELEMENTS if with_equivariance else ():
            for layer, values in equivariances(encoder, images, layers, element).items():
                found += make_rows(values, "val", None, layer)
        step = state["step"] if name == "trained" else 0
        rows += [row | {"encoder": name, "step": step, "settings": vars(args)} for row in found]
    if ser.ranks_and_rank()[1] == 0:
        print_table(rows)
        merge(path, rows)
        if kept and not args.mlp:     # of the last encoder, which is the trained one
            name = "head-cache.pt" if args.cache else "head.pt"
            ser.save(path.with_name(name), **kept, step=state["step"],
                     encoder=fingerprint(trained), data=args.data, cache=args.cache)
    return rows

def main(argv: Sequence | None = None) -> None:
    """Evaluate what a command line names."""
    parser = arguments()
    if not parser.parse_known_args(argv)[0].data:     # for synthetic images and two cores
        parser.set_defaults(batch_size=64, workers=0)
    evaluate(parser.parse_args(argv))
    if dist.is_initialized():
        dist.destroy_process_group()

if __name__ == "__main__":
    main()

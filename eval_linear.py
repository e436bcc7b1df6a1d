"""What a checkpoint has learned: linear evaluation (paper 4.1), k-NN, and equivariance (paper A.2).

    python eval_linear.py                                        runs/ser/last.pt, synthetic images
    python eval_linear.py --data /imagenet --cache               heads on one crop of each: minutes
    python eval_linear.py --data /imagenet --knn                 20-NN alone: minutes
    python eval_linear.py --data /imagenet --equivariance        each block, beside the untrained
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --test v2=DIR    the protocol of 4.1

The encoder is frozen. Each run replaces eval.json and head.pt, the best linear head, beside it.
"""
import copy
import json
import math
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path
from typing import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

import ser
from ser import ViT

# ==== 1. Settings: the protocol of 4.1, and what the release adds to it ===========================
def arguments() -> ArgumentParser:
    """--knn and --equivariance leave out the heads, unless --cache or --mlp asks for them."""
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", default="", help="folder with train/CLASS and val/CLASS; none: drawn images")
    add("--val", default="", help="folder of the validation classes; none: val in --data")
    add("--test", nargs="+", default=[], metavar="NAME=DIR", help="further sets to score")
    add("--checkpoint", default="runs/ser/last.pt", help="of a run, or of experiments/convert.py")
    add("--cache", action="store_true", help="heads on one centre crop of each image")
    add("--mlp", action="store_true", help="heads of three layers in place of linear ones")
    add("--knn", action="store_true", help="20-NN without heads")
    add("--equivariance", action="store_true", help="equivariance after every block")
    # Choice: the release tries 1, 3, 10; few classes and weak features need smaller ones.
    add("--lr", type=float, nargs="+", default=[0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
        help="learning rates, scaled by batch size / 256; each trains a head")
    add("--epochs", type=int, default=50, help="passes over the training images (paper: 50)")
    add("--batch-size", type=int, default=1024, help="images per step, over all ranks")
    add("--seed", type=int, default=0, help="seed of heads, order and crops")
    add("--workers", type=int, default=8, help="loader processes of a rank")
    return parser

# ==== 2. Images: pairs of an image, (3, S, S) uint8, and a label ==================================
def eval_transform(size: int) -> v2.Transform:
    """The shorter side to size * 256 / 224, then the centre."""
    side = round(size * 256 / 224)
    # Choice: bicubic here and bilinear in training, as the release and DINO's eval_linear.
    return v2.Compose([v2.Resize(side, v2.InterpolationMode.BICUBIC), v2.CenterCrop(size)])

def train_transform(size: int) -> v2.Transform:
    """A random crop of area .08 to 1 and aspect 3:4 to 4:3 (the defaults), and a flip."""
    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])

def class_folder(root: Path, transform: Callable, classes: Sequence = ()) -> ImageFolder:
    """root/CLASS/...: a label is the place of CLASS in `classes`, those of training (none given:
    among the sorted folders), or CLASS itself, a number, if no name is shared: ImageNet-V2."""
    folder = ImageFolder(root, transform, loader=ser.read_image)
    names = list(classes or folder.classes)
    if not set(names) & set(folder.classes):
        names = list(map(str, range(len(names))))
    folder.target_transform = [names.index(name) for name in folder.classes].__getitem__
    return folder

class Seeded(Dataset):
    """`data`, where the draws for an image depend on (*key, index), not on ranks or processes."""
    def __init__(self, data: Dataset, *key: int):
        self.data = data
        self.key = key

    def __getitem__(self, index: int) -> tuple:
        torch.default_generator.manual_seed(ser.rng("eval", *self.key, index).initial_seed())
        return self.data[index]

# ==== 3. Features of the frozen encoder ===========================================================
@torch.no_grad()
def cls_features(encoder: ViT, images: Tensor, blocks: int) -> Tensor:
    """The final LayerNorm of [CLS] after each of the last `blocks` blocks, of (B, 3, S, S) uint8
    images: (B, K), K = blocks * D, in fp32 on the encoder's device."""
    x = ser.normalise(images.to(encoder.cls_token.device) / 255)
    last = range(encoder.depth - blocks + 1, encoder.depth + 1)
    # Choice: bf16 on a GPU, as in training.
    with torch.autocast(x.device.type, torch.bfloat16, x.is_cuda):
        cls_at = encoder(x, last).cls_at
        tokens = [encoder.norm(cls_at[layer]) for layer in last]
    return torch.cat(tokens, dim=1).float()

def extract(encoder: ViT, data: Dataset, blocks: int, args: Namespace, epoch: int = 0):
    """Features (n, K) and labels (n,) of a set, on every rank. Each rank encodes its share; a row
    is zero on all others, so that the sum counts every image once."""
    ranks, rank = ser.ranks_and_rank()
    own = torch.arange(rank, len(data), ranks)
    size = max(1, args.batch_size // ranks)
    loader = DataLoader(Seeded(data, args.seed, epoch), size, sampler=own.tolist(),
                        num_workers=args.workers)
    features = encoder.cls_token.new_zeros(len(data), blocks * encoder.dim)
    labels = features.new_zeros(len(data), dtype=torch.int64)
    bar = tqdm(loader, disable=rank > 0)
    for (images, own_labels), rows in zip(bar, own.split(size)):
        features[rows] = cls_features(encoder, images, blocks)
        labels[rows] = own_labels.to(labels)
    if ranks > 1:
        torch.distributed.all_reduce(features)
        torch.distributed.all_reduce(labels)
    return features, labels

# ==== 4. Heads: every learning rate in one training (paper 4.1; MLP: 4.2) =========================
class Heads(nn.Module):
    """Linear heads or three-layer MLPs, all with the same first weights: (B, K) -> (B, C) each."""
    def __init__(self, heads: int, width: int, classes: int, mlp: bool = False):
        super().__init__()
        layers = []
        # Choice: the paper names no widths; these are of Garrido et al. 2023, whom it follows.
        for units in (1024, 1024) if mlp else ():
            layers += [nn.Linear(width, units), nn.ReLU()]
            width = units
        last = nn.Linear(width, classes)
        # Choice: N(0, .01) and biases 0, as the release.
        nn.init.normal_(last.weight, std=0.01)
        nn.init.zeros_(last.bias)
        head = nn.Sequential(*layers, last)
        self.heads = nn.ModuleList(copy.deepcopy(head) for _ in range(heads))

    def forward(self, x: Tensor) -> list:
        return [head(x) for head in self.heads]

def train_heads(heads: Heads, table: Callable, args: Namespace) -> None:
    """Train on table(epoch), features (n, K) and labels (n,). Images that do not fill the last
    batch of an epoch are not used; a rank has its share of each batch."""
    ranks, rank = ser.ranks_and_rank()
    parallel = nn.parallel.DistributedDataParallel(heads) if ranks > 1 else heads
    # Choice: momentum .9, no weight decay, as the release. With its loss times its rate, every head
    # is then trained as if it were alone.
    optimizer = torch.optim.SGD(heads.parameters(), momentum=0.9)
    for epoch in range(args.epochs):
        features, labels = table(epoch)
        order = torch.randperm(len(labels), generator=ser.rng(args.seed, "eval", epoch))
        batch = min(args.batch_size, len(labels)) // ranks * ranks
        steps = len(labels) // batch
        for step in range(steps):
            rows = order[step * batch:][:batch].chunk(ranks)[rank]
            logits = parallel(features[rows])
            losses = [lr * F.cross_entropy(z, labels[rows]) for lr, z in zip(args.lr, logits)]
            optimizer.zero_grad()
            sum(losses).backward()
            # Paper: 4.1, a cosine without warmup.
            cosine = math.cos(math.pi * (epoch + step / steps) / args.epochs)
            optimizer.param_groups[0]["lr"] = batch / 256 * 0.5 * (1 + cosine)
            optimizer.step()
        del features     # a table of ImageNet has 8 GB: not two at a time

def accuracy(logits: Tensor, labels: Tensor, among: Tensor) -> list:
    """Top-1 and top-5 in percent of logits (n, C), where only the classes `among` are answers."""
    best = among[logits[:, among].topk(min(5, len(among))).indices]               # (n, 5)
    share = 100 * (best == labels[:, None]).float().mean(0)
    return [share[0].item(), share.sum().item()]

# ==== 5. k-NN (paper 4.2) =========================================================================
def knn(train: Tensor, train_labels: Tensor, test: Tensor, labels: Tensor, k: int = 20) -> float:
    """Top-1 in percent of the test features (n, D), classified by a vote of their k nearest
    training features (m, D) with weights exp(s / .07), s the cosine similarity."""
    # Choice: 4.2 says 20-NN; features, similarity and weights are those of DINO's eval_knn.
    train = F.normalize(train)
    test = F.normalize(test)
    right = 0
    for x, y in zip(test.split(256), labels.split(256)):
        similarity, nearest = (x @ train.T).topk(min(k, len(train)))              # (B, k)
        votes = x.new_zeros(len(x), int(train_labels.max()) + 1)                  # (B, C)
        votes.scatter_add_(1, train_labels[nearest], (similarity / 0.07).exp())
        right += (votes.argmax(1) == y).sum().item()
    return 100 * right / len(test)

# ==== 6. Equivariance: do the tokens move as the image moves? (paper A.2) =========================
@torch.no_grad()
def equivariances(encoder: ViT, images: Tensor, layers: Sequence, element: str) -> dict:
    """After each of the blocks `layers`, how token maps f(x) move under one element of G, "rot90",
    "hflip" or "scale". images: (n, 3, S, S) normalised.
    score      paper A.2, mean over tokens of cos(rho_g f(x), f(rho_g x)), g = g2 g1^-1 of two draws
    retrieval  share of the tokens of rho_h f(x) whose most similar one, among all of f(rho_h x) of
               32 images, is their counterpart; chance: 1 / (32 H W)
    g may be the identity; h turns or flips always. For "scale" both are g2: rho resizes to it."""
    sums = {layer: torch.zeros(3) for layer in layers}
    for part, x in enumerate(images.split(32)):
        g1, g2 = [ser.sample_geometry(len(x), encoder.grid, [element], ser.rng(element, part, view))
                  for view in (1, 2)]
        g = ser.relative(g2, g1)
        h = g
        if element == "hflip":
            h = g._replace(flip=torch.ones_like(g.flip))
        elif element == "rot90":
            h = g._replace(turns=1 + torch.arange(len(x)) % 3)
        gx = ser.rho(g, x, encoder.patch_size)
        hx = ser.rho(h, x, encoder.patch_size)
        encoded = [encoder(moved, layers).maps for moved in (x, gx, hx)]
        if encoder.depth in layers:
            # Choice: the "final representation" is the patch tokens under the final LayerNorm.
            for maps in encoded:
                tokens = maps[encoder.depth].movedim(1, -1)
                maps[encoder.depth] = encoder.norm(tokens).movedim(-1, 1)
        for layer in layers:
            f_x, f_gx, f_hx = [maps[layer] for maps in encoded]                   # (B, D, H, W)
            score = F.cosine_similarity(ser.rho(g, f_x), f_gx).mean()
            z = ser.rho(h, f_x).movedim(1, -1).flatten(0, 2)                      # (B N, D)
            z_prime = f_hx.movedim(1, -1).flatten(0, 2)
            nearest = (F.normalize(z) @ F.normalize(z_prime).T).argmax(1)
            right = nearest.cpu() == torch.arange(len(z))
            values = torch.tensor([score, right.float().mean(), 1 / len(z)])
            sums[layer] += values * len(x) / len(images)
    names = ("score", "retrieval", "chance")
    return {layer: dict(zip(names, values.tolist())) for layer, values in sums.items()}

# ==== 7. Evaluation: a checkpoint in, a table out =================================================
def load_sets(args: Namespace, size: int) -> tuple:
    """The training classes, and the sets: "train", "val", --test, and "crops", random, of files."""
    if not args.data:     # with seeds that ser.py does not use
        train = TensorDataset(*ser.draw_images(2048, size, seed=101))
        val = TensorDataset(*ser.draw_images(1000, size, seed=102))
        return range(6), {"train": train, "val": val}
    root = Path(args.data, "train")
    crops = class_folder(root, train_transform(size))
    folders = dict(test.split("=", 1) for test in args.test)
    folders |= {"train": root, "val": args.val or Path(args.data, "val")}
    whole = eval_transform(size)
    sets = {name: class_folder(folder, whole, crops.classes) for name, folder in folders.items()}
    return crops.classes, {**sets, "crops": crops}

def probe(encoder: ViT, classes: Sequence, sets: dict, args: Namespace) -> tuple:
    """k-NN, and heads if wanted: title -> percent; and what head.pt holds."""
    trains = args.cache or args.mlp or not args.knn
    cached = args.cache or "crops" not in sets
    blocks = min(4, encoder.depth - encoder.cls_layer) if trains else 1     # those with [CLS]
    train, train_labels = extract(encoder, sets["train"], blocks if cached else 1, args)
    tests = {name: extract(encoder, data, blocks, args) for name, data in sets.items()
             if name not in ("crops", "train")}
    found = {}
    chosen = {}
    if trains:
        torch.manual_seed(args.seed)
        heads = Heads(len(args.lr), blocks * encoder.dim, len(classes), args.mlp).to(train.device)
        table = lambda epoch: extract(encoder, sets["crops"], blocks, args, epoch)
        if cached:
            table = lambda epoch: (train, train_labels)
        train_heads(heads, table, args)
        heads.requires_grad_(False)
        x, y = tests["val"]
        top1 = [accuracy(logits, y, y.unique())[0] for logits in heads(x)]
        best = top1.index(max(top1))     # Choice: on val, as the release
        head = heads.heads[best]
        chosen = {"weight": head[-1].weight.cpu(), "bias": head[-1].bias.cpu(),
                  "classes": list(classes), "blocks": blocks, "lr": args.lr[best]}
        found["best rate"] = args.lr[best]
    kind = f"{'MLP' if args.mlp else 'linear'} on {blocks} [CLS]"
    last = slice(-encoder.dim, None)     # the features of the last block

    for name, (x, y) in tests.items():
        # Choice: among all classes, and, as ImageNet-R's authors do, among those of the set.
        for among in (torch.arange(len(classes)).to(y), y.unique()):
            where = f"{name}, {len(among)} answers"
            if trains:
                top1, top5 = accuracy(head(x), y, among)
                found |= {f"{where}: {kind}, top-1 %": top1, f"{where}: {kind}, top-5 %": top5}
            near = torch.isin(train_labels, among)
            top1 = knn(train[:, last][near], train_labels[near], x[:, last], y)
            found[f"{where}: 20-NN, top-1 %"] = top1
    return found, chosen

def compare(encoder: ViT, data: Dataset, layers: Sequence) -> dict:
    """title -> the equivariance of 512 images, spread over `data`, after each of `layers`."""
    places = torch.linspace(0, len(data) - 1, min(512, len(data))).long().tolist()
    images = torch.stack([data[place][0] for place in places]).to(encoder.cls_token.device)
    found = {}
    for element in ("rot90", "hflip", "scale"):
        measured = equivariances(encoder, ser.normalise(images / 255), layers, element)
        for layer, values in measured.items():
            title = f"{element} after block {layer}"
            found[f"{title}: cosine (A.2)"] = values["score"]
            found[f"{title}: retrieval (chance {values['chance']:.5f})"] = values["retrieval"]
    return found

def evaluate(args: Namespace) -> dict:
    """Evaluate a checkpoint, write and return the result: "rows", title -> encoder -> measure."""
    device = ser.setup()
    path = Path(args.checkpoint)
    state = torch.load(path, map_location="cpu", weights_only=True)
    encoders = {}
    if args.equivariance or not args.data:
        encoders["untrained"] = ser.new_encoder(Namespace(**state["settings"])).eval()
    encoders["trained"] = ser.load_encoder(path)
    classes, sets = load_sets(args, state["settings"]["image_size"])
    result = {"settings": vars(args), "rows": {}}
    chosen = {}
    for name, encoder in encoders.items():
        encoder.to(device)
        found = {}
        layers = range(1, encoder.depth + 1) if args.equivariance else [max(1, encoder.cls_layer)]
        if args.cache or args.mlp or args.knn or not args.equivariance:
            found, chosen = probe(encoder, classes, sets, args)
        if "untrained" in encoders:
            found |= compare(encoder, sets["val"], layers)
        for title, value in found.items():
            result["rows"].setdefault(title, {})[name] = float(f"{value:.4g}")

    if ser.ranks_and_rank()[1] == 0:
        path.with_name("eval.json").write_text(json.dumps(result, indent=1))
        if chosen and not args.mlp:
            ser.save(path.with_name("head.pt"), **chosen)
    return result

def main(argv: Sequence | None = None) -> None:
    """Evaluate, and print a row for each measure."""
    parser = arguments()
    if not parser.parse_known_args(argv)[0].data:     # for drawn images and two cores
        parser.set_defaults(batch_size=64, workers=0)
    result = evaluate(parser.parse_args(argv))
    if ser.ranks_and_rank()[1] == 0:
        print(f"{result['settings']['checkpoint']:48}   untrained     trained")
        for title, row in result["rows"].items():
            print(f"{title:48}{row.get('untrained', '-'):>12}{row['trained']:>12}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    main()

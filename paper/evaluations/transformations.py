"""Transformation prediction by layer (paper A.2): can frozen features tell how an image was moved?

    python -m paper.evaluations.transformations --data /imagenet --checkpoint runs/main/last.pt

A probe sees the features of an image x and of g x. There are two tasks: by which of four turns was
x moved, and was it flipped? Where g does nothing, the two halves of a pair are equal bit for bit,
so that the flip probe has only to see that something changed. The paper predicts "rotation/flip
labels, following Garrido et al.", and does not say from which images, pairs or tokens, nor by which
probe: compare our encoders with one another, not with the paper's rows.
Axes: n or m images, B of a batch, V = 5 versions of one, L layers, D width, A versions of a task.
"""
from argparse import Namespace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import eval_linear
import ser
from paper.evaluations import arguments, main

TASKS = {"rotation": [0, 1, 2, 3], "flip": [0, 4]}     # versions: 0 to 3 quarter turns; 4, the flip
PAPER_LAYERS = [1, 3, 6, 9, 12]
PAPER = {"rotation": """\
  paper, MoCo-v3 + AugSelf         81.55   96.71   99.71   99.13   68.74
  paper, MoCo-v3 + STL             79.56   92.80   99.46   99.76   98.08
  paper, MoCo-v3 + SER             79.97   93.34   99.52   99.73   96.59""", "flip": """\
  paper, MoCo-v3 + AugSelf         63.24   85.66   96.48   91.51   62.68
  paper, MoCo-v3 + STL             62.91   82.09   88.83   97.22   83.27
  paper, MoCo-v3 + SER             63.02   78.68   92.87   96.59   75.95"""}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line."""
    parser = arguments("folder with train/CLASS, val/CLASS")
    add = parser.add_argument
    add("--layers", type=ser.count, nargs="+", default=PAPER_LAYERS, help="up to its depth")
    add("--images", type=ser.count, default=20000, help="images of train; half as many of val")
    parser.set_defaults(val="", test=[])     # eval_linear.load_sets asks for them
    return parser.parse_args(argv)


@torch.no_grad()
def version_features(encoder: ser.ViT, data: Dataset, layers: list, workers: int) -> Tensor:
    """(n, V, L, D): the mean patch token of each version of each image after each of the layers."""
    loader = DataLoader(data, 64, num_workers=workers)
    batches = []
    for images, _ in tqdm(loader, "features"):
        x = ser.normalise(images.to(encoder.cls_token.device) / 255)
        # Exact permutations of the pixels of one centre crop, without jitter.
        turned = [torch.rot90(x, turns, (-2, -1)) for turns in range(4)]
        versions = torch.cat([*turned, x.flip(-1)])
        maps = encoder(versions, layers).maps

        # Choice: the mean patch token, which every method has after every block; SER's [CLS] enters
        # after block 3. No LayerNorm after the last: the probe standardises its features.
        means = [maps[layer].float().mean((2, 3)) for layer in layers]
        means = torch.stack(means, dim=1)
        batches.append(means.unflatten(0, (5, -1)))                               # (V, B, L, D)
    return torch.cat(batches, dim=1).transpose(0, 1)


def probe(train: Tensor, test: Tensor, versions: list, seed: int) -> float:
    """The accuracy in percent, on test (m, V, D), of an MLP trained on train (n, V, D) to tell
    `versions` from each other."""
    std = train.std((0, 1)).clamp_min(1e-6)
    z = (torch.cat([train, test]) - train.mean((0, 1))) / std

    # Choice: a pair, as one photograph rarely tells that it is mirrored; the paper reaches 97%.
    moved = z[:, versions]                                                        # (n + m, A, D)
    still = z[:, :1].expand_as(moved)
    x = torch.cat([still, moved], dim=2).flatten(0, 1)
    y = torch.arange(len(versions), device=x.device).repeat(len(z))
    n_train = len(versions) * len(train)     # rows of train, in front of those of test

    # Choice: Garrido et al.'s probe, two hidden layers of 1024, and their Adam at 1e-3. Unlike
    # A.2, which follows them: 10 epochs of some images, not 50 (300 in their README) of all.
    torch.manual_seed(seed)
    mlp = eval_linear.make_head(x.shape[1], len(versions), mlp=True).to(x.device)
    optimizer = torch.optim.Adam(mlp.parameters(), 1e-3)
    for _ in range(10):
        for rows in torch.randperm(n_train).to(x.device).split(256):
            loss = nn.functional.cross_entropy(mlp(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    right = mlp(x[n_train:]).argmax(1) == y[n_train:]
    return 100 * right.float().mean().item()


def evaluate(args: Namespace, device: torch.device) -> None:
    """Measure a checkpoint and its untrained encoder, write the result and print it."""
    checkpoint = eval_linear.read_checkpoint(args)
    path = eval_linear.results_path(args, "transformations.json")
    run = Namespace(**checkpoint.settings)
    layers = [layer for layer in args.layers if layer <= run.depth]
    sets = eval_linear.load_sets(args, run.image_size)
    train = eval_linear.spread(sets.train_centre, args.images)
    test = eval_linear.spread(sets.tests["val"], args.images // 2)
    images = eval_linear.describe_sets({"train": sets.train_centre, **sets.tests})

    lines = {task: [f"{task}, % after blocks {layers}, chance {100 / len(versions):g}"]
             for task, versions in TASKS.items()}
    checkpoints = {"untrained": eval_linear.untrained(checkpoint), "trained": checkpoint}
    for name, measured in checkpoints.items():
        encoder = measured.encoder.to(device)
        x = version_features(encoder, train, layers, args.workers)
        x_test = version_features(encoder, test, layers, args.workers)

        rows = []
        for task, versions in TASKS.items():
            line = f"  {name:28}"
            for place, layer in enumerate(layers):
                value = probe(x[:, :, place], x_test[:, :, place], versions, args.seed)
                line += f"{value:8.2f}"
                rows += eval_linear.make_rows({f"{task} %": value}, "val", len(versions), layer)
            lines[task].append(line)
        rows = [row | {"encoder": name} for row in rows]
        eval_linear.add_rows(path, rows, args, measured, images)

    for task in TASKS:
        print("\n".join(lines[task]))
        if layers == PAPER_LAYERS and run.depth == PAPER_LAYERS[-1]:
            print(PAPER[task])
    print(f"results are in {path}")


if __name__ == "__main__":
    main(settings, evaluate)

"""What SER costs: the paper's parameters and "Computation overhead", counted, and on a clock.

    python -m paper.experiments.overhead                                  the table: seconds
    python -m paper.experiments.overhead --rows step                      steps, by ser.py's flags
    python -m paper.experiments.overhead --rows loader --data /imagenet   images/s of one CPU core

The paper has 42.9 M parameters and 18.48 G multiply-adds (MACs) for MoCo-v3, 43.4 M and 18.63 G for
SER. Its caption says "forward and backward", but 18.48 G are the forward passes of two views, by
the online and the momentum branch. 18.63 G is a count that may agree by chance, see `count_costs`.
"""
import random
import time
from argparse import ArgumentParser, Namespace
from statistics import median
from typing import Callable

import torch
from PIL import Image, ImageFilter, ImageOps
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms as T

import ser

CUDA = torch.cuda.is_available()
PLAIN = ["--ratio", "0", "--cls-layer", "0"]     # MoCo-v3
# r of `step`: the paper's, and README's for one GPU. On a CPU, 2 and 4 of 16 images are in b2.
RATIOS = ("0.01", "0.0625") if CUDA else ("0.125", "0.25")


def count_costs() -> dict[str, float]:
    """Trained parameters of MoCo-v3 and SER, and MACs of an image as the paper counts. SER's
    b2 has 3 of 256 images on each GPU. On the device "meta", tensors have no values."""
    views, gpus, directions = 2, 8, 2
    counts: dict[str, float] = {}
    x = torch.empty(1, 3, 224, 224, device="meta")
    for name, flags in (("moco", PLAIN), ("ser", [])):
        args = ser.parse(["--data", "given", *flags])     # without --data, models are small
        with torch.device("meta"):
            model = ser.build(args).eval()
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        counts[f"{name}: parameters"] = sum(trained)

        base = model.base
        with FlopCounterMode(display=False) as counter:
            base.predictor(base.projector(base.encoder(x).cls))
            base.momentum_projector(base.momentum_encoder(x).cls)
        counts[f"{name}: forward MACs"] = views * counter.get_total_flops() / 2     # 2 FLOP each

    anchors = 3 * 196                                         # of a GPU
    projector = views * anchors * (384 * 512 + 512 * 512)     # it sees the tokens of both views
    loss = anchors * gpus * views * anchors * 512             # anchors meet both views of all GPUs
    own = counts["ser: forward MACs"]
    counts["ser: forward MACs"] = own + (projector + loss) / 256
    # 18.63 G result if each GPU computes L_equiv of all anchors in both directions. The release,
    # for two views, has half of the keys, and projects the momentum branch's tokens, too.
    everywhere = gpus * directions * loss
    counts["ser: all GPUs' anchors"] = own + (projector + everywhere) / 256
    counts["ser: the release's count"] = own + (2 * projector + everywhere / 2) / 256
    return counts


def training_step(flags: list[str]) -> Callable[[int], None]:
    """A training step as ser.train does it, a function of the step's number, on crops of noise."""
    args = ser.parse(["--data", "given", *flags])
    ser.check_settings(args, args.batch_size, ranks=1)
    device = ser.setup()
    model = ser.build(args).to(device)
    optimizer = ser.adamw(model, args)
    images = (255 * torch.rand(args.batch_size, 3, args.image_size, args.image_size)).byte()
    keys = ser.batch_items(args.batch_size, args, 0, 1)
    batch, = DataLoader(ser.two_view_dataset(images, args), batch_sampler=keys)
    loaded = [(pixels.to(device), aug) for pixels, aug in batch]

    def step(number: int) -> None:
        views = ser.make_views(loaded, args, number)
        model.base.update(0.5)
        with torch.autocast(device.type, torch.bfloat16, args.bf16):
            loss = model(views)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if CUDA:
            torch.cuda.synchronize()

    return step


def compare(sides: dict[str, Callable[[int], None]], rounds: int, images: int) -> None:
    """Time all sides in rounds. Print their medians, and their ratios to the first side in the
    same round. Odd rounds run in reverse, so a drift cancels. Round 0 does not count."""
    times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=number % 2 > 0):
            start = time.perf_counter()
            sides[name](number)
            times[name].append(time.perf_counter() - start)

    first = next(iter(sides))
    for name, (_, *seconds) in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, times[first][1:]))
        print(f"{name:12}{median(seconds):9.4f} s {images / median(seconds):8.1f} images/s "
              f"{median(ratios):6.3f}x ({ratios[0]:.3f}-{ratios[-1]:.3f}) of {first}")


def time_steps(args: Namespace) -> None:
    """Time a training step of MoCo-v3, and of SER with each r."""
    sides = {"moco": PLAIN} | {f"ser {ratio}": ["--ratio", ratio] for ratio in RATIOS}
    flags = [*args.flags, "--batch-size", str(args.batch_size)]
    steps = {name: training_step([*flags, *own]) for name, own in sides.items()}
    compare(steps, args.rounds, args.batch_size)


def moco_v3_recipe(blur: float, solarize: float) -> T.Compose:
    """moco-v3's augmentation of a view, in Pillow and torchvision as its repository has it."""
    def smooth(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))

    return T.Compose([
        T.RandomResizedCrop(224), T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
        T.RandomGrayscale(0.2), T.RandomApply([smooth], blur),
        T.RandomApply([ImageOps.solarize], solarize), T.RandomHorizontalFlip(), T.ToTensor(),
        T.Normalize(ser.MEAN.flatten().tolist(), ser.STD.flatten().tolist())])


def time_loader(args: Namespace) -> None:
    """Time one core. moco-v3's recipe does everything there; in ser.py the device jitters."""
    torch.set_num_threads(1)
    paths = ser.find_images(args)[0][:200]
    views = ser.two_view_dataset(paths, ser.parse(["--data", args.data]))
    recipes = [moco_v3_recipe(1.0, 0.0), moco_v3_recipe(0.1, 0.2)]

    def theirs(number: int) -> None:
        for path in paths:
            image = Image.open(path).convert("RGB")
            for make in recipes:
                make(image)

    def ours(number: int) -> None:
        for index in range(len(paths)):
            views[number, index, False]

    compare({"moco-v3": theirs, "ser": ours}, args.rounds, len(paths))


def print_counts(args: Namespace) -> None:
    """Print what is counted."""
    for name, value in count_costs().items():
        print(f"{name:24}{value:20,.0f}")


ROWS = {"counts": print_counts, "step": time_steps, "loader": time_loader}


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line; `flags` are those of ser.py."""
    parser = ArgumentParser()
    parser.add_argument("--rows", default="counts", choices=list(ROWS))
    parser.add_argument("--data", help="photographs, for the row loader")
    parser.add_argument("--batch-size", type=int, default=256 if CUDA else 16, help="of a step")
    parser.add_argument("--rounds", type=int, default=7, help="in which all sides are timed; on "
                        "a GPU take 100 for steps, as it prepares kernels for each new grid of b2")
    args, args.flags = parser.parse_known_args(argv)
    if args.rows != "step":
        parser.parse_args(argv)     # exits, as only steps have flags of ser.py
    return args


if __name__ == "__main__":
    args = settings()
    ROWS[args.rows](args)

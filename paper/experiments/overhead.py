"""What SER costs: the paper's table "Computation overhead", counted, and the same on a clock.

    python -m paper.experiments.overhead                                  the table: seconds
    python -m paper.experiments.overhead --rows step methods --bf16       training steps
    python -m paper.experiments.overhead --rows loader --data /imagenet   one CPU core

Trained parameters, and multiply-adds (MACs) of an image's forward passes:

    paper    MoCo-v3 42.9 M, 18.48 G      SER 43.4 M, 18.63 G (1.008x)
             AugSelf 43.7 M    EquiMod 43.3 M    STL 62.2 M    E-SSL 43.3 M
    here     MoCo-v3 42.890 M, 18.476 G   SER 43.350 M, 18.464 G (0.9994x), by its count 18.630 G
             AugSelf 44.209 M  EquiMod 43.271 M  STL 62.176 M  E-SSL 43.288 M

The paper's caption says "forward and backward", but 18.48 G are the forward passes of two views, by
the online and the momentum branch. In its 18.63 G each of 8 GPUs computes L_equiv of all anchors,
in both directions; a GPU of ser.py computes its own, in one, which is less than a late [CLS] saves.
"""
from __future__ import annotations

import importlib
import random
import time
from argparse import ArgumentParser, Namespace
from statistics import median
from typing import Any, Callable, Sequence

import torch
from PIL import Image, ImageFilter, ImageOps
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms as T
from torchvision.datasets.folder import pil_loader

import ser

CUDA = torch.cuda.is_available()
BATCH = 256 if CUDA else 16
METHODS = ("augself", "equimod", "stl", "essl")
# r of the row `step`: the paper's, and README's for one GPU; on a CPU, 2 and 4 of 16 images in b2.
RATIOS = ("0", "0.01", "0.06") if CUDA else ("0", "0.125", "0.25")
SIDES = {"step": list(zip(("moco", "ser", "ser"), RATIOS)),
         "methods": [(name, "0") for name in ("moco", *METHODS)]}

def method(name: str, flags: Sequence[str]) -> tuple[Namespace, Callable, Callable]:
    """(settings, build, dataset) of a method on ViT-S/16; "moco" and "ser" are ser.py's."""
    flags = ["--data", "given", *flags]
    if name in METHODS:
        module = importlib.import_module(f"paper.methods.{name}")
        return module.settings(flags), module.build, module.dataset
    if name == "moco":
        flags += ["--ratio", "0", "--cls-layer", "0"]
    return ser.parse(flags), ser.build, ser.two_views

# ==== Counts: on the device "meta", where tensors have a shape and no values ======================
def macs(work: Callable[[], Any]) -> float:
    """MACs of the matrix products and convolutions of `work`."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() / 2

def count() -> dict[str, float]:
    """Trained parameters of each method; MACs of an image, as the paper counts, by MoCo-v3 and SER,
    whose b2 has 3 of 256 images on each of 8 GPUs."""
    found = {}
    x = torch.empty(1, 3, 224, 224, device="meta")
    for name in ("moco", "ser", *METHODS):
        args, build, _ = method(name, [])
        with torch.device("meta"):
            model = build(args).eval()
        found[f"{name}: parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if name not in METHODS:
            base = model.base
            online = macs(lambda: base.predictor(base.projector(base.encoder(x).cls)))
            momentum = macs(lambda: base.momentum_projector(base.momentum_encoder(x).cls))
            found[f"{name}: forward MACs"] = 2 * (online + momentum)     # two views
    # The projector sees the tokens of both views of b2; an anchor meets both views of all GPUs.
    anchors = 3 * 196     # of a GPU
    projector = 2 * anchors * (384 * 512 + 512 * 512)
    of_an_anchor = 8 * 2 * anchors * 512
    own = found["ser: forward MACs"]
    found["ser: forward MACs"] = own + (projector + anchors * of_an_anchor) / 256
    found["ser: the paper's count"] = own + (projector + 16 * anchors * of_an_anchor) / 256
    return found

# ==== Clock =======================================================================================
def training_step(args: Namespace, build: Callable, dataset: Callable) -> Callable[[int], None]:
    """A training step as ser.train does it, from decoded crops on: views and jitter, momentum,
    forward, backward, AdamW; bf16 on a GPU. The images are noise. It is called with its number."""
    device = ser.setup()
    model = build(args).to(device)
    optimizer = ser.adamw(model, args)
    images = (255 * torch.rand(args.batch_size, 3, args.image_size, args.image_size)).byte()
    batches = DataLoader(dataset(images, args), batch_sampler=ser.batch_keys(BATCH, args, 0, 1))
    loaded = [(pixels.to(device), drawn) for pixels, drawn in next(iter(batches))]
    def step(number: int) -> None:
        views = ser.make_views(loaded, args, number)
        model.base.update(0.5)
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda" or args.bf16):
            loss = model(views)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if CUDA:
            torch.cuda.synchronize()
    return step

def compare(sides: dict[str, Callable[[int], None]], count: int, images: int) -> None:
    """Call all sides in rounds, and print medians and the ratios to the first side, each within a
    round. Every other round is in reverse, so that a drift cancels; the first does not count."""
    times = {name: [] for name in sides}
    for number in range(count + 1):
        for name in sorted(sides, reverse=number % 2 > 0):
            start = time.perf_counter()
            sides[name](number)
            times[name].append(time.perf_counter() - start)
    first = next(iter(sides))
    for name, (_, *seconds) in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, times[first][1:]))
        print(f"{name:12}{median(seconds):8.3f} s {images / median(seconds):8.1f} images/s "
              f"{median(ratios):6.3f}x ({ratios[0]:.3f}-{ratios[-1]:.3f}) of {first}")

def time_steps(sides: Sequence[tuple[str, str]], flags: Sequence[str], count: int) -> None:
    """Print MACs, memory of a GPU and time of a training step of each side, (method, r)."""
    steps = {}
    for name, ratio in sides:
        before = torch.cuda.memory_allocated()
        step = training_step(*method(name, [*flags, "--batch-size", str(BATCH), "--ratio", ratio]))
        work = macs(lambda: step(0)) / BATCH     # this step makes the state of AdamW, too
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            step(1)
        peak = torch.cuda.max_memory_allocated() - before
        print(f"{name} {ratio}: {work / 1e9:.3f} GMAC an image, jitter too; {peak / 1e9:.2f} GB")
        steps[f"{name} {ratio}"] = step
    compare(steps, count, BATCH)

def moco_v3_recipe(blur: float, solarize: float) -> T.Compose:
    """moco-v3's augmentation of a view, in Pillow and torchvision as its repository has it."""
    def smooth(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
    return T.Compose([
        T.RandomResizedCrop(224), T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
        T.RandomGrayscale(0.2), T.RandomApply([smooth], blur),
        T.RandomApply([ImageOps.solarize], solarize), T.RandomHorizontalFlip(), T.ToTensor(),
        T.Normalize(ser.MEAN.flatten().tolist(), ser.STD.flatten().tolist())])

def time_loader(data: str, count: int) -> None:
    """Print images/s of a core, of at most 200 images: moco-v3's whole recipe, and ser.py's data
    set, which decodes and cuts two views and leaves jitter to the device."""
    torch.set_num_threads(1)
    paths = ser.list_images(data)[:200]
    views = ser.two_views(paths, ser.parse(["--data", data]))
    recipes = [moco_v3_recipe(1.0, 0.0), moco_v3_recipe(0.1, 0.2)]
    def theirs(number: int) -> None:
        for image in map(pil_loader, paths):
            for recipe in recipes:
                recipe(image)
    ours = lambda number: [views[number, index, False] for index in range(len(paths))]
    compare({"moco-v3": theirs, "ser": ours}, count, len(paths))

def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows that are asked for."""
    parser = ArgumentParser(allow_abbrev=False)
    rows = ["counts", *SIDES, "loader"]
    parser.add_argument("--rows", nargs="+", default=["counts"], choices=rows)
    parser.add_argument("--data", default="", help="images for the row loader")
    parser.add_argument("--rounds", type=int, default=7, help="of all sides")
    options, flags = parser.parse_known_args(argv)
    for row in options.rows:
        if row == "counts":
            for name, value in count().items():
                print(f"{name:24}{value:20,.0f}")
        elif row == "loader":
            time_loader(options.data, options.rounds)
        else:
            time_steps(SIDES[row], flags, options.rounds)

if __name__ == "__main__":
    main()

"""The paper's "Computation overhead" table (18.48 G -> 18.63 G, 1.008x), and what it costs on a clock.

    python -m paper.overhead                       counts, step, loss, jitter: minutes on a CPU
    python -m paper.overhead --data FOLDER         the loader as well, on one core, on the images of FOLDER
    python -m paper.overhead --rows step loss      only these; --json FILE writes what was printed

Every row compares two things of the same run, measured in turn; times are medians with their range.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from typing import Any, Callable

import torch
import torchvision
from PIL import Image, ImageFilter, ImageOps
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms

import ser

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def in_turn(runs: int, **functions: Callable[[], Any]) -> dict[str, list[float]]:
    """Seconds of every function, called in turn `runs` times after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(runs + 1):
        for name, function in functions.items():
            if CUDA:
                torch.cuda.synchronize()
            since = time.perf_counter()
            function()
            if CUDA:
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - since)
    return seconds


def spread(values: list[float], unit: str = "s") -> str:
    """Median and range, for a table."""
    return f"{statistics.median(values):.3g} {unit} ({min(values):.3g}-{max(values):.3g})"


def counts() -> dict[str, Any]:
    """Trainable parameters, and MACs per image of the forward passes (2 online, 2 momentum), as the paper."""
    rows: dict[str, Any] = {}
    for name, ratio, cls_layer in (("MoCo-v3", 0.0, 0), ("SER", 0.01, 3)):
        with torch.device("meta"):
            model = ser.build(ser.Config(ratio=ratio, cls_layer=cls_layer)).eval()
            x, features = torch.empty(1, 3, 224, 224), torch.empty(1, 384)
        base = model.base
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            base.predictor(base.projector(base.encoder([x])[0].cls))
            base.momentum_projector(base.momentum_encoder([x])[0].cls)
        macs = counter.get_total_flops()   # 2 FLOPs a MAC, and 2 views
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows[name] = {"trainable": trainable, "macs": macs}
    # r = 0.01: 3 of the 256 images of each of 8 ranks. The projector sees both views of their tokens.
    own, gathered = 3 * 196, 24 * 196
    project, product = 2 * own * (384 * 512 + 512 * 512), 2 * gathered * 512
    rows["SER, the paper's count"] = {"trainable": rows["SER"]["trainable"], "macs": rows["SER"]["macs"] + (
        project + 2 * gathered * product) / 256}   # every rank computes the loss of all, in both directions
    rows["SER"]["macs"] += (project + own * product) / 256   # what ser.py does: own anchors, one direction
    for name, row in rows.items():
        print(f"  {name:24} {row['trainable']:>12,} parameters {row['macs'] / 1e9:8.3f} GMAC  "
              f"{row['macs'] / rows['MoCo-v3']['macs']:.4f}x")
    print("  the paper: 42.9 M and 43.4 M (75,648 learned position codes), 18.48 G and 18.63 G, 1.008x")
    return rows


def make_step(cfg: ser.Config) -> Callable[[], None]:
    """A function that runs one training step, views included, on random images; the grids change."""
    model = ser.build(cfg).to(DEVICE)
    if cfg.compile:
        for block in (m for m in model.modules() if isinstance(m, ser.Block)):
            block.compile(dynamic=True)
    size = (cfg.batch_size, 2, 3, cfg.image_size, cfg.image_size)
    images = torch.randint(256, size, dtype=torch.uint8, device=DEVICE)
    draws, count = torch.rand(cfg.batch_size, 2, 13), iter(range(1 << 30))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=CUDA)

    def step() -> None:
        batch = ser.make_views(images, draws, cfg, next(count), 0, 1)
        model.base.update(0.5)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = model(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        if CUDA:
            optimizer.step()
    return step


def step() -> dict[str, Any]:
    """A training step of ViT-S/16 at 224, MoCo-v3 beside SER: 16 images, 4 in b2; on a GPU 256, bf16."""
    images = 256 if CUDA else 16
    settings = {"MoCo-v3": dict(ratio=0.0, cls_layer=0), "SER r=.25": dict(ratio=0.25)}
    if CUDA:
        settings["SER r=.01"] = dict(ratio=3 / 256)
    rows = {}
    for compile in ([False, True] if CUDA else [False]):
        steps = {name: make_step(ser.Config(batch_size=images, compile=compile, **how))
                 for name, how in settings.items()}
        peaks = {}
        for name, function in steps.items():   # warm up, and give each its own peak
            for _ in range(20 if compile else 1):
                if CUDA:
                    torch.cuda.reset_peak_memory_stats()
                function()
            peaks[name] = torch.cuda.max_memory_allocated() / 2 ** 30 if CUDA else None
        seconds = in_turn(20 if CUDA else 7, **steps)
        for name, values in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(values, seconds["MoCo-v3"]))
            label, rate = name + ", compiled" * compile, images / statistics.median(values)
            rows[label] = {"seconds": values, "ratio": ratio, "images_per_s": rate, "peak_gib": peaks[name],
                           "mfu": rate * 36.7e9 * 2 / 989e12 if CUDA else None}
            print(f"  {label:24} {spread(values):26} {rate:8.1f} images/s  {ratio:.3f}x MoCo-v3"
                  + (f"  {peaks[name]:.1f} GiB, {rows[label]['mfu']:.0%} of 989 TFLOP/s" if CUDA else ""))
    return rows


def peak() -> float:
    """MB: the most that CUDA's allocator held, or the most that was resident."""
    if CUDA:
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def loss_alone(chunk: int) -> None:
    """What `loss` runs in a process of its own: 64 images x 196 tokens x 512, forward and backward."""
    z, z_prime = (torch.randn(64, 196, 512, device=DEVICE, requires_grad=True) for _ in range(2))
    ser.patch_ntxent(z[:4], z_prime[:4]).backward()
    before, since = peak(), time.perf_counter()
    value = ser.patch_ntxent(z, z_prime, chunk=chunk or None)
    value.backward()
    value = value.item()
    print(json.dumps({"seconds": time.perf_counter() - since, "extra_mb": peak() - before, "value": value}))


def loss() -> dict[str, Any]:
    """patch_ntxent in blocks against all logits at once: time, and extra peak memory, in fresh processes."""
    found: dict[str, dict[str, list]] = {name: {"seconds": [], "extra_mb": []} for name in
                                         ("blocks of 32 MB", "all logits at once")}
    for _ in range(3):
        for name, chunk in zip(found, (0, 64 * 196)):
            # glibc keeps freed blocks below 32 MB: memory is measured with that off, time as it comes.
            for figure, changed in (("seconds", {}), ("extra_mb", {"MALLOC_MMAP_THRESHOLD_": "1048576"})):
                command = [sys.executable, "-m", "paper.overhead", "--loss-alone", str(chunk)]
                run = subprocess.run(command, text=True, capture_output=True, env={**os.environ, **changed},
                                     check=True)
                found[name][figure].append(json.loads(run.stdout)[figure])
    for name, runs in found.items():
        print(f"  {name:20} {spread(runs['seconds']):28} {spread(runs['extra_mb'], 'MB')}")
    return found


def jitter() -> dict[str, Any]:
    """Photometric jitter of both views, per image."""
    images, draws = torch.rand(64, 3, 224, 224, device=DEVICE), torch.rand(64, 2, 13)
    seconds = in_turn(5, **{f"view {v}": lambda v=v: ser.photometric(images, draws[:, v], v) for v in (0, 1)})
    for name, values in seconds.items():
        print(f"  {name:20} {spread([1e3 * s / 64 for s in values], 'ms per image')}")
    return seconds


def moco_v3_pipeline(blur: float, solarize: float) -> transforms.Compose:
    """moco-v3's augmentation of one view, in Pillow and torchvision as its repository has it."""
    def smooth(image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
    return transforms.Compose([
        transforms.RandomResizedCrop(224, scale=(0.08, 1.0)),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
        transforms.RandomGrayscale(p=0.2),
        transforms.RandomApply([transforms.Lambda(smooth)], p=blur),
        transforms.RandomApply([transforms.Lambda(ImageOps.solarize)], p=solarize),
        transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize(ser.MEAN.flatten().tolist(), ser.STD.flatten().tolist())])


def loader(folder: str) -> dict[str, Any]:
    """Images per second of one core: ser.Views (jitter is the device's work) against moco-v3's two views."""
    torch.set_num_threads(1)
    paths = ser.list_images(folder)[:200]
    views = ser.Views(paths, ser.Config())
    first, second = moco_v3_pipeline(1.0, 0.0), moco_v3_pipeline(0.1, 0.2)

    def theirs() -> None:
        for path in paths:
            image = Image.open(path).convert("RGB")
            first(image), second(image)

    seconds = in_turn(5, ser=lambda: [views[0, index, False] for index in range(len(paths))], moco_v3=theirs)
    for name, values in seconds.items():
        print(f"  {name:20} {spread([len(paths) / s for s in values], 'images/s')}")
    ratio = statistics.median(b / a for a, b in zip(seconds["ser"], seconds["moco_v3"]))
    print(f"  ratio, pair by pair  {ratio:.2f}x")
    return {**seconds, "ratio": ratio}


def main() -> None:
    """Print the rows asked for, and write them as JSON."""
    parser = argparse.ArgumentParser("paper.overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["counts", "step", "loss", "jitter"],
                        choices=["counts", "step", "loss", "jitter", "loader"])
    parser.add_argument("--data", default="", help="folder of images for the loader row")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--loss-alone", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loss_alone is not None:
        return loss_alone(options.loss_alone)
    rows = options.rows + ["loader"] * (bool(options.data) and "loader" not in options.rows)
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}, torch {torch.__version__}, torchvision {torchvision.__version__}")
    found: dict[str, Any] = {"device": device, "torch": torch.__version__}
    for row in rows:
        function = {"counts": counts, "step": step, "loss": loss, "jitter": jitter}.get(row)
        print(f"\n{row}: " + (function or loader).__doc__.splitlines()[0])
        found[row] = function() if function else loader(options.data)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()

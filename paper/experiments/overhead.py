"""The paper's "Computation overhead" table (18.48 G -> 18.63 G, 1.008x), and what it costs on a clock.

    python -m paper.overhead                     all but the loader: a quarter of an hour on 2 CPU cores
    python -m paper.overhead --data FOLDER       the loader as well; it and the loop on the images of FOLDER
    python -m paper.overhead --rows step loss    only these; --json FILE writes what was printed

Every row compares sides of the same run in rounds: every side once, in random order, and in the next round in
reverse, so that a drift of the machine cancels. Times are medians and quartiles; ratios are taken round by
round. `wall` is the clock; `CPU` the time of this process on all cores, less disturbed by other programs.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence
from unittest import mock

import torch
import torchvision
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms

import ser

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
IMAGES, B2 = (256, (3, 64)) if CUDA else (16, (2, 4))   # of a step; b2 holds two or more

# ==== Measuring =============================================================================================
Times = dict[str, dict[str, list[float]]]   # side -> "wall" or "CPU" -> seconds of every round

def now() -> tuple[float, float]:
    """The clock and the CPU time of this process, once the device is done."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()

def in_turn(rounds: int, sides: dict[str, Callable[[int], Any]], warm: int = 1) -> Times:
    """Time every side once a round, after `warm` rounds that do not count; a side is called with the number
    of the round, negative while warming up."""
    times: Times = {name: {"wall": [], "CPU": []} for name in sides}
    order, draw = list(sides), random.Random(0)
    for turn in range(-warm, rounds):
        order = order[::-1] if turn % 2 else draw.sample(order, len(order))
        for name in order:
            since = now()
            sides[name](turn)
            for clock, before, after in zip(times[name], since, now()):
                times[name][clock] += [after - before] * (turn >= 0)
    return times

def spread(values: Sequence[float], unit: str = "s") -> str:
    """Median and quartiles, for a table."""
    values = [*values] * (2 if len(values) == 1 else 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.4g} {unit} ({low:.4g}-{high:.4g})"

def ratios(times: Times, name: str, base: str, clock: str = "wall") -> list[float]:
    """Time of `name` over that of `base`, round by round."""
    return [a / b for a, b in zip(times[name][clock], times[base][clock])]

def compared(times: Times, name: str, base: str) -> str:
    """`ratios` on the wall clock, and in CPU time unless that is spent waiting for a GPU."""
    clocks = ("wall",) if CUDA else ("wall", "CPU")
    return ", ".join(f"{clock} {spread(ratios(times, name, base, clock), 'x')}" for clock in clocks)

def peak() -> float:
    """MB: the most that CUDA's allocator held, or the most that was resident. Linux hands ru_maxrss down from
    the process that starts this one, which may have been larger: there, VmHWM is the own one, in kB."""
    if CUDA:
        return torch.cuda.max_memory_allocated() / 1e6
    if sys.platform == "linux":
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6   # bytes on a Mac

def fresh(*what: str, memory: bool = False) -> dict[str, float]:
    """What `--alone` prints in a process of its own. glibc keeps freed blocks below 32 MB, and then more is
    resident than in use; `memory`: it gives back those above 1 MB, which takes time."""
    changed = {"MALLOC_MMAP_THRESHOLD_": "1048576"} if memory else {}
    torch.cuda.empty_cache()   # the other process needs a GPU's memory too; without one, nothing happens
    run = subprocess.run([sys.executable, "-m", "paper.overhead", "--alone", *what], check=True, text=True,
                         stdout=subprocess.PIPE, env=os.environ | changed, cwd=Path(ser.__file__).parent)
    return json.loads(run.stdout)

# ==== Counts ================================================================================================
def forward_macs(base: ser.MoCoV3) -> float:
    """The paper's convention: forward passes of an image's two views, online and momentum; on meta."""
    x = torch.empty(1, 3, 224, 224, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        base.predictor(base.projector(base.encoder([x])[0].cls))
        base.momentum_projector(base.momentum_encoder([x])[0].cls)
    return counter.get_total_flops()   # 2 FLOPs a MAC, and 2 views

@functools.cache
def true_macs(cfg: ser.Config, b1: int, *grids: tuple[int, int]) -> float:
    """MACs of forward and backward on b1 images and, with a grid for each view, cfg's b2: of products and
    convolutions, as they run. No backward in the momentum branch and the frozen patch embedding; blocks of
    L_equiv that are computed again count again; attention's backward counts as its four products."""
    b2, patch = cfg.b2_images(1) if grids else 0, cfg.patch_size
    still = torch.zeros(b2, dtype=torch.int64)
    with torch.device("meta"):
        model = ser.build(cfg)
        views = [[torch.empty(b1, 3, v.size, v.size)] if b1 else [] for v in cfg.views]
        for view, (height, width) in zip(views, grids):
            view.append(torch.empty(b2, 3, height * patch, width * patch))
    batch = ser.Batch(views, [ser.Geometry(still > 0, still, grid) for grid in grids] or None)
    no_autocast = mock.patch("torch.autocast", lambda *_, **__: contextlib.nullcontext())   # meta has none
    with no_autocast, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch)["loss"].backward()
    return counter.get_total_flops() / 2

def step_macs(cfg: ser.Config, *grids: tuple[int, int]) -> float:
    """MACs per image of a step on one device. All add up over images but for InfoNCE's logits, which are a
    hundred-thousandth: an image of b1 is counted as half of two."""
    b1 = cfg.batch_size - (cfg.b2_images(1) if grids else 0)
    plain = true_macs(dataclasses.replace(cfg, ratio=0.0), 2) / 2
    return (b1 * plain + (true_macs(cfg, 0, *grids) if grids else 0)) / cfg.batch_size

def counts(_: argparse.Namespace) -> dict[str, Any]:
    """SER at r = .01 against MoCo-v3: trainable parameters, and MACs per image, of the forward passes (the
    paper's convention: 2 online, 2 momentum) and of forward + backward. 8 GPUs, each with 3 of 256 images in
    b2; by the paper's count every GPU computes the loss of all, in both directions."""
    rows: dict[str, dict[str, float]] = {}
    for name, cfg, grids in (("MoCo-v3", ser.Config(batch_size=256, ratio=0.0, cls_layer=0), []),
                             ("SER", ser.Config(batch_size=256, ratio=3 / 256), [(14, 14)] * 2)):
        with torch.device("meta"):
            model = ser.build(cfg)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        rows[name] = {"trainable": trainable, "macs": forward_macs(model.eval().base),
                      "true_macs": step_macs(cfg, *grids)}
    # The projector sees both views of own tokens; anchors meet both views of the keys that are gathered.
    own, gathered = 3 * 196, 24 * 196
    project, product = 2 * own * (384 * 512 + 512 * 512), 2 * gathered * 512
    row, twice = rows["SER"], project + 2 * gathered * product
    rows["SER, the paper's count"] = {"trainable": row["trainable"], "macs": row["macs"] + twice / 256}
    row["macs"] += (project + own * product) / 256   # what ser.py does: own anchors, one direction
    row["true_macs"] += 3 * own * 2 * (gathered - own) * 512 / 256   # keys of 7 more devices in 3 products
    for name, row in rows.items():
        print(f"  {name:22} {row['trainable']:>12,} parameters", *(
            f"  {what} {row[key] / 1e9:.3f} GMAC {row[key] / rows['MoCo-v3'][key]:.4f}x"
            for what, key in (("forward", "macs"), ("forward + backward", "true_macs")) if key in row))
    print("  the paper: 42.9 M and 43.4 M (75,648 learned position codes), 18.48 G and 18.63 G, 1.008x")
    return rows

# ==== The training step =====================================================================================
draw_geometry = ser.sample_geometry

def same_grid(batch: int, *how: Any, generator: torch.Generator, **more: Any) -> ser.Geometry:
    """ser.sample_geometry, but a step's grid comes before flips and turns: it is that of any size of b2."""
    grid = draw_geometry(0, *how, generator=generator, **more).grid
    return draw_geometry(batch, *how, generator=generator, **more)._replace(grid=grid)

def step_grids(cfg: ser.Config, turn: int) -> list[tuple[int, int]]:
    """The grids of b2 that step number `turn` draws, one for each view; none without b2."""
    return [same_grid(0, view.size // cfg.patch_size, elements=cfg.group,
                      generator=ser.rng(cfg.seed, "geometry", turn, v)).grid
            for v, view in enumerate(cfg.views) if cfg.b2_images(1)]

def make_step(cfg: ser.Config, how: str = "eager") -> Callable[[int], None]:
    """A function that runs training step number `turn` as ser.train does: views and their jitter, momentum
    update, forward, backward, AdamW. The images are random and on the device; bf16 autocast on a GPU."""
    model = ser.build(cfg).to(DEVICE)
    if how == "compiled":
        for block in (m for m in model.modules() if isinstance(m, ser.Block)):
            block.compile(dynamic=True)
    optimizer, generator = cfg.optimizer(model, fused=CUDA), ser.rng("overhead")
    images = [torch.randint(256, (cfg.batch_size, 3, v.size, v.size), dtype=torch.uint8,
                            generator=generator).to(DEVICE) for v in cfg.views]
    draws = torch.rand(cfg.batch_size, len(images), 13, generator=generator)

    def step(turn: int) -> None:
        model.base.update(0.5)
        with mock.patch.object(ser, "sample_geometry", same_grid):
            batch = ser.make_views(images, draws, cfg, turn, 0, 1)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            loss = model(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        cfg.before_step(optimizer, 1.0)
        optimizer.step()
    return step

def step_settings() -> dict[str, ser.Config]:
    """The sides of `step`, MoCo-v3 first: ViT-S/16 at 224."""
    return {"MoCo-v3": ser.Config(batch_size=IMAGES, ratio=0.0, cls_layer=0)} | {
        f"SER, {b2} of {IMAGES} in b2": ser.Config(batch_size=IMAGES, ratio=b2 / IMAGES) for b2 in B2}

def step_alone(name: str, how: str) -> dict[str, float]:
    """What --alone step runs: the peak of three steps of a side that has the process to itself."""
    function = make_step(step_settings()[name], how)
    for turn in range(3):
        function(turn)
    return {"peak_mb": peak()}

def step(options: argparse.Namespace) -> dict[str, Any]:
    """A full training step (views, jitter, forward, backward, AdamW, momentum) of SER against MoCo-v3, as a
    ratio: on the clock, and by the MACs of forward + backward, at the grids drawn and at the base grid of 196
    tokens. ViT-S/16 at 224: 16 images, 2 in b2 (the least there can be: r = .01 is none) or 4; on a GPU 256,
    3 (r = .01) or 64, bf16. Peak memory of a side alone in a process: of CUDA's allocator, or resident."""
    rows, settings = {}, step_settings()
    drawn = {name: [step_grids(cfg, turn) for turn in range(options.pairs)] for name, cfg in settings.items()}
    macs = {name: statistics.mean(step_macs(cfg, *grids) for grids in drawn[name])
            for name, cfg in settings.items()}
    for how, warm in (("eager", 1), ("compiled", 20))[:2 if CUDA else 1]:
        peaks = {name: fresh("step", name, how, memory=True)["peak_mb"] for name in settings}
        times = in_turn(options.pairs, {name: make_step(cfg, how) for name, cfg in settings.items()}, warm)
        for name, cfg in settings.items():
            rate = IMAGES / statistics.median(times[name]["wall"])
            row = rows[f"{name}, {how}"] = {
                "times": times[name], "images_per_s": rate, "peak_mb": peaks[name], "macs": macs[name]}
            speed = 2 * macs[name] * rate / 1e12
            share = f", {speed / 989:.1%} of an H100's or H200's 989" if CUDA else ""
            print(f"  {name:22} {how:8} {spread(times[name]['wall']):28} {rate:8.2f} images/s "
                  f"{peaks[name]:8,.0f} MB {speed:.3g} TFLOP/s{share}")
            if cfg.ratio:
                row["ratio"], row["macs_ratio"] = ratios(times, name, "MoCo-v3"), macs[name] / macs["MoCo-v3"]
                row["macs_ratio_196"] = step_macs(cfg, (14, 14), (14, 14)) / macs["MoCo-v3"]
                row["tokens"] = statistics.mean(h * w for grids in drawn[name] for h, w in grids)
                print(f"    {compared(times, name, 'MoCo-v3')}; by MACs {row['macs_ratio']:.4f}x at the "
                      f"{row['tokens']:.1f} tokens per b2 image drawn, {row['macs_ratio_196']:.4f}x at 196")
    return rows

# ==== Packing ===============================================================================================
def packed_batches(b1: int, b2: int, crops: int) -> dict[str, tuple[list[Tensor], list[list[Tensor]]]]:
    """Setting -> (the image batches of one call of the encoder, those of each of several calls)."""
    noise = functools.partial(torch.randn, device=DEVICE)
    pair = [noise(n, 3, height, width) for n, height, width in ((b1, 224, 224), (b2, 192, 240)) * 2]
    large, small = ([noise(crops, 3, size, size) for _ in range(n)] for size, n in ((224, 2), (96, 4)))
    return {f"2 views, {b1} images at 224 x 224 and {b2} at 192 x 240": (pair, [[x] for x in pair]),
            f"2 views at 224 and 4 at 96 px of {crops} images": (
                large + small, [[torch.cat(large)], [torch.cat(small)]])}

def encode(encoder: ser.ViT, calls: list[list[Tensor]]) -> Tensor:
    """The [CLS] of all images from a pass of the encoder per call, and the gradient of a function of them."""
    encoder.zero_grad()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
        cls = torch.cat([encoded.cls for call in calls for encoded in encoder(call)])
    cls.float().mean(0).square().sum().backward()
    return cls.detach()

def packed(options: argparse.Namespace) -> dict[str, Any]:
    """Forward + backward of the encoder, all batches packed into one pass, against a pass for each batch (b1
    and b2 of a step), or for each resolution (2 + 4 views), whose views are one tensor; ratio to that."""
    encoder, rows, b2 = ser.build(ser.Config()).base.encoder.to(DEVICE), {}, 3 if CUDA else 4
    for setting, (one, several) in packed_batches(IMAGES - b2, b2, IMAGES // 2).items():
        separate = f"{len(several)} passes"
        times = in_turn(options.pairs, {"packed": lambda _: encode(encoder, [one]),
                                        separate: lambda _: encode(encoder, several)})
        rows[setting] = {"times": times, "ratio": ratios(times, "packed", separate)}
        print(f"  {setting}\n    packed {spread(times['packed']['wall'])}, {separate} "
              f"{spread(times[separate]['wall'])}\n    {compared(times, 'packed', separate)}")
    return rows

# ==== The loss, the jitter, the loader, the loop ============================================================
def bare_products(anchors: Tensor, keys: Tensor, chunk: int) -> None:
    """The matrix products of patch_ntxent's forward and backward pass, and nothing else: the logits of each
    block, in the backward pass again if there are several, and the gradients of anchors and keys."""
    for part in anchors.split(chunk):
        logits = part @ keys.T
    for part in anchors.split(chunk):
        if chunk < len(anchors):
            logits = part @ keys.T
        logits @ keys, logits.T @ part

def loss_alone(side: str, images: int = 64, tokens: int = 196, width: int = 512) -> dict[str, float]:
    """What --alone loss runs: forward and backward on 64 images x 196 tokens x 512."""
    z, z_prime = (torch.randn(images, tokens, width, device=DEVICE, requires_grad=True) for _ in range(2))
    ser.patch_ntxent(z[:4], z_prime[:4]).backward()
    before, since = peak(), now()[0]
    if side == "bare":
        keys = torch.cat([z, z_prime]).detach().flatten(0, 1)
        bare_products(keys[:images * tokens], keys, max(1, 2 ** 23 // len(keys)))   # blocks of 32 MB
    else:
        ser.patch_ntxent(z, z_prime, chunk=images * tokens if side == "whole" else None).backward()
    return {"seconds": now()[0] - since, "extra_mb": peak() - before}

def loss(options: argparse.Namespace) -> dict[str, Any]:
    """patch_ntxent in blocks of 32 MB, computed again in the backward pass, against all logits at once, and
    against the bare matrix products of those blocks. Forward + backward, 64 x 196 x 512, fp32: time, and peak
    memory beyond the inputs, in fresh processes."""
    names = {"blocks": "blocks of 32 MB", "whole": "all logits at once", "bare": "bare products"}
    found: dict[str, dict[str, list]] = {side: {"seconds": [], "extra_mb": []} for side in names}
    for turn in range(min(3, options.pairs)):
        for side in list(names)[::-1 if turn % 2 else 1]:
            found[side]["seconds"].append(fresh("loss", side)["seconds"])
            if side != "bare":
                found[side]["extra_mb"].append(fresh("loss", side, memory=True)["extra_mb"])
    for side, runs in found.items():
        ratio = [a / b for a, b in zip(runs["seconds"], found["blocks"]["seconds"])]
        print(f"  {names[side]:20} {spread(runs['seconds']):28} {spread(ratio, 'x of the blocks'):36}",
              spread(runs["extra_mb"], "MB") if runs["extra_mb"] else "")
    return found

def jitter(options: argparse.Namespace) -> dict[str, Any]:
    """Photometric jitter of 64 images, a view at a time, against the full training step of MoCo-v3 that it is
    part of (16 images, 256 on a GPU): milliseconds per image, and the share of both views."""
    cfg, images = step_settings()["MoCo-v3"], torch.rand(64, 3, 224, 224, device=DEVICE)
    draws = torch.rand(64, len(cfg.views), 13, generator=ser.rng("overhead"))
    sides: dict[str, Callable[[int], Any]] = {
        f"view {v}": lambda _, u=draws[:, v], t=view: ser.photometric(images, u, t.blur, t.solarize)
        for v, view in enumerate(cfg.views)}
    times = in_turn(options.pairs, sides | {"step": make_step(cfg)})
    each = {name: [1e3 * s / (IMAGES if name == "step" else 64) for s in times[name]["wall"]]
            for name in times}
    for name, values in each.items():
        print(f"  {name:20} {spread(values, 'ms per image')}")
    share = [100 * sum(views) / whole for *views, whole in zip(*each.values())]
    print(f"  {'share of the step':20} {spread(share, '%')}")
    return {"ms_per_image": each, "share_percent": share}

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

def loader(options: argparse.Namespace) -> dict[str, Any]:
    """Images per second of one core: ser.Views (decoding and two crops; jitter is the device's work) against
    moco-v3's whole recipe of two views on the CPU, on at most 200 images of --data."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    paths = ser.list_images(options.data)[:200]
    views = ser.Views(paths, ser.Config())
    first, second = moco_v3_pipeline(1.0, 0.0), moco_v3_pipeline(0.1, 0.2)

    opened = lambda: (Image.open(path).convert("RGB") for path in paths)
    times = in_turn(options.pairs, {"ser": lambda turn: [views[turn, i, False] for i in range(len(paths))],
                                    "moco-v3": lambda _: [(first(x), second(x)) for x in opened()]})
    torch.set_num_threads(threads)
    for name in times:
        print(f"  {name:20} {spread([len(paths) / s for s in times[name]['wall']], 'images/s')}")
    ratio = ratios(times, "moco-v3", "ser")
    print(f"  {'ratio':20} {spread(ratio, 'x')}")
    return {**times, "ratio": ratio}

def loop(options: argparse.Namespace) -> dict[str, Any]:
    """ser.train itself, from files to AdamW, with a worker for each core: images/s, and the share of the time
    that it waits for images. ViT-S/16 at 224 on --data, or on drawn images as JPEG files; the second half of
    the steps, of which a GPU gets enough to outlast what the workers have loaded ahead."""
    steps = 200 if CUDA else 8
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or str(Path(folder, "images"))
        if not options.data:
            Path(data).mkdir()
            for i, image in enumerate(ser.draw_images(4 * IMAGES, 256, seed=0)[0]):
                torchvision.io.write_jpeg(image, f"{data}/{i:04}.jpg")
        per_epoch = len(ser.list_images(data)) // IMAGES
        cfg = ser.Config(data=data, out=folder, batch_size=IMAGES, ratio=B2[0] / IMAGES, warmup_epochs=0.0,
                         epochs=steps / per_epoch, workers=os.cpu_count() or 1, log_every=steps // 2,
                         save_every=steps)
        ser.train(cfg)
        last = json.loads(Path(folder, "log.jsonl").read_text().splitlines()[-1])
    print(f"  {IMAGES} images a step, {B2[0]} in b2, {cfg.workers} workers: "
          f"{last['images_per_s']:.2f} images/s, {last['waiting']:.2%} of the time waiting")
    return last

# ==== Command line ==========================================================================================
ROWS = {row.__name__: row for row in (counts, step, packed, loss, jitter, loop, loader)}

def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows asked for, and write them as JSON; returns the exit code."""
    parser = argparse.ArgumentParser("paper.overhead", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all that need no more flags")
    parser.add_argument("--data", default="", help="folder of images for the rows loader and loop")
    parser.add_argument("--pairs", type=int, default=20 if CUDA else 7,
                        help="rounds of a comparison; of the loss at most 3 [%(default)s]")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)   # see `fresh`
    options = parser.parse_args(argv)
    if options.alone:
        what, *how = options.alone
        print(json.dumps({"step": step_alone, "loss": loss_alone}[what](*how)))
        return 0
    try:   # before the minutes that the rows take
        rows = options.rows or [row for row in ROWS if row != "loader" or options.data]
        ser.require(options.pairs >= 1, f"--pairs {options.pairs} must be at least 1")
        ser.require(options.data or "loader" not in rows, "the row loader needs --data FOLDER, with images")
        ser.require(not options.data or len(ser.list_images(options.data)) >= IMAGES,
                    f"--data {options.data}: fewer images than a step takes, {IMAGES}")
        if options.json:
            open(options.json, "a").close()
    except (ser.UserError, OSError) as error:
        print(f"paper.overhead: {error}", file=sys.stderr)
        return 2
    device = torch.cuda.get_device_name() if CUDA else f"CPU, {torch.get_num_threads()} threads"
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "python": sys.version.split()[0]}
    print("{device}, torch {torch}, Python {python}".format(**found))
    for row in rows:
        print(f"\n{row}: {' '.join(ROWS[row].__doc__.split())}", flush=True)
        found[row] = ROWS[row](options)
        if options.json:   # after every row: what is measured is kept
            Path(options.json).write_text(json.dumps(found, indent=1))
    return 0

if __name__ == "__main__":
    sys.exit(main())

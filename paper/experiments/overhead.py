"""What SER costs: the paper's table "Computation overhead" (1.008x), and the same on a clock.

    python -m paper.experiments.overhead                    a quarter of an hour on 2 CPU cores
    python -m paper.experiments.overhead --rows step loss   only these
    python -m paper.experiments.overhead --data FOLDER      the loader as well, on images of FOLDER
    python -m paper.experiments.overhead --rows methods     AugSelf, EquiMod, STL and E-SSL

Rows: counts, step, packed, loss, jitter, loop; with --data, loader; methods only if asked for. For
each, the sides with their time, images/s, memory or MACs, and the ratio of one to the other.
--json FILE keeps all numbers.

Times are medians and quartiles over rounds of all sides in turn; ratios are taken within a round.
`wall` is the clock; `CPU` the time of this process on all cores, less disturbed by other programs.
"""
from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Sequence
from unittest import mock

import torch
import torchvision
from torch.utils.data import default_collate

import ser
from paper.experiments import macs, timing
from paper.experiments.pieces import loader, loss, loss_alone, packed
from paper.experiments.runs import multiplies_bf16
from paper.experiments.timing import compared, peak, ratios, spread
from ser import require

B2 = (3, 64) if timing.CUDA else (2, 4)     # of a step; r = .01 of 16 would be none
METHODS = ("augself", "equimod", "stl", "essl")

# ==== The training step ===========================================================================
draw_geometry = ser.sample_geometry     # kept: `views` puts same_grid in its place

def same_grid(batch: int, *how: Any, generator: torch.Generator, **more: Any) -> ser.Geometry:
    """ser.sample_geometry, but the grid is drawn first, so that no size of b2 changes it."""
    grid = draw_geometry(0, *how, generator=generator, **more).grid
    return draw_geometry(batch, *how, generator=generator, **more)._replace(grid=grid)

class Step:
    """Training step number `turn` as ser.train does it, from views on: jitter, momentum update,
    forward, backward, AdamW; bf16 on a GPU, or with --bf16. The images are random and decoded."""

    def __init__(self, cfg: Any, build: Callable[[Any], Any] = ser.build):
        self.cfg = cfg
        ser.setup()     # as in training
        self.model = ser.placed(build(cfg), cfg, timing.DEVICE, 1)
        self.optimizer = cfg.optimizer(self.model, fused=timing.CUDA)
        side = cfg.image_size
        images = torch.randint(256, (cfg.batch_size, 3, side, side), dtype=torch.uint8,
                               generator=ser.rng("overhead"))
        data = cfg.dataset(images)
        keys = ser.partition(list(range(len(images))), 0, cfg.b2_images(1), 0, 1)
        loaded = default_collate([data[key] for key in keys])[0]
        self.loaded = [(pixels.to(timing.DEVICE), *draws) for pixels, *draws in loaded]
        self.grids: dict[int, list[tuple[int, int]]] = {}     # of b2, step -> for each view

    def views(self, turn: int) -> ser.Batch:
        """The step's views, whose grids do not depend on the size of b2."""
        with mock.patch.object(ser, "sample_geometry", same_grid):
            batch = ser.make_views(self.loaded, self.cfg, turn)
        self.grids[turn] = [view.geometry.grid for view in batch.views if view.geometry]
        return batch

    def __call__(self, turn: int) -> None:
        batch = self.views(turn)
        self.model.base.update(0.5)
        with torch.autocast(timing.DEVICE.type, torch.bfloat16, timing.CUDA or self.cfg.bf16):
            loss = self.model(batch)["loss"]
        self.optimizer.zero_grad()
        loss.backward()
        self.cfg.before_step(self.optimizer, 1.0)
        self.optimizer.step()

def step_settings(how: str = "eager") -> dict[str, ser.Config]:
    """The sides of `step`, MoCo-v3 first: ViT-S/16 at 224. how: eager, compile or bf16."""
    base = ser.Config(batch_size=timing.IMAGES, compile=how == "compile", bf16=how == "bf16")
    found = {"MoCo-v3": dataclasses.replace(base, ratio=0.0, cls_layer=0)}
    for b2 in B2:
        name = f"SER, {b2} of {timing.IMAGES} in b2"
        found[name] = dataclasses.replace(base, ratio=b2 / timing.IMAGES)
    return found

def step_alone(name: str, how: str) -> dict[str, float]:
    """What --alone step runs: the peak of three steps of a side that has a process to itself."""
    step = Step(step_settings(how)[name])
    for turn in range(3):
        step(turn)
    return {"peak_mb": peak()}

def step(options: argparse.Namespace) -> dict[str, Any]:
    """A training step (views, jitter, forward, backward, AdamW, momentum) of SER against MoCo-v3,
    on the clock and by the MACs of forward + backward, at the grids drawn and at 196 tokens.
    ViT-S/16 at 224: 16 images, 2 (the least there can be) or 4 in b2; on a GPU 256, 3 (r = .01) or
    64, bf16. Memory is the peak of a side alone in a process: of CUDA's allocator, or resident,
    with what glibc keeps, as in training."""
    rows: dict[str, Any] = {}
    warm_up = {"eager": 1}
    if timing.CUDA:
        warm_up["compile"] = 20
    elif multiplies_bf16():
        warm_up["bf16"] = 1
    for how, warm in warm_up.items():
        settings = step_settings(how)
        peaks = {name: timing.fresh("step", name, how)["peak_mb"] for name in settings}
        steps = {name: Step(cfg) for name, cfg in settings.items()}
        times = timing.in_turn(options.pairs, steps, warm)
        for name, cfg in settings.items():
            drawn = [steps[name].grids.get(turn, []) for turn in range(options.pairs)]
            work = statistics.mean(macs.step_macs(cfg, *grids) for grids in drawn)
            rate = timing.IMAGES / statistics.median(times[name]["wall"])
            row = {"times": times[name], "images_per_s": rate, "peak_mb": peaks[name], "macs": work}
            rows[f"{name}, {how}"] = row
            speed = 2 * work * rate / 1e12
            share = f", {speed / 989:.1%} of an H100's or H200's 989" if timing.CUDA else ""
            print(f"  {name:22} {how:8} {spread(times[name]['wall']):28} {rate:8.2f} images/s "
                  f"{peaks[name]:8,.0f} MB {speed:.3g} TFLOP/s{share}")
            if cfg.ratio > 0:
                base = rows[f"MoCo-v3, {how}"]["macs"]
                row["ratio"] = ratios(times, name, "MoCo-v3")
                row["macs_ratio"] = work / base
                row["macs_ratio_196"] = macs.step_macs(cfg, (14, 14), (14, 14)) / base
                areas = [height * width for grids in drawn for height, width in grids]
                row["tokens"] = statistics.mean(areas)
                print(f"    {compared(times, name, 'MoCo-v3')}; by MACs "
                      f"{row['macs_ratio']:.4f}x at the {row['tokens']:.1f} tokens per b2 image "
                      f"drawn, {row['macs_ratio_196']:.4f}x at 196")
    return rows

# ==== The add-ons of paper/methods ================================================================
def method_step(name: str, images: int) -> Step:
    """The training step of an add-on on MoCo-v3, or of MoCo-v3 itself."""
    if name == "MoCo-v3":
        return Step(ser.Config(batch_size=images, ratio=0.0, cls_layer=0))
    module = importlib.import_module(f"paper.methods.{name}")
    return Step(module.Settings(batch_size=images), module.build)

def method_alone(name: str) -> dict[str, float]:
    """What --alone methods runs: the peak of three steps, as `step_alone`."""
    step = method_step(name, timing.IMAGES)
    for turn in range(3):
        step(turn)
    return {"peak_mb": peak()}

def methods(options: argparse.Namespace) -> dict[str, Any]:
    """A training step of AugSelf, EquiMod, STL and E-SSL, each on MoCo-v3 with the defaults of its
    script, against MoCo-v3 alone: time, trainable parameters, MACs of forward + backward per image
    (counted on two), peak memory alone in a process. ViT-S/16 at 224, 16 images, on a GPU 256."""
    names = ("MoCo-v3", *METHODS)
    peaks = {name: timing.fresh("methods", name)["peak_mb"] for name in names}
    steps = {name: method_step(name, timing.IMAGES) for name in names}
    times = timing.in_turn(options.pairs, steps)
    rows: dict[str, Any] = {}
    for name in names:
        two = method_step(name, 2)
        batch = two.views(0)
        work = macs.macs(lambda: two.model(batch)["loss"].backward()) / 2
        trained = sum(p.numel() for p in two.model.parameters() if p.requires_grad)
        rows[name] = {"times": times[name], "ratio": ratios(times, name, "MoCo-v3"),
                      "trainable": trained, "macs": work, "peak_mb": peaks[name]}
        print(f"  {name:10} {spread(times[name]['wall']):28} {compared(times, name, 'MoCo-v3')}; "
              f"{trained:,} parameters, {work / 1e9:.2f} GMAC "
              f"{work / rows['MoCo-v3']['macs']:.3f}x, {peaks[name]:,.0f} MB")
    return rows

# ==== Jitter, the loop, the counts ================================================================
def jitter(options: argparse.Namespace) -> dict[str, Any]:
    """Photometric jitter, a view at a time, against the whole training step of MoCo-v3 that it is
    part of (16 images, 256 on a GPU): milliseconds per image, and the share of both views."""
    step = Step(step_settings()["MoCo-v3"])
    sides: dict[str, Callable[[int], Any]] = {}
    for v, (pixels, _, drawn) in enumerate(step.loaded):
        x = pixels.float() / 255
        sides[f"view {v}"] = lambda turn, x=x, drawn=drawn: ser.photometric(x, drawn)
    times = timing.in_turn(options.pairs, sides | {"step": step})
    each = {name: [1e3 * s / timing.IMAGES for s in times[name]["wall"]] for name in times}
    for name, values in each.items():
        print(f"  {name:20} {spread(values, 'ms per image')}")
    share = [100 * sum(views) / whole for *views, whole in zip(*each.values())]
    print(f"  {'share of the step':20} {spread(share, '%')}")
    return {"ms_per_image": each, "share_percent": share}

def loop(options: argparse.Namespace) -> dict[str, Any]:
    """ser.train itself, from files to AdamW: images/s, and the share of the time that it waits for
    images. ViT-S/16 at 224 on --data, or on drawn images as JPEG files; the second half of the
    steps. A worker for each core, at most an eighth of the steps: each loads two ahead."""
    steps = 200 if timing.CUDA else 8
    workers = max(1, min(os.cpu_count() or 1, steps // 8))
    with tempfile.TemporaryDirectory() as folder:
        data = options.data
        if not data:
            data = str(Path(folder, "images"))
            Path(data).mkdir()
            for i, image in enumerate(ser.draw_images(4 * timing.IMAGES, 256, seed=0)[0]):
                torchvision.io.write_jpeg(image, f"{data}/{i:04}.jpg")
        per_epoch = len(ser.list_images(data)) // timing.IMAGES
        cfg = ser.Config(data=data, out=folder, batch_size=timing.IMAGES,
                         ratio=B2[0] / timing.IMAGES, warmup_epochs=0.0,
                         epochs=steps / per_epoch, workers=workers,
                         log_every=steps // 2, save_every=steps)
        ser.train(cfg)
        last = json.loads(Path(folder, "log.jsonl").read_text().splitlines()[-1])
    print(f"  {options.data or 'drawn JPEGs'}, {timing.IMAGES} images a step, {B2[0]} in b2, "
          f"{workers} workers: "
          f"{last['images_per_s']:.2f} images/s, {last['waiting']:.2%} of the time waiting")
    return last

def counts(options: argparse.Namespace) -> dict[str, Any]:
    """SER at r = .01 against MoCo-v3: trainable parameters; MACs per image of the forward passes
    (the paper's convention: 2 online, 2 momentum), and of both passes. 8 GPUs, each with 3 of 256
    images in b2; by the paper's count each GPU computes the loss of all, in both directions."""
    rows = macs.counted()
    for name, row in rows.items():
        line = f"  {name:22} {row['trainable']:>12,} parameters"
        for what, key in (("forward", "forward_macs"), ("forward + backward", "step_macs")):
            if key in row:
                ratio = row[key] / rows["MoCo-v3"][key]
                line += f"   {what} {row[key] / 1e9:.3f} GMAC {ratio:.4f}x"
        print(line)
    print("  the paper: 42.9 M and 43.4 M, 18.48 G and 18.63 G, 1.008x")
    return rows

# ==== Command line ================================================================================
# Their docstrings are printed above what they measure.
ROWS = {row.__name__: row for row in (counts, step, packed, loss, jitter, loop, loader, methods)}
ALONE = {"step": step_alone, "methods": method_alone, "loss": loss_alone}

def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked before the minutes that the rows take. Raises UserError."""
    parser = argparse.ArgumentParser("paper.experiments.overhead", description=__doc__,
                                     allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: require(False, f"{message}; see --help")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: see above")
    parser.add_argument("--data", default="", help="images for the rows loader and loop")
    parser.add_argument("--pairs", type=int, default=20 if timing.CUDA else 7,
                        help="rounds of a comparison; of the loss at most 3 [%(default)s]")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)     # see `fresh`
    options = parser.parse_args(argv)
    if not options.rows:
        left_out = ("methods",) if options.data else ("methods", "loader")
        options.rows = [row for row in ROWS if row not in left_out]
    require(options.pairs >= 1, f"--pairs {options.pairs} must be at least 1")
    require(options.data or "loader" not in options.rows, "the row loader needs --data FOLDER")
    if options.data:
        images = ser.list_images(options.data)
        require(len(images) >= timing.IMAGES,
                f"--data {options.data}: {len(images)} images are fewer than a step takes, "
                f"{timing.IMAGES}")
        for path in images[:200]:
            try:
                ser.read_image(path)
            except Exception as error:     # decoders raise what they like
                require(False, f"--data: cannot read {path} ({error}): remove it")
    if options.json:
        folder = Path(options.json).resolve().parent
        require(folder.is_dir() and not Path(options.json).is_dir(),
                f"--json {options.json}: name a file in a folder that is there")
    return options

def measure(argv: Sequence[str] | None) -> None:
    """Print the rows asked for, and write them as JSON."""
    options = parse(argv)
    if options.alone:
        what, *how = options.alone
        print(json.dumps(ALONE[what](*how)))
        return
    device = f"CPU, {torch.get_num_threads()} threads"
    if timing.CUDA:
        device = torch.cuda.get_device_name()
    found = {"device": device, "torch": torch.__version__, "python": sys.version.split()[0]}
    print("{device}, torch {torch}, Python {python}".format(**found))
    for row in options.rows:
        print(f"\n{row}: {' '.join(ROWS[row].__doc__.split())}", flush=True)
        found[row] = ROWS[row](options)
        if options.json:     # after every row: what is measured is kept
            Path(options.json).write_text(json.dumps(found, indent=1))

def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return ser.guard("paper.experiments.overhead", lambda: measure(argv))

if __name__ == "__main__":
    ser.leave(main())

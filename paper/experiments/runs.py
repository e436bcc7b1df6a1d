"""What the experiments share: training the runs of a comparison, measuring them, and the table.

Each run has a folder, in which `train` continues what is there, `finished` says whether it is done,
and `once` keeps what was measured, for the checkpoint that it was measured on.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Callable, Sequence

import torch
from tqdm import tqdm

import eval_linear
import ser
from eval_linear import Settings
from paper.experiments.curves import records, series
from ser import Common, Config, require

ELEMENTS = ("rot90", "hflip", "scale")
PLAIN = dict(ratio=0.0, cls_layer=0)     # MoCo-v3 itself

# Of runs on images, the blur of 224 pixels scaled to theirs. On a CPU an epoch of 9,469 takes 2 to
# 3 minutes of a core that has products of bfloat16; blur, rate and crop were chosen by the accuracy
# of MoCo-v3 alone (paper/README.md), which favours none but it. A GPU has time for ViT-S, at its
# grid of 14 x 14, and for ser.py's 100 epochs and rate; 16 of 256 images are in b2.
CPU = dict(image_size=64, patch_size=8, dim=128, depth=6, heads=4, cls_layer=2, equiv_layers=(2,),
           batch_size=128, ratio=0.125, moco_hidden=1024, base_lr=2e-3, crop_min=0.2, blur_max=0.57,
           epochs=20.0, warmup_epochs=1.0, workers=0, log_every=10)
GPU = dict(image_size=112, patch_size=8, batch_size=256, ratio=0.0625, blur_max=1.0)
# Beside the sizes of ser.py for drawn images. Choice: 6 blocks, not 4: with [CLS] after block 2, a
# linear head reads it after as many blocks, 4, as that of a plain ViT. In the paper both read 4.
DRAWN = dict(depth=6)
DRAWN_IMAGES = 4096       # of ser.train

# ==== Training ====================================================================================
def flag(name: str, value: Any) -> list[str]:
    """A setting as arguments of ser.py."""
    words = ["--" + name.replace("_", "-")]
    if isinstance(value, tuple):
        words += map(str, value)
    elif value is not True:
        words.append(str(value))
    return words

def flags(cfg: Common) -> list[str]:
    """The arguments of its program that give cfg: all that is not a default, and without --data
    all that a default for drawn images would replace."""
    replaced = () if cfg.data else cfg.drawn
    found: list[str] = []
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value != field.default or field.name in replaced:
            found += flag(field.name, value)
    return found

def multiplies_bf16() -> bool:
    """Whether this CPU has products of bfloat16, with which a step takes about half as long."""
    with contextlib.suppress(OSError):     # a file of Linux
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    return False

def base_settings(data: str | None, rest: Sequence[str], kind: type = Config) -> Any:
    """The settings that all runs share: of a size for the images (None: drawn ones) and this
    machine, but for what the arguments `rest` set. Raises UserError."""
    require(data != "", "--data is empty: an unset shell variable?")
    size = DRAWN
    if data:
        size = GPU if torch.cuda.is_available() else CPU
    if size is CPU and multiplies_bf16():
        size = CPU | dict(bf16=True)
    given = {argument.partition("=")[0] for argument in rest}
    words = flag("data", data) if data else []
    for name, value in size.items():
        if flag(name, value)[0] not in given:
            words += flag(name, value)
    base = ser.parse([*words, *rest], kind)
    require(base.ratio > 0, "--ratio 0 leaves SER no images: MoCo-v3 alone has it")
    require(base.init == "", f"--init {base.init}: the untrained encoder here has random weights")
    return base

def source_of(base: Config) -> Sequence[str] | torch.Tensor:
    """The images that the runs train on, by name; of drawn ones, whose number alone is read, as
    many empty rows. Raises UserError, also for data that cannot be evaluated."""
    if not base.data:
        return torch.empty(DRAWN_IMAGES, 0)
    eval_linear.collect(Settings(data=base.data, test=()), base.image_size)
    return ser.list_images(base.data)

def steps_of(cfg: Config, images: int) -> int:
    """How many steps a run takes. Raises UserError for settings that are wrong."""
    ser.check(cfg, 1)
    require(images >= cfg.batch_size,
            f"{images} images are less than --batch-size {cfg.batch_size}")
    return max(1, round(cfg.epochs * (images // cfg.batch_size)))

def finished(cfg: Common, total: int, images: str,
             build: Callable[[Any], Any] = ser.build) -> bool:
    """Whether the run in cfg.out has done `total` steps on the images of this digest. build: what
    makes its model. Raises UserError for settings that are wrong, or are not those of the run that
    is there. bf16 counts, though `train` could go on with another: it would differ between runs."""
    ser.check(cfg, 1)
    with torch.device("meta"):
        build(cfg)     # raises for layers that are not there
    path = Path(cfg.out, "last.pt")
    if not path.exists():
        return False
    state = ser.load_checkpoint(path)
    there = state["config"] | {"program": state["program"], "images": state["images"]}
    here = vars(cfg) | {"program": cfg.program, "images": images}
    differ = [f"{name} {there.get(name)} there, {value} here" for name, value in here.items()
              if name not in ser.FREE - {"bf16"} and there.get(name) != value]
    require(not differ, f"{path} is of another run ({'; '.join(differ)}): use a new --out")
    return state["step"] == total

def train(cfg: Common, build: Callable[[Any], Any] = ser.build) -> None:
    """Run, or continue, cfg, and print the command that trains the same weights. A stop signal lets
    it save, then raises SystemExit; the third signal ends at once."""
    tqdm.write(f"python {cfg.program} {shlex.join(flags(cfg))}", file=sys.stderr)
    stop: list[int] = []

    def remember(number: int, frame: Any) -> None:
        stop.append(number)
        if len(stop) == 3:
            os._exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, remember) for number in numbers]
    try:
        ser.train(cfg, build, stop)
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
    if stop:     # during the last step, after which training ends by itself
        raise SystemExit(128 + stop[0])

def minutes(cfg: Common) -> float:
    """How long the steps of a run took: a record has the rate since the one before."""
    total = 0.0
    last = 0
    for step, rate in series(records(cfg.out), "images_per_s").items():
        total += (step - last) * cfg.batch_size / rate / 60
        last = step
    return total

def resumable(work: Callable[[], None]) -> None:
    """Do the work; a stop becomes one line and SystemExit, 128 + the number of its signal."""
    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)     # while measuring: `train` sets its own
    try:
        work()
    except (KeyboardInterrupt, SystemExit) as stopped:
        code = getattr(stopped, "code", 128 + signal.SIGINT)
        if code:     # --help leaves with 0
            tqdm.write("stopped; the same command continues", file=sys.stderr)
        raise SystemExit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)

# ==== Evaluation ==================================================================================
def once(path: Path, settings: dict[str, Any],
         measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the JSON file `path` holds if it is of the checkpoint beside it and of these settings;
    else measure(), which is written there with both."""
    digest = hashlib.sha256(path.with_name("last.pt").read_bytes()).hexdigest()
    identity = {"of": digest, "asked": settings}
    identity = json.loads(json.dumps(identity))     # as JSON gives it back, tuples as lists
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        if all(found[key] == value for key, value in identity.items()):
            return found
    tqdm.write(f"measuring {path}", file=sys.stderr)
    path.unlink(missing_ok=True)     # eval_linear would not overwrite another checkpoint's result
    found = measure() | identity
    eval_linear.write_json(path, found)
    return found

def fitted(how: Settings) -> dict[str, Any]:
    """What eval_linear finds; says where the best rate lies at an end of the sweep: beyond it the
    accuracy may be higher, and might be so for one run of a comparison."""
    result = eval_linear.evaluate(how)
    best = result["linear"]["best"]["rate"]
    tried = [row["rate"] for row in result["linear"]["rates"]]
    if best in (min(tried), max(tried)):
        tqdm.write(f"{how.out}: the best rate, {best:g}, is at an end of the sweep",
                   file=sys.stderr)
    return result

def evaluate(cfg: Common, random_init: bool = False,
             heads: Sequence[str] = ("linear", "MLP")) -> dict[str, float]:
    """Heads, 20-NN and equivariance of a finished run, by name, or of the encoder that it began
    with."""
    column = "untrained" if random_init else "trained"
    found = {}
    for head in heads:
        out = Path(cfg.out, f"{head}-{column}.json".lower())
        how = Settings(data=cfg.data, checkpoint=str(Path(cfg.out, "last.pt")), test=(), cache=True,
                       mlp=head == "MLP", equivariance=head == "linear", select_split=0.1,
                       workers=cfg.workers, random_init=random_init, out=str(out))
        if not cfg.data:     # few images: in batches of 1024 an epoch would be a single step
            how = dataclasses.replace(how, batch_size=eval_linear.Settings.drawn["batch_size"])
        asked = {name: value for name, value in vars(how).items()
                 if name not in ("checkpoint", "workers", "out")}
        result = once(out, asked, lambda: fitted(how))
        found[f"{head}, top-1 %"] = result["linear"]["best"]["val"]["top1"]
        if head == "linear":
            found["20-NN, top-1 %"] = result["knn"]["val"]["top1"]
            for row in result["equivariance"]["rows"]:
                for measure in ("retrieval", "score"):
                    name = f"{row['element']}: {measure}, block {row['block']}"
                    found[name] = row[column][measure]
    return found

Measured = dict[str, list[dict[str, float]]]     # name of a run -> for each seed, values by name

def complete(configs: dict[str, list[Any]], total: int, images: str,
             measure: Callable[[Any], dict[str, float]],
             builder: Callable[[str], Callable] = lambda name: ser.build) -> Measured:
    """Train what has not done its `total` steps on the images of this digest, and measure all; for
    each name and seed what measure(settings) returns. builder: name of a run -> what makes its
    model."""
    missing = set()
    for name, cfgs in configs.items():
        for cfg in cfgs:     # a mistake shows before any training
            if not finished(cfg, total, images, builder(name)):
                missing.add(cfg.out)
    found: Measured = {name: [] for name in configs}
    # One seed after the other: what is cut short has all runs of its first seeds.
    for of_a_seed in zip(*configs.values()):
        for name, cfg in zip(configs, of_a_seed):
            if cfg.out in missing:
                train(cfg, builder(name))
            found[name].append(measure(cfg))
    return found

def retrieval_chance(cfg: Common) -> float:
    """1 / tokens of the 32 images among which eval_linear looks for a token's counterpart (of a
    scaled image, about: its grid has other sides)."""
    return (cfg.patch_size / cfg.image_size) ** 2 / 32

def budget(configs: dict[str, list[Any]], seeds: Sequence[int], images: int,
           total: int) -> tuple[dict[str, Any], str]:
    """What all runs together were given and took: for the JSON file, and as a sentence."""
    spent = sum(minutes(cfg) for cfgs in configs.values() for cfg in cfgs)
    batch_size = next(iter(configs.values()))[0].batch_size
    return ({"seeds": seeds, "images": images, "steps": total, "minutes": spent},
            f"Seeds {' '.join(map(str, seeds))}; {images} images, {total} steps of {batch_size}, "
            f"{spent:.0f} minutes of training in all")

# ==== Report ======================================================================================
# Title of a row -> column -> what over_seeds returns; None where there is nothing.
Rows = dict[str, dict[str, dict[str, Any] | None]]

def over_seeds(values: list[float]) -> dict[str, Any]:
    """The values of the seeds, their mean, and std (n - 1; None for one seed)."""
    std = stdev(values) if len(values) > 1 else None
    return {"values": values, "mean": mean(values), "std": std}

def cell(value: dict[str, Any] | None, percent: bool) -> str:
    """mean ± std, with two digits after the point for a percentage, else three; "-" for None."""
    if value is None:
        return "-"
    digits = 2 if percent else 3
    text = f"{value['mean']:.{digits}f}"
    if value["std"] is not None:
        text += f" ± {value['std']:.{digits}f}"
    return text

def markdown(rows: Rows) -> str:
    """Aligned for the screen, and valid Markdown. A row or column with % in its title is in
    percent."""
    lines = [["", *next(iter(rows.values()))]]
    for name, columns in rows.items():
        cells = [cell(value, "%" in name or "%" in column) for column, value in columns.items()]
        lines.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)

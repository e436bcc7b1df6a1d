"""Linear probe on 3DIEBench: the last column of the paper's Table 1.

    torchrun --nproc_per_node=8 -m paper.evaluations.bench3die --data 3DIEBench \\
        --split val_images.npy --checkpoint runs/ser/last.pt
    python -m paper.evaluations.bench3die --data 3DIEBench --split val_images.npy --views 5

Data (Garrido et al. 2023, 17 GB): DATA/SYNSET/OBJECT/image_0.jpg ... image_49.jpg, 50 renderings of
each of 52,472 objects of 55 classes. Which objects are validated on is not in the download: it is
val_images.npy of the authors' repository, a list of "/SYNSET/OBJECT/"; all others are trained on.
The result goes to bench3die.json beside the checkpoint. An interrupted run continues.

Paper: "linear probing on its 2D renderings"; the parameters of the renderings are not used. It
leaves open the split, the views, the crops and the training. Here the protocol is that of ImageNet
(eval_linear.py, with its flags), and four choices are tagged below. Classes are not balanced: a
constant guess of the most frequent one is right on 16% of the validation objects.
"""
from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

import eval_linear
import ser
from eval_linear import Crops, Split, hold_out
from ser import require, rng, setting

PAPER = {     # top-1 and top-5, percent (Table 1)
    "MoCo-v3": (68.43, 91.96),
    "MoCo-v3 + AugSelf": (64.97, 90.73),
    "MoCo-v3 + SER": (70.17, 92.78),
    "MoCo-v3 + EquiMod (3 views)": (67.97, 91.97),
    "MoCo-v3 + SER (2+4 views)": (70.91, 93.15),
}
VIEWS = 50     # renderings of an object
LIST = "https://raw.githubusercontent.com/facebookresearch/SIE/main/data/val_images.npy"

@dataclasses.dataclass(frozen=True)
class Settings(eval_linear.Settings):
    """What 3DIEBench needs beside the settings of the linear probe."""
    data: str = setting("", 0, 0, "folder 3DIEBench, with SYNSET/OBJECT/image_0.jpg ...")
    split: str = setting("val_images.npy", 0, 0, "the authors' list of validation objects")
    # Choice: all renderings of the validation objects, so that the result is no draw. The authors'
    # code draws one of each object anew whenever it validates.
    views: int = setting(VIEWS, 1, VIEWS, "renderings of each validation object, from the first")
    drawn: ClassVar[dict[str, Any]] = {}     # there are no drawn objects
    program: ClassVar[str] = "-m paper.evaluations.bench3die"

    @property
    def result(self) -> Path:
        """Where the result goes."""
        path = super().result
        name = "bench3die" if self.views == VIEWS else f"bench3die-{self.views}-views"
        return path if self.out else path.with_name(path.name.replace("eval", name, 1))

def validation_objects(path: str) -> set[str]:
    """The objects "SYNSET/OBJECT" of the authors' list. Raises UserError."""
    require(os.path.isfile(path), f"--split {path}: no such file; download {LIST}")
    try:
        names = numpy.load(path)     # unicode: no pickle
        require(names.dtype.kind == "U", f"it holds {names.dtype}")
    except (ValueError, EOFError) as error:
        require(False, f"--split {path} is no list of names ({error}); download {LIST}")
    return {name.strip("/") for name in names.tolist()}

def collect(cfg: Settings, size: int) -> tuple[list[str], dict[str, Split]]:
    """The synsets, sorted, and the splits. An item of train is the folder of an object, an item of
    val a rendering. size: not used. Raises UserError where list and folders do not agree."""
    require(os.path.isdir(cfg.data), f"--data {cfg.data}: no such folder; give that of 3DIEBench")
    require(not any(cfg.test), "--test: 3DIEBench has no other test sets")
    classes = sorted(entry.name for entry in os.scandir(cfg.data)
                     if entry.is_dir() and not entry.name.startswith("."))
    to_find = validation_objects(cfg.split)     # crossed off as their folders are found
    sources: dict[str, list[str]] = {"train": [], "val": []}
    labels: dict[str, list[int]] = {"train": [], "val": []}
    for label, synset in enumerate(classes):
        objects = sorted(e.name for e in os.scandir(os.path.join(cfg.data, synset)) if e.is_dir())
        for name in objects:
            folder = os.path.join(cfg.data, synset, name)
            if f"{synset}/{name}" in to_find:
                to_find.remove(f"{synset}/{name}")
                sources["val"] += [os.path.join(folder, f"image_{v}.jpg") for v in range(cfg.views)]
                labels["val"] += [label] * cfg.views
            else:
                sources["train"].append(folder)
                labels["train"].append(label)
    require(not to_find, f"--split {cfg.split}: {len(to_find)} of its objects are not in "
            f"--data {cfg.data}, as {min(to_find, default='')}")
    for name, found in labels.items():
        require(set(found) == set(range(len(classes))) and len(classes) > 1,
                f"--data {cfg.data}: {len(set(found))} of {len(classes)} synsets have objects to "
                f"{'learn from' if name == 'train' else 'validate on'}: is it whole?")
    among = list(range(len(classes)))
    # Choice: images are whole, without a crop, as the authors' (who keep their 256 pixels): the
    # object is centred.
    # Choice: normalised as ImageNet, which the encoder was trained on; the authors as 3DIEBench.
    splits = {name: Split(sources[name], torch.tensor(labels[name]), among, ready=True)
              for name in sources}
    guess = splits["val"].labels.bincount().max() / len(labels["val"])
    note = f"a constant guess is right on {100 * guess:.2f}%; {cfg.views} renderings of each object"
    splits["val"] = splits["val"]._replace(note=note)
    if cfg.select_split:
        splits |= hold_out(splits["train"], cfg)     # train becomes smaller, held-out is new
    return classes, splits

class Views(Crops):
    """Crops whose items may be folders of objects. In training, (seed, epoch, object) draws which
    of the renderings is seen; elsewhere (held-out, --knn, --cache) it is the first."""

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[Tensor, int]:
        epoch, index = key
        item = self.split.source[index]
        if not os.path.isdir(item):
            return super().__getitem__(key)
        view = 0
        if epoch is not None:
            # Choice: one of the 50 in an epoch, as the authors do; no flip.
            draw = torch.randint(VIEWS, (), generator=rng(self.seed, "view", epoch, index))
            view = draw.item()
        image = os.path.join(item, f"image_{view}.jpg")
        one = self.split._replace(source=[image], labels=self.split.labels[[index]])
        return Crops(one, self.size, self.seed)[epoch, 0]     # ready: whole, whatever the epoch

def table(result: dict[str, Any]) -> str:
    """The paper's rows below those of the linear probe, for the screen."""
    rows = {"the paper's, val": ["top-1 / top-5, %"]}
    for name, (top1, top5) in PAPER.items():
        rows[name] = [f"{top1:.2f} / {top5:.2f}"]
    return "\n".join([f"{result['checkpoint']}, {result['encoder']}", eval_linear.table(result),
                      *eval_linear.aligned(rows)])

def main(argv: list[str] | None = None) -> int:
    """Evaluate and print; returns the exit code."""
    def work() -> None:
        cfg = ser.parse(argv, Settings)
        require(cfg.data != "", "--data: the folder of 3DIEBench is needed")
        result = eval_linear.evaluate(cfg, collect=collect, crops=Views)
        if ser.ranks_and_rank()[1] == 0:
            print(f"{table(result)}\n  {result['minutes']:.1f} minutes, written to {cfg.result}")

    return ser.guard(Settings.program, work)

if __name__ == "__main__":
    ser.leave(main())

"""ImageNet-C and ImageNet-P: the paper's tables of robustness, its rows below ours.

    python eval_linear.py --data /imagenet --checkpoint runs/ser/last.pt     first: writes the head
    python -m paper.evaluations.robustness --checkpoint runs/ser/last.pt --c /imagenet-c
    python -m paper.evaluations.robustness --checkpoint runs/ser/last.pt --p /imagenet-p
    torchrun --nproc_per_node=8 -m paper.evaluations.robustness --c ...      ranks share the work
    python -m paper.evaluations.robustness --data /imagenette --make /imagenette-c     makes a C

The encoder and the head of the linear probe stay as they are. C and P are altered images of val:
`eval_linear.py --select-split 0.1` gives a head whose rate was not chosen on val. The paper's means
over the columns, top-1 and top-5: on C MoCo-v3 39.47 and 61.76, SER 40.58 and 63.53; on P 63.91 and
84.67, 65.13 and 85.69. Data, as downloaded; archives side by side, or in folders of their own
(blur/, noise/, ...):

    C    CORRUPTION/SEVERITY/CLASS/*.JPEG    15 corruptions x 5 severities; the four extra if there
    P    PERTURBATION/CLASS/*.mp4            ten can be downloaded; the paper has four more

The paper is silent about the severities (here: the mean over all five), the frames (all) and the
difficulty of P. Beside its accuracies stand mCE, with AlexNet's published errors, and P's flip
probability and top-5 distance, not divided by AlexNet's, which we found in no source. Each set is
written to robustness.json beside the checkpoint when it is done, and the same command goes on with
the others; a set is not scored again while its folder has the same path and as many files.
"""
from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, Sequence

import torch

import eval_linear
import ser
from paper.evaluations.corruptions import (CORRUPTIONS, EXTRA, SEVERITIES, make,
                                           mean_corruption_error, score_images)
from paper.evaluations.output import check_out
from paper.evaluations.perturbations import PERTURBATIONS, TEN, score_videos
from ser import INF, require, setting

# The paper's rows, without the last column, which is the mean of the others. Each name is one word:
# that of a method alone is the method on MoCo-v3; "2+4" are views.
PAPER = {
    "ImageNet-C, top-1 %": """
          Gauss Shot  Impul Defoc Glass Motio Zoom  Snow  Frost Fog   Brigh Contr Elast Pixel JPEG
MoCo-v3   39.18 37.81 36.09 33.51 13.85 31.49 25.86 30.61 30.03 35.02 62.81 52.00 54.65 55.78 53.37
AugSelf   34.91 31.81 31.44 35.06 17.12 34.28 27.67 31.99 28.50 35.01 61.99 50.64 55.48 54.88 53.17
STL       17.78 16.26 14.65 29.51 15.13 27.33 25.77 29.50 27.60 34.40 61.81 48.84 54.31 46.40 50.63
SER       39.42 38.30 36.85 36.23 15.91 34.90 27.35 30.71 30.12 36.04 63.60 52.81 55.85 56.63 54.03
EquiMod   34.33 32.59 31.95 31.81 15.37 31.76 27.38 29.08 25.73 31.38 61.94 47.41 55.07 53.58 52.40
E-SSL     43.80 42.59 40.80 38.44 16.40 36.73 28.20 34.22 32.24 37.93 65.50 55.89 56.12 55.80 55.21
SER,2+4   39.88 39.27 37.18 36.21 19.58 34.16 31.90 36.07 35.87 40.74 66.76 54.90 57.87 56.42 56.79
""",
    "ImageNet-C, top-5 %": """
          Gauss Shot  Impul Defoc Glass Motio Zoom  Snow  Frost Fog   Brigh Contr Elast Pixel JPEG
MoCo-v3   63.30 61.68 59.76 56.22 28.46 53.52 45.98 52.52 50.54 58.64 84.47 76.74 77.38 79.44 77.76
AugSelf   58.96 55.21 54.61 59.06 34.52 57.55 48.71 55.05 49.48 59.30 84.39 76.26 78.25 79.15 78.02
STL       37.10 34.36 32.04 52.71 31.08 48.45 46.35 50.96 47.60 59.05 84.07 74.74 76.96 71.37 75.66
SER       64.16 62.70 61.21 59.92 32.28 58.17 48.22 53.23 51.26 60.49 85.68 77.94 78.55 80.52 78.58
EquiMod   58.63 56.28 55.34 55.28 31.48 54.45 48.20 51.11 45.88 55.49 84.63 73.66 78.51 78.46 77.62
E-SSL     68.70 67.42 65.64 63.00 33.09 60.35 49.83 57.64 53.72 62.83 86.80 80.33 79.05 80.32 80.05
SER,2+4   64.00 62.89 60.60 60.01 37.02 56.65 53.40 58.81 57.43 65.06 87.36 79.14 79.60 79.82 80.42
""",
    "ImageNet-P, top-1 %": """
          Gau-N Shot  Speck Motio Zoom  Gau-B Snow  Spatt Brigh Trans Rotat Tilt  Scale Shear
MoCo-v3   67.85 67.85 67.97 57.31 68.30 68.28 56.57 66.57 63.43 68.05 64.55 67.58 45.18 65.32
AugSelf   67.44 67.47 67.47 57.51 67.76 67.81 56.77 66.15 60.77 67.39 64.41 67.10 47.15 64.96
STL       66.19 66.14 66.15 54.97 66.29 66.32 54.38 64.71 61.16 66.00 62.07 65.86 42.53 63.17
SER       68.97 69.01 69.00 59.09 69.46 69.35 58.02 67.86 64.58 69.04 65.76 68.60 46.78 66.34
EquiMod   68.60 68.70 68.78 57.08 69.17 69.13 56.97 67.51 60.88 68.75 65.18 68.27 47.04 66.17
E-SSL     70.26 70.19 70.22 61.49 70.65 70.54 60.60 68.87 65.82 70.27 66.92 69.82 48.86 67.59
SER,2+4   71.68 71.65 71.67 60.36 71.87 71.87 61.92 70.47 67.18 71.62 68.62 71.34 52.74 68.99
DINO      66.69 66.67 66.70 52.74 67.02 66.94 55.83 65.60 61.27 66.70 62.73 66.49 42.96 63.51
DINO+SER  67.39 67.31 67.41 54.41 67.69 67.66 56.19 66.06 62.13 67.22 63.33 67.02 42.76 64.31
Barlow    60.09 60.08 60.12 42.25 60.53 60.53 46.37 58.84 52.92 60.22 55.47 59.37 33.15 56.79
Bar.+SER  63.85 63.93 63.91 49.18 64.29 64.19 50.09 62.34 57.93 63.89 59.63 63.38 37.29 60.56
""",
    "ImageNet-P, top-5 %": """
          Gau-N Shot  Speck Motio Zoom  Gau-B Snow  Spatt Brigh Trans Rotat Tilt  Scale Shear
MoCo-v3   87.75 87.81 87.82 80.34 87.91 87.94 79.22 86.75 84.54 87.72 85.16 87.48 69.08 85.84
AugSelf   87.58 87.50 87.59 80.81 87.73 87.67 79.70 86.50 83.07 87.66 85.25 87.31 71.44 85.83
STL       86.67 86.65 86.66 78.33 86.82 86.77 77.62 85.59 83.21 86.50 83.81 86.50 66.31 84.75
SER       88.62 88.59 88.60 82.01 88.66 88.68 80.56 87.58 85.59 88.52 86.01 88.17 71.25 86.78
EquiMod   88.78 88.79 88.75 80.86 88.93 88.98 80.16 87.95 83.41 88.68 86.38 88.51 71.89 87.13
E-SSL     89.60 89.58 89.64 83.94 89.78 89.72 82.95 88.80 86.88 89.47 87.25 89.31 73.39 87.79
SER,2+4   89.96 89.93 90.00 82.50 90.10 90.08 83.23 89.15 87.30 89.93 87.80 89.68 75.80 88.29
"""}

@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of an evaluation."""
    checkpoint: str = setting("runs/ser/last.pt", 0, 0, "last.pt of a run")
    random_init: bool = setting(False, 0, 1, "the untrained encoder of the run, and its own head")
    head: str = setting("", 0, 0, "eval_linear.py's head; none: the one beside the checkpoint")
    c: str = setting("", 0, 0, "folder of ImageNet-C, or of what --make made")
    p: str = setting("", 0, 0, "folder of ImageNet-P")
    # Choice: the paper names no difficulty; at 1, P's first, a frame is compared with the next.
    # P's noise videos for other difficulties are not read: there the noise columns stay empty.
    difficulty: int = setting(1, 1, 10, "P compares frames so many apart")
    make: str = setting("", 0, 0, "write a C of the val images of --data into this folder, and end")
    data: str = setting("", 0, 0, "for --make: a folder with val/CLASS/..., or with CLASS/...")
    make_images: int = setting(0, 0, INF, "for --make: images of a class; 0: all")
    batch_size: int = setting(1024, 1, INF, "images per pass of the encoder, over all ranks")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of what --make makes; images that are there stay")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the main process loads")
    out: str = setting("", 0, 0, "a .json; none: robustness.json beside the checkpoint")
    drawn: ClassVar[dict[str, Any]] = {}
    program: ClassVar[str] = "-m paper.evaluations.robustness"

    @property
    def probe(self) -> eval_linear.Settings:
        """The settings of the linear probe, which name the encoder and find the head."""
        return eval_linear.Settings(checkpoint=self.checkpoint, random_init=self.random_init)

    @property
    def result(self) -> Path:
        """Where the result goes."""
        name = "robustness-random-init" if self.random_init else "robustness"
        if self.difficulty > 1:
            name += f"-difficulty-{self.difficulty}"
        beside = Path(self.checkpoint).with_name(f"{name}.json")
        return Path(self.out) if self.out else beside

def find(root: str, name: str) -> Path | None:
    """The folder of that name in root, or in one of root's folders; None if there is none."""
    for place in (Path(root, name), *sorted(Path(root).glob(f"*/{name}"))):
        if place.is_dir():
            return place
    return None

def find_sets(cfg: Settings) -> dict[str, Path]:
    """The sets that are there, "c/CORRUPTION/SEVERITY" and "p/PERTURBATION", with their folders.
    Raises UserError for a flag that leads to none."""
    names = [f"c/{name}/{severity}" for name in (*CORRUPTIONS, *EXTRA) for severity in SEVERITIES]
    for name in PERTURBATIONS:
        if cfg.difficulty == 1 or "noise" not in name:
            names.append(f"p/{name}")
    found = {}
    for name in names:
        kind, _, inside = name.partition("/")
        root = cfg.c if kind == "c" else cfg.p
        place = find(root, inside) if root else None
        if place:
            found[name] = place
    for kind, root in (("c", cfg.c), ("p", cfg.p)):
        one = "gaussian_noise/1" if kind == "c" else "zoom_blur"
        require(root == "" or any(name.startswith(kind) for name in found),
                f"--{kind} {root}: none of its sets is there, in it or in its folders, as {one}")
    return found

def finished_sets(cfg: Settings, identity: dict[str, Any],
                  there: dict[str, Path]) -> dict[str, Any]:
    """The sets in the result, if there is one. there: what find_sets found. Raises UserError for
    the result of another encoder or head, and for one with sets of another C or P: a mean over both
    would be of neither."""
    path = cfg.result
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    way_out = "remove it or choose another --out"
    for name, value in identity.items():
        what = {"sha256": "checkpoint"}.get(name, name)
        require(before.get(name) == value, f"--out {path} is of another {what}: {way_out}")
    for name, found in before["sets"].items():
        root = cfg.c if name.startswith("c/") else cfg.p
        inside = Path(found["folder"]).is_relative_to(Path(root).resolve())
        require(not root or inside or name in there,
                f"--out {path} has sets of {found['folder']}, not of {root}: {way_out}")
    return before["sets"]

def scored(found: dict[str, Any], folder: Path) -> bool:
    """Whether what was found of a set is of this folder and of all the files in it."""
    if found.get("folder") != str(folder.resolve()):
        return False
    files = sum(len(names) for _, _, names in os.walk(folder))
    return files == found["files"]

def head_digest(head: eval_linear.Head) -> str:
    """What tells a head from others."""
    values = torch.cat([head.weight.flatten(), head.bias])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]

def evaluate(cfg: Settings) -> dict[str, Any]:
    """Score the sets that are there and not yet in the result; returns what rank 0 writes. Raises
    UserError, on all ranks."""
    ser.check_ranges(cfg)
    require(cfg.c + cfg.p != "", "of which sets? give --c or --p; --make makes a C of images")
    require(cfg.p == "" or importlib.util.find_spec("av") is not None,
            "--p needs av (PyAV): pip install -r paper/requirements.txt")
    device, rank, _ = ser.setup()
    encoder, step, digest = eval_linear.frozen_encoder(cfg.probe)
    encoder = encoder.to(device)
    check_out(cfg.result, ".json", cfg.program)
    head = eval_linear.load_head(cfg.head or cfg.probe.beside("head"), digest)
    identity = {"sha256": digest, "head": head_digest(head), "difficulty": cfg.difficulty}
    head = head._replace(weight=head.weight.to(device), bias=head.bias.to(device))
    folders = find_sets(cfg)
    done = finished_sets(cfg, identity, folders)
    result = {"program": cfg.program, "checkpoint": cfg.checkpoint, "step": step, **identity,
              "classes": len(head.classes), "sets": done}
    for name, folder in folders.items():
        if scored(done.get(name, {}), folder):
            continue
        score = score_images if name.startswith("c/") else score_videos
        files = sum(len(names) for _, _, names in os.walk(folder))
        done[name] = {"folder": str(folder.resolve()), "files": files,
                      **score(encoder, head, folder, cfg)}
        if rank == 0:
            eval_linear.write_json(cfg.result, result)
    return result

def over_severities(sets: dict[str, Any], name: str, measure: str) -> float | None:
    """The mean of a measure of a corruption over its severities; None where one is missing."""
    # Choice: the paper is silent about severities; C is usually scored by the mean over all five.
    found = [sets.get(f"c/{name}/{severity}") for severity in SEVERITIES]
    return mean(one[measure] for one in found) if all(found) else None

def row(sets: dict[str, Any], kind: str, measure: str) -> list[float | None]:
    """A measure of every column of the paper's table of C or P; None where a set is missing."""
    if kind == "c":
        return [over_severities(sets, name, measure) for name in CORRUPTIONS]
    found = [sets.get(f"p/{name}") for name in PERTURBATIONS]
    return [one[measure] if one else None for one in found]

def cells(values: Sequence[float | None], kind: str) -> str:
    """The values as text, then their means: of P that over the ten which can be downloaded, then
    that over all. "-" for what is missing."""
    shown = list(values)
    if kind == "p":
        ten = [value for name, value in zip(PERTURBATIONS, values) if name in TEN]
        shown.append(None if None in ten else mean(ten))
    shown.append(None if None in values else mean(values))
    return "".join(f"{'-':>6}" if value is None else f"{value:6.2f}" for value in shown)

def table(result: dict[str, Any]) -> str:
    """The result for the screen, in the paper's order of columns, its rows below ours."""
    sets = result["sets"]
    lines = [f"{result['checkpoint']}, step {result['step']}"]
    if result["classes"] != 1000:
        lines.append(f"{result['classes']} classes, not 1000: the paper's rows are of another task")
    for kind, title in (("c", "ImageNet-C"), ("p", "ImageNet-P")):
        if not any(name.startswith(kind) for name in sets):
            continue
        for measure, top in (("top1", "top-1 %"), ("top5", "top-5 %")):
            header, *rows = PAPER[f"{title}, {top}"].strip().splitlines()
            names = header.split() + (["ten", "mean"] if kind == "p" else ["mean"])
            lines += ["", f"{title}, {top}", " " * 10 + "".join(f"{name:>6}" for name in names)]
            lines.append(f"{'here':10}{cells(row(sets, kind, measure), kind)}")
            for line in rows:
                name, *values = line.split()
                lines.append(f"{name:10}{cells([float(value) for value in values], kind)}")
        if kind == "p":
            for measure, text in (("flips", "flip pr. %"), ("top5_distance", "top-5 dist")):
                lines.append(f"{text:10}{cells(row(sets, kind, measure), kind)}")
            lines.append("ten: the mean over the ten perturbations that can be downloaded; flips "
                         f"compare frames {result['difficulty']} apart, in noise each frame with "
                         "the first")
    whole = None not in row(sets, "c", "top1")
    if whole and result["classes"] == 1000:     # AlexNet's errors are among 1000
        top1 = {name: [sets[f"c/{name}/{severity}"]["top1"] for severity in SEVERITIES]
                for name in CORRUPTIONS}
        lines.append(f"mCE {mean_corruption_error(top1):.2f} % (AlexNet 100, ResNet-50 76.7)")
    for name in EXTRA:
        extra = [over_severities(sets, name, measure) for measure in ("top1", "top5")]
        if None not in extra:
            lines.append(f"extra, in no mean: {name}, top-1 {extra[0]:.2f}, top-5 {extra[1]:.2f} %")
    for name, found in sets.items():
        if found["broken"]:
            lines.append(f"{len(found['broken'])} broken files in {name}, counted as wrong: "
                         f"{found['broken'][0]}")
    return "\n".join(lines)

def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print, or make a C; returns the exit code."""
    def work() -> None:
        cfg = ser.parse(argv, Settings)
        if cfg.make:
            require("RANK" not in os.environ, "--make runs in one process, without torchrun")
            print(make(cfg.make, cfg.data, cfg.make_images, cfg.seed, cfg.workers))
            return
        text = table(evaluate(cfg))
        if ser.ranks_and_rank()[1] == 0:
            print(f"{text}\n{cfg.result}")

    return ser.guard(Settings.program, work)

if __name__ == "__main__":
    ser.leave(main())

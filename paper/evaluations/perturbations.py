"""ImageNet-P: accuracy, flip probability and top-5 distance of videos, for
paper/evaluations/robustness.py, which is the command line.

A video is an image under a perturbation that grows from frame to frame. The paper reports the
accuracy over frames; the authors of P (Hendrycks and Dietterich 2019), how often the prediction
changes from a frame to the next, and how far the five likeliest classes move.
Axes: B frames of several videos, n frames of one, M pairs of frames, C classes.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

import ser
from eval_linear import Head, encode
from ser import ViT, ranks_and_rank, require

# The paper's columns. Ten can be downloaded and are the official benchmark; the other four, on
# which P's authors validated, are only made by their code.
PERTURBATIONS = ("gaussian_noise", "shot_noise", "speckle_noise", "motion_blur", "zoom_blur",
                 "gaussian_blur", "snow", "spatter", "brightness", "translate", "rotate", "tilt",
                 "scale", "shear")
TEN = ("gaussian_noise", "shot_noise", "motion_blur", "zoom_blur", "snow", "brightness",
       "translate", "rotate", "tilt", "scale")

def frame_pairs(n: int, noise: bool, difficulty: int = 1) -> tuple[Tensor, Tensor]:
    """(earlier, later), (M,) each: the frames that are compared. Noise has no order: the first,
    clean frame with every other one. Else each frame with the one `difficulty` after it."""
    if noise:
        return torch.zeros(n - 1, dtype=torch.int64), torch.arange(1, n)
    return torch.arange(n - difficulty), torch.arange(difficulty, n)

def flip_probability(order: Tensor, pairs: tuple[Tensor, Tensor]) -> float:
    """Share of the pairs whose predictions differ. order: (n, C), the classes of each frame, the
    likeliest first."""
    earlier, later = pairs
    differ = order[earlier, 0] != order[later, 0]
    return differ.double().mean().item()

def top5_distance(order: Tensor, pairs: tuple[Tensor, Tensor]) -> float:
    """The mean over pairs of sum_i |i - min(s(i), 6)|, i = 1..5, where s(i) is the rank in the
    later frame of the class that has rank i in the earlier one: 0 if they stay, 15 if all leave."""
    earlier, later = pairs
    top = order[earlier, :5]                                                      # (M, 5) classes
    # order[row, r] is the class of rank r; argsort inverts that to rank[row, class], from 0.
    rank = order[later].argsort(1)                                                # (M, C)
    s = 1 + rank.gather(1, top)                                                   # (M, 5)
    i = torch.arange(1, top.shape[1] + 1)
    distance = (i - s.clamp(max=6)).abs().sum(1)
    return distance.double().mean().item()

def read_video(path: str, size: int, least: int = 2) -> Tensor:
    """The frames (n, 3, size, size) uint8 of a video. Raises what PyAV raises, and UserError for
    fewer frames than it says that it has, or than `least`."""
    import av
    frames = []
    with av.open(path) as container:
        stream = container.streams.video[0]
        for frame in container.decode(stream):
            frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))     # (h, w, 3)
        require(len(frames) >= max(least, stream.frames),
                f"{len(frames)} of {stream.frames} frames")
    # Frames are 224 x 224 and not cropped; an encoder of another size gets them resized.
    return ser.resize(torch.stack(frames).permute(0, 3, 1, 2), (size, size))

class Videos(Dataset):
    """Index -> (frames (n, 3, S, S) uint8, label, name of the file if it is broken, else "").
    folder: of CLASS/*.mp4. Raises UserError for one without videos, or with strange classes."""

    def __init__(self, folder: Path, classes: Sequence[str], size: int, difficulty: int = 1):
        self.size = size
        self.least = difficulty + 1     # frames
        found = [entry.name for entry in os.scandir(folder)
                 if entry.is_dir() and not entry.name.startswith(".")]
        strange = sorted(set(found) - set(classes))
        require(not strange, f"--p {folder}: {' '.join(strange[:5])} are no classes of the head")
        self.paths = sorted(str(path) for path in folder.glob("[!.]*/*.mp4"))
        require(len(self.paths) > 0, f"--p {folder}: no CLASS/*.mp4 in it")
        place = {name: label for label, name in enumerate(classes)}
        self.labels = [place[Path(path).parent.name] for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        path = self.paths[index]
        try:
            return read_video(path, self.size, self.least), self.labels[index], ""
        except Exception as error:     # decoders raise what they like
            return torch.zeros(0), self.labels[index], f"{path} ({error})"

def measure(logits: Tensor, label: int, noise: bool, difficulty: int) -> Tensor:
    """(4,) of a video with logits (n, C): top-1 and top-5, shares of its frames, flip probability,
    top-5 distance."""
    # Ties go to the class that comes first, as in the ranks of P's authors.
    order = logits.argsort(dim=1, descending=True, stable=True)
    right = (order[:, :5] == label).double()                # (n, 5), at most one 1 in a row
    pairs = frame_pairs(len(order), noise, difficulty)
    return torch.tensor([right[:, 0].mean(), right.sum(1).mean(), flip_probability(order, pairs),
                         top5_distance(order, pairs)], dtype=torch.float64)

def score_videos(encoder: ViT, head: Head, folder: Path, cfg: Any) -> dict[str, Any]:
    """The means over the videos of a folder CLASS/*.mp4: top-1, top-5 and flip probability in
    percent, and top-5 distance. A broken file is named, is wrong, and counts not in the latter two.
    Of cfg it reads batch_size, workers and difficulty.
    Ranks share the videos. Raises UserError, on all ranks, for more than 1 broken in 1000, and
    more than 3."""
    ranks, rank = ranks_and_rank()
    videos = Videos(folder, head.classes, encoder.shape["image_size"], cfg.difficulty)
    own = Subset(videos, range(rank, len(videos), ranks))
    at_once = max(1, cfg.batch_size // ranks // 31)     # 31 frames in nearly all videos
    loader = DataLoader(own, at_once, num_workers=min(cfg.workers, os.cpu_count() or 1),
                        collate_fn=list, worker_init_fn=ser.leave_signals)
    noise = "noise" in folder.name
    sums = torch.zeros(4, dtype=torch.float64)
    broken = []
    for batch in tqdm(loader, folder.name, disable=rank > 0):
        broken += [path for _, _, path in batch if path]
        whole = [(frames, label) for frames, label, path in batch if not path]
        if not whole:
            continue
        # Choice: bf16 on a GPU, as the head's features, though P's authors compare frames in fp32.
        images = torch.cat([frames for frames, _ in whole])                       # (B, 3, S, S)
        logits = F.linear(encode(encoder, images, head.blocks), head.weight, head.bias).cpu()
        lengths = [len(frames) for frames, _ in whole]
        for (_, label), part in zip(whole, logits.split(lengths)):
            sums += measure(part, label, noise, cfg.difficulty)
    if ranks > 1:
        dist.all_reduce(sums)
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, broken)
        broken = [path for paths in every for path in paths]
    n = len(videos)
    require(len(broken) <= max(3, n / 1000), f"{len(broken)} of the {n} videos of {folder} cannot "
            f"be read, as {min(broken, default='')}: mend or remove them")
    top1, top5, flips, distance = sums.tolist()
    readable = max(1, n - len(broken))
    return {"videos": n, "class_folders": len(set(videos.labels)),
            "top1": 100 * top1 / n, "top5": 100 * top5 / n,
            "flips": 100 * flips / readable, "top5_distance": distance / readable,
            "broken": sorted(broken)}

"""DINO + SER: the DINO rows of the paper's Table 2 (ImageNet-1k linear top-1: DINO 67.37, + SER 67.63).

    python -m paper.dino                                               a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.dino --data /imagenet         DINO + SER, 100 epochs
    torchrun --nproc_per_node=8 -m paper.dino --data /imagenet --ratio 0 --cls-layer 0 --out runs/dino-plain
    torchrun --nproc_per_node=8 -m paper.dino --data /imagenet --weight 0 --out runs/dino-control
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/dino/last.pt

A student learns to say of one view what a teacher, its moving average, says of the other (Caron et al. 2021):

    t = softmax((teacher(x1) - center) / teacher temperature)      no gradient; the center is a moving mean
    loss = cross-entropy(t, softmax(student(x2) / student temperature)), and the same with x1 and x2 exchanged

Only what is DINO's own stands here; the training, the data and SER are those of ser.py. The values are the
paper's (tau 0.5) and, where it is silent, those of the released DINO + SER script, which trains two views
without local crops. Axes: B images, D width of the encoder, P prototypes (outputs of the head), W ranks.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, ClassVar, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ser
from ser import INF, TINY, ViT, ranks_and_rank, setting, warmup_cosine

@dataclasses.dataclass(frozen=True)
class Settings(ser.Common):
    """What DINO + SER sets otherwise than MoCo-v3 + SER, and what it has beside."""
    out: str = setting("runs/dino", 0, 0, "folder of last.pt, log.jsonl, views.png; a run there is resumed")
    weight: float = setting(0.3, 0, INF, "lambda of the equivariance loss; 0: the control (release: 0.3)")
    temperature: float = setting(0.5, TINY, INF, "tau of the equivariance loss (paper: 0.5 with DINO)")
    crop_min: float = setting(0.25, TINY, 1, "least area of a crop, share of the image (release: 0.25)")
    base_lr: float = setting(1e-4, TINY, INF, "learning rate per 256 images, as in ser.py (release: 1e-4)")
    final_lr: float = setting(1e-5, 0, INF, "learning rate at the end, not scaled (release: 1e-5)")
    weight_decay: float = setting(0.04, 0, INF, "first weight decay, of matrices only (DINO: 0.04)")
    final_weight_decay: float = setting(0.4, 0, INF, "last weight decay, after half a cosine (DINO: 0.4)")
    clip: float = setting(0.3, 0, INF, "largest gradient norm of a parameter; 0: no limit (release: 0.3)")
    drop_path: float = setting(0.1, 0, 0.99, "stochastic depth of the student's last block (DINO: 0.1)")
    hidden: int = setting(2048, 1, INF, "hidden width of the head (DINO: 2048)")
    prototypes: int = setting(65536, 2, INF, "outputs of the head (DINO: 65536)")
    student_temperature: float = setting(0.1, TINY, INF, "temperature of the student (DINO: 0.1)")
    first_temperature: float = setting(0.04, TINY, INF, "first temperature of the teacher (release: 0.04)")
    teacher_temperature: float = setting(0.07, TINY, INF, "temperature of the teacher (release: 0.07)")
    temperature_epochs: float = setting(10.0, 0, INF, "epochs from the first to the last one (release: 10)")
    momentum: float = setting(0.982, 0, 1, "first momentum of the teacher, rising to 1 (release: 0.982)")
    center_momentum: float = setting(0.9, 0, 1, "momentum of the center (DINO: 0.9)")
    freeze_epochs: float = setting(1.0, 0, INF, "epochs in which the last layer stays as it is (DINO: 1)")
    drawn: ClassVar[dict[str, Any]] = ser.SMALL | dict(
        hidden=512, prototypes=1024, base_lr=1e-3, temperature_epochs=2.0, freeze_epochs=0.25)
    program: ClassVar[str] = "-m paper.dino"

    def optimizer(self, model: nn.Module, **how: Any) -> torch.optim.Optimizer:
        """AdamW in three groups: matrices; biases and norms, without weight decay; the head's last layer."""
        groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "last": []}
        for name, p in model.named_parameters():
            if p.requires_grad:
                kind = "last" if "head.last" in name else "matrices" if p.dim() > 1 else "vectors"
                groups[kind].append(p)
        return torch.optim.AdamW([{"kind": kind, "params": found} for kind, found in groups.items()], **how)

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        """The schedules, the gradients' limits, and the frozen last layer."""
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(epoch, self.warmup_epochs, self.epochs, self.lr, self.final_lr)
            group["weight_decay"] = 0.0 if group["kind"] == "vectors" else warmup_cosine(
                epoch, 0, self.epochs, self.weight_decay, self.final_weight_decay)
            for p in group["params"]:
                if group["kind"] == "last" and epoch < self.freeze_epochs:
                    p.grad = None   # no step at all, weight decay included
                elif self.clip:     # each parameter by itself, as DINO does
                    nn.utils.clip_grad_norm_(p, self.clip)

class Head(nn.Module):
    """(B, D) -> (B, P): three layers with GELU to 256, L2 normalisation, a weight-normalised linear layer."""
    def __init__(self, dim: int, hidden: int, prototypes: int, bottleneck: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(),
                                 nn.Linear(hidden, bottleneck))
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.last = weight_norm(nn.Linear(bottleneck, prototypes, bias=False))
        # Choice: the norms begin at 1 and are trained, as in the release; DINO's own default keeps them at 1.
        nn.init.ones_(self.last.parametrizations.weight.original0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.normalize(self.mlp(x), dim=-1))

def dino_targets(teacher: Tensor, center: Tensor, temperature: float) -> Tensor:
    """The teacher's distribution over prototypes, centered and sharpened: (B, P), (P,) -> (B, P)."""
    return ((teacher - center) / temperature).softmax(-1)

def dino_loss(student: Sequence[Tensor], targets: Sequence[Tensor], temperature: float) -> Tensor:
    """Cross-entropy of the student on one view under the teacher's distribution on another, the mean over
    images and over all pairs of different views. student: outputs, targets: distributions, (B, P) a view."""
    guesses = [(s / temperature).log_softmax(-1) for s in student]
    terms = [-(target * guess).sum(-1).mean() for k, target in enumerate(targets)
             for q, guess in enumerate(guesses) if q != k]
    return sum(terms) / len(terms)

class DINO(nn.Module):
    """DINO, as a base method of ser.SER: the teacher is the moving average of encoder and head."""
    # Choice: the encoder is ser.py's, with fixed position codes, none for [CLS], Xavier weights; crops are
    # bilinear. DINO has learned codes, truncated normal weights and bicubic crops. The student is evaluated,
    # as in the release; DINO evaluates its teacher.
    def __init__(self, encoder: ViT, cfg: Settings):
        super().__init__()
        self.cfg, self.encoder = cfg, encoder
        # Choice: trained, as in DINO; the frozen random patch embedding is MoCo-v3's.
        encoder.patch_embed.requires_grad_(True)
        self.head = Head(encoder.dim, cfg.hidden, cfg.prototypes)
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        for i, block in enumerate(encoder.blocks):   # of the student alone, growing with depth
            block.drop_path = cfg.drop_path * i / max(encoder.depth - 1, 1)
        self.register_buffer("center", torch.zeros(cfg.prototypes))
        self.sharpness = cfg.first_temperature
        self.diagnostics: dict[str, Tensor | float] = {}

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Move the teacher towards the student, momentum rising to 1 on half a cosine, and set its
        temperature, which rises linearly, with every step (DINO's: with every epoch)."""
        m = warmup_cosine(progress, 0, 1, self.cfg.momentum, 1.0)
        move = torch.optim.swa_utils.get_ema_multi_avg_fn(m)
        for slow, fast in ((self.teacher, self.encoder), (self.teacher_head, self.head)):
            move(list(slow.parameters()), list(fast.parameters()), None)
        first, last = self.cfg.first_temperature, self.cfg.teacher_temperature
        warm = min(progress * self.cfg.epochs / max(self.cfg.temperature_epochs, TINY), 1)
        self.sharpness = first + (last - first) * warm
        self.diagnostics |= {"momentum": m, "teacher_temperature": self.sharpness}

    def forward(self, views: list[list[Tensor]], cls: list[Tensor]) -> Tensor:
        """The mean of both directions; the center moves after it has been used."""
        student = [self.head(c).float() for c in cls]
        with torch.no_grad():
            encoded = [torch.cat([e.cls for e in self.teacher(view)]) for view in views]
            teacher = [self.teacher_head(c).float() for c in encoded]
        with torch.autocast(cls[0].device.type, enabled=False):
            targets = [dino_targets(t, self.center, self.sharpness) for t in teacher]
            self.observe(torch.cat(teacher), torch.cat(targets))
            return dino_loss(student, targets, self.cfg.student_temperature)

    @torch.no_grad()
    def observe(self, teacher: Tensor, targets: Tensor) -> None:
        """Move the center towards the mean output of the teacher over views, images and ranks. The entropy of
        its mean distribution shows a collapse: ln P if all prototypes are used alike, 0 if only one is."""
        ranks, found = ranks_and_rank()[0], torch.stack([teacher.mean(0), targets.mean(0)])     # (2, P)
        if ranks > 1:
            dist.all_reduce(found)
        mean, used = found / ranks
        self.center.lerp_(mean, 1 - self.cfg.center_momentum)
        self.diagnostics |= {"inv_chance": math.log(self.cfg.prototypes),
                             "teacher_entropy": torch.special.entr(used).sum()}

build = functools.partial(ser.build, method=DINO)

if __name__ == "__main__":
    ser.leave(ser.main(None, Settings, build))

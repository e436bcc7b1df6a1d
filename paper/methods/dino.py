"""DINO + SER: the DINO rows of the paper's Table 2 (ImageNet-1k linear top-1: 67.37, + SER 67.63).

    python -m paper.methods.dino                         a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.dino --data /imagenet             DINO + SER
        ... --weight 0 --out runs/dino-control                          the same with lambda 0
        ... --ratio 0 --cls-layer 0 --out runs/dino-plain                          DINO alone
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/dino/last.pt

A student g_s learns to say of one view of an image what a teacher g_t, its moving average, says of
the other view (Caron et al. 2021; equations and Algorithm 1 below are theirs). For two views:

    P_t(x) = softmax((g_t(x) - c) / tau_t)     what the teacher says, without gradient
    P_s(x) = softmax(g_s(x) / tau_s)           what the student says                        (Eq. 1)
    L_inv  = (H(P_t(x1), P_s(x2)) + H(P_t(x2), P_s(x1))) / 2      H(a, b) = -sum a log b    (Eq. 3)
    c     <- m c + (1 - m) mean of g_t(x) over images and views   the center                (Eq. 4)

The center forbids that one output wins for all images; sharpening, tau_t < tau_s, forbids that all
outputs become alike. Only what is DINO's own stands here; views, encoder, SER and training are
those of ser.py. Values are the paper's (tau 0.5 for L_equiv) and, where it is silent, those of the
released DINO + SER script, which trains two views without local crops.
Axes: B images, N tokens, D width of the encoder, K outputs of the head.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ser
from ser import INF, TINY, View, ViT, move_towards, setting, warmup_cosine

# ==== 1. Settings, optimizer and schedules ========================================================
@dataclasses.dataclass(frozen=True)
class Settings(ser.Common):
    """What DINO + SER sets otherwise than MoCo-v3 + SER, and what it has beside."""
    out: str = setting("runs/dino", 0, 0, "folder of the run; a run that is there continues")
    weight: float = setting(0.3, 0, INF, "lambda of L_equiv; 0: the control (release: 0.3)")
    temperature: float = setting(0.5, TINY, INF, "tau of L_equiv (paper: 0.5 with DINO)")
    crop_min: float = setting(0.25, TINY, 1, "least area of a crop (release: 0.25 of the image)")
    base_lr: float = setting(1e-4, TINY, INF, "learning rate, scaled by batch_size / 256 (release)")
    final_lr: float = setting(1e-5, 0, INF, "learning rate at the end, not scaled (release: 1e-5)")
    weight_decay: float = setting(0.04, 0, INF, "weight decay at the start (DINO: 0.04)")
    final_weight_decay: float = setting(0.4, 0, INF, "weight decay at the end (DINO: 0.4)")
    clip: float = setting(0.3, 0, INF, "limit of a parameter's gradient; 0: none (release: 0.3)")
    drop_path: float = setting(0.1, 0, 0.99, "stochastic depth of the last block (DINO: 0.1)")
    hidden: int = setting(2048, 1, INF, "hidden width of the head (DINO: 2048)")
    outputs: int = setting(65536, 2, INF, "outputs K of the head (DINO: 65536)")
    student_temp: float = setting(0.1, TINY, INF, "tau_s of the student (DINO: 0.1)")
    first_teacher_temp: float = setting(0.04, TINY, INF, "tau_t at the start (release: 0.04)")
    teacher_temp: float = setting(0.07, TINY, INF, "tau_t after its rise (release: 0.07)")
    teacher_temp_epochs: float = setting(10.0, 0, INF, "epochs of the rise of tau_t (release: 10)")
    momentum: float = setting(0.982, 0, 1, "first momentum of the teacher, rising to 1 (release)")
    center_momentum: float = setting(0.9, 0, 1, "momentum m of the center (DINO: 0.9)")
    freeze_epochs: float = setting(1.0, 0, INF, "epochs without a step of the last layer (DINO: 1)")
    drawn: ClassVar[dict[str, Any]] = ser.SMALL | dict(
        hidden=512, outputs=1024, base_lr=1e-3, teacher_temp_epochs=2.0, freeze_epochs=0.25)
    program: ClassVar[str] = "-m paper.methods.dino"

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """AdamW in three groups, which `before_step` treats differently: the matrices, the vectors
        (biases and norms), and the last layer of the head."""
        groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "last": []}
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            if name.startswith("base.head.last"):
                groups["last"].append(p)
            elif p.dim() > 1:
                groups["matrices"].append(p)
            else:
                groups["vectors"].append(p)
        named = [{"kind": kind, "params": params} for kind, params in groups.items()]
        return torch.optim.AdamW(named, self.lr, **options)

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        """Set the learning rate (linear warmup, then half a cosine down) and the weight decay (half
        a cosine up) of a fractional epoch, and limit each parameter's gradient by itself."""
        lr = warmup_cosine(epoch, self.warmup, self.epochs, self.lr, self.final_lr)
        first = self.weight_decay
        decay = warmup_cosine(epoch, 0, self.epochs, first, self.final_weight_decay)
        for group in optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = 0.0 if group["kind"] == "vectors" else decay
            waits = group["kind"] == "last" and epoch < self.freeze_epochs
            for p in group["params"]:
                if waits:
                    p.grad = None     # AdamW then leaves it alone, weight decay included
                elif self.clip > 0:
                    nn.utils.clip_grad_norm_(p, self.clip)

# ==== 2. The student's parts: stochastic depth and the head =======================================
class StochasticBlock(ser.Block):
    """A copy of `block`, of width `dim`, with stochastic depth (Huang et al. 2016): in training,
    each of its two branches is left out for a share `drop` of the images, and scaled by 1 / (1 -
    drop) for the others, which keeps the mean."""

    def __init__(self, block: ser.Block, dim: int, drop: float):
        super().__init__(dim, block.heads)
        self.load_state_dict(block.state_dict())
        self.drop = drop

    def forward(self, batches: list[Tensor]) -> list[Tensor]:
        if not self.training:
            return super().forward(batches)
        x = ser.pack(batches)
        x = x + self.kept(batches) * self.attention(x, batches)
        x = x + self.kept(batches) * self.feed_forward(x)
        return ser.unpack(x, batches)

    def kept(self, batches: list[Tensor]) -> Tensor:
        """Draw the factors of a branch, (sum of B_i * N_i, 1) for packed tokens: for all tokens of
        an image alike, 0 with probability `drop` and else 1 / (1 - drop)."""
        factors = []
        for tokens in batches:
            images, length, _ = tokens.shape
            stays = torch.rand(images, device=tokens.device) >= self.drop
            factors.append(stays.repeat_interleave(length) / (1 - self.drop))
        return torch.cat(factors)[:, None]

class Head(nn.Module):
    """(B, D) -> (B, K): three layers with GELU to 256 features, brought to length 1, then a linear
    layer. Its rows have length 1 at the start, so that the first outputs are cosines."""

    def __init__(self, dim: int, hidden: int, outputs: int, bottleneck: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(),
            nn.Linear(hidden, hidden), nn.GELU(),
            nn.Linear(hidden, bottleneck))
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        # weight_norm keeps the lengths of the rows (original0) apart from their directions.
        # Choice: the lengths begin at 1 and are trained, as in the release; DINO fixes them at 1.
        self.last = weight_norm(nn.Linear(bottleneck, outputs, bias=False))
        nn.init.ones_(self.last.parametrizations.weight.original0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        # In fp32: in bf16 an output just below 1 is off by up to 0.002, which is 5% of tau_t.
        with torch.autocast(x.device.type, enabled=False):
            return self.last(F.normalize(x.float(), dim=-1))

# ==== 3. The loss and the method ==================================================================
def teacher_says(t: Tensor, center: Tensor, temperature: float) -> Tensor:
    """P_t: outputs t (B, K) of the teacher, centered and sharpened, as distributions (B, K)."""
    return ((t - center) / temperature).softmax(dim=-1)

def cross_entropy(target: Tensor, s: Tensor, temperature: float) -> Tensor:
    """H(P_t, P_s), the mean over images: target P_t (B, K), outputs s (B, K) of the student."""
    log_student = (s / temperature).log_softmax(dim=-1)
    return -(target * log_student).sum(dim=-1).mean()

class DINO(nn.Module):
    """DINO as a base method of SER (ser.py, section 5). Encoder and head are the student, their
    moving averages the teacher, which sees the same images and gets no gradient."""
    # Choice: views and encoder are ser.py's: bilinear crops, Xavier weights, [CLS] without position
    # code (DINO: bicubic, truncated normal, with one). The student is evaluated, as in the release;
    # DINO evaluates its teacher.

    def __init__(self, encoder: ViT, cfg: Settings):
        super().__init__()
        self.cfg = cfg
        # Choice: the patch embedding is trained, as in DINO; that of MoCo-v3 stays random.
        encoder.patch_embed.requires_grad_(True)
        self.encoder = encoder
        self.head = Head(encoder.dim, cfg.hidden, cfg.outputs)
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        # Only the student has stochastic depth, from 0 in its first block to drop_path in its last.
        for i, block in enumerate(encoder.blocks):
            drop = cfg.drop_path * i / max(encoder.depth - 1, 1)
            encoder.blocks[i] = StochasticBlock(block, encoder.dim, drop)
        self.register_buffer("center", torch.zeros(cfg.outputs))
        self.tau_t = cfg.first_teacher_temp
        self.diagnostics: dict[str, Tensor | float] = {}

    def update(self, progress: float) -> None:
        """Before the step at `progress` in [0, 1): move the teacher towards the student, with a
        momentum that rises to 1 on half a cosine, and set tau_t, which rises linearly."""
        momentum = warmup_cosine(progress, 0, 1, self.cfg.momentum, 1.0)
        move_towards(self.teacher, self.encoder, momentum)
        move_towards(self.teacher_head, self.head, momentum)
        # Choice: tau_t rises with every step; in DINO with every epoch.
        epoch = progress * self.cfg.epochs
        risen = min(epoch / max(self.cfg.teacher_temp_epochs, TINY), 1.0)
        first = self.cfg.first_teacher_temp
        self.tau_t = first + risen * (self.cfg.teacher_temp - first)
        self.diagnostics |= {"momentum": momentum, "teacher_temp": self.tau_t}

    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        """Algorithm 1: L_inv, a scalar, from the two views, whose images the teacher encodes, and
        the student's final [CLS] (B, D) of each, which SER has encoded already."""
        s1 = self.head(cls[0])
        s2 = self.head(cls[1])
        t1 = self.teach(views[0])
        t2 = self.teach(views[1])
        target1 = teacher_says(t1, self.center, self.tau_t)
        target2 = teacher_says(t2, self.center, self.tau_t)
        loss12 = cross_entropy(target1, s2, self.cfg.student_temp)
        loss21 = cross_entropy(target2, s1, self.cfg.student_temp)
        self.move_center(torch.cat([t1, t2]))     # after its use, as in Algorithm 1
        self.diagnose(torch.cat([target1, target2]))
        return (loss12 + loss21) / 2

    @torch.no_grad()
    def teach(self, view: View) -> Tensor:
        """g_t: the teacher's outputs (B, K) for b1 and b2 of a view."""
        cls = torch.cat([part.cls for part in self.teacher(view.images)])
        return self.teacher_head(cls)

    @torch.no_grad()
    def move_center(self, t: Tensor) -> None:
        """Eq. 4 on the teacher's outputs t (2B, K), with the mean over the images of all ranks."""
        mean = mean_over_ranks(t.mean(dim=0))
        self.center.lerp_(mean, 1 - self.cfg.center_momentum)

    @torch.no_grad()
    def diagnose(self, targets: Tensor) -> None:
        """For the log: the entropy of the mean of the targets (2B, K) is ln K if the teacher uses
        all outputs alike, and 0 if it has collapsed to one."""
        used = mean_over_ranks(targets.mean(dim=0))
        self.diagnostics["teacher_entropy"] = torch.special.entr(used).sum()
        self.diagnostics["inv_chance"] = math.log(self.cfg.outputs)

def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean of x over all ranks, without gradient; x itself in a single process."""
    ranks, _ = ser.ranks_and_rank()
    if ranks > 1:
        dist.all_reduce(x)
    return x / ranks

build = functools.partial(ser.build, method=DINO)

if __name__ == "__main__":
    ser.leave(ser.main(None, Settings, build))

"""DINO + SER: the DINO rows of the paper's Table 2 (ImageNet-1k linear top-1: 67.37, + SER 67.63).

    python -m paper.methods.dino                         a small ViT on drawn images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.dino --data /imagenet             DINO + SER
        ... --weight 0 --out runs/dino-control                          the same with lambda 0
        ... --ratio 0 --cls-layer 0 --out runs/dino-plain                          DINO alone
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/dino/last.pt

Two networks of one shape see two views x1 and x2 of an image. The student g_s is trained to
predict, from one view, the distribution over K outputs that the teacher g_t gives for the other
view; the teacher is a moving average of the student (Caron et al. 2021; the equations and
Algorithm 1 below are theirs):

    P_s(x) = softmax(g_s(x) / tau_s)           the student's distribution                   (Eq. 1)
    P_t(x) = softmax((g_t(x) - c) / tau_t)     the teacher's, with the center c; no gradient
    H(a, b) = -sum_k a_k log b_k               cross-entropy                                (Eq. 2)
    L_inv  = (H(P_t(x1), P_s(x2)) + H(P_t(x2), P_s(x1))) / 2                         (Algorithm 1)
    c     <- m c + (1 - m) mean of g_t(x) over images and views   the center                (Eq. 4)

Two remedies keep the teacher from saying the same of all images. Centering, the subtraction of c,
keeps it from always choosing the same output; sharpening, tau_t < tau_s, keeps it from giving all
outputs equal shares.

Only what is DINO's own stands here; views, encoder, SER and training are those of ser.py. Each
setting names its source: `paper` is SER's paper; `release` is the script of its authors for
DINO + SER, which has two views and no local crops; `DINO` is the code of Caron et al. The paper
comes first, then the release. Axes: B images of a rank, b1 and b2 together; N tokens; D width of
the encoder; K outputs of the head.
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
    """The settings of DINO + SER that differ from those of MoCo-v3 + SER, and DINO's own."""
    out: str = setting("runs/dino", 0, 0, "folder of the run; a run that is there continues")
    weight: float = setting(0.3, 0, INF, "lambda of L_equiv (release: 0.3); 0: the control")
    temperature: float = setting(0.5, TINY, INF, "tau of L_equiv (paper: 0.5 with DINO)")
    crop_min: float = setting(0.25, TINY, 1, "least area of a crop, share of image (release: 0.25)")
    base_lr: float = setting(1e-4, TINY, INF, "learning rate, scaled by batch_size / 256 (release)")
    final_lr: float = setting(1e-5, 0, INF, "learning rate at the end, not scaled (release: 1e-5)")
    weight_decay: float = setting(0.04, 0, INF, "weight decay at the start (DINO: 0.04)")
    final_weight_decay: float = setting(0.4, 0, INF, "weight decay at the end (DINO: 0.4)")
    clip: float = setting(0.3, 0, INF, "limit of a parameter's gradient norm (release: 0.3); 0: no")
    drop_path: float = setting(0.1, 0, 0.99, "stochastic depth: rate in the last block (DINO: 0.1)")
    hidden: int = setting(2048, 1, INF, "hidden width of the head (DINO: 2048)")
    outputs: int = setting(65536, 2, INF, "outputs K of the head (DINO: 65536)")
    student_temp: float = setting(0.1, TINY, INF, "tau_s of the student (DINO: 0.1)")
    first_teacher_temp: float = setting(0.04, TINY, INF, "tau_t at the start (release: 0.04)")
    teacher_temp: float = setting(0.07, TINY, INF, "tau_t after its rise (release: 0.07)")
    teacher_temp_epochs: float = setting(10.0, 0, INF, "epochs in which tau_t rises (release: 10)")
    momentum: float = setting(0.982, 0, 1, "teacher's first momentum, rising to 1 (release: 0.982)")
    center_momentum: float = setting(0.9, 0, 1, "momentum m of the center (DINO: 0.9)")
    freeze_epochs: float = setting(1.0, 0, INF, "epochs with the last layer frozen (DINO: 1)")
    drawn: ClassVar[dict[str, Any]] = ser.SMALL | dict(
        hidden=512, outputs=1024, base_lr=1e-3, teacher_temp_epochs=2.0, freeze_epochs=0.25)
    program: ClassVar[str] = "-m paper.methods.dino"

    @property
    def teacher_temp_rise(self) -> float:
        """Epochs in which tau_t rises: teacher_temp_epochs, shortened if need be."""
        return self.shortened(self.teacher_temp_epochs)

    @property
    def freeze(self) -> float:
        """Epochs in which the head's last layer is frozen: freeze_epochs, shortened if need be."""
        return self.shortened(self.freeze_epochs)

    def shortened(self, epochs: float) -> float:
        """`epochs`, or a tenth of the run if the run is not longer than that, as for `warmup`."""
        return epochs if epochs < self.epochs else self.epochs / 10

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """AdamW in three groups, which `before_step` treats differently: the vectors (biases and
        norms), the last layer of the head, and as "matrices" all other parameters."""
        groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "last": []}
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            if name.startswith("base.head.last"):     # DINO is the `base` of the SER model
                groups["last"].append(p)
            elif p.dim() > 1:
                groups["matrices"].append(p)
            else:
                groups["vectors"].append(p)
        param_groups = [{"kind": kind, "params": params} for kind, params in groups.items()]
        return torch.optim.AdamW(param_groups, self.lr, **options)     # decays: in before_step

    def before_step(self, optimizer: torch.optim.Optimizer, epoch: float) -> None:
        """Called between backward pass and step, at a fractional epoch. Sets the learning rate
        (linear warmup, then half a cosine down) and the weight decay (half a cosine up, none for
        vectors), clips the gradient of each parameter on its own, and freezes the last layer."""
        lr = warmup_cosine(epoch, self.warmup, self.epochs, self.lr, self.final_lr)
        # Half a cosine from `peak`, here the lower value, to `end`.
        decay = warmup_cosine(epoch, warmup=0, epochs=self.epochs, peak=self.weight_decay,
                              end=self.final_weight_decay)
        for group in optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = 0.0 if group["kind"] == "vectors" else decay
            frozen = group["kind"] == "last" and epoch < self.freeze
            for p in group["params"]:
                if frozen:
                    p.grad = None     # AdamW then leaves p as it is, without weight decay too
                elif self.clip > 0:
                    nn.utils.clip_grad_norm_(p, self.clip)

# ==== 2. The student's parts: stochastic depth and the head =======================================
class StochasticBlock(ser.Block):
    """A copy of `block` (tokens of width `dim`) with stochastic depth (Huang et al. 2016). In
    training, each branch, attention and MLP, is left out for an image with probability `drop`; for
    the other images it is divided by 1 - drop, which keeps the mean."""

    def __init__(self, block: ser.Block, dim: int, drop: float):
        super().__init__(dim, block.heads)
        self.load_state_dict(block.state_dict())
        self.drop = drop

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        """Tokens (B_i, N_i, D) of each part of a batch, b1 and b2 of each view -> the same."""
        if not self.training:
            return super().forward(parts)
        x = ser.pack(parts)                                       # (sum of B_i * N_i, D)
        x = x + self.draw_factors(parts) * self.attention(x, parts)
        x = x + self.draw_factors(parts) * self.feed_forward(x)
        return ser.unpack(x, parts)

    def draw_factors(self, parts: list[Tensor]) -> Tensor:
        """Draw what one branch is multiplied by, (sum of B_i * N_i, 1): for each image 0 with
        probability `drop`, else 1 / (1 - drop), and the same for all its tokens."""
        factors = []
        for tokens in parts:
            images, length, _ = tokens.shape
            kept = torch.rand(images, device=tokens.device) >= self.drop
            factors.append(kept.repeat_interleave(length) / (1 - self.drop))
        return torch.cat(factors)[:, None]

class Head(nn.Module):
    """(B, D) -> (B, K): three linear layers with GELU between them give 256 features, which are
    brought to length 1; then a linear layer without bias. The K rows of its weight begin with
    length 1, so that each output begins as a cosine."""

    def __init__(self, dim: int, hidden: int, outputs: int, bottleneck: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(),
            nn.Linear(hidden, hidden), nn.GELU(),
            nn.Linear(hidden, bottleneck))
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        # weight_norm splits the weight into the lengths of its rows, which PyTorch calls original0,
        # and their directions, original1.
        self.last = weight_norm(nn.Linear(bottleneck, outputs, bias=False))
        lengths = self.last.parametrizations.weight.original0
        # Choice: the lengths are trained, as in the release and as DINO's authors say they do with
        # ViT-S; the default of their code fixes them at 1.
        nn.init.ones_(lengths)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        # Choice: fp32. In bf16 an output just below 1 is off by up to 0.002, and divided by a tau_t
        # of 0.04 that would be 0.05.
        with torch.autocast(x.device.type, enabled=False):
            return self.last(F.normalize(x.float(), dim=-1))

# ==== 3. The loss and the method ==================================================================
def teacher_says(t: Tensor, center: Tensor, temperature: float) -> Tensor:
    """P_t (B, K) from outputs t (B, K) of the teacher, the center c (K,) and tau_t."""
    return ((t - center) / temperature).softmax(dim=-1)

def cross_entropy(target: Tensor, s: Tensor, temperature: float) -> Tensor:
    """The mean over images of H(P_t, P_s) (Eq. 2), from the target P_t (B, K), which carries no
    gradient, and outputs s (B, K) and tau_s of the student."""
    log_student = (s / temperature).log_softmax(dim=-1)
    return -(target * log_student).sum(dim=-1).mean()

class DINO(nn.Module):
    """DINO as a base method of SER (ser.py, section 5). g_s is `encoder` followed by `head`; g_t is
    `teacher` followed by `teacher_head`, their moving averages, which see the same images."""
    # Choice: views and encoder are ser.py's. Crops are resized bilinearly (DINO: bicubic), weights
    # of the encoder begin as Xavier's (DINO and the release: truncated normal), and [CLS] begins
    # with a standard deviation of 1e-6 (0.02 there) and has no position code (it has one there).
    # Choice: the student's encoder is evaluated, as in the release; DINO evaluates the teacher's.

    def __init__(self, encoder: ViT, cfg: Settings):
        super().__init__()
        self.cfg = cfg
        # Choice: the patch embedding is trained, as in DINO; that of MoCo-v3 stays random.
        encoder.patch_embed.requires_grad_(True)
        self.encoder = encoder
        self.head = Head(encoder.dim, cfg.hidden, cfg.outputs)
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        # Only the student has stochastic depth, so it gets it after the teacher was copied from it.
        # The rate grows linearly, from 0 in the first block to drop_path in the last.
        last = max(encoder.depth - 1, 1)     # not 0 for an encoder of one block
        for i in range(encoder.depth):
            drop = cfg.drop_path * i / last
            encoder.blocks[i] = StochasticBlock(encoder.blocks[i], encoder.dim, drop)
        self.register_buffer("center", torch.zeros(cfg.outputs))
        self.tau_t = cfg.first_teacher_temp
        self.diagnostics: dict[str, Tensor | float] = {}

    def update(self, progress: float) -> None:
        """Called before every forward pass, at `progress` in [0, 1): moves the teacher towards the
        student, with a momentum that rises to 1 on half a cosine, and sets tau_t, which rises
        linearly. Algorithm 1 moves the teacher after a step. Before the next is the same, but for a
        momentum that is one step ahead; before the first, both are equal and nothing moves."""
        momentum = warmup_cosine(progress, warmup=0, epochs=1, peak=self.cfg.momentum, end=1.0)
        move_towards(self.teacher, self.encoder, momentum)
        move_towards(self.teacher_head, self.head, momentum)
        # Choice: tau_t rises with every step; in DINO with every epoch.
        epoch = progress * self.cfg.epochs
        rise = self.cfg.teacher_temp_rise
        share = min(epoch / rise, 1.0) if rise > 0 else 1.0
        first = self.cfg.first_teacher_temp
        self.tau_t = first + share * (self.cfg.teacher_temp - first)
        self.diagnostics |= {"momentum": momentum, "teacher_temp": self.tau_t}

    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        """Algorithm 1: L_inv, a scalar. views: the two views, whose images the teacher encodes
        here. cls: the final [CLS] (B, D) of each view by the student, whose encoder SER has run
        already."""
        s1 = self.head(cls[0])                                   # (B, K), and so are s2, t1, t2
        s2 = self.head(cls[1])
        t1 = self.teach(views[0])
        t2 = self.teach(views[1])
        target1 = teacher_says(t1, self.center, self.tau_t)
        target2 = teacher_says(t2, self.center, self.tau_t)
        # The teacher's view 1 teaches the student's view 2, and the other way round.
        loss12 = cross_entropy(target1, s2, self.cfg.student_temp)
        loss21 = cross_entropy(target2, s1, self.cfg.student_temp)
        self.move_center(torch.cat([t1, t2]))     # after its use, as in Algorithm 1
        self.diagnose(torch.cat([target1, target2]))
        return (loss12 + loss21) / 2

    @torch.no_grad()
    def teach(self, view: View) -> Tensor:
        """g_t(x): the teacher's outputs (B, K) for a view, rows of b1, then of b2."""
        cls = torch.cat([part.cls for part in self.teacher(view.images)])
        return self.teacher_head(cls)

    @torch.no_grad()
    def move_center(self, t: Tensor) -> None:
        """Eq. 4, from the teacher's outputs t (2B, K) for both views: c <- m c + (1 - m) mean, over
        the images of all ranks."""
        mean = mean_over_ranks(t.mean(dim=0))
        self.center.lerp_(mean, 1 - self.cfg.center_momentum)

    @torch.no_grad()
    def diagnose(self, targets: Tensor) -> None:
        """Measure, for the log, how the teacher uses its outputs over all images, from the targets
        (2B, K) of both views. teacher_entropy is that of their mean: 0 if all images get one
        output for certain, ln K if all outputs are used alike. That is good, unless inv stays at
        its chance, ln K, too: then the target of every single image may be uniform."""
        used = mean_over_ranks(targets.mean(dim=0))
        self.diagnostics["teacher_entropy"] = torch.special.entr(used).sum()
        self.diagnostics["inv_chance"] = math.log(self.cfg.outputs)

def mean_over_ranks(x: Tensor) -> Tensor:
    """The mean over all ranks of x, without gradient. It may overwrite x, a temporary value."""
    ranks, _ = ser.ranks_and_rank()
    if ranks > 1:
        dist.all_reduce(x)
    return x / ranks

# build(cfg) -> the SER model of a run, whose base method is DINO(encoder, cfg).
build = functools.partial(ser.build, method=DINO)

if __name__ == "__main__":
    ser.leave(ser.main(None, Settings, build))

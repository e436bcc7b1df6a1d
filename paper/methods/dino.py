"""DINO + SER: the DINO rows of the paper's Table 2 (linear top-1: 67.37, with SER 67.63).

    python -m paper.methods.dino     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.dino --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/dino/last.pt

From one view of an image, x1 or x2, the student g_s learns to predict the distribution over
K outputs that the teacher g_t, its moving average, gives for the other view. The equations
are those of Caron et al. 2021:

    P_s(x) = softmax(g_s(x) / tau_s)          the student's distribution           (Eq. 1)
    P_t(x) = softmax((g_t(x) - c) / tau_t)    the teacher's; no gradient
    H(a, b) = -sum_k a_k log b_k              cross-entropy                        (Eq. 2)
    L_inv  = (H(P_t(x1), P_s(x2)) + H(P_t(x2), P_s(x1))) / 2                 (Algorithm 1)
    c     <- m c + (1 - m) mean of g_t(x)     the center, over images and views    (Eq. 4)

Choice, unlike 4.1, which keeps DINO's settings: we take those of the release's script for DINO
+ SER (`release`, with two views). What it lacks is from Caron et al.'s code (`DINO`).
"""
import copy
import math
from argparse import Namespace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import AdamW, Optimizer
from torchvision.ops import stochastic_depth

import ser
from ser import View, count, nonnegative, positive, share


def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line: those of ser.py with other defaults, and DINO's own."""
    parser = ser.arguments()
    # The temperature is the paper's; the release's published command has 0.4. The weight
    # decay is DINO's, and the other three are the release's.
    parser.set_defaults(out="runs/dino", weight=0.3, temperature=0.5, weight_decay=0.04,
                        base_lr=1e-4, crop_min=0.25)
    parser.epilog = "--weight-decay is the first, of matrices. --moco-hidden has no effect."
    add = parser.add_argument
    add("--final-lr", type=nonnegative, default=1e-5, help="at the end, for any batch (release)")
    add("--final-weight-decay", type=nonnegative, default=0.4, help="at the end (DINO)")
    add("--clip", type=positive, default=0.3, help="limit of a gradient's norm (release)")
    add("--drop-path", type=share, default=0.1, help="stochastic depth, last block (DINO)")
    add("--hidden", type=count, default=2048, help="hidden width of the head (DINO)")
    add("--outputs", type=count, default=65536, help="K of the head (DINO)")
    add("--first-teacher-temp", type=positive, default=0.04, help="tau_t at first (release)")
    add("--teacher-temp", type=positive, default=0.07, help="tau_t after its rise (release)")
    add("--teacher-temp-epochs", type=positive, default=10.0, help="of the rise (release)")
    add("--momentum", type=share, default=0.982, help="of the teacher, at first; .982 is the "
        "release's for 2048 images, so take .9977, its eighth root, for 256")
    add("--freeze-epochs", type=nonnegative, default=1.0, help="of the last layer (DINO)")
    small = dict(hidden=512, outputs=1024, base_lr=1e-3, teacher_temp_epochs=2.0,
                 out="runs/dino-small")
    return ser.parse(argv, parser, ser.SMALL | small)


def half_cosine(start: float, end: float, progress: float) -> float:
    """From start to end while `progress` goes from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))


def optimizer(model: nn.Module, args: Namespace) -> Optimizer:
    """AdamW on three groups. `vectors` (biases, norms) do not decay. `last` (the head's last
    layer) is frozen at first. `matrices` are the rest. Each gradient is clipped on its own."""
    matrices = []
    vectors = []
    last = list(model.base.head.last.parameters())
    for name, p in model.named_parameters():
        if p.requires_grad and not name.startswith("base.head.last."):
            group = matrices if p.dim() > 1 else vectors
            group.append(p)
    # `schedule` sets rates, weight decays and `frozen` before every step.
    adamw = AdamW([{"params": matrices}, {"params": vectors}, {"params": last}], fused=True)

    def clip_and_freeze(adamw: Optimizer, *_: object) -> None:
        for p in matrices + vectors + last:
            nn.utils.clip_grad_norm_(p, args.clip)
        if adamw.param_groups[2]["frozen"]:
            for p in last:
                p.grad = None     # AdamW leaves a parameter without gradient as it is

    adamw.register_step_pre_hook(clip_and_freeze)
    return adamw


def schedule(adamw: Optimizer, args: Namespace, epoch: float) -> None:
    """Set rates and decays, and freeze the last layer at first; epoch: with its fraction."""
    decay = half_cosine(args.weight_decay, args.final_weight_decay, epoch / args.epochs)
    matrices, vectors, last = adamw.param_groups
    for group in (matrices, vectors, last):
        group["lr"] = ser.learning_rate(args, epoch, args.final_lr)
        group["weight_decay"] = decay
    vectors["weight_decay"] = 0.0
    last["frozen"] = epoch < args.freeze_epochs


def add_stochastic_depth(encoder: ser.ViT, most: float) -> None:
    """Huang et al. 2016: in training, an image skips a branch (attention, MLP) with chance p.
    Kept branches are divided by 1 - p. p is 0 in block 1, and grows to `most` in the last."""
    def drop_branch(p: float, layer: nn.Module, inputs: object, branch: Tensor) -> Tensor:
        return stochastic_depth(branch, p, "row", layer.training)

    for i, block in enumerate(encoder.blocks):
        hook = partial(drop_branch, most * i / max(1, encoder.depth - 1))
        block.attn.proj.register_forward_hook(hook)     # here a branch ends
        block.mlp.fc2.register_forward_hook(hook)


class Head(nn.Module):
    """(B, D) -> (B, K): three linear layers with GELU between them, L2 normalisation, and a
    linear layer without bias. Its K rows begin with length 1, so outputs begin as cosines."""
    def __init__(self, dim: int, hidden: int, outputs: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden),
                                 nn.GELU(), nn.Linear(hidden, 256))
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

        # Choice: the lengths of the rows (original0) are trained, as in the release, and as
        # DINO's authors say they do with ViT-S; by default, their code fixes them at 1.
        self.last = weight_norm(nn.Linear(256, outputs, bias=False))
        nn.init.ones_(self.last.parametrizations.weight.original0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        # Choice: fp32. A cosine in bf16 is off by 0.002, and divided by tau_t, by 0.05.
        with torch.autocast(x.device.type, enabled=False):
            x = F.normalize(x.float(), dim=-1)
            return self.last(x)


def cross_entropy(t: Tensor, s: Tensor, center: Tensor, tau_t: float) -> Tensor:
    """The mean over images of H(P_t, P_s). t and s are outputs (B, K) of the teacher, without
    gradient, and of the student; `center` is c, (K,)."""
    target = ((t - center) / tau_t).softmax(dim=-1)
    log_student = (s / 0.1).log_softmax(dim=-1)     # tau_s is 0.1 (DINO)
    return -(target * log_student).sum(dim=-1).mean()


class DINO(nn.Module):
    """DINO as a base method of SER (ser.py, section 5). g_s is `encoder` followed by `head`;
    g_t is `teacher` followed by `teacher_head`, their moving averages."""
    # Choice: views and encoder are ser.py's, and the patch embedding is trained. In DINO and the
    # release, crops are resized bicubically, weights begin as truncated normal and [CLS] with a
    # deviation of 0.02. [CLS] has a position embedding in DINO and in the release without SER.
    # Choice: the student is evaluated, as in the release; in DINO, the teacher.
    def __init__(self, encoder: ser.ViT, args: Namespace):
        super().__init__()
        self.args = args
        self.encoder = encoder
        self.head = Head(encoder.dim, args.hidden, args.outputs)
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("center", torch.zeros(args.outputs))

        add_stochastic_depth(encoder, args.drop_path)     # the student's alone

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Move the teacher towards the student, and set tau_t. DINO's Algorithm 1 moves the
        teacher after a step. Here it moves before a step, with the momentum of that step."""
        momentum = half_cosine(self.args.momentum, 1.0, progress)
        for slow, fast in ((self.teacher, self.encoder), (self.teacher_head, self.head)):
            for old, new in zip(slow.parameters(), fast.parameters()):
                old.lerp_(new, 1 - momentum)     # old <- momentum old + (1 - momentum) new

        # Choice: tau_t rises with every step; in DINO with every epoch.
        epoch = progress * self.args.epochs
        rise = min(1.0, epoch / self.args.teacher_temp_epochs)
        first = self.args.first_teacher_temp
        self.tau_t = first + rise * (self.args.teacher_temp - first)

    def forward(self, views: list[View], cls: list[Tensor]) -> Tensor:
        """DINO's Algorithm 1: L_inv, a scalar. cls: the student's [CLS] (B, D) of each view;
        the teacher encodes their images here."""
        s1 = self.head(cls[0])                                     # (B, K), as s2, t1 and t2
        s2 = self.head(cls[1])
        with torch.no_grad():
            teacher_cls1, _ = ser.encode_view(self.teacher, views[0])
            teacher_cls2, _ = ser.encode_view(self.teacher, views[1])
            t1 = self.teacher_head(teacher_cls1)
            t2 = self.teacher_head(teacher_cls2)

        # The teacher's view 1 teaches the student's view 2, and the other way round.
        loss12 = cross_entropy(t1, s2, self.center, self.tau_t)
        loss21 = cross_entropy(t2, s1, self.center, self.tau_t)

        # Eq. 4, over the images of all ranks, after the center's use; m is 0.9 (DINO).
        own_mean = torch.cat([t1, t2]).mean(dim=0, keepdim=True)     # (1, K)
        mean = ser.gather(own_mean).mean(dim=0)
        self.center.lerp_(mean, 1 - 0.9)
        return (loss12 + loss21) / 2


def build(args: Namespace) -> ser.SER:
    """The model of a run: DINO + SER."""
    base = DINO(ser.seed_and_make_encoder(args), args)
    return ser.SER(base, args.equiv_layers, args.weight, args.temperature)


if __name__ == "__main__":
    ser.train(settings(), build, ser.two_view_dataset, optimizer, schedule)
    ser.leave_group()

"""DINO + SER: the DINO rows of the paper's Table 2 (ImageNet-1k linear top-1: 67.37, + SER 67.63).

    python -m paper.methods.dino     # a small ViT on synthetic images, on a CPU
    torchrun --nproc_per_node=8 -m paper.methods.dino --data /imagenet
    torchrun --nproc_per_node=8 eval_linear.py --data /imagenet --checkpoint runs/dino/last.pt

Add `--weight 0 --out runs/dino-control` to train the control, where lambda is 0, or
`--ratio 0 --cls-layer 0 --out runs/dino-plain` to train DINO alone.

Two networks of one shape see two views x1 and x2 of an image. The student g_s is trained to
predict, from one view, the distribution over K outputs that the teacher g_t gives for the other
view; the teacher is a moving average of the student (Caron et al. 2021, whose equations these are):

    P_s(x) = softmax(g_s(x) / tau_s)           the student's distribution                   (Eq. 1)
    P_t(x) = softmax((g_t(x) - c) / tau_t)     the teacher's, with the center c; no gradient
    H(a, b) = -sum_k a_k log b_k               cross-entropy                                (Eq. 2)
    L_inv  = (H(P_t(x1), P_s(x2)) + H(P_t(x2), P_s(x1))) / 2                         (Algorithm 1)
    c     <- m c + (1 - m) mean of g_t(x) over images and views   the center                (Eq. 4)

Settings that the paper leaves open are those of its authors' script for DINO + SER (`release`: two
views, no local crops), or else those of Caron et al.'s code (`DINO`). K: outputs of the head.
"""
import copy
import math
from argparse import SUPPRESS, Namespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops import stochastic_depth

import ser
from paper.methods import addon

def settings(argv: list[str] | None = None) -> Namespace:
    """The settings of a command line: those of ser.py with other defaults, and DINO's own."""
    parser = ser.arguments()
    # The temperature is the paper's, the weight decay DINO's; the others are the release's.
    parser.set_defaults(out="runs/dino", weight=0.3, temperature=0.5, crop_min=0.25, base_lr=1e-4,
                        weight_decay=0.04)
    addon.set_helps(parser, moco_hidden=SUPPRESS, base_lr="rate at batch 256 (release: 1e-4)",
                    weight_decay="at the start, of matrices only (DINO: 0.04)")
    add = parser.add_argument
    add("--final-lr", type=float, default=1e-5, help="at the end, for any batch (release: 1e-5)")
    add("--final-weight-decay", type=float, default=0.4, help="at the end (DINO: 0.4)")
    add("--clip", type=float, default=0.3, help="limit of a gradient's norm (release: 0.3)")
    add("--drop-path", type=float, default=0.1, help="stochastic depth in the last block (DINO)")
    add("--hidden", type=int, default=2048, help="hidden width of the head (DINO: 2048)")
    add("--outputs", type=int, default=65536, help="outputs K of the head (DINO: 65536)")
    add("--first-teacher-temp", type=float, default=0.04, help="tau_t at the start (release)")
    add("--teacher-temp", type=float, default=0.07, help="tau_t after its rise (release: 0.07)")
    add("--teacher-temp-epochs", type=float, default=10.0, help="of the rise of tau_t (release)")
    add("--momentum", type=float, default=0.982, help="of the teacher; rises to 1 (release: 0.982)")
    add("--freeze-epochs", type=float, default=1.0, help="with the last layer frozen (DINO: 1)")
    small = dict(out="runs/dino-small", hidden=512, outputs=1024, base_lr=1e-3,
                 teacher_temp_epochs=2.0)
    return ser.parse(argv, parser, ser.SMALL | small)

def half_cosine(start: float, end: float, progress: float) -> float:
    """From start to end while `progress` goes from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))

def learning_rate(args: Namespace, epoch: float, end: float) -> float:
    """ser.py's linear warmup, then half a cosine from the peak to `end`."""
    peak = args.base_lr * args.batch_size / 256
    if epoch < args.warmup_epochs:
        return peak * epoch / args.warmup_epochs
    return half_cosine(peak, end, (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs))

def optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """AdamW on two groups, matrices and vectors (biases and norms). Its step begins with `prepare`,
    which sets the rates, clips each gradient on its own, and freezes the last layer at first."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.dim() > 1]}
    vectors = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([matrices, vectors], weight_decay=args.weight_decay, fused=True)

    def prepare(adamw: torch.optim.Optimizer, *_: object) -> None:
        progress = model.base.progress
        epoch = progress * args.epochs
        decay = half_cosine(args.weight_decay, args.final_weight_decay, progress)
        adamw.param_groups[0]["weight_decay"] = decay
        for group in adamw.param_groups:
            group["lr"] = learning_rate(args, epoch, args.final_lr)
        for p in trained:
            nn.utils.clip_grad_norm_(p, args.clip)
        if epoch < args.freeze_epochs:
            model.base.head.last.zero_grad()     # to None: AdamW then leaves it as it is

    adamw.register_step_pre_hook(prepare)
    return adamw

def add_stochastic_depth(block: ser.Block, drop: float) -> None:
    """Huang et al. 2016: in training, each branch, attention and MLP, is left out for an image with
    probability `drop`; for the other images it is divided by 1 - drop, which keeps the mean."""
    def drop_branch(layer: nn.Module, inputs: object, branch: Tensor) -> Tensor:
        return stochastic_depth(branch, drop, "row", layer.training)

    block.attn["proj"].register_forward_hook(drop_branch)     # here a branch ends
    block.mlp["fc2"].register_forward_hook(drop_branch)

class Head(nn.Module):
    """(B, D) -> (B, K): three linear layers with GELU between them, L2 normalisation, and a linear
    layer without bias, whose K rows begin with length 1: each output begins as a cosine."""
    def __init__(self, dim: int, hidden: int, outputs: int):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(),
            nn.Linear(hidden, hidden), nn.GELU(),
            nn.Linear(hidden, 256))
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        # weight_norm splits the weight into lengths of rows, original0, and directions, original1.
        self.last = weight_norm(nn.Linear(256, outputs, bias=False))
        # Choice: the lengths are trained, as in the release, and as DINO's authors say they do with
        # ViT-S; the default of their code fixes them at 1.
        nn.init.ones_(self.last.parametrizations.weight.original0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)
        # Choice: fp32. A cosine in bf16 is off by up to 0.002, and divided by tau_t by up to 0.05.
        with torch.autocast(x.device.type, enabled=False):
            return self.last(F.normalize(x.float(), dim=-1))

def cross_entropy(t: Tensor, s: Tensor, center: Tensor, tau_t: float) -> Tensor:
    """The mean over images of H(P_t, P_s), from outputs t of the teacher, which carry no gradient,
    and s of the student, both (B, K), and the center c (K,)."""
    target = ((t - center) / tau_t).softmax(dim=-1)
    log_student = (s / 0.1).log_softmax(dim=-1)     # tau_s is 0.1 (DINO)
    return -(target * log_student).sum(dim=-1).mean()

class DINO(nn.Module):
    """DINO as a base method of SER (ser.py, section 5). g_s is `encoder` followed by `head`; g_t is
    `teacher` followed by `teacher_head`, their moving averages, which see the same images."""
    # Choice: views and encoder are ser.py's. Crops are resized bilinearly (DINO: bicubic), weights
    # of the encoder begin as Xavier's (DINO and the release: truncated normal), [CLS] begins with a
    # standard deviation of 1e-6 (there: 0.02), and has no position embedding (in DINO, it has one).
    # Choice: the student's encoder is evaluated, as in the release; DINO evaluates the teacher's.
    def __init__(self, encoder: ser.ViT, args: Namespace):
        super().__init__()
        self.args = args
        # Choice: the patch embedding is trained, as in DINO; that of MoCo-v3 stays random.
        encoder.patch_embed.requires_grad_(True)
        self.encoder = encoder
        self.head = Head(encoder.dim, args.hidden, args.outputs)
        self.teacher = copy.deepcopy(encoder).requires_grad_(False)
        self.teacher_head = copy.deepcopy(self.head).requires_grad_(False)
        # Only the student has stochastic depth; its rate grows linearly, from 0 in the first block.
        for i, block in enumerate(encoder.blocks):
            add_stochastic_depth(block, args.drop_path * i / max(1, encoder.depth - 1))
        self.register_buffer("center", torch.zeros(args.outputs))

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Move the teacher towards the student, and set tau_t. DINO's Algorithm 1 moves the teacher
        after a step. Here it moves before the next one, with the momentum of that next step."""
        self.progress = progress     # for the schedules of the optimizer
        momentum = half_cosine(self.args.momentum, 1.0, progress)
        for slow, fast in ((self.teacher, self.encoder), (self.teacher_head, self.head)):
            for s, f in zip(slow.parameters(), fast.parameters()):
                s.lerp_(f, 1 - momentum)     # s <- momentum * s + (1 - momentum) * f
        # Choice: tau_t rises with every step; in DINO with every epoch.
        epoch = progress * self.args.epochs
        rise = min(1.0, epoch / max(1e-9, self.args.teacher_temp_epochs))
        first = self.args.first_teacher_temp
        self.tau_t = first + rise * (self.args.teacher_temp - first)

    def forward(self, views: list[ser.View], cls: list[Tensor]) -> Tensor:
        """DINO's Algorithm 1: L_inv, a scalar. cls: the student's [CLS] (B, D) of each view; the
        teacher encodes their images here."""
        s1 = self.head(cls[0])                                   # (B, K), and so are s2, t1, t2
        s2 = self.head(cls[1])
        with torch.no_grad():
            t1 = self.teacher_head(ser.encode_view(self.teacher, views[0])[0])
            t2 = self.teacher_head(ser.encode_view(self.teacher, views[1])[0])
        # The teacher's view 1 teaches the student's view 2, and the other way round.
        loss12 = cross_entropy(t1, s2, self.center, self.tau_t)
        loss21 = cross_entropy(t2, s1, self.center, self.tau_t)
        mean = torch.cat([t1, t2]).mean(dim=0)     # Eq. 4, over the images of all ranks
        ranks, _ = ser.ranks_and_rank()
        if ranks > 1:
            dist.all_reduce(mean)
        self.center.lerp_(mean / ranks, 1 - 0.9)     # after its use; m is 0.9 (DINO)
        return (loss12 + loss21) / 2

    def chance(self, batch: int) -> float:
        """L_inv where all K outputs get equal shares."""
        return math.log(self.args.outputs)

def build(args: Namespace) -> ser.SER:
    """The model of a run: DINO + SER."""
    base = DINO(ser.new_encoder(args), args)
    return ser.SER(base, args.equiv_layers, args.weight, args.temperature)

if __name__ == "__main__":
    ser.train(settings(), build, ser.two_views, optimizer)

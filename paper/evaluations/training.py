"""What finetune.py and coco.py share: settings, and a training loop that resumes, on any number of
ranks. The loop asks the script only for a model, its optimizer, a data set, a loss and a schedule.
"""
from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import ser
from eval_linear import write_json
from ser import INF, ranks_and_rank, require, seed_of, setting

LossAndBroken = tuple[Tensor, set[str]]

@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of every evaluation that trains more than heads."""
    data: str = setting("", 0, 0, "folder of the data set")
    checkpoint: str = setting("runs/ser/last.pt", 0, 0, "last.pt of a run of any method")
    random_init: bool = setting(False, 0, 1, "an encoder with the random weights of the run's seed")
    seed: int = setting(0, 0, 2 ** 63 - 1, "seed of new weights and of every random draw")
    workers: int = setting(8, 0, INF, "loader processes per rank; 0: the training process loads")
    out: str = setting("", 0, 0, "file of the result; none: beside the checkpoint")

    drawn: ClassVar[dict[str, Any]] = {}
    name: ClassVar[str] = ""     # of the result; in finetune.py a property
    # The settings with which an interrupted run may go on though they differ.
    may_change: ClassVar[tuple[str, ...]] = ("data", "checkpoint", "workers", "out")

    @property
    def title(self) -> str:
        """The name of the result's file."""
        return self.name + ("-random-init" if self.random_init else "")

    @property
    def result(self) -> Path:
        """Where the result goes. The state of the training is beside it, as .pt."""
        return Path(self.out) if self.out else Path(self.checkpoint).with_name(self.title + ".json")

    def b2_images(self, ranks: int) -> int:
        """For ser.batch_keys, which gives the order of a run and asks for |b2|: there is no b2."""
        return 0

def union(names: set[str]) -> set[str]:
    """What any rank has found."""
    ranks, _ = ranks_and_rank()
    found = [names] * ranks
    if ranks > 1:
        dist.all_gather_object(found, names)
    return set().union(*found)

def check_broken(broken: set[str], images: int) -> None:
    """Raise UserError when more than 1 in 1000 images, and more than 3, cannot be read."""
    require(len(broken) <= max(3, images / 1000), f"{len(broken)} of {images} images cannot be "
            f"read, as {min(broken, default='')}: mend or remove them")

def check_progress(done: int, loss: float, broken: set[str], images: int) -> None:
    """Raise UserError, after step `done`, for a loss that is not finite or many broken files."""
    require(math.isfinite(loss),
            f"step {done}: the loss is {loss}: lower the learning rate, with a new --out")
    check_broken(broken, images)

def loader_of(images: torch.utils.data.Dataset, cfg: Any, start: int,
              steps: int) -> torch.utils.data.DataLoader:
    """This rank's batches from step `start` on."""
    ranks, rank = ranks_and_rank()
    return torch.utils.data.DataLoader(
        images, batch_sampler=ser.batch_keys(len(images), cfg, start, steps, rank, ranks),
        collate_fn=images.collate, num_workers=min(cfg.workers, os.cpu_count() or 1),
        worker_init_fn=ser.leave_signals, pin_memory=torch.cuda.is_available())

def loader_of_val(images: torch.utils.data.Dataset, at_once: int, cfg: Any, rank: int,
                  ranks: int) -> torch.utils.data.DataLoader:
    """A rank's images of val, `at_once` a batch: without an epoch, nothing is drawn."""
    keys = [ser.Key(None, index, index, False) for index in range(rank, len(images), ranks)]
    return torch.utils.data.DataLoader(
        images, max(1, at_once), sampler=keys, collate_fn=images.collate,
        num_workers=min(cfg.workers, os.cpu_count() or 1), worker_init_fn=ser.leave_signals)

def resume(path: Path, identity: dict[str, Any], model: nn.Module,
           optimizer: torch.optim.Optimizer) -> tuple[int, list[float], set[str]]:
    """Load the state that an interrupted run left at `path`, if any; returns its step, losses and
    broken files. Raises UserError for the state of a run with other settings."""
    if not path.exists():
        return 0, [], set()
    state = ser.load_checkpoint(path)
    there = state.get("identity", {})
    differ = [f"{name} {there.get(name)} there, {value} here"
              for name, value in identity.items() if there.get(name) != value]
    require(not differ, f"{path} is of another run ({'; '.join(differ)}): use a new --out")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["losses"], set(state["broken"])

def train(model: nn.Module, shape: dict[str, Any], optimizer: torch.optim.Optimizer,
          images: torch.utils.data.Dataset, loss_of: Callable[[nn.Module, Any], LossAndBroken],
          cfg: Any, origin: dict[str, str]) -> tuple[list[float], set[str]]:
    """Train `model`, or continue; returns the mean loss of every `cfg.save_steps(n)` steps and the
    names of the files that cannot be read.

    shape: of the encoder in the model; images: ser.Key -> an item, with a method `collate` that
    batches items; loss_of(model, batch): the loss, and the names of its broken files; cfg: Settings
    with `steps(n)`, `save_steps(n)` and `lr_at(step, n)` for n images, as those of finetune.py;
    origin: digests of the checkpoint, the images and the classes, with which alone an interrupted
    run goes on. A parameter group may have a `scale`, which multiplies its rate. Raises UserError,
    on all ranks, for a state of another origin or other settings, too many broken files, or a loss
    that is not finite.
    """
    ranks, rank = ranks_and_rank()
    n = len(images)
    require(cfg.batch_size % ranks == 0, f"--batch-size {cfg.batch_size}: {ranks} ranks share it")
    require(cfg.batch_size <= n, f"--batch-size {cfg.batch_size}: of {n} images; try {n}")
    steps = cfg.steps(n)
    path = cfg.result.with_suffix(".pt")
    identity = {name: value for name, value in vars(cfg).items() if name not in cfg.may_change}
    identity |= origin
    start, losses, broken = resume(path, identity, model, optimizer)
    # That of the encoder, by which other scripts know it: its seed, its layer of L_equiv.
    config = ser.load_checkpoint(cfg.checkpoint)["config"]
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    model.train()
    loader = loader_of(images, cfg, start, steps)
    bar = tqdm(loader, cfg.title, steps, initial=start, disable=rank > 0, mininterval=1)
    total = 0.0
    begun = start
    for step, batch in enumerate(bar, start):
        # All draws of a step come from the step alone, so that a resumed run repeats them.
        torch.manual_seed(seed_of(cfg.seed, cfg.name, step, rank))
        loss, unreadable = loss_of(parallel, batch)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr_at(step, n) * group.get("scale", 1.0)
        optimizer.step()
        total = total + loss.detach()
        broken |= unreadable
        done = step + 1
        if done % cfg.save_steps(n) == 0 or done == steps:
            if ranks > 1:
                dist.all_reduce(total)
            losses.append(total.item() / ranks / (done - begun))
            broken = union(broken)
            check_progress(done, losses[-1], broken, n)
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            total = 0.0
            begun = done
            if rank == 0:
                ser.save_whole(path, dict(
                    step=done, program=cfg.program, shape=shape, identity=identity,
                    config=config, images=str(n),     # a text, as ser.load_checkpoint asks
                    model=model.state_dict(), optimizer=optimizer.state_dict(), losses=losses,
                    broken=sorted(broken)))
    return losses, broken

def finish(cfg: Any, digest: str, images: dict[str, int], found: dict[str, Any],
           broken: set[str], begun: float) -> dict[str, Any]:
    """The result of a run, which rank 0 writes to cfg.result. begun: time.perf_counter() at the
    start of this call; the minutes are of the last part of an interrupted run."""
    ranks, rank = ranks_and_rank()
    result = dict(
        program=cfg.program, command=" ".join(sys.argv), checkpoint=cfg.checkpoint, sha256=digest,
        encoder="untrained" if cfg.random_init else "trained", data=cfg.data or "drawn images",
        images=images, settings=vars(cfg), **found, broken=sorted(broken), ranks=ranks,
        torch=torch.__version__, minutes=(time.perf_counter() - begun) / 60)
    if rank == 0:
        write_json(cfg.result, result)
    return result

def table(result: dict[str, Any], title: str, columns: tuple[str, ...], decimals: int,
          paper: dict[str, tuple[float, ...]], note: str) -> str:
    """The result beside the paper's rows, for the screen. note: what became of broken files."""
    rows = {f"here: {title}": tuple(result[column] for column in columns)}
    rows |= {f"paper: {name}": values for name, values in paper.items()}
    lines = [f"  {'':44}" + "".join(f"{column:>8}" for column in columns)]
    for name, values in rows.items():
        lines.append(f"  {name:44}" + "".join(f"{value:8.{decimals}f}" for value in values))
    lines += [f"  cannot read {name}: {note}" for name in result["broken"]]
    return "\n".join(lines)

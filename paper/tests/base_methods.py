"""What the tests of the base methods share: toy models and batches, two ranks, and runs from the
command line. A `script` is one of paper/methods; `small` are settings that make it tiny."""
import dataclasses
import math
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

import eval_linear
import ser
from test_ser import TOY, close, flags, records, run_ranks, same_run, seeded, shake

SMALL = {name: value for name, value in TOY.items() if name != "moco_hidden"}

# ==== Toy models and batches ======================================================================
def toy(script, small, **changes):
    """(settings, model) of a script, small, with random weights."""
    cfg = script.Settings(**small | {"out": ""} | changes)
    return cfg, shake(script.build(cfg))

def toy_batch(cfg, step=0, rank=0, ranks=1):
    """A rank's part of a batch of random images, made as a run makes it."""
    shape = (cfg.batch_size, 3, 2 * cfg.image_size, 2 * cfg.image_size)
    images = torch.randint(256, shape, generator=seeded(step), dtype=torch.uint8)
    rows = list(range(cfg.batch_size))
    keys = ser.partition(rows, step, cfg.b2_images(ranks), rank, ranks)
    data = cfg.dataset(images)
    loaded, _ = default_collate([data[key] for key in keys])
    return ser.make_views(loaded, cfg, step, rank, ranks)

def encoded_cls(encoder, view):
    """[CLS] of b1 and b2 of a view, each encoded by itself."""
    return torch.cat([encoder([images])[0].cls for images in view.images])

def rates(cfg, model, epoch):
    """(learning rates, weight decays) of the optimizer's groups after before_step."""
    optimizer = cfg.optimizer(model)
    cfg.before_step(optimizer, epoch)
    lrs = [group["lr"] for group in optimizer.param_groups]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return lrs, decays

# ==== Checks that each script has to pass =========================================================
def check_gradients(script, small, untrained):
    """The loss reaches every parameter but those whose names begin with a word of `untrained`."""
    cfg, model = toy(script, small)
    model(toy_batch(cfg))["loss"].backward()
    for name, p in model.named_parameters():
        wanted = not name.startswith(tuple(f"base.{word}" for word in untrained))
        assert p.requires_grad == wanted, name
        assert (p.grad is not None and p.grad.abs().sum() > 0) == wanted, name

def check_weight_and_ratio(script, small):
    """Eq. 3: loss = L_inv + lambda * L_equiv; with lambda 0, L_equiv is still measured; with ratio
    0 there is no b2, and the encoder sees every image in its usual crops."""
    for weight in (0.7, 0.0):
        cfg, model = toy(script, small, weight=weight)
        losses = model(toy_batch(cfg))
        assert losses["equiv"] > 0
        close(losses["loss"], losses["inv"] + weight * losses["equiv"])
    cfg, model = toy(script, small, ratio=0.0, cls_layer=0)
    batch = toy_batch(cfg)
    losses = model(batch)
    assert len(model.heads) == 0 and "equiv" not in losses
    assert torch.equal(losses["loss"], losses["inv"])
    for view, policy in zip(batch.views, cfg.policies):
        assert [x.shape for x in view.images] == [(cfg.batch_size, 3, policy.size, policy.size)]

def without_batch_norm(script, small):
    """A model without BatchNorm, whose statistics are a rank's own on gloo, and without draws."""
    changes = {"batch_size": 16}
    if "drop_path" in script.Settings.__dataclass_fields__:
        changes["drop_path"] = 0.0
    cfg, model = toy(script, small, **changes)
    for head in [module for module in model.modules() if isinstance(module, nn.Sequential)]:
        for i, module in enumerate(head):
            if isinstance(module, nn.BatchNorm1d):
                head[i] = nn.Identity()
    return cfg, model

def one_step(script, small, rank=0, ranks=1):
    """The loss, gradients and buffers of a rank after a step on its part of a batch."""
    cfg, model = without_batch_norm(script, small)
    parallel = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    loss = parallel(toy_batch(cfg, 0, rank, ranks))["loss"]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), "gradients": gradients, "buffers": dict(model.named_buffers()),
            "inv_chance": model.base.diagnostics["inv_chance"]}

def save_one_step(script, small, rank, ranks, folder):
    """What a process of check_ranks does; each test file has a `rank_main` that calls it."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.save(one_step(script, small, rank, ranks), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally, all work done

def check_ranks(script, small, rank_main, folder):
    """Two ranks are one process: the mean of their losses, DDP's gradients, and the buffers."""
    run_ranks(rank_main, 2, folder)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    one = one_step(script, small)
    close((found[0]["loss"] + found[1]["loss"]) / 2, one["loss"])
    for rank in found:
        assert rank["inv_chance"] == pytest.approx(one["inv_chance"])
        for name, wanted in one["buffers"].items():
            close(rank["buffers"][name], wanted)
        for name, wanted in one["gradients"].items():
            error = (rank["gradients"][name] - wanted).abs().max()
            assert error < 1e-4 * wanted.abs().max(), name

# ==== Runs from the command line ==================================================================
def whole_run(script, small, out):
    """Train a script on drawn images from its command line, six steps of 64; returns its
    settings."""
    six_steps = 6 * 64 / 4096
    settings = small | dict(batch_size=64, ratio=1 / 16, epochs=six_steps, out=out)
    assert ser.main(flags(**settings), script.Settings, script.build) == 0
    return settings

class Late(list):
    """Signals seen so far: none for three looks, then a SIGTERM."""
    looks = 0

    def __len__(self):
        self.looks += 1
        return int(self.looks > 3)

    def __getitem__(self, index):
        return 15

def check_resume(script, settings, tmp_path):
    """A run stopped in its middle goes on to the weights, optimizer and buffers of the
    uninterrupted one, to the last bit, whatever it draws; every step is logged."""
    argv = flags(**settings | {"out": tmp_path})
    cfg = ser.parse(argv, script.Settings)
    with pytest.raises(SystemExit):
        ser.train(cfg, script.build, Late())
    assert 0 < ser.load_checkpoint(tmp_path / "last.pt")["step"] < 6
    assert ser.main(argv, script.Settings, script.build) == 0
    assert same_run(tmp_path, settings["out"])
    rows = [row for row in records(settings["out"]) if "step" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(row["loss"]) for row in rows)
    names = {"loss", "inv", "inv_chance", "equiv", "patch_top1", "grad_encoder", "grad_equiv", "lr"}
    assert names <= set(rows[0])

def check_evaluates(settings, tmp_path, capsys):
    """eval_linear.py reads the encoder as it reads ser.py's own, knowing nothing of the method; an
    eighth of the drawn images shows it."""
    path = Path(settings["out"], "last.pt")
    argv = ["--checkpoint", str(path), "--knn", "--out", str(tmp_path / "eval.json")]
    draw = ser.draw_images
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ser, "draw_images", lambda n, size, seed: draw(n // 8, size, seed))
        assert eval_linear.main(argv) == 0
    assert "20-NN" in capsys.readouterr().out
    encoder = ser.load_encoder(path)
    assert all(type(block) is ser.Block for block in encoder.blocks)

def check_bad_flag(script, small, change, words, tmp_path, capsys):
    """Bad input: one line that names program and value, exit code 2, and nothing is trained."""
    out = tmp_path / "o"
    argv = flags(**small | {"out": out} | change)
    assert ser.main(argv, script.Settings, script.build) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and error.startswith(f"{script.Settings.program}: ") and words in error
    assert not (out / "last.pt").exists()

def check_other_program(script, settings, monkeypatch, capsys):
    """A run is not continued by a program of another name; its checkpoint stays as it is."""
    path = Path(settings["out"], "last.pt")
    before = path.read_bytes()
    program = script.Settings.program
    monkeypatch.setattr(script.Settings, "program", "mine.py")
    assert ser.main(flags(**settings), script.Settings, script.build) == 2
    assert f"program {program} there, mine.py here" in capsys.readouterr().err
    assert path.read_bytes() == before

def check_module(script, monkeypatch, capsys):
    """`python -m paper.methods.NAME --help` prints the header and every flag, and ends with 0."""
    codes = []
    monkeypatch.setattr(ser, "leave", codes.append)
    monkeypatch.setattr(sys, "argv", [script.__file__, "--help"])
    with pytest.warns(RuntimeWarning, match="found in sys.modules"):     # imported already
        runpy.run_module(script.__name__, run_name="__main__", alter_sys=True)
    assert codes == [0]
    said = capsys.readouterr().out
    assert script.__doc__.strip() in said
    for field in dataclasses.fields(script.Settings):
        assert "--" + field.name.replace("_", "-") in said

def check_header(script):
    """A script begins with its commands: on drawn images, on data, the control, the method alone
    (each of the last two as what follows '...'), and the evaluation of the second."""
    header = script.__doc__
    program = script.Settings.program
    commands = re.findall(rf"{program}((?: --[\w-]+(?: [\w./]+)+)*)", header)
    continued = re.findall(r"\.\.\.((?: --[\w-]+ [\w./-]+)+)", header)
    assert len(commands) == 2 and len(continued) == 2
    drawn = ser.parse(commands[0].split(), script.Settings)
    data, control, alone = (ser.parse((commands[1] + more).split(), script.Settings)
                            for more in ("", *continued))
    assert drawn.image_size == 32 and data.image_size == 224
    assert (data.ratio, data.weight > 0) == (0.01, True)
    assert control == dataclasses.replace(data, weight=0.0, out=control.out)
    assert alone == dataclasses.replace(data, ratio=0.0, cls_layer=0, out=alone.out)
    assert len({data.out, control.out, alone.out}) == 3
    assert f"--checkpoint {data.out}/last.pt" in header

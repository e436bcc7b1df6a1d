"""What all methods of paper/methods share: toys, oracles of their layers, commands, ranks."""
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ser
from paper.methods import augself, barlow_twins, dino, equimod, essl, multicrop, simclr, stl
from test_ser import close, log_of, pixels, run_ranks, same, shake, trained

SCRIPTS = dict(dino=dino, barlow_twins=barlow_twins, multicrop=multicrop, simclr=simclr,
               augself=augself, equimod=equimod, stl=stl, essl=essl)
ADDONS = ["augself", "equimod", "stl", "essl"]

FLAGS = dict.fromkeys(SCRIPTS, "--image-size 16 --dim 16 --moco-hidden 32 --batch-size 12 ")
for base in SCRIPTS.keys() - ADDONS:
    FLAGS[base] += "--depth 3 --cls-layer 1 --equiv-layers 1 --ratio 0.33 "
FLAGS["dino"] += "--hidden 24 --outputs 20 --drop-path 0 --freeze-epochs 0.5 "
FLAGS["barlow_twins"] += "--hidden 24 "
FLAGS["multicrop"] += "--local-size 8 "
FLAGS["essl"] += "--local-size 8 "


def recipe(name):
    """What ser.train is given: build, data set, optimizer, schedule; of a script, or ser.py's."""
    script = SCRIPTS[name]
    images = "six_views" if name == "multicrop" else "dataset"
    return [script.build, getattr(script, images, ser.two_views),
            getattr(script, "optimizer", ser.adamw),
            getattr(script, "schedule", ser.set_learning_rate)]


def settings(name, flags=""):
    return SCRIPTS[name].settings((FLAGS[name] + flags).split())


def toy(name, flags=""):
    args = settings(name, flags)
    return args, shake(SCRIPTS[name].build(args))


def toy_views(name, args):
    _, dataset, *_ = recipe(name)
    data = dataset(pixels(99, 3, 24, 18), args)
    loaded, = DataLoader(data, batch_sampler=ser.batch_items(99, args, 0, 1))
    return ser.make_views(loaded, args, step=0)


def layers(network):
    return " ".join(f"{type(layer).__name__}:{len([*layer.parameters()])}" for layer in network)


def slow_info_nce(a, b, temperature):
    """2 T times the cross-entropy of the own row among all of b."""
    logits = F.normalize(a) @ F.normalize(b).T / temperature
    return 2 * temperature * F.cross_entropy(logits, torch.arange(len(a)))


def check_gradients(fast, slow, features):
    """A loss has the value of its oracle, and the gradients for the features of each view."""
    close({"loss": fast}, {"loss": slow})
    wanted = torch.autograd.grad(slow, features)
    close(torch.autograd.grad(fast, features), wanted, 1e-4)
    assert all(gradient.abs().max() > 1e-5 for gradient in wanted), "a view has no gradient"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_trains_by_the_methods_own_recipe(name, tmp_path, monkeypatch):
    monkeypatch.setattr(ser, "synthetic_images", lambda *_, **__: (pixels(31, 3, 16, 16), None))
    train = ser.train
    given = []
    monkeypatch.setattr(ser, "train", lambda *all_given: given.extend(all_given))
    words = f"{FLAGS[name]} --ratio 0 --cls-layer 0 --epochs 1 --log-every 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    runpy.run_path(SCRIPTS[name].__file__, run_name="__main__")

    train(*given)
    assert [line["step"] for line in log_of(tmp_path)[1:]] == [1, 2]
    ser.load_encoder(tmp_path / "last.pt")
    _, *found = given
    found += [ser.build, ser.two_views, ser.adamw, ser.set_learning_rate][len(found):]
    assert [f.__code__ for f in found] == [f.__code__ for f in recipe(name)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_reach_the_model_and_the_images(name):
    args, model = toy(name, "--weight 0.7 --temperature 0.4 --equiv-layers 2 --seed 5")
    assert recipe(name)[1]([], args).seed == 5
    encoder = SCRIPTS[name].build(args).base.encoder
    assert same(encoder.state_dict(), ser.seeded_encoder(args).state_dict())
    assert (model.weight, model.temperature) == (0.7, 0.4)
    assert name in ADDONS or model.layers == [2]


@pytest.mark.parametrize("name", SCRIPTS)
def test_all_that_is_trained_gets_a_gradient_and_nothing_else(name):
    """As DDP demands. MoCo-v3's patch embedding stays random."""
    args, model = toy(name)
    model.base.update(0.5)
    model(toy_views(name, args))["loss"].backward()
    frozen = ["teacher", "momentum"]
    if name not in ("dino", "barlow_twins"):
        frozen.append("patch_embed")
    for key, p in model.named_parameters():
        rests = any(word in key for word in frozen)
        assert (p.grad is None) == rests, key
        assert rests or p.grad.ne(0).any(), key


# What departs from ser.py in a run on ImageNet, and besides in one on synthetic images.
DEFAULTS = dict(
    dino=dict(
        out="runs/dino", weight=0.3, temperature=0.5, weight_decay=0.04, base_lr=1e-4,
        crop_min=0.25, final_lr=1e-5, final_weight_decay=0.4, clip=0.3, drop_path=0.1,
        hidden=2048, outputs=65536, first_teacher_temp=0.04, teacher_temp=0.07,
        teacher_temp_epochs=10.0, momentum=0.982, freeze_epochs=1.0),
    barlow_twins=dict(
        out="runs/barlow", weight=0.5, temperature=0.3, base_lr=1e-4, weight_decay=0.1,
        hidden=8192, off_diagonal=0.0051),
    multicrop=dict(out="runs/multicrop", local_size=96, local_area=[0.05, 0.25]),
    simclr=dict(out="runs/simclr"),
    augself=dict(out="runs/augself", weight=0.5),
    equimod=dict(out="runs/equimod", weight=1.0, temperature=0.2),
    stl=dict(out="runs/stl", weight=1.0, temperature=0.2),
    essl=dict(out="runs/essl", weight=1.0, local_size=96, local_area=[0.05, 0.14]))
SMALL = dict(
    dino=dict(hidden=512, outputs=1024, base_lr=1e-3, teacher_temp_epochs=2.0, crop_min=0.3),
    barlow_twins=dict(hidden=512, base_lr=1e-3, off_diagonal=0.02),
    multicrop=dict(local_size=16, local_area=[0.1, 0.4], epochs=4.0),
    essl=dict(local_size=16, local_area=[0.1, 0.3]))
for addon in ADDONS:
    DEFAULTS[addon] |= dict(ratio=0.0, equiv_layers=[], cls_layer=0, layer=12,
                            blur=[1.0, 0.1], solarize=[0.0, 0.2])
    SMALL[addon] = SMALL.get(addon, {}) | dict(layer=4)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("data", ["imagenet", ""])
def test_the_defaults_are_those_of_the_paper_the_release_and_the_method(name, data):
    wanted = DEFAULTS[name]
    if not data and name in SMALL:
        wanted = wanted | SMALL[name] | dict(out=wanted["out"] + "-small")
    plain = vars(ser.parse(["--data", data]))
    own = vars(SCRIPTS[name].settings(["--data", data]))
    departs = [key for key in own if key in wanted or own[key] != plain[key]]
    assert {key: own[key] for key in departs} == wanted


def rank_main(rank, ranks, out):
    """method -> gradients after the clip, and buffers, of a step on this rank's images."""
    if ranks > 1:
        ser.setup()
    found = {}
    for name in SCRIPTS:
        _, _, make_optimizer, schedule = recipe(name)
        args, model = toy(name)
        optimizer = make_optimizer(model, args)
        schedule(optimizer, args, 1.0)
        model.base.update(0.5)

        model.eval()     # on gloo each rank has a BatchNorm mean of its own
        parallel = DistributedDataParallel(model) if ranks > 1 else model
        parallel(toy_views(name, args))["loss"].backward()
        optimizer.step()

        found[name] = dict(model.named_buffers())
        for key, p in trained(model).items():
            found[name][key] = p.grad
    return found


def test_two_ranks_equal_one_process(tmp_path):
    one = rank_main(0, 1, tmp_path)
    for found in run_ranks(rank_main, 2, tmp_path):
        for name, tensors in one.items():
            for key, wanted in tensors.items():
                gap = (found[name][key] - wanted).float().norm()
                assert gap < 1e-4 * wanted.float().norm() + 1e-6, f"{name}: {key}"

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
from test_ser import close, log_of, pixels, run_ranks, shake, trained

SCRIPTS = dict(dino=dino, barlow_twins=barlow_twins, multicrop=multicrop, simclr=simclr,
               augself=augself, equimod=equimod, stl=stl, essl=essl)
ADDONS = ["augself", "equimod", "stl", "essl"]
BASES = ["dino", "barlow_twins", "multicrop", "simclr"]

FLAGS = dict.fromkeys(SCRIPTS, "--image-size 16 --dim 16 --moco-hidden 32 --batch-size 12 ")
for base in BASES:
    FLAGS[base] += "--depth 3 --cls-layer 1 --equiv-layers 1 --ratio 0.33 "
FLAGS["dino"] += "--hidden 24 --outputs 20 --drop-path 0 --freeze-epochs 0.5 "
FLAGS["barlow_twins"] += "--hidden 24 "
FLAGS["multicrop"] += "--local-size 8 "
FLAGS["essl"] += "--local-size 8 "

# What ser.train is given: build, data set, optimizer, schedule.
PLAIN = [ser.adamw, ser.set_learning_rate]
RECIPES = dict(
    dino=[dino.build, ser.two_views, dino.optimizer, dino.schedule],
    barlow_twins=[barlow_twins.build, ser.two_views, barlow_twins.optimizer,
                  barlow_twins.schedule],
    multicrop=[multicrop.build, multicrop.six_views, *PLAIN],
    simclr=[simclr.build, ser.two_views, *PLAIN])
for addon in ADDONS:
    RECIPES[addon] = [SCRIPTS[addon].build, SCRIPTS[addon].dataset, *PLAIN]


def settings(name, flags=""):
    """The settings of a small model of a method."""
    words = FLAGS[name] + flags
    return SCRIPTS[name].settings(words.split())


def toy(name, flags=""):
    """(settings, small model with random weights) of a method."""
    args = settings(name, flags)
    return args, shake(SCRIPTS[name].build(args))


def load(data, args):
    """The first batch of a data set, by a DataLoader."""
    keys = ser.batch_items(len(data.source), args, 0, 1)
    return next(iter(DataLoader(data, batch_sampler=keys)))


def toy_views(name, args):
    """The views of 12 images of noise, as a run of the method makes them."""
    _, dataset, *_ = RECIPES[name]
    loaded = load(dataset(pixels(31, 3, 24, 18), args), args)
    return ser.make_views(loaded, args, step=0)


def slow_layers(network, words, x):
    """The layers that words name, one after the other, with the weights of a network."""
    for layer, word in zip(network, words.split(), strict=True):
        if word == "linear":
            assert layer.bias is None
            x = x @ layer.weight.T
        elif word == "biased":
            x = x @ layer.weight.T + layer.bias
        elif word == "relu":
            x = x.clamp(min=0)
        elif word == "gelu":
            x = F.gelu(x)
        else:
            dim = 1 if word == "layernorm" else 0     # over features, or over images
            x = x - x.mean(dim, keepdim=True)
            variance = x.square().mean(dim, keepdim=True)
            x = x / (variance + 1e-5).sqrt()
            if word != "standardise":
                x = x * layer.weight + layer.bias
    return x


def slow_info_nce(a, b, temperature):
    """Row by row: 2 T times the mean of -log softmax of the own row among all of b."""
    total = 0.0
    for i in range(len(a)):
        s = F.cosine_similarity(a[i][None], b) / temperature
        total = total - 2 * temperature * s.log_softmax(0)[i] / len(a)
    return total


def check_gradients(fast, slow, features):
    """A loss has the value of its oracle, and the gradients for the features of each view."""
    close({"loss": fast}, {"loss": slow})
    found = torch.autograd.grad(fast, features)
    wanted = torch.autograd.grad(slow, features)
    for gradient in wanted:
        assert gradient.abs().max() > 1e-5, "a view has no gradient"
    close(found, wanted, 1e-4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_trains_by_the_methods_own_recipe(name, tmp_path, monkeypatch):
    """Two steps on 31 synthetic images, without b2; the checkpoint has the encoder."""
    images = ser.synthetic_images(31, 16, seed=0)
    monkeypatch.setattr(ser, "synthetic_images", lambda n, size, seed: images)
    train = ser.train
    given = []

    def watched(args, *recipe):
        given.extend(recipe)
        return train(args, *recipe)

    monkeypatch.setattr(ser, "train", watched)
    words = FLAGS[name] + f"--ratio 0 --cls-layer 0 --epochs 1 --log-every 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [name] + words.split())
    runpy.run_path(SCRIPTS[name].__file__, run_name="__main__")

    given += [ser.build, ser.two_views, *PLAIN][len(given):]     # the defaults of ser.train
    wanted = [function.__code__ for function in RECIPES[name]]
    assert [function.__code__ for function in given] == wanted
    assert [line["step"] for line in log_of(tmp_path)[1:]] == [1, 2]
    ser.load_encoder(tmp_path / "last.pt")


@pytest.mark.parametrize("name", SCRIPTS)
def test_settings_reach_the_model_and_the_images(name):
    args, model = toy(name, "--weight 0.7 --temperature 0.4 --equiv-layers 2 --seed 5")
    _, dataset, *_ = RECIPES[name]
    assert (model.weight, model.temperature) == (0.7, 0.4)
    assert dataset([], args).seed == 5
    if name in BASES:
        assert model.layers == [2]


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
for addon in ADDONS:
    DEFAULTS[addon] |= dict(ratio=0.0, equiv_layers=[], cls_layer=0, layer=12,
                            blur=[1.0, 0.1], solarize=[0.0, 0.2])
SMALL = dict(
    dino=dict(hidden=512, outputs=1024, base_lr=1e-3, teacher_temp_epochs=2.0, crop_min=0.3),
    barlow_twins=dict(hidden=512, base_lr=1e-3, off_diagonal=0.02),
    multicrop=dict(local_size=16, local_area=[0.1, 0.4], epochs=4.0),
    augself=dict(layer=4),
    equimod=dict(layer=4),
    stl=dict(layer=4),
    essl=dict(layer=4, local_size=16, local_area=[0.1, 0.3]))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("data", ["imagenet", ""])
def test_the_defaults_are_those_of_the_paper_the_release_and_the_method(name, data):
    wanted = DEFAULTS[name]
    if not data and name in SMALL:
        wanted = wanted | SMALL[name] | dict(out=wanted["out"] + "-small")
    plain = vars(ser.parse(["--data", data]))
    found = {}
    for key, value in vars(SCRIPTS[name].settings(["--data", data])).items():
        if key in wanted or value != plain[key]:
            found[key] = value
    assert found == wanted


def rank_main(rank, ranks, out):
    """Losses, gradients after the clip, and buffers, of a step on this rank's images."""
    if ranks > 1:
        ser.setup()
    found = {}
    for name, (_, _, make_optimizer, schedule) in RECIPES.items():
        args, model = toy(name)
        views = toy_views(name, args)
        optimizer = make_optimizer(model, args)
        schedule(optimizer, args, 1.0)
        model.base.update(0.5)

        model.eval()     # on gloo each rank has a BatchNorm mean of its own
        parallel = DistributedDataParallel(model) if ranks > 1 else model
        losses = parallel(views)
        losses["loss"].backward()
        optimizer.step()

        tensors = {key: p.grad for key, p in trained(model).items()}
        for key, buffer in model.named_buffers():
            tensors[key] = buffer.float()
        losses = {key: value.detach() for key, value in losses.items()}
        found[name] = losses, tensors
    return found


def test_two_ranks_equal_one_process(tmp_path):
    """In the mean of the losses, and in gradients and buffers of each rank."""
    one = rank_main(0, 1, tmp_path)
    first, second = run_ranks(rank_main, 2, tmp_path)
    for name, (losses, tensors) in one.items():
        losses1, tensors1 = first[name]
        losses2, tensors2 = second[name]
        for key, wanted in losses.items():
            mean = (losses1[key] + losses2[key]) / 2
            close({f"{name} {key}": mean}, {f"{name} {key}": wanted})
        for key, wanted in tensors.items():
            assert torch.equal(tensors1[key], tensors2[key]), f"{name}: {key} of the ranks"
            gap = tensors1[key] - wanted
            assert gap.norm() < 1e-3 * wanted.norm() + 1e-5, f"{name}: {key}"

"""STL: pairs that share a transformation, and the two losses."""
import torch

import ser
from paper.methods import stl
from paper.tests.test_methods import (
    check_gradients, load, settings, slow_info_nce, slow_layers, toy)
from test_ser import noise, sentence


def ramp(h, w):
    """An image whose red tells the row and whose green tells the column, from 0 to 255."""
    image = torch.zeros(3, h, w, dtype=torch.uint8)
    image[0] = torch.linspace(0, 255, h)[:, None]
    image[1] = torch.linspace(0, 255, w)
    return image


def test_images_of_a_pair_share_crop_jitter_and_gray_alone():
    """Through the loader, for images of different shapes, in shares of their sides."""
    args = settings("stl", "--image-size 64 --batch-size 40 --solarize 0.5 0.5 --blur 1 1")
    source = [ramp(90, 60), ramp(50, 128)] * 30
    batch = load(stl.dataset(source, args), args)
    own = ("flip", "blur", "solarize")
    for pixels, made in batch:
        for name, value in made._asdict().items():
            alike = torch.equal(value[0::2], value[1::2])
            assert alike == (name not in own), name
        assert len(made.contrast.unique()) > 10

        corner = pixels.float().amin((2, 3)) / 255
        assert (corner[:, 0] - made.top).abs().max() < 0.04, "rows"
        assert (corner[:, 1] - made.left).abs().max() < 0.04, "columns"
        mirrored = pixels[:, 1, 0, 0] > pixels[:, 1, 0, -1]
        assert torch.equal(mirrored, made.flip), "flips"


def test_pairs_change_with_the_epoch_and_an_image_keeps_its_own_flip():
    """What is an image's own is that of ser.py's T, with the key of the image."""
    args = settings("stl", "--image-size 32 --blur 1 1 --solarize 0.5 0.5")
    data = stl.dataset([ramp(32, 32)] * 4, args)
    crops = set()
    for epoch in (0, 1):
        keys = [(epoch, index, False) for index in (2, 0, 3, 1)]
        for key, views in zip(keys, data.__getitems__(keys)):
            for (_, aug), (_, alone) in zip(views, data[key]):
                for name in ("flip", "blur", "solarize"):
                    assert getattr(aug, name) == getattr(alone, name), name
                crops.add(aug[:4])
    assert len(crops) == 2 * 2 * 2     # of each epoch, pair and view


def test_the_losses_equal_slow_loops():
    """Image by image: W(t) of what is read from the partner; keys detached."""
    _, model = toy("stl", "--temperature 0.4")
    heads = model.heads
    f1, f2 = list(noise(2, 4, 16).requires_grad_())

    def head(name, x):
        return slow_layers(heads[name], "linear batchnorm relu linear", x)

    def both_ways(a, b):
        forth = slow_info_nce(a, b.detach(), 0.4)
        back = slow_info_nce(b, a.detach(), 0.4)
        return forth + back

    t12 = head("read", torch.cat([f1, f2], dim=1))
    t21 = head("read", torch.cat([f2, f1], dim=1))
    z_moved = []
    for f, codes in ((f2, t21), (f1, t12)):
        moved = []
        for i, partner in enumerate((1, 0, 3, 2)):
            matrix = (heads["hyper"].weight @ codes[partner]).view(16, 16)
            moved.append(matrix @ f[i])
        z_moved.append(head("embed", torch.stack(moved)))
    z = torch.cat([head("embed", f1), head("embed", f2)])

    codes = torch.cat([t12, t21])
    u_even = head("embed_code", codes[0::2])
    u_odd = head("embed_code", codes[1::2])
    wanted = both_ways(z, torch.cat(z_moved)) + 0.1 * both_ways(u_even, u_odd)
    check_gradients(model.equivariance_loss([f1, f2], []), wanted, [f1, f2])


def test_an_odd_number_of_images_on_a_rank_is_one_sentence(monkeypatch):
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (2, 0))
    assert "--batch-size 10" in sentence(toy, "stl", "--batch-size 10")

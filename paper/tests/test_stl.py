"""STL: pairs that share a transformation, and the two losses."""
import pytest
import torch
from torch.testing import assert_close

import ser
from paper.methods import stl
from paper.tests.test_addon import load, slow_info_nce, toy

def ramp(h, w):
    """An image whose red tells the row and whose green tells the column, from 0 to 255."""
    image = torch.zeros(3, h, w, dtype=torch.uint8)
    image[0] = torch.linspace(0, 255, h)[:, None]
    image[1] = torch.linspace(0, 255, w)
    return image

def test_images_of_a_pair_share_crop_jitter_and_gray_alone():
    """Through the loader, for images of different shapes, in shares of their sides."""
    args, _ = toy("stl", "--image-size 64 --batch-size 40 --solarize 0.5 0.5 --blur 1 1")
    source = [ramp(90, 60), ramp(50, 128)] * 30
    batch = load(stl.dataset(source, args), args)
    own = ("flip", "blur", "solarize")
    for pixels, made in batch:
        for name, value in made._asdict().items():
            assert torch.equal(value[0::2], value[1::2]) == (name not in own), name
        assert len(made.contrast.unique()) > 10
        corner = pixels.float().amin((2, 3)) / 255
        top = corner[:, 0]
        left = corner[:, 1]
        assert (top - made.top).abs().max() < 0.04
        assert (left - made.left).abs().max() < 0.04
        mirrored = pixels[:, 1, 0, 0] > pixels[:, 1, 0, -1]
        assert torch.equal(mirrored, made.flip)

def test_the_losses_equal_slow_loops():
    """Image by image: W(t) of the transformation that is read from the partner; keys detached."""
    _, model = toy("stl", "--temperature 0.4")
    model.eval()     # so that a row can be told alone
    f = torch.randn(2, 4, 16, requires_grad=True)
    f1, f2 = f
    heads = model.heads
    t12 = heads["read"](torch.cat([f1, f2], dim=1))
    t21 = heads["read"](torch.cat([f2, f1], dim=1))
    moved = []
    for f, codes in ((f2, t21), (f1, t12)):
        for i, partner in enumerate((1, 0, 3, 2)):
            matrix = heads["hyper"](codes[partner]).view(16, 16)
            moved.append(matrix @ f[i])
    z = heads["embed"](torch.cat([f1, f2]))
    z_moved = heads["embed"](torch.stack(moved))
    read = torch.cat([t12, t21])
    u = heads["embed_code"](read[0::2])
    v = heads["embed_code"](read[1::2])
    moving = slow_info_nce(z, z_moved.detach(), 0.4) + slow_info_nce(z_moved, z.detach(), 0.4)
    reading = slow_info_nce(u, v.detach(), 0.4) + slow_info_nce(v, u.detach(), 0.4)
    wanted = moving + 0.1 * reading
    loss = model.equivariance_loss([f1, f2], [])
    assert_close(loss, wanted)
    assert_close(torch.autograd.grad(loss, f), torch.autograd.grad(wanted, f))

def test_an_odd_number_of_images_on_a_rank_is_one_sentence(monkeypatch):
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (2, 0))
    with pytest.raises(SystemExit, match="--batch-size 10"):
        toy("stl", "--batch-size 10")

"""SimCLR, the example of a base method that is plugged in."""
import torch

from paper.methods import simclr
from paper.tests.test_addon import check_defaults, slow_info_nce, slow_norm
from paper.tests.test_dino import SHAPE, toy_views, train
from test_ser import close, seeded, shake


def test_the_loss_finds_each_view_among_the_other_views_of_all_images():
    """Both ways at temperature .1, with the layers written out; nothing is detached."""
    args = simclr.settings(SHAPE)
    model = shake(simclr.build(args))
    base = model.base
    cls = torch.randn(2, 12, 16, generator=seeded()).requires_grad_()
    linear1, norm, _, linear2, _ = base.head
    z = []
    for x in cls:
        hidden = slow_norm(x @ linear1.weight.T, norm).clamp(min=0)
        z.append(slow_norm(hidden @ linear2.weight.T))
    wanted = slow_info_nce(z[0], z[1], 0.1) + slow_info_nce(z[1], z[0], 0.1)
    found = base([], list(cls))
    close({"loss": found}, {"loss": wanted})
    close(torch.autograd.grad(found, cls), torch.autograd.grad(wanted, cls), 1e-4)

    losses = model(toy_views(args))
    close(losses["loss"].detach(), losses["inv"] + 0.5 * losses["equiv"])
    losses["loss"].backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name


def test_it_trains_from_the_command_line_with_the_flags_of_ser(tmp_path, monkeypatch):
    check_defaults(simclr, dict(out="runs/simclr"))
    log, _ = train(simclr, SHAPE, tmp_path, monkeypatch)
    assert log[0]["method"] == "SER on SimCLR"

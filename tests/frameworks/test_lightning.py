"""A Lightning Trainer with GossamerStrategy beside DDPStrategy, on two ranks that Lightning itself starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.two_ranks import distance, run, trained

pytest.importorskip("lightning")

pytestmark = pytest.mark.nightly  # processes that import lightning
SCRIPT = """
import os, sys, warnings
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from gossamer.frameworks.lightning import GossamerStrategy

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
(which, _, how), accumulate, out = sys.argv[1].partition("-"), int(sys.argv[2]), sys.argv[3]


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))  # all start from rank 0's values
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.automatic_optimization = how != "manual"
        self.seen = []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        if how == "manual":
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validation", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def on_train_batch_end(self, *given):
        self.seen.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        if how == "manual":
            return [torch.optim.SGD(self.net[n].parameters(), lr=0.1) for n in (0, 2)]
        if how == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


draw = torch.Generator().manual_seed(1)
labels = torch.randint(4, (64,), generator=draw)
labels[torch.rand(64, generator=draw) < 0.4] = -100  # so ranks count other numbers of labels
data = TensorDataset(torch.randn(64, 8, generator=draw), labels)
devices = 1 if which == "whole" else 2
loader = DataLoader(data, batch_size=8 // devices, shuffle=False)
strategy = {
    "ddp": lambda: "ddp",
    "whole": GossamerStrategy,
    "dense": GossamerStrategy,
    "read": lambda: GossamerStrategy(loss="read"),
    "lossy": lambda: GossamerStrategy(exchange={"error_feedback": {"two_shot": "int8"}}),
}[which]


def trainer(epochs, **given):
    return lightning.Trainer(
        strategy=strategy(), devices=devices, accelerator="cpu", max_epochs=epochs, logger=False, deterministic=True,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate,
        default_root_dir=out + "-", gradient_clip_val=None if how in ("manual", "lbfgs") else 0.1,
        sync_batchnorm=how == "synced",
        **{"enable_checkpointing": False, **given},
    )


if __name__ == "__main__":
    net = Net()
    if how == "resumed":
        first = trainer(1, enable_checkpointing=True)
        first.fit(net, loader)
        path = first.checkpoint_callback.best_model_path
        net = Net()
        one = trainer(2)
        one.fit(net, loader, ckpt_path=path)
    else:
        one = trainer(2)
        one.fit(net, loader, None if how else loader)
    if one.is_global_zero:  # after fit a backward pass is this rank's own: it waits for nobody
        kept = {name: p.detach().clone() for name, p in net.named_parameters()}
        net.net(data[0][0]).sum().backward()
        torch.save({**kept, "losses": torch.tensor(net.seen)}, out)
"""


@pytest.mark.parametrize("accumulate", ["1", "2", "3"])
def test_it_equals_lightnings_ddp(tmp_path: Path, accumulate: str) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, which, accumulate, launcher=False) for which in ("dense", "ddp"))
    assert distance(ours, theirs) <= 1e-6


@pytest.mark.parametrize("how", ["manual", "lbfgs"])
def test_other_loops_equal_lightnings_ddp(tmp_path: Path, how: str) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, f"{which}-{how}", "1", launcher=False) for which in ("dense", "ddp"))
    assert distance(ours, theirs) <= 1e-6


def test_a_loss_that_is_read_equals_one_process_and_ddp_does_not(tmp_path: Path) -> None:
    alone, ours, theirs = (trained(SCRIPT, tmp_path, one, "1", launcher=False) for one in ("whole", "read", "ddp"))
    for one in (alone, ours, theirs):
        one.pop("losses")  # Lightning's own mean over ranks
    assert distance(ours, alone) <= 1e-6 < 1e-4 < distance(theirs, alone)


def test_another_exchange_than_an_all_reduce_is_at_work(tmp_path: Path) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, which, "1", launcher=False) for which in ("lossy", "ddp"))
    assert 1e-6 < distance(ours, theirs) < 0.05


def test_a_resumed_training_equals_one_of_ddp_that_is_resumed(tmp_path: Path) -> None:
    ours, theirs = (trained(SCRIPT, tmp_path, f"{which}-resumed", "1", launcher=False) for which in ("dense", "ddp"))
    assert distance(ours, theirs) <= 1e-6


def test_synchronized_batch_norm_of_lightning_is_refused_with_the_setting_in_its_place(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, "dense-synced", "1", "out", launcher=False)
    assert done.returncode != 0 and "GossamerStrategy(batch_norm='all')" in done.stderr

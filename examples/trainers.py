"""Lightning's Trainer, transformers' Trainer and accelerate, each with a model whose parts lie at other workers: nothing in the
training code knows of it. Every trainer runs twice, with the wrapped model and with the same one in one process, and all losses
must be the same to the bit. ``python -m examples.trainers [lightning] [transformers] [accelerate]``; all three by default.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import rdmarpc as rpc

PLACEMENT = {"body.0": "worker1", "body.1": "worker2"}
BATCH = 16


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Drawn ones: two hundred points around ten centres."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(1)
        self.labels = torch.randint(0, 10, (200,), generator=source)
        centres = torch.randn(10, 32, generator=source)
        self.x = centres[self.labels] + 0.5 * torch.randn(200, 32, generator=source)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[at], "labels": self.labels[at]}


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, width))


class Net(nn.Module):
    """Gives the loss too, as transformers' Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(block(32), block(32)), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def by_lightning(net: nn.Module, folder: str) -> list[float]:
    """Two epochs with clipping, a schedule, evaluation and checkpoints, then one more from the checkpoint."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = self.net(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("value", self.net(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
            return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]

    module = Module()
    kept: Any = None
    for epochs in (2, 3):
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Digits(), BATCH), DataLoader(Digits(), BATCH), ckpt_path=kept)
        kept = trainer.checkpoint_callback.best_model_path
        module.losses.append(float(trainer.callback_metrics["value"]))
    return module.losses


def by_transformers(net: nn.Module, folder: str) -> list[float]:
    """Three epochs with clipping, a schedule with warm-up, evaluation and checkpoints; then the third one again, from one."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        num_train_epochs=3,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=3,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    losses = []
    for resumed in (None, f"{folder}/checkpoint-14"):
        trainer = transformers.Trainer(model=net, args=arguments, train_dataset=Digits(), eval_dataset=Digits())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=resumed)
        losses += [value for entry in trainer.state.log_history for key, value in entry.items() if key in ("loss", "eval_loss")]
    return losses


def by_accelerate(net: nn.Module, folder: str) -> list[float]:
    """Accumulation and clipping, and the state saved and loaded after every epoch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Digits(), BATCH))
    losses = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    return losses


TRAINERS: dict[str, Callable[[nn.Module, str], list[float]]] = {
    "lightning": by_lightning,
    "transformers": by_transformers,
    "accelerate": by_accelerate,
}


def compare(name: str) -> bool:
    """Whether a wrapped model trains as the same one in one process does."""
    torch.manual_seed(0)
    alone = Net()
    model = rpc.wrap(copy.deepcopy(alone), PLACEMENT)
    losses = []
    for net in (model, alone):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            losses.append(TRAINERS[name](net, folder))
    same = losses[0] == losses[1] and all(
        torch.equal(value, model.state_dict()[key].cpu()) for key, value in alone.state_dict().items()
    )
    print(f"{name}: loss {losses[0][0]:.3f} to {losses[0][-1]:.3f}, as in one process: {same}")
    model.close()
    return same


def worker(rank: int, meeting: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    same = [compare(name) for name in names] if rank == 0 else []
    rpc.shutdown()
    sys.exit(not all(same))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(worker, (place, sys.argv[1:] or list(TRAINERS)), nprocs=3)

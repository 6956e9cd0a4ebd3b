"""Lightning's Trainer, transformers' Trainer and accelerate, each with a wrapped model and with a served one."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .loop_nets import AdamW, Net, Seen, data
from .sides import Alone
from .training_loops import Loop

BATCHES = 5


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.x, self.y = data(7, 8 * BATCHES)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[at], "labels": self.y[at]}


class Lit(lightning.LightningModule):
    """Holds the model, clips nothing, logs the loss."""

    def __init__(self, side: Alone) -> None:
        super().__init__()
        self.net = side.model
        self.__dict__["side"] = side
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch["x"]), batch["labels"])
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("value", F.cross_entropy(self.net(batch["x"]), batch["labels"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.__dict__["side"].optimizer(AdamW, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def by_lightning(side: Alone, **settings: Any) -> Seen:
    module = Lit(side)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(module, DataLoader(Samples(), 8), DataLoader(Samples(), 8))
    yield module.losses
    yield trainer.callback_metrics["value"]


def by_lightning_clipped(side: Alone) -> Seen:
    yield from by_lightning(side, gradient_clip_val=0.1, accumulate_grad_batches=2)


class WithLoss(nn.Module):
    """As transformers' Trainer wants it: the loss comes from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def by_transformers(side: Alone, **settings: Any) -> Seen:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            **settings,
        )
        optimizer = side.optimizer(AdamW, lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        trainer = transformers.Trainer(
            model=side.model, args=arguments, train_dataset=Samples(), eval_dataset=Samples(), optimizers=(optimizer, schedule)
        )
        trainer.log = lambda *a, **k: None
        found = trainer.train()
        yield found.training_loss
        yield trainer.evaluate()["eval_loss"]


def by_transformers_plain(side: Alone) -> Seen:
    yield from by_transformers(side, max_grad_norm=0.0)


def by_accelerate(side: Alone) -> Seen:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = side.optimizer(AdamW, lr=0.01)
    model, optimizer, loader = accelerator.prepare(side.model, optimizer, DataLoader(Samples(), 8))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch["x"]), batch["labels"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()


WITH_LOSS: dict[str, Any] = {"make": WithLoss, "places": {"net.body.0": "worker1", "net.head": "worker2"}}

ENTRIES: dict[str, Loop] = {
    "Lightning": Loop(by_lightning),
    "Lightning, clipping, accumulation": Loop(by_lightning_clipped),
    "transformers' Trainer": Loop(by_transformers_plain, **WITH_LOSS),
    "transformers' Trainer, clipping": Loop(by_transformers, **WITH_LOSS),
    "accelerate": Loop(by_accelerate),
}

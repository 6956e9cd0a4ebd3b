"""A worker's weights and gradients, as they travel to parameter servers (``server``) and back."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from ..harness.libraries import Client


class Vectors:
    """Weights and gradients of a model, as one vector for each server: tensors are dealt out to servers in turn, and the
    parameters and their gradients lie in the vectors. Behind the gradients is the worker's rank."""

    def __init__(self, net: nn.Module, servers: int, rank: int) -> None:
        parameters = list(net.parameters())
        self.weights: list[Tensor] = []
        self.gradients: list[Tensor] = []
        for server in range(servers):
            mine = parameters[server::servers]
            weights = torch.cat([each.detach().reshape(-1) for each in mine])
            gradients = torch.cat([torch.zeros_like(weights), torch.tensor([float(rank)])])
            at = 0
            for each in mine:
                end = at + each.numel()
                each.data, each.grad = weights[at:end].view_as(each), gradients[at:end].view_as(each)
                at = end
            self.weights.append(weights)
            self.gradients.append(gradients)

    def begin(self, client: Client) -> None:
        """Give every server its weights; for one worker, before any ``exchange``."""
        for server, weights in enumerate(self.weights):
            client.finish(client.start("begin_with", weights, None, server))

    def exchange(self, client: Client) -> None:
        """All gradients to the servers, and the weights after everybody's step into the model."""
        calls = [client.start("exchange", each, None, server) for server, each in enumerate(self.gradients)]
        for call, weights in zip(calls, self.weights):
            weights.copy_(client.finish(call).view(-1))

    def spent(self, client: Client) -> list[float]:
        """Milliseconds of each ``exchange`` at the servers, of the slowest of them: waiting for other workers, and the step."""
        asked = [client.start("spent", each[-1:], None, server) for server, each in enumerate(self.gradients)]
        slowest: list[float] = torch.stack([client.finish(call).view(-1) for call in asked]).amax(0).tolist()
        return slowest

    def forget(self) -> None:
        """Zero all gradients; those of embeddings are dense, too."""
        for each in self.gradients:
            each[:-1].zero_()

    def digest(self) -> bytes:
        total = hashlib.sha256()
        for each in self.weights:
            total.update(each.numpy().tobytes())
        return total.digest()

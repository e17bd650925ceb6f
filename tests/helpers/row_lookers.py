# SPDX-License-Identifier: BSD-3-Clause
"""Modules for the MLPs of tiny models whose output for a token depends on its row, or on random numbers.

None is known to any library. Their one trained weight begins with zeros, like LoRA's B: until it is trained they have
no effect, and a check before the first step sees nothing of them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class OfEachToken(nn.Module):
    """(1, rows, D) -> the same, of each token alone: exact on shared prompts; the others change `look`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.look(hidden) @ self.weight

    def look(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()


class WithoutMean(OfEachToken):
    """The row's mean subtracted."""

    def look(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(1, keepdim=True)


class OffsetOfLastToken(OfEachToken):
    """An offset from the last token of the row."""

    def look(self, hidden: Tensor) -> Tensor:
        return hidden + hidden[:, -1:]


class ScaledByLength(OfEachToken):
    """As the row is longer, so is the output."""

    def look(self, hidden: Tensor) -> Tensor:
        return hidden * hidden.shape[1] ** 0.5


class CountsRows(OfEachToken):
    """The index of the row's token, where a position is meant."""

    def look(self, hidden: Tensor) -> Tensor:
        return hidden * torch.arange(hidden.shape[1], device=hidden.device).to(hidden)[:, None].cos()


class SteersFirstToken(OfEachToken):
    """The first token of the row is moved, as interventions at the beginning of a prompt do."""

    def look(self, hidden: Tensor) -> Tensor:
        return torch.cat([8.0 - hidden[:, :1], hidden[:, 1:]], 1)


class Noisy(OfEachToken):
    """In training mode, noise for every token, from a generator that a subclass chooses."""

    def look(self, hidden: Tensor) -> Tensor:
        return hidden + self.draw(hidden) if self.training else hidden

    def draw(self, hidden: Tensor) -> Tensor:
        return torch.randn_like(hidden)


class NoiseOfPython(Noisy):
    def draw(self, hidden: Tensor) -> Tensor:
        return hidden.new_tensor([random.gauss(0.0, 1.0) for _ in range(hidden.shape[1])])[:, None]


class NoiseOfNumpy(Noisy):
    def draw(self, hidden: Tensor) -> Tensor:
        return torch.from_numpy(np.random.standard_normal(hidden.shape)).to(hidden)


class NoiseOfItsOwn(Noisy):
    """From a generator that is not PyTorch's default."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, hidden: Tensor) -> Tensor:
        return torch.randn(hidden.shape, generator=self.generator).to(hidden)


LOOKERS: dict[str, type[OfEachToken]] = {
    "row's mean": WithoutMean,
    "last token": OffsetOfLastToken,
    "row's length": ScaledByLength,
    "row's index": CountsRows,
    "first token": SteersFirstToken,
}
NOISES: dict[str, type[OfEachToken]] = {
    "torch": Noisy,
    "Python": NoiseOfPython,
    "numpy": NoiseOfNumpy,
    "own generator": NoiseOfItsOwn,
}


class _Added(nn.Module):
    def __init__(self, mlp: nn.Module, looker: OfEachToken) -> None:
        super().__init__()
        self.mlp, self.looker = mlp, looker

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden) + self.looker(hidden)


def add_looker(model: Any, looker: type[OfEachToken], layer: int = 0) -> OfEachToken:
    """Add one to the MLP of a layer of a causal LM, in that layer's type and mode."""
    weight = model.get_input_embeddings().weight
    made = looker(weight.shape[1]).to(weight).train(model.training)
    layers = model.get_decoder().layers
    layers[layer].mlp = _Added(layers[layer].mlp, made)
    return made


def train(looker: OfEachToken) -> OfEachToken:
    """Give it the weight of one that has been trained."""
    with torch.no_grad():
        looker.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return looker

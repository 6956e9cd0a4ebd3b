"""A module that a worker allows its peers to use, with what such modules import."""

from __future__ import annotations

import functools
import os
import subprocess  # noqa: F401
from dataclasses import dataclass, field
from os import system  # noqa: F401

import torch
from torch import nn

from rdmarpc.functions import async_execution


def add(left, right=1):
    return left + right


def called_with(function, *args):
    return function(*args)


def fails(text):
    raise Failure(text, 7)


def where():
    return os.getpid()


@functools.lru_cache
def cached(number):
    return number


@async_execution
def later(value):
    done = torch.futures.Future()
    done.set_result(value)
    return done


class Failure(Exception):
    def __init__(self, text, number):
        super().__init__(text, number)
        self.number = number


@dataclass
class Point:
    x: int
    y: list = field(default_factory=list)

    def move(self, by):
        self.x += by
        return self.x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def dictionary():
    return {"a": 1}

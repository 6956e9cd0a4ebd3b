"""Draws a step of a pipeline over three workers with stages on GPUs: ``python -m tests.gpu_timeline docs/timeline_gpu.png``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpu
import torch
import torch.nn.functional as F
from group import results, run_group
from test_wrap import on_driver
from test_wrap_gpu import batches, places
from test_wrap_gpu_streams import Lagging
from torch import nn

from rdmarpc import wrap

COLOURS = {
    "forward": ("#4c78a8", "kernels, forward"),
    "backward": ("#72b7b2", "kernels, backward"),
    "activation": ("#f58518", "copies of activations"),
    "gradient": ("#e45756", "copies of gradients"),
}


def body() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(Lagging(20, 2048, 6), nn.ReLU(), Lagging(2048, 2048, 6), nn.Tanh(), Lagging(2048, 4, 6))
    model = wrap(net, places({"0-1": "worker1/0", "2-3": "worker2/1", "4": "worker0/0"}))
    x, y = (tensor.to(gpu.device()) for tensor in batches(1, 512, 20)[0])
    for _ in range(2):  # the first one sets up
        model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
    model.close()


def scenario(rank: int) -> None:
    on_driver(body, rank)


def draw(events: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    steps = sorted(e["ts"] for e in spans if e["cat"] == "model" and e["name"].startswith("forward segment 0"))
    start = steps[4] - 200
    shown = [e for e in spans if e["cat"] == "gpu" and e["ts"] > start]
    rows = sorted({f"worker{e['pid']}  {named[e['pid'], e['tid']]}" for e in shown})
    figure, axes = plt.subplots(figsize=(12, 3.6))
    for e in shown:
        row = rows.index(f"worker{e['pid']}  {named[e['pid'], e['tid']]}")
        colour = next(colour for name, (colour, _) in COLOURS.items() if e["name"].startswith(name[0]))
        axes.barh(row, e["dur"] / 1e3, left=(e["ts"] - start) / 1e3, color=colour, height=0.7, edgecolor="white", linewidth=0.4)
    for colour, label in COLOURS.values():
        axes.barh(0, 0, color=colour, label=label)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    what = "in software" if gpu.TYPE == "softgpu" else torch.cuda.get_device_name()
    axes.set_title(f"one step of four micro-batches over three workers, GPU {what}", fontsize=10)
    axes.legend(fontsize=8, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    import gpu_timeline  # so that the workers find the scenario by name

    gpu.build()
    with tempfile.TemporaryDirectory() as folder:
        slow = {"SOFTCUDA_DELAY_US": "1500"}
        options: dict[str, Any] = {"gpu": True, "timeout": 100, "transport": "cuda", "environment": slow}
        results(run_group(gpu_timeline.scenario, 3, timeline=folder, **options))
        draw(json.loads((Path(folder) / "timeline.json").read_text())["traceEvents"], sys.argv[1])

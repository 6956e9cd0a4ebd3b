"""The picture of message sizes: time against bytes, a panel for each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from ..harness.findings import Findings, size_text
from ..harness.pictures import BLUE, QUIET, SKY, STYLE, VERMILLION, plain_logarithmic, save

LOOKS = {
    "grpc": (QUIET, "-"),
    "torch_rpc": (VERMILLION, "-"),
    "rdmarpc": (SKY, "-"),
    "sender_copy": (BLUE, "--"),
    "zero_copy": (BLUE, "-"),
}


def draw_sizes(findings: Findings, job: dict[str, Any], titles: dict[str, str], path: Path) -> None:
    """A panel for each device that was measured: log-log lines, with the tenth to ninetieth percentile of rounds around."""
    spreads = {(each["what"], each["size"]): each for each in findings.as_dict({})["samples"]}
    devices = [device for device in job["devices"] if any(what.endswith(f" {device}") for what, _ in spreads)]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(devices), figsize=(8 * len(devices), 6), squeeze=False, sharey=True)
        for axes, device in zip(panels[0], devices):
            for way in job["ways"]:
                found = [spreads[f"{way} {device}", size] for size in job["sizes"] if (f"{way} {device}", size) in spreads]
                colour, style = LOOKS[way]
                sizes = [each["size"] for each in found]
                axes.plot(sizes, [each["median"] for each in found], style, marker="o", color=colour, label=titles[way])
                axes.fill_between(
                    sizes, [each["p10"] for each in found], [each["p90"] for each in found], color=colour, alpha=0.15
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            plain_logarithmic(axes.yaxis)
            axes.set_xticks(job["sizes"], [size_text(size) for size in job["sizes"]], fontsize=10)
            axes.set_xlabel("size of a tensor")
            axes.set_title(device, loc="left")
            axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
        panels[0][0].set_ylabel("microseconds a step (median)")
        panels[0][0].legend(frameon=False, fontsize=11)
        save(figure, path)

"""Draws the picture of the rooms: ``python docs/house.py > docs/house.svg``. A room stands above what it imports."""

from __future__ import annotations

from html import escape

WIDTH, LEFT, ROW, GAP, PAD = 980, 176, 30, 6, 12
INK, GREY = "#1b2a41", "#4a5a70"

# Storey: folder, what it is for, colour of its band and of its rooms; then rows of rooms from the top: (name, what it holds).
# A name without a slash stands for files at the storey's root.
STOREYS = [
    (
        "experiments/",
        ["what we show"],
        ("#f4f1ea", "#e3dccb"),
        [
            [("paper_runs/", "all, one after the other"), ("programs/", "the same, in three libraries")],
            [("latency/", "calls and copies"), ("exchange/", "gradients, sums"), ("training/", "models that learn")],
            [("harness/", "all share")],
        ],
    ),
    (
        "rdmarpc/",
        ["what users call:", "torch.distributed.rpc", "and models over workers"],
        ("#e9f1ea", "#c9dfcd"),
        [
            [
                ("optim", "torch's distributed optimizer"),
            ],
            [
                ("servers/", "parameter servers and who trains with them; owners' part of the optimizer"),
            ],
            [("api, autograd, nn, ...", "torch's names")],
            [("tools/", "counters, timelines, doctor; this package under torch's names, in all libraries")],
            [("collectives/", "a backend of torch.distributed: calls in order, over lanes between the ranks")],
            [("places/", "tensors at workers: what is posted, the streams that run it; wrap")],
            [("calls/", "one worker: both sides of a call, futures, shutdown")],
            [("references/", "values that stay, handles that travel")],
            [("gradients/", "contexts and backward passes over calls")],
            [
                ("links/", "frames to one peer, landing places"),
                ("links/group/", "who is there"),
                ("links/polling/", "who reads"),
            ],
            [("message/", "what a call carries")],
            [("base/", "this process's worker, futures, values in stream order")],
        ],
    ),
    (
        "graph/",
        ["what moves, as data"],
        ("#e8eff7", "#c3d6ea"),
        [
            [("show", "what crosses, as tables and pictures")],
            [("fragments", "what was posted, as a data-flow graph")],
        ],
    ),
    (
        "transport/",
        ["how it moves:", "Device, Channel,", "Region, Transfer"],
        ("#f7ecea", "#edcfc9"),
        [
            [("kinds", "devices by name; each peer by the fastest that reaches it")],
            [("cuda/", "shm, and GPU memory by copies on side streams"), ("exchange/", "streams among many, sums")],
            [("shm/", "one host: one memcpy"), ("tcp/", "sockets"), ("verbs/", "InfiniBand, RoCE")],
            [("gpu/", "the CUDA driver, GPU memory"), ("nic/", "which RDMA port, its native objects")],
            [("device, channel, notify", "the contract")],
            [("tls/", "TLS 1.3 around streams"), ("memory/", "the arena; what peers may touch")],
            [("peers/", "admits peers, tells a silent one from a busy one")],
            [("words/", "shared words and the compiled loops over them"), ("region, errors", "descriptors, the error tree")],
        ],
    ),
]


def text(x: float, y: float, words: str, size: int = 13, weight: str = "normal", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{fill}">{escape(words)}</text>'


def room(x: float, y: float, width: float, fill: str, name: str, holds: str) -> list[str]:
    lines = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{ROW}" rx="4" fill="{fill}"/>']
    words = (
        f'<tspan font-weight="bold">{escape(name)}</tspan><tspan dx="8" font-size="12" fill="{GREY}">{escape(holds)}</tspan>'
    )
    return [*lines, f'<text x="{x + 10:g}" y="{y + 20:g}" font-size="13" fill="{INK}">{words}</text>']


def storey(y: float, folder: str, purpose: list[str], fills: tuple[str, str], rows: list[list[tuple[str, str]]]) -> list[str]:
    """One band, from ``y`` down."""
    band, box = fills
    height = band_height(rows)
    lines = [f'<rect x="16" y="{y:g}" width="{WIDTH - 32}" height="{height:g}" rx="8" fill="{band}"/>']
    lines.append(text(32, y + 31, folder, 16, "bold"))
    lines += [text(32, y + 52 + 17 * n, words, 12, fill=GREY) for n, words in enumerate(purpose) if height > 60 or n == 0]
    for number, row in enumerate(rows):
        top = y + PAD + number * (ROW + GAP)
        share = [len(name) * 1.2 + len(holds) + 4 for name, holds in row]
        free = WIDTH - 32 - PAD - LEFT - GAP * (len(row) - 1)
        left = float(16 + LEFT)
        for (name, holds), part in zip(row, share, strict=True):
            width = free * part / sum(share)
            lines += room(left, top, width, box, name, holds)
            left += width + GAP
    return lines


def band_height(rows: list[list[tuple[str, str]]]) -> float:
    return max(len(rows) * (ROW + GAP) - GAP + 2 * PAD, 64)


def picture() -> str:
    lines, y = [], 52.0
    for folder, purpose, fills, rows in STOREYS:
        lines += storey(y, folder, purpose, fills, rows)
        y += band_height(rows) + 10
    size = f'viewBox="0 0 {WIDTH} {y + 6:g}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">']
    head += [f'<rect width="{WIDTH}" height="{y + 6:g}" rx="10" fill="#ffffff"/>']
    head += [text(16, 34, "The rooms. Imports go down: a room uses rooms below it, never one above or beside it.", 15, "bold")]
    return "\n".join([*head, *lines, "</svg>"])


if __name__ == "__main__":
    print(picture())

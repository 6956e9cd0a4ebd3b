"""Whether what workers wrote down in a trial is what was promised."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from lasting import ownerless

from .diary import ranks_in
from .trial import PEER_TIMEOUT_S, Fault, Trial

LIAR = 2
Entry = dict[str, Any]
Times = list[tuple[int, int]]
_MEMORY_MIB = 200
_DESCRIPTORS = 2
_IN_CALLBACK = re.compile(r"running the callback: (PeerLost|ArenaFull)\b")
"""How torch wraps what a callback of a future raises."""
_AFTER_A_LOSS = re.compile(r"has left the group|before it had joined|group was destroyed")
_PRINTED = re.compile(r"^(?:Exception ignored in|Exception in thread rdmarpc|Fatal Python error).*", re.MULTILINE)


def judge(
    trial: Trial, entries: list[Entry], times: Times, lag: float, exits: dict[int, int | None], hung: set[int]
) -> list[str]:
    """One line for each thing that should not have been."""
    problems = []
    for entry in entries:
        event = entry["event"]
        if event == "wrong":
            problems.append(f"wrong data: worker{entry['rank']} {entry['kind']} {entry['touched']}: {entry['text'][:500]}")
        elif event == "escaped":
            problems.append(f"escaped: worker{entry['rank']}: {entry['type']}: {entry['text'][:200]}")
        elif event == "fault failed":
            problems.append(f"the fault failed: worker{entry['rank']}: {entry['text'][:200]}")
        elif entry["rank"] == LIAR and trial.workload == "tampered":
            continue  # it gets what it deserves
        elif event == "error" and not hung and (why := _wrong_error(trial, entry, times)):
            problems.append(
                f"wrong error: worker{entry['rank']} {entry['kind']} {entry['touched']}: {why}: "
                f"{entry['type']}: {' '.join(entry['text'].split())[:300]}"
            )
        elif event == "slow" and (why := _disturbed(trial, entry, times, lag)):
            problems.append(f"disturbed: worker{entry['rank']} {entry['kind']} {entry['touched']}: {why}")
        elif event == "left" and not hung and (leaks := _leaks(entry)):
            errors = [each for each in entries if each["event"] == "error" and each["rank"] == entry["rank"]]
            problems += leaks + [f"its last error: {each['kind']}: {each['text'][:300]}{each['trace']}" for each in errors[-1:]]
    for rank, code in exits.items():
        if code not in _expected_exits(trial, rank) and rank not in hung:
            problems.append(f"worker{rank} exited with {code}")
    return _first_of_each(problems)


def _first_of_each(problems: list[str]) -> list[str]:
    """Of problems of one kind (the words before the second colon) the first three."""
    seen: dict[str, int] = {}
    found = []
    for line in problems:
        key = line.split(":")[0]
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3:
            found.append(line)
    return found + [f"({count - 3} more of: {key})" for key, count in seen.items() if count > 3]


def _expected_exits(trial: Trial, rank: int) -> set[int | None]:
    codes: set[int | None] = {0}
    for fault in trial.faults:
        if fault.victim == rank:
            codes |= {"kill": {-9}, "stop": {-9}, "exit": {3}, "raise": {1}}.get(fault.kind, set())
    return codes


def _wrong_error(trial: Trial, entry: Entry, times: Times) -> str:
    """Why this error should not have been, or empty."""
    kind, tree, rank = entry["kind"], _classes(entry), entry["rank"]
    if any(fault.kind == "arena" for fault in trial.faults) and {"ArenaFull", "TransferTimeout"} & set(tree):
        return "" if kind not in ("init", "shutdown") else "these need no memory of messages"
    if any(fault.kind == "descriptors" for fault in trial.faults) and _out_of_descriptors(trial, entry):
        return ""
    if trial.workload == "collective" and _given_up(trial, entry):
        return ""
    if entry["kind"] in ("end", "liar"):
        return ""  # what closes then says is known already
    lethal = [fault for fault, (began, _) in zip(trial.faults, times) if fault.lethal and 0 < began <= entry["at"]]
    victims = {fault.victim for fault in lethal}
    if kind == "call" and trial.workload == "groups" and _left_meanwhile(entry):
        return ""
    if trial.workload == "groups" and kind in ("join", "leave") and not victims:
        return "" if "PeerLost" in tree and kind == "leave" else "nothing had happened"
    if not victims:
        return "nothing had happened"
    if kind == "again":
        return f"it does not concern worker {sorted(victims)}"
    if _says(entry, "CLOSED") and "PeerLost" in entry["text"] + entry["type"]:
        return ""  # who heard of the loss first has left
    if trial.workload == "collective" and _AFTER_A_LOSS.search(entry["text"]):
        return ""  # because of that
    if "this tensor was not computed" in entry["text"]:
        return ""  # what follows from the loss
    if _says(entry, "RAISED") and any(fault.kind == "socket" for fault in lethal):
        return ""  # it is the other end of that connection
    if _says(entry, "RAISED") and victims & set(ranks_in(entry["text"])):
        return ""  # and says why
    if any(fault.phase == "shutdown" for fault in lethal) and victims & set(ranks_in(entry["text"])):
        return ""  # it touches somebody who has left because of that
    concerned = victims & {*entry["touched"], rank}
    if not concerned:
        return f"it does not concern worker {sorted(victims)}"
    if kind in ("init", "join"):
        return "" if {"PeerLost", "TransferTimeout"} & set(tree) else "of another kind"
    if not {"PeerLost", "TransferTimeout"} & set(tree):
        return "of another kind"
    if kind == "connect":
        return ""  # of a bare device: who is at an address that does not answer, nobody knows
    if rank in victims or kind == "shutdown" or any(fault.kind == "socket" for fault in lethal):
        return ""  # whom it lost depends on what happened to it, or who left before it
    if not set(entry["named"]) & victims:
        return f"it names {entry['named']}, lost was {sorted(victims)}"
    return ""


def _given_up(trial: Trial, entry: Entry) -> bool:
    """A collective that a member has given up, by name."""
    victims = {fault.victim for fault in trial.faults if fault.kind == "interrupt"}
    return "RdmaError" in _classes(entry) and bool(victims & {entry["rank"], *ranks_in(entry["text"])})


def _says(entry: Entry, status: str) -> bool:
    """Whether an error has a status, or one does that it has wrapped: torch's errors of callbacks are text."""
    return entry["status"] == status or f"status={status}]" in entry["text"]


def _left_meanwhile(entry: Entry) -> bool:
    """A visitor of a group went before it was called, or during a call."""
    gone = "PeerLost" in entry["tree"] or "could not find destination" in entry["text"]
    return gone and any(rank >= 2 for rank in entry["touched"])


def _out_of_descriptors(trial: Trial, entry: Entry) -> bool:
    """A named error at, or about, the worker that had no descriptor left, or of somebody who left because of that."""
    victims = {fault.victim for fault in trial.faults if fault.kind == "descriptors"}
    concerned = {entry["rank"], *entry["touched"], *(ranks_in(entry["text"]) if _says(entry, "RAISED") else ())}
    named = "RdmaError" in _classes(entry) or entry["type"] == "OSError"  # of a file that a statement opens
    return named and bool(victims & concerned)


def _classes(entry: Entry) -> list[str]:
    """Of an error, and of one of ours that it wraps."""
    wrapped = _IN_CALLBACK.search(entry["text"])
    return entry["tree"] if wrapped is None else [*entry["tree"], wrapped[1], "RdmaError"]


def _disturbed(trial: Trial, entry: Entry, times: Times, lag: float) -> str:
    """Why an operation should not have taken so long: it does not depend on any victim."""
    victims = {fault.victim for fault in trial.faults}
    if not victims:
        return ""
    if {*entry["touched"], entry["rank"]} & victims or entry["kind"] in (
        "init",
        "join",
        "wrap",
        "serve",
        "shutdown",
        "leave",
        "connect",
        "program",
    ):
        return ""
    if any(fault.kind in ("delay", "arena", "callbacks") for fault in trial.faults):
        return ""
    limit = PEER_TIMEOUT_S + lag
    return f"{entry['took']:.1f} s although no victim was concerned (limit {limit:.1f} s)" if entry["took"] > limit else ""


def _leaks(entry: Entry) -> list[str]:
    before, after, who = entry["before"], entry["after"], f"worker{entry['rank']}"
    found = []
    if entry["threads"]:
        found.append(f"leak: {who} has threads left: {', '.join(entry['threads'])[:200]}")
    if after["descriptors"] > before["descriptors"] + _DESCRIPTORS:
        found.append(f"leak: {who} had {before['descriptors']} descriptors, has {after['descriptors']}: {entry['open'][-12:]}")
    if after["memory"] > before["memory"] + _MEMORY_MIB:
        found.append(f"leak: {who} had {before['memory']} MiB of its own, has {after['memory']} MiB")
    return found


def printed(folder: Path) -> list[str]:
    """What nobody should read: errors of our threads, and of what is collected."""
    return [f"printed: {path.stem}: {line}" for path in folder.glob("*.log") for line in _PRINTED.findall(path.read_text())]


def left_behind(entries: list[Entry], shared: set[str]) -> list[str]:
    """When all processes have ended: nobody listens at their addresses, and nothing without owner is in ``/dev/shm``."""
    found = []
    addresses = [
        part for entry in entries if entry["event"] == "address" for part in entry["text"].replace(",", "|").split("|")
    ]
    ids = {address.rsplit(":", 1)[-1] for address in addresses if "shm:" in address}
    for line in Path("/proc/net/unix").read_text().splitlines():
        if "@rdmarpc-" in line and line.split("@rdmarpc-")[-1].strip() in ids:
            found.append(f"leak: a socket is left: {line.split()[-1]}")
    limit = time.monotonic() + 2.0
    while (new := ownerless(shared)) and time.monotonic() < limit:
        time.sleep(0.1)
    return found + [f"leak: left in /dev/shm: {name}" for name in sorted(new)]


def lethal(faults: tuple[Fault, ...]) -> bool:
    return any(fault.lethal for fault in faults)

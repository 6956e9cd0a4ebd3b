"""Which secret a group takes, what is refused, and that nobody else gets in who reads the store."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from called import identity
from group import results, run_group
from ports import free_port

import rdmarpc as rpc
from rdmarpc.base import here
from rdmarpc.links.connecting import _HELLO, _HELLO_MAGIC
from rdmarpc.links.group import members
from rdmarpc.transport import RdmaError, open_device
from rdmarpc.transport.shm import device as shm

NOBODY = 65534
SECRET = "random text that all know"


def as_nobody(function, *args):
    """What it returns, or raises, when another user of this host runs it."""
    ours, theirs = os.pipe()
    "a host".encode("idna")  # may not find the module any more
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            found = function(*args)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(theirs, pickle.dumps(found))
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        found = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    return found


def break_in(device: str, port: int) -> str:
    """With all that the store tells, as worker 1."""
    claims = dist.PrefixStore("rdmarpc/0", dist.TCPStore("127.0.0.1", port, is_master=False))
    meeting = hashlib.sha256(b"".join(claims.get(f"claim/{rank}") for rank in range(2))).hexdigest()[:32]
    store = dist.PrefixStore(meeting, claims)
    told = store.get("secret") if store.check(["secret"]) else b"anything else, 16"
    address = next(field for field in _texts(store.get("worker/0")) if field.startswith(f"{device}:")).encode()
    with open_device(device, secret=told) as ours:
        try:
            ours.connect(address, hello=_HELLO.pack(_HELLO_MAGIC, 1) + bytes(64), timeout=20.0)
        except RdmaError as error:
            return type(error).__name__
    return "connected"


def _texts(record: bytes) -> list[str]:
    return [field for field in json.loads(json.loads(record)[0]) if isinstance(field, str)]


def attacked(device, port, meeting):
    if meeting.rank == 2:
        meeting.hear("met/0", "met/1")
        found = as_nobody(break_in, device, port)
        meeting.say("tried")
        return found
    meeting.join(world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    meeting.say(f"met/{meeting.rank}")
    meeting.hear("tried")
    assert rpc.rpc_sync(f"worker{1 - meeting.rank}", identity, (5,)) == 5
    rpc.shutdown()
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user takes root")
@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_another_user_of_the_host_does_not_get_in(device):
    scenario = partial(attacked, device, free_port())
    assert results(run_group(scenario, 3, dynamic=True, transport=device))[2] in ("AuthenticationError", "NotSupported")


def of_two_users(meeting):
    """As their system sees them."""
    members._namespace, shm._same_user = lambda kind: meeting.rank, lambda sock: False
    meeting.join(world_size=2)
    other = f"worker{1 - meeting.rank}"
    assert rpc.rpc_sync(other, identity, (5,)) == 5
    meeting.step("called", 2)
    way = here.current().channel(other).device.name
    rpc.shutdown()
    return way


def test_two_users_of_a_host_with_one_secret_reach_each_other_over_tcp():
    assert results(run_group(of_two_users, 2, dynamic=True, transport="auto", secret=SECRET)) == ["tcp", "tcp"]


def calls(rank):
    assert rpc.rpc_sync(f"worker{1 - rank}", identity, (rank,)) == rank
    rpc.shutdown()
    return "fine"


def stored(meeting):
    meeting.join(world_size=2)
    found = Path(meeting._place).read_bytes()
    meeting.step("read", 2)
    rpc.shutdown()
    secret, _ = members.user_secret()
    return secret in found, bool(re.search(rb"rdmarpc/0/\w+/secret", found))


def test_nothing_of_a_secret_is_in_the_store():
    assert results(run_group(stored, 2, dynamic=True)) == [(False, False)] * 2


def elsewhere(meeting):
    """Worker 1 is on another host."""
    if meeting.rank == 1:
        members.host_id = lambda: "another host"
    meeting.join(world_size=2)
    return calls(meeting.rank)


def test_several_hosts_need_a_secret():
    for outcome in run_group(elsewhere, 2, dynamic=True, transport="tcp"):
        assert outcome.error == "AuthenticationError", outcome
        for text in ("2 hosts", "export RDMARPC_SECRET=$(openssl rand -hex 32)", "srun", "torchrun", "RDMARPC_INSECURE=1"):
            assert text in outcome.text


@pytest.mark.parametrize(
    "options", [{"environment": {"RDMARPC_SECRET": SECRET}}, {"insecure": True}, {"environment": {"RDMARPC_INSECURE": "1"}}]
)
def test_several_hosts_with_a_secret_or_by_name_without(options):
    assert results(run_group(elsewhere, 2, dynamic=True, transport="tcp", **options)) == ["fine", "fine"]


def meets_in_a_file(meeting):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rdmarpc").addHandler(handler)
    assert elsewhere(meeting) == "fine"
    return [text for text in said if "2 hosts meet in one file (file://" in text and "tcp://HOST:PORT" in text]


def test_several_hosts_that_meet_in_a_file_are_warned():
    found = results(run_group(meets_in_a_file, 2, dynamic=True, transport="tcp", environment={"RDMARPC_SECRET": SECRET}))
    assert [len(warnings) for warnings in found] == [1, 0]


def private(folder: Path, mode: int = 0o700) -> dict[str, str]:
    folder.mkdir(mode)
    return {"XDG_RUNTIME_DIR": str(folder)}


def joins_alone(meeting):
    if meeting.rank:
        meeting.hear("first")
    try:
        meeting.join()
    finally:
        meeting.say("first" if meeting.rank == 0 else "second")
    meeting.hear("second")
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_containers_of_one_host_that_share_no_files(tmp_path, device):
    apart = {rank: {"environment": private(tmp_path / f"{rank}")} for rank in range(2)}
    for outcome in run_group(calls, 2, transport=device, each=apart):
        assert outcome.error == "AuthenticationError" and "containers" in outcome.text, outcome
        assert all(f"{tmp_path}/{rank}/secret-" in outcome.text for rank in range(2))
    apart = {rank: {"environment": {**apart[rank]["environment"], "RDMARPC_SECRET": SECRET}} for rank in range(2)}
    assert results(run_group(calls, 2, transport=device, each=apart)) == ["fine", "fine"]


def test_a_dynamic_group_of_workers_that_share_no_files(tmp_path):
    apart = {rank: {"environment": private(tmp_path / f"{rank}")} for rank in range(2)}
    first, second = run_group(joins_alone, 2, dynamic=True, each=apart)
    assert first.error == "" and second.error == "AuthenticationError" and "export RDMARPC_SECRET=" in second.text


def test_a_secret_for_some_only_is_named():
    for outcome in run_group(calls, 3, each={1: {"secret": SECRET}}):
        assert outcome.error == "AuthenticationError", outcome
        assert "worker1 (rank 1) was given a job secret, and worker0 (rank 0), worker2 (rank 2) not" in outcome.text


def test_an_empty_secret_is_none():
    assert results(run_group(calls, 2, secret="", environment={"RDMARPC_SECRET": ""})) == ["fine", "fine"]


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="has 8 bytes, and 16 at least"):
        rpc.RpcBackendOptions(secret="password")
    (outcome,) = run_group(calls, 1, environment={"RDMARPC_SECRET": "password"})
    assert outcome.error == "ValueError" and "RDMARPC_SECRET: the job secret has 8 bytes" in outcome.text


def test_a_secret_from_a_file(tmp_path):
    path = tmp_path / "secret"
    where = {"environment": {"RDMARPC_SECRET_FILE": str(path)}}
    (outcome,) = run_group(calls, 1, **where)
    assert outcome.error == "AuthenticationError" and f"RDMARPC_SECRET_FILE: there is no file {path}" in outcome.text
    path.write_text(SECRET + "\n")
    path.chmod(0o640)
    (outcome,) = run_group(calls, 1, **where)
    assert outcome.error == "AuthenticationError" and f"chmod 600 {path}" in outcome.text
    path.chmod(0o600)
    assert results(run_group(calls, 2, **where, each={1: {"environment": {"RDMARPC_SECRET": SECRET}}})) == ["fine", "fine"]

"""Encrypted streams: what is on the wire, who gets in, what is left. ``tcp+tls`` in other modules: the contract over them."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transport_peer import ENCRYPTED, C, Pair, Peer, accept, make, works
from wire import Wire

from rdmarpc.transport import (
    AuthenticationError,
    AutoDevice,
    Device,
    NotSupported,
    PeerLost,
    RdmaError,
    RemoteRegion,
    TlsOptions,
    TransferTimeout,
)

T = 30.0
SECRET = ENCRYPTED["secret"]
OTHER = b"another secret of tests"
RDMA = {"tls": TlsOptions(rdma_in_clear=True), "secret": SECRET}
Open = Callable[..., Device]
on_rdma = pytest.mark.rdma


@pytest.fixture
def kind() -> str:
    return "tcp"


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    """``Wire`` to a device; all end with the test."""
    made: list[Wire] = []

    def make_one(device: Device, **how: tuple[int, int]) -> tuple[Wire, bytes]:
        kind, host, port, *rest = device.address.decode().split(":")
        made.append(Wire((host, int(port)), **how))
        return made[-1], ":".join((kind, "127.0.0.1", str(made[-1].port), *rest)).encode()

    yield make_one
    for each in made:
        each.close()


class Authority:
    """Signs certificates; ``options(name)``: those of a worker with a certificate of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.file = folder, str(folder / "authority.pem")
        self._run("req", "-x509", *self._new("authority"), "-subj", "/CN=job", "-out", self.file)

    def options(self, name: str) -> TlsOptions:
        asked, signed, key = (str(self._folder / f"{name}.{end}") for end in ("csr", "pem", "key"))
        self._run("req", *self._new(name), "-subj", f"/CN={name}", "-out", asked)
        signer = ("-CA", self.file, "-CAkey", str(self._folder / "authority.key"), "-CAcreateserial")
        self._run("x509", "-req", "-in", asked, *signer, "-days", "2", "-out", signed)
        return TlsOptions(certificate=signed, key=key, authority=self.file)

    def _new(self, name: str) -> tuple[str, ...]:
        key = str(self._folder / f"{name}.key")
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)

    @staticmethod
    def _run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=T)


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the command openssl")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rdmarpc-tls"]


def sockets() -> int:
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and os.readlink(link).startswith("socket:") for link in links)


def soon(what: Callable[[], bool], seconds: float = T) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


# -- on the wire


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_is_on_the_wire(open_device: Open, wire: Callable[..., tuple[Wire, bytes]], encrypted: bool) -> None:
    """A tensor's bytes and those of a hello are found there without TLS, and not with it."""
    a, b = (open_device("tcp", secret=SECRET, tls=encrypted) for _ in range(2))
    between, address = wire(b)
    channel = a.connect(address, hello=b"the name of a function")
    known = torch.randint(0, 256, (50_000,), dtype=torch.uint8)
    theirs = b.empty(50_000, dtype=torch.uint8, writable=True)
    channel.memcpy(RemoteRegion.load(b.export(theirs)), known).wait(T)
    assert bool((theirs == known).all())
    heard = bytes(between.heard[0])
    assert len(heard) > 50_000
    assert (known[1000:1064].numpy().tobytes() in heard) is not encrypted
    assert (b"the name of a function" in heard) is not encrypted


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("at", [3, 60, 250, 600, 2000, 17_000, 40_000])
def test_a_bit_that_is_changed_on_the_wire_is_an_error(
    open_device: Open, wire: Callable[..., tuple[Wire, bytes]], direction: int, at: int
) -> None:
    a, b = (open_device("tcp", peer_timeout=1.0, **ENCRYPTED) for _ in range(2))
    _, address = wire(b, flip=(direction, at))
    known = torch.randint(0, 256, (50_000,), dtype=torch.uint8)
    theirs, back = b.empty(50_000, dtype=torch.uint8, writable=True).zero_(), a.empty(50_000, dtype=torch.uint8)
    with pytest.raises((AuthenticationError, PeerLost, TransferTimeout)):
        channel = a.connect(address, timeout=3.0)
        remote = RemoteRegion.load(b.export(theirs))
        channel.memcpy(remote, known).wait(T)
        assert bool((theirs == known).all())
        channel.memcpy(back, remote).wait(T)
        assert bool((back == known).all())
    # What came before the change is there; nothing else is.
    theirs = theirs.clone()  # more of it may still come
    assert bool(((theirs == known) | (theirs == 0)).all())


def test_the_end_that_sees_the_change_says_so(open_device: Open, wire: Callable[..., tuple[Wire, bytes]]) -> None:
    a, b = (open_device("tcp", **ENCRYPTED) for _ in range(2))
    _, address = wire(b, flip=(0, 17_000))
    channel = a.connect(address)
    theirs = b.accept(timeout=T)
    remote = RemoteRegion.load(b.export(b.empty(50_000, dtype=torch.uint8, writable=True)))
    with pytest.raises(PeerLost):
        channel.memcpy(remote, torch.zeros(50_000, dtype=torch.uint8)).wait(T)
    with pytest.raises(PeerLost, match="bad record mac") as lost:
        theirs.expect(1).wait(T)
    assert lost.value.status == "TLS"


def test_keys_are_renewed(open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdmarpc.transport.tls.handshake.RENEW_BYTES", 20_000)
    a, b = (open_device("tcp", **ENCRYPTED) for _ in range(2))
    channel = a.connect(b.address)
    known = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    theirs, back = b.empty(1 << 20, dtype=torch.uint8, writable=True), a.empty(1 << 20, dtype=torch.uint8)
    for _ in range(3):
        channel.memcpy(RemoteRegion.load(b.export(theirs)), known).wait(T)
        channel.memcpy(back, RemoteRegion.load(b.export(theirs))).wait(T)
        assert bool((back == known).all())


# -- who gets in


@pytest.mark.parametrize("device", ["tcp", pytest.param("verbs", marks=on_rdma)])
@pytest.mark.parametrize("plain", ["initiator", "acceptor"])
def test_one_end_without_tls_is_an_error_at_both(
    open_device: Open, caplog: pytest.LogCaptureFixture, device: str, plain: str
) -> None:
    tls = ENCRYPTED if device == "tcp" else RDMA
    sealed, clear = open_device(device, **tls), open_device(device, secret=SECRET)
    here, there = (clear, sealed) if plain == "initiator" else (sealed, clear)
    with caplog.at_level(logging.WARNING, "rdmarpc"), pytest.raises(AuthenticationError, match="TLS") as refused:
        here.connect(there.address, timeout=T)
    assert refused.value.hint == "tls at every worker, or at none"
    assert soon(lambda: "refused a connection" in caplog.text)
    assert "TLS" in caplog.text and "tls at every worker" in caplog.text
    works(open_device(device, **tls), sealed)
    works(open_device(device, secret=SECRET), clear)


def test_another_secret_is_an_error_at_both(open_device: Open, caplog: pytest.LogCaptureFixture) -> None:
    a, b = open_device("tcp", tls=True, secret=OTHER), open_device("tcp", **ENCRYPTED)
    with caplog.at_level(logging.WARNING, "rdmarpc"), pytest.raises(AuthenticationError, match="same secret"):
        a.connect(b.address)
    assert soon(lambda: "binder does not verify" in caplog.text)
    works(open_device("tcp", **ENCRYPTED), b)


@needs_openssl
def test_certificates_prove_beside_the_job_secret(open_device: Open, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "job")
    a, b = (open_device("tcp", secret=SECRET, tls=authority.options(name)) for name in ("a", "b"))
    works(a, b)
    assert f"certificates of {authority.file}" in a.explain()
    with pytest.raises(AuthenticationError, match="TLS"):  # a key in place of a certificate
        open_device("tcp", **ENCRYPTED).connect(b.address)
    with pytest.raises(AuthenticationError, match="TLS"):
        a.connect(open_device("tcp", **ENCRYPTED).address)
    with pytest.raises(AuthenticationError, match="same job secret"):  # certificates do not stand for the secret
        open_device("tcp", secret=OTHER, tls=authority.options("c")).connect(b.address)


@needs_openssl
@pytest.mark.parametrize("wrong", ["initiator", "acceptor"])
def test_a_certificate_of_another_authority_is_an_error_at_both(
    open_device: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    right = open_device("tcp", secret=SECRET, tls=ours.options("right"))
    # It trusts us, and we do not trust it.
    alien = replace(others.options("alien"), authority=ours.file)
    stranger = open_device("tcp", secret=SECRET, tls=alien)
    here, there = (stranger, right) if wrong == "initiator" else (right, stranger)
    with caplog.at_level(logging.WARNING, "rdmarpc"), pytest.raises(AuthenticationError, match="TLS handshake failed"):
        here.connect(there.address)
    assert soon(lambda: "TLS handshake failed" in caplog.text)
    works(open_device("tcp", secret=SECRET, tls=ours.options("another")), right)


@needs_openssl
def test_files_that_will_not_do(open_device: Open, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "job")
    a, b = authority.options("a"), authority.options("b")
    for wrong in (replace(a, certificate=str(tmp_path / "none")), replace(a, key=b.key), replace(a, authority=a.key)):
        with pytest.raises(NotSupported, match="OpenSSL does not take"):
            open_device("tcp", secret=SECRET, tls=wrong)
    with pytest.raises(ValueError, match="belong together"):
        TlsOptions(certificate=a.certificate)


def test_no_older_version_and_no_certificate_in_place_of_the_key(open_device: Open) -> None:
    device = open_device("tcp", **ENCRYPTED)
    host, port = device.address.decode().split(":")[1:3]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context.maximum_version = version
        with socket.create_connection((host, int(port)), T) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
            context.wrap_socket(sock).recv(1)


@needs_openssl
def test_who_answers_in_place_of_the_acceptor_with_a_certificate(open_device: Open, tmp_path: Path) -> None:
    files = Authority(tmp_path / "own").options("impostor")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    device, place = open_device("tcp", **ENCRYPTED), socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = place.accept()
        with sock, pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(sock, server_side=True).recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(AuthenticationError, match="TLS"):
        device.connect(f"tcp:127.0.0.1:{place.getsockname()[1]}:{'0' * 16}".encode())
    thread.join(T)
    place.close()


@pytest.mark.parametrize("trickle", [b"", b"\x16\x03\x03\x40\x00" + bytes(1000)])
def test_the_handshake_has_one_deadline(open_device: Open, trickle: bytes) -> None:
    device, place = open_device("tcp", **ENCRYPTED), socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def answer() -> None:
        sock, _ = place.accept()
        with sock:
            for at in range(len(trickle)):
                sock.send(trickle[at : at + 1])
                if done.wait(0.02):
                    return
            done.wait(T)

    thread = threading.Thread(target=answer)
    thread.start()
    start = time.monotonic()
    with pytest.raises(TransferTimeout):
        device.connect(f"tcp:127.0.0.1:{place.getsockname()[1]}:{'0' * 16}".encode(), timeout=0.5)
    assert time.monotonic() - start < 10.0
    done.set()
    thread.join(T)
    place.close()


# -- what devices say of it


def test_tls_is_proven_by_the_job_secret(open_device: Open) -> None:
    works(open_device("tcp", tls=True), open_device("tcp", tls=True))  # proven by this user's secret on this host
    with pytest.raises(TypeError, match="tls is True, False or TlsOptions"):
        open_device("tcp", secret=SECRET, tls="yes")
    assert "encryption     TLS 1.3, proven by the job secret" in open_device("tcp", **ENCRYPTED).explain()
    assert "encryption     none" in open_device("tcp", secret=SECRET).explain()
    works(open_device("shm", **ENCRYPTED), open_device("shm", secret=SECRET))  # nothing of it is sent


def test_rdma_carries_nothing_in_clear_unless_told_so(open_device: Open) -> None:
    with pytest.raises(NotSupported, match="what RDMA carries is not encrypted"):
        open_device("verbs", **ENCRYPTED)


@on_rdma
def test_auto_takes_tcp_where_rdma_would_be_in_clear(open_device: Open) -> None:
    a, b = open_device("auto", **ENCRYPTED), open_device("auto", **RDMA)
    assert isinstance(a, AutoDevice) and isinstance(b, AutoDevice)
    assert "verbs" not in a.devices and "not encrypted" in a.refused["verbs"].why
    assert "verbs" in b.devices


@on_rdma
def test_verbs_with_an_encrypted_control_stream(open_device: Open, start_peer: Callable[..., Peer]) -> None:
    peer, device = start_peer("verbs", **RDMA), open_device("verbs", **RDMA)
    peer.start(accept)
    channel = device.connect(peer.address, hello=b"hello")
    assert peer.finish() == b"hello"
    assert "TLS 1.3" in device.explain() and "payload        not encrypted" in device.explain()
    remote = RemoteRegion.load(peer.call(make, "theirs", 5000, 0))
    channel.memcpy(remote, device.empty(5000, dtype=torch.uint8).fill_(C)).wait(T)
    assert bool((torch.frombuffer(bytearray(channel_read(channel, device, remote)), dtype=torch.uint8) == C).all())
    peer.kill()
    with pytest.raises(PeerLost):
        channel.expect(1).wait(T)


def channel_read(channel: object, device: Device, remote: RemoteRegion) -> bytes:
    back = device.empty(remote.nbytes, dtype=torch.uint8)
    channel.memcpy(back, remote).wait(T)  # type: ignore[attr-defined]
    return bytes(back.numpy())


# -- what is left


def test_nothing_is_left(open_device: Open, start_peer: Callable[..., Peer]) -> None:
    """Of streams that were closed here, there, by SIGKILL, and in handshakes that failed."""
    once = [open_device("tcp", **ENCRYPTED) for _ in range(2)]
    works(*once)  # what is opened once
    assert soon(lambda: not threads() and not any(device.counters()["channels"] for device in once))
    device, clear = open_device("tcp", **ENCRYPTED), open_device("tcp", secret=SECRET)
    before = sockets()
    for end in ("here", "there", "killed"):
        peer = start_peer("tcp", **ENCRYPTED)
        peer.start(accept)
        channel = device.connect(peer.address)
        peer.finish()
        if end == "here":
            channel.close()
        elif end == "there":
            peer.stop()
        else:
            peer.kill()
        if end != "here":
            with pytest.raises(PeerLost):
                channel.expect(1).wait(T)
        del channel
        peer.stop() if peer.process.is_alive() else None
        with pytest.raises(RdmaError):
            device.connect(clear.address)
    assert soon(lambda: not threads())
    assert soon(lambda: sockets() <= before)


def test_a_forked_child_keeps_no_stream_open(pair: Pair, open_device: Open) -> None:
    a, b = (open_device("tcp", **ENCRYPTED) for _ in range(2))
    channel = a.connect(b.address)
    theirs = b.accept(timeout=T)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # lives on until the test has seen the end of the stream
        os._exit(0)
    try:
        channel.close()
        with pytest.raises(PeerLost):
            theirs.expect(1).wait(T)
        assert soon(lambda: not threads())
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_closing_waits_until_all_is_out(open_device: Open) -> None:
    """Also what only the relay holds when the device closes."""
    for _ in range(20):
        a, b = (open_device("tcp", **ENCRYPTED) for _ in range(2))
        channel = a.connect(b.address)
        theirs = b.accept(timeout=T)
        target = b.empty(300_000, dtype=torch.uint8, writable=True).zero_()
        channel.memcpy(RemoteRegion.load(b.export(target)), torch.ones(300_000, dtype=torch.uint8), notify=3)
        a.close()
        theirs.expect(3).wait(T)
        assert bool((target == 1).all())
        with pytest.raises(PeerLost, match="CLOSED"):
            theirs.expect(4).wait(T)

"""What a guest boots from: Debian's kernel package, unpacked but never installed, and an initramfs with the modules it needs.

Both lie below ``$XDG_CACHE_HOME/rdmarpc/vm`` and are made once; several processes may ask at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rdmarpc" / "vm"
INIT = Path(__file__).with_name("init.sh")

PACKAGES = {
    "qemu-system-x86": "/usr/bin/qemu-system-x86_64",
    "busybox-static": "/bin/busybox",
    "kmod": "/sbin/depmod",
    "cpio": "/usr/bin/cpio",
    "iproute2": "/usr/bin/rdma",
    "rdma-core": "/usr/lib/udev/rdma_rename",
    "ibverbs-providers": "/etc/libibverbs.d/rxe.driver",
    "ibverbs-utils": "/usr/bin/ibv_devinfo",
    "perftest": "/usr/bin/ib_write_bw",
    "python3-pyverbs": "/usr/lib/python3/dist-packages/pyverbs/__init__.py",
}
"""Debian packages, each with a file that tells that it is there: the guest uses the host's files."""

# The cloud kernel has neither rdma_rxe nor 9p, so it has to be the full one.
KERNEL = "linux-image-amd64"
MODULES = (
    "virtio_pci",
    "virtio_console",
    "9p",
    "9pnet_virtio",
    "overlay",
    "veth",
    "virtio_net",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "sch_netem",
)
# rxe looks its CRC up by name and fails with a bare ENOENT without it; kernels from 6.14 on have it built in.
OPTIONAL = ("crc32_generic", "crc32_pclmul", "virtio_rng")


class Unavailable(RuntimeError):
    """This machine cannot run a guest; the message ends with the command that changes that."""


@dataclass(frozen=True)
class Image:
    version: str
    kernel: Path
    initramfs: Path


def image() -> Image:
    """The kernel and initramfs, from the cache or made now (downloads about 70 MB once)."""
    install_packages()
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / "lock"):
        tree = _kernel_tree()
        version = next((tree / "lib" / "modules").iterdir()).name
        recipe = hashlib.sha256(INIT.read_bytes() + repr((MODULES, OPTIONAL, "1")).encode()).hexdigest()[:12]
        initramfs = CACHE / f"initramfs-{version}-{recipe}"
        if not initramfs.exists():
            _make_initramfs(tree, version, initramfs)
    return Image(version, tree / "boot" / f"vmlinuz-{version}", initramfs)


def install_packages() -> None:
    """Installs what is missing where we may, else raises ``Unavailable`` with the command."""
    missing = [name for name, sign in PACKAGES.items() if not Path(sign).exists() and not Path("/usr" + sign).exists()]
    if not missing:
        return
    command = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)}"
    if shutil.which("apt-get") is None:
        raise Unavailable(
            f"no guest can be started here: needs Debian's packages {', '.join(missing)}, on Debian 12 or later: {command}"
        )
    if os.geteuid() != 0:
        raise Unavailable(f"no guest can be started here: packages are missing. Install them with: sudo sh -c '{command}'")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Unavailable(f"no guest can be started here: `{command}` failed:\n{done.stdout[-500:]}{done.stderr[-1500:]}")


def _kernel_tree() -> Path:
    """The unpacked kernel package: the newest that apt knows when there is none yet, else what is there."""
    found = sorted(CACHE.glob("linux-image-*/lib/modules/*/modules.dep"))
    if found:
        return found[-1].parents[3]
    depends = _run("apt-cache", "depends", "--important", KERNEL)
    match = re.search(r"Depends: (linux-image-\S+)", depends)
    if match is None:
        raise Unavailable(f"apt does not know the package {KERNEL}; the guest's kernel is Debian's: apt-get update")
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _run("apt-get", "download", match[1], cwd=folder, timeout=600)
        package = next(Path(folder).glob("*.deb"))
        tree = Path(folder) / "tree"
        _run("dpkg-deb", "-x", str(package), str(tree), timeout=300)
        if not (tree / "lib").exists():
            (tree / "lib").symlink_to("usr/lib")  # newer packages know /usr only
        version = next((tree / "lib" / "modules").iterdir()).name
        _run("/sbin/depmod", "-b", str(tree), version, timeout=300)
        kept = CACHE / package.stem
        os.rename(tree, kept)
    return kept


def _make_initramfs(tree: Path, version: str, place: Path) -> None:
    """busybox, our init, and the modules in the order in which they are to be loaded."""
    order: list[Path] = []
    for name in MODULES + OPTIONAL:
        depends = _run("/sbin/modprobe", "-d", str(tree), "-S", version, "--show-depends", name, check=name in MODULES)
        for line in depends.splitlines():
            if line.startswith("insmod ") and (module := Path(line.split()[1])) not in order:
                order.append(module)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        root = Path(folder) / "root"
        for name in ("bin", "modules", "proc", "sys", "dev", "lower", "upper", "root"):
            (root / name).mkdir(parents=True)
        shutil.copy("/bin/busybox", root / "bin" / "busybox")
        shutil.copy(INIT, root / "init")
        (root / "init").chmod(0o755)
        for number, module in enumerate(order):
            target = root / "modules" / f"{number:02d}-{module.name}"
            shutil.copy(module, target)
            if module.suffix == ".xz":
                _run("xz", "-d", str(target))
        _run("sh", "-c", "find . | cpio --quiet -o -H newc > ../initramfs", cwd=str(root))
        os.rename(Path(folder) / "initramfs", place)


def _run(*command: str, cwd: str | None = None, timeout: float = 60.0, check: bool = True) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()[-800:]}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

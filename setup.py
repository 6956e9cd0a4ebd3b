"""Packaging: four folders at the top of the repository, one import name, and one more that only torch imports.

`graph`, `transport` and `experiments` are names that a user's own project is likely to have, so none of them is
installed under its bare name: each folder is mapped below `rdmarpc`.
"""

import base64
import hashlib
from pathlib import Path
from zipfile import ZipFile

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel

FOLDERS = {
    "rdmarpc": "rdmarpc",
    "rdmarpc_autoload": "rdmarpc/collectives/autoload",
    "rdmarpc.graph": "graph",
    "rdmarpc.transport": "transport",
    "rdmarpc.experiments": "experiments",
}

TEST = ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "cloudpickle", "expecttest"]
TRAINERS = ["transformers>=5", "lightning", "accelerate"]
_LIBRARIES = [
    "diffusers",
    "segmentation_models_pytorch",
    "monai",
    "kornia",
    "x-transformers",
    "vit-pytorch",
    "neuraloperator",
    "e3nn",
    "pytorch-forecasting",
    "gluonts",
    "zuko",
    "sentence-transformers",
    "denoising-diffusion-pytorch",
]
ZOO = [*TRAINERS, "torchvision", "timm", "torch_geometric", *_LIBRARIES]
_MACHIN = ["GPUtil", "moviepy<2", "tensorboardX", "torchvision", "multiprocess"]
# fedml, machin and fairscale come without what they require (make clients).
CLIENTS = [
    *TEST,
    "torchrl",
    "torchpippy==0.1.1",
    "gym",
    "dill",
    "torchviz",
    "colorlog",
    "torchopt",
    "torch_geometric<2.7",
    *_MACHIN,
]
EXPERIMENTS = ["hydra-core>=1.3", "rich", "matplotlib", "scikit-learn", "psutil"]


def subpackages(root: str, folder: str) -> list[str]:
    """Import names of the packages inside `folder`, as they are called below `root`."""
    return [f"{root}.{name}" for name in find_packages(folder)]


class EditableWheel(editable_wheel):
    """``pip install -e``. To programs in the folder above, a clone that is called ``rdmarpc`` is a package of that name without
    ``__init__.py``, and Python takes it before it asks setuptools' finder, which comes last. So that finder is put first."""

    def run(self) -> None:
        super().run()
        for wheel in Path(self.dist_dir).glob("*.whl"):
            put_finder_first(wheel)


def put_finder_first(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (finder,) = [name.removesuffix(".py") for name in files if name.endswith("_finder.py")]
    (record,) = [name for name in files if name.endswith("/RECORD")]
    line = f"import sys; sys.meta_path.sort(key=lambda finder: getattr(finder, '__module__', '') != '{finder}')\n".encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(line).digest()).decode().rstrip("=")
    files["rdmarpc_finder_first.pth"] = line  # after setuptools' own: they run in the order of their names
    files[record] += f"rdmarpc_finder_first.pth,sha256={digest},{len(line)}\n".encode()
    with ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


setup(
    name="rdmarpc",
    version="0.1.0",
    description="torch.distributed.rpc over one-sided writes: tensors land where they were planned to land",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir=FOLDERS,
    packages=[name for root, folder in FOLDERS.items() for name in [root, *subpackages(root, folder)]],
    package_data={
        "rdmarpc": ["py.typed", "tools/site/*.py", "tools/*.tsv"],
        "rdmarpc.experiments": ["conf/*.yaml", "conf/*/*.yaml"],
    },
    install_requires=["torch>=2.10", "numba>=0.63", "llvmlite>=0.46", "numpy", "cryptography>=42"],
    extras_require={
        "test": TEST,
        "experiments": EXPERIMENTS,
        "examples": ["gymnasium", "scikit-learn"],
        "trainers": TRAINERS,
        "cloudpickle": ["cloudpickle"],
        "verbs": ["ibverbs"],
        "bench": ["grpcio"],
        "ray": ["ray"],
        "kubernetes": ["kubeflow-training", "pyyaml"],
        "slurm": ["hydra-submitit-launcher"],
        "zoo": [*TEST, *ZOO],
        "clients": CLIENTS,
        "dev": ["ruff", "mypy"],
    },
    entry_points={
        "console_scripts": ["rdmarpc = rdmarpc.__main__:main"],
        # torch loads these at the end of its import: init_process_group("rdmarpc") needs no line of ours.
        "torch.backends": ["rdmarpc = rdmarpc_autoload:register"],
    },
    cmdclass={"editable_wheel": EditableWheel},
)

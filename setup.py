"""Packaging: four folders at the top of the repository, one import name.

`graph`, `transport` and `experiments` are names that a user's own project is likely to have, so none of them is
installed under its bare name: each folder is mapped below `rdmarpc`.
"""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = {
    "rdmarpc": "rdmarpc",
    "rdmarpc.graph": "graph",
    "rdmarpc.transport": "transport",
    "rdmarpc.experiments": "experiments",
}

# torch.fx runs tqdm where it is installed, so captures have to do with it.
TEST = ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "cloudpickle", "expecttest", "tqdm"]
TRAINERS = ["transformers>=5", "lightning", "accelerate"]
ZOO = [*TRAINERS, "torchvision", "timm", "torch_geometric"]
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


setup(
    name="rdmarpc",
    version="0.1.0",
    description="torch.distributed.rpc over one-sided writes: tensors land where they were planned to land",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir=FOLDERS,
    packages=[name for root, folder in FOLDERS.items() for name in [root, *subpackages(root, folder)]],
    package_data={"rdmarpc": ["py.typed", "standing_in/site/*.py"], "rdmarpc.experiments": ["conf/*.yaml", "conf/*/*.yaml"]},
    install_requires=["torch>=2.10", "llvmlite>=0.44", "numpy"],
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
    entry_points={"console_scripts": ["rdmarpc = rdmarpc.cli:main"]},
)

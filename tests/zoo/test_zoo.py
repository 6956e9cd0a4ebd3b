"""The zoo's quick form: models and loops of torch alone, and one of each family of the ``zoo`` extra where that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import around_loops, families, rare_loops, state_loops
from .plain_models import ENTRIES as MODELS
from .tour import visit
from .training_loops import ENTRIES as LOOPS
from .zoo_tables import BEGIN, END, HEAD, line, read, summary

PLAIN = ("LSTM tagger", "tied language model", "MoE, by tokens", "DLRM", "FNO", "UNet", "kinds that stay here")
STEPS = ("gradient accumulation", "OneCycleLR", "two optimizers", "frozen and back", "GAN", "micro-batches")
FIRST = {
    "torchvision": ["squeezenet1_1"],
    "timm": ["resnet10t"],
    "transformers": ["BERT", "GPT-2"],
    "architectures": ["mamba2, causal"],
    "torch_geometric": ["GCN"],
    "trainers": ["Lightning"],
}


def all_as_expected(family: str, names: list[str]) -> None:
    rows = list(visit(family, names))
    assert {row.name for row in rows} == set(names)
    assert not (strange := [line(row) for row in rows if not row.expected]), "\n".join(strange)


def test_models_of_torch_alone():
    all_as_expected("plain", list(PLAIN))


def test_loops_over_a_model_of_torch_alone():
    all_as_expected("loops", list(STEPS))


TABLES = {"around": around_loops.LOOPS, "rare": rare_loops.LOOPS, "state": state_loops.LOOPS}
FORKING = {"DataLoader with processes"}  # beside threads of torch's: for ``make zoo``


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(TABLES))
def test_loops_of_a_table(name):
    """Each equal to one process, or refused by the name that its entry has."""
    all_as_expected("loops", [entry for entry in TABLES[name] if entry not in FORKING])


@pytest.mark.parametrize("family", sorted(FIRST))
def test_one_of_a_family(family):
    if absent := families.missing(family):
        pytest.skip(f"needs the zoo extra ({', '.join(absent)})")
    all_as_expected(family, FIRST[family])


def test_the_zoo_is_as_large_as_it_says():
    assert len(MODELS) >= 30 and len(LOOPS) >= 30


def test_the_page_tells_what_the_table_has():
    docs = Path(__file__).parents[2] / "docs"
    rows = read(docs / "models.tsv")
    assert summary(rows) == (docs / "models.md").read_text(encoding="utf-8").partition(BEGIN + "\n")[2].partition(END)[0]
    assert rows == sorted(rows) and all(len(row) == len(HEAD) for row in rows)


@pytest.mark.parametrize("family", families.NEEDS)
def test_the_table_has_every_entry(family):
    if absent := families.missing(family):
        pytest.skip(f"needs the zoo extra ({', '.join(absent)})")
    told = {entry for of, entry, *_ in read(Path(__file__).parents[2] / "docs" / "models.tsv") if of == family}
    entries = set(families.entries(family))
    if family in ("architectures", "libraries"):  # no rule makes the others small
        entries &= told
    assert told == entries, "run: make zoo"

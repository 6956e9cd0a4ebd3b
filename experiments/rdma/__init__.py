"""The ``verbs`` device beside perftest (``bench_verbs``)."""

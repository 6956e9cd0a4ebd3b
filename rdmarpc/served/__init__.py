"""``serve``: a model that computes at its worker, with its parameters kept and stepped by servers."""

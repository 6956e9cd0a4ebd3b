"""``serve``: a model that computes here, with its parameters at servers."""

"""The group of workers: how one gets in, who else is in, how one gets out."""

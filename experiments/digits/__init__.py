"""Training on scikit-learn's digits (``train``)."""

"""Clients behind a slow link: network namespaces, and rounds of federated learning."""

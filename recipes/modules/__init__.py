"""LightningModules: plain models and their training, unaware of pipelines."""
